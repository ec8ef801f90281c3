"""TCP, between hosts.

Anyone may connect to an owner's port, so before anything else both sides prove that they know the cluster's token. The
owner's data go from its memory to the socket, and from the socket into the reader's memory. They are not encrypted.
"""

import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec

from serving.transfer.agent import Piece, TransferError
from serving.transfer.links import Link, Links, check_welcome
from serving.transfer.memory import Memory
from serving.transfer.network import connect, listen
from serving.transfer.owner import Owner
from serving.transfer.proven import MIN_TOKEN_BYTES, Token, prove
from serving.transfer.stream import Stream
from serving.transfer.way import OnNotice, OnTurn, OwnerAddress
from serving.transfer.wire import ID_BYTES, MAX_PIECES, WELCOME, expect_done, leave_notice, read_request


class TcpAddress(OwnerAddress, frozen=True, tag="tcp"):
    """The address at which it listens."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Tcp:
    """The way over TCP."""

    address_kind = TcpAddress
    needs_handle = False

    def __init__(self, host: str, token: Token | None) -> None:
        """Prepare it.

        Args:
            host: the address of this host to listen at and to give to others.
            token: returns the cluster's current token.
        """
        self._host = host
        self._token = token
        self._id = b""
        self._memory: Memory | None = None
        self._owner: Owner | None = None
        self._place = ""
        self._links: Links[TcpAddress] = Links(self._dial)

    async def open(self, memory: Memory, on_notice: OnNotice, *, id: str) -> TcpAddress:
        """Listen at a free port.

        Raises:
            TransferError: there is no token, or this host has no such address.
        """
        self._secret()
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(self._host).is_unspecified:
                raise TransferError(
                    f"{self._host} is not an address that others can reach: choose one of this host", "refused"
                )
        self._memory, self._id = memory, bytes.fromhex(id)
        try:
            listener = await listen(self._host)
        except (OSError, UnicodeError) as error:
            raise TransferError(f"a port for KV cannot be opened at {self._host!r}: {error}", "refused") from error
        address = TcpAddress(id=id, num_bytes=len(memory.view), host=listener.host, port=listener.port)
        self._place = _place(address)
        self._owner = Owner(memory.view, on_notice, id=id, welcome=self._welcome)
        self._owner.serve(listener)
        return address

    def reaches(self, owner: TcpAddress) -> bool:
        """Return true: only a try can show it."""
        return True

    async def read(self, owner: TcpAddress, pieces: Sequence[Piece], on_turn: OnTurn) -> None:
        """Request pieces, and receive them into their places."""
        assert self._memory is not None
        view = self._memory.view

        async def talk(link: Link) -> None:
            for start in range(0, len(pieces), MAX_PIECES):
                asked = pieces[start : start + MAX_PIECES]
                await link.stream.send(read_request(asked))
                await expect_done(link.stream)
                for _, target, num_bytes in asked:
                    await link.stream.receive_into(view[target : target + num_bytes])

        await self._use(owner, talk, on_turn)

    async def notify(self, owner: TcpAddress, notice: bytes, on_turn: OnTurn) -> None:
        """Leave a notice."""
        await self._use(owner, lambda link: leave_notice(link.stream, notice), on_turn)

    async def close(self) -> None:
        """Hang up on everybody."""
        self._links.close()
        if self._owner is not None:
            await self._owner.close()

    async def _use(self, owner: TcpAddress, talk: Callable[[Link], Awaitable[None]], on_turn: OnTurn) -> None:
        """Talk to an owner; if it refuses, try once more on another connection: TCP's checksums miss some bits that flip."""
        try:
            await self._links.use(owner, talk, on_turn)
        except TransferError as error:
            if error.kind != "refused":
                raise
            await self._links.use(owner, talk, on_turn)

    async def _welcome(self, stream: Stream, words: bytes) -> None:
        await prove(stream, self._place, self._secret(), is_caller=False)
        await stream.send(words)

    async def _dial(self, owner: TcpAddress) -> Link:
        link = Link(Stream(await connect(owner.host, owner.port)))
        try:
            await prove(link.stream, _place(owner), self._secret(), is_caller=True)
            check_welcome(await link.stream.receive(len(WELCOME) + ID_BYTES), owner.id)
            await link.stream.send(self._id)
        except BaseException:
            link.close()
            raise
        return link

    def _secret(self) -> bytes:
        token = b"" if self._token is None else self._token()
        if len(token) < MIN_TOKEN_BYTES:
            raise TransferError(
                f"KV over TCP needs the cluster's token; it has {len(token)} bytes, expected at least "
                f"{MIN_TOKEN_BYTES}: etcd stores it (--etcd-endpoints); without etcd, choose shm",
                "refused",
            )
        return token


def _place(address: TcpAddress) -> str:
    """Return the name that a proof is bound to; proofs of the request plane name `tcp:`."""
    return f"kv:{address.host}:{address.port}"

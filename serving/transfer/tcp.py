"""TCP, between hosts.

Anyone may connect to an owner's port, so before anything else both sides prove that they know the cluster's token
(`serving/runtime/proof.py`). What an owner sends goes from its memory to the socket, and from the socket into the
reader's memory. It is not encrypted.
"""

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from serving.runtime.proof import NONCE_BYTES, Handshake, ProofError
from serving.transfer.agent import Piece, TransferError
from serving.transfer.links import Link, Links, check_welcome
from serving.transfer.memory import Memory
from serving.transfer.owner import Owner
from serving.transfer.stream import Stream
from serving.transfer.way import OnNotice, OnTurn, OwnerAddress
from serving.transfer.wire import ID_BYTES, MAX_PIECES, WELCOME, expect_done, leave_notice, read_request

MIN_TOKEN_BYTES = 16
BACKLOG = 1024

SILENCE_S = 30
"""After which the system asks whether the other host is still there."""

MAX_PROOF_BYTES = 256
"""Of what is taken at once before the other side has proven itself."""

Token = Callable[[], bytes]


class TcpAddress(OwnerAddress, frozen=True, tag="tcp"):
    """Where it listens."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Tcp:
    """The way over TCP."""

    address_kind = TcpAddress

    def __init__(self, host: str, token: Token | None) -> None:
        """Prepare it.

        Args:
            host: the address of this host to listen at, which others are told.
            token: returns what the processes of this cluster know, as it is now.
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
            TransferError: there is no token, or no such host here.
        """
        self._secret()
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(self._host).is_unspecified:
                raise TransferError(
                    f"{self._host} is no address that others can reach: name one of this host", "refused"
                )
        self._memory, self._id = memory, bytes.fromhex(id)
        try:
            listener = await self._listen()
        except (OSError, UnicodeError) as error:
            raise TransferError(f"no port for KV can be opened at {self._host!r}: {error}", "refused") from error
        address = TcpAddress(id=id, num_bytes=len(memory.view), host=self._host, port=listener.getsockname()[1])
        self._place = _place(address)
        self._owner = Owner(memory.view, on_notice, id=id, welcome=self._welcome)
        self._owner.serve(listener)
        return address

    def reaches(self, owner: TcpAddress) -> bool:
        """Return true: that shows when it is tried."""
        return True

    async def read(self, owner: TcpAddress, pieces: Sequence[Piece], on_turn: OnTurn) -> None:
        """Ask for pieces, and receive them where they belong."""
        assert self._memory is not None
        view = self._memory.view

        async def talk(link: Link) -> None:
            for start in range(0, len(pieces), MAX_PIECES):
                asked = pieces[start : start + MAX_PIECES]
                await link.stream.send(read_request(asked))
                await expect_done(link.stream)
                for _, target, num_bytes in asked:
                    await link.stream.receive_into(view[target : target + num_bytes])

        await self._links.use(owner, talk, on_turn)

    async def notify(self, owner: TcpAddress, notice: bytes, on_turn: OnTurn) -> None:
        """Leave a notice."""
        await self._links.use(owner, lambda link: leave_notice(link.stream, notice), on_turn)

    async def close(self) -> None:
        """Hang up on everybody."""
        self._links.close()
        if self._owner is not None:
            await self._owner.close()

    async def _listen(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        family, _, _, _, place = (await loop.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(place)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    async def _welcome(self, stream: Stream, words: bytes) -> None:
        _set_options(stream.socket)
        await self._prove(stream, self._place, is_caller=False)
        await stream.send(words)

    async def _dial(self, owner: TcpAddress) -> Link:
        link = Link(Stream(await _connect(owner)))
        try:
            _set_options(link.stream.socket)
            await self._prove(link.stream, _place(owner), is_caller=True)
            check_welcome(await link.stream.receive(len(WELCOME) + ID_BYTES), owner.id)
            await link.stream.send(self._id)
        except BaseException:
            link.close()
            raise
        return link

    async def _prove(self, stream: Stream, place: str, *, is_caller: bool) -> None:
        """Show that we know the token, and see that the other side does."""
        handshake = Handshake(self._secret(), place, secrets.token_bytes(NONCE_BYTES), is_caller=is_caller)
        is_asked = False
        try:
            await stream.send(handshake.start())
            while not handshake.is_over:
                if answer := handshake.feed(await stream.receive_some(MAX_PROOF_BYTES)):
                    is_asked = True
                    await stream.send(answer)
        except ProofError as error:
            raise TransferError(f"{place} is not trusted: {error}", "refused") from error
        except ConnectionError as error:
            if not is_asked:
                raise
            raise TransferError(f"{place} hung up on our proof: is its token another?", "refused") from error
        stream.put_back(handshake.rest)

    def _secret(self) -> bytes:
        token = b"" if self._token is None else self._token()
        if len(token) < MIN_TOKEN_BYTES:
            raise TransferError(
                f"KV over TCP needs the cluster's token of at least {MIN_TOKEN_BYTES} bytes, and there are {len(token)}: "
                "it lies in etcd (--etcd-endpoints); without etcd choose shm",
                "refused",
            )
        return token


def _place(address: TcpAddress) -> str:
    """Return what a proof is bound to; proofs of the request plane name `tcp:`."""
    return f"kv:{address.host}:{address.port}"


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)


async def _connect(owner: TcpAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(owner.host, owner.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{owner.host!r} is no host's name: {error}") from error
    for number, (family, _, _, _, place) in enumerate(places):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError) or number + 1 == len(places):
                raise
        else:
            return connection
    raise OSError(f"{owner.host!r} has no address")

"""The side channel: where a peer asks how the KV of a request can be read here.

vLLM's connector asks there once for an instance's memory. A mocker's memory is reached through an agent
(`serving/transfer`), and which blocks are whose changes, so it is asked for each request.

owner                                               peer that will read
(both prove that they know the secret, if there is one)
WELCOME                                  -->
                                         <--        its id
                                         <--        length, Ask
length, where that KV is (RemoteKv),     -->        or why it is nowhere (text)
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta
from xxhash import xxh3_128_hexdigest

from serving.engines.kv.params import Name, RemoteKv, WantedKv
from serving.engines.mock.kv.nixl_peer import MIN_SECRET_BYTES, SECRET, NixlPeer
from serving.engines.side_channel import is_loopback
from serving.runtime.proof import GREETING
from serving.runtime.world import world
from serving.transfer.agent import TransferError
from serving.transfer.door import Door
from serving.transfer.links import Deadlines, Link, Links
from serving.transfer.network import connect, listen
from serving.transfer.proven import prove
from serving.transfer.stream import Stream
from serving.transfer.way import OwnerAddress
from serving.transfer.wire import ID_BYTES

WELCOME = b"dyna-nixl/1\n"
assert len(WELCOME) == len(GREETING), "whoever knows no secret tells them apart"
LENGTH = struct.Struct("<I")
MAX_ASK_BYTES = 4096
MAX_ANSWER_BYTES = 64 << 10
ASK_S = 5.0
"""How long an answer may take: as long as vLLM waits for one."""

STALL_S = 30.0


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Where is this request's KV?"""

    engine_id: Name
    request_id: Name


class ChannelAddress(OwnerAddress, frozen=True, tag="side channel"):
    """Where an instance answers that."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    engine_id: str


Find = Callable[[str], RemoteKv | None]

_decode_ask = msgspec.msgpack.Decoder(Ask).decode
_decode_answer = msgspec.msgpack.Decoder(RemoteKv | str).decode


class SideChannel:
    """Asks peers, and answers them."""

    def __init__(self, peer: NixlPeer, find: Find) -> None:
        """Prepare it.

        Args:
            peer: who we are.
            find: returns where the KV of a request is, by the name that we gave it.
        """
        self.port = peer.port
        """Where we listen; if any port will do, this is known once it is open."""
        self._peer = peer
        self._find = find
        self._token = peer.secret.encode()
        self._id = world().entropy.randbytes(ID_BYTES)
        self._door = Door(self._welcome, self._serve)
        self._links: Links[ChannelAddress] = Links(self._dial)
        self._deadlines = Deadlines()

    async def open(self) -> None:
        """Listen.

        Raises:
            TransferError: the port cannot be used.
        """
        try:
            listener = await listen(self._peer.host, self._peer.port)
        except (OSError, UnicodeError) as error:
            raise TransferError(
                f"the side channel cannot listen at {self._peer.host}:{self._peer.port}: {error}; choose another "
                "VLLM_NIXL_SIDE_CHANNEL_PORT",
                "refused",
            ) from error
        self.port = listener.port
        self._door.open(listener)

    async def ask(self, wanted: WantedKv) -> RemoteKv:
        """Ask a peer where KV is.

        Raises:
            TransferError: it is nowhere, or the peer cannot be asked.
        """
        found: RemoteKv | str = ""
        question = msgspec.msgpack.encode(Ask(wanted.remote_engine_id, wanted.remote_request_id))
        address = _address(wanted)
        self._check(address)

        async def talk(link: Link) -> None:
            nonlocal found
            await link.stream.send(LENGTH.pack(len(question)) + question)
            found = _answer(await _receive(link.stream, MAX_ANSWER_BYTES))

        async with self._deadlines.within(ASK_S, f"asking {address.host}:{address.port} for KV") as begin:
            await self._links.use(address, talk, begin)
        if isinstance(found, str):
            raise TransferError(found, "lost")
        return found

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._deadlines.close()
        self._links.close()
        await self._door.close()

    def _check(self, address: ChannelAddress) -> None:
        if not self._token and not is_loopback(address.host):
            raise TransferError(
                f"KV at {address.host} is on another host; expected {SECRET}, the same text of at least {MIN_SECRET_BYTES} "
                "bytes as there",
                "refused",
            )

    # As the one who asks

    async def _dial(self, address: ChannelAddress) -> Link:
        link = Link(Stream(await connect(address.host, address.port)))
        stream = link.stream
        try:
            if self._token:
                await prove(stream, _place(address.engine_id), self._token, is_caller=True)
            _check_welcome(await stream.receive(len(WELCOME)))
            await stream.send(self._id)
        except BaseException:
            link.close()
            raise
        return link

    # As the one who is asked

    async def _welcome(self, stream: Stream) -> None:
        if self._token:
            await prove(stream, _place(self._peer.engine_id), self._token, is_caller=False)
        await stream.send(WELCOME)

    async def _serve(self, stream: Stream) -> None:
        while True:
            size = LENGTH.unpack(await stream.receive(LENGTH.size))[0]  # may take as long as the peer lives
            async with asyncio.timeout(STALL_S):
                answer = msgspec.msgpack.encode(self._answer_to(await _take(stream, size, MAX_ASK_BYTES)))
                await stream.send(LENGTH.pack(len(answer)) + answer)

    def _answer_to(self, question: bytes) -> RemoteKv | str:
        try:
            asked = _decode_ask(question)
        except ValueError as error:
            raise TransferError(f"a question that cannot be read: {error}", "refused") from error
        if asked.engine_id != self._peer.engine_id:
            return f"engine {asked.engine_id} is not here; this is engine {self._peer.engine_id}"
        found = self._find(asked.request_id)
        if found is None:
            return f"the KV of request {asked.request_id} is not here: it was read, or its lease has expired"
        return found


def _address(wanted: WantedKv) -> ChannelAddress:
    """Return where to ask; its id keeps connections to different engines apart."""
    place = f"{wanted.remote_host}:{wanted.remote_port}:{wanted.remote_engine_id}"
    return ChannelAddress(
        id=xxh3_128_hexdigest(place.encode()),
        num_bytes=1,
        host=wanted.remote_host,
        port=wanted.remote_port,
        engine_id=wanted.remote_engine_id,
    )


def _place(engine_id: str) -> str:
    """Return the name that a proof is bound to: a proxy may name a host differently, but not an engine."""
    return f"nixl:{engine_id}"


def _check_welcome(said: bytes) -> None:
    if said == GREETING:
        raise TransferError(f"it wants a proof of a secret; expected {SECRET}, the same text as there", "refused")
    if said != WELCOME:
        raise TransferError("no stand-in answers there", "refused")


async def _receive(stream: Stream, most: int) -> bytes:
    size = LENGTH.unpack(await stream.receive(LENGTH.size))[0]
    return await _take(stream, size, most)


async def _take(stream: Stream, size: int, most: int) -> bytes:
    if size > most:
        raise TransferError(f"a message of {size} bytes; expected at most {most}", "refused")
    return await stream.receive(size)


def _answer(data: bytes) -> RemoteKv | str:
    try:
        answer: RemoteKv | str = _decode_answer(data)
    except ValueError as error:
        raise TransferError(f"an answer that cannot be read: {error}", "refused") from error
    return answer

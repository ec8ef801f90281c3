"""The owner's side of connections: others are let in, read its memory and leave notices.

It has no threads: what is sent goes from memory to the socket piece by piece, each connection in its turn. So a reader
that stops reading holds up nobody, and loses its connection after a while.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

from serving.transfer.agent import TransferError
from serving.transfer.links import MAX_LINKS
from serving.transfer.stream import CHUNK_BYTES, Stream
from serving.transfer.way import OnNotice
from serving.transfer.wire import DONE, HEADER, ID_BYTES, MAX_BODY_BYTES, PLACE, READ, WELCOME, refusal

log = logging.getLogger(__name__)

PROOF_S = 5.0
"""How long a connection may take to prove itself."""

MAX_UNPROVEN = 64
"""Connections that have not proven themselves yet; beyond, the oldest is dropped."""

MAX_CONNECTIONS = 1024
"""Of all readers; beyond, the oldest is dropped. An honest reader that finds its idle connection gone makes another."""

MAX_OF_ONE_READER = 2 * MAX_LINKS
"""Beyond, its oldest is dropped; twice what it uses, for it may replace some before we see that they are gone."""

STALL_S = 30.0
"""How long a reader may take nothing of what it asked for, or leave a request half said."""

Welcome = Callable[[Stream, bytes], Awaitable[None]]


class Owner:
    """Serves one memory on one listening socket."""

    def __init__(self, memory: memoryview, on_notice: OnNotice, *, id: str, welcome: Welcome) -> None:
        """Prepare to serve.

        Args:
            memory: what others may read.
            on_notice: is called in the loop.
            id: says which start of which agent this is.
            welcome: makes sure of who is there, and sends the words of welcome.
        """
        self._memory = memory
        self._on_notice = on_notice
        self._id = bytes.fromhex(id)
        self._welcome = welcome
        self._unproven: dict[asyncio.Task[None], None] = {}  # the oldest first, here and below
        self._proven: dict[asyncio.Task[None], bytes] = {}  # and whose they are
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def serve(self, listener: socket.socket) -> None:
        """Let others in; the listener is ours from now on."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Hang up on everybody."""
        tasks = [*filter(None, [self._accepting]), *self._unproven, *self._proven]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # no file handles are left; there will be some
                log.warning("a connection for KV could not be taken: %s", error)
                await asyncio.sleep(1.0)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            stream = Stream(connection)
            task = asyncio.create_task(self._attend(stream))
            self._unproven[task] = None
            task.add_done_callback(lambda task, stream=stream: self._end(task, stream))  # type: ignore[misc]

    async def _attend(self, stream: Stream) -> None:
        """Serve one connection, once it has proven itself."""
        try:
            async with asyncio.timeout(PROOF_S):
                await self._welcome(stream, WELCOME + self._id)
                reader = await stream.receive(ID_BYTES)
            self._admit(reader)
            await self._serve(stream)
        except (OSError, TransferError) as error:  # a stranger is told nothing
            log.debug("a connection for KV ended: %s", error or "it took too long")

    async def _serve(self, stream: Stream) -> None:
        while True:
            header = await stream.receive(HEADER.size)  # may take as long as the reader lives
            try:
                await self._answer(stream, *HEADER.unpack(header))
            except TransferError as error:
                await self._send(stream, refusal(str(error)))
                raise

    def _admit(self, reader: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._unproven[task]
        same = [other for other, whose in self._proven.items() if whose == reader]
        if len(same) >= MAX_OF_ONE_READER:
            self._drop(same[0])
        elif len(self._proven) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._proven)))
        self._proven[task] = reader

    def _drop(self, task: asyncio.Task[None]) -> None:
        self._forget(task)
        task.cancel()

    def _end(self, task: asyncio.Task[None], stream: Stream) -> None:
        self._forget(task)
        stream.close()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._proven.pop(task, None)

    async def _answer(self, stream: Stream, kind: int, length: int) -> None:
        if (most := MAX_BODY_BYTES.get(kind)) is None:
            raise TransferError(f"there are no requests of kind {kind}", "refused")
        if length > most:
            raise TransferError(f"a request of {length} bytes; at most {most} were expected", "refused")
        async with asyncio.timeout(STALL_S):
            body = await stream.receive(length)
        if kind == READ:
            places = self._places(body)
            await self._send(stream, HEADER.pack(DONE, 0))
            for data in self._contents(places):
                await self._send(stream, data)
        else:
            asyncio.get_running_loop().call_soon(self._on_notice, body)
            await self._send(stream, HEADER.pack(DONE, 0))

    async def _send(self, stream: Stream, data: bytes | memoryview) -> None:
        async with asyncio.timeout(STALL_S):
            await stream.send(data)

    def _places(self, body: bytes) -> list[tuple[int, int]]:
        if len(body) % PLACE.size:
            raise TransferError(f"a request of {len(body)} bytes is no list of places", "refused")
        places = list(PLACE.iter_unpack(body))
        for start, num_bytes in places:
            if start + num_bytes > len(self._memory):
                raise TransferError(f"{num_bytes} bytes at {start} are not all in these {len(self._memory)}", "refused")
        return places

    def _contents(self, places: list[tuple[int, int]]) -> Iterator[bytes | memoryview]:
        """Yield the bytes at these places, a chunk at a time; small ones are joined, for a system call costs more."""
        small: list[memoryview] = []
        num_small = 0
        for start, num_bytes in places:
            for at in range(start, start + num_bytes, CHUNK_BYTES):
                part = self._memory[at : min(at + CHUNK_BYTES, start + num_bytes)]
                if num_small + len(part) > CHUNK_BYTES:
                    yield b"".join(small) if len(small) > 1 else small[0]
                    small, num_small = [], 0
                small.append(part)
                num_small += len(part)
        if small:
            yield b"".join(small) if len(small) > 1 else small[0]

"""The owner's side of connections: others read its memory and leave notices.

Data go from memory to the connection piece by piece, and the connections take turns. A reader that stops reading loses its
connection after a while.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from serving.transfer.agent import TransferError
from serving.transfer.door import Door
from serving.transfer.network import Listener
from serving.transfer.stream import CHUNK_BYTES, Stream
from serving.transfer.way import OnNotice
from serving.transfer.wire import DONE, HEADER, MAX_BODY_BYTES, PLACE, READ, WELCOME, refusal

STALL_S = 30.0
"""How long a reader may accept nothing of what it asked for, or leave a request incomplete."""

Welcome = Callable[[Stream, bytes], Awaitable[None]]


class Owner:
    """Serves one memory to those who connect to one listener."""

    def __init__(self, memory: memoryview, on_notice: OnNotice, *, id: str, welcome: Welcome) -> None:
        """Prepare to serve.

        Args:
            memory: the memory that others may read.
            on_notice: is called in the loop.
            id: identifies this start of this agent.
            welcome: checks who is there, and sends the welcome.
        """
        self._memory = memory
        self._on_notice = on_notice
        words = WELCOME + bytes.fromhex(id)
        self._door = Door(lambda stream: welcome(stream, words), self._serve)

    def serve(self, listener: Listener) -> None:
        """Let others in; from now on this object owns the listener."""
        self._door.open(listener)

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._door.close()

    async def _serve(self, stream: Stream) -> None:
        while True:
            header = await stream.receive(HEADER.size)  # may take as long as the reader lives
            try:
                await self._answer(stream, *HEADER.unpack(header))
            except TransferError as error:
                await self._send(stream, refusal(str(error)))
                raise

    async def _answer(self, stream: Stream, kind: int, length: int) -> None:
        if (most := MAX_BODY_BYTES.get(kind)) is None:
            raise TransferError(f"there is no request of kind {kind}", "refused")
        if length > most:
            raise TransferError(f"a request of {length} bytes; expected at most {most}", "refused")
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
            raise TransferError(f"a request of {len(body)} bytes is not a list of places", "refused")
        places = list(PLACE.iter_unpack(body))
        for start, num_bytes in places:
            if start + num_bytes > len(self._memory):
                raise TransferError(
                    f"{num_bytes} bytes at {start} go beyond the {len(self._memory)} bytes of memory", "refused"
                )
        return places

    def _contents(self, places: list[tuple[int, int]]) -> Iterator[bytes | memoryview]:
        """Yield the bytes at these places, a chunk at a time; join small ones, because a system call costs more."""
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

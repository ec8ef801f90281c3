"""A KV store that all workers share: a separate process that keeps chunks of any format in its memory.

It does not look into chunks: their readers verify them. Room is reserved before the bytes arrive, and a chunk that is being
sent keeps its room until that is done, so that memory stays within the limit plus half a megabyte for each connection. If
the sizes of chunks differ much, gaps in the heap may make the process up to twice as large.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from serving.kv_tiers.config import KvStoreServiceConfig
from serving.kv_tiers.tier import Tally, TierCounts, TierError
from serving.kv_tiers.wire import (
    ANSWER,
    COUNTS,
    ENTRY_BYTES,
    KEY_BYTES,
    LOOK_UP,
    READ,
    REMOVE,
    REQUEST,
    TOUCH,
    WELCOME,
    StoreRequest,
    drain,
    group_size,
    pack_keys,
    place_of,
    receive_group,
    refusal,
    send_chunks,
    time_for,
    unpack_keys,
)
from serving.runtime.world import world
from serving.transfer.agent import TransferError
from serving.transfer.door import Door
from serving.transfer.network import listen
from serving.transfer.proven import Token, prove
from serving.transfer.stream import Stream
from serving.transfer.wire import DONE, ID_BYTES

log = logging.getLogger(__name__)

Name = tuple[int, int]
"""Identity of the format, and key."""


class Entry:
    """A chunk."""

    __slots__ = ("data", "num_readers")

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data
        self.num_readers = 0
        """Connections on which the chunk is being sent."""


class StoreShelf:
    """Chunks within bounded memory; the least recently used is evicted first."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.num_used = 0
        self.entries: OrderedDict[Name, Entry] = OrderedDict()
        self.tally = Tally()

    @property
    def counts(self) -> TierCounts:
        """What it contains and did; the capacity is in bytes because chunks differ in size."""
        return self.tally.counts._replace(num_chunks=len(self.entries), capacity=self.num_bytes)

    @property
    def num_filled(self) -> int:
        """How much of the room in use has chunks (bytes); the rest is reserved for those that are coming."""
        return sum(len(entry.data) + ENTRY_BYTES for entry in self.entries.values())

    def num_leading(self, names: Sequence[Name], chunk_bytes: int = 0) -> int:
        """Return how many of the first chunks are there (of this size, if one is given)."""
        for number, name in enumerate(names):
            entry = self.entries.get(name)
            if entry is None or (chunk_bytes and len(entry.data) != chunk_bytes):
                return number
        return len(names)

    def touch(self, names: Sequence[Name]) -> None:
        """Mark chunks as used; the beginning of a prompt is evicted last."""
        for name in reversed(names):
            if name in self.entries:
                self.entries.move_to_end(name)

    def take(self, count: int, chunk_bytes: int, protected: frozenset[Name], gone: list[Name]) -> bool:
        """Reserve room for `count` chunks, evicting others except the protected; return whether it fits, add evicted ones to `gone`."""
        wanted = count * (chunk_bytes + ENTRY_BYTES)
        while self.num_used + wanted > self.num_bytes:
            victim = next(
                (name for name, entry in self.entries.items() if not entry.num_readers and name not in protected), None
            )
            if victim is None:
                return False
            self.drop(victim)
            gone.append(victim)
            self.tally.add(num_evicted=1)
        self.num_used += wanted
        return True

    def give_back(self, count: int, chunk_bytes: int) -> None:
        """Release reserved room."""
        self.num_used -= count * (chunk_bytes + ENTRY_BYTES)

    def put(self, name: Name, data: bytes | memoryview) -> None:
        """Put a chunk into reserved room."""
        if name in self.entries:  # another worker was faster
            self.give_back(1, len(data))
        else:
            self.entries[name] = Entry(data)

    def drop(self, name: Name) -> None:
        """Forget a chunk that nobody is reading."""
        self.give_back(1, len(self.entries.pop(name).data))


class StoreServer:
    """See the module."""

    def __init__(self, num_bytes: int, token: Token) -> None:
        """Prepare to keep `num_bytes` bytes for workers that know the token; `token` returns its current value."""
        self.shelf = StoreShelf(num_bytes)
        self._token = token
        self._words = WELCOME + world().entropy.randbytes(ID_BYTES)
        self._place = ""
        self._door = Door(self._welcome, self._serve)

    async def open(self, host: str, port: int) -> int:
        """Listen on a port of this host (0: any free one); return the port.

        Raises:
            TierError: the port cannot be used.
        """
        try:
            listener = await listen(host, port)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise TierError(f"port {port} on {host} cannot be used: {why}; choose another with --port") from error
        self._place = place_of(listener.port)
        self._door.open(listener)
        return listener.port

    async def close(self) -> None:
        """Hang up on everybody and forget everything."""
        await self._door.close()
        self.shelf.entries.clear()

    async def _welcome(self, stream: Stream) -> None:
        await prove(stream, self._place, self._token(), is_caller=False)
        await stream.send(self._words)

    async def _serve(self, stream: Stream) -> None:
        while True:
            request = StoreRequest(*REQUEST.unpack(await stream.receive(REQUEST.size)))  # may take long
            try:
                request.check()
                async with time_for(0):
                    keys = unpack_keys(await stream.receive(request.num_keys * KEY_BYTES))
                await self._answer(stream, request, [(request.identity, key) for key in keys])
            except TransferError as error:
                with suppress(OSError):
                    async with time_for(0):
                        await stream.send(refusal(str(error)))
                raise

    async def _answer(self, stream: Stream, request: StoreRequest, names: list[Name]) -> None:
        shelf = self.shelf
        if request.kind == LOOK_UP:
            await _say(stream, shelf.tally.found(shelf.num_leading(names), len(names)))
        elif request.kind == TOUCH:
            shelf.touch(names)
            await _say(stream, shelf.num_leading(names))
        elif request.kind == READ:
            await self._send(stream, names, request.chunk_bytes)
        elif request.kind == REMOVE:
            for name in dict.fromkeys(names):
                if name in shelf.entries and not shelf.entries[name].num_readers:
                    shelf.drop(name)
            await _say(stream, 0)
        elif request.kind == COUNTS:
            counts = msgspec.msgpack.encode(shelf.counts)
            await _say(stream, len(counts), counts)
        else:
            await self._receive(stream, names, request.chunk_bytes)

    async def _send(self, stream: Stream, names: list[Name], chunk_bytes: int) -> None:
        shelf = self.shelf
        names = names[: shelf.num_leading(names, chunk_bytes)]
        shelf.tally.add(num_read=len(names))
        shelf.touch(names)
        entries = [shelf.entries[name] for name in names]
        for entry in entries:
            entry.num_readers += 1
        try:
            async with time_for(len(entries) * chunk_bytes):
                await stream.send(ANSWER.pack(DONE, len(entries)))
                await send_chunks(stream, [entry.data for entry in entries])
        finally:
            for entry in entries:
                entry.num_readers -= 1

    async def _receive(self, stream: Stream, names: list[Name], chunk_bytes: int) -> None:
        """Receive those chunks that are not here."""
        shelf, num_asked = self.shelf, len(names)
        names = names[: shelf.num_bytes // (chunk_bytes + ENTRY_BYTES)]
        shelf.touch(names)
        is_wanted = [name not in shelf.entries for name in names]
        wanted = [name for name, is_it in zip(names, is_wanted, strict=True) if is_it]
        gone: list[Name] = []
        await _say(stream, len(names), bytes(is_wanted))
        async with time_for(len(wanted) * chunk_bytes):
            num_written = await self._put(stream, wanted, chunk_bytes, frozenset(names), gone)
        shelf.touch(names)
        shelf.tally.add(num_written=num_written, num_refused=len(wanted) - num_written + num_asked - len(names))
        num_there = shelf.num_leading(names, chunk_bytes)
        keys = [key for identity, key in gone if names and identity == names[0][0]]
        await _say(stream, num_there, ANSWER.pack(DONE, len(keys)) + pack_keys(keys))

    async def _put(
        self, stream: Stream, wanted: list[Name], chunk_bytes: int, protected: frozenset[Name], gone: list[Name]
    ) -> int:
        """Receive chunks; return how many of the first there was room for, and add evicted ones to `gone`."""
        shelf, size = self.shelf, group_size(chunk_bytes)
        for start in range(0, len(wanted), size):
            group = wanted[start : start + size]
            if not shelf.take(len(group), chunk_bytes, protected, gone):
                await drain(stream, (len(wanted) - start) * chunk_bytes)
                return start
            try:
                chunks = await receive_group(stream, len(group), chunk_bytes)
            except BaseException:
                shelf.give_back(len(group), chunk_bytes)
                raise
            for name, chunk in zip(group, chunks, strict=True):
                shelf.put(name, chunk if size == 1 else bytes(chunk))
        return len(wanted)


async def _say(stream: Stream, number: int, data: bytes = b"") -> None:
    async with time_for(0):
        await stream.send(ANSWER.pack(DONE, number) + data)


def size_in_words(num_bytes: int) -> str:
    """Return a size in MiB below 1 GiB, else in GiB."""
    mebibytes = num_bytes / (1 << 20)
    return f"{mebibytes:,.3g} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:,.4g} GiB"


async def serve_store(
    config: KvStoreServiceConfig,
    token: Token,
    stopping: asyncio.Event,
    *,
    on_ready: Callable[[], object],
    see: Callable[[StoreServer], object] = lambda _: None,
) -> None:
    """Run a store until the event is set; `see` is given the store once it listens.

    Raises:
        TierError: it cannot listen.
    """
    store = StoreServer(config.num_bytes, token)
    port = await store.open(config.host, config.port)
    log.info("%s for KV at %s:%d", size_in_words(config.num_bytes), config.host, port)
    see(store)
    on_ready()
    try:
        await stopping.wait()
    finally:
        await store.close()

"""The bytes of a mocker's KV beyond its GPU: in host memory, on its disk, and in a store that workers share.

The simulated core decides what is kept in host memory, and its copies between GPU and host take simulated time. The bytes
follow: they are written when a chunk enters host memory, and wiped when it leaves. The tiers behind host memory are real:
the core asks them what they have, and their work takes real time.

    TierStored         a slot of the arena is filled (`host.py`)
    TierRemoved        the slot is free again
    LookUp             which tier has the next chunks, nearest first        -> `engine.answer`
    Read               from a tier into slots of the arena, verified        -> `engine.end_read`
    Write              from the arena into a tier                           -> `engine.end_write`
    a load to the GPU  its chunks are verified in place                     -> `engine.end_check`

A chunk that is wrong or cannot be read ends its read or load, and its blocks are computed instead. A write also ends if the
tier accepts nothing.
"""

import asyncio
import logging
import math
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from time import monotonic

from mocker import BlockChain, DrivenEngine
from mocker.events import KvEvent
from mocker.tiers.config import HostMemory, Tier, TierName
from mocker.tiers.copies import Copy
from mocker.tiers.ranges import Range
from mocker.tiers.work import Found, Hurry, LookUp, Read, TierWork, Write
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size_of
from serving.engines.mock.kv.host import Checking, HostBytes, keys_of
from serving.engines.mock.kv.shelf import scaled_layout
from serving.engines.mock.kv.tier_reports import TierReports
from serving.kv_tiers.blocks import KvLayout
from serving.kv_tiers.files import FileTier
from serving.kv_tiers.store_client import StoreTier, parse_address
from serving.kv_tiers.tier import Changes, ChunkFormat, FolderTakenError, TierCounts, TierError
from serving.router.events import BlocksEvent
from serving.transfer.config import TransferRunConfig
from serving.transfer.proven import Token
from serving.worker.engine import KvTier

log = logging.getLogger(__name__)

LOT_CHUNKS = 32
"""Chunks that are read at once; of a read that is cut short, whole lots count."""

MAX_WRITES = 4
"""Most writes in progress at once."""

MAX_WAITING_WRITES = 256
"""Most waiting writes of chunks that have left host memory; more are not written."""

MAX_FOLDERS = 1024

MAX_NAMED = 2
"""We remember the blocks of this many times the chunks in host memory; what is written to a tier is there, or was lately."""


def with_store(memory: HostMemory | None, transfer: TransferRunConfig) -> HostMemory | None:
    """Put the store, if one is named, behind a rank's host memory.

    Raises:
        ValueError: there is no host memory, or the store's address is not valid.
    """
    if not transfer.kv_store:
        return memory
    parse_address(transfer.kv_store)
    if memory is None:
        raise ValueError(
            f"kv_store is {transfer.kv_store}, and kv_offloading_size is 0; expected host memory, too: KV in the store passes through it"
        )
    store = Tier(
        name="store",
        num_chunks=memory.num_chunks,  # the store itself knows how many it has
        bandwidth=math.inf,
        write_policy=transfer.kv_store_write_policy,
    )
    return replace(memory, tiers=(*memory.tiers, store))


def chunk_format(
    memory: HostMemory, transfer: TransferRunConfig, timing: TimingConfig, *, block_size: int, model: str
) -> ChunkFormat:
    """Return the format of the chunks in a worker's host memory.

    Raises:
        ValueError: the size of its model's KV is unknown.
    """
    size = kv_size_of(timing, block_size=block_size, kv_bytes_per_token=transfer.kv_bytes_per_token)
    block, count = scaled_layout(size, transfer.kv_bytes_scale), memory.blocks_per_chunk
    layout = KvLayout(block.block_bytes * count, block.window_bytes * count, block.num_window_blocks)
    return ChunkFormat.of(layout, model, timing.model or "", timing.kv_cache_dtype, block_size, count)


@dataclass(slots=True)
class Reading:
    """Chunks that are being read into slots of the arena, as far as there are slots."""

    keys: list[int]
    slots: dict[int, memoryview]
    num_read: int = 0


@dataclass(slots=True)
class Moved:
    """Reads or writes of a tier, and their total time."""

    count: int = 0
    seconds: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count and time the work inside."""
        start_s = monotonic()
        try:
            yield
        finally:
            self.count += 1
            self.seconds += monotonic() - start_s


class LiveTiers:
    """The tiers of one rank."""

    def __init__(self, format: ChunkFormat, memory: HostMemory, transfer: TransferRunConfig, token: Token) -> None:
        """Prepare a rank's host memory and the tiers behind it."""
        self._format = format
        self._memory = memory
        self._transfer = transfer
        self._token = token
        self._host = HostBytes(format, memory.num_chunks, self._spawn)
        self._tiers: dict[TierName, FileTier | StoreTier] = {}
        self._changes: dict[TierName, Changes] = {}
        self._reports = TierReports(memory.blocks_per_chunk, MAX_NAMED * memory.num_chunks)
        self._fetches: dict[LookUp | Read, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes = asyncio.Semaphore(MAX_WRITES)
        self._num_writes = 0
        self._reads: dict[TierName, Moved] = {tier.name: Moved() for tier in memory.tiers}
        self._written: dict[TierName, Moved] = {tier.name: Moved() for tier in memory.tiers}
        self._last_load = -1
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Allocate memory, claim a folder, and look for the store.

        Raises:
            TierError: one of them is not available.
        """
        await self._host.arena.start()
        for tier in self._memory.tiers:
            if tier.name == "disk":
                disk = self._tiers["disk"] = await self._disk(tier.num_chunks)
                self._changes["disk"] = disk.changes
            else:
                store = self._tiers["store"] = StoreTier(self._transfer.kv_store, self._format, self._token)
                self._changes["store"] = store.changes
                await store.start()
                self._stack.push_async_callback(store.close)

    def connect(self, engine: DrivenEngine, go_on: Callable[[], object]) -> None:
        """Follow an engine; call `go_on` when something has changed for it."""
        self._engine = engine
        self._go_on = go_on

    @property
    def counts(self) -> dict[str, TierCounts]:
        """Return what each tier contains and did."""
        return {"host": self._host.arena.counts, **{name: tier.counts for name, tier in self._tiers.items()}}

    def load(self) -> tuple[KvTier, ...]:
        """Report what each tier contains and did."""
        use, chunk_bytes = self._engine.host_use(), self._memory.chunk_bytes
        assert use is not None
        host = KvTier(
            "host",
            used_bytes=use.chunks.num_used * chunk_bytes,
            capacity_bytes=self._memory.num_chunks * chunk_bytes,
            num_reads=use.loads.num_copies,
            read_bytes=use.loads.num_bytes,
            read_s=use.loads.busy_s,
            num_writes=use.stores.num_copies,
            write_bytes=use.stores.num_bytes,
            write_s=use.stores.busy_s,
            num_faults=self._host.arena.counts.num_faults,
            num_refused=use.chunks.num_refused,
            num_evicted=use.chunks.num_evicted,
            num_flushes=use.num_flushes,
            stall_s=use.stall_s,
        )
        return (host, *[self._load_of(name, tier.counts) for name, tier in self._tiers.items()])

    def _load_of(self, name: TierName, counts: TierCounts) -> KvTier:
        chunk_bytes, reads, writes = self._memory.chunk_bytes, self._reads[name], self._written[name]
        return KvTier(
            name,
            used_bytes=counts.num_chunks * chunk_bytes,
            capacity_bytes=counts.capacity * chunk_bytes,
            num_asked=counts.num_hits + counts.num_misses,
            num_hits=counts.num_hits,
            num_reads=reads.count,
            read_bytes=counts.num_read * chunk_bytes,
            read_s=reads.seconds,
            num_writes=writes.count,
            write_bytes=counts.num_written * chunk_bytes,
            write_s=writes.seconds,
            num_faults=counts.num_faults,
            num_refused=counts.num_refused,
            num_evicted=counts.num_evicted,
        )

    def note(self, events: Iterable[KvEvent]) -> None:
        """Fill and free slots for what came into host memory and what left it."""
        self._host.note(events)

    def act(self, work: list[TierWork]) -> None:
        """Do what the engine asks, and verify what it loads."""
        for each in work:
            match each:
                case Write():
                    self._spawn(self._write(each)).add_done_callback(partial(self._end_write, each))
                case Hurry(fetch):
                    if fetch in self._fetches:
                        self._fetches[fetch].cancel()
                case LookUp():
                    found: list[Found] = []
                    task = self._fetches[each] = self._spawn(self._look_up(each, found))
                    task.add_done_callback(partial(self._end_look_up, each, found))
                case Read():
                    self._begin_read(each)
        self._check_loads()

    def take_reports(self) -> list[BlocksEvent]:
        """Return what was added to disk and store, and what left them, since the last call; the first call includes a warm disk's KV."""
        return list(self._reports.take(self._changes))

    async def close(self) -> None:
        """End what is in progress, and release everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name, counts in self.counts.items():
            log.info("KV tier %s: %s", name, ", ".join(f"{field} {value}" for field, value in counts._asdict().items()))
        await self._stack.aclose()
        await self._host.arena.close()

    # What the engine asks for

    async def _look_up(self, look_up: LookUp, found: list[Found]) -> None:
        keys, place = self._keys(look_up.sequence.chain, [(look_up.start, look_up.stop)]), 0
        while place < len(keys) and (next_found := await self._find(keys[place:])) is not None:
            name, num_found = next_found
            place += num_found
            found.append(Found(name, look_up.start + place))

    async def _find(self, keys: Several[int]) -> tuple[TierName, int] | None:
        for name, tier in self._tiers.items():
            if num_found := await tier.look_up(keys):
                return name, num_found
        return None

    def _end_look_up(self, look_up: LookUp, found: list[Found], _: asyncio.Task[None]) -> None:
        self.act(self._engine.effects.take_tier_work())  # before the answer: afterwards it cannot be urgent any more
        del self._fetches[look_up]
        self._engine.answer(look_up, found)
        self._go_on()

    def _begin_read(self, read: Read) -> None:
        keys = self._keys(read.sequence.chain, read.ranges)
        reading = Reading(keys, self._host.arena.take(keys))
        task = self._fetches[read] = self._spawn(self._read(read.tier, reading))
        task.add_done_callback(partial(self._end_read, read, reading))
        timeout_s = self._memory.timeout_s + self._memory.timeout_s_per_chunk * read.num_chunks
        if timeout_s < math.inf:
            asyncio.get_running_loop().call_later(timeout_s, task.cancel)

    async def _read(self, name: TierName, reading: Reading) -> None:
        keys, slots = reading.keys, reading.slots
        while reading.num_read < len(keys):
            lot = list(takewhile(slots.__contains__, keys[reading.num_read : reading.num_read + LOT_CHUNKS]))
            with self._reads[name].measured():
                num_come = await self._tiers[name].read(lot, [slots[key] for key in lot])
            reading.num_read += num_come
            if num_come < LOT_CHUNKS:
                break
        if reading.num_read > LOT_CHUNKS:  # chunks that are there are marked as used: the beginning should stay longest
            come = keys[: reading.num_read]
            await self._tiers[name].write(come, [slots[key] for key in come])

    def _end_read(self, read: Read, reading: Reading, _: asyncio.Task[None]) -> None:
        self.act(self._engine.effects.take_tier_work())
        del self._fetches[read]
        come = reading.keys[: reading.num_read]
        self._host.arena.keep(come)
        self._host.arena.discard(reading.slots.keys() - set(come))
        self._engine.end_read(read, reading.num_read)
        self._go_on()

    async def _write(self, write: Write) -> None:
        if not write.is_pinned and self._num_writes >= MAX_WAITING_WRITES:
            return
        self._num_writes += 1
        try:
            keys = self._keys(write.chain, write.ranges)
            async with self._writes:
                await self._host.filled(keys)
                chunks = await self._host.chunks(keys)
                with self._written[write.tier].measured():
                    await self._tiers[write.tier].write(keys, chunks)
        finally:
            self._num_writes -= 1

    def _end_write(self, write: Write, _: asyncio.Task[None]) -> None:
        self._engine.end_write(write)
        self._go_on()

    def _check_loads(self) -> None:
        """Verify the chunks of copies to the GPU that have begun; a copy does not end before that."""
        for load in self._engine.host_loads():
            if load.number > self._last_load:
                self._last_load = load.number
                self._engine.await_check(load)
                checking = Checking(self._keys(load.sequence.chain, load.ranges))
                self._spawn(self._host.check(checking)).add_done_callback(partial(self._end_check, load, checking))

    def _end_check(self, load: Copy, checking: Checking, _: asyncio.Task[None]) -> None:
        self._host.checked(checking, load.num_chunks)
        self._engine.end_check(load, checking.num_good)
        self._go_on()

    # How it is done

    async def _disk(self, num_chunks: int) -> FileTier:
        """Return a disk in the first folder that no other rank on this host uses."""
        base = self._transfer.kv_disk_folder or self._temporary_folder()
        for number in range(MAX_FOLDERS):
            tier = FileTier(Path(base) / str(number), self._format, num_chunks)
            try:
                await tier.start()
            except FolderTakenError:
                continue
            self._stack.push_async_callback(tier.close)
            return tier
        raise TierError(f"{base}: {MAX_FOLDERS} workers already keep their KV in this folder; use another one")

    def _temporary_folder(self) -> str:
        try:
            return self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dynabench-kv-"))
        except OSError as error:
            raise TierError(
                f"a temporary folder for KV cannot be made: {error}; name one with --kv-disk-folder"
            ) from error

    def _keys(self, chain: BlockChain, ranges: Several[Range]) -> list[int]:
        size = self._memory.blocks_per_chunk
        if size > 1:
            chunks = [_blocks(chain, chunk, size) for start, stop in ranges for chunk in range(start, stop)]
            self._reports.learn([blocks for blocks in chunks if len(blocks) == size], self._changes)
        return keys_of(chain, ranges, size)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("KV tiers: %s", error, exc_info=error)


def _blocks(chain: BlockChain, chunk: int, blocks_per_chunk: int) -> list[int]:
    """Return the names of a chunk's blocks."""
    names = [chain.key(block) for block in range(chunk * blocks_per_chunk, (chunk + 1) * blocks_per_chunk)]
    return [name for name in names if isinstance(name, int)]

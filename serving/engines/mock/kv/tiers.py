"""A rank's KV beyond its GPU: what the engine asks of the tiers behind host memory is done here.

Host memory is the engine's own, in simulated time. Behind it are a disk, which is modelled too, and a store that workers share,
which is another process.

    LookUp   which tier has the next chunks, nearest first    -> `engine.answer`
    Read     into host memory, as far as chunks come          -> `engine.end_read`
    Write    to a tier, whether or not it accepts them        -> `engine.end_write`
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial

from foundation.ordered_set import OrderedSet
from mocker import BlockChain, Engine
from mocker.events import KvEvent
from mocker.tiers.config import HostMemory, Tier, TierName
from mocker.tiers.work import Found, Hurry, LookUp, Read, TierWork, Write
from serving.engines.kv.reader import OnUsed
from serving.engines.mock.clock import WallClock
from serving.engines.mock.kv.disk import Disk
from serving.engines.mock.kv.moved import Progress
from serving.engines.mock.kv.store import SharedStore
from serving.kv_tiers.store_client import parse_address
from serving.kv_tiers.tier import ChunkFormat
from serving.router.events import BlocksEvent
from serving.transfer.config import TransferRunConfig
from serving.transfer.proven import Token
from serving.worker.engine import KvTier

log = logging.getLogger(__name__)


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


class LiveTiers:
    """The tiers of one rank."""

    def __init__(
        self,
        memory: HostMemory,
        *,
        format: ChunkFormat | None,
        transfer: TransferRunConfig,
        token: Token,
    ) -> None:
        """Prepare the tiers behind a rank's host memory.

        Args:
            memory: the host memory.
            format: what its chunks are like in the store, if there is one.
            transfer: where the store is.
            token: returns the secret that the processes of our cluster share.
        """
        self._memory = memory
        self._disk: Disk | None = None
        self._store: SharedStore | None = None
        self._tiers: dict[TierName, Disk | SharedStore] = {}
        for tier in memory.tiers:
            if tier.name == "disk":
                self._tiers["disk"] = self._disk = Disk(tier, memory, WallClock())
            else:
                assert format is not None
                self._tiers["store"] = self._store = SharedStore(transfer.kv_store, memory, format, token)
        self._fetches: dict[LookUp | Read, asyncio.Task[None]] = {}
        self._tasks: OrderedSet[asyncio.Task[None]] = OrderedSet()

    async def start(self) -> None:
        """Look for the store."""
        for tier in self._tiers.values():
            await tier.start()

    def watch_reads(self, on_used: OnUsed) -> None:
        """Report the chunks of the store that are used."""
        if self._store is not None:
            self._store.on_used = on_used

    def slow_disk(self, added_s: float) -> None:
        """Make each look-up, read and write of the disk take so much longer (s)."""
        if self._disk is not None:
            self._disk.added_s = added_s

    def fill_disk(self, is_full: bool) -> None:
        """Let the disk have no room, as if others had filled it, or let it have its room again."""
        if self._disk is not None:
            self._disk.is_full = is_full

    def connect(self, engine: Engine, go_on: Callable[[], object]) -> None:
        """Follow an engine; call `go_on` when something has changed for it."""
        self._engine = engine
        self._go_on = go_on

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
            num_refused=use.chunks.num_refused,
            num_evicted=use.chunks.num_evicted,
            num_flushes=use.num_flushes,
            stall_s=use.stall_s,
        )
        return (host, *[tier.load() for tier in self._tiers.values()])

    def act(self, work: list[TierWork]) -> None:
        """Do what the engine asks."""
        for each in work:
            match each:
                case Write():
                    self._spawn(self._tiers[each.tier].write(each)).add_done_callback(partial(self._end_write, each))
                case Hurry(fetch):
                    if fetch in self._fetches:
                        self._fetches[fetch].cancel()
                case LookUp():
                    found: list[Found] = []
                    task = self._fetches[each] = self._spawn(self._look_up(each, found))
                    task.add_done_callback(partial(self._end_look_up, each, found))
                case Read():
                    self._begin_read(each)

    def take_events(self) -> list[KvEvent]:
        """Return what has entered and left the disk since the last call."""
        return [] if self._disk is None else list(self._disk.take_events())

    def take_reports(self) -> list[BlocksEvent]:
        """Return what has entered and left the store since the last call."""
        return [] if self._store is None else self._store.take_reports()

    async def close(self) -> None:
        """End what is in progress, and release everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for tier in self._tiers.values():
            log.info("KV tier %s", tier.load())
            await tier.close()

    async def _look_up(self, look_up: LookUp, found: list[Found]) -> None:
        chain, place = look_up.sequence.chain, look_up.start
        while place < look_up.stop and (more := await self._next(chain, place, look_up.stop)) is not None:
            found.append(more)
            place = more.stop

    async def _next(self, chain: BlockChain, start: int, stop: int) -> Found | None:
        """Return which tier has the next chunks, and up to which."""
        for name, tier in self._tiers.items():
            end = await tier.look_up(chain, start, stop)
            if end > start:
                return Found(name, end)
        return None

    def _end_look_up(self, look_up: LookUp, found: list[Found], _: asyncio.Task[None]) -> None:
        self.act(self._engine.outbox.take_tier_work())  # before the answer: afterwards it cannot be urgent any more
        del self._fetches[look_up]
        self._engine.end_look_up(look_up, found)
        self._go_on()

    def _begin_read(self, read: Read) -> None:
        progress = Progress()
        task = self._fetches[read] = self._spawn(self._tiers[read.tier].read(read, progress))
        task.add_done_callback(partial(self._end_read, read, progress))
        timeout_s = self._memory.timeout_s + self._memory.timeout_s_per_chunk * read.num_chunks
        if timeout_s < math.inf:
            asyncio.get_running_loop().call_later(timeout_s, task.cancel)

    def _end_read(self, read: Read, progress: Progress, _: asyncio.Task[None]) -> None:
        self.act(self._engine.outbox.take_tier_work())
        del self._fetches[read]
        self._engine.end_read(read, progress.num_chunks)
        self._go_on()

    def _end_write(self, write: Write, _: asyncio.Task[None]) -> None:
        self._engine.end_write(write)
        self._go_on()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("KV tiers: %s", error, exc_info=error)

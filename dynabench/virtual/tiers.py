"""Tiers behind host memory, in virtual time: their contents, and their access times.

    LookUp    find which tier has the next chunks, the nearest first; takes the longest look-up time of the tiers
    Read      over the links from the tier; its chunks are not evicted until it ends
    Write     over the links to the tier, of the chunks it lacks; the tier has them once they have arrived

A read that is hurried, or that takes too long, ends with the chunks that have arrived by then.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dynabench.virtual.clock import COMPLETION, Clock
from dynabench.virtual.rank import Rank
from mocker import Sequence as EngineSequence
from mocker.events import TierEvent
from mocker.network.traffic import Traffic
from mocker.tiers.chunk_cache import Uses
from mocker.tiers.config import HostMemory, Tier, TierName
from mocker.tiers.ranges import Range, count
from mocker.tiers.storage import Storage
from mocker.tiers.work import Found, Hurry, LookUp, Read, TierWork, Write
from mocker.timing.choose import SimulatedEngine
from reports.record.records import RequestLog

Publish = Callable[[int, list[TierEvent]], object]
"""Called with the slot of a rank, and events about what entered or left a tier."""


class Tiering:
    """The storage behind the host memory of every rank: a disk for each rank, and a store that all share."""

    def __init__(self, traffic: Traffic, clock: Clock, publish: Publish | None = None) -> None:
        self.of: dict[int, Tiers] = {}
        """The tiers of each rank that has any, by rank number."""
        self._traffic = traffic
        self._clock = clock
        self._publish = publish
        self._store: Storage | None = None

    def connect(self, rank: Rank) -> None:
        """Connect a rank to its tiers, if there are any behind its host memory."""
        memory = rank.engine.host_memory
        if memory is not None and memory.tiers:
            storages = [self._storage(tier, memory, rank.number) for tier in memory.tiers]
            self.of[rank.number] = Tiers(rank, memory, storages, self._traffic, self._clock, self._publish)

    def _storage(self, tier: Tier, memory: HostMemory, number: int) -> "Storage":
        is_shared = tier.name == "store"
        if is_shared and self._store is not None:
            return self._store
        place = self._traffic.links.add_storage(tier.bandwidth, None if is_shared else number, self._clock.now)
        storage = Storage(tier, memory, place=place, has_listener=self._publish is not None)
        if is_shared:
            self._store = storage
        return storage


class SourceColumns:
    """Records which tiers prompt tokens came from, for the tiers that at least one of the engines has."""

    def __init__(self, engines: Iterable[SimulatedEngine], log: RequestLog) -> None:
        memories = [engine.host for engine in engines if engine.host is not None]
        names = {"host": None} if memories else {}
        names |= dict.fromkeys(tier.name for memory in memories for tier in memory.tiers)
        self._columns = [(f"{name}_tokens", getattr(log, f"{name}_tokens")) for name in names]

    def note(self, number: int, sequence: EngineSequence) -> None:
        """Record where the tokens of a request's prompt came from."""
        for name, column in self._columns:
            column[number] = getattr(sequence, name)


class Tiers:
    """The tiers behind the host memory of one rank."""

    def __init__(
        self,
        rank: Rank,
        memory: HostMemory,
        storages: Sequence[Storage],
        traffic: Traffic,
        clock: Clock,
        publish: Publish | None,
    ) -> None:
        self.storages: dict[TierName, Storage] = {storage.tier.name: storage for storage in storages}
        self._rank = rank
        self._engine = rank.engine
        self._memory = memory
        self._lookup_s = max(storage.tier.lookup_s for storage in storages)
        self._traffic = traffic
        self._clock = clock
        self._publish = publish
        self._uses: dict[Read, Uses] = {}  # of the reads in progress
        self._looking_up: set[LookUp] = set()
        rank.on_tier_work = self.act

    def act(self, work: list[TierWork]) -> None:
        """Do the work that the engine requests."""
        for each in work:
            match each:
                case LookUp():
                    self._looking_up.add(each)
                    self._clock.at(self._clock.now + self._lookup_s, COMPLETION, partial(self._look_up, each))
                case Read():
                    self._read(each)
                case Hurry(LookUp() as look_up):
                    self._answer(look_up, [])
                case Hurry(Read() as read):
                    self._cut(read)
                case Write():
                    self._write(each)

    def _look_up(self, look_up: LookUp) -> None:
        chain, start, stop = look_up.sequence.chain, look_up.start, look_up.stop
        found: list[Found] = []
        while start < stop:
            for name, storage in self.storages.items():
                end, _ = storage.cache.find(chain, start, stop)
                if end > start:
                    found.append(Found(name, end))
                    start = end
                    break
            else:
                break
        self._answer(look_up, found)

    def _answer(self, look_up: LookUp, found: list[Found]) -> None:
        """Answer, unless a hurry was answered before."""
        if look_up not in self._looking_up:
            return
        self._looking_up.remove(look_up)
        self._engine.end_look_up(look_up, found)
        self._go_on()

    def _go_on(self) -> None:
        """Carry out the engine's new requests, and wake the rank."""
        self.act(self._engine.outbox.take_tier_work())
        self._rank.wake()

    def _read(self, read: Read) -> None:
        storage = self.storages[read.tier]
        self._uses[read] = storage.begin_read(read.sequence.chain, read.ranges)
        self._traffic.start(
            read,
            partial(self._finish_read, read, read.num_chunks),
            source=storage.place,
            target=self._rank.number,
            num_bytes=read.num_chunks * self._memory.chunk_bytes,
            latency_s=storage.tier.latency_s,
        )
        timeout_s = self._memory.timeout_s + self._memory.timeout_s_per_chunk * read.num_chunks
        if timeout_s < float("inf"):
            self._clock.at(self._clock.now + timeout_s, COMPLETION, partial(self._cut, read))

    def _cut(self, read: Read) -> None:
        """End a read with the chunks that have arrived, unless it has ended."""
        if read in self._uses:
            left = self._traffic.drop(read) / self._memory.chunk_bytes if self._memory.chunk_bytes else 0.0
            self._finish_read(read, int(max(read.num_chunks - left, 0.0)))

    def _finish_read(self, read: Read, num_chunks: int) -> None:
        storage, chain = self.storages[read.tier], read.sequence.chain
        storage.end_read(chain, read.ranges, self._uses.pop(read), num_chunks)
        self._engine.end_read(read, num_chunks)
        self._go_on()

    def _write(self, write: Write) -> None:
        storage = self.storages[write.tier]
        missing = storage.missing(write.chain, write.ranges)
        if not missing:
            self._engine.end_write(write)
            return
        self._traffic.start(
            write,
            partial(self._end_write, write, missing),
            source=self._rank.number,
            target=storage.place,
            num_bytes=count(missing) * self._memory.chunk_bytes,
            latency_s=storage.tier.latency_s,
        )

    def _end_write(self, write: Write, ranges: list[Range]) -> None:
        storage = self.storages[write.tier]
        storage.insert(write.chain, ranges)
        self._engine.end_write(write)
        if self._publish is not None and storage.cache.events:
            events, storage.cache.events = storage.cache.events, []
            self._publish(self._rank.number, events)

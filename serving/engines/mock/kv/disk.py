"""A rank's disk for KV: the model of virtual time, under the real clock.

It holds what `Storage` says. Reads and writes share its bandwidth, each way; no bytes are made for them.
"""

import asyncio

from mocker import BlockChain
from mocker.events import TierEvent
from mocker.network.config import TransferConfig
from mocker.network.links import Links
from mocker.network.traffic import Clock, Traffic
from mocker.tiers.config import HostMemory, Tier
from mocker.tiers.ranges import count
from mocker.tiers.storage import Storage
from mocker.tiers.work import Read, Write
from serving.engines.mock.kv.moved import Moved, Progress, move
from serving.worker.engine import KvTier

RANK = 0
"""The number of the only rank that reaches it."""


class Disk:
    """See the module."""

    def __init__(self, tier: Tier, memory: HostMemory, clock: Clock) -> None:
        """Make an empty disk behind a rank's host memory."""
        links = Links(TransferConfig(bandwidth_gb_s=0))
        links.add_rank(1, clock.now)
        place = links.add_storage(tier.bandwidth, RANK, clock.now)
        self.storage = Storage(tier, memory, place=place, has_listener=True)
        self._tier = tier
        self._traffic = Traffic(links, clock)
        self._reads, self._writes = Moved(), Moved()
        self._num_asked = self._num_hits = 0
        self.added_s = 0.0
        """How much longer each look-up, read and write takes than usual (s)."""
        self.is_full = False
        """Whether it refuses to write, because others have taken its room; it keeps what it has."""

    async def start(self) -> None:
        """Do nothing: it is there."""

    async def close(self) -> None:
        """Do nothing: it holds nothing that outlives it."""

    async def look_up(self, chain: BlockChain, start: int, stop: int) -> int:
        """Return up to which chunk it has them all."""
        await asyncio.sleep(self._tier.lookup_s + self.added_s)
        end, _ = self.storage.cache.find(chain, start, stop)
        self._num_asked += stop - start
        self._num_hits += end - start
        return end

    async def read(self, read: Read, progress: Progress) -> None:
        """Read chunks, which are not evicted meanwhile; a read that is cancelled has brought those that had come by then."""
        storage, chain = self.storage, read.sequence.chain
        there = storage.first_of(chain, read.ranges)  # some may have been evicted since it was asked for them
        uses = storage.begin_read(chain, there)
        with self._reads.measured():
            try:
                await self._move(read, progress, source=storage.place, target=RANK, num_chunks=count(there))
            finally:
                storage.end_read(chain, there, uses, progress.num_chunks)

    async def write(self, write: Write) -> None:
        """Write the chunks that it lacks, if there is room; it has them once they have come."""
        missing = self.storage.missing(write.chain, write.ranges)
        if missing and self.is_full:
            self.storage.num_refused += 1
        elif missing:
            with self._writes.measured():
                await self._move(write, Progress(), source=RANK, target=self.storage.place, num_chunks=count(missing))
            self.storage.insert(write.chain, missing)

    def take_events(self) -> list[TierEvent]:
        """Return what has entered and left it since the last call."""
        events, self.storage.cache.events = self.storage.cache.events, []
        return events

    async def _move(self, key: Read | Write, progress: Progress, *, source: int, target: int, num_chunks: int) -> None:
        """Wait until chunks have passed the disk's link; if that is cancelled, note how many have."""
        chunk_bytes = self.storage.bytes_per_chunk

        def on_cut(left: float) -> None:
            progress.num_chunks = int(max(num_chunks - (left / chunk_bytes if left else 0.0), 0.0))

        await move(
            self._traffic,
            key,
            on_cut=on_cut,
            source=source,
            target=target,
            num_bytes=num_chunks * chunk_bytes,
            latency_s=self._tier.latency_s + self.added_s,
        )
        progress.num_chunks = num_chunks

    def load(self) -> KvTier:
        """Report what it holds and did."""
        storage, chunk_bytes = self.storage, self.storage.bytes_per_chunk
        return KvTier(
            "disk",
            used_bytes=storage.cache.num_used * chunk_bytes,
            capacity_bytes=self._tier.num_chunks * chunk_bytes,
            num_asked=self._num_asked,
            num_hits=self._num_hits,
            num_reads=self._reads.count,
            read_bytes=storage.num_chunks_read * chunk_bytes,
            read_s=self._reads.seconds,
            num_writes=self._writes.count,
            write_bytes=storage.num_chunks_written * chunk_bytes,
            write_s=self._writes.seconds,
            num_refused=storage.num_refused,
            num_evicted=storage.cache.num_evicted,
        )

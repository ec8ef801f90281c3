"""The contents of a tier behind host memory: a disk, or the store that ranks share."""

from collections.abc import Sequence

from mocker.chain import BlockChain
from mocker.tiers.chunk_cache import ChunkCache, Uses
from mocker.tiers.config import HostMemory, Tier
from mocker.tiers.ranges import Range, count


class Storage:
    """A disk, or the store that ranks share: its contents, and counts of reads and writes."""

    def __init__(self, tier: Tier, memory: HostMemory, *, place: int, has_listener: bool) -> None:
        """Make an empty storage.

        Args:
            tier: its settings.
            memory: the host memory before it, which has chunks of the same size.
            place: its number among the links.
            has_listener: whether anything listens to its events.
        """
        self.tier = tier
        self.blocks_per_chunk, self.bytes_per_chunk = memory.blocks_per_chunk, memory.chunk_bytes
        self.place = place
        self.cache = ChunkCache(
            tier.num_chunks,
            blocks_per_chunk=memory.blocks_per_chunk,
            eviction_policy=tier.eviction_policy,
            store_threshold=0,
            medium="SHARED" if tier.name == "store" else "STORAGE",
        )
        self.cache.has_listener = has_listener
        self.num_reads = self.num_chunks_read = 0
        self.num_writes = self.num_chunks_written = 0
        self.num_refused = 0
        """Writes that found no space."""

    def missing(self, chain: BlockChain, ranges: Sequence[Range]) -> list[Range]:
        """Return the chunks that are missing."""
        return [absent for start, stop in ranges for absent in self.cache.absent(chain, start, stop)]

    def first_of(self, chain: BlockChain, ranges: Sequence[Range]) -> list[Range]:
        """Return the chunks up to the first that is missing."""
        there: list[Range] = []
        for start, stop in ranges:
            end, _ = self.cache.find(chain, start, stop)
            if end > start:
                there.append((start, end))
            if end < stop:
                break
        return there

    def insert(self, chain: BlockChain, ranges: Sequence[Range]) -> None:
        """Store chunks that have arrived, evicting others."""
        uses = Uses()
        for start, stop in ranges:
            written = self.cache.offer(chain, start, stop, uses)
            if written is None:
                self.num_refused += 1
            else:
                self.cache.complete_store(chain, written)
                self.num_writes += bool(written)
                self.num_chunks_written += count(written)
        self.cache.finish(chain, uses)

    def begin_read(self, chain: BlockChain, ranges: Sequence[Range]) -> Uses:
        """Keep chunks from being evicted while they are read."""
        uses = Uses()
        for start, stop in ranges:
            self.cache.pin(chain, start, stop, uses)
        return uses

    def end_read(self, chain: BlockChain, ranges: Sequence[Range], uses: Uses, num_chunks: int) -> None:
        """Let go of chunks, of which `num_chunks` were read."""
        for start, stop in ranges:
            self.cache.unpin(chain, start, stop)
        self.cache.finish(chain, uses)
        self.num_reads += 1
        self.num_chunks_read += num_chunks

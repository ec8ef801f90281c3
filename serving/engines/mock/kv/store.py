"""A rank's use of the store that workers share: real chunks, in another process, in the time that this takes.

A mocker's KV has no contents, so its chunks are zeros, of the share of their size that `kv_bytes_scale` says. Their headers
are right: a store that mixes up or damages chunks is found out.
"""

import asyncio
from collections.abc import Sequence as Several

from mocker import BlockChain
from mocker.tiers.config import HostMemory
from mocker.tiers.ranges import Range
from mocker.tiers.work import Read, Write
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size_of
from serving.engines.kv.reader import OnUsed
from serving.engines.mock.kv.moved import Moved, Progress
from serving.engines.mock.kv.tier_reports import StoreReports
from serving.kv_tiers.store_client import StoreTier
from serving.kv_tiers.tier import ChunkFormat
from serving.router.events import BlocksEvent
from serving.runtime.threads import in_thread
from serving.transfer.config import TransferRunConfig
from serving.transfer.proven import Token
from serving.worker.engine import KvTier

LOT_CHUNKS = 32
"""Chunks that are read at once; of a read that is cut short, whole lots count."""

MAX_WRITES = 4
"""Most writes in progress at once."""

MAX_WAITING_WRITES = 256
"""Most waiting writes of chunks that have left host memory; more are not written."""

MAX_NAMED = 2
"""We remember the blocks of this many times the chunks in host memory; what is written to a tier is there, or was lately."""


def chunk_format(
    memory: HostMemory, transfer: TransferRunConfig, timing: TimingConfig, *, block_size: int, model: str
) -> ChunkFormat:
    """Return the format of a worker's chunks in the store.

    Raises:
        ValueError: the size of its model's KV is unknown.
    """
    size = kv_size_of(timing, block_size=block_size, kv_bytes_per_token=transfer.kv_bytes_per_token)
    count = memory.blocks_per_chunk
    num_bytes = int((size.block + size.window_block) * transfer.kv_bytes_scale) * count
    return ChunkFormat.of(num_bytes, model, timing.model or "", timing.kv_cache_dtype, block_size, count)


class SharedStore:
    """See the module."""

    def __init__(self, address: str, memory: HostMemory, format: ChunkFormat, token: Token) -> None:
        """Prepare to use the store at HOST:PORT.

        Raises:
            ValueError: the address is not valid.
        """
        self.tier = StoreTier(address, format, token)
        self._memory = memory
        self._format = format
        self._reports = StoreReports(MAX_NAMED * memory.num_chunks, self.tier.changes)
        self._writes = asyncio.Semaphore(MAX_WRITES)
        self._num_writes = 0
        self._read, self._written = Moved(), Moved()
        self.on_used: OnUsed | None = None
        """Who sees the chunks that are used, if anybody does."""

    async def start(self) -> None:
        """Look for the store; one that cannot be reached yet is used as soon as it can."""
        await self.tier.start()

    async def close(self) -> None:
        """Leave it; it keeps its chunks."""
        await self.tier.close()

    async def look_up(self, chain: BlockChain, start: int, stop: int) -> int:
        """Return up to which chunk it has them all."""
        return start + await self.tier.look_up(self._keys(chain, [(start, stop)]))

    async def read(self, read: Read, progress: Progress) -> None:
        """Read chunks, each of which is checked, until one is missing or wrong."""
        keys = self._keys(read.sequence.chain, read.ranges)
        memory = [memoryview(bytearray(self._format.chunk_bytes)) for _ in range(min(LOT_CHUNKS, len(keys)))]
        while progress.num_chunks < len(keys):
            lot = keys[progress.num_chunks : progress.num_chunks + LOT_CHUNKS]
            with self._read.measured():
                num_come = await self.tier.read(lot, memory[: len(lot)])
            progress.num_chunks += num_come
            if self.on_used is not None:
                for key, chunk in zip(lot[:num_come], memory, strict=False):
                    self.on_used(chunk, bytes(self._made(key)))
            if num_come < LOT_CHUNKS:
                break
        if progress.num_chunks > LOT_CHUNKS:  # the beginning should stay longest
            await self.tier.touch(keys[: progress.num_chunks])

    async def write(self, write: Write) -> None:
        """Write chunks, unless too many others wait that have left host memory already."""
        if not write.is_pinned and self._num_writes >= MAX_WAITING_WRITES:
            return
        self._num_writes += 1
        try:
            keys = self._keys(write.chain, write.ranges)
            async with self._writes:
                chunks = await in_thread(lambda: [self._made(key) for key in keys])
                with self._written.measured():
                    await self.tier.write(keys, chunks)
        finally:
            self._num_writes -= 1

    def take_reports(self) -> list[BlocksEvent]:
        """Return what has entered and left it since the last call, as far as this rank knows."""
        return list(self._reports.take())

    def load(self) -> KvTier:
        """Report what it holds and did for this rank."""
        chunk_bytes, counts = self._memory.chunk_bytes, self.tier.counts
        return KvTier(
            "store",
            used_bytes=counts.num_chunks * chunk_bytes,
            capacity_bytes=counts.capacity * chunk_bytes,
            num_asked=counts.num_hits + counts.num_misses,
            num_hits=counts.num_hits,
            num_reads=self._read.count,
            read_bytes=counts.num_read * chunk_bytes,
            read_s=self._read.seconds,
            num_writes=self._written.count,
            write_bytes=counts.num_written * chunk_bytes,
            write_s=self._written.seconds,
            num_faults=counts.num_faults,
            num_refused=counts.num_refused,
            num_evicted=counts.num_evicted,
        )

    def _made(self, key: int) -> memoryview:
        chunk = memoryview(bytearray(self._format.chunk_bytes))
        self._format.seal(chunk, key)
        return chunk

    def _keys(self, chain: BlockChain, ranges: Several[Range]) -> list[int]:
        """Name chunks, each by the sequence hash of its last block."""
        size = self._memory.blocks_per_chunk
        if size > 1:
            chunks = [_blocks(chain, chunk, size) for start, stop in ranges for chunk in range(start, stop)]
            self._reports.learn([blocks for blocks in chunks if len(blocks) == size])
        names = [chain.key((chunk + 1) * size - 1) for start, stop in ranges for chunk in range(start, stop)]
        return [name for name in names if isinstance(name, int)]


def _blocks(chain: BlockChain, chunk: int, blocks_per_chunk: int) -> list[int]:
    """Return the names of a chunk's blocks."""
    names = [chain.key(block) for block in range(chunk * blocks_per_chunk, (chunk + 1) * blocks_per_chunk)]
    return [name for name in names if isinstance(name, int)]

"""The blocks that a waiting sequence is given, when it starts or its load does: cached ones to share, and new ones."""

from mocker.sequence import Sequence
from mocker.vllm.block_pool import num_blocks_of
from mocker.vllm.config import EngineConfig
from mocker.vllm.memory import Memory
from mocker.vllm.speculation import Speculation


class FirstBlocks:
    """Counts them, and gives those that are cached."""

    def __init__(self, config: EngineConfig, memory: Memory) -> None:
        self._pool = memory.pool
        self._size = config.block_size
        self._caches = config.enable_prefix_caching
        self._watermark = memory.watermark_blocks
        self._drops_last = Speculation(config).drops_last_hit

    def num_cached(self, sequence: Sequence) -> int:
        """Count the cached blocks at the start of a sequence's tokens, of which at least one must be computed."""
        if not self._caches or not sequence.reads_cache:
            return 0
        hits = self._pool.num_cached(sequence.chain, (sequence.num_known - 1) // self._size)
        return hits - 1 if hits and self._drops_last else hits

    def num_needed(self, sequence: Sequence, hits: int, computed: int, *, is_alone: bool) -> int:
        """Count the blocks that must be free for tokens up to `computed`.

        These are the blocks to fill, those to share that are in the free queue, and a reserve unless nobody else runs.
        """
        needed = max(num_blocks_of(computed, self._size) - hits - sequence.num_blocks, 0)
        if not sequence.num_blocks:
            needed += sequence.num_more_blocks
        if hits:
            needed += self._pool.num_unheld(sequence.chain, hits)
        return needed if is_alone else needed + self._watermark

    def share(self, sequence: Sequence, hits: int) -> None:
        """Give a sequence the cached blocks at the start of its prompt, and what it holds beside its tokens' blocks."""
        if hits:
            self._pool.share(sequence, hits)
        sequence.num_blocks = hits
        if sequence.num_more_blocks:
            self._pool.allocate_more(sequence)

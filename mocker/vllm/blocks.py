"""The blocks of sequences, as those ask for them who decide who runs: what is cached, what is needed, what is taken.

`num_cached`                        `fits`              `start`           `grow`, `store`
waiting -- some of its tokens are cached --> enough blocks are free --> shares them --> takes blocks for a chunk, whose
full ones others may share
`num_needed`                                    `grow`, `store`
running -- its next tokens need blocks --> free, or others are preempted --> takes them, ...          -- `release` --> over
"""

from abc import ABC, abstractmethod

from mocker.sequence import Sequence
from mocker.vllm.block_pool import BlockPool, num_blocks_of
from mocker.vllm.config import EngineConfig
from mocker.vllm.speculation import Speculation


class Blocks(ABC):
    """Gives sequences blocks: see the module. A class to derive from and not a protocol, as `Core`."""

    def begin_step(self) -> None:  # noqa: B027 (most need not know)
        """Begin an iteration."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""

    @abstractmethod
    def num_cached(self, sequence: Sequence) -> int:
        """Count the cached tokens at the start of a sequence, of which at least one must be computed."""

    def cut(self, sequence: Sequence, computed: int, count: int) -> int:
        """Return how many of `count` tokens to compute after those that are, so that KV is complete where it can be shared."""
        return count

    @abstractmethod
    def fits(self, sequence: Sequence, cached: int, computed: int, count: int, *, is_alone: bool) -> bool:
        """Return whether enough blocks are free for a waiting sequence to start.

        These are blocks for `count` tokens after those that are computed, cached ones that are in the free queue, and a
        reserve unless nobody else runs.
        """

    @abstractmethod
    def start(self, sequence: Sequence, cached: int) -> None:
        """Give a sequence the cached blocks at its start."""

    def skip(self, sequence: Sequence, num_tokens: int) -> None:  # noqa: B027 (most keep everything)
        """Free what no longer matters of a sequence's first tokens, which are computed, and whose steps have ended."""

    @abstractmethod
    def num_needed(self, sequence: Sequence, computed: int, count: int) -> int:
        """Count the blocks that a sequence that has started takes for `count` tokens after those that are computed."""

    @abstractmethod
    def grow(self, sequence: Sequence, reach: int, needed: int) -> None:
        """Take the blocks that a sequence needs for its tokens up to `reach`; they are free."""

    @abstractmethod
    def store(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the full blocks of a sequence's first tokens, which are known."""

    @abstractmethod
    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks."""

    @abstractmethod
    def most_needed(self, num_tokens: int) -> int:
        """Count the blocks that a sequence of this many tokens holds at most at once."""


class OneTable(Blocks):
    """Blocks of layers that all keep every token: one table for each sequence, of which only the length matters."""

    def __init__(self, config: EngineConfig, pool: BlockPool, watermark_blocks: int, *, looks_ahead: bool) -> None:
        """Start with nothing; `looks_ahead` says whether names of blocks include the token after, so that no hit is dropped."""
        speculation = Speculation(config)
        self._pool = pool
        self._size = config.block_size
        self._caches = config.enable_prefix_caching
        self._reserves_whole = config.scheduler_reserve_full_isl
        self._watermark = watermark_blocks
        self._speculation = speculation
        self._has_lookahead = speculation.num_lookahead > 0
        self._drops_last = speculation.drops_last_hit and not looks_ahead

    @property
    def num_free(self) -> int:
        """See `Blocks`."""
        return self._pool.num_free

    def num_cached(self, sequence: Sequence) -> int:
        """See `Blocks`."""
        if not self._caches or not sequence.reads_cache:
            return 0
        hits = self._pool.num_cached(sequence.chain, (sequence.num_known - 1) // self._size)
        return (hits - 1 if hits and self._drops_last else hits) * self._size

    def fits(self, sequence: Sequence, cached: int, computed: int, count: int, *, is_alone: bool) -> bool:
        """See `Blocks`; if the whole prompt is reserved, for all its tokens."""
        reach = computed + count
        if self._has_lookahead:
            reach = self._speculation.num_places(reach)
        if self._reserves_whole:
            reach = max(reach, sequence.num_known)
        return self.num_needed_first(sequence, cached // self._size, reach, is_alone=is_alone) <= self._pool.num_free

    def num_needed_first(self, sequence: Sequence, hits: int, computed: int, *, is_alone: bool) -> int:
        """Count the blocks that must be free for tokens up to `computed`: see `fits`."""
        needed = max(num_blocks_of(computed, self._size) - hits - sequence.num_blocks, 0)
        if hits:
            needed += self._pool.num_unheld(sequence.chain, hits)
        return needed if is_alone else needed + self._watermark

    def start(self, sequence: Sequence, cached: int) -> None:
        """See `Blocks`."""
        hits = cached // self._size
        if hits:
            self._pool.share(sequence, hits)
        sequence.num_blocks = hits

    def num_needed(self, sequence: Sequence, computed: int, count: int) -> int:
        """See `Blocks`."""
        reach = computed + count
        if self._has_lookahead:
            reach = self._speculation.num_places(reach)
        return max(num_blocks_of(reach, self._size) - sequence.num_blocks, 0)

    def grow(self, sequence: Sequence, reach: int, needed: int) -> None:
        """See `Blocks`."""
        self._pool.allocate(needed)
        sequence.num_blocks += needed

    def store(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Blocks`."""
        self._pool.store(sequence, num_tokens // self._size)

    def release(self, sequence: Sequence) -> None:
        """See `Blocks`."""
        self._pool.release(sequence, sequence.num_blocks)

    def most_needed(self, num_tokens: int) -> int:
        """See `Blocks`."""
        return num_blocks_of(num_tokens, self._size)

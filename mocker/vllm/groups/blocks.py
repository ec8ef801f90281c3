"""The blocks of sequences where groups of layers have tables of their own."""

from mocker.sequence import Sequence
from mocker.vllm.blocks import Blocks
from mocker.vllm.config import EngineConfig
from mocker.vllm.groups.cache import NO_HIT, GroupedCache, Hit
from mocker.vllm.groups.settings import GroupSettings


class GroupedBlocks(Blocks):
    """vLLM's gates over a cache of groups."""

    def __init__(self, config: EngineConfig, settings: GroupSettings, num_blocks: int, watermark_blocks: int) -> None:
        """Start with nothing cached; one of the blocks is the null block."""
        self.cache = GroupedCache(settings, num_blocks)
        self.pool = self.cache.pool
        self._reserves_whole = config.scheduler_reserve_full_isl
        self._watermark = watermark_blocks
        self._hit: Hit = NO_HIT  # of the sequence that was looked up last

    def begin_step(self) -> None:
        """See `Blocks`."""
        self.cache.begin_step()

    @property
    def num_free(self) -> int:
        """See `Blocks`."""
        return self.pool.num_free

    def num_cached(self, sequence: Sequence) -> int:
        """See `Blocks`."""
        self._hit = self.cache.find(sequence) if sequence.reads_cache else NO_HIT
        return self._hit.length

    def cut(self, sequence: Sequence, computed: int, count: int) -> int:
        """See `Blocks`: states are complete only where a step ends."""
        if not self.cache.has_states:
            return count
        is_new = not sequence.num_blocks
        junction = self._hit.junction if is_new else self.cache.junction(sequence)
        return self.cache.aligned(sequence, computed, count, junction)

    def fits(self, sequence: Sequence, cached: int, computed: int, count: int, *, is_alone: bool) -> bool:
        """See `Blocks`; if the whole prompt is reserved, it must fit as well, one day."""
        reserve, cache, hit = 0 if is_alone else self._watermark, self.cache, self._hit
        if self._reserves_whole:
            whole = max(sequence.num_known, computed + count)
            if cache.num_needed_by_all(sequence, hit, whole) + reserve > self.num_free:
                return False
        return cache.num_needed(sequence, hit, computed, count) + reserve <= self.num_free

    def start(self, sequence: Sequence, cached: int) -> None:
        """See `Blocks`."""
        self.cache.start(sequence, self._hit)

    def skip(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Blocks`."""
        self.cache.skip(sequence, num_tokens)

    def num_needed(self, sequence: Sequence, computed: int, count: int) -> int:
        """See `Blocks`."""
        return self.cache.num_needed(sequence, NO_HIT, computed, count)

    def grow(self, sequence: Sequence, reach: int, needed: int) -> None:
        """See `Blocks`."""
        self.cache.grow(sequence, reach)
        sequence.num_blocks = self.cache.num_entries(sequence)

    def store(self, sequence: Sequence, num_tokens: int) -> None:
        """See `Blocks`."""
        self.cache.store(sequence, num_tokens)

    def release(self, sequence: Sequence) -> None:
        """See `Blocks`."""
        self.cache.release(sequence)
        sequence.num_blocks = 0

    def most_needed(self, num_tokens: int) -> int:
        """See `Blocks`."""
        return self.cache.most_needed(num_tokens)

"""What each rank has cached, as far as a router knows: by the ranks' events, by its own predictions, or by both."""

from serving.router.blocks import PromptBlocks
from serving.router.index import Index, PredictedIndex, PrefixIndex
from serving.router.tiers import BeyondGpu


class Caches:
    """An index of all ranks, and predictions where it is silent or late."""

    def __init__(self, index: Index, *, ttl_s: float, predict_s: float = 0.0) -> None:
        """Follow ranks with an index.

        Args:
            index: fed by events, or predicted itself.
            ttl_s: how long a prompt is assumed to stay cached at ranks without events, if others have them.
            predict_s: how long it is assumed to be cached in addition to what events say (0: not).
        """
        self.index = index
        self._tiers = index.tiers if isinstance(index, PrefixIndex) else None
        self._early = PredictedIndex(predict_s) if predict_s and self._tiers is not None else None
        self._predicted = PredictedIndex(ttl_s)
        self._silent: set[int] = set()

    def add_silent(self, slot: int) -> None:
        """Predict what a rank has, because it reports no events."""
        if self._tiers is not None:
            self._silent.add(slot)

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self._of(slot).drop(slot)
        self._silent.discard(slot)
        if self._early is not None:
            self._early.drop(slot)

    def routed(self, slot: int, blocks: PromptBlocks, now: float) -> None:
        """Record that a prompt was sent to a rank."""
        self._of(slot).routed(slot, blocks, now)
        if self._early is not None:
            self._early.routed(slot, blocks, now)

    def _of(self, slot: int) -> Index:
        return self._predicted if slot in self._silent else self.index

    def on_gpu(self, blocks: PromptBlocks, now: float) -> dict[int, int]:
        """Return how many leading blocks of a prompt each rank has on its GPU, if any."""
        found = self._starts(blocks, now)
        if self._silent:
            found |= self._predicted.overlaps(blocks, now)
        if self._early is not None:
            found = more(found, self._early.overlaps(blocks, now))
        return found

    def _starts(self, blocks: PromptBlocks, now: float) -> dict[int, int]:
        index = self.index
        if isinstance(index, PrefixIndex) and index.layer_groups.slots:
            return index.starts(blocks)
        return index.overlaps(blocks, now)

    def beyond_gpu(self, blocks: PromptBlocks, on_gpu: dict[int, int], slots: list[int]) -> dict[int, BeyondGpu] | None:
        """Return the blocks that ranks can fetch after those on their GPUs, None if none can fetch any."""
        if self._tiers is None or self._tiers.is_empty:
            return None
        return self._tiers.runs(blocks, on_gpu, slots) or None


def more(found: dict[int, int], also: dict[int, int]) -> dict[int, int]:
    """Return the larger number of blocks of each rank."""
    return found | {slot: max(blocks, found.get(slot, 0)) for slot, blocks in also.items()}

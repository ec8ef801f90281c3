"""What a router decides for a request, and why it may refuse one."""

from collections.abc import Sequence
from typing import NamedTuple

from serving.router.candidates import Candidates


class RoutingDecision(NamedTuple):
    """Where a request goes, and the score of every candidate."""

    slot: int
    overlap_blocks: int
    """Leading blocks of the prompt that the rank need not compute, on its GPU or beyond."""
    gpu_blocks: int
    """Those on the GPU."""
    prefill_tokens: int
    """Prompt tokens to compute there; a token to fetch counts in part if its tier does."""
    best_blocks: int | None = None
    """The most of these blocks that any candidate has; None if the mode does not follow caches."""
    scored: Candidates | None = None
    costs: Sequence[float] = ()
    """The cost of each of `scored`; none if the choice was clear without."""

    @property
    def candidates(self) -> list[tuple[int, float, int]]:
        """(slot, cost, overlap blocks) of every candidate that was scored."""
        if self.scored is None or not len(self.costs):
            return []
        return list(zip(self.scored.slots, map(float, self.costs), self.scored.found_blocks, strict=True))


NOBODY = "the router knows no worker"


class NoWorkersError(Exception):
    """There is no rank to route to."""


class AllBusyError(Exception):
    """Every rank reports more KV blocks in use than `busy_threshold` allows."""


class AllFullError(Exception):
    """Every rank has as many requests waiting as `max_queue_depth` allows."""

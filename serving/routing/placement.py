"""Where a request goes."""

from collections.abc import Collection
from typing import NamedTuple

from serving.router import RoutingDecision


class RankAddress(NamedTuple):
    """A rank to route to: a data-parallel rank of an instance, which is a worker."""

    instance_id: int
    dp_rank: int


class WantedRank(NamedTuple):
    """What is asked of those who choose a rank."""

    num_tokens: int
    hashes: list[int]
    """Sequence hashes of the prompt's full blocks."""
    instance_id: int | None = None
    """The only instance that will do, if there is one; `dp_rank` is its rank."""
    dp_rank: int | None = None
    avoid: Collection[int] = ()
    """Instances that come last."""
    session: str | None = None
    adapter: str = ""
    """The LoRA adapter that the request needs."""
    is_refusable: bool = True
    """Whether full workers may refuse it."""
    is_local: bool = True
    """Whether the prompt is computed there, rather than by a rank of another pool."""
    wants_costs: bool = False
    """Whether to return what each rank would have cost."""


class Placement(NamedTuple):
    """Where a request goes, and the number under which it is booked."""

    request: int
    rank: RankAddress
    slot: int
    overlap_blocks: int
    decision: RoutingDecision
    queue_depth: int
    """Requests in flight there when it was placed, this one not included."""

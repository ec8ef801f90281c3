"""Where a request goes."""

from typing import NamedTuple

from serving.router import Decision


class Rank(NamedTuple):
    """A rank to route to: a data-parallel rank of an instance, which is a worker."""

    instance_id: int
    dp_rank: int


class Placement(NamedTuple):
    """Where a request goes, and the number under which it is booked."""

    request: int
    rank: Rank
    slot: int
    overlap_blocks: int
    decision: Decision
    queue_depth: int
    """Requests in flight there when it was placed, this one not included."""

"""What a planner and its hands write for each other, as keys in discovery.

    v1/planner/{namespace}/fleet/{id}    the hands: which workers there are
    v1/planner/{namespace}/orders/{id}   the planner: how many there should be, for one pair of hands
    v1/claims/planner-{namespace}        held by the planner at work (etcd; in a folder a file)

Each key ends in the id of the process that wrote it, and goes with its lease. Orders that are gone still stand. Hands obey
the order with the highest term, so a planner that hung and wakes up is no longer obeyed.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST_WORKERS = 10_000
"""Of a pool."""

State = Literal["starting", "ready", "draining"]


class Worker(msgspec.Struct, frozen=True):
    """A worker, as the hands know it."""

    name: str
    state: State
    instance: str = ""
    """Its id in discovery and in load reports, once it is ready."""
    startup_s: float | None = None
    """How long it took until it was ready."""


class Fleet(msgspec.Struct, frozen=True):
    """The workers of each pool, from the hands."""

    pools: dict[str, tuple[Worker, ...]]


class Wanted(msgspec.Struct, frozen=True):
    """How many workers a pool should have."""

    number: int
    """Of the decision; hands obey each once."""
    replicas: Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
    reason: str
    leaving: tuple[str, ...] = ()
    """Instances in the order in which they should leave: those with the fewest requests first."""


class Orders(msgspec.Struct, frozen=True):
    """What a planner has decided so far."""

    fleet: str
    """Id of the hands that it plans for."""
    term: int
    """The planner's claim."""
    decisions: int = 0
    wanted: dict[str, Wanted] = {}
    """The last change of each pool that was changed."""
    notes: dict[str, int] = {}
    """What it noted, and how often."""


def fleets(namespace: str) -> str:
    """Return the prefix of the keys of hands."""
    return f"v1/planner/{namespace}/fleet/"


def orders(namespace: str) -> str:
    """Return the prefix of the keys of planners."""
    return f"v1/planner/{namespace}/orders/"


def claim(namespace: str) -> str:
    """Return what the planner at work holds."""
    return f"planner-{namespace}"

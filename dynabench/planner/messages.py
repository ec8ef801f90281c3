"""Messages between a planner and its hands, as keys in discovery.

    v1/planner/{namespace}/fleet/{id}    the hands: which workers there are
    v1/planner/{namespace}/orders/{id}   the planner: how many there should be, for one pair of hands
    v1/claims/planner-{namespace}        held by the active planner (a key in etcd, or a file in a folder)

Each key ends in the id of the process that wrote it, and disappears with its lease. Orders remain in force after they
disappear. Hands obey the orders with the highest term, so they ignore a planner that hung and wakes up.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MOST_WORKERS = 10_000
"""The most workers that a pool can have."""

State = Literal["starting", "ready", "draining"]


class ReportedWorker(msgspec.Struct, frozen=True):
    """A worker in the hands' report."""

    name: str
    state: State
    instance: str = ""
    """Its id in discovery and in load reports, once it is ready."""
    startup_s: float | None = None
    """The time from its start until it was ready."""


class ReportedFleet(msgspec.Struct, frozen=True):
    """The workers of each pool, as the hands report them."""

    pools: dict[str, tuple[ReportedWorker, ...]]


class WantedWorkers(msgspec.Struct, frozen=True):
    """How many workers a pool should have."""

    number: int
    """The number of the decision; hands carry out each decision once."""
    replicas: Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
    reason: str
    leaving: tuple[str, ...] = ()
    """Instances in the order in which they should leave, those with the fewest requests first."""


class Orders(msgspec.Struct, frozen=True):
    """What a planner has decided so far."""

    fleet: str
    """Id of the hands that should obey."""
    term: int
    """The number of the planner's claim."""
    decisions: int = 0
    wanted: dict[str, WantedWorkers] = {}
    """The last decision about each pool that was changed."""
    notes: dict[str, int] = {}
    """The planner's notes, and how often each occurred."""


def fleets(namespace: str) -> str:
    """Return the prefix of the keys of hands."""
    return f"v1/planner/{namespace}/fleet/"


def orders(namespace: str) -> str:
    """Return the prefix of the keys of planners."""
    return f"v1/planner/{namespace}/orders/"


def claim(namespace: str) -> str:
    """Return the claim that the active planner holds."""
    return f"planner-{namespace}"

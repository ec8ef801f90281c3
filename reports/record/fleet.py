"""How the workers of a run changed, and what the planner decided."""

from typing import Annotated

import msgspec
from msgspec import Meta

from foundation.settings import FINITE
from reports.record.pools import Amount, Number

Seconds = Annotated[float, Meta(ge=0, le=FINITE)]
Text = Annotated[str, Meta(max_length=1000)]
MAX_ROWS = 1_000_000


class Headcount(msgspec.Struct, frozen=True, array_like=True):
    """How many workers of a pool are in each state, starting at a time."""

    time_s: Seconds
    pending: Number
    """Workers that wait for GPUs."""
    starting: Number
    ready: Number
    draining: Number

    @property
    def on_gpus(self) -> int:
        """Workers that occupy GPUs."""
        return self.starting + self.ready + self.draining


class PoolFleet(msgspec.Struct, frozen=True):
    """The workers of a pool over time."""

    pool: str
    role: str
    gpus_per_worker: Number
    history: Annotated[tuple[Headcount, ...], Meta(max_length=MAX_ROWS)]
    """The changes, in order."""
    gpu_s: Amount
    """GPU-seconds, from the start of each worker to its end."""
    failed_starts: Amount = 0.0
    died: Amount = 0.0
    died_s: Annotated[tuple[Seconds, ...], Meta(max_length=MAX_ROWS)] = ()
    """When each worker that died did so, where that is known."""


class FleetChange(msgspec.Struct, frozen=True, array_like=True):
    """What a planner changed."""

    time_s: Seconds
    pool: str
    before: Number
    """The workers that the pool was meant to have."""
    after: Number
    reason: Text


class Oracle(msgspec.Struct, frozen=True):
    """The fewest workers that meet the limits in each window of a run; only a simulation can find them."""

    window_s: Annotated[float, Meta(gt=0, le=FINITE)]
    replicas: dict[str, tuple[Number, ...]]
    """By the pool's name, window by window from the start of the run."""
    possible: tuple[Annotated[float, Meta(ge=0, le=1)], ...]
    """The share of each window's requests that can meet the limits with any number of workers; the rest does not count."""


class FleetUse(msgspec.Struct, frozen=True):
    """The workers of a run over time, what its planner changed, and how requests were affected."""

    pools: tuple[PoolFleet, ...]
    length_s: Seconds
    """How long the run took, until the end of its last answer."""
    planner: str = "static"
    changes: Annotated[tuple[FleetChange, ...], Meta(max_length=MAX_ROWS)] = ()
    decisions: Number = 0
    """How often the planner was asked."""
    notes: dict[Text, Number] = {}
    """The planner's notes, and how often it made each."""
    lost: Number = 0
    """How often a request lost its worker."""
    oracle: Oracle | None = None

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of all pools together."""
        return sum(pool.gpu_s for pool in self.pools)

    @property
    def is_shown(self) -> bool:
        """Whether anything happened that a report should show."""
        happened = any(len(pool.history) > 1 or pool.died or pool.failed_starts for pool in self.pools)
        return happened or bool(self.planner != "static" or self.changes or self.lost or self.oracle)

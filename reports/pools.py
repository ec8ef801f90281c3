"""How busy the workers of each pool were, and the links between them; what its KV tiers held and moved."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from foundation.settings import FINITE

Share = Annotated[float, Meta(ge=0, le=FINITE)]
Number = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Amount = Annotated[float, Meta(ge=0, le=FINITE)]
"""Also of what is counted: the mean over repeats is no whole number."""
Tier = Literal["host", "disk", "store"]
TIERS: dict[Tier, str] = {"host": "host memory", "disk": "disk", "store": "shared store"}
"""Where KV is kept beyond the GPUs, and what it is called: each worker has its own, but for a store, which workers share."""


class Use(msgspec.Struct, frozen=True):
    """A share of what could have been used, of several workers or links."""

    mean: Share
    highest: Share

    @classmethod
    def of(cls, shares: Sequence[float]) -> Self:
        """Take mean and highest of the share of each."""
        return cls(sum(shares) / len(shares), max(shares))


class PoolUse(msgspec.Struct, frozen=True):
    """A pool, and how long its workers computed, where that is known."""

    name: str
    role: str
    workers: Number
    """Data-parallel ranks count one by one."""
    gpus: Number
    busy: Use | None = None
    """The share of the run during which they did; unknown of live runs, as is the next."""
    gpu_s: Amount | UnsetType = UNSET
    """The time during which each did, times its GPUs, all together (s)."""


class LinkUse(msgspec.Struct, frozen=True):
    """The links of one side, and the share that was used of what they could have carried during the run."""

    name: str
    """A pool by its name, `nodes` or `racks`."""
    links: Number
    """How many there are; each has two directions."""
    egress: Use
    ingress: Use


class Traffic(msgspec.Struct, frozen=True):
    """What was copied one way between a tier and what is nearer to the GPU."""

    bytes: Amount
    copies: Amount
    busy: Use
    """The share of the run during which each link carried any of it."""


class TierUse(msgspec.Struct, frozen=True):
    """A tier of a pool: what it can hold, and what went in and out during the run."""

    pool: str
    tier: Tier
    caches: Number
    """How many there are: one for each worker (data-parallel ranks count one by one), or one that they share."""
    capacity_bytes: Amount
    """Of all of them together, as the next."""
    capacity_tokens: Amount
    full: Share
    """How much of that was taken at the end."""
    read: Traffic
    """Out of the tier."""
    written: Traffic
    """Into it."""
    evicted_chunks: Amount
    tokens: Amount | UnsetType = UNSET
    """Prompt tokens that came from it; unknown of live runs, as is the next."""
    avoided_gpu_s: Amount | UnsetType = UNSET
    """What computing them would have taken a worker that does nothing else, times its GPUs (s)."""
    refused: Amount = 0.0
    """How often nothing of what a request computed could be stored at first, as all the tier held was being copied."""
    flushes: Amount = 0.0
    """Copies that a step waited for, as the blocks that they read were taken again."""
    stall_s: Amount = 0.0
    """How long steps waited for them, all workers together (s)."""
    stalled: Use = Use(0.0, 0.0)
    """The share of the run during which a worker's steps did."""

    @property
    def name(self) -> str:
        """What sets it apart from the other tiers of a run."""
        return f"{self.pool} {self.tier}"


class KvOverTime(msgspec.Struct, frozen=True):
    """The mean share of a pool's KV blocks that were in use, in each of the windows from the start of a run."""

    pool: str
    window_s: Annotated[float, Meta(gt=0, le=FINITE)]
    shares: Annotated[tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(max_length=1024)]


Row = TypeVar("Row", PoolUse, LinkUse, TierUse)


def averaged(repeats: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the pools, links or tiers of an arm's runs, each averaged over the repeats."""
    groups: dict[str, list[Row]] = {}
    for row in chain.from_iterable(repeats):
        groups.setdefault(row.name, []).append(row)
    return [mean(rows) for rows in groups.values()]


def mean(values: Sequence[Any]) -> Any:
    """Average numbers, and those within; what is alike stays as it is."""
    values = [value for value in values if value not in (None, UNSET)] or values
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, msgspec.Struct):
        within = {name: mean([getattr(value, name) for value in values]) for name in first.__struct_fields__}
        return structs.replace(first, **within)
    return sum(values) / len(values)

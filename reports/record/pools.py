"""How busy the workers of each pool and the links between them were, and what its KV tiers held and moved."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from foundation.settings import FINITE

Share = Annotated[float, Meta(ge=0, le=FINITE)]
Number = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Amount = Annotated[float, Meta(ge=0, le=FINITE)]
"""Counts are floats, too, because the mean over repeats may not be a whole number."""
Tier = Literal["host", "disk", "store"]
TIERS: dict[Tier, str] = {"host": "host memory", "disk": "disk", "store": "shared store"}
"""Where KV is kept beyond the GPUs, by label. Each worker has its own tiers, except for a store, which workers share."""


class Use(msgspec.Struct, frozen=True):
    """Utilisation of several workers or links."""

    mean: Share
    highest: Share

    @classmethod
    def of(cls, shares: Sequence[float]) -> Self:
        """Return the mean and the highest of their shares."""
        return cls(sum(shares) / len(shares), max(shares))


class PoolUse(msgspec.Struct, frozen=True):
    """A pool, and how long its workers computed, if that is known."""

    name: str
    role: str
    workers: Number
    """Data-parallel ranks count one by one."""
    gpus: Number
    busy: Use | None = None
    """The share of the run in which they computed; unknown for live runs, like the next field."""
    gpu_s: Amount | UnsetType = UNSET
    """The time in which each computed, times its GPUs, in total (s)."""


class LinkUse(msgspec.Struct, frozen=True):
    """The links of one side, and the share of their capacity that was used during the run."""

    name: str
    """A pool by its name, `nodes` or `racks`."""
    links: Number
    """The number of links; each has two directions."""
    egress: Use
    ingress: Use


class TierTraffic(msgspec.Struct, frozen=True):
    """What was copied in one direction between a tier and the next one towards the GPU."""

    bytes: Amount
    copies: Amount
    busy: Use
    """The share of the run in which each link carried any of it."""


class TierUse(msgspec.Struct, frozen=True):
    """A tier of a pool: its capacity, and what was read and written during the run."""

    pool: str
    tier: Tier
    caches: Number
    """The number of caches: one for each worker (data-parallel ranks count one by one), or one that they share."""
    capacity_bytes: Amount
    """Capacity of all caches together, like the next field."""
    capacity_tokens: Amount
    full: Share
    """How much of it was used at the end."""
    read: TierTraffic
    """Copies out of the tier."""
    written: TierTraffic
    """Copies into the tier."""
    evicted_chunks: Amount
    tokens: Amount | UnsetType = UNSET
    """Prompt tokens that came from it; unknown for live runs, like the next field."""
    avoided_gpu_s: Amount | UnsetType = UNSET
    """The time that a worker doing nothing else would need to compute them, times its GPUs (s)."""
    refused: Amount = 0.0
    """How often a request's blocks could not be stored at first, because everything in the tier was being copied."""
    flushes: Amount = 0.0
    """Copies that a step waited for, because the blocks that they read were needed again."""
    stall_s: Amount = 0.0
    """How long steps waited for them, all workers together (s)."""
    stalled: Use = Use(0.0, 0.0)
    """The share of the run in which a worker's steps waited for them."""

    @property
    def name(self) -> str:
        """The key that distinguishes it from the other tiers of a run."""
        return f"{self.pool} {self.tier}"


class AdapterUse(msgspec.Struct, frozen=True):
    """A LoRA adapter, the requests that asked for it, and how often it was loaded; of all workers together."""

    adapter: str
    requests: Amount
    ttft_s: Amount | None
    """Their mean TTFT from the schedule, if any was answered (s)."""
    loads: Amount | UnsetType = UNSET
    """How often it was copied to a GPU; unknown for live runs, like the next two."""
    reads: Amount | UnsetType = UNSET
    """How often it was read from disk for that."""
    stall_s: Amount | UnsetType = UNSET
    """How long steps waited for both (s)."""

    @property
    def name(self) -> str:
        """The key that distinguishes it from the others of a run."""
        return self.adapter


class Gain(msgspec.Struct, frozen=True):
    """What speculation gives at one size of a step."""

    sequences: Number
    """That decode in the step."""
    ratio: Amount
    """Their tokens for each second, over those without speculation."""


class DraftUse(msgspec.Struct, frozen=True):
    """What a pool drafted, and how much of it was accepted."""

    name: str
    """The pool."""
    steps: Amount
    """How often drafts of a request were verified."""
    drafts: Amount
    """How many tokens that were."""
    accepted: tuple[Amount, ...]
    """How often each draft was accepted, by position."""
    sequences: Amount = 0.0
    """The mean of a step, of those whose drafts it verified."""
    gains: tuple[Gain, ...] = ()
    """What it gives by the number of sequences in a step, at the mean context of the requests."""

    @property
    def length(self) -> float:
        """Mean tokens of such a step, the model's own included."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0


class EncoderUse(msgspec.Struct, frozen=True):
    """What the encoders of a pool did."""

    name: str
    """The pool."""
    requests: Amount
    """Requests with images or other media that its workers computed the prompts of."""
    items: Amount
    """Their items."""
    encoded_tokens: Amount
    """What the encoders made."""
    found_tokens: Amount
    """What requests found in their caches."""
    busy_s: Amount
    """How much longer steps took, all workers together (s)."""


class GpuUse(msgspec.Struct, frozen=True):
    """A GPU as an exporter shows it: means over the samples of the run, and the most memory."""

    name: str
    power_w: Amount | None = None
    busy: Amount | None = None
    """The share of the time in which a kernel ran."""
    memory_bytes: Amount | None = None
    capacity_bytes: Amount | None = None


class KvOverTime(msgspec.Struct, frozen=True):
    """The mean share of a pool's KV blocks that were in use, in each window from the start of a run."""

    pool: str
    window_s: Annotated[float, Meta(gt=0, le=FINITE)]
    shares: Annotated[tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(max_length=1024)]


Row = TypeVar("Row", PoolUse, LinkUse, TierUse, DraftUse, AdapterUse, EncoderUse, GpuUse)


def averaged(repeats: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the pools, links, tiers, drafts, adapters, encoders or GPUs of an arm's runs, each averaged over the repeats."""
    groups: dict[str, list[Row]] = {}
    for row in chain.from_iterable(repeats):
        groups.setdefault(row.name, []).append(row)
    return [mean(rows) for rows in groups.values()]


def mean(values: Sequence[Any]) -> Any:
    """Average numbers, also nested ones; equal values stay as they are."""
    values = [value for value in values if value not in (None, UNSET)] or values
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, tuple):
        return tuple(map(mean, zip(*values, strict=True)))
    if isinstance(first, msgspec.Struct):
        within = {name: mean([getattr(value, name) for value in values]) for name in first.__struct_fields__}
        return structs.replace(first, **within)
    return sum(values) / len(values)

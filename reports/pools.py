"""How busy the workers of each pool were, and the links between them."""

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta, structs

from foundation.settings import FINITE

Share = Annotated[float, Meta(ge=0, le=FINITE)]
Number = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class Use(msgspec.Struct, frozen=True):
    """A share of what could have been used, of several workers or links."""

    mean: Share
    highest: Share

    @classmethod
    def of(cls, shares: Sequence[float]) -> Self:
        """Take mean and highest of the share of each."""
        return cls(sum(shares) / len(shares), max(shares))


class PoolUse(msgspec.Struct, frozen=True):
    """A pool, and the share of the run during which its workers computed, where that is known."""

    name: str
    role: str
    workers: Number
    """Data-parallel ranks count one by one."""
    gpus: Number
    busy: Use | None = None
    """Unknown of live runs."""


class LinkUse(msgspec.Struct, frozen=True):
    """The links of one side, and the share that was used of what they could have carried during the run."""

    name: str
    """A pool by its name, `nodes` or `racks`."""
    links: Number
    """How many there are; each has two directions."""
    egress: Use
    ingress: Use


class KvOverTime(msgspec.Struct, frozen=True):
    """The mean share of a pool's KV blocks that were in use, in each of the windows from the start of a run."""

    pool: str
    window_s: Annotated[float, Meta(gt=0, le=FINITE)]
    shares: Annotated[tuple[Annotated[float, Meta(ge=0, le=1)], ...], Meta(max_length=1024)]


Row = TypeVar("Row", PoolUse, LinkUse)


def averaged(repeats: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the pools, or links, of an arm's runs, each averaged over the repeats."""
    groups: dict[str, list[Row]] = {}
    for row in chain.from_iterable(repeats):
        groups.setdefault(row.name, []).append(row)
    return [_mean(rows) for rows in groups.values()]


def _mean(rows: list[Row]) -> Row:
    """Average what is a share; the rest is alike."""
    names = [name for name in ("busy", "egress", "ingress") if getattr(rows[0], name, None)]
    return structs.replace(rows[0], **{name: _averaged([getattr(row, name) for row in rows]) for name in names})


def _averaged(uses: list[Use]) -> Use:
    return Use(sum(use.mean for use in uses) / len(uses), sum(use.highest for use in uses) / len(uses))

"""What KV tiers gave: where prompt tokens came from, and what that saved.

hits       each run          prompt tokens from the GPU, from each tier, computed; together they are all
saved      runs of two arms  GPU-seconds (and TTFT) of the one without, or with the smallest tiers, less those of the other
remarks    an arm's runs     where a tier moved more than it saved
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from reports import metrics
from reports.pools import TIERS, TierUse
from reports.records import Record
from reports.statistics import half_interval

SOURCES: dict[str, str] = {"gpu": "GPU", **{str(tier): label for tier, label in TIERS.items()}, "computed": "computed"}
"""Where a prompt token can come from, as fields of `Hits` are named, and what that is called."""
SIZES = ("kv_offloading_size", "kv_disk_size", "kv_store_size")
"""Settings that say how much a tier holds, by their last words."""
_SIZE = re.compile(rf"[\w.]*(?:{'|'.join(SIZES)}) \S+?(?=,|$| \()")
"""What names of arms say of it."""
FORMULAS = {
    "hits": "prompt tokens found on the GPU, in host memory, on disk or in the store, or computed / all prompt tokens",
    "gpu_s": "time during which a worker took steps x its GPUs, all workers together, the warm-up included",
    "gpu_s_saved": "GPU-seconds of the arm with the smallest tiers that is otherwise the same (or the first) - those of this one",
}
LABELS = {"hits": "hits by tier", "gpu_s": "GPU-seconds", "gpu_s_saved": "GPU-seconds saved"}


class Hits(msgspec.Struct, frozen=True):
    """Where prompt tokens came from, as shares of all of them; None where that is not known."""

    gpu: float | None = None
    host: float | None = None
    disk: float | None = None
    store: float | None = None
    computed: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """What is known, from the GPU on."""
        return {name: share for name in SOURCES if (share := getattr(self, name)) is not None}


class Spent(msgspec.Struct, frozen=True):
    """What a run took for its work."""

    requests: int
    """Those that succeeded."""
    tokens: int
    """Their prompt and output tokens: its work."""
    is_complete: bool
    ttft_s: float | None
    """Mean, from the intended arrival."""
    gpu_s: float | None
    """GPU-seconds."""


class Saving(msgspec.Struct, frozen=True):
    """What one arm took less than another, on average over the repeats."""

    value: float
    share: float
    """Of what the other took."""
    repeats: int
    interval: tuple[float, float] | None = None
    """Of the value, 95%: over the repeats, None where there is one; in a comparison that of TTFT is paired by request."""


class Saved(msgspec.Struct, frozen=True):
    """What an arm took less than another for the same work."""

    against: str
    """The other's name."""
    requests: int
    """In each run."""
    gpu_s: Saving
    ttft_s: Saving | None
    """Of the mean; None in a comparison where a queue grew."""


def hits(repeats: Sequence[Record]) -> Hits | None:
    """Return where the prompt tokens of an arm's runs came from, the mean over the repeats that know it; None if none does.

    A server that reports hits does not say where it found them, so those of a live run are the GPU's only where the tiers' are
    known.
    """
    known = [found for run in repeats if (found := _hits(run.measured)).parts]
    if not known:
        return None
    shares = {name: [share for one in known if (share := getattr(one, name)) is not None] for name in SOURCES}
    return Hits(**{name: sum(each) / len(each) for name, each in shares.items() if each})


def _hits(run: Record) -> Hits:
    requests = run.requests[run.requests.succeeded]
    requests = requests[~requests.cached_tokens.mask]
    cached = metrics.share(requests.cached_tokens, requests.isl) if len(requests) else None
    if cached is None:
        return Hits()
    shares = {str(tier): metrics.share(getattr(requests, f"{tier}_tokens"), requests.isl) for tier in TIERS}
    known = [share for share in shares.values() if share is not None]
    gpu = None if run.is_live and not known else max(cached - sum(known), 0.0)
    return Hits(gpu, computed=1 - cached, **shares)


def spent(run: Record) -> Spent:
    """Return what a run took; its GPU-seconds include its warm-up."""
    requests = run.requests[run.requests.succeeded]
    ttft_s = metrics.per_request(run.measured.requests)["ttft_sched"]
    return Spent(
        requests=len(requests),
        tokens=int(requests.isl.sum(dtype=np.int64) + requests.osl.sum(dtype=np.int64)),
        is_complete=run.is_complete,
        ttft_s=float(np.nanmean(ttft_s)) if np.isfinite(ttft_s).any() else None,
        gpu_s=_total([None if pool.gpu_s is UNSET else pool.gpu_s for pool in run.pools]),
    )


def _total(values: Sequence[float | None]) -> float | None:
    """Add up what is known of all."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def gpu_seconds(runs: Sequence[Spent]) -> float | None:
    """Return the mean GPU-seconds of an arm's runs."""
    known = [run.gpu_s for run in runs if run.gpu_s is not None]
    return sum(known) / len(known) if known else None


def saved(against: str, before: Sequence[Spent], after: Sequence[Spent]) -> Saved | None:
    """Return what runs took less than others, repeat by repeat; None where they did not do the same work, or it is not known."""
    pairs = list(zip(before, after, strict=False))
    if not all(one.is_complete and other.is_complete and one.tokens == other.tokens for one, other in pairs):
        return None
    gpu_s = _saving([(one.gpu_s, other.gpu_s) for one, other in pairs])
    if gpu_s is None:
        return None
    return Saved(against, before[0].requests, gpu_s, _saving([(one.ttft_s, other.ttft_s) for one, other in pairs]))


def _saving(pairs: Sequence[tuple[float | None, float | None]]) -> Saving | None:
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not known or len(known) < len(pairs):
        return None
    each = [before - after for before, after in known]
    value, base = (sum(values) / len(known) for values in (each, [before for before, _ in known]))
    half = half_interval(each)
    interval = None if half is None else (value - half, value + half)
    return Saving(value, value / base if base else 0.0, len(known), interval)


def bases(sizes: Mapping[str, float]) -> dict[str, str]:
    """Return the arm with which each is compared, itself perhaps, from what the tiers of each hold.

    It is the one with the smallest tiers whose name is the same but for their size; where there is no such arm, the first.
    """
    groups: dict[str, list[str]] = {}
    for arm in sizes:
        groups.setdefault(_SIZE.sub("", arm), []).append(arm)
    first, found = next(iter(sizes)), dict[str, str]()
    for group in groups.values():
        base = min(group, key=sizes.__getitem__) if len(group) > 1 or not sizes[group[0]] else first
        found |= dict.fromkeys(group, base)
    return found


Changed = TypeVar("Changed")


def is_size(setting: str) -> bool:
    """Tell whether a setting, by its name or its path, says how much a tier holds."""
    return setting.endswith(SIZES)


def smallest(points: Iterable[tuple[Mapping[str, Any], Changed]]) -> Iterator[tuple[Changed, Changed]]:
    """Yield each point, given with the settings that set it apart, and the one with the smallest tiers that is else alike."""
    groups: dict[str, list[tuple[tuple[float, ...], Changed]]] = {}
    for changes, point in points:
        alike = str(sorted((name, str(value)) for name, value in changes.items() if not is_size(name)))
        size = tuple(float(value) for name, value in sorted(changes.items()) if is_size(name))
        groups.setdefault(alike, []).append((size, point))
    for group in groups.values():
        first = min(group, key=lambda each: each[0])[1]
        yield from ((point, first) for _, point in group)


GIB = 1 << 30
BUSY = 0.9
"""The share of a run during which a link may carry KV without a remark."""
STALLED = 0.01
"""The share of a run during which steps may wait for copies without one."""
FEW = 0.01
"""The share of the prompt tokens that a tier gives at least without one."""


def remarks(uses: Iterable[TierUse], found: Hits) -> list[str]:
    """Say where a tier of an arm moved more than it saved."""
    return [text for use in uses for text in _remarks(use, getattr(found, use.tier))]


def _remarks(use: TierUse, share: float | None) -> Iterator[str]:
    what = TIERS[use.tier]
    memory = f"{what} ({use.caches:,} x {use.capacity_bytes / use.caches / GIB:,.4g} GiB)"
    for way, said in ((use.read, "from"), (use.written, "to")):
        if way.busy.highest > BUSY:
            yield (
                f"the link {said} {what} was busy for {way.busy.highest:.0%} of the run at the busiest worker, so copies "
                "waited for each other"
            )
    if use.stalled.highest > STALLED:
        yield (
            f"steps waited {use.stall_s:,.3g} s for {use.flushes:,.0f} copies to {what}, at one worker for "
            f"{use.stalled.highest:.1%} of the run, because blocks of the GPU were taken again before they were copied"
        )
    if use.refused:
        yield (
            f"{memory} had no room {use.refused:,.0f} times for what a request had computed, because all that it held was being "
            "copied"
        )
    if share is not None and share < FEW and use.written.bytes:
        evicted = f" and {use.evicted_chunks:,.0f} chunks evicted from it" if use.evicted_chunks else ""
        yield (
            f"{memory} gave {share:.2%} of the prompt tokens, though {use.written.bytes / 1e9:,.0f} GB were written to it"
            f"{evicted}"
        )

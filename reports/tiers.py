"""What KV tiers gave: where prompt tokens came from, and what that saved.

hits       each run          prompt tokens from the GPU, from each tier, computed; together they are all
saved      runs of two arms  GPU-seconds (and TTFT) of the one without, or with the smallest tiers, less those of the other
remarks    an arm's runs     where a tier moved more than it saved
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from reports import metrics
from reports.pools import TIERS, TierUse
from reports.records import Record
from reports.statistics import half_interval

SOURCES: dict[str, str] = {"gpu": "GPU", **{str(tier): label for tier, label in TIERS.items()}, "computed": "computed"}
"""Where a prompt token can come from, as fields of `Hits` are named, and what that is called."""
FORMULAS = {
    "hits": "prompt tokens found on the GPU, in host memory, on disk or in the store, or computed / all prompt tokens",
    "avoided": "prompt tokens that came from host memory, disk or the shared store, and the time in which a worker that does "
    "nothing else computes them x its GPUs, the warm-up included; what loading them took is not taken off",
    "gpu_s": "time during which a worker took steps x its GPUs, all workers together, the warm-up included",
    "gpu_s_saved": "GPU-seconds of the arm with the smallest tiers and otherwise the same settings (or of the first arm) - those of this one",
}
LABELS = {
    "hits": "hits by tier",
    "avoided": "prefill avoided",
    "gpu_s": "GPU-seconds",
    "gpu_s_saved": "GPU-seconds saved",
}


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


class Avoided(msgspec.Struct, frozen=True):
    """The prefill that hits beyond the GPU made unnecessary."""

    tokens: float
    gpu_s: float
    """GPU-seconds of a worker that does nothing else."""


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
    avoided: Avoided | None = None
    """Not known of live runs with tiers."""


class Saving(msgspec.Struct, frozen=True):
    """What one arm took less than another, on average over the repeats."""

    value: float
    share: float
    """Of what the other took."""
    repeats: int
    interval: tuple[float, float] | None = None
    """Of the value, 95%: over the repeats, None where there is one or all are equal; in a comparison that of TTFT is paired by
    request."""


class Saved(msgspec.Struct, frozen=True):
    """What an arm took less than another for the same work."""

    against: str
    """The other's name."""
    requests: int
    """In each run."""
    gpu_s: Saving
    ttft_s: Saving | None
    """Of the mean; None in a comparison where a queue grew."""
    avoided_gpu_s: Saving | None = None
    """What this arm's prefill avoided is more than the other's."""


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
        avoided=_avoided(run.tiers),
    )


def _avoided(uses: Sequence[TierUse]) -> Avoided | None:
    """Add up what the tiers of a run gave; None where it is not known of one."""
    tokens, gpu_s = 0.0, 0.0
    for use in uses:
        if use.tokens is UNSET or use.avoided_gpu_s is UNSET:
            return None
        tokens, gpu_s = tokens + use.tokens, gpu_s + use.avoided_gpu_s
    return Avoided(tokens, gpu_s)


def _total(values: Sequence[float | None]) -> float | None:
    """Add up what is known of all."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def gpu_seconds(runs: Sequence[Spent]) -> float | None:
    """Return the mean GPU-seconds of an arm's runs."""
    known = [run.gpu_s for run in runs if run.gpu_s is not None]
    return sum(known) / len(known) if known else None


def avoided(runs: Sequence[Spent]) -> Avoided | None:
    """Return the prefill that tiers made unnecessary, the mean over an arm's runs that know it."""
    known = [run.avoided for run in runs if run.avoided is not None]
    if not known:
        return None
    return Avoided(sum(one.tokens for one in known) / len(known), sum(one.gpu_s for one in known) / len(known))


def saved(against: str, before: Sequence[Spent], after: Sequence[Spent]) -> Saved | None:
    """Return what runs took less than others, repeat by repeat; None where they did not do the same work, or it is not known."""
    pairs = list(zip(before, after, strict=False))
    if not all(one.is_complete and other.is_complete and one.tokens == other.tokens for one, other in pairs):
        return None
    gpu_s = _saving([(one.gpu_s, other.gpu_s) for one, other in pairs])
    if gpu_s is None:
        return None
    prefill = [
        (other.avoided.gpu_s if other.avoided else None, one.avoided.gpu_s if one.avoided else None)
        for one, other in pairs
    ]
    ttft_s = _saving([(one.ttft_s, other.ttft_s) for one, other in pairs])
    return Saved(against, before[0].requests, gpu_s, ttft_s, _saving(prefill))


def _saving(pairs: Sequence[tuple[float | None, float | None]]) -> Saving | None:
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not known or len(known) < len(pairs):
        return None
    each = [before - after for before, after in known]
    value, base = (sum(values) / len(known) for values in (each, [before for before, _ in known]))
    half = half_interval(each)
    interval = (value - half, value + half) if half else None
    return Saving(value, value / base if base else 0.0, len(known), interval)


GIB = 1 << 30
OVERLAPPED = 0.5
"""The share of the avoided prefill by which GPU-seconds fall at least without a word on why."""
BUSY = 0.9
"""The share of a run during which a link may carry KV without a remark."""
STALLED = 0.01
"""The share of a run during which steps may wait for copies without one."""
FEW = 0.01
"""The share of the prompt tokens that a tier gives at least without one, and of GPU-seconds that is worth a word."""


def overlap(each: Iterable[tuple[Saved | None, float | None]]) -> str:
    """Say why GPU-seconds fell by less than the prefill that was avoided, from what was saved and is left; nothing if they did not."""
    known = [(one.gpu_s.value, one.avoided_gpu_s.value, left or 0.0) for one, left in each if one and one.avoided_gpu_s]
    if not any(gpu_s < OVERLAPPED * avoided_s and avoided_s > FEW * left for gpu_s, avoided_s, left in known):
        return ""
    return (
        "GPU-seconds fell by less than the prefill avoided: a worker that decodes is busy whether or not it computes prompts "
        "as well."
    )


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
                "waited for one another"
            )
    if use.stalled.highest > STALLED:
        yield (
            f"steps waited {use.stall_s:,.3g} s for {use.flushes:,.0f} copies to {what}, at one worker for "
            f"{use.stalled.highest:.1%} of the run, because GPU blocks were needed again before their copies had ended"
        )
    if use.refused:
        yield (
            f"{memory} had no room for what a request had computed ({'once' if use.refused == 1 else f'{use.refused:,.0f} times'}), because all it held was being copied"
        )
    if share is not None and share < FEW and use.written.bytes:
        evicted = f" and {use.evicted_chunks:,.0f} chunks evicted from it" if use.evicted_chunks else ""
        yield (
            f"{memory} gave {share:.2%} of the prompt tokens, though {use.written.bytes / 1e9:,.0f} GB were written to it"
            f"{evicted}"
        )

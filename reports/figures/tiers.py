"""What KV tiers contributed: where prompt tokens came from, and what that saved.

hits       each run          prompt tokens from the GPU, from each tier, and computed; together they are all
saved      runs of two arms  GPU-seconds (and TTFT) of the one without, or with the smallest tiers, minus those of the other
remarks    an arm's runs     where a tier moved more than it saved
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from reports.figures import metrics
from reports.figures.statistics import half_interval
from reports.record.pools import TIERS, TierUse
from reports.record.records import Record

SOURCES: dict[str, str] = {"gpu": "GPU", **{str(tier): label for tier, label in TIERS.items()}, "computed": "computed"}
"""Where a prompt token can come from: the fields of `Hits`, and their labels."""
FORMULAS = {
    "hits": "prompt tokens found on the GPU, in host memory, on disk or in the store, or computed / all prompt tokens",
    "avoided": "prompt tokens that came from host memory, disk or the shared store, and the time that a worker doing nothing "
    "else would need to compute them x its GPUs, including the warm-up; the cost of loading them is not subtracted",
    "gpu_s": "time in which a worker took steps x its GPUs, summed over all workers, including the warm-up",
    "gpu_s_saved": "GPU-seconds of the arm with the smallest tiers and otherwise the same settings (or of the first arm) - those of this arm",
}
LABELS = {
    "hits": "hits by tier",
    "avoided": "prefill avoided",
    "gpu_s": "GPU-seconds",
    "gpu_s_saved": "GPU-seconds saved",
}


class Hits(msgspec.Struct, frozen=True):
    """Where prompt tokens came from, as shares of all of them; None if that is not known."""

    gpu: float | None = None
    host: float | None = None
    disk: float | None = None
    store: float | None = None
    computed: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The known shares, starting with the GPU."""
        return {name: share for name in SOURCES if (share := getattr(self, name)) is not None}


class Avoided(msgspec.Struct, frozen=True):
    """The prefill that hits beyond the GPU avoided."""

    tokens: float
    gpu_s: float
    """GPU-seconds of a worker that does nothing else."""


class Spent(msgspec.Struct, frozen=True):
    """What a run used for its work."""

    requests: int
    """The requests that succeeded."""
    tokens: int
    """Their prompt and output tokens: its work."""
    is_complete: bool
    ttft_s: float | None
    """Mean, from the intended arrival."""
    gpu_s: float | None
    """GPU-seconds."""
    avoided: Avoided | None = None
    """Not known for live runs with tiers."""


class Saving(msgspec.Struct, frozen=True):
    """What one arm saved compared to another, on average over the repeats."""

    value: float
    share: float
    """The share of what the other used."""
    repeats: int
    interval: tuple[float, float] | None = None
    """The 95% interval of the value over the repeats, None if there is one or all are equal; for TTFT in a comparison, paired by
    request."""


class Saved(msgspec.Struct, frozen=True):
    """What an arm saved compared to another for the same work."""

    against: str
    """The other's name."""
    requests: int
    """The requests in each run."""
    gpu_s: Saving
    ttft_s: Saving | None
    """The mean TTFT saved; None in a comparison if a queue grew."""
    avoided_gpu_s: Saving | None = None
    """How much more prefill this arm avoided than the other."""


def hits(repeats: Sequence[Record]) -> Hits | None:
    """Return where the prompt tokens of an arm's runs came from, the mean over the repeats that know it; None if none does.

    A server that reports hits does not say where it found them, so the GPU's hits in a live run are known only if the tiers' are
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
    """Return what a run used; its GPU-seconds include its warm-up."""
    requests = run.requests[run.requests.succeeded]
    ttft_s = metrics.of_each(run.measured.requests, "ttft_sched")
    return Spent(
        requests=len(requests),
        tokens=int(requests.isl.sum(dtype=np.int64) + requests.osl.sum(dtype=np.int64)),
        is_complete=run.is_complete,
        ttft_s=float(np.nanmean(ttft_s)) if np.isfinite(ttft_s).any() else None,
        gpu_s=_total([None if pool.gpu_s is UNSET else pool.gpu_s for pool in run.pools]),
        avoided=_avoided(run.tiers),
    )


def _avoided(uses: Sequence[TierUse]) -> Avoided | None:
    """Add up the prefill that the tiers of a run avoided; None if it is not known for one."""
    tokens, gpu_s = 0.0, 0.0
    for use in uses:
        if use.tokens is UNSET or use.avoided_gpu_s is UNSET:
            return None
        tokens, gpu_s = tokens + use.tokens, gpu_s + use.avoided_gpu_s
    return Avoided(tokens, gpu_s)


def _total(values: Sequence[float | None]) -> float | None:
    """Add up values; None if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def gpu_seconds(runs: Sequence[Spent]) -> float | None:
    """Return the mean GPU-seconds of an arm's runs."""
    known = [run.gpu_s for run in runs if run.gpu_s is not None]
    return sum(known) / len(known) if known else None


def avoided(runs: Sequence[Spent]) -> Avoided | None:
    """Return the prefill that tiers avoided, the mean over the runs of an arm for which it is known."""
    known = [run.avoided for run in runs if run.avoided is not None]
    if not known:
        return None
    return Avoided(sum(one.tokens for one in known) / len(known), sum(one.gpu_s for one in known) / len(known))


def saved(against: str, before: Sequence[Spent], after: Sequence[Spent]) -> Saved | None:
    """Return what runs saved compared to others, repeat by repeat; None if they did not do the same work, or it is not known."""
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
"""If GPU-seconds fall by less than this share of the avoided prefill, a remark says why."""
BUSY = 0.9
"""The share of a run in which a link may carry KV without a remark."""
STALLED = 0.01
"""The share of a run in which steps may wait for copies without a remark."""
FEW = 0.01
"""A tier with a smaller share of the prompt tokens gets a remark; GPU-seconds are remarked on from this share on."""


def overlap_remark(each: Iterable[tuple[Saved | None, float | None]]) -> str:
    """Say why GPU-seconds fell by less than the prefill avoided, from what was saved and what is left; nothing if they did not."""
    known = [(one.gpu_s.value, one.avoided_gpu_s.value, left or 0.0) for one, left in each if one and one.avoided_gpu_s]
    if not any(gpu_s < OVERLAPPED * avoided_s and avoided_s > FEW * left for gpu_s, avoided_s, left in known):
        return ""
    return (
        "GPU-seconds fell by less than the prefill avoided, because a worker that decodes is busy whether or not it also "
        "computes prompts."
    )


def remarks(uses: Iterable[TierUse], found: Hits) -> list[str]:
    """Say which tiers of an arm moved more than they saved."""
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
            f"steps waited {use.stall_s:,.3g} s for {use.flushes:,.0f} copies to {what}, at the worst worker for "
            f"{use.stalled.highest:.1%} of the run, because GPU blocks were needed again before their copies had finished"
        )
    if use.refused:
        yield (
            f"{memory} had no room for what a request had computed ({'once' if use.refused == 1 else f'{use.refused:,.0f} times'}), because everything in it was being copied"
        )
    if share is not None and share < FEW and use.written.bytes:
        evicted = f" and {use.evicted_chunks:,.0f} chunks evicted from it" if use.evicted_chunks else ""
        yield (
            f"{memory} provided only {share:.2%} of the prompt tokens, although {use.written.bytes / 1e9:,.0f} GB were written to it"
            f"{evicted}"
        )

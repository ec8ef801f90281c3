"""What a workload is like: sizes, arrivals, and how much of it could be cached."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from workloads.reuse import reuse_of
from workloads.workload import Workload, extra_fields

COARSE = 2
"""With this many requests per tick on average, a clock is too coarse for them."""


@dataclass(frozen=True, slots=True)
class Description:
    """Figures of a workload. Lengths are in tokens, percentiles linear."""

    requests: int
    duration_s: float
    rate: float
    """Requests per second."""
    burstiness_cv: float
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson."""
    distinct_times: int
    isl: dict[str, float]
    osl: dict[str, float]
    ends: dict[str, int]
    """The number of answers by how they end."""
    priorities: dict[str, int]
    """The number of requests by priority; none if no request goes before others."""
    extra_body: dict[str, int]
    """The number of requests by further field of their bodies, such as tools."""
    adapters: dict[str, int]
    """The number of requests by LoRA adapter, the most asked for first; none if no request asks for one."""
    media: dict[str, int]
    """Requests with images or other media, their items, how many of these differ, and their tokens; none if there are none."""
    total_input_tokens: int
    total_output_tokens: int
    endless_cache_hit_share: float | None
    """Share of prompt tokens that one unlimited cache of full blocks would hold, in order of arrival; None if the workload
    does not say what prompts share."""
    endless_cache_mean_share: float | None
    """The same share taken per request, then averaged."""
    distinct_first_blocks: int | None


def describe_workload(workload: Workload) -> Description:
    """Measure a workload."""
    arrivals, columns = workload.columns.arrival_s, workload.columns
    isl, osl = columns.input_length.astype(np.int64), columns.output_length.astype(np.int64)
    hits = reuse_of(workload).endless_hits()
    gaps = np.diff(arrivals)
    cv = float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else float("nan")
    duration, knows = workload.duration_s, workload.knows_prefixes
    return Description(
        requests=len(workload),
        duration_s=duration,
        rate=(len(workload) - 1) / duration if duration > 0 else float("nan"),
        burstiness_cv=cv,
        distinct_times=len(np.unique(arrivals)),
        isl=_spread(isl),
        osl=_spread(osl),
        ends=ends(workload),
        priorities=priorities(workload),
        extra_body=extra_fields(workload.requests),
        adapters=adapters(workload),
        media=media(workload),
        total_input_tokens=int(isl.sum()),
        total_output_tokens=int(osl.sum()),
        endless_cache_hit_share=float(hits.sum() / isl.sum()) if knows else None,
        endless_cache_mean_share=float((hits / isl).mean()) if knows else None,
        distinct_first_blocks=len(np.unique(columns.ids[columns.starts[:-1]])) if knows else None,
    )


def lengths_of(workload: Workload) -> str:
    """Say how long prompts and answers are on average, and how much of the prompts is shared; nothing without requests."""
    if not len(workload):
        return ""
    isl = workload.columns.input_length.astype(np.int64)
    shared = "how much of them is shared is not known"
    if workload.knows_prefixes:
        shared = f"{reuse_of(workload).endless_hits().sum() / isl.sum():.0%} of them shared with earlier prompts"
    return f"mean ISL {isl.mean():,.0f} tokens, {shared}; mean OSL {workload.columns.output_length.mean():,.0f} tokens"


def best_shares(workload: Workload) -> dict[int, float] | None:
    """Return the highest hit share of caches by their size in tokens, each four times as large as the one before.

    Sizes range from one that holds every prompt to one that loses nothing; None if it is not known what prompts share.
    """
    if not workload.knows_prefixes:
        return None
    reuse, total = reuse_of(workload), int(workload.columns.input_length.sum())
    size, most, shares = 1 << 14, reuse.endless_hits().sum(), dict[int, float]()
    while not shares or max(shares.values()) < most / total:
        if size >= reuse.num_blocks.max() * workload.block_size:
            shares[size] = float(reuse.best_hits(size // workload.block_size).sum() / total)
        size *= 4
    return shares


def ends(workload: Workload) -> dict[str, int]:
    """Count answers by how they end."""
    return dict(Counter(workload.columns.values("ends")))


def priorities(workload: Workload) -> dict[str, int]:
    """Count requests by priority, the first to go first; nothing if no request goes before others."""
    counts = Counter(workload.columns.values("priority"))
    return {str(level): counts[level] for level in sorted(counts)} if len(counts) > 1 else {}


def adapters(workload: Workload) -> dict[str, int]:
    """Count requests by LoRA adapter, the most asked for first; nothing if no request asks for one."""
    return dict(Counter(filter(None, workload.columns.values("adapter"))).most_common())


def media(workload: Workload) -> dict[str, int]:
    """Count requests with images or other media, and these; nothing if there are none."""
    prompts = [items for items in workload.columns.values("media") if items]
    if not prompts:
        return {}
    found = [item for items in prompts for item in items]
    return {
        "requests": len(prompts),
        "items": len(found),
        "distinct": len({item.id for item in found}),
        "tokens": sum(item.tokens for item in found),
    }


def advice(workload: Workload) -> list[str]:
    """Say what to know before a replay: whether arrivals are unrealistic, and what is sent only with texts."""
    hints = _arrivals(workload)
    if names := extra_fields(request for request in workload if request.content is not None):
        hints.append(
            f"bodies have further fields ({', '.join(names)}); dynabench run sends them with --prompts text or chat, and "
            "leaves them out with token ids"
        )
    return hints


def _arrivals(workload: Workload) -> list[str]:
    """Suggest replacements for unrealistic arrivals: ticks of a coarse clock, or all at once."""
    times = workload.columns.scheduled_s
    ticks = np.unique(times)
    if len(ticks) < 2:
        return at_once(workload)
    if len(times) < COARSE * len(ticks):
        return []
    return [
        f"the clock is coarse: {len(times):,} requests in {len(ticks):,} ticks, about {np.median(np.diff(ticks)):g} s "
        "apart, so a replay sends bursts; --spread-ticks spreads them out"
    ]


def at_once(workload: Workload) -> list[str]:
    """Say that all requests come in one burst, as those of files without arrival times do."""
    times = workload.columns.scheduled_s
    if len(times) < 2 or times.min() < times.max():
        return []
    return [
        f"all {len(times):,} requests that wait for no other arrive at once; set arrival times with --arrival, "
        "or send them with --concurrency or --session-concurrency"
    ]


def _spread(values: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(values.max()),
    }

"""Tables of KV tiers: what they held and moved in a comparison, what they contributed in a sweep, and how to read both."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import UNSET, structs

from reports.figures.cells import gigabytes, milliseconds, number, saving, share
from reports.figures.tier_sizes import smallest
from reports.figures.tiers import FORMULAS, GIB, SOURCES, Hits, Saved, Saving, avoided, saved
from reports.key import key_of
from reports.record.pools import TIERS, TierTraffic, TierUse
from reports.summary import ArmSummary, Summary
from reports.sweep.points import Point
from reports.tables.grid import Grid


def tier_grid(summary: Summary) -> Grid | None:
    """Lay out what KV tiers held and moved; None if no arm has any."""
    if not summary.has_tiers:
        return None
    columns: dict[str, Callable[[TierUse], str]] = {
        "caches": lambda use: number(use.caches),
        "GiB each": lambda use: number(use.capacity_bytes / use.caches / GIB, 1),
        "tokens each": lambda use: number(use.capacity_tokens / use.caches),
        "full at the end": lambda use: f"{use.full:.0%}",
        "read (GB)": lambda use: gigabytes(use.read),
        "written (GB)": lambda use: gigabytes(use.written),
        "reading": lambda use: _share_of(use.read),
        "writing": lambda use: _share_of(use.written),
        "waited for": lambda use: number(use.flushes),
        "waited (s)": lambda use: number(use.stall_s, 2),
        "evicted chunks": lambda use: number(use.evicted_chunks),
        "prefill avoided (tokens)": lambda use: number(None if use.tokens is UNSET else use.tokens),
        "prefill avoided (GPU-s)": lambda use: number(None if use.avoided_gpu_s is UNSET else use.avoided_gpu_s),
    }
    lines = [
        (f"{arm}: {_tier_label(use, figures)}", [shown(use) for shown in columns.values()])
        for arm, figures in summary.arms.items()
        for use in figures.tiers or ()
    ]
    return Grid(
        "What did KV tiers hold and move?",
        list(columns),
        lines,
        "Reading and writing: the mean / highest share of the run in which a link carried KV out of or into the tier. "
        "Waited for: copies that steps had to wait for, because the GPU blocks were needed again; waited: for how long; both are totals of all "
        "workers. Columns without any value are left out.",
    ).eventful()


def _tier_label(use: TierUse, arm: ArmSummary) -> str:
    """Name a tier, with its pool if several pools have such a tier."""
    has_others = sum(other.tier == use.tier for other in arm.tiers or ()) > 1
    return f"{use.pool}, {TIERS[use.tier]}" if has_others else TIERS[use.tier]


def _share_of(traffic: TierTraffic) -> str:
    """Format the mean and highest share of the run in which links carried it."""
    return f"{traffic.busy.mean:.1%} / {traffic.busy.highest:.1%}"


def tiers_note(summary: Summary) -> str:
    """Explain the figures of KV tiers."""
    text = f"Hits, computed: shares of all prompt tokens. GPU-seconds: {FORMULAS['gpu_s']}."
    known = [arm.saved for arm in summary.arms.values() if arm.saved]
    if not known:
        return text
    repeats = known[0].gpu_s.repeats
    if repeats == 1:
        how = "from one run each, so without an interval"
    elif any(one.gpu_s.interval for one in known):
        how = f"the mean over {repeats} repeats, with its 95% interval"
    else:
        how = f"the mean over {repeats} equal repeats, so without an interval"
    return f"{text} Prefill avoided: {FORMULAS['avoided']}. Saved: {FORMULAS['gpu_s_saved']}; {how}."


def swept(points: Mapping[str, Point], axes: Sequence[str]) -> Grid | None:
    """Lay out what KV tiers contributed at each point and saved against the smallest otherwise equal ones; None without tiers.

    Args:
        points: points by the names of their lines.
        axes: the settings in which lines differ.
    """
    if not any(point.tiers for point in points.values()):
        return None
    savings = saved_along(points.values())
    sources = [name for name in SOURCES if any(getattr(point.hits or Hits(), name) for point in points.values())]
    key = key_of(list(points))
    lines = [
        (
            key[name].name,
            [share(getattr(point.hits or Hits(), source)) for source in sources] + _spent(point, savings[point.name]),
        )
        for name, point in points.items()
    ]
    return Grid(
        "What did KV tiers contribute?",
        [*(SOURCES[name] for name in sources), *SPENT],
        lines,
        "GPU, tiers and computed: shares of all prompt tokens. Waited: how long steps waited for copies of GPU "
        f"blocks that were needed again. Avoided: {FORMULAS['avoided']}. Saved: against the smallest tiers with otherwise the same settings. "
        f"GPU-s: {FORMULAS['gpu_s']}. TTFT: the mean; not compared if a queue grew. In brackets: 95% intervals over "
        "repeats that differ.",
        ", ".join(axes).replace("_", " "),
    ).eventful()


def saved_along(points: Iterable[Point]) -> dict[str, Saved | None]:
    """Return what each point saved compared to the otherwise equal one with the smallest tiers."""
    found: dict[str, Saved | None] = {}
    for point, first in smallest((point.changes, point) for point in points):
        is_larger = sum(use.capacity_bytes for use in point.tiers) > sum(use.capacity_bytes for use in first.tiers)
        its = saved(first.name, first.spent, point.spent) if is_larger else None
        is_stable = point.is_stable and first.is_stable
        found[point.name] = its if its is None or is_stable else structs.replace(its, ttft_s=None)
    return found


SPENT = (
    "avoided (tokens)",
    "avoided (GPU-s)",
    "GPU-s",
    "GPU-s saved",
    "TTFT saved (ms)",
    "read (GB)",
    "written (GB)",
    "waited (s)",
)


def _spent(point: Point, its: Saved | None) -> list[str]:
    """Format what the tiers of a point contributed and moved, and what it saved compared to the smallest."""

    def total(of: Callable[[TierUse], float], digits: int) -> str:
        return number(sum(of(use) for use in point.tiers), digits) if point.tiers else "-"

    gave = avoided(point.spent) if point.tiers else None
    return [
        number(gave.tokens) if gave else "-",
        number(gave.gpu_s) if gave else "-",
        number(point.gpu_s),
        saving(its.gpu_s) if its else "-",
        _ttft_saved(its.ttft_s) if its and its.ttft_s else "-",
        total(lambda use: use.read.bytes / 1e9, 1),
        total(lambda use: use.written.bytes / 1e9, 1),
        total(lambda use: use.stall_s, 2),
    ]


def _ttft_saved(found: Saving) -> str:
    """Format the mean TTFT saved, with its interval over repeats."""
    value, *ends = (f"{'-' * (s < 0)}{milliseconds(abs(s))}" for s in (found.value, *(found.interval or ())))
    return f"{value} [{', '.join(ends)}]" if ends else value

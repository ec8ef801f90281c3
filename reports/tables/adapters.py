"""A table of LoRA adapters: who asked for them, and what it cost to have them on the GPUs."""

from collections.abc import Callable, Sequence

from reports.figures.cells import milliseconds, number
from reports.record.pools import AdapterUse
from reports.summary import Summary
from reports.tables.grid import Grid

MOST = 8
"""Adapters of an arm that have a line of their own, those with the most requests; the others share one."""
MOST_ARMS = 4
"""With more arms, only the sums of each are shown."""
COLUMNS: dict[str, Callable[[Sequence[AdapterUse]], str]] = {
    "requests": lambda uses: number(sum(use.requests for use in uses)),
    "TTFT mean (ms)": lambda uses: milliseconds(_mean_ttft_s(uses)),
    "loads": lambda uses: _total([use.loads for use in uses], 0),
    "reads from disk": lambda uses: _total([use.reads for use in uses], 0),
    "waited (s)": lambda uses: _total([use.stall_s for use in uses], 2),
}


def adapter_grid(summary: Summary) -> Grid | None:
    """Lay out what adapters were asked for; None if no arm has any."""
    has_details = len(summary.arms) <= MOST_ARMS
    lines = [
        (f"{arm}: {label}", [shown(uses) for shown in COLUMNS.values()])
        for arm, figures in summary.arms.items()
        for label, uses in _rows(figures.adapters or (), has_details=has_details)
    ]
    if not lines:
        return None
    return Grid(
        "Which LoRA adapters were asked for?",
        list(COLUMNS),
        lines,
        "Loads: how often an adapter was copied to a GPU because it had no slot there. Steps waited for that, and for reads "
        "from disk, all workers together. Requests for the model itself are not listed.",
    ).eventful()


def _rows(uses: Sequence[AdapterUse], *, has_details: bool) -> list[tuple[str, Sequence[AdapterUse]]]:
    """Return labels and what they stand for, all adapters together first."""
    if not uses:
        return []
    ordered = sorted(uses, key=lambda use: -use.requests)
    found: list[tuple[str, Sequence[AdapterUse]]] = [(f"all {len(uses)} adapters", uses)]
    if not has_details:
        return found
    found += [(use.adapter, [use]) for use in ordered[:MOST]]
    if others := ordered[MOST:]:
        found.append((f"{len(others)} more", others))
    return found


def _mean_ttft_s(uses: Sequence[AdapterUse]) -> float | None:
    known = [(use.requests, use.ttft_s) for use in uses if use.ttft_s is not None]
    total = sum(count for count, _ in known)
    return sum(count * seconds for count, seconds in known) / total if total else None


def _total(values: Sequence[object], digits: int) -> str:
    known = [value for value in values if isinstance(value, (int, float))]
    return number(sum(known), digits) if known else "-"

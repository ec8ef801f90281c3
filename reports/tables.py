"""The table on the console."""

from typing import Any

from rich.table import Table

from reports.metrics import LABELS

Json = dict[str, Any]


def comparison(summary: Json) -> Table:
    """One column per arm: the metrics, and the paired difference of each to the first."""
    table = Table(title="Router modes compared", title_justify="left", caption_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    arms = summary["arms"]
    for arm in arms:
        table.add_column(arm, justify="right")
    for label, cells in rows(summary):
        table.add_row(label, *cells)
    return table


def rows(summary: Json) -> list[tuple[str, list[str]]]:
    """Return the lines of the table: a label, and a cell per arm."""
    arms: dict[str, Json] = summary["arms"]
    lines: list[tuple[str, list[str]]] = []
    for name in ("ttft_sched", "itl", "tpot", "e2e_sched"):
        for statistic in ("mean", "p50", "p90", "p99"):
            label = f"{LABELS[name]} {statistic} (ms)"
            lines.append((label, [milliseconds(figures[name][statistic]) for figures in arms.values()]))
        if name in ("ttft_sched", "tpot", "e2e_sched") and len(arms) > 1:
            lines.append(
                (f"{LABELS[name]} vs {summary['baseline']}", [_difference(summary, arm, name) for arm in arms])
            )
    lines.append(("requests/s", [_number(figures["throughput"]["requests_per_s"], 2) for figures in arms.values()]))
    lines.append(
        ("output tokens/s", [_number(figures["throughput"]["output_tokens_per_s"], 0) for figures in arms.values()])
    )
    lines.append(("cache hit share", [f"{figures['cache']['hit_share']:.1%}" for figures in arms.values()]))
    lines.append(
        ("imbalance (max/mean)", [f"{figures['imbalance']['work_max_over_mean']:.3f}" for figures in arms.values()])
    )
    lines.append(("preemptions", [_number(figures["preemptions"], 0) for figures in arms.values()]))
    if any(figures["failed"] for figures in arms.values()):
        lines.append(("failed requests", [f"{figures['failed']:,}" for figures in arms.values()]))
    return lines


def milliseconds(seconds: float | None) -> str:
    """Format a duration in ms, or n/a where the sample is too small."""
    if seconds is None:
        return "n/a"
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _difference(summary: Json, arm: str, name: str) -> str:
    if arm == summary["baseline"]:
        return "-"
    pair = summary["differences"][arm][name]
    if pair is None:
        return "n/a"
    mark = " ~" if pair["low"] <= 0 <= pair["high"] else ""
    return f"{pair['mean'] * 1000:+.2f} [{pair['low'] * 1000:+.2f}, {pair['high'] * 1000:+.2f}]{mark}"


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:,.{digits}f}"

"""The tables on the console and in Markdown."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reports.figures.cells import milliseconds, number, saving, share
from reports.figures.conditions import METRICS
from reports.figures.like import table as like
from reports.figures.metrics import LABELS, LEAST_SAMPLES
from reports.figures.tiers import SOURCES
from reports.foreign import markdown_cell
from reports.record.records import Record
from reports.summary import PAIRED, ArmSummary, Difference, Summary
from reports.tables.grid import Grid
from reports.tables.tiers import tiers_note
from reports.tables.use import grids
from reports.verdicts.gates import GateResult
from reports.verdicts.headline import elsewhere, head, margin, notes, step_times, understood

ELSEWHERE = "Router modes in other routers"
STATISTICS = ("mean", "p50", "p90", "p99")
TIMES = ("ttft_sched", "ttst", "itl", "tpot", "e2e_sched")
Line = tuple[str, Callable[[ArmSummary], Any], Callable[[Any], str]]
"""A line of the comparison: its label, the value of an arm, and its format."""


def comparison(summary: Summary, *, is_whole: bool = True) -> Grid:
    """Return a table with a column per arm: all or the key metrics, and the paired differences to the first arm."""
    title = "Arms compared" if len(summary.arms) > 1 else "Figures"
    return Grid(title, list(summary.arms), rows(summary) if is_whole else key_rows(summary))


def too_few(figures: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Say why percentiles are not known, given the cells of each figure; nothing if all are."""
    unknown = " ".join(label for label, cells in figures if "n/a" in cells)
    lacking = [
        f"a p{share} needs {least:,}" for share, least in LEAST_SAMPLES.items() if least > 1 and f" p{share}" in unknown
    ]
    return f"n/a: too few requests; {' and '.join(lacking)}." if lacking else ""


def key_rows(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the lines of most interest, the limited metrics first."""
    limited = [limit for limit in summary.conditions if limit.statistic is not None]
    lines = [_line(METRICS[limit.metric], limit.statistic or "") for limit in limited]
    first = dict(_cells(lines, list(summary.arms.values())))
    every = dict(rows(summary))
    wanted = [
        *KEY,
        *(label for label, *_ in FAILURES),
        *(f"{LABELS[name]} mean vs {summary.baseline}" for name in PAIRED),
        *(label for label, *_ in TIERED),
        SAVED,
    ]
    return [
        *first.items(),
        *((label, cells) for label, cells in every.items() if label in wanted and label not in first),
    ]


def rows(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the lines of the table: a label, and a cell per arm; empty lines are left out."""
    return [row for section in sections(summary) for row in section.rows]


def sections(summary: Summary) -> list[Grid]:
    """Return everything known about the arms, by topic; empty lines are left out."""
    arms = list(summary.arms.values())
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for name in TIMES:
        if name == "ttst" and not summary.shows_ttst:
            continue
        found[LABELS[name]] = _cells(_latency(name), arms)
        if name in PAIRED and len(arms) > 1:
            found[LABELS[name]] += [
                (
                    f"{LABELS[name]} {statistic} vs {summary.baseline}",
                    [_difference(summary, arm, name, statistic) for arm in summary.arms],
                )
                for statistic in ("mean", "p90")
            ]
    covered = summary.bound.covered
    found["Throughput"] = _cells(THROUGHPUT, arms)
    found["Prefix caching and balance"] = [
        *_cells(ROUTED, arms),
        *_best_hits(summary),
        ("random to bound, covered", [share(covered.get(arm)) for arm in summary.arms]),
    ]
    if summary.has_tiers:
        saved = [arm.saved.gpu_s if arm.saved else None for arm in arms]
        found["KV tiers"] = [*_cells(TIERED, arms), (SAVED, [saving(one) if one else "-" for one in saved])]
    found["Engines"] = _cells(ENGINES, arms)
    if any(arm.failed for arm in arms):
        found["Failures"] = _cells(FAILURES, arms)
    if any(arm.schedule_lag.max for arm in arms):
        found["Load generator"] = _cells(CLIENT, arms)
    return [Grid(title, list(summary.arms), known) for title, lines in found.items() if (known := _known(lines))]


def _known(lines: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Leave out empty lines."""
    return [(label, cells) for label, cells in lines if any(cell != "n/a" for cell in cells) or "p99" in label]


def _best_hits(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the highest hit shares that each arm's memory allows, and the share of the highest that it reached."""
    best = [(summary.bound.hit_shares or {}).get(arm, {}) for arm in summary.arms]
    tiers = list(dict.fromkeys(tier for shares in sorted(best, key=len, reverse=True) for tier in shares))
    by_tier = [
        (f"best hits: {'with ' if place else ''}{tier}", [share(shares.get(tier)) for shares in best])
        for place, tier in enumerate(tiers)
    ]
    return [
        *(by_tier if len(tiers) > 1 else []),
        ("best possible hit share", [share(max(shares.values(), default=None)) for shares in best]),
        ("best possible, reached", [share((summary.bound.reached or {}).get(arm)) for arm in summary.arms]),
    ]


def _cells(lines: Sequence[Line], arms: list[ArmSummary]) -> list[tuple[str, list[str]]]:
    return [(label, [shown(of(arm)) for arm in arms]) for label, of, shown in lines]


def _latency(name: str) -> list[Line]:
    return [_line(name, statistic) for statistic in STATISTICS]


def _line(name: str, statistic: str) -> Line:
    return f"{LABELS[name]} {statistic} (ms)", partial(_statistic, name=name, statistic=statistic), milliseconds


def like_grid(runs: list[Record], tool: str) -> Grid:
    """Lay out the figures as another tool defines them, a line per arm and metric."""
    arms: dict[str, list[Record]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    lines = [
        (arm, [name, *(milliseconds(figures.at(key)) for key in STATISTICS), formula])
        for arm, repeats in arms.items()
        for name, formula, figures in like(repeats, tool)
    ]
    return Grid(f"As {tool} would report it (ms)", ["metric", *STATISTICS, "formula"], lines)


def markdown(summary: Summary, manifest: dict[str, Any], gates: Sequence[GateResult]) -> str:
    """Summarize a comparison for a pull request."""
    lines = [f"### {markdown_cell(manifest['title'])}", ""]
    lines += [f"**Not valid**: {markdown_cell(note)}" for note in notes(summary)]
    lines += ["", markdown_cell(summary.verdict), ""]
    lines += [f"- **{gate.state.capitalize()}**: {markdown_cell(gate.text)}" for gate in gates] + [""] * bool(gates)
    figures = comparison(summary)
    lines += replace(figures, rows=[row for row in figures.rows if "p50" not in row[0]]).markdown()
    for grid in grids(summary):
        lines += ["", f"**{grid.title}**", "", *grid.markdown()]
    lines += [
        "",
        f"<sub>{markdown_cell(manifest['subtitle'])}. {markdown_cell(step_times(manifest)).strip()} {markdown_cell(' '.join(understood(head(manifest))))} Differences in % [95% interval]; ~: may be noise; =: too small to matter.</sub>",
    ]
    return "\n".join(lines)


def limit_grid(summary: Summary) -> Grid | None:
    """Lay out which limits each arm meets, and by how much; None without limits."""
    lines: dict[str, list[str]] = {}
    for figures in summary.arms.values():
        for outcome in figures.outcomes or ():
            lines.setdefault(outcome.limit, []).append(margin(outcome))
    each = [str(limit) for limit in summary.conditions if limit.statistic is None]
    if each:
        reached = [figures.goodput.attainment if figures.goodput else None for figures in summary.arms.values()]
        lines[f"requests within {' and '.join(each)}"] = [share(one) for one in reached]
    failures = any(figures.failed for figures in summary.arms.values())
    note = "A failed request counts as infinite here, but not in the percentiles of other tables." * failures
    return Grid("Limits, and the margin to each", list(summary.arms), list(lines.items()), note) if lines else None


def difference_grid(summary: Summary) -> Grid | None:
    """Lay out the verdict on each difference to the first arm; None if there is none."""
    if not summary.differences:
        return None
    lines = [
        (
            f"{LABELS[name]} {statistic}",
            [_verdict(summary.difference(arm, name, statistic)) for arm in summary.differences],
        )
        for name in PAIRED
        for statistic in STATISTICS
    ]
    floor = " and the difference is larger than that of two runs of the same arm (A/A)" if summary.noise_floor else ""
    return Grid(
        f"Differences to {summary.baseline}",
        list(summary.differences),
        _known(lines),
        f"In %, paired by request, with a 95% block-bootstrap interval ({summary.num_blocks} blocks). Better or worse: the "
        f"interval excludes zero{floor}. Equal: too small to matter. {summary.power}",
    )


def _verdict(pair: Difference | None) -> str:
    if pair is None:
        return "n/a"
    if pair.verdict == "unstable" or pair.is_exact:
        return pair.verdict
    low, high = pair.shares()
    return f"{pair.verdict} {pair.relative:+.1%} [{low * 100:+.1f}, {high * 100:+.1f}]"


def elsewhere_grid(manifest: dict[str, Any]) -> Grid | None:
    """Lay out what other routers call the router modes; None if arms do not differ by it."""
    named = elsewhere(manifest)
    return Grid(ELSEWHERE, ["name and flags"], [(mode, [where]) for mode, where in named.items()]) if named else None


def figures(summary: Summary) -> Grid:
    """Lay out the figures of most interest."""
    return Grid("Key figures", list(summary.arms), key_rows(summary), figures_note(summary))


def figures_note(summary: Summary) -> str:
    """Explain the figures."""
    text = "Times in ms; n/a: not known, or too few samples."
    if summary.differences:
        text += (
            f" vs {summary.baseline}: difference in % with its 95% interval; ~: may be noise; =: too small to matter."
        )
    if summary.has_tiers:
        text += f" {tiers_note(summary)}"
    if summary.bound.ttft_mean_s:
        text += (
            f" No router could have a mean TTFT below {milliseconds(summary.bound.ttft_mean_s)} ms. This is the larger of two bounds: every "
            "prompt alone on an empty machine with the best cache that the memory allows, and all prompts queueing for "
            "one machine as fast as all workers together."
        )
    return text


ACROSS = 8
"""The number of columns that fit on a page."""


def for_page(grid: Grid) -> list[Grid]:
    """Return tables that fit on a page; if there are many columns, rows and columns are swapped."""
    if len(grid.columns) <= ACROSS:
        return [grid]
    whole = grid.turned()
    return [
        replace(
            whole,
            columns=whole.columns[first : first + ACROSS],
            rows=[(label, cells[first : first + ACROSS]) for label, cells in whole.rows],
            note=grid.note if first + ACROSS >= len(whole.columns) else "",
        )
        for first in range(0, len(whole.columns), ACROSS)
    ]


def _difference(summary: Summary, arm: str, name: str, statistic: str) -> str:
    if arm == summary.baseline:
        return "-"
    pair = summary.difference(arm, name, statistic)
    if pair is None:
        return "n/a"
    if pair.verdict == "unstable":
        return "unstable"
    if pair.is_exact:
        return "equal"
    mark = {"inconclusive": " ~", "equal": " ="}.get(pair.verdict, "")
    low, high = pair.shares()
    return f"{pair.relative:+.1%} [{low * 100:+.1f}, {high * 100:+.1f}]{mark}"


def _statistic(arm: ArmSummary, *, name: str, statistic: str) -> float | None:
    return arm.metric(name).at(statistic)


def _with_failures(arm: ArmSummary, *, name: str) -> float | None:
    """Return the 90th percentile, with each failure as an infinite time."""
    value = arm.metric(name).with_failures("p90")
    return math.inf if value is None and arm.failed else value


def _maybe_infinite(seconds: float | None) -> str:
    return "infinite" if seconds == math.inf else milliseconds(seconds)


def _together(arm: ArmSummary) -> float | None:
    """Return the share of tokens that arrived in one event or one read with others."""
    tokens, together = arm.client.get("tokens"), arm.client.get("tokens_together")
    return together / tokens if tokens and together is not None else None


def _reasoning(arm: ArmSummary) -> float | None:
    """Return the share of tokens that are reasoning; None if none are."""
    tokens, thought = arm.client.get("tokens"), arm.client.get("reasoning_tokens")
    return thought / tokens if tokens and thought else None


def _stopped(arm: ArmSummary) -> float | None:
    """Return the share of answers that ended by EOS or another stop; None if none did, as a load generator wants."""
    if not arm.ends or "stop" not in arm.ends:
        return None
    return arm.ends["stop"] / sum(arm.ends.values())


_hundredths = partial(number, digits=2)
_thousandths = partial(number, digits=3)
THROUGHPUT: tuple[Line, ...] = (
    ("requests/s", lambda arm: arm.throughput.requests_per_s, _hundredths),
    ("output tokens/s", lambda arm: arm.throughput.output_tokens_per_s, number),
    ("reasoning (of output tokens)", _reasoning, share),
    ("goodput (requests/s)", lambda arm: arm.goodput.goodput_per_s if arm.goodput else None, _hundredths),
    ("attainment", lambda arm: arm.goodput.attainment if arm.goodput else None, share),
)
ROUTED: tuple[Line, ...] = (
    ("hits: unlimited cache", lambda arm: arm.waterfall.endless, share),
    ("hits: best worker", lambda arm: arm.waterfall.best, share),
    ("hits: predicted", lambda arm: arm.waterfall.predicted, share),
    ("cache hit share", lambda arm: arm.waterfall.actual, share),
    ("affinity breaks", lambda arm: arm.affinity_breaks, share),
    ("imbalance (max/mean)", lambda arm: arm.imbalance.work_max_over_mean, _thousandths),
)
TIERED: tuple[Line, ...] = (
    *(
        (
            "computed" if name == "computed" else f"hits: {label}",
            lambda arm, name=name: getattr(arm.hits or None, name, None),
            share,
        )
        for name, label in SOURCES.items()
    ),
    ("prefill avoided (tokens)", lambda arm: arm.avoided.tokens if arm.avoided else None, number),
    ("prefill avoided (GPU-s)", lambda arm: arm.avoided.gpu_s if arm.avoided else None, number),
    ("GPU-seconds", lambda arm: arm.gpu_s or None, number),
)
"""Where prompt tokens came from, and what all the work used."""
SAVED = "GPU-seconds saved"
ENGINES: tuple[Line, ...] = (
    ("TTFT outside of the engine", lambda arm: arm.client.get("overhead_share"), share),
    ("preemptions", lambda arm: arm.preemptions, number),
    ("answers ended by EOS", _stopped, share),
)
KEY = (
    "TTFT mean (ms)",
    "TTFT p99 (ms)",
    "TPOT mean (ms)",
    "E2E mean (ms)",
    "requests/s",
    "goodput (requests/s)",
    "cache hit share",
    "best possible hit share",
    "imbalance (max/mean)",
)
"""Lines that a terminal shows unless asked for all."""
FAILURES: tuple[Line, ...] = (
    ("failed requests", lambda arm: arm.failed, number),
    ("TTFT p90, failures infinite (ms)", partial(_with_failures, name="ttft_sched"), _maybe_infinite),
    ("E2E p90, failures infinite (ms)", partial(_with_failures, name="e2e_sched"), _maybe_infinite),
)
CLIENT: tuple[Line, ...] = (
    ("schedule lag p99 (ms)", lambda arm: arm.schedule_lag.p99, milliseconds),
    ("client CPU (of a core)", lambda arm: arm.client.get("cpu_share"), share),
    ("tokens that came together", _together, share),
    ("requests sent again", lambda arm: arm.client.get("retried") or None, number),
)

"""The tables on the console and in Markdown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reports.conditions import METRICS
from reports.fidelity import ArmFidelity, Deviation
from reports.foreign import markdown_cell
from reports.grid import Grid
from reports.like import table as like
from reports.metrics import LABELS
from reports.outcomes import Outcome, binding, percent, told
from reports.pools import TIERS, TierUse, Traffic, Use
from reports.records import Record
from reports.slo import parse
from reports.split import LABELS as PARTS
from reports.split import Split
from reports.summary import PAIRED, ArmSummary, Difference, Summary
from reports.tiers import FORMULAS, GIB, SOURCES, Saving

STATISTICS = ("mean", "p50", "p90", "p99")
TIMES = ("ttft_sched", "ttst", "itl", "tpot", "e2e_sched")


Line = tuple[str, Callable[[ArmSummary], Any], Callable[[Any], str]]
"""A line of the comparison: its label, what it shows of an arm, and how."""


def comparison(summary: Summary, *, is_whole: bool = True) -> Grid:
    """One column per arm: the metrics, and the paired difference of each to the first; all of them, or the key ones."""
    return Grid("Arms compared", list(summary.arms), rows(summary) if is_whole else key_rows(summary))


def key_rows(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the lines that most look for: first what is limited."""
    limited = [limit for limit in map(parse, summary.limits) if limit.statistic is not None]
    lines = [_line(METRICS[limit.metric], limit.statistic or "") for limit in limited]
    first = dict(_cells(lines, list(summary.arms.values())))
    every = dict(rows(summary))
    wanted = [
        *KEY,
        *(label for label, *_ in FAILURES),
        *(f"{LABELS[name]} mean vs {summary.baseline}" for name in ("ttft_sched", "tpot")),
        *(label for label, *_ in TIERED),
        SAVED,
    ]
    return [
        *first.items(),
        *((label, cells) for label, cells in every.items() if label in wanted and label not in first),
    ]


def rows(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the lines of the table: a label, and a cell per arm; lines that say nothing are left out."""
    return [row for section in sections(summary) for row in section.rows]


def sections(summary: Summary) -> list[Grid]:
    """Return all that is known of the arms, by what it is of; lines that say nothing are left out."""
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
    """Leave out lines that say nothing."""
    return [(label, cells) for label, cells in lines if any(cell != "n/a" for cell in cells) or "p99" in label]


def _best_hits(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return the highest hit shares that each arm's memory allows, and how much of the highest it reached."""
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


def grids(summary: Summary) -> list[Grid]:
    """Return the small tables that say something: where TTFT goes, how busy pools and links were, what KV tiers moved."""
    return [grid for grid in (split_grid(summary), pool_grid(summary), tier_grid(summary)) if grid is not None]


def split_grid(summary: Summary) -> Grid | None:
    """Lay out the parts of the mean TTFT; None where nobody knows when a worker began with a request."""
    splits = [arm.split or None for arm in summary.arms.values()]
    if not any(splits):
        return None
    named = {
        label: [split.parts.get(name) if split else None for split in splits]
        for name, label in PARTS.items()
        if any(split and name in split.parts for split in splits)
    }
    totals = [split.ttft if split else None for split in splits]
    lines = [
        (f"{label} (ms)", ["-" if part is None else milliseconds(part) for part in parts])
        for label, parts in named.items()
    ]
    lines.append(("TTFT from sent (ms)", [milliseconds(total) for total in totals]))
    lines += [
        (
            f"{label} (share)",
            [
                "-" if part is None or not total else f"{part / total:.0%}"
                for part, total in zip(parts, totals, strict=True)
            ],
        )
        for label, parts in named.items()
    ]
    if any(split and split.apart for split in splits):
        lines.append(("prefilled by another worker", [share(split.apart if split else None) for split in splits]))
    return Grid(
        "Where does TTFT go? (means)",
        list(summary.arms),
        lines,
        split_note(dict(zip(summary.arms, splits, strict=True))),
    )


def split_note(splits: dict[str, Split | None]) -> str:
    """Say how the parts of TTFT are to be read."""
    text = (
        "The parts add up to the mean TTFT from sent. Where one worker does all, its prefill includes the first step."
    )
    early = [name for name, split in splits.items() if split and split.blocks_first]
    if early:
        text += f" The decode queue comes before the prefill in {', '.join(early)}."
    return text


def pool_grid(summary: Summary) -> Grid | None:
    """Lay out how busy pools and links were; None where no arm has a pool that only prefills, or it is not known."""
    arms = {arm: figures for arm, figures in summary.arms.items() if figures.pools}
    if not any(figures.is_apart and any(pool.busy for pool in figures.pools or ()) for figures in arms.values()):
        return None
    lines = [(f"{arm}: {label}", cells) for arm, figures in arms.items() for label, cells in _pool_lines(figures)]
    return Grid(
        "How busy were workers and links? (mean / highest share)",
        ["workers", "GPUs", "computing", "sending", "receiving"],
        lines,
        "Computing: the share of the run in which a worker took steps. Sending and receiving: the share of what its link "
        "could have carried. The highest is that of a single worker, or link.",
    )


def _pool_lines(arm: ArmSummary) -> list[tuple[str, list[str]]]:
    """Return a line per pool with the links of its workers, then those of nodes and racks."""
    links = {link.name: [_use(link.egress), _use(link.ingress)] for link in arm.links or ()}
    found = []
    for pool in arm.pools or ():
        label = pool.name if pool.name == pool.role else f"{pool.name} ({pool.role})"
        cells = [number(pool.workers), number(pool.gpus), _use(pool.busy) if pool.busy else "-"]
        found.append((label, cells + links.pop(pool.name, ["-", "-"])))
    return found + [(name, ["-", "-", "-", *cells]) for name, cells in links.items()]


def _use(use: Use) -> str:
    """Show mean and highest share; a link that carries nothing in a direction has none."""
    return f"{use.mean:.0%} / {use.highest:.0%}" if use.highest else "-"


def tier_grid(summary: Summary) -> Grid | None:
    """Lay out what KV tiers held and moved; None where no arm has any."""
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
        "Reading and writing: the mean / highest share of the run in which a link carried KV out of the tier, or into it. "
        "Waited for: copies that steps had to wait for, as their blocks were taken again; all workers together.",
    )


def _tier_label(use: TierUse, arm: ArmSummary) -> str:
    has_pools = len({other.pool for other in arm.tiers or ()}) > 1
    return f"{use.pool}, {TIERS[use.tier]}" if has_pools else TIERS[use.tier]


def gigabytes(traffic: Traffic) -> str:
    """Show how much was moved."""
    return number(traffic.bytes / 1e9, 1)


def _share_of(traffic: Traffic) -> str:
    """Show mean and highest share of the run in which links carried it."""
    return f"{traffic.busy.mean:.1%} / {traffic.busy.highest:.1%}"


def saving(found: Saving) -> str:
    """Show GPU-seconds that were saved, with their interval over repeats."""
    largest = max(abs(value) for value in (found.value, *(found.interval or ())))
    digits = 0 if largest >= 100 else 1 if largest >= 1 else 2
    value, *ends = (number(round(value, digits) + 0.0, digits) for value in (found.value, *(found.interval or ())))
    return f"{value} [{', '.join(ends)}]" if ends else value


def like_grid(runs: list[Record], tool: str) -> Grid:
    """Lay out the figures as another tool would define them, a line per arm and metric."""
    arms: dict[str, list[Record]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    lines = [
        (arm, [name, *(milliseconds(figures.at(key)) for key in STATISTICS), formula])
        for arm, repeats in arms.items()
        for name, formula, figures in like(repeats, tool)
    ]
    return Grid(f"As {tool} would report it (ms)", ["metric", *STATISTICS, "formula"], lines)


def markdown(summary: Summary, manifest: dict[str, Any], failures: list[str]) -> str:
    """Summarize a comparison for a pull request."""
    lines = [f"### {markdown_cell(manifest['title'])}", ""]
    lines += [f"**Not valid**: {markdown_cell(note)}" for note in notes(summary)]
    lines += ["", markdown_cell(summary.verdict), ""]
    lines += [f"**Failed**: {markdown_cell(failure)}" for failure in failures] + [""] * bool(failures)
    figures = comparison(summary)
    lines += replace(figures, rows=[row for row in figures.rows if "p50" not in row[0]]).markdown()
    for grid in grids(summary):
        lines += ["", f"**{grid.title}**", "", *grid.markdown()]
    lines += [
        "",
        f"<sub>{markdown_cell(manifest['subtitle'])}.{markdown_cell(_step_times(manifest))} Differences in % [95% interval], ~ may be noise, = is less than is worth telling.</sub>",
    ]
    return "\n".join(lines)


def _step_times(manifest: dict[str, Any]) -> str:
    text = manifest.get("step_times")
    return f" Simulated step times: {text}." if text else ""


def heading(manifest: dict[str, Any]) -> list[str]:
    """Say what was run: the workload, the deployment, the step times and how far off they may be."""
    said = manifest.get("head") or {}
    layout = "; ".join(f"{name}: {said[name]}" for name in ("Layout", "Chunk") if name in said)
    error = f"Model error: {said['Model error']}." if "Model error" in said else ""
    return [
        f"{manifest['title']}: {manifest['subtitle']}.",
        f"{layout}." * bool(layout),
        _step_times(manifest).strip(),
        error,
    ]


def alerts(summary: Summary) -> list[str]:
    """Say what is wrong with the runs: what makes them invalid, and failures."""
    found = [f"Not valid: {note}" for note in notes(summary)]
    for arm, figures in summary.arms.items():
        if figures.failed and not any("failed" in note for note in figures.notes):
            error, count = max(figures.errors.items(), key=lambda item: item[1])
            found.append(
                f"{arm}: {figures.failed:,} of {figures.requests:,} requests failed, {count:,} of them with: {error}"
            )
    return found


def answer(summary: Summary) -> str:
    """Say which arms meet the limits, or which is nearest to doing so; nothing without limits of a run."""
    nearest = {arm: one for arm, figures in summary.arms.items() if (one := binding(figures.outcomes or ()))}
    if not nearest:
        return ""
    met, unknown = ([arm for arm, one in nearest.items() if one.state == state] for state in ("met", "unknown"))
    if met:
        missed = [f"{arm} ({one.limit} {_margin(one)})" for arm, one in nearest.items() if one.state == "missed"]
        text = f"{_listed(met)} meet{'s' * (len(met) == 1)} every limit"
        text += f"; {_listed(missed)} do{'es' * (len(missed) == 1)} not" * bool(missed)
    else:
        best = max(nearest, key=lambda arm: (nearest[arm].state == "unknown", nearest[arm].margin or -math.inf))
        text = f"{nearest[best].limit} {_margin(nearest[best])}"
        text = (
            f"No arm is known to meet every limit; {best} comes nearest: {text}"
            if len(nearest) > 1
            else f"{best}: {text}"
        )
    return f"{text}{f'; of {_listed(unknown)} it is not known' if met and unknown else ''}."


def alone(summary: Summary) -> str:
    """Give the main figures of the only arm; nothing where there are several."""
    if len(summary.arms) > 1:
        return ""
    ((arm, its),) = summary.arms.items()
    if its.ttft_sched.mean is None:
        return ""
    return (
        f"{arm}: TTFT {milliseconds(its.ttft_sched.mean)} ms on average, {milliseconds(its.ttft_sched.p99)} ms at p99; TPOT "
        f"{milliseconds(its.tpot.mean)} ms on average; {number(its.throughput.requests_per_s, 2)} requests/s."
    )


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def _margin(outcome: Outcome) -> str:
    return (
        f"{outcome.state}: {outcome.reason}"
        if outcome.margin is None
        else f"{outcome.state} by {percent(abs(outcome.margin))}"
    )


def limit_grid(summary: Summary) -> Grid | None:
    """Lay out which limits each arm meets, and by how much; None without limits."""
    lines: dict[str, list[str]] = {}
    for figures in summary.arms.values():
        for outcome in figures.outcomes or ():
            lines.setdefault(outcome.limit, []).append(_margin(outcome))
    each = [limit for limit in summary.limits if parse(limit).statistic is None]
    if each:
        reached = [figures.goodput.attainment if figures.goodput else None for figures in summary.arms.values()]
        lines[f"requests within {' and '.join(each)}"] = [share(one) for one in reached]
    return Grid("Limits, and the margin to each", list(summary.arms), list(lines.items())) if lines else None


def difference_grid(summary: Summary) -> Grid | None:
    """Lay out the verdict on each difference to the first arm; None where there is none."""
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
    floor = " and it is larger than that of two runs of the same arm (A/A)" if summary.noise_floor else ""
    return Grid(
        f"Differences to {summary.baseline}",
        list(summary.differences),
        _known(lines),
        f"In %, paired by request, with a 95% block-bootstrap interval ({summary.num_blocks} blocks). Better or worse: the "
        f"interval excludes zero{floor}. Equal: smaller than is worth telling. {summary.power}",
    )


def _verdict(pair: Difference | None) -> str:
    if pair is None:
        return "n/a"
    if pair.verdict == "unstable" or pair.is_exact:
        return pair.verdict
    low, high = pair.shares()
    return f"{pair.verdict} {pair.relative:+.1%} [{low * 100:+.1f}, {high * 100:+.1f}]"


def figures(summary: Summary) -> Grid:
    """Lay out what most look for."""
    return Grid("Key figures", list(summary.arms), key_rows(summary), figures_note(summary))


def figures_note(summary: Summary) -> str:
    """Say how figures are to be read."""
    text = "Times in ms; n/a: not known, or too few samples."
    if summary.differences:
        text += f" vs {summary.baseline}: difference in % with its 95% interval; ~ may be noise, = is too small to be worth telling."
    if summary.has_tiers:
        text += f" {tiers_note(summary)}"
    if summary.bound.ttft_mean_s:
        text += (
            f" No router could have a mean TTFT below {milliseconds(summary.bound.ttft_mean_s)} ms: the larger of what every "
            "prompt takes on an empty machine with the best cache that the memory allows, and of what all prompts wait for on "
            "one machine as fast as all workers."
        )
    return text


def tiers_note(summary: Summary) -> str:
    """Say how figures of KV tiers are to be read."""
    text = f"Hits, computed: shares of all prompt tokens. GPU-seconds: {FORMULAS['gpu_s']}."
    known = [arm.saved for arm in summary.arms.values() if arm.saved]
    if not known:
        return text
    repeats = known[0].gpu_s.repeats
    how = (
        f"the mean over {repeats} repeats, with its 95% interval"
        if repeats > 1
        else "of one run each, so without an interval"
    )
    return f"{text} Saved: {FORMULAS['gpu_s_saved']}; {how}."


ACROSS = 8
"""Columns that a page has room for."""


def for_page(grid: Grid) -> list[Grid]:
    """Return a table that fits on a page; with many columns, they become rows, and the rows columns of several tables."""
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


def limits(summary: Summary) -> list[str]:
    """Say of each arm which limits it meets, and by how much."""
    each = [limit for limit in summary.limits if parse(limit).statistic is None]
    lines = []
    for arm, figures in summary.arms.items():
        parts = [told(figures.outcomes)] if figures.outcomes else []
        if each and figures.goodput:
            parts.append(f"{share(figures.goodput.attainment)} of the requests within {' and '.join(each)}")
        lines += [f"{arm}: {'; '.join(parts)}"] * bool(parts)
    return lines


def notes(summary: Summary) -> list[str]:
    """Return what spoiled each arm."""
    return [f"{arm}: {note}" for arm, figures in summary.arms.items() for note in figures.notes]


def milliseconds(seconds: float | None) -> str:
    """Format a duration in ms, or n/a where the sample is too small."""
    if seconds is None:
        return "n/a"
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


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
    """Return the 90th percentile in which each failure is an infinite time."""
    value = arm.metric(name).with_failures("p90")
    return math.inf if value is None and arm.failed else value


def _maybe_infinite(seconds: float | None) -> str:
    return "infinite" if seconds == math.inf else milliseconds(seconds)


def share(value: float | None) -> str:
    """Format a share as a percentage, or n/a where it is not known."""
    return "n/a" if value is None else f"{value:.1%}"


def number(value: float | None, digits: int = 0) -> str:
    """Format a number, or n/a where it is not known."""
    return "n/a" if value is None else f"{value:,.{digits}f}"


def _together(arm: ArmSummary) -> float | None:
    """Return the share of tokens that came in one event or one read with others."""
    tokens, together = arm.client.get("tokens"), arm.client.get("tokens_together")
    return together / tokens if tokens and together is not None else None


def _stopped(arm: ArmSummary) -> float | None:
    """Return the share of answers that ended by EOS or another stop; None where none did, as load generators want it."""
    if not arm.ends or "stop" not in arm.ends:
        return None
    return arm.ends["stop"] / sum(arm.ends.values())


_hundredths = partial(number, digits=2)
_thousandths = partial(number, digits=3)
THROUGHPUT: tuple[Line, ...] = (
    ("requests/s", lambda arm: arm.throughput.requests_per_s, _hundredths),
    ("output tokens/s", lambda arm: arm.throughput.output_tokens_per_s, number),
    ("goodput (/s of arrivals)", lambda arm: arm.goodput.goodput_per_s if arm.goodput else None, _hundredths),
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
    ("GPU-seconds", lambda arm: arm.gpu_s or None, number),
)
"""Where prompt tokens came from, and what all the work took."""
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
    "requests/s",
    "goodput (/s of arrivals)",
    "cache hit share",
    "best possible hit share",
)
"""Lines that a terminal shows unless it is asked for all."""
FAILURES: tuple[Line, ...] = (
    ("failed requests", lambda arm: arm.failed, number),
    ("TTFT p90, failures infinite (ms)", partial(_with_failures, name="ttft_sched"), _maybe_infinite),
    ("E2E p90, failures infinite (ms)", partial(_with_failures, name="e2e_sched"), _maybe_infinite),
)
CLIENT: tuple[Line, ...] = (
    ("schedule lag p99 (ms)", lambda arm: arm.schedule_lag.p99, milliseconds),
    ("client CPU (of a core)", lambda arm: arm.client.get("cpu_share"), share),
    ("tokens that came together", _together, share),
)


def fidelity_grid(arm: str, found: ArmFidelity) -> Grid:
    """Lay out real and simulated figures of an arm; one column is only there where the speed of the real engine is known."""
    rows = found.deviations
    columns = {"real": True, "simulated": True, "error": True}
    columns["real runs differ by"] = has_spread = any(row.spread is not None for row in rows)
    columns["error at the runs' speed"] = any(row.error_at_speed is not None for row in rows)
    lines = [
        (label, [cell for cell, is_known in zip(cells, columns.values(), strict=True) if is_known])
        for label, *cells in map(_fidelity_cells, rows)
    ]
    alone = (
        ""
        if has_spread
        else "There is one real run, so how far such runs differ among themselves is not known (--repeats). "
    )
    known = [name for name, is_known in columns.items() if is_known]
    return Grid(f"Simulated against real: {arm}", known, lines, f"{alone}{distances(found)}")


def distances(found: ArmFidelity) -> str:
    """Say how far the distributions lie apart, and how fast the real engine was."""
    parts = [
        f"{name.upper()} {row.wasserstein:.1%} of the mean (Kolmogorov-Smirnov {row.ks:.3f})"
        for name, row in found.distances.items()
    ]
    text = f"Distance between the distributions: {', '.join(parts)}." if parts else ""
    if found.speed:
        text += (
            f" Against the calibration the same batches took the real engine {1 / found.speed.prefill - 1:+.1%} with prefill,"
            f" {1 / found.speed.decode - 1:+.1%} without."
        )
    return text


def lead(arm: str, found: ArmFidelity) -> str:
    """Say how far the means are off."""
    errors = {row.name: row.error for row in found.deviations}
    parts = [
        f"{name.upper()} {error:+.1%}"
        for name in ("ttft", "tpot", "e2e")
        if (error := errors.get(f"{name}.mean")) is not None
    ]
    return f"{arm}: simulated means are off by {', '.join(parts)}." if parts else f"{arm}: nothing to compare."


def _fidelity_cells(row: Deviation) -> list[str]:
    is_time, is_share = row.statistic is not None, row.metric == "hit_share"
    shown = milliseconds if is_time else share if is_share else _hundredths
    unit = " points" if is_share else "%"
    errors = [
        "n/a" if value is None else f"{value * 100:{sign}.1f}{unit}"
        for value, sign in ((row.error, "+"), (row.spread, ""), (row.error_at_speed, "+"))
    ]
    return [f"{row.name} (ms)" if is_time else row.name, shown(row.real), shown(row.simulated), *errors]

"""The table of a sweep: a line for each combination, or for each search result, and its verdict in words."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from rich.table import Table

from foundation.settings import short
from reports import grid, tier_table
from reports.cells import milliseconds, number, share
from reports.fleet_figures import hours
from reports.foreign import csv_cell
from reports.grid import Column, Grid
from reports.outcomes import Outcome, binding, percent, subject, told
from reports.points import AnyPoint, Found, Impossible, Point, Sweep
from reports.slo import parse
from reports.split import LABELS as PARTS
from reports.tier_sizes import Sized, enough
from reports.tier_table import saved_along
from reports.tiers import overlap
from reports.use_tables import split_note

SCHEMA = "dynabench.sweep/2"

INTERRUPTED = "The sweep was interrupted; run the same command again to resume it."

MOST = 4
"""The most combinations that are named one by one."""

Rows = list[AnyPoint] | list[Found]
Figure = tuple[str, Callable[[Point], str]]
"""A column of the table: its head, and what it shows of a point."""


def lay_out(rows: Rows, manifest: dict[str, Any], *, is_complete: bool) -> Sweep:
    """Make the table of a sweep, and say what it found."""
    is_search = bool(manifest["sweep"]["find"])
    limited = _limited(manifest["limits"])
    made = _searched(cast(list[Found], rows), limited) if is_search else _gridded(cast(Any, rows), limited, manifest)
    if any("~" in cell for row in made["rows"] for cell in row):
        made["verdict"] += (
            " ~: the 95% interval over the repeats includes the limit, so more repeats could change the result."
        )
    if not is_complete:
        known = made["verdict"] or "No point is finished yet."
        sweeps = ", ".join(manifest.get("interrupted", ()))
        made["verdict"] = f"{known} {f'{sweeps}: interrupted, so incomplete.' if sweeps else INTERRUPTED}"
    return Sweep(
        **made,
        schema=SCHEMA,
        is_complete=is_complete,
        limits=manifest["limits"],
        points=rows,
        split=_split(rows),
        tiers=tier_table.swept(_points(rows), _axes(rows)),
    )


def _points(rows: Rows) -> dict[str, Point]:
    """Return the points of the table by the names of its lines."""
    named = [(row.arm, row.point) if isinstance(row, Found) else (row.name, row) for row in rows]
    return {name: point for name, point in named if isinstance(point, Point)}


def _axes(rows: Rows) -> list[str]:
    """Return the settings in which lines differ."""
    names = dict.fromkeys(name for row in rows for name in row.changes)
    return [name for name in names if len({str(row.changes.get(name)) for row in rows}) > 1]


def _part(name: str, point: Point) -> str:
    """Format a part of the mean TTFT."""
    seconds = point.split.parts.get(name) if point.split else None
    return "-" if seconds is None else milliseconds(seconds)


def _hundredths(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


OFFERED: Figure = ("offered/s", lambda point: _hundredths(point.offered_per_s))
TTFT_P99: Figure = ("TTFT p99", lambda point: milliseconds(point.ttft_sched.p99))
GOODPUT: Figure = ("goodput", lambda point: _hundredths(point.goodput.goodput_per_s if point.goodput else None))
FIGURES: tuple[Figure, ...] = (
    ("TTFT mean", lambda point: milliseconds(point.ttft_sched.mean)),
    TTFT_P99,
    ("TPOT mean", lambda point: milliseconds(point.tpot.mean)),
    ("req/s", lambda point: _hundredths(point.throughput.requests_per_s)),
    ("hits", lambda point: share(point.cache.hit_share)),
    ("TTFT p90", lambda point: milliseconds(point.ttft_sched.p90)),
    ("E2E mean", lambda point: milliseconds(point.e2e_sched.mean)),
    ("tok/s", lambda point: number(point.throughput.output_tokens_per_s)),
    ("imbalance", lambda point: _hundredths(point.imbalance.work_max_over_mean)),
    OFFERED,
)
"""The most important come first, because a narrow terminal shows only those that fit."""
FLEET: tuple[Figure, ...] = (
    ("within limits", lambda point: share(point.goodput.attainment if point.goodput else None)),
    ("GPU-hours", lambda point: hours(point.fleet.gpu_h) if point.fleet else "n/a"),
    ("good/GPU-h", lambda point: number(point.fleet.good_per_gpu_h if point.fleet else None)),
    ("mean workers", lambda point: f"{point.fleet.mean_workers:.1f}" if point.fleet else "n/a"),
)
"""Only if the number of workers changed, or a planner was running."""
WITHOUT_LIMITS: tuple[Figure, ...] = (("stable", lambda point: "yes" if point.is_stable else "no"),)
SPLIT: tuple[Figure, ...] = (
    *((label, partial(_part, name)) for name, label in PARTS.items()),
    ("TTFT from sent", lambda point: milliseconds(point.ttft.mean)),
    ("TTST mean", lambda point: milliseconds(point.ttst.mean)),
    ("prefilled by another", lambda point: share(point.split.apart if point.split else None)),
)
AT_FOUND: tuple[Figure, ...] = (
    OFFERED,
    TTFT_P99,
    ("TPOT p99", lambda point: milliseconds(point.tpot.p99)),
    GOODPUT,
)


def _limited(limits: Sequence[str]) -> list[Figure]:
    """Return a column for each statistic that is limited."""

    def value(limit: str, point: Point) -> str:
        return next((_with_interval(one) for one in point.outcomes if one.limit == limit), "n/a")

    read = {limit: parse(limit) for limit in limits}
    return [
        (f"{found.metric.upper()} {found.statistic}", partial(value, limit))
        for limit, found in read.items()
        if found.statistic is not None
    ]


def _with_interval(outcome: Outcome) -> str:
    """Format the limited metric, with its interval if there are repeats that differ."""
    shown = milliseconds(outcome.value)
    if outcome.interval is None or outcome.interval[0] == outcome.interval[1]:
        return shown
    low, high = map(milliseconds, outcome.interval)
    return f"{shown} [{low}, {high}]"


def _without(columns: Sequence[Figure], others: Sequence[Figure]) -> list[Figure]:
    """Return columns without those that are already shown."""
    return [column for column in columns if column[0] not in dict(others)]


def _margin(row: AnyPoint) -> str:
    """Say whether a point meets the limits, and the margin to the nearest."""
    if isinstance(row, Impossible):
        return "impossible"
    nearest = binding(row.outcomes)
    if nearest is None:
        return "met"
    doubt = "~" * nearest.is_open
    if nearest.state == "met":
        return f"met by {percent(nearest.margin or 0.0)}{doubt}"
    name = subject(nearest.limit)
    if nearest.state == "unknown":
        return f"unknown: {name}"
    return f"missed: {name}" if nearest.margin is None else f"missed by {percent(-nearest.margin)}{doubt}: {name}"


def _gridded(points: list[AnyPoint], limited: list[Figure], manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the table of every combination."""
    axes = _axes(points) or ["router_mode"]
    rest = _without(FIGURES, limited)
    possible = [point for point in points if isinstance(point, Point)]
    fleet = _fleet(possible, has_limits=bool(manifest["limits"]))
    columns = (
        [("limits", _margin), *fleet, *limited, *rest, GOODPUT]
        if manifest["limits"]
        else [*WITHOUT_LIMITS, *fleet, *rest]
    )
    verdict = _answer(possible, len(points)) if manifest["limits"] and possible else ""
    verdict += _best(possible, axes) + _remarks(possible) if possible else ""
    verdict += _impossible([point for point in points if isinstance(point, Impossible)])
    return {
        "title": "Every combination",
        "columns": [*axes, *(head for head, _ in columns)],
        "num_axes": len(axes),
        "rows": [
            [*(short(point.changes.get(axis, "-")) for axis in axes), *(_cells(point, columns))] for point in points
        ],
        "verdict": verdict.strip(),
    }


def _fleet(points: Sequence[Point], *, has_limits: bool) -> list[Figure]:
    """Return the columns on what a changing number of workers used; none if it never changed."""
    if not any(point.fleet and point.fleet.is_shown for point in points):
        return []
    return [figure for figure in FLEET if has_limits or figure[0] in ("GPU-hours", "mean workers")]


def _impossible(points: list[Impossible]) -> str:
    """Say which points are impossible, grouped by reason."""
    names: dict[str, list[str]] = {}
    for point in points:
        names.setdefault(point.reason, []).append(point.name)
    text = ""
    for reason, those in names.items():
        more = f" and {len(those) - MOST:,} more" * (len(those) > MOST)
        text += f" {'; '.join(those[:MOST])}{more} {'is' if len(those) == 1 else 'are'} impossible: {reason}."
    return text


def _cells(row: AnyPoint | None, columns: Sequence[Figure]) -> list[str]:
    """Return the cells of a point, which may be impossible."""
    if isinstance(row, Point):
        return [shown(row) for _, shown in columns]
    said = "-" if row is None else "impossible"
    return [said if head in ("limits", "stable") else "-" for head, _ in columns]


def tables(summary: Sweep, width: int, *, is_whole: bool, colours: Sequence[str] = ()) -> Iterator[Table]:
    """Yield a sweep's table for a terminal: a line per combination, and as many columns as fit, or all in several tables.

    Each line has the colour that it has in the report, if colours are given.
    """
    columns = [
        Column(head.replace("_", " "), [cells[place] for cells in summary.rows])
        for place, head in enumerate(summary.columns)
    ]
    axes, figures = columns[: summary.num_axes], columns[summary.num_axes :]
    found = list(grid.tables(summary.title, axes, figures, width, row_colours=colours)) if summary.rows else []
    if len(found) > 1 and not is_whole:
        found[0].caption = "More columns with --all-metrics, in the report and in table.csv."
        del found[1:]
    yield from found


def _split(rows: Rows) -> Grid | None:
    """Lay out where TTFT goes at each point; None if every worker does everything."""
    named = [(row.arm, row.point) if isinstance(row, Found) else (row.name, row) for row in rows]
    points = {name: point if isinstance(point, Point) else None for name, point in named}
    if not any(point.is_apart for point in points.values() if point):
        return None
    lines = [(name, [shown(point) if point else "-" for _, shown in SPLIT]) for name, point in points.items()]
    note = split_note({name: point.split if point else None for name, point in points.items()})
    return Grid("Where does TTFT go? (means in ms)", [head for head, _ in SPLIT], lines, note)


def _answer(points: list[Point], count: int) -> str:
    """Say which combination meets the limits with the fewest GPUs, or which of those tried comes closest."""
    met = [point for point in points if point.state == "met"]
    if met:
        took = {point.name: point.fleet.gpu_h for point in met if point.fleet}
        if len(took) == len(met) and _fleet(points, has_limits=True):
            best = min(took, key=took.__getitem__)
            return f"{len(met)} of {count} combinations meet every limit; {best} needs the fewest GPU-hours ({hours(took[best])}). "
        fewest = min(met, key=lambda point: point.gpus)
        return f"{len(met)} of {count} combinations meet every limit; {fewest.name} needs the fewest GPUs ({fewest.gpus}). "
    nearest = max(points, key=_headroom)
    missed = binding(nearest.outcomes)
    return f"No combination is known to meet every limit; {nearest.name} comes closest: {missed.limit if missed else ''} {missed}. "


def _headroom(point: Point) -> float:
    nearest = binding(point.outcomes)
    return float("-inf") if nearest is None or nearest.margin is None else nearest.margin


def _best(points: list[Point], axes: list[str]) -> str:
    """Say how often each mode was best or, if there is only one, which point was best."""
    text = _grew(points)
    if near := enough(_sized(points), "lowest mean TTFT", is_lower_better=True):
        return f"{text}{_lowest_ttft(points)} {near}"
    if "router_mode" in axes and len(axes) > 1:
        best = [_lowest(group, lambda point: point.e2e_sched.mean) for group in _by_rest(points).values()]
        wins = Counter(str(point.changes["router_mode"]) for point in best if point is not None)
        if wins:
            first, *others = [f"{mode} in {count}" for mode, count in wins.most_common()]
            said = ", ".join([f"{first} of {wins.total()}", *others])
            text += f" Lowest mean E2E latency: {said}."
        return text
    return text + _lowest_ttft(points)


def _grew(points: list[Point]) -> str:
    """Say in how many combinations a queue grew."""
    num_grew = sum(not point.is_stable for point in points)
    if len(points) == 1:
        return "The queue grew." if num_grew else "The queue did not grow."
    if not num_grew:
        return f"No queue grew in any of the {len(points)} combinations."
    return f"The queue grew in {num_grew} of {len(points)} combinations."


def _lowest_ttft(points: list[Point]) -> str:
    lowest = _lowest(points, lambda point: point.ttft_sched.mean)
    if lowest is None:
        return ""
    return f" Lowest mean TTFT: {lowest.name} ({milliseconds(lowest.ttft_sched.mean)} ms)."


def _sized(points: list[Point]) -> list[Sized]:
    """Return the mean TTFT of stable points, by the capacity of their tiers."""
    return [
        Sized(point.changes, _capacity(point), mean, f"{milliseconds(mean)} ms")
        for point in points
        if point.is_stable and (mean := point.ttft_sched.mean) is not None
    ]


def _capacity(point: Point) -> float:
    return sum(use.capacity_bytes for use in point.tiers)


def _remarks(points: Sequence[Point]) -> str:
    """Say why GPU-seconds fell by little, and which repeats are equal."""
    repeated = [point for point in points if len(point.spent) > 1]
    equal = [point.name for point in repeated if all(one == point.spent[0] for one in point.spent)]
    savings = saved_along(points)
    text = overlap((savings[point.name], point.gpu_s) for point in points)
    if len(equal) == len(repeated) > 0:
        text += " The runs are deterministic: all repeats are equal, so there are no intervals."
    elif equal:
        more = f" and {len(equal) - MOST:,} more" * (len(equal) > MOST)
        text += f" The repeats of {'; '.join(equal[:MOST])}{more} are equal (deterministic), so there is no interval."
    return f" {text.strip()}" if text else ""


def _lowest(points: list[Point], of: Callable[[Point], float | None]) -> Point | None:
    """Return the stable point with the lowest value of a figure; None if no stable one has it."""
    known = {place: value for place, point in enumerate(points) if point.is_stable and (value := of(point)) is not None}
    return points[min(known, key=known.__getitem__)] if known else None


def _by_rest(points: list[Point]) -> dict[str, list[Point]]:
    """Group points that differ in their router mode only."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        rest = {name: value for name, value in point.changes.items() if name != "router_mode"}
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(point)
    return groups


def _searched(rows: list[Found], limited: list[Figure]) -> dict[str, Any]:
    """Return the table of a search."""
    name = rows[0].find if rows else ""
    sense = next((row.sense for row in rows if row.sense), None) or "best"
    named = dict.fromkeys(axis for row in rows for axis in row.changes)  # in the order of the question
    axes = sorted(named, key=lambda axis: axis != "router_mode")
    fleet = _fleet(list(_points(rows).values()), has_limits=True)
    gpus: list[Figure] = [("GPUs", lambda point: f"{point.gpus}")] if _counts_gpus(rows) else []
    columns = [*gpus, *fleet, *limited, *_without(AT_FOUND, limited)]
    return {
        "title": f"{sense.capitalize()} {name} that meets the limits",
        "columns": [*axes, f"{sense} {name}", "not at", "for", *(head for head, _ in columns)],
        "num_axes": len(axes),
        "rows": [
            [
                *(short(row.changes.get(axis, "-")) for axis in axes),
                _value(row),
                "-" if row.missed_at is None else _digits(row.missed_at),
                "-" if row.missed is None else _margin(row.missed),
                *_cells(row.point, columns),
            ]
            for row in rows
        ],
        "verdict": _verdict(rows, name, sense),
    }


def _counts_gpus(rows: Sequence[Found]) -> bool:
    """Return whether the fewest workers were searched for and those of some lines have more GPUs than others'."""
    known = [(row.point.gpus, row.met) for row in rows if row.point is not None and row.met]
    is_of_workers = any(row.sense == "lowest" and row.find.endswith(("workers", "replicas")) for row in rows)
    return is_of_workers and any(gpus * known[0][1] != known[0][0] * met for gpus, met in known)


def _digits(value: float) -> str:
    """Format a value that was tried; it has no more digits than the search's precision."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _value(row: Found) -> str:
    """Format what a search found, or how far it got."""
    if row.met is None:
        return "none" if row.is_over else "not known"
    if not row.is_at_end or (row.sense == "lowest" and row.met == 1):
        low, high = row.interval or (row.met, row.met)
        return _digits(row.met) if low == high else f"{_digits(row.met)} [{_digits(low)}, {_digits(high)}]"
    if row.sense is None:
        return "any"
    return f"at {'least' if row.sense == 'highest' else 'most'} {_digits(row.met)}"


def _verdict(rows: list[Found], name: str, sense: str) -> str:
    """Say which combination meets the limits furthest, and what stops it there."""
    counts_gpus = _counts_gpus(rows)

    def rank(row: Found) -> float:
        return row.point.gpus if counts_gpus and row.point is not None else row.met or 0.0

    known = sorted((row for row in rows if row.met is not None), key=rank)
    if not known:
        nearest = [f"{row.arm} at {name} {_digits(row.missed_at)}: {_why(row)}" for row in rows if row.missed_at]
        if not all(row.is_over for row in rows):
            return "Nothing that was tried meets the limits." * bool(nearest)
        states = {row.missed.state for row in rows if row.missed}
        lead = "Nothing meets the limits" if states != {"unknown"} else "It is not known whether the limits are met"
        return f"{lead}. " + "; ".join(nearest[:MOST]) + "." * bool(nearest)
    least, best = (known[0], known[-1]) if sense != "lowest" else (known[-1], known[0])
    how = "from {} {} on" if sense == "lowest" else "up to {} {}"
    what = "fewest GPUs" if counts_gpus else sense
    equal = [row for row in known if rank(row) == rank(best)]
    alike = [row.arm for row in equal if row.met == best.met]
    who = f"All {len(rows)} meet" if len(alike) == len(rows) > 1 else f"{' and '.join(alike)} meet"
    text = f"{who}{'s' * (len(alike) == 1)} the limits {how.format(name, _value(best))}{_gpus(best) * counts_gpus}"
    text += f", the {what} of {len(rows)}." if len(alike) < len(rows) and all(row.is_over for row in rows) else "."
    text += "".join(f" {row.arm} needs as many, from {_value(row)} on." for row in equal if row.met != best.met)
    if best.interval and best.interval[0] == best.interval[1]:
        text += " All repeats give the same value."
    elif best.interval:
        text += " The brackets show the 95% interval over the repeats."
    if best.missed is not None:
        text += f" At {_digits(best.missed_at or 0.0)}: {_why(best)}."
    if rank(least) != rank(best) and best.met and least.met:
        text += (
            f" {least.arm} meets them {how.format('', _value(least)).replace('  ', ' ')}{_gpus(least) * counts_gpus}"
        )
        text += f" ({best.met / least.met - 1:+.0%} between the two)." if sense != "lowest" else "."
    sized = [Sized(row.changes, _capacity(row.point), rank(row), _value(row)) for row in known if row.point and row.met]
    if near := enough(sized, what if counts_gpus else f"{sense} {name}", is_lower_better=sense == "lowest"):
        text += f" {near}"
    return text + _impossible([row.missed for row in rows if row.met is None and isinstance(row.missed, Impossible)])


def _gpus(row: Found) -> str:
    """Say how many GPUs the workers that were found have."""
    return f" ({row.point.gpus} GPU{'s' * (row.point.gpus != 1)})" if row.point is not None else ""


def _why(row: Found) -> str:
    """Say which limits are missed at the nearest value that misses any."""
    assert row.missed is not None
    return told(outcome for outcome in row.missed.outcomes if outcome.state != "met")


def as_csv(rows: Rows) -> str:
    """Return everything known about each line in plain numbers; heads are paths in sweep.json, times are in s."""
    lines = [dict(_flat(msgspec.to_builtins(row))) for row in rows]
    heads = dict.fromkeys(head for line in lines for head in line)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([csv_cell(line.get(head, "")) for head in heads] for line in lines)
    return text.getvalue()


def _flat(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts within a value by their paths; outcomes are named by their limits."""
    for name, part in value.items():
        if isinstance(part, dict):
            yield from _flat(part, f"{path}{name}.")
        elif name == "outcomes":
            for outcome in part:
                yield from _flat(outcome, f"{path}{outcome.pop('limit')}.")
        elif name == "tiers":
            for use in part:
                yield from _flat(use, f"{path}tiers.{use.pop('pool')}.{use.pop('tier')}.")
        elif name == "interval":
            yield from (
                (f"{path}{name}.{end}", value) for end, value in zip(("low", "high"), part or ("", ""), strict=True)
            )
        elif not isinstance(part, list):
            yield path + name, "" if part is None else part

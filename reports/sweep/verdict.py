"""What a sweep found, in a few sentences."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from reports.figures.cells import milliseconds
from reports.figures.fleet import hours
from reports.figures.outcomes import binding
from reports.figures.tier_sizes import Sized, enough
from reports.figures.tiers import overlap_remark
from reports.key import without_shared
from reports.sweep.best_point import LOADS, BestPoints, best_of, by_load, by_rest, compared, point_failures
from reports.sweep.curve import curves
from reports.sweep.curve import verdict as curve_verdict
from reports.sweep.points import Impossible, Point
from reports.tables.tiers import saved_along
from reports.verdicts.drafts import where_drafts_pay
from reports.verdicts.engines import EngineError, between_engines
from reports.verdicts.naming import LABELS, named, only_here, parted, quoted, there
from reports.verdicts.routers import by_router, each_best


def grid_verdict(
    points: list[Point],
    impossible: list[Impossible],
    axes: list[str],
    *,
    has_limits: bool,
    elsewhere: Mapping[str, str | None],
    engine_errors: Mapping[str, EngineError],
    load_axis: str | None = None,
) -> str:
    """Say which combination is best: within the limits first, then by mean latency; along a load, where it changes."""
    count, shorter = len(points) + len(impossible), _short([point.name for point in points])
    elsewhere = {shorter[name]: where for name, where in elsewhere.items() if name in shorter}
    means = {point.name: {"ttft": point.ttft_sched.mean, "tpot": point.tpot.mean} for point in points}
    points = [structs.replace(point, name=shorter[point.name]) for point in points]
    lines = curves(points, axis=load_axis)
    if len(lines) == 1 or (lines and "router_mode" not in axes):
        text = f"{curve_verdict(lines, has_limits=has_limits)}{_invalid(points)}{too_little(points)}{held(points)}"
        return (text + which_are_impossible(impossible)).strip()
    text = _answer(points, count) if has_limits and points else ""
    if points:
        undecided = between_engines(engine_errors, means)
        text += _best(points, axes, elsewhere) + f" {undecided}" * bool(undecided)
        pays = where_drafts_pay({point.name: point.drafts or () for point in points})
        text += f" {pays}" * bool(pays) + too_little(points) + held(points) + _remarks(points)
    return (quoted(text, [point.name for point in points]) + which_are_impossible(impossible)).strip()


def _invalid(points: Sequence[Point]) -> str:
    """Say which points are not valid, and why."""
    return "".join(f" Not valid at {point.name}: {'; '.join(point.notes)}." for point in points if point.notes)


def _short(names: list[str]) -> dict[str, str]:
    """Return names without the settings that all of them share."""
    short = without_shared(names)
    return dict(zip(names, short if len(set(short)) == len(names) else names, strict=True))


def _answer(points: list[Point], count: int) -> str:
    """Say which combination meets the limits with the fewest GPUs, or which of those tried comes closest."""
    met = [point for point in points if point.state == "met"]
    if met:
        took = {point.name: point.fleet.gpu_h for point in met if point.fleet}
        if len(took) == len(met) and any(point.fleet and point.fleet.is_shown for point in points):
            best = min(took, key=took.__getitem__)
            return f"{len(met)} of {count} combinations meet every limit; {best} needs the fewest GPU-hours ({hours(took[best])}). "
        fewest = min(point.gpus for point in met)
        first = [point for point in met if point.gpus == fewest]
        need = f"need{'s' * (len(first) == 1)} the fewest GPUs ({fewest})"
        return f"{len(met)} of {count} combinations meet every limit; {named([point.name for point in first])} {need}. "
    if all(point.state == "unknown" for point in points):
        why = binding(points[0].outcomes)
        return f"It is not known whether any combination meets every limit: {why.limit if why else ''} {why}. "
    nearest = max(points, key=_headroom)
    missed = binding(nearest.outcomes)
    return f"No combination is known to meet every limit; {nearest.name} comes closest: {missed.limit if missed else ''} {missed}. "


def _headroom(point: Point) -> float:
    nearest = binding(point.outcomes)
    return float("-inf") if nearest is None or nearest.margin is None else nearest.margin


def _best(points: list[Point], axes: list[str], elsewhere: Mapping[str, str | None]) -> str:
    """Say how often each mode was best or, if there is only one, which point was best; of those that meet the limits."""
    text = _grew(points)
    met = [point for point in points if point.outcomes and point.state == "met"]
    kept, within = met or points, " within the limits" * (0 < len(met) < len(points))
    near = enough(_sized(points), "lowest mean TTFT", is_lower_better=True)
    if "router_mode" in axes and len(axes) > 1 and not near:
        return text + _failed(by_rest(kept).values()) + _by_mode(kept, elsewhere, within)
    loads = by_load(kept)
    best = _lowest_ttft(kept, elsewhere, within) if len(loads) == 1 else _at_equal_load(loads, within)
    return text + _failed(loads) + best + f" {near}" * bool(near)


def _failed(groups: Iterable[Sequence[Point]]) -> str:
    """Say which points are not compared within their group, because clearly more of their requests failed."""
    left_out = [
        f"{point.name} ({point_failures(point)})"
        for group in groups
        for names in [{point.name for point in compared(group)}]
        for point in group
        if point.is_stable and point.name not in names
    ]
    if not left_out:
        return ""
    are = "it is" if len(left_out) == 1 else "they are"
    return f" Clearly more requests failed in {named(left_out)}, so {are} not compared."


def _by_mode(points: list[Point], elsewhere: Mapping[str, str | None], within: str) -> str:
    """Say at how many of the other settings each mode has the lowest mean E2E latency, or ties with the lowest."""
    text = _wins(points, within)
    names = {point.name for group in by_rest(points).values() for point in best_of(group, ("e2e_sched",)).points}
    known = [point for group in by_rest(points).values() for point in compared(group) if elsewhere.get(point.name)]
    if known and not any(elsewhere.get(name) for name in names):
        text += f" The best exist only in dynabench; of the modes that other routers have:{_wins(known, within).partition(':')[2]}"
        text += f" In other routers, {there(_elsewhere(known, elsewhere))}."
    return text


def _wins(points: list[Point], within: str) -> str:
    groups = [best_of(group, ("e2e_sched",)).points for group in by_rest(points).values()]
    groups = [group for group in groups if group]
    wins = Counter(str(point.changes["router_mode"]) for group in groups for point in group)
    if not wins:
        return ""
    first, *others = [f"{mode} in {count}" for mode, count in wins.most_common()]
    ties = "; ties count for each" * any(len(group) > 1 for group in groups)
    return f" Lowest mean E2E latency{within}: {', '.join([f'{first} of {len(groups)}', *others])}{ties}."


def _at_equal_load(loads: Sequence[Sequence[Point]], within: str) -> str:
    """Say at how many loads each combination of the other settings has the lowest mean E2E latency, or ties with it."""
    if all(len(points) == 1 for points in loads):
        return " They differ in what is sent, so their latencies are not compared."
    groups = [best_of(points, ("e2e_sched",)).points for points in loads if len(points) > 1]
    wins = Counter(without_load(point.name) for points in groups for point in points)
    if not wins:
        return ""
    count = sum(map(bool, groups))
    first, *others = [f"{name} at {won}" for name, won in wins.most_common()]
    ties = "; ties count for each" * any(len(points) > 1 for points in groups)
    loads_said = f"{first} of {count} loads" if count > 1 else first.removesuffix(" at 1")
    return f" Lowest mean E2E latency at the same load{within}: {', '.join([loads_said, *others])}{ties}."


def without_load(name: str) -> str:
    """Return the name of a point without the settings of what is sent."""
    parts = [part for part in name.split(", ") if part.partition(" ")[0].rpartition(".")[2] not in LOADS]
    return ", ".join(parts) or name


def _lowest_ttft(points: list[Point], elsewhere: Mapping[str, str | None], within: str) -> str:
    """Name the point with the lowest mean TTFT or, if several tie, also the best of these by the next metric."""
    best = best_of(points)
    if not best.points:
        return ""
    text = f" Lowest mean TTFT{within}: {_shown(best, 0)}."
    for place in range(1, len(best.steps)):
        if len(best.steps[place].names) < len(best.steps[place - 1].names):
            text += f" Of these, lowest {LABELS[best.steps[place].metric]}: {_shown(best, place)}."
    known = [point for point in compared(points) if elsewhere.get(point.name)]
    if known and not any(elsewhere.get(point.name) for point in best.points):
        text += f" {only_here([point.name for point in best.points], _each_router(known, elsewhere))}"
    return text


def _each_router(points: Sequence[Point], elsewhere: Mapping[str, str | None]) -> dict[str, str]:
    """Return the best point of each other router, with its name there and its mean TTFT."""
    known = {point.name: where for point in points if (where := elsewhere.get(point.name))}
    best = {}
    for router, modes in by_router(known).items():
        if found := best_of([point for point in points if point.name in modes]).points:
            best[router] = found[0].name, modes[found[0].name]
    means = {point.name: milliseconds(point.ttft_sched.mean) for point in points}
    return {name: f"{where}, with a mean TTFT of {means[name]} ms" for name, where in each_best(best).items()}


def _shown(best: BestPoints, place: int) -> str:
    """Name the points that are lowest in a metric, with its value."""
    step = best.steps[place]
    values = [milliseconds(value) for value in (step.values[0], step.values[-1])]
    shown = " to ".join(dict.fromkeys(values))
    tie = " tie" * (len(step.names) > 1)
    return f"{named(step.names)}{tie} ({shown} ms)"


def _elsewhere(points: Sequence[Point], elsewhere: Mapping[str, str | None]) -> dict[str, str]:
    """Return what other routers call the modes of points."""
    return {str(point.changes.get("router_mode", point.name)): elsewhere[point.name] or "" for point in points}


def too_little(points: list[Point]) -> str:
    """Say where there was too little data, with the first reason."""
    short = [point for point in points if point.too_little]
    return f" Too little data in {_first_of(short, points)}: {'; '.join(short[0].too_little)}." if short else ""


def held(points: list[Point]) -> str:
    """Say where prompts waited for decodes, with the numbers of the first."""
    those = [point for point in points if point.held]
    return f" In {_first_of(those, points)}: {those[0].held}." if those else ""


def _first_of(those: list[Point], points: list[Point]) -> str:
    return f"{len(those)} of {len(points)} combinations, such as " * (len(points) > 1) + those[0].name


def _grew(points: list[Point]) -> str:
    """Say in how many combinations a queue grew."""
    num_grew = sum(not point.is_stable for point in points)
    if len(points) == 1:
        return "The queue grew." if num_grew else "The queue did not grow."
    if not num_grew:
        return f"No queue grew in any of the {len(points)} combinations."
    return f"The queue grew in {num_grew} of {len(points)} combinations."


def _sized(points: list[Point]) -> list[Sized]:
    """Return the mean TTFT of the points that are compared, by the capacity of their tiers."""
    return [
        Sized(point.changes, capacity(point), mean, f"{milliseconds(mean)} ms")
        for point in compared(points)
        if (mean := point.ttft_sched.mean) is not None
    ]


def capacity(point: Point) -> float:
    """Return how much all tiers of a point hold."""
    return sum(use.capacity_bytes for use in point.tiers)


def _remarks(points: Sequence[Point]) -> str:
    """Say why GPU-seconds fell by little, and which repeats are equal."""
    repeated = [point for point in points if len(point.spent) > 1]
    equal = [point.name for point in repeated if all(one == point.spent[0] for one in point.spent)]
    savings = saved_along(points)
    text = overlap_remark((savings[point.name], point.gpu_s) for point in points)
    if len(equal) == len(repeated) > 0:
        text += " The runs are deterministic: all repeats are equal, so there are no intervals."
    elif equal:
        text += f" The repeats of {parted(equal)} are equal (deterministic), so there is no interval."
    return f" {text.strip()}" if text else ""


def which_are_impossible(points: list[Impossible]) -> str:
    """Say which points are impossible, grouped by reason."""
    names: dict[str, list[str]] = {}
    for point in points:
        names.setdefault(point.reason, []).append(point.name)
    text = ""
    for reason, those in names.items():
        text += f" {parted(those)} {'is' if len(those) == 1 else 'are'} impossible: {reason}."
    return text

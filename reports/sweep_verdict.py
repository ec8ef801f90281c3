"""What a sweep or a search found, in a few sentences."""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from foundation.text import listed
from reports.best_point import Best, best_of, by_rest
from reports.cells import milliseconds
from reports.fleet_figures import hours
from reports.key import without_shared
from reports.outcomes import binding, told
from reports.points import Found, Impossible, Point
from reports.routers import by_router, each_best
from reports.tier_sizes import Sized, enough
from reports.tier_table import saved_along
from reports.tiers import overlap

MOST = 4
"""The most combinations that are named one by one."""
LABELS = {"ttft_sched": "mean TTFT", "tpot": "mean TPOT", "e2e_sched": "mean E2E latency"}


def grid_verdict(
    points: list[Point],
    impossible: list[Impossible],
    axes: list[str],
    *,
    has_limits: bool,
    elsewhere: Mapping[str, str | None],
) -> str:
    """Say which combination is best: within the limits first, then by mean latency."""
    count, shorter = len(points) + len(impossible), _short([point.name for point in points])
    elsewhere = {shorter[name]: where for name, where in elsewhere.items() if name in shorter}
    points = [structs.replace(point, name=shorter[point.name]) for point in points]
    text = _answer(points, count) if has_limits and points else ""
    text += _best(points, axes, elsewhere) + _too_little(points) + _remarks(points) if points else ""
    return (text + _impossible(impossible)).strip()


def _short(names: list[str]) -> dict[str, str]:
    """Return names without the settings that all of them share."""
    short = without_shared(names)
    return dict(zip(names, short if len(set(short)) == len(names) else names, strict=True))


def search_verdict(rows: list[Found], name: str, sense: str) -> str:
    """Say which combination meets the limits furthest, and what stops it there."""
    counts_gpus = is_by_gpus(rows)

    def rank(row: Found) -> float:
        return row.point.gpus if counts_gpus and row.point is not None else row.met or 0.0

    known = sorted((row for row in rows if row.met is not None), key=rank)
    if not known:
        nearest = [f"{row.arm} at {name} {digits(row.missed_at)}: {_why(row)}" for row in rows if row.missed_at]
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
    text = f"{who}{'s' * (len(alike) == 1)} the limits {how.format(name, value_shown(best))}{_gpus(best) * counts_gpus}"
    text += f", the {what} of {len(rows)}." if len(alike) < len(rows) and all(row.is_over for row in rows) else "."
    text += "".join(f" {row.arm} needs as many, from {value_shown(row)} on." for row in equal if row.met != best.met)
    if best.interval and best.interval[0] == best.interval[1]:
        text += " All repeats give the same value."
    elif best.interval:
        text += " The brackets show the 95% interval over the repeats."
    if best.missed is not None:
        text += f" At {digits(best.missed_at or 0.0)}: {_why(best)}."
    if rank(least) != rank(best) and best.met and least.met:
        text += f" {least.arm} meets them {how.format('', value_shown(least)).replace('  ', ' ')}{_gpus(least) * counts_gpus}"
        text += f" ({best.met / least.met - 1:+.0%} between the two)." if sense != "lowest" else "."
    sized = [
        Sized(row.changes, _capacity(row.point), rank(row), value_shown(row)) for row in known if row.point and row.met
    ]
    if near := enough(sized, what if counts_gpus else f"{sense} {name}", is_lower_better=sense == "lowest"):
        text += f" {near}"
    return text + _impossible([row.missed for row in rows if row.met is None and isinstance(row.missed, Impossible)])


def is_by_gpus(rows: Sequence[Found]) -> bool:
    """Return whether the fewest workers were searched for and those of some lines have more GPUs than others'."""
    known = [(row.point.gpus, row.met) for row in rows if row.point is not None and row.met]
    is_of_workers = any(row.sense == "lowest" and row.find.endswith(("workers", "replicas")) for row in rows)
    return is_of_workers and any(gpus * known[0][1] != known[0][0] * met for gpus, met in known)


def _gpus(row: Found) -> str:
    """Say how many GPUs the workers that were found have."""
    return f" ({row.point.gpus} GPU{'s' * (row.point.gpus != 1)})" if row.point is not None else ""


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
        return (
            f"{len(met)} of {count} combinations meet every limit; {_named([point.name for point in first])} {need}. "
        )
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
    if near := enough(_sized(points), "lowest mean TTFT", is_lower_better=True):
        return f"{text}{_lowest_ttft(kept, elsewhere, within)} {near}"
    if "router_mode" in axes and len(axes) > 1:
        return text + _by_mode(kept, elsewhere, within)
    return text + _lowest_ttft(kept, elsewhere, within)


def _by_mode(points: list[Point], elsewhere: Mapping[str, str | None], within: str) -> str:
    """Say at how many of the other settings each mode has the lowest mean E2E latency, or ties with the lowest."""
    text = _wins(points, within)
    names = {point.name for group in by_rest(points).values() for point in best_of(group, ("e2e_sched",)).points}
    known = [point for point in points if elsewhere.get(point.name)]
    if known and not any(elsewhere.get(name) for name in names):
        text += f" The best exist only in dynabench; of the modes that other routers have:{_wins(known, within).partition(':')[2]}"
        text += f" In other routers, {_elsewhere(known, elsewhere)}."
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


def _lowest_ttft(points: list[Point], elsewhere: Mapping[str, str | None], within: str) -> str:
    """Name the point with the lowest mean TTFT or, if several tie, also the best of these by the next metric."""
    best = best_of(points)
    if not best.points:
        return ""
    text = f" Lowest mean TTFT{within}: {_shown(best, 0)}."
    for place in range(1, len(best.steps)):
        if len(best.steps[place].names) < len(best.steps[place - 1].names):
            text += f" Of these, lowest {LABELS[best.steps[place].metric]}: {_shown(best, place)}."
    known = [point for point in points if elsewhere.get(point.name)]
    if known and not any(elsewhere.get(point.name) for point in best.points):
        text += f" {_named([point.name for point in best.points])} exist{'s' * (len(best.points) == 1)} only in dynabench; the best mode "
        text += f"here of each other router: {_each_router(known, elsewhere)}."
    return text


def _each_router(points: Sequence[Point], elsewhere: Mapping[str, str | None]) -> str:
    """Name the best point of each other router, with its mean TTFT and the name of its mode there."""
    known = {point.name: where for point in points if (where := elsewhere.get(point.name))}
    best = {}
    for router, modes in by_router(known).items():
        if found := best_of([point for point in points if point.name in modes]).points:
            best[router] = found[0].name, modes[found[0].name]
    means = {point.name: milliseconds(point.ttft_sched.mean) for point in points}
    return "; ".join(
        f"{name} is {where}, with a mean TTFT of {means[name]} ms" for name, where in each_best(best).items()
    )


def _shown(best: Best, place: int) -> str:
    """Name the points that are lowest in a metric, with its value."""
    step = best.steps[place]
    values = [milliseconds(value) for value in (step.values[0], step.values[-1])]
    shown = " to ".join(dict.fromkeys(values))
    tie = " tie" * (len(step.names) > 1)
    return f"{_named(step.names)}{tie} ({shown} ms)"


def _elsewhere(points: Sequence[Point], elsewhere: Mapping[str, str | None]) -> str:
    """Say what other routers call the modes of points."""
    found = {str(point.changes.get("router_mode", point.name)): elsewhere[point.name] for point in points}
    return "; ".join(f"{mode} is {where}" for mode, where in list(found.items())[:MOST])


def _named(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST:,} more"] * (len(names) > MOST)
    return listed([*names[:MOST], *more])


def _too_little(points: list[Point]) -> str:
    """Say where there was too little data, with the first reason."""
    short = [point for point in points if point.too_little]
    if not short:
        return ""
    where = (
        f"in {len(short)} of {len(points)} combinations, such as {short[0].name}" if len(points) > 1 else short[0].name
    )
    return f" Too little data {where}: {'; '.join(short[0].too_little)}."


def _grew(points: list[Point]) -> str:
    """Say in how many combinations a queue grew."""
    num_grew = sum(not point.is_stable for point in points)
    if len(points) == 1:
        return "The queue grew." if num_grew else "The queue did not grow."
    if not num_grew:
        return f"No queue grew in any of the {len(points)} combinations."
    return f"The queue grew in {num_grew} of {len(points)} combinations."


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


def _why(row: Found) -> str:
    """Say which limits are missed at the nearest value that misses any."""
    assert row.missed is not None
    return told(outcome for outcome in row.missed.outcomes if outcome.state != "met")


def value_shown(row: Found) -> str:
    """Format what a search found, or how far it got."""
    if row.met is None:
        return "none" if row.is_over else "not known"
    if not row.is_at_end or (row.sense == "lowest" and row.met == 1):
        low, high = row.interval or (row.met, row.met)
        return digits(row.met) if low == high else f"{digits(row.met)} [{digits(low)}, {digits(high)}]"
    if row.sense is None:
        return "any"
    return f"at {'least' if row.sense == 'highest' else 'most'} {digits(row.met)}"


def digits(value: float) -> str:
    """Format a value that was tried; it has no more digits than the search's precision."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"

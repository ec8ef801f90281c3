"""Load curves: points that differ only in how much is sent. Where does throughput stop growing, and what holds the limits?"""

from collections.abc import Sequence
from typing import NamedTuple

from reports.figures.cells import milliseconds, number
from reports.figures.load import Load
from reports.figures.outcomes import outcomes_in_words
from reports.sweep.points import FoundLoad, Point

AXES = ("concurrency", "rate")
"""Settings that say how much is sent, in streams or requests per second."""
LINES = ("router_mode", "endpoint", "model", "sweep")
"""Settings whose values have a curve each."""
NEAR = 0.95
"""The share of the highest throughput from which on more load brings little."""
FAILED = "failed requests"
"""The limit that a load misses of which more requests failed than are allowed."""
KEPT = 0.9
"""A rate is kept up with if at least this share of what is sent in a time is answered within it."""


class LoadCurve(NamedTuple):
    """The points of one endpoint or deployment, by load, the lowest first."""

    name: str
    """Empty if there is only one."""
    axis: str
    points: list[Point]
    invalid: Sequence[Point] = ()
    """Loads that are not valid, so no measure of the server, except that more requests failed than are allowed."""

    def at(self, point: Point) -> float:
        """Return the load of a point."""
        return float(point.changes[self.axis])

    @property
    def answered(self) -> "LoadCurve":
        """The same without loads at which nothing was answered."""
        return self._replace(points=[point for point in self.points if throughput(point)])

    @property
    def highest(self) -> Point | None:
        """The point with the highest throughput; None if no request was answered."""
        return max((point for point in self.points if throughput(point)), key=throughput, default=None)

    @property
    def knee(self) -> Point | None:
        """The lowest load that gives nearly the highest throughput."""
        place = knee(list(map(throughput, self.points)))
        return None if place is None else self.points[place]

    @property
    def held(self) -> Point | None:
        """The highest load within the limits below the lowest that misses one."""
        held, _ = edge_of_limits(list(map(_holds, self.judged)))
        return None if held is None else self.judged[held]

    @property
    def found(self) -> FoundLoad:
        """The same load, with what is certain of it."""
        low, high = edge_of_limits(list(map(_surely_holds, self.judged)))
        held, missed, low_at, high_at = (
            None if point is None else self.at(point)
            for point in (
                self.held,
                self.missed,
                *(None if place is None else self.judged[place] for place in (low, high)),
            )
        )
        return FoundLoad(self.name, self.axis, held, missed, (low_at, high_at))

    @property
    def missed(self) -> Point | None:
        """The lowest load that misses a limit."""
        _, missed = edge_of_limits(list(map(_holds, self.judged)))
        return None if missed is None else self.judged[missed]

    @property
    def unknown(self) -> list[Point]:
        """The loads below the lowest that misses a limit of which it is not known."""
        _, missed = edge_of_limits(list(map(_holds, self.judged)))
        return [point for point in self.judged[:missed] if _holds(point) is None]

    @property
    def judged(self) -> list[Point]:
        """The points that say whether the limits hold: valid ones, and those with too many failures."""
        return sorted([*self.points, *filter(has_failed, self.invalid)], key=self.at)

    @property
    def beyond(self) -> Point | None:
        """The lowest load above all valid ones that is not valid."""
        above = [point for point in self.invalid if self.at(point) > self.at(self.points[-1])]
        return min(above, key=self.at, default=None)

    def load(self, point: Point) -> str:
        """Say how much is sent at a point."""
        return load_in_words(self.axis, self.at(point))


def has_failed(point: Point) -> bool:
    """Return whether a point misses the limits because more requests failed than are allowed."""
    return any(outcome.limit == FAILED and outcome.state == "missed" for outcome in point.outcomes)


def _holds(point: Point) -> bool | None:
    return None if point.state == "unknown" else point.state == "met"


def _surely_holds(point: Point) -> bool | None:
    """Return whether a point holds the limits, None if another sample might not tell the same."""
    sure = {outcome.state for outcome in point.outcomes if outcome.is_sure}
    if "missed" in sure:
        return False
    return True if sure == {"met"} and all(outcome.is_sure for outcome in point.outcomes) else None


def tokens_per_s(point: Point) -> float:
    """Return the output tokens per second of the window in which requests count, 0 if there were none."""
    rates = point.throughput
    within = rates.window_output_tokens_per_s
    return (rates.output_tokens_per_s or 0.0) if within is None else within


def throughput(point: Point) -> float:
    """Return the output tokens per second or, of answers that have none, such as embeddings, the answers per second."""
    return tokens_per_s(point) or requests_per_s(point) or 0.0


def requests_per_s(point: Point) -> float | None:
    """Return the answers per second of the same window."""
    within = point.throughput.window_requests_per_s
    return point.throughput.requests_per_s if within is None else within


def knee(throughputs: Sequence[float]) -> int | None:
    """Return the place of the first throughput that is nearly the highest, by load; None if nothing was answered."""
    most = max(throughputs, default=0.0)
    return next((place for place, rate in enumerate(throughputs) if rate >= NEAR * most), None) if most else None


def edge_of_limits(states: Sequence[bool | None]) -> tuple[int | None, int | None]:
    """Return the places of the last load within the limits below the first beyond them, and of that one, by load.

    Args:
        states: whether each load holds them, None if that is not known.
    """
    missed = next((place for place, state in enumerate(states) if state is False), None)
    held = next((place for place in reversed(range(len(states[:missed]))) if states[place]), None)
    return held, missed


def curves(points: Sequence[Point], *, axis: str | None = None) -> list[LoadCurve]:
    """Return the curves that the points make, in their order; none if they differ in something else, too.

    With an axis, a curve may have a single point.
    """
    names = {name for point in points for name in point.changes}
    varied = {name for name in names if len({str(point.changes.get(name)) for point in points}) > 1}
    least = 1 if axis else 2
    axis = axis or next((name for name in AXES if name in varied), None)
    if axis is None or not varied <= {axis, *LINES}:
        return []
    lines: dict[str, list[Point]] = {}
    for point in points:
        name = ", ".join(str(point.changes[each]) for each in LINES if each in varied and each in point.changes)
        lines.setdefault(name, []).append(point)
    is_any_valid = not all(point.notes for point in points)
    found = [_curve(name, axis, line, is_any_valid=is_any_valid) for name, line in lines.items()]
    return [curve for curve in found if len(curve.points) >= least]


def _curve(name: str, axis: str, points: Sequence[Point], *, is_any_valid: bool) -> LoadCurve:
    """Return a curve of the points that are valid, or of all if none is on any curve."""
    by_load = sorted(points, key=lambda point: float(point.changes[axis]))
    valid = [point for point in by_load if not (point.notes and is_any_valid)]
    return LoadCurve(name, axis, valid, [point for point in by_load if point.notes and is_any_valid])


def load_in_words(axis: str, load: float) -> str:
    """Say how much is sent."""
    return str(Load(round(load)) if axis == "concurrency" else Load(rate=load))


def verdict(found: Sequence[LoadCurve], *, has_limits: bool) -> str:
    """Say of each curve what holds the limits, and where throughput stops growing."""
    said = []
    for curve in found:
        parts = [_within_limits(curve)] if has_limits else []
        sentence = " ".join([*parts, _keeps_up(curve) if curve.axis == "rate" else _knee(curve)])
        said.append(f"{curve.name}: {sentence}" if curve.name else sentence)
    return " ".join([*said, *_compared(found)])


def _within_limits(curve: LoadCurve) -> str:
    held, missed, unknown = curve.held, curve.missed, curve.unknown
    why = outcomes_in_words(outcome for outcome in missed.outcomes if outcome.state == "missed") if missed else ""
    if held is None and missed is None:
        why = f"at {curve.load(unknown[-1])}: {_why_unknown(unknown[-1])}" if unknown else "nothing was answered"
        return f"It is not known whether the limits hold; {why}."
    if held is None:
        known = "No load tried is known to hold the limits" if unknown else "No load tried holds the limits"
    elif missed is None and not unknown:
        tried = "valid load" if curve.invalid else "load tried"
        return f"The limits hold at every {tried}, up to {curve.load(held)} ({_rate(held)})."
    else:
        known = f"The limits hold up to {curve.load(held)} ({_rate(held)}{_interval(curve)})"
    beyond = f"; at {curve.load(missed)}: {why}" if missed else ""
    return f"{known}{beyond}.{_not_known(curve)}"


def _not_known(curve: LoadCurve) -> str:
    """Say at which loads it is not known whether the limits hold, and why not at the highest of these."""
    if not curve.unknown:
        return ""
    *others, last = curve.unknown
    loads = " and ".join(filter(None, [", ".join(f"{curve.at(point):g}" for point in others), curve.load(last)]))
    return f" It is not known whether they hold at {loads} ({_why_unknown(last)})."


def _why_unknown(point: Point) -> str:
    return "; ".join(outcome.reason for outcome in point.outcomes if outcome.state == "unknown")


def _interval(curve: LoadCurve) -> str:
    """Say between which loads the limits stop holding for certain."""
    low, high = (None if load is None else f"{load:g}" for load in curve.found.interval)
    if low is not None and high is not None:
        return f"; 95% interval {low} to {high}"
    return (
        f"; at least {low} for certain"
        if low is not None
        else f"; less than {high} for certain"
        if high is not None
        else ""
    )


def _keeps_up(curve: LoadCurve) -> str:
    """Say which rate is answered as fast as it is sent."""
    shares = [(point, requests_per_s(point), point.offered_per_s) for point in curve.points]
    known = [(point, answered, answered / offered) for point, answered, offered in shares if answered and offered]
    beyond = next(((point, answered) for point, answered, share in known if share < KEPT), None)
    kept = [point for point, _, _ in known if beyond is None or curve.at(point) < curve.at(beyond[0])]
    said = (
        f"Requests are answered as fast as they are sent up to {curve.load(kept[-1])} ({_rate(kept[-1])})"
        if kept
        else ""
    )
    if beyond is None:
        return f"{said}, {_end(curve)}." if said else "Nothing was answered."
    only = f"of {curve.load(beyond[0])}, {beyond[1]:.3g} are answered"
    return f"{said}; {only}." if said else f"No rate tried is answered as fast as it is sent: {only}."


def _knee(curve: LoadCurve) -> str:
    """Say which load gives nearly the highest throughput, and what that saves."""
    first, highest = curve.knee, curve.highest
    if first is None or highest is None:
        return "Nothing was answered."
    last = curve.points[-1]
    if len(curve.points) == 1:
        only = f", {_end(curve)}" if curve.beyond else ""
        return f"{curve.load(last)[0].upper()}{curve.load(last)[1:]}: {_rate(last)}, {_latency(last)}{only}."
    if first is last:
        return (
            f"Throughput still grew at {curve.load(last)}, {_end(curve)} ({_rate(last)}), so its highest is not known."
        )
    share = throughput(first) / throughput(highest)
    if first is highest:
        return (
            f"Throughput is highest at {curve.load(first)} ({_rate(first)}, {_latency(first)}); more load only waits."
        )
    give = "gives" if curve.at(first) == 1 else "give"
    what = f"{curve.load(first)} {give} {share:.0%} of the highest throughput ({_rate(first)} of {number(throughput(highest))})"
    what = what[0].upper() + what[1:]
    return f"{what} at {_ratio(first, highest)} of {curve.load(highest)} ({_both(first, highest)})."


def _end(curve: LoadCurve) -> str:
    """Say why no higher load counts."""
    return f"the highest valid load below {curve.load(curve.beyond)}" if curve.beyond else "the highest load tried"


def has_tokens(points: Sequence[Point]) -> bool:
    """Return whether any answer came token by token, so that it has a TTFT."""
    return any(point.ttft_sched.mean is not None for point in points)


def _median(point: Point) -> tuple[str, float | None]:
    """Return the latency that says most, with its name: the TTFT or, of answers that come whole, E2E."""
    return ("TTFT", point.ttft_sched.p50) if has_tokens([point]) else ("E2E latency", point.e2e_sched.p50)


def _ratio(first: Point, highest: Point) -> str:
    (name, here), (_, there) = _median(first), _median(highest)
    if not here or not there:
        return f"the {name}"
    share = here / there
    if share > 0.95:
        return f"about the {name}"
    for parts, word in ((2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth"), (10, "a tenth")):
        if abs(share * parts - 1) < 0.1:
            return f"{word} {'of ' * (parts > 2)}the {name}"
    return f"{share:.0%} of the {name}"


def _both(first: Point, highest: Point) -> str:
    here, there = (milliseconds(_median(point)[1]) for point in (first, highest))
    return f"median {here} ms instead of {there} ms"


def _latency(point: Point) -> str:
    name, seconds = _median(point)
    return f"median {name} {milliseconds(seconds)} ms"


def _rate(point: Point) -> str:
    return f"{number(throughput(point))} {unit(point)}"


def unit(point: Point) -> str:
    """Return the unit of a point's throughput."""
    return "tokens/s" if tokens_per_s(point) or not requests_per_s(point) else "requests/s"


def _compared(found: Sequence[LoadCurve]) -> list[str]:
    """Compare the highest throughputs of several curves or, if loads beyond one of them are not valid, those at a load of all."""
    named = [curve for curve in found if curve.name and curve.highest]
    if len(named) < 2:
        return []
    at_load = (
        _highest_of_all(named) if any(curve.beyond and curve.knee is curve.points[-1] for curve in named) else None
    )
    if at_load is None:
        what, known = "Highest throughput", [(curve, throughput(best)) for curve in named if (best := curve.highest)]
    else:
        what = f"Throughput at {load_in_words(named[0].axis, at_load)}, the highest load that is valid for all"
        known = [(curve, throughput(point)) for curve in named for point in curve.points if curve.at(point) == at_load]
    known.sort(key=lambda each: -each[1])
    first, most = known[0]
    others = [f"{curve.name} {number(rate)} ({rate / most - 1:+.0%})" for curve, rate in known[1:]]
    return [f"{what}: {first.name} {number(most)} {unit(first.points[0])}, {', '.join(others)}."]


def _highest_of_all(found: Sequence[LoadCurve]) -> float | None:
    """Return the highest load that all curves have."""
    return max(set.intersection(*({curve.at(point) for point in curve.points} for curve in found)), default=None)

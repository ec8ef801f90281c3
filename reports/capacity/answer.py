"""What a plan found: the ranked layouts, what binds each, what more load needs, how sure it is, and how to deploy it."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from reports.figures.cells import milliseconds
from reports.figures.outcomes import STEADY_QUEUE, Outcome, State, binding, percent, steady_queue_told, subject
from reports.figures.tier_sizes import NEAR, Sized, enough, is_size
from reports.key import Key, key_of
from reports.tables.grid import Grid

SCHEMA = "dynabench.arm/1"
NEAR_CLIFF = 0.1
"""A layout that holds to less than this much more load is close to a cliff."""


class Ranked(msgspec.Struct, frozen=True):
    """A layout, and the number of workers with which it met the limits."""

    name: str
    changes: dict[str, str | int | float | None]
    gpus: int | None = None
    """GPUs of the fewest workers that met the limits; None if none did."""
    workers: int | None = None
    cost: float | None = None
    at_least: int | None = None
    """A lower bound on the GPUs it needs, where searching further was not worthwhile."""
    least_cost: float | None = None
    """The cost of these GPUs."""
    outcomes: list[Outcome] = []
    """The result with these workers, or with the most that were tried."""
    tried: int | None = None
    """The most workers that were tried and missed the limits."""
    impossible: str = ""
    prefill_workers: int | None = None
    """Prefill workers, in addition to `workers`; None if every worker handles whole requests."""
    fewer: list[Outcome] = []
    """The result with one worker fewer; empty if that was not tried."""
    is_upper_bound: bool = False
    """Whether fewer workers may meet the limits, too, because others are cheaper and the search ended."""

    @property
    def state(self) -> State:
        """Whether it met the limits with any number of workers that was tried."""
        return "missed" if self.gpus is None else "met"


class AtLoad(msgspec.Struct, frozen=True):
    """What a multiple of the load needs."""

    load: float
    layout: str
    gpus: int | None
    workers: int | None
    outcomes: list[Outcome]
    prefill_workers: int | None = None
    cost: float | None = None
    label: str = ""
    """The load in words, in a closed loop with what is kept in flight; empty in older folders."""


class Alternative(msgspec.Struct, frozen=True):
    """The best layout with one setting changed, or with a worker fewer."""

    name: str
    workers: int
    gpus: int
    outcomes: list[Outcome]
    ttft_mean_s: float | None
    state: State


SURE = 0.9
"""The chance from which on a limit that is met counts as certain."""


class Sureness(msgspec.Struct, frozen=True):
    """How certain it is that a limit is met."""

    limit: str
    value: float
    low: float | None
    """95% block-bootstrap interval of the limited metric (s, or a share); None if there is none; the text says why."""
    high: float | None
    """Infinite if failed requests are among the slowest; JSON has null for it, too."""
    model_error: float | None
    """Mean absolute error of the mean of such times where it was measured, as a share; None if unknown."""
    of: str = ""
    """The measurements behind that error."""
    text: str = ""
    real_low: float | None = None
    """Between this and `real_high`, 9 of 10 real values of such samples are, as measurements say; None if unknown."""
    real_high: float | None = None
    """Infinite if more than 1 in 20 real engines would not keep up with the load; JSON has null for it, too."""
    chance: float | None = None
    """The chance that the limit holds for the real engine and other such samples; None if unknown."""

    is_open: bool = False
    """Whether the interval includes the limit, so that another such sample could change the result."""
    is_within_error: bool = False
    """Whether the limit is met and its chance is less than `SURE`."""
    is_share: bool = False
    """Whether it limits the share of requests that are within the per-request limits."""

    def __post_init__(self) -> None:
        """Read the null that JSON has for an interval without an end."""
        for low, high in (("low", "high"), ("real_low", "real_high")):
            if getattr(self, low) is not None and getattr(self, high) is None:
                msgspec.structs.force_setattr(self, high, math.inf)

    @property
    def is_doubtful(self) -> bool:
        """Whether the limit may in fact be missed."""
        return self.is_open or self.is_within_error or not self.has_interval

    @property
    def has_interval(self) -> bool:
        """Whether it is known how far other such samples may differ."""
        return self.low is not None


class Held(msgspec.Struct, frozen=True):
    """How much load the best layout takes, in multiples of the load that was planned for."""

    holds_to: float
    """The highest load tried that met the limits."""
    misses_at: float | None = None
    """The lowest load tried that missed one; None if all met them."""
    outcomes: list[Outcome] = []
    """The result at that load."""

    @property
    def is_near_cliff(self) -> bool:
        """Whether a little more load misses a limit."""
        return self.is_within(NEAR_CLIFF)

    def is_within(self, error: float) -> bool:
        """Whether the load at which it misses a limit is no further away than an error of the model, as a share."""
        return self.misses_at is not None and self.holds_to < 1 + error

    def __str__(self) -> str:
        nearest = binding(self.outcomes)
        if self.misses_at is None or nearest is None:
            return f"It holds to {self.holds_to:g}x of this traffic or more."
        if nearest.limit == STEADY_QUEUE:
            misses = f"at {self.misses_at:.3g}x, the queue grows, because requests arrive faster than they are answered"
        else:
            misses = f"misses {subject(nearest.limit)} at {self.misses_at:.3g}x"
        near = "It is close to a cliff: it" if self.is_near_cliff else "It"
        return f"{near} holds to {self.holds_to:.3g}x of this traffic, and {misses}."


class PlanAnswer(msgspec.Struct, frozen=True):
    """What a plan found."""

    schema: str
    title: str
    subtitle: str
    is_complete: bool
    verdict: str
    limits: list[str]
    layouts: list[Ranked]
    loads: list[AtLoad]
    modes: list[Alternative]
    caching: list[Alternative]
    sureness: list[Sureness]
    """For the best layout."""
    commands: list[str]
    simulated: int
    wall_s: float
    held: Held | None = None
    """The load that the best layout takes; None if that was not tried."""
    too_little: list[str] = []
    """What the simulation of the best layout, or of the nearest one, is too short for."""
    notes: list[str] = []
    """Other things a reader should know."""
    head: dict[str, str] = {}
    """The workload and the deployment."""
    command: str = ""
    settings: dict[str, Any] = {}
    """Every setting that was given."""


IN_KEY = 7
"""The number of layouts that get a colour: as many as there are colours."""


def key(answer: PlanAnswer) -> Key:
    """Return the names and colours of the best layouts that were tried, in the report and on the terminal."""
    return key_of([layout.name for layout in answer.layouts if layout.outcomes][:IN_KEY])


def grids(answer: PlanAnswer, *, most: int = 8) -> Iterator[Grid]:
    """Yield the tables of an answer."""
    possible = [layout for layout in answer.layouts if not layout.impossible]
    tried = [layout for layout in possible if layout.outcomes]
    if tried:
        yield _ranking(answer, tried[:most], left=len(tried[most:]), bounded=[x for x in possible if not x.outcomes])
    if len(answer.loads) > 1:
        has_price = any(at.cost is not None and at.cost != at.gpus for at in answer.loads)
        lines = [
            (at.label or f"{at.load:g}x", _load_cells(at, answer.limits, has_price=has_price)) for at in answer.loads
        ]
        columns = ["layout", "GPUs", "workers", *(["cost"] if has_price else []), *answer.limits]
        yield Grid("What more load takes", columns, lines)
    for title, rows in (("Router modes", answer.modes), ("Prefix caching", answer.caching)):
        if rows:
            title = f"{title}, with {answer.layouts[0].name}"
            lines = [
                (
                    f"{row.name}, {row.workers} worker{'s' * (row.workers != 1)}",
                    [milliseconds(row.ttft_mean_s), *_values(row.outcomes, answer.limits), row.state],
                )
                for row in rows
            ]
            yield Grid(title, ["TTFT mean (ms)", *answer.limits, "limits"], lines)


def impossible(answer: PlanAnswer) -> Iterator[str]:
    """Yield why layouts are impossible, grouped by reason."""
    by_reason: dict[str, list[Ranked]] = {}
    for layout in answer.layouts:
        if layout.impossible:
            by_reason.setdefault(layout.impossible, []).append(layout)
    for reason, (first, *others) in by_reason.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{first.name}{more}: {reason}"


def _ranking(answer: PlanAnswer, shown: list[Ranked], *, left: int, bounded: list[Ranked]) -> Grid:
    """Return the table of layouts that were tried; only bounds are known for the others."""
    has_price = any(layout.cost is not None and layout.cost != layout.gpus for layout in shown)
    limits = [head for limit in answer.limits for head in (limit, f"{_metric(limit)} headroom")]
    columns = ["GPUs", "workers", *(["cost"] if has_price else []), *limits, "binds"]
    lines = [(layout.name, _cells(layout, answer.limits, has_price=has_price)) for layout in shown]
    if any(layout.workers not in (None, 1) for layout in shown):
        columns.append("one worker fewer")
        for layout, (_, cells) in zip(shown, lines, strict=True):
            cells.append(_fewer(layout))
    notes = []
    if unmet := [layout.at_least for layout in shown if layout.gpus is None]:
        notes.append(f"{unmet[0]}+: needs at least {unmet[0]} GPUs; its figures are those of the most workers tried.")
    if bound := next((layout.gpus for layout in shown if layout.is_upper_bound), None):
        notes.append(f"<= {bound}: fewer than {bound} may be enough; they were not tried, because others are cheaper.")
    if any(layout.prefill_workers is not None for layout in shown):
        notes.append("2+3: 2 workers prefill and 3 decode.")
    way_out = "allow more GPUs (--max-gpus), or use a lower rate (--rate-scale)"
    notes += steady_queue_told((cells for _, cells in lines), way_out)
    if left:
        notes.append(f"{left} more in plan.json.")
    notes += _bounds(bounded)
    return Grid("Layouts, cheapest first", columns, lines, " ".join(notes))


def _cells(layout: Ranked, limits: list[str], *, has_price: bool) -> list[str]:
    most = "<= " * layout.is_upper_bound
    gpus = f"{most}{layout.gpus}" if layout.gpus is not None else f"{layout.at_least}+"
    workers = most + _workers(layout.workers, layout.prefill_workers)
    if layout.workers is None and layout.tried is not None:
        workers = f"{_workers(layout.tried, layout.prefill_workers)} tried"
    cost = [_cost(layout)] if has_price else []
    headroom = [_headroom(layout.outcomes, limit) for limit in limits]
    measured = [cell for pair in zip(_values(layout.outcomes, limits), headroom, strict=True) for cell in pair]
    nearest = binding(layout.outcomes)
    binds = "-" if nearest is None else _metric(nearest.limit) + ": missed" * (nearest.margin is None)
    return [gpus, workers, *cost, *measured, binds]


def _bounds(layouts: list[Ranked]) -> Iterator[str]:
    """Say how many GPUs the untried layouts need at least; they were skipped because others need fewer."""
    least = Counter(layout.at_least for layout in layouts if layout.at_least is not None)
    if least:
        parts = [
            f"{count} need{'s' * (count == 1)} at least {gpus} GPU{'s' * (gpus != 1)}"
            for gpus, count in sorted(least.items())
        ]
        yield f"Not tried, because they cannot be cheaper: {', '.join(parts)}."


def _cost(layout: Ranked) -> str:
    if layout.cost is not None:
        return f"{'<= ' * layout.is_upper_bound}{layout.cost:,.4g}"
    return "-" if layout.least_cost is None else f"{layout.least_cost:,.4g}+"


def _workers(count: int | None, prefill: int | None) -> str:
    if count is None:
        return "-"
    return f"{count}" if prefill is None else f"{prefill}+{count}"


def _fewer(layout: Ranked) -> str:
    """Say why it cannot be fewer: the largest miss with one worker fewer."""
    nearest = binding(layout.fewer)
    if nearest is None:
        return "-" if layout.workers in (None, 1) else "not tried"
    if nearest.margin is None:
        return f"{_metric(nearest.limit)}: missed"
    return f"{_metric(nearest.limit)}: {_signed(nearest.margin)}"


def _metric(limit: str) -> str:
    """Return the metric that a limit is on, without its value."""
    return subject(limit)


def _headroom(outcomes: list[Outcome], limit: str) -> str:
    found = next((outcome.headroom for outcome in outcomes if outcome.limit == limit), None)
    return "-" if found is None else _signed(found)


def _signed(margin: float) -> str:
    return f"{'-' * (margin < 0)}{percent(abs(margin))}"


COVERED = "The intervals are for this workload, repeated. They say nothing about other traffic, such as tomorrow's."


def in_short(answer: PlanAnswer) -> str:
    """Say in a line what was found, and how sure it is; nothing if no layout is known to meet the limits."""
    best = answer.layouts[0] if answer.layouts else None
    if best is None or best.gpus is None or best.workers is None:
        return ""
    workers = _workers(best.workers, best.prefill_workers)
    found = f"{best.gpus} GPU{'s' * (best.gpus != 1)} ({best.name}; workers: {workers}) meet{'s' * (best.gpus == 1)} every limit"
    if not answer.sureness and not answer.too_little:
        return f"{found}. How sure that is was not examined."
    if reasons := [*answer.too_little, *_doubts(answer.sureness, answer.held)]:
        return f"{found}. Not certain: {reasons[0]}."
    chances = [sure.chance for sure in answer.sureness if sure.chance is not None]
    if len(chances) < len(answer.sureness):
        return f"{found}. Other such traffic would not change that; how far off the model is, is not known."
    return f"{found}. For a real engine, the chance of each limit is {likely(min(chances))} or more."


def doubt(sureness: Sequence[Sureness], held: Held | None = None) -> str:
    """Say which limits may not be met, also at slightly more load; return nothing if all surely are."""
    reasons = _doubts(sureness, held)
    return f" This is not certain: {'. And '.join(reasons)}." if reasons else ""


def _doubts(sureness: Sequence[Sureness], held: Held | None) -> list[str]:
    """Return why limits may not be met."""
    reasons = []
    if unsure := [sure.limit for sure in sureness if sure.is_open]:
        limits = " and of ".join(unsure)
        reasons.append(f"the 95% interval includes the limit of {limits}; a longer workload would settle it")
    if near := [sure.limit for sure in sureness if sure.is_within_error]:
        chance = min(sure.chance for sure in sureness if sure.is_within_error and sure.chance is not None)
        reasons.append(f"for a real engine, the chance of {' and of '.join(near)} is {likely(chance)}")
    if unknown := [sure.limit for sure in sureness if not sure.has_interval]:
        reasons.append(f"there is no interval for {' and for '.join(unknown)}")
    if held is not None and held.is_within(error := largest_error(sureness)):
        reasons.append(
            f"a limit is missed beyond {held.holds_to:.3g}x of the load, which is nearer than the model's error of {percent(error)}"
        )
    return reasons


def likely(chance: float) -> str:
    """Format a chance, which is never certain."""
    return "over 99%" if chance > 0.99 else "under 1%" if chance < 0.01 else f"{chance:.0%}"


def largest_error(sureness: Sequence[Sureness]) -> float:
    """Return the largest known error of the model for a limited metric, as a share; 0 if none is known."""
    return max((sure.model_error for sure in sureness if sure.model_error is not None), default=0.0)


def modes_told(modes: Sequence[Alternative]) -> str:
    """Say which router mode is best with the number of workers found, and by how much; return nothing if none is known."""
    most = max((mode.workers for mode in modes), default=0)
    times = {mode.name: mode.ttft_mean_s for mode in modes if mode.workers == most}
    known = sorted((time, name) for name, time in times.items() if time)
    if len(known) < 2:
        return ""
    (least, best), (second, other) = known[:2]
    if second < least * 1.001:
        return f"The router modes {best} and {other} have the same mean TTFT; no other mode has a lower one."
    if near := [name for time, name in known[1:] if time <= least * (1 + NEAR)]:
        who = f"{', '.join(near)} {'is' if len(near) == 1 else 'are'}"
        return f"The router mode {best} has the lowest mean TTFT, but {who} within {NEAR:.0%} of it; another seed may reverse the order."
    return f"The router mode {best} has the lowest mean TTFT, {percent(1 - least / second)} below that of {other}."


def sizes_told(layouts: Sequence[Ranked]) -> str:
    """Say beyond which size larger KV tiers save nothing; return nothing if no sizes were tried."""
    sized = [
        Sized(
            layout.changes,
            sum(float(value or 0) for name, value in layout.changes.items() if is_size(name)),
            layout.gpus if layout.cost is None else layout.cost,
            f"{layout.gpus} GPU{'s' * (layout.gpus != 1)}",
        )
        for layout in layouts
        if layout.gpus is not None
    ]
    return enough(sized, "lowest cost", is_lower_better=True)


def _load_cells(at: AtLoad, limits: list[str], *, has_price: bool) -> list[str]:
    found = [str(at.gpus) if at.gpus is not None else "none", _workers(at.workers, at.prefill_workers)]
    cost = [] if not has_price else ["-" if at.cost is None else f"{at.cost:,.4g}"]
    return [at.layout, *found, *cost, *_values(at.outcomes, limits)]


def _values(outcomes: list[Outcome], limits: list[str]) -> list[str]:
    """Return the limited metric (ms) for each limit."""
    by_limit = {outcome.limit: outcome for outcome in outcomes}
    return [_value(by_limit.get(limit)) for limit in limits]


def _value(outcome: Outcome | None) -> str:
    if outcome is None or outcome.value is None:
        return "-"
    return f"{outcome.value:.2%}" if outcome.is_share else milliseconds(outcome.value)

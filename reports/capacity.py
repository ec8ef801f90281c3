"""What a plan found: the layouts in order, what binds each, what more load takes, how sure it is, and how to deploy it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
from msgspec import structs

from foundation.files import replace_text
from reports import page
from reports.charts import drawing, plan
from reports.charts import sweep as charts
from reports.charts.drawing import STYLE
from reports.charts.sweep import Swept
from reports.grid import Grid
from reports.key import key_of
from reports.outcomes import Outcome, State, binding, percent
from reports.points import Point
from reports.tables import milliseconds

SCHEMA = "dynabench.plan/1"


class Ranked(msgspec.Struct, frozen=True):
    """A layout, and with how many workers it was seen to meet the limits."""

    name: str
    changes: dict[str, str | int | float | None]
    gpus: int | None = None
    """Of the fewest workers that were seen to meet the limits; None where none was."""
    workers: int | None = None
    cost: float | None = None
    at_least: int | None = None
    """GPUs that it would need at least, where it was not worth looking further."""
    outcomes: list[Outcome] = []
    """With these workers, or with the most that were tried."""
    tried: int | None = None
    """The most workers that were tried and missed the limits."""
    impossible: str = ""

    @property
    def state(self) -> State:
        """Whether it meets the limits with what was tried."""
        return "missed" if self.gpus is None else "met"


class AtLoad(msgspec.Struct, frozen=True):
    """What a multiple of the workload's rate takes."""

    load: float
    layout: str
    gpus: int | None
    workers: int | None
    outcomes: list[Outcome]


class Alternative(msgspec.Struct, frozen=True):
    """The best layout with one setting changed, or with a worker fewer."""

    name: str
    workers: int
    gpus: int
    outcomes: list[Outcome]
    ttft_mean_s: float | None
    state: State


class Sureness(msgspec.Struct, frozen=True):
    """How sure it is that a limit is met."""

    limit: str
    value: float
    low: float | None
    """95% block-bootstrap interval of what is limited (s); None where there are too few requests."""
    high: float | None
    model_error: float | None
    """Known mean absolute error of this metric for such a model and GPU, as a share; None where nothing is known."""
    of: str = ""
    """What that is known of."""
    text: str = ""


class Answer(msgspec.Struct, frozen=True):
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
    commands: list[str]
    simulated: int
    wall_s: float
    head: dict[str, str] = {}
    """What was run on what."""
    command: str = ""
    settings: dict[str, Any] = {}
    """Everything that was given."""


DRAWN = 7
"""Layouts that charts show: as many as there are colours."""


def write(folder: Path, answer: Answer, points: dict[str, list[Point]]) -> None:
    """Write plan.json, and the report, into the plan's folder.

    Args:
        folder: it exists.
        answer: what was found.
        points: what was tried of each layout, by its name.
    """
    replace_text(folder / "plan.json", msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")
    tried = [layout.name for layout in answer.layouts if points.get(layout.name)][:DRAWN]
    lines = {name: [structs.replace(one, changes={"workers": one.workers}) for one in points[name]] for name in tried}
    with mpl.rc_context(rc=STYLE):
        by_workers = charts.charts(Swept(lines, key := key_of(tried), "workers", answer.limits), [])
        drawn = drawing.draw(plan.charts(answer, key) | by_workers, folder / "charts")
    text = page.render(
        "plan.html.jinja",
        drawn,
        arms=tried,
        title=answer.title,
        subtitle=f"{answer.simulated} simulations, {answer.wall_s:.0f} s",
        head=answer.head,
        alerts=[],
        verdict=answer.verdict,
        sureness=_sureness_grid(answer),
        grids=list(grids(answer, most=24)),
        impossible=[layout for layout in answer.layouts if layout.impossible],
        commands=answer.commands,
        command=answer.command,
        settings=json.dumps(answer.settings, indent=2),
    )
    replace_text(folder / "report.html", text)


def _sureness_grid(answer: Answer) -> Grid | None:
    """Lay out how far each limit is, and whether that is more than the sample and the model may be off."""
    if not answer.sureness:
        return None
    by_limit = {outcome.limit: outcome for outcome in answer.layouts[0].outcomes}
    lines = []
    for sure in answer.sureness:
        known = by_limit.get(sure.limit)
        interval = "n/a" if sure.low is None else f"{milliseconds(sure.low)} to {milliseconds(sure.high)}"
        lines.append(
            (
                sure.limit,
                [
                    milliseconds(sure.value),
                    "n/a"
                    if known is None or known.margin is None
                    else f"{known.state} by {percent(abs(known.margin))}",
                    interval,
                    "n/a" if sure.model_error is None else percent(sure.model_error),
                ],
            )
        )
    return Grid(
        "How sure is it?",
        ["found (ms)", "margin", "95% of such samples (ms)", "model error"],
        lines,
        "A margin below the model error, or an interval that holds the limit, is not sure.",
        "limit",
    )


def grids(answer: Answer, *, most: int = 8) -> Iterator[Grid]:
    """Yield the tables of an answer."""
    shown = [layout for layout in answer.layouts if not layout.impossible][:most]
    if shown:
        has_price = any(layout.cost is not None and layout.cost != layout.gpus for layout in shown)
        columns = ["GPUs", "workers", *(["cost"] if has_price else []), *answer.limits, "what binds"]
        lines = [(layout.name, _cells(layout, answer.limits, has_price=has_price)) for layout in shown]
        left = len([layout for layout in answer.layouts if not layout.impossible]) - len(shown)
        note = f"{left} more in plan.json." if left else ""
        yield Grid("Layouts, the cheapest first", columns, lines, note)
    if len(answer.loads) > 1:
        lines = [(f"{at.load:g}x", _load_cells(at, answer.limits)) for at in answer.loads]
        yield Grid("What more load takes", ["layout", "GPUs", "workers", *answer.limits], lines)
    for title, rows in (("Router modes", answer.modes), ("Prefix caching", answer.caching)):
        if rows:
            lines = [
                (
                    f"{row.name}, {row.workers} worker{'s' * (row.workers != 1)}",
                    [milliseconds(row.ttft_mean_s), *_values(row.outcomes, answer.limits), row.state],
                )
                for row in rows
            ]
            yield Grid(title, ["TTFT mean (ms)", *answer.limits, "limits"], lines)


def _cells(layout: Ranked, limits: list[str], *, has_price: bool) -> list[str]:
    gpus = f"{layout.gpus}" if layout.gpus is not None else f"over {(layout.at_least or 1) - 1}"
    workers = f"{layout.workers}" if layout.workers is not None else "-"
    cost = [f"{layout.cost:,.4g}" if layout.cost is not None else "-"] if has_price else []
    nearest = binding(layout.outcomes)
    return [gpus, workers, *cost, *_values(layout.outcomes, limits), "-" if nearest is None else _binding(nearest)]


def _binding(outcome: Outcome) -> str:
    name = outcome.limit.partition(" <=")[0]
    return (
        name
        if outcome.margin is None
        else f"{name}: {'' if outcome.state == 'met' else '-'}{percent(abs(outcome.margin))}"
    )


def _load_cells(at: AtLoad, limits: list[str]) -> list[str]:
    found = [str(at.gpus), str(at.workers)] if at.gpus is not None else ["none", "-"]
    return [at.layout, *found, *_values(at.outcomes, limits)]


def _values(outcomes: list[Outcome], limits: list[str]) -> list[str]:
    """Return what is limited (ms), for each limit."""
    by_limit = {outcome.limit: outcome for outcome in outcomes}
    return [_value(by_limit.get(limit)) for limit in limits]


def _value(outcome: Outcome | None) -> str:
    if outcome is None:
        return "-"
    return f"{outcome.value:.2%}" if outcome.is_share and outcome.value is not None else milliseconds(outcome.value)

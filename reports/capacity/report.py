"""The report of a plan."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import structs

from foundation.files import replace_text
from reports import page
from reports.capacity import answer as capacity
from reports.capacity.answer import PlanAnswer, Sureness
from reports.charts import drawing, plan
from reports.charts import sweep as charts
from reports.charts.sweep import Swept
from reports.figures.cells import milliseconds
from reports.figures.conditions import Condition
from reports.figures.outcomes import percent
from reports.sweep.points import Point
from reports.tables.grid import Grid


def save(folder: Path, answer: PlanAnswer) -> None:
    """Write plan.json into the plan's folder."""
    replace_text(folder / "plan.json", msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")


def write(folder: Path, answer: PlanAnswer, points: Mapping[str, Sequence[Point]], limits: Sequence[Condition]) -> None:
    """Write the report of a plan into its folder."""
    key = capacity.key(answer)
    lines = {
        name: [structs.replace(one, changes={"workers": one.workers}) for one in points.get(name, [])] for name in key
    }
    by_workers = charts.charts(Swept(lines, key, "workers", limits), [])
    drawn = drawing.draw(plan.charts(answer, key) | by_workers, folder / "charts")
    text = page.render(
        "plan.html.jinja",
        drawn,
        arms=list(key),
        title=answer.title,
        subtitle=f"{answer.simulated} simulations, {answer.wall_s:.0f} s",
        head=answer.head,
        alerts=[],
        in_short=capacity.in_short(answer),
        verdict=answer.verdict,
        sureness=_sureness_grid(answer),
        grids=list(capacity.grids(answer, most=24)),
        impossible=list(capacity.impossible(answer)),
        notes=answer.notes,
        commands=answer.commands,
        command=answer.command,
        settings=json.dumps(answer.settings, indent=2),
    )
    replace_text(folder / "report.html", text)


def _sureness_grid(answer: PlanAnswer) -> Grid | None:
    """Lay out the margin to each limit, and how far off the sample and the model may be."""
    if not answer.sureness:
        return None
    by_limit = {outcome.limit: outcome for outcome in answer.layouts[0].outcomes}
    lines = []
    for sure in answer.sureness:
        known = by_limit.get(sure.limit)
        shown = partial(_shown, sure)
        interval = "none: not certain" if sure.low is None else f"{shown(sure.low)} to {shown(sure.high)}"
        lines.append(
            (
                sure.limit,
                [
                    shown(sure.value),
                    "n/a"
                    if known is None or known.headroom is None
                    else f"{known.state} by {percent(abs(known.headroom))}",
                    interval,
                    "not known" if sure.real_low is None else f"{shown(sure.real_low)} to {shown(sure.real_high)}",
                    "not known" if sure.chance is None else capacity.likely(sure.chance),
                ],
            )
        )
    return Grid(
        "How sure is it?",
        ["found (ms)", "margin", "95% interval (ms)", "9 of 10 real ones (ms)", "chance"],
        lines,
        f"If an interval includes its limit, the result is uncertain. {capacity.COVERED} Real values are judged by "
        "published means of similar cases, percentiles, too. The chance is that the limit holds.",
        "limit",
    )


def _shown(sure: Sureness, value: float | None) -> str:
    """Format a limited value, or an end of its interval."""
    if value is None or math.isinf(value):
        return "infinite"
    return f"{value:.2%}" if sure.is_share else milliseconds(value)

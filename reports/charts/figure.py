"""A chart as a figure of matplotlib, for notebooks and papers: the same marks at the same places as in the report."""

from typing import TYPE_CHECKING, Any

from reports.charts.axes import GRID, RULE, Axes, Scale
from reports.charts.drawing import INK, SIZE, Canvas, Chart
from reports.charts.marks import Area, Bar, Line, Map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 96
"""Units per inch: a unit is a CSS pixel."""
POINT = 72 / DPI
"""Points per unit."""
BEHIND, BETWEEN = -1.0, 1.0
"""Layers of marks: below the grid, which matplotlib draws at 0.5, and below the lines, at 2."""
TITLE = 28
"""Units above the chart, for its title."""


def figure_of(chart: Chart) -> "Figure":
    """Return a chart as a figure of pyplot, which has a pair of axes for each of the chart's, in their order."""
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    canvas = chart.canvas
    height = canvas.height + TITLE
    figure = pyplot.figure(figsize=(canvas.width / DPI, height / DPI), dpi=DPI)
    figure.text(0.0, 1 - 16 / height, chart.title, fontsize=14 * POINT, fontweight="bold", color=INK)
    for axes in canvas.all_axes:
        _add(figure, axes, canvas)
    for text in canvas.texts:
        place = text.x / canvas.width, 1 - (text.y + TITLE) / height
        figure.text(*place, text.text, color=text.colour, ha=text.align, va="baseline", fontsize=SIZE * POINT)
    for leader in canvas.leaders:
        xs = [x / canvas.width for x in leader.xs]
        ys = [1 - (y + TITLE) / height for y in leader.ys]
        dashes: Any = (0, (1, 3)) if leader.is_dotted else "-"
        figure.add_artist(Line2D(xs, ys, color=leader.colour, linewidth=0.8 * POINT, linestyle=dashes))
    return figure


def _add(figure: "Figure", axes: Axes, canvas: Canvas) -> None:
    height = canvas.height + TITLE
    box = (
        axes.left / canvas.width,
        1 - (axes.bottom + TITLE) / height,
        axes.width / canvas.width,
        axes.height / height,
    )
    made: Any = figure.add_axes(box)
    for name, scale in (("x", axes.x), ("y", axes.y)):
        _set_scale(made, name, scale)
    made.set_axisbelow(True)  # the grid
    for side in ("top", "left", "right"):
        made.spines[side].set_visible(False)
    made.spines["bottom"].set(color=RULE, linewidth=0.8 * POINT)
    for layer, marks in ((BEHIND, axes.behind), (BETWEEN, axes.patches)):
        for place, mark in enumerate(marks):
            _mark(made, mark, layer + place / (len(marks) + 1))
    for rule in axes.rules:
        across = made.axvline if rule.is_upright else made.axhline
        across(rule.value, color=rule.colour, linewidth=rule.width * POINT, dashes=rule.dashes or (None, None))
    for line in axes.lines:
        _line(made, line)
    for note in axes.notes:
        made.text(note.x, note.y, note.text, color=note.colour, va="center", fontsize=SIZE * POINT)
    made.set_xlim(*axes.x.ends)
    made.set_ylim(*axes.y.ends)


def _set_scale(made: Any, name: str, scale: Scale) -> None:
    """Set the scale, ticks and labels of one side."""
    side = getattr(made, f"{name}axis")
    if scale.is_log:
        getattr(made, f"set_{name}scale")("log")
    side.set_ticks(list(scale.ticks), list(scale.labels) if scale.has_labels else [""] * len(scale.ticks))
    side.set_ticks([], minor=True)
    if scale.is_opposite:
        side.tick_right()
    side.set_tick_params(length=0, labelsize=SIZE * POINT, labelcolor=RULE, pad=6 * POINT)
    if scale.has_grid:
        made.grid(visible=True, axis=name, color=GRID, linewidth=0.8 * POINT)


def _mark(made: Any, mark: Area | Bar | Map, zorder: float) -> None:
    match mark:
        case Area():
            made.fill_between(
                mark.x, mark.low, mark.high, color=mark.colour, alpha=mark.alpha, linewidth=0, zorder=zorder
            )
        case Bar():
            from matplotlib.patches import Rectangle

            made.add_patch(
                Rectangle((mark.x, mark.y), mark.width, mark.height, facecolor=mark.colour, linewidth=0, zorder=zorder)
            )
        case Map():
            made.imshow(
                mark.table, origin="lower", extent=mark.extent, vmin=0, vmax=mark.top, cmap="viridis", aspect="auto",
                interpolation="nearest", zorder=zorder,
            )  # fmt: skip


def _line(made: Any, line: Line) -> None:
    look: dict[str, Any] = {"linewidth": line.width * POINT} if line.is_drawn else {"linestyle": "None"}
    if line.is_drawn and line.dashes:
        look["dashes"] = line.dashes
    made.plot(
        line.x, line.y, color=line.colour, alpha=line.alpha, clip_on=line.is_clipped, marker=line.marker or None,
        markersize=line.size * POINT, markerfacecolor=line.face or line.colour, markeredgewidth=line.edge_width * POINT, **look,
    )  # fmt: skip

"""How every chart looks, and what the page must know to show the values under the pointer.

A unit is a CSS pixel if the page is as wide as `WIDE`; the font size is the same in all charts.

    left | axes, with a heading above | labels of the lines, each at the height of its line's end
"""

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from reports.charts import axes as sides
from reports.charts.axes import Axes, Rule
from reports.charts.letters import width_of
from reports.charts.marks import Area, Bar, Line, Paint, element, number, path, style
from reports.charts.ticks import categories as categories
from reports.charts.ticks import duration as duration
from reports.charts.ticks import fixed as fixed
from reports.charts.ticks import logarithm as logarithm
from reports.charts.ticks import no_labels as no_labels
from reports.charts.ticks import numbers as numbers
from reports.charts.ticks import plain as plain
from reports.charts.ticks import seconds as seconds
from reports.charts.ticks import times as times
from reports.key import PALETTE, KeyEntry
from reports.record.records import Floats

INK, QUIET, GRID, LIMIT, REST = "#1c1c1c", sides.RULE, sides.GRID, "#c0392b", "#c9c9c9"
ON_PAGE = {
    INK: "currentColor",
    QUIET: "var(--quiet)",
    GRID: "var(--grid)",
    LIMIT: "var(--limit, #c0392b)",
    REST: "var(--rest, #c9c9c9)",
} | {pair[0]: f"var(--arm-{place}, {pair[0]})" for place, pair in enumerate(PALETTE)}
"""What a page calls the colours that it has for light and dark paper."""
WIDE, HALF = 1120, 552
SIZE = 12
"""Font size of all text."""
LINE = 16
"""Height of a line of text."""
LONG_LEADER = 24
"""From a line's end to its label."""


@dataclass
class Series:
    """A line or row of marks that the pointer can be over."""

    label: str
    arm: int | None
    x: list[Any]
    y: list[float | None]


@dataclass
class Panel:
    """One pair of axes of a chart."""

    axes: Axes
    x_unit: str = ""
    y_unit: str = ""
    series: list[Series] = field(default_factory=list)
    is_map: bool = False
    """Whether each series is a row of a map, from 0 below."""

    def add(self, label: str, arm: int | None, x: Iterable[Any], y: Iterable[Any]) -> None:
        """Let the pointer find these points."""
        values = [None if value is None or not np.isfinite(value) else _short(value) for value in y]
        self.series.append(
            Series(label, arm, [_short(value) if isinstance(value, (float, int)) else value for value in x], values)
        )


@dataclass
class Chart:
    """A picture, the question that it answers, and its panels."""

    canvas: "Canvas"
    title: str
    description: str
    panels: list[Panel]
    is_wide: bool = False


@dataclass(frozen=True)
class Drawn:
    """A chart as the page embeds it."""

    name: str
    title: str
    description: str
    svg: str
    data: dict[str, Any]
    is_wide: bool


def draw(charts: dict[str, Chart], folder: Path) -> list[Drawn]:
    """Write all charts into a folder as SVG, or none; return what the page shows."""
    with tempfile.TemporaryDirectory(prefix=".charts.", dir=folder.parent) as work:
        drawn = _draw(charts, Path(work) / "charts")
        shutil.rmtree(folder, ignore_errors=True)
        (Path(work) / "charts").rename(folder)  # not synced: the page has them too, and `report` draws them again
    return drawn


def _draw(charts: dict[str, Chart], folder: Path) -> list[Drawn]:
    folder.mkdir()
    drawn = []
    for name, chart in charts.items():
        (folder / f"{name}.svg").write_text(_titled(chart))
        data = {"panels": [_panel(panel) for panel in chart.panels]}
        svg = chart.canvas.svg(name, lambda colour: ON_PAGE.get(colour, colour))
        drawn.append(Drawn(name, chart.title, chart.description, svg, data, chart.is_wide))
    return drawn


@dataclass
class Text:
    """A text on a picture, outside all axes."""

    x: float
    y: float
    text: str
    colour: str
    align: str
    arm: int | None

    def svg(self, paint: Paint) -> str:
        """Write it."""
        anchor = {"left": None, "center": "middle", "right": "end"}[self.align]
        look = style(fill=paint(self.colour))
        return element("text", arm=self.arm, x=float(self.x), y=float(self.y), text_anchor=anchor, style=look,
                       text=self.text)  # fmt: skip


@dataclass
class Leader:
    """A thin line between places on a picture."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    is_dotted: bool
    arm: int | None

    def svg(self, paint: Paint) -> str:
        """Write it."""
        dashes = "0.8 2.4" if self.is_dotted else None
        look = style(fill="none", stroke=paint(self.colour), stroke_width=0.8, stroke_dasharray=dashes)
        return element("path", arm=self.arm, d=path(self.xs, self.ys), style=look)


class Canvas:
    """A picture on which axes are placed by units from its upper left corner."""

    def __init__(self, height: float, *, is_wide: bool = False) -> None:
        self.width, self.height, self.is_wide = WIDE if is_wide else HALF, height, is_wide
        self.all_axes: list[Axes] = []
        self.texts: list[Text] = []
        self.leaders: list[Leader] = []

    def axes(self, left: float, top: float, width: float, height: float, *, heading: str = "") -> Axes:
        """Place a pair of axes, with a heading above it."""
        axes = Axes(left, top, width, height)
        self.all_axes.append(axes)
        if heading:
            self.text(left, top - 9, heading, colour=QUIET)
        return axes

    def text(
        self, x: float, y: float, text: str, *, colour: str = INK, align: str = "left", arm: int | None = None
    ) -> None:
        """Write a text with its baseline at a given height."""
        self.texts.append(Text(x, y, text, colour, align, arm))

    def line(
        self, xs: Sequence[float], ys: Sequence[float], *, colour: str, is_dotted: bool = False, arm: int | None = None
    ) -> None:
        """Draw a thin line between places on the picture."""
        self.leaders.append(Leader(xs, ys, colour, is_dotted, arm))

    def svg(self, name: str, paint: Paint, *, frame: str = "", title: str = "") -> str:
        """Write the picture, with the size of a frame around it and a title, if there are such."""
        size = frame or f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{SIZE}">',
            *(axes.svg(f"{name}-{place}", paint) for place, axes in enumerate(self.all_axes)),
            *(leader.svg(paint) for leader in self.leaders),
            *(text.svg(paint) for text in self.texts),
            *filter(None, [title]),
            "</svg>\n",
        ])  # fmt: skip

    def place(self, axes: Axes, x: float, y: float) -> tuple[float, float]:
        """Return the position on the picture of a point of the axes."""
        right, down = axes.place(x, y)
        return float(right), float(down)

    def label_limit(self, axes: Axes, value: float, text: str) -> None:
        """Draw a limit across the axes, and label it where the lines are farthest away: left or right, above or below."""
        limit_line(axes, value)
        _, y = self.place(axes, axes.x.high, value)
        width = text_width(text)
        spots = self.spots(axes)

        def room(corner: tuple[float, float]) -> float:
            if corner[1] - SIZE < axes.top or corner[1] + 3 > axes.bottom:
                return -2.0 * SIZE
            middle = np.array([corner[0] + width / 2, corner[1] - SIZE / 3])
            away = np.abs(spots - middle) - (width / 2, SIZE / 2)
            return float(away.max(axis=1).min(initial=1e9))

        corners = [(x, base) for x in (axes.left + 6, axes.right - width - 6) for base in (y - 5, y + SIZE + 3)]
        self.text(*max(corners, key=room), text, colour=LIMIT)

    def spots(self, axes: Axes) -> Floats:
        """Return closely spaced places on the picture along the lines of the axes, shape (spots, 2)."""
        found = [np.empty((0, 2))]
        for line in axes.lines:
            if len(line.x):
                places = axes.place(line.x, line.y)
                steps = np.linspace(0, len(line.x) - 1, 20 * len(line.x))
                found.append(np.array([np.interp(steps, np.arange(len(line.x)), side) for side in places]).T)
        return np.concatenate(found)

    def label_ends(self, axes: Axes, ends: Sequence[tuple[float, float, KeyEntry]]) -> None:
        """Name lines at their right ends, in the order of their heights, each next to its line if there is room."""
        if not ends:
            return
        top, bottom = axes.top, axes.bottom
        spots = [self.place(axes, x, y) for x, y, _ in ends]
        right = max(x for x, _ in spots)
        heights = spread(
            [min(max(y, top), bottom) for _, y in spots], LINE, top - 4, max(bottom, top + LINE * len(ends))
        )
        for (x, y), height, (_, _, entry) in zip(spots, heights, ends, strict=True):
            if abs(height - y) > 4 or right - x > 4:
                is_far = right - x > LONG_LEADER  # such a long line would look like data
                colour = QUIET if is_far else entry.colour
                places = (x + 8 if is_far else x + 2, right + 4, right + 9)
                self.line(places, (y, height, height), colour=colour, is_dotted=is_far, arm=entry.place)
            self.text(right + 12, height + 4, entry.name, colour=entry.colour, arm=entry.place)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places as near as possible to those wanted, in their order, with at least this gap between any two."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    runs: list[tuple[float, int]] = []  # mean place, minus its own distance from the first, and how many share it
    for rank, place in enumerate(order):
        mean, count = wanted[place] - rank * gap, 1
        while runs and runs[-1][0] > mean:
            other, others = runs.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        runs.append((mean, count))
    flat = [mean for mean, count in runs for _ in range(count)]
    result = [0.0] * len(wanted)
    for rank, (place, at) in enumerate(zip(order, flat, strict=True)):
        result[place] = min(max(at, low), high - gap * (len(wanted) - 1)) + rank * gap
    return result


def text_width(text: str) -> float:
    """Return how wide a text is."""
    return width_of(text, SIZE)


def widest(texts: Iterable[str]) -> float:
    """Return how wide the widest text is."""
    return max(map(text_width, texts), default=0.0)


def mark(drawn: Area | Bar | Line | Rule, arm: int) -> None:
    """Mark which arm something belongs to, so that it can be hidden."""
    drawn.arm = arm


def line(axes: Axes, entry: KeyEntry, x: Any, y: Any, **look: Any) -> None:
    """Draw a line of an arm."""
    usual: dict[str, Any] = {"colour": entry.colour, "dashes": entry.dashes, "arm": entry.place}
    axes.plot(x, y, **usual | look)


def limit_line(axes: Axes, value: float, *, is_upright: bool = False) -> None:
    """Draw a limit across the axes."""
    axes.rule(value, LIMIT, width=1.2, dashes=(4, 2), is_upright=is_upright)


def _panel(panel: Panel) -> dict[str, Any]:
    """Return where a panel is on the picture (in its units, y downwards) and what is in it."""
    axes = panel.axes
    return {
        "box": [round(float(value), 1) for value in (axes.left, axes.top, axes.right, axes.bottom)],
        "x": {"from": float(axes.x.low), "to": float(axes.x.high), "log": axes.x.is_log},
        "y": {"from": float(axes.y.low), "to": float(axes.y.high), "log": axes.y.is_log},
        "xUnit": panel.x_unit,
        "yUnit": panel.y_unit,
        "map": panel.is_map,
        "series": [{"label": series.label, "arm": series.arm, "x": series.x, "y": series.y} for series in panel.series],
    }


def _titled(chart: Chart) -> str:
    """Make a picture a standalone file, with its title above it."""
    width, height = chart.canvas.width + 16, chart.canvas.height + 36
    frame = f'viewBox="-8 -28 {width:g} {height:g}" style="background: #fff"'
    title = f'<text x="0" y="-10" style="font: bold 14px sans-serif; fill: {INK}">{escape(chart.title)}</text>'
    return chart.canvas.svg("axes", lambda colour: colour, frame=frame, title=title)


def _short(value: Any) -> Any:
    return float(f"{float(value):.4g}")

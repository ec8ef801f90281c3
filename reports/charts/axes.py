"""A pair of axes: their scales, what is drawn between them, and how all of that is written as SVG.

y labels | behind, grid, rules, patches, lines, notes | y labels, if they are on the other side
| ----------- a line below -----------|
|              x labels               |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reports.charts.marks import Area, Bar, Dashes, Line, Map, Note, Paint, element, scaled, style
from reports.record.records import Floats

GRID, RULE = "#e3e3e3", "#5f5f5f"
THIN = 0.8
PAD = 6
"""Between an axis and its labels."""


@dataclass
class Scale:
    """The scale of one axis."""

    low: float = 0.0
    high: float = 1.0
    """Where it ends; it may be less than `low`."""
    is_log: bool = False
    ticks: Sequence[float] = ()
    labels: Sequence[str] = ()
    has_grid: bool = True
    has_labels: bool = True
    is_opposite: bool = False
    """Whether the labels are to the right of a y axis."""

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends."""
        return self.low, self.high

    def share(self, values: Any) -> Floats:
        """Return how far along the axis values are, from 0 to 1; what a logarithmic axis cannot show is unknown."""
        low, high, at = (self._measure(part) for part in (self.low, self.high, values))
        result: Floats = (at - low) / (high - low)
        return result

    def _measure(self, values: Any) -> Floats:
        known = np.asarray(values, float)
        return np.log10(np.where(known > 0, known, np.nan)) if self.is_log else known


@dataclass
class Rule:
    """A straight line across the axes."""

    value: float
    colour: str
    width: float
    dashes: Dashes
    """In line widths; none, if the line is solid."""
    is_upright: bool
    arm: int | None = None


@dataclass
class Axes:
    """A pair of axes at a place on a picture, in its units, y downwards."""

    left: float
    top: float
    width: float
    height: float
    x: Scale = field(default_factory=Scale)
    y: Scale = field(default_factory=Scale)
    behind: list[Bar | Map] = field(default_factory=list)
    patches: list[Area | Bar] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def right(self) -> float:
        """Where the axes end."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Where the axes end below."""
        return self.top + self.height

    def place(self, x: Any, y: Any) -> tuple[Floats, Floats]:
        """Return where points of the data are on the picture."""
        return self.left + self.x.share(x) * self.width, self.bottom - self.y.share(y) * self.height

    def plot(self, x: Any, y: Any, spots: str = "", *, marker: str = "", **look: Any) -> Line:
        """Draw a line, with marks at its points if there is a `marker`; or marks alone, of the kind `spots`."""
        line = Line(np.asarray(x, float), np.asarray(y, float), marker=spots or marker, is_drawn=not spots, **look)
        self.lines.append(line)
        return line

    def rule(
        self, value: float, colour: str, *, width: float = 1.0, dashes: Dashes = (), is_upright: bool = False
    ) -> Rule:
        """Draw a straight line across."""
        rule = Rule(value, colour, width, dashes, is_upright)
        self.rules.append(rule)
        return rule

    def band(
        self, low: float, high: float, colour: str, *, alpha: float | None = None, is_behind: bool = False
    ) -> None:
        """Paint what is between two heights."""
        if is_behind:
            self.behind.append(Bar(self.x.low, low, self.x.high - self.x.low, high - low, colour))
        else:
            self.patches.append(Area(np.array(self.x.ends), np.full(2, low), np.full(2, high), colour, alpha))

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> Bar:
        """Draw a rectangle."""
        bar = Bar(x, y, width, height, colour)
        self.patches.append(bar)
        return bar

    def fill(self, x: Any, low: Any, high: Any, colour: str, *, alpha: float | None = None) -> Area:
        """Paint what is between two lines; a number instead of a line is a straight one."""
        xs, high = np.asarray(x, float), np.asarray(high, float)
        area = Area(xs, np.broadcast_to(np.asarray(low, float), xs.shape), high, colour, alpha)
        self.patches.append(area)
        return area

    def fill_steps(self, edges: Floats, low: Any, high: Floats, colour: str, *, alpha: float | None = None) -> Area:
        """Paint what is between two heights, each of which holds from one edge to the next."""
        lower = np.broadcast_to(np.asarray(low, float), high.shape)
        return self.fill(_corners(edges), np.repeat(lower, 2), np.repeat(high, 2), colour, alpha=alpha)

    def steps(self, edges: Floats, values: Floats, **look: Any) -> Line:
        """Draw values as a line, each from one edge to the next."""
        return self.plot(_corners(edges), np.repeat(np.asarray(values, float), 2), **look)

    def map(self, table: Floats, top: float, extent: tuple[float, float, float, float]) -> None:
        """Paint a table: its first row is the lowest, and colours go from 0 to `top`."""
        self.behind.append(Map(table, top, extent))

    def note(self, x: float, y: float, text: str, colour: str) -> None:
        """Write a text that begins at a point."""
        self.notes.append(Note(x, y, text, colour))

    def without_grid(self) -> None:
        """Draw no lines at the ticks."""
        self.x.has_grid = self.y.has_grid = False

    def svg(self, name: str, paint: Paint) -> str:
        """Write everything; the name tells the part that is visible from those of other axes."""
        visible = element("rect", x=self.left, y=self.top, width=self.width, height=self.height)
        marks: list[Line | Note] = [line for line in self.lines if not line.is_clipped]
        return "\n".join([
            f'<clipPath id="{name}">{visible}</clipPath>',
            *(mark.svg(self.place, paint) for mark in self.behind),
            *self._grid(paint),
            f'<g clip-path="url(#{name})">',
            *(mark.svg(self.place, paint) for mark in self.patches),
            *self._rules(paint),
            *(line.svg(self.place, paint) for line in self.lines if line.is_clipped),
            "</g>",
            *(mark.svg(self.place, paint) for mark in [*marks, *self.notes]),
            _rule(self.left, self.bottom, self.right, self.bottom, _thin(paint(RULE))),
            *self._labels(paint),
        ])  # fmt: skip

    def _grid(self, paint: Paint) -> list[str]:
        across = [at for at in self.place(self.x.low, self.y.ticks)[1].tolist() if self.y.has_grid]
        upright = [at for at in self.place(self.x.ticks, self.y.low)[0].tolist() if self.x.has_grid]
        return [
            *(_rule(at, self.top, at, self.bottom, _thin(paint(GRID))) for at in upright),
            *(_rule(self.left, at, self.right, at, _thin(paint(GRID))) for at in across),
        ]

    def _rules(self, paint: Paint) -> list[str]:
        found = []
        for rule in self.rules:
            look = style(
                stroke=paint(rule.colour), stroke_width=rule.width, stroke_dasharray=scaled(rule.dashes, rule.width)
            )
            x, y = (float(side) for side in self.place(rule.value, rule.value))
            ends = (x, self.top, x, self.bottom) if rule.is_upright else (self.left, y, self.right, y)
            found.append(_rule(*ends, look, rule.arm))
        return found

    def _labels(self, paint: Paint) -> list[str]:
        look, found = style(fill=paint(RULE)), []
        if self.x.has_labels:
            spots = self.place(self.x.ticks, self.y.low)[0].tolist()
            found += [
                element("text", x=at, y=self.bottom + PAD + 10, text_anchor="middle", style=look, text=label)
                for at, label in zip(spots, self.x.labels, strict=True)
                if label
            ]
        if self.y.has_labels:
            x, anchor = (self.right + PAD, None) if self.y.is_opposite else (self.left - PAD, "end")
            spots = self.place(self.x.low, self.y.ticks)[1].tolist()
            found += [
                element("text", x=x, y=at + 4, text_anchor=anchor, style=look, text=label)
                for at, label in zip(spots, self.y.labels, strict=True)
                if label
            ]
        return found


def _corners(edges: Floats) -> Floats:
    """Return where each step begins and ends."""
    return np.repeat(np.asarray(edges, float), 2)[1:-1]


def _thin(colour: str) -> str:
    return style(stroke=colour, stroke_width=THIN)


def _rule(x: float, y: float, to_x: float, to_y: float, look: str, arm: int | None = None) -> str:
    return element("line", arm=arm, x1=float(x), y1=float(y), x2=float(to_x), y2=float(to_y), style=look)

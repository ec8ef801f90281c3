"""How every chart looks, and what the page must know to show the values under the pointer.

A unit is a CSS pixel if the page is as wide as `WIDE`; the font size is the same in all charts.

    left | axes, with a heading above | labels of the lines, each at the height of its line's end
"""

import contextlib
import functools
import io
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from reports.key import PALETTE, KeyEntry
from reports.record.records import Floats

INK, QUIET, GRID, LIMIT, REST = "#1c1c1c", "#5f5f5f", "#e3e3e3", "#c0392b", "#c9c9c9"
ON_PAGE = {
    INK: "currentColor",
    QUIET: "var(--quiet)",
    GRID: "var(--grid)",
    LIMIT: "var(--limit, #c0392b)",
    REST: "var(--rest, #c9c9c9)",
}
WIDE, HALF = 1120, 552
SIZE = 12
"""Font size of all text."""
LINE = 16
"""Height of a line of text."""
LONG_LEADER = 24
"""From a line's end to its label."""
STYLE: Any = {
    "figure.dpi": 72,
    "font.size": SIZE,
    "axes.titlesize": SIZE,
    "axes.labelsize": SIZE,
    "xtick.labelsize": SIZE,
    "ytick.labelsize": SIZE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.pad": 6,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "text.parse_math": False,  # an arm's name may hold a $
    "svg.hashsalt": "dynabench",
    "font.family": "sans-serif",
    "path.simplify_threshold": 0.3,
}


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
    """A figure, the question that it answers, and its panels."""

    figure: Figure
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


def styled() -> contextlib.AbstractContextManager[None]:
    """Draw in our style within this block."""
    return mpl.rc_context(rc=STYLE)


def draw(charts: dict[str, Chart], folder: Path) -> list[Drawn]:
    """Write all charts into a folder as SVG, or none; return what the page shows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script; the SVG shows it
        with tempfile.TemporaryDirectory(prefix=".charts.", dir=folder.parent) as work:
            drawn = _draw(charts, Path(work) / "charts")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(work) / "charts").rename(folder)  # not synced: the page has them too, and `report` draws them again
    return drawn


def _draw(charts: dict[str, Chart], folder: Path) -> list[Drawn]:
    folder.mkdir()
    drawn = []
    for name, chart in charts.items():
        text = io.StringIO()
        chart.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        svg = _plain(text.getvalue())
        (folder / f"{name}.svg").write_text(_titled(svg, chart))
        data = {"panels": [_panel(panel, chart.figure) for panel in chart.panels]}
        drawn.append(Drawn(name, chart.title, chart.description, _for_page(svg, name), data, chart.is_wide))
    return drawn


class Canvas:
    """A figure on which axes are placed by units from its upper left corner."""

    def __init__(self, height: float, *, is_wide: bool = False) -> None:
        self.width, self.height, self.is_wide = WIDE if is_wide else HALF, height, is_wide
        self.figure = Figure(figsize=(self.width / 72, height / 72), dpi=72)
        FigureCanvasSVG(self.figure)

    def axes(self, left: float, top: float, width: float, height: float, *, heading: str = "") -> Axes:
        """Place a pair of axes, with a heading above it."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.margins(x=0)
        if heading:
            self.text(left, top - 9, heading, colour=QUIET)
        return axes

    def text(
        self, x: float, y: float, text: str, *, colour: str = INK, align: str = "left", arm: int | None = None
    ) -> Text:
        """Write a text with its baseline at a given height."""
        shown = self.figure.text(
            x / 72, (self.height - y) / 72, text, color=colour, ha=align, va="baseline",
            transform=self.figure.dpi_scale_trans,
        )  # fmt: skip
        if arm is not None:
            mark(shown, arm)
        return shown

    def line(
        self, xs: Sequence[float], ys: Sequence[float], *, colour: str, is_dotted: bool = False, arm: int | None = None
    ) -> None:
        """Draw a thin line between places on the figure."""
        line = Line2D(
            np.array(xs) / 72, (self.height - np.array(ys)) / 72, color=colour, linewidth=0.8,
            linestyle=(0, (1, 3)) if is_dotted else "-", transform=self.figure.dpi_scale_trans,
        )  # fmt: skip
        if arm is not None:
            mark(line, arm)
        self.figure.add_artist(line)

    def place(self, axes: Axes, x: float, y: float) -> tuple[float, float]:
        """Return the position on the figure of a point of the axes."""
        right, up = axes.transData.transform((x, y))
        return float(right), self.height - float(up)

    def label_limit(self, axes: Axes, value: float, text: str) -> None:
        """Draw a limit across the axes, and label it where the lines are farthest away: left or right, above or below."""
        limit_line(axes, value)
        box = axes.get_position()
        left, right = box.x0 * self.width, box.x1 * self.width
        top, bottom = (1 - box.y1) * self.height, (1 - box.y0) * self.height
        _, y = self.place(axes, axes.get_xlim()[1], value)
        width = text_width(text)
        spots = self.spots(axes)

        def room(corner: tuple[float, float]) -> float:
            if corner[1] - SIZE < top or corner[1] + 3 > bottom:
                return -2.0 * SIZE
            middle = np.array([corner[0] + width / 2, corner[1] - SIZE / 3])
            away = np.abs(spots - middle) - (width / 2, SIZE / 2)
            return float(away.max(axis=1).min(initial=1e9))

        corners = [(x, base) for x in (left + 6, right - width - 6) for base in (y - 5, y + SIZE + 3)]
        self.text(*max(corners, key=room), text, colour=LIMIT)

    def spots(self, axes: Axes) -> Floats:
        """Return closely spaced places on the figure along the lines of the axes, shape (spots, 2)."""
        found = [np.empty((0, 2))]
        for shown in axes.get_lines():
            points = np.asarray(shown.get_xydata(), float)
            if shown.get_transform() == axes.transData and len(points):
                places = axes.transData.transform(points)
                steps = np.linspace(0, len(places) - 1, 20 * len(places))
                found.append(np.array([np.interp(steps, np.arange(len(places)), side) for side in places.T]).T)
        spots = np.concatenate(found)
        return spots * (1, -1) + (0, self.height)

    def label_ends(self, axes: Axes, ends: Sequence[tuple[float, float, KeyEntry]]) -> None:
        """Name lines at their right ends, in the order of their heights, each next to its line if there is room."""
        if not ends:
            return
        box = axes.get_position()
        top, bottom = (1 - box.y1) * self.height, (1 - box.y0) * self.height
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
    for rank, number in enumerate(order):
        mean, count = wanted[number] - rank * gap, 1
        while runs and runs[-1][0] > mean:
            other, others = runs.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        runs.append((mean, count))
    flat = [mean for mean, count in runs for _ in range(count)]
    result = [0.0] * len(wanted)
    for rank, (number, place) in enumerate(zip(order, flat, strict=True)):
        result[number] = min(max(place, low), high - gap * (len(wanted) - 1)) + rank * gap
    return result


@functools.lru_cache(4096)
def text_width(text: str) -> float:
    """Return how wide a text is."""
    font = get_font(findfont(FontProperties(family=["sans-serif"])))
    font.set_size(SIZE, 72)
    font.set_text(text)
    return float(font.get_width_height()[0] / 64)


def widest(texts: Iterable[str]) -> float:
    """Return how wide the widest text is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        return max(map(text_width, texts), default=0.0)


def mark(artists: Any, arm: int) -> None:
    """Mark which arm an artist, or each of several, belongs to, so that it can be hidden."""
    for artist in artists if isinstance(artists, Sequence) else [artists]:
        artist.set_gid(f"arm-{arm}-")


def line(axes: Axes, entry: KeyEntry, x: Any, y: Any, **options: Any) -> None:
    """Draw a line of an arm."""
    style = (0, entry.dashes) if entry.dashes else "-"
    mark(axes.plot(x, y, **{"color": entry.colour, "linestyle": style} | options), entry.place)


def limit_line(axes: Axes, value: float, *, is_upright: bool = False) -> None:
    """Draw a limit across the axes."""
    draw_it = axes.axvline if is_upright else axes.axhline
    draw_it(value, color=LIMIT, linewidth=1.2, linestyle=(0, (4, 2)))


def numbers(
    axes: Axes, which: str, low: float, high: float, *, most: int = 5, whole: bool = False, form: Any = None
) -> None:
    """Let an axis go from one number to another, with round ticks."""
    ticks = [float(tick) for tick in MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)]
    _set(axes, which, low, high, [tick for tick in ticks if low <= tick <= high], form or plain)


def logarithm(axes: Axes, which: str, values: Iterable[float], form: Any = None, *, most: int = 6) -> None:
    """Let a logarithmic axis hold these values (above zero), with ticks at round numbers."""
    known = [value for value in values if value > 0]
    low, high = (min(known) / 1.15, max(known) * 1.15) if known else (1.0, 10.0)
    if high / low < 3:
        low, high = low / 1.3, high * 1.3
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    ticks = ticks[:: -(-len(ticks) // most)] if len(ticks) > most else ticks
    getattr(axes, f"set_{which}scale")("log")
    _set(axes, which, low, high, ticks, form or plain)


def times(axes: Axes, which: str, values: Iterable[float], *, most: int = 6) -> None:
    """Let a logarithmic axis hold these times (ms)."""
    logarithm(axes, which, values, duration, most=most)


def seconds(axes: Axes, which: str, low: float, high: float, *, most: int = 5) -> None:
    """Let an axis go from one time (s) to another, in the unit that suits it."""
    unit, size = next((one for one in (("h", 3600.0), ("min", 60.0)) if high >= 4 * one[1]), ("s", 1.0))
    ticks = MaxNLocator(most, steps=[1, 2, 3, 5, 10]).tick_values(low / size, high / size)
    fixed(
        axes, which, low, high, {float(tick) * size: f"{plain(float(tick))} {unit}" if tick else "0" for tick in ticks}
    )


def fixed(axes: Axes, which: str, low: float, high: float, ticks: dict[float, str]) -> None:
    """Let an axis go from one place to another, with these ticks."""
    within = sorted((low, high))
    _set(axes, which, low, high, [tick for tick in ticks if within[0] <= tick <= within[1]], lambda tick: ticks[tick])


def _set(axes: Axes, which: str, low: float, high: float, ticks: list[float], form: Any) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([form(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())
    getattr(axes, f"set_{which}lim")(low, high)


def categories(axes: Axes, which: str, names: Sequence[str]) -> None:
    """Give an axis a place for each name; on the y axis, from above."""
    low, high = (-0.5, len(names) - 0.5) if which == "x" else (len(names) - 0.5, -0.5)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(range(len(names)))))
    axis.set_major_formatter(FixedFormatter(list(names)))
    getattr(axes, f"set_{which}lim")(low, high)
    axes.grid(visible=False, axis=which)  # type: ignore[arg-type]


def no_labels(axes: Axes, which: str) -> None:
    """Leave out the tick labels, because an equal axis has them."""
    axes.tick_params(axis=which, **{"labelleft" if which == "y" else "labelbottom": False})  # type: ignore[arg-type]


def plain(value: float) -> str:
    """Format a number without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(milliseconds: float) -> str:
    """Format a time with its unit."""
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:,.4g} s"


def _panel(panel: Panel, figure: Figure) -> dict[str, Any]:
    """Return where a panel is on the picture (in its units, y downwards) and what is in it."""
    width, height = figure.get_size_inches() * 72
    box = panel.axes.get_position()
    axes = {}
    for name, axis, limits in (
        ("x", panel.axes.xaxis, panel.axes.get_xlim()),
        ("y", panel.axes.yaxis, panel.axes.get_ylim()),
    ):
        axes[name] = {"from": float(limits[0]), "to": float(limits[1]), "log": axis.get_scale() == "log"}
    return {
        "box": [
            round(value, 1) for value in (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
        ],
        **axes,
        "xUnit": panel.x_unit,
        "yUnit": panel.y_unit,
        "map": panel.is_map,
        "series": [{"label": series.label, "arm": series.arm, "x": series.x, "y": series.y} for series in panel.series],
    }


def _plain(svg: str) -> str:
    """Remove from an SVG what shows nothing, which is most of what matplotlib writes."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _DIGITS.sub(r"\1", tag[0]), svg)  # not in texts
    for pattern, shorter in _SHORTER:
        svg = pattern.sub(shorter, svg)
    return svg


_DIGITS = re.compile(r"(\d\d\.\d|\d\.\d\d)\d+")
_SHORTER = [
    (re.compile(pattern), shorter)
    for pattern, shorter in (
        (r" ?\n([LCzQ])", r"\1"),
        (r"\n\s*", "\n"),
        (r'<g id="(?!arm-)[^"]*"/>\n', ""),
        (r'<g id="(?!arm-)[^"]*"', "<g"),
        (r"font-size: \d+px; |font-family: [^;]*; ", ""),
        (r' transform="rotate\(-0 [^)]*\)"', ""),
        (
            r'<svg([^>]*?) (?:width|height)="[^"]*"([^>]*?) (?:width|height)="[^"]*"',
            rf'<svg font-family="sans-serif" font-size="{SIZE}"\1\2',
        ),
    )
]


def _titled(svg: str, chart: Chart) -> str:
    """Make a picture a standalone file, with its title above it."""
    width, height = (float(value) for value in chart.figure.get_size_inches() * 72)
    svg = re.sub(
        r'viewBox="[^"]*"', f'viewBox="-8 -28 {width + 16:g} {height + 36:g}" style="background: #fff"', svg, count=1
    )
    title = f'<text x="0" y="-10" style="font: bold 14px sans-serif; fill: {INK}">{escape(chart.title)}</text>'
    return svg.replace("</svg>", f"{title}\n</svg>")


def _for_page(svg: str, name: str) -> str:
    """Make an SVG part of the page: its ids are unique, its arms are classes, and its colours are the page's."""
    svg = re.sub(r'id="arm-(\d+)-"', r'class="arm-\1"', svg)
    svg = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("fill: #000000", f"fill: {INK}")
    svg = re.sub(r"<text style=\"(?!fill)", f'<text fill="{INK}" style="', svg)
    on_page = ON_PAGE | {pair[0]: f"var(--arm-{number}, {pair[0]})" for number, pair in enumerate(PALETTE)}
    return re.sub("|".join(on_page), lambda found: on_page[found[0]], svg)


def _short(value: Any) -> Any:
    return float(f"{float(value):.4g}")

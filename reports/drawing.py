"""How every chart looks, and what the page must know of one to say what the pointer is on."""

import io
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from reports.records import Floats

COLOURS = ["#3b78c4", "#d1605e", "#4b9b6e", "#b07aa1", "#d99a2b", "#4fa0b0", "#9c7a58", "#888888"]
"""Told apart on white and on black, and by most who do not see all colours."""
INK, GRID = "#1c1c1c", "#e3e3e3"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "text.parse_math": False,  # an arm's name may hold a $
    "svg.hashsalt": "dynabench",
    "font.family": "sans-serif",
    "legend.frameon": False,
    "path.simplify_threshold": 0.3,
}


@dataclass
class Series:
    """A line or row of bars that the pointer can be on."""

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

    def add(self, label: str, arm: int | None, x: Iterable[Any], y: Iterable[Any]) -> None:
        """Let the pointer be on these points."""
        values = [None if value is None or not np.isfinite(value) else _short(value) for value in y]
        self.series.append(
            Series(label, arm, [_short(value) if isinstance(value, float) else value for value in x], values)
        )


@dataclass
class Chart:
    """A figure, what it shows, and its panels."""

    figure: Figure
    title: str
    description: str
    panels: list[Panel]
    is_wide: bool = False


@dataclass(frozen=True)
class Drawn:
    """A chart as the page has it."""

    name: str
    title: str
    description: str
    svg: str
    data: dict[str, Any]
    is_wide: bool


def draw(charts: dict[str, Chart], folder: Path) -> list[Drawn]:
    """Write charts into a folder as PNG and SVG, all or none; return what the page shows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script; the SVG shows it
        with tempfile.TemporaryDirectory(prefix=".charts.", dir=folder.parent) as work:
            drawn = _draw(charts, Path(work) / "charts")
            shutil.rmtree(folder, ignore_errors=True)
            (Path(work) / "charts").rename(folder)
    return drawn


def _draw(charts: dict[str, Chart], folder: Path) -> list[Drawn]:
    folder.mkdir()
    drawn = []
    for name, chart in charts.items():
        figure = chart.figure
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        svg = text.getvalue()
        (folder / f"{name}.svg").write_text(svg)
        data = {"panels": [_panel(panel, figure) for panel in chart.panels]}
        drawn.append(Drawn(name, chart.title, chart.description, _for_page(svg, name), data, chart.is_wide))
        plt.close(figure)
    return drawn


def new(title: str, x: str, y: str, *, size: tuple[float, float] = (7, 3.6)) -> tuple[Figure, Axes]:
    """Begin a chart of one panel."""
    figure, axes = plt.subplots(figsize=size)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def grid_of(
    count: int, *, width: float = 3.1, height: float = 2.9, columns: int = 4, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Begin a chart of many small panels."""
    across = min(max(count, 1), columns)
    down = -(-max(count, 1) // across)
    figure, panels = plt.subplots(
        down, across, figsize=(max(width * across, 7), height * down), squeeze=False, sharey=True, **options
    )
    flat = list(panels.flat)
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def colour(place: int) -> str:
    """Return an arm's colour."""
    return COLOURS[place % len(COLOURS)]


def mark(artists: Any, arm: int) -> None:
    """Say which arm an artist, or each of several, belongs to, so that it can be hidden."""
    for artist in artists if isinstance(artists, Sequence) else [artists]:
        artist.set_gid(f"arm-{arm}-")


def logarithmic(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def windows(times: Floats, values: Floats, number: int = 60) -> tuple[Floats, list[Floats]]:
    """Group values by time; return the centres of the windows that have any, and their values."""
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    if not len(times):
        return np.empty(0), []
    edges = np.linspace(times.min(), times.max() + 1e-9, number + 1)
    place = np.digitize(times, edges) - 1
    groups = [values[place == window] for window in range(number)]
    centres = (edges[1:] + edges[:-1]) / 2
    kept = [window for window in range(number) if len(groups[window])]
    return centres[kept], [groups[window] for window in kept]


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
        "series": [{"label": series.label, "arm": series.arm, "x": series.x, "y": series.y} for series in panel.series],
    }


def _for_page(svg: str, name: str) -> str:
    """Make an SVG part of the page: its ids its own, its arms classes, its ink the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'id="arm-(\d+)-"', r'class="arm-\1"', svg)
    svg = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)").replace("fill: #000000", "fill: currentColor")
    svg = re.sub(r"<text style=\"", '<text fill="currentColor" style="', svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"(\d+\.\d{2})\d+", r"\1", svg)


def _short(value: Any) -> Any:
    return float(f"{float(value):.4g}")

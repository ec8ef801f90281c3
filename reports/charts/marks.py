"""What axes hold, in the units of its data, and how each is written as SVG."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from reports.record.records import Floats

Place = Callable[[Any, Any], tuple[Floats, Floats]]
"""Returns where points of the data are on the picture: to the right, and down."""
Paint = Callable[[str], str]
"""Returns a colour as the picture names it: a page has names of its own for some."""
Dashes = tuple[float, ...]

VIRIDIS = "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
"""Colours from low to high values, each as far from the next to the eye, also without colour."""
_COLOURS = np.array([list(bytes.fromhex(colour)) for colour in VIRIDIS.split()], float)


def number(value: float) -> str:
    """Write a number to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, *, arm: int | None = None, text: str = "", **attributes: str | float | None) -> str:
    """Write an element; numbers are shortened, and what is None is left out."""
    known = {"class": None if arm is None else f"arm-{arm}"} | attributes
    written = "".join(
        f' {key.replace("_", "-")}="{number(value) if isinstance(value, float) else escape(str(value))}"'
        for key, value in known.items()
        if value is not None
    )
    return f"<{name}{written}>{escape(text, quote=False)}</{name}>" if text else f"<{name}{written}/>"


def style(**values: Any) -> str:
    """Write a style; what is None is left out."""
    return ";".join(
        f"{key.replace('_', '-')}:{value:g}" if isinstance(value, float) else f"{key.replace('_', '-')}:{value}"
        for key, value in values.items()
        if value is not None
    )


def scaled(dashes: Dashes, width: float) -> str | None:
    """Write the dashes of a line of this width, if it has any."""
    return " ".join(number(dash * width) for dash in dashes) or None


def path(xs: Iterable[float], ys: Iterable[float]) -> str:
    """Write a line through points, which begins again after those that are unknown."""
    parts, is_open = [], False
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            parts.append(f"{'L' if is_open else 'M'}{number(x)} {number(y)}")
        is_open = math.isfinite(x) and math.isfinite(y)
    return "".join(parts)


@dataclass
class Line:
    """A line, a row of marks, or both."""

    x: Floats
    y: Floats
    colour: str
    width: float = 1.6
    dashes: Dashes = ()
    """In line widths; none, if the line is solid."""
    is_drawn: bool = True
    """Whether the marks are connected."""
    marker: str = ""
    size: float = 6.0
    face: str | None = None
    """Colour inside the marks (none: that of the line)."""
    edge_width: float = 1.0
    alpha: float | None = None
    is_clipped: bool = True
    arm: int | None = None

    def svg(self, place: Place, paint: Paint) -> str:
        """Write it."""
        xs, ys = place(self.x, self.y)
        parts = []
        if self.is_drawn and len(xs) > 1:
            dashes = scaled(self.dashes, self.width)
            look = style(fill="none", stroke=paint(self.colour), stroke_width=self.width, stroke_dasharray=dashes,
                         stroke_opacity=self.alpha, stroke_linejoin="round", stroke_linecap=None if dashes else "round")  # fmt: skip
            parts.append(element("path", arm=self.arm, d=path(xs.tolist(), ys.tolist()), style=look))
        if self.marker:
            look = style(fill=paint(self.face or self.colour), stroke=paint(self.colour), stroke_width=self.edge_width)
            spots = "".join(
                _marker(self.marker, x, y, self.size / 2)
                for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
                if math.isfinite(x) and math.isfinite(y)
            )
            parts.append(element("path", arm=self.arm, d=spots, style=look))
        return "\n".join(parts)


def _marker(kind: str, x: float, y: float, half: float) -> str:
    """Write the outline of a mark."""
    if kind == "o":
        return f"M{number(x - half)} {number(y)}a{half:g} {half:g} 0 1 0 {2 * half:g} 0a{half:g} {half:g} 0 1 0 {-2 * half:g} 0z"
    corners = [(x + right * half, y + down * half) for right, down in OUTLINES[kind]]
    if kind in OPEN:
        return "".join(path(*zip(*pair, strict=True)) for pair in zip(corners[::2], corners[1::2], strict=True))
    return path(*zip(*corners, strict=True)) + "z"


_THIRD, _DIAGONAL = 1 / 3, math.sqrt(2)
_PLUS = ((-_THIRD, -1), (_THIRD, -1), (_THIRD, -_THIRD), (1, -_THIRD), (1, _THIRD), (_THIRD, _THIRD),
         (_THIRD, 1), (-_THIRD, 1), (-_THIRD, _THIRD), (-1, _THIRD), (-1, -_THIRD), (-_THIRD, -_THIRD))  # fmt: skip
OUTLINES: dict[str, tuple[tuple[float, float], ...]] = {
    "s": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "D": ((0, -_DIAGONAL), (_DIAGONAL, 0), (0, _DIAGONAL), (-_DIAGONAL, 0)),
    "^": ((0, -1), (1, 1), (-1, 1)),
    "v": ((0, 1), (1, -1), (-1, -1)),
    "P": _PLUS,
    "X": tuple(((x - y) / _DIAGONAL, (x + y) / _DIAGONAL) for x, y in _PLUS),
    "|": ((0, -1), (0, 1)),
    "x": ((-1, -1), (1, 1), (-1, 1), (1, -1)),
}
"""Corners of marks, from -1 to 1; `o` is a circle."""
OPEN = ("|", "x")
"""Marks of lines from each odd corner to the next."""


@dataclass
class Area:
    """A closed area: what is between two lines, or below one."""

    x: Floats
    low: Floats
    high: Floats
    colour: str
    alpha: float | None = None
    arm: int | None = None

    def svg(self, place: Place, paint: Paint) -> str:
        """Write it, in as many parts as are between unknown points."""
        is_known = np.isfinite(self.low) & np.isfinite(self.high)
        begins = np.flatnonzero(np.diff(is_known, prepend=False) & is_known)
        stops = np.flatnonzero(np.diff(is_known, append=False) & is_known) + 1
        rounds = []
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
            part = slice(begin, stop)
            xs, ys = place(
                np.concatenate([self.x[part], self.x[part][::-1]]),
                np.concatenate([self.high[part], self.low[part][::-1]]),
            )
            rounds.append(path(xs.tolist(), ys.tolist()) + "z")
        look = style(fill=paint(self.colour), fill_opacity=self.alpha)
        return element("path", arm=self.arm, d="".join(rounds), style=look)


@dataclass
class Bar:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    arm: int | None = None

    def svg(self, place: Place, paint: Paint) -> str:
        """Write it."""
        xs, ys = place([self.x, self.x + self.width], [self.y, self.y + self.height])
        (left, right), (top, bottom) = np.sort(xs).tolist(), np.sort(ys).tolist()
        return element("rect", arm=self.arm, x=left, y=top, width=right - left, height=bottom - top,
                       style=style(fill=paint(self.colour)))  # fmt: skip


@dataclass
class Note:
    """A text that begins at a point."""

    x: float
    y: float
    text: str
    colour: str

    def svg(self, place: Place, paint: Paint) -> str:
        """Write it, with its middle at the height of the point."""
        x, y = (float(side) for side in place(self.x, self.y))
        return element("text", x=x, y=y + 4, style=style(fill=paint(self.colour)), text=self.text)


@dataclass
class Map:
    """A table whose cells are colours: its first row is the lowest, and what is unknown is not painted."""

    table: Floats
    top: float
    """The value of the last colour; the first is 0."""
    extent: tuple[float, float, float, float]
    """Left, right, bottom and top."""

    def svg(self, place: Place, paint: Paint) -> str:
        """Write it as a picture with a pixel for each cell."""
        left, right, low, high = self.extent
        xs, ys = place([left, right], [low, high])
        link = "data:image/png;base64," + base64.b64encode(png(_coloured(self.table[::-1], self.top))).decode()
        return element("image", x=float(xs[0]), y=float(ys[1]), width=float(xs[1] - xs[0]), height=float(ys[0] - ys[1]),
                       preserveAspectRatio="none", href=link, style="image-rendering:pixelated")  # fmt: skip


def _coloured(table: Floats, top: float) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the colours of a table as bytes: red, green, blue and whether it is painted at all."""
    shares = np.clip(np.nan_to_num(table) / top, 0, 1) * (len(_COLOURS) - 1)
    known = np.arange(len(_COLOURS))
    channels = [np.interp(shares, known, _COLOURS[:, channel]) for channel in range(3)]
    return np.stack([*channels, np.where(np.isnan(table), 0.0, 255.0)], axis=-1).round().astype(np.uint8)


def png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Return a picture of red, green, blue and opacity as a PNG file."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )

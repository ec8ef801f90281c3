"""A picture of what happened: a lane for each program, and in the lanes the requests that it had, as lines.

    programs | faults: a bar and its name; the lane is tinted while one lasts, and empty while its program does not run
             | requests, one below the other: ----o answered, ----x failed; from lane to lane where they went on
    time     | breaks where nothing happens for long

A unit is a CSS pixel if the page is as wide as `WIDE`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Literal

from reports.charts.drawing import GRID, INK, LIMIT, LINE, QUIET, REST, SIZE, WIDE, text_width, widest
from reports.charts.marks import Paint, element, path, style
from reports.charts.ticks import plain, round_numbers
from reports.key import PALETTE

End = Literal["answered", "failed", "refused", "left"]
COLOURS: dict[End, str] = {"answered": PALETTE[0][0], "failed": LIMIT, "refused": PALETTE[3][0], "left": QUIET}
"""How a request ends."""
FAULT = PALETTE[1][0]
ROW, THIN_ROW = 15.0, 1.6
"""Height of a request's row: with its name, and at least."""
TALLEST = 560.0
"""The height of all rows together, beyond which they become thin and have no names."""
GAP, LEAST = 7.0, 20.0
"""Between two lanes; the least height of one."""
BREAK = 62.0
"""Width of a break in time."""
LONG_S, SHARE = 3.0, 0.3
"""A time in which nothing happens is a break if it lasts so long, and so much of all shorter ones together."""
BOLD = 1.12
"""How much wider a bold text is."""
TICK = 70.0
"""The least distance of two labels of time."""


@dataclass(frozen=True)
class Lane:
    """A program."""

    name: str
    runs: Sequence[tuple[float, float]]
    """From when to when it ran (s); it may have run before 0, and until infinity."""
    is_flawed: bool = False
    """Whether something did not hold there."""


@dataclass(frozen=True)
class Stay:
    """A request at a program."""

    lane: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Passage:
    """A request on its way through programs."""

    name: str
    end: End
    title: str
    """What is said of it under the pointer."""
    stays: Sequence[Stay]
    """The first is at the frontend, from its arrival to its end."""
    first_s: float | None = None
    """When its answer began."""
    is_flawed: bool = False
    """Whether something did not hold of it."""

    def label(self, number: int) -> str:
        """Return how a stay is named: after the first, by what differs from other requests."""
        return self.name.rpartition("-")[2] if number else self.name


@dataclass(frozen=True)
class Trouble:
    """A fault."""

    label: str
    lanes: Sequence[str]
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Flaw:
    """Something that did not hold, and when that was seen."""

    label: str
    at_s: float


@dataclass(frozen=True)
class Happening:
    """All of it."""

    lanes: Sequence[Lane]
    passages: Sequence[Passage]
    troubles: Sequence[Trouble]
    flaws: Sequence[Flaw]

    def times(self) -> list[float]:
        """Return when anything begins or ends (s), in order."""
        found = {0.0, *(flaw.at_s for flaw in self.flaws)}
        for passage in self.passages:
            found.update(at_s for stay in passage.stays for at_s in (stay.begin_s, stay.end_s))
        found.update(at_s for trouble in self.troubles for at_s in (trouble.begin_s, trouble.end_s))
        found.update(at_s for lane in self.lanes for run in lane.runs for at_s in run)
        return sorted(at_s for at_s in found if 0 <= at_s < math.inf)


def svg(happening: Happening, paint: Paint) -> str:
    """Draw it."""
    left = max(widest(lane.name for lane in happening.lanes) * BOLD, 40.0) + 14
    clock = Clock(happening.times(), left, WIDE - 14)
    plan = _plan(happening, clock)
    flags, below = _flags(happening.flaws, clock, paint)
    parts, place = [], below
    strips: dict[str, Strip] = {}
    for lane in happening.lanes:
        strips[lane.name] = Strip(lane, place, plan)
        place += strips[lane.name].height + GAP
    parts += [part for strip in strips.values() for part in strip.background(clock, paint)]
    parts += _time(clock, below, place, paint)
    parts += [part for strip in strips.values() for part in strip.troubles(clock, paint)]
    parts += _meetings(happening.troubles, strips, clock, paint)
    for one in sorted(happening.passages, key=lambda one: (one.is_flawed, one.end != "answered")):
        parts.append(_passage(one, strips, plan, clock, paint))
    parts += _rules(happening.flaws, clock, below, place, paint) + flags
    size = f'viewBox="0 0 {WIDE} {math.ceil(place + 24 + LINE)}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{SIZE}">', *parts, "</svg>\n"
    ])  # fmt: skip


class Clock:
    """Where times are on the picture: in proportion, but for breaks, which have one width."""

    def __init__(self, times: Sequence[float], left: float, right: float) -> None:
        """Make room for these times (s, in order) between two places."""
        self.left, self.right = left, right
        breaks = _breaks([later - earlier for earlier, later in pairwise(times)])
        firsts = [0, *(place + 1 for place in breaks)]
        spans = [(times[first], times[last]) for first, last in zip(firsts, [*breaks, len(times) - 1], strict=True)]
        width = right - left - BREAK * len(breaks)
        total = sum(end - begin for begin, end in spans) or 1.0
        least = min(24.0, width / (2 * len(spans)))  # also of an instant
        wide = [max((end - begin) / total * width, least) for begin, end in spans]
        scale = (width - least * len(spans)) / max(sum(wide) - least * len(spans), 1e-9)
        self.spans: list[tuple[float, float, float, float]] = []
        """Without a break: from when to when, and from where to where."""
        place = left
        for (begin, end), share in zip(spans, wide, strict=True):
            size = least + (share - least) * scale
            pad = min(8.0, size / 4)
            self.spans.append((begin, end, place + pad, place + size - pad))
            place += size + BREAK

    def x(self, at_s: float) -> float:
        """Return where a time is; what is before or after all of them, is at the edge."""
        before_s, last = -math.inf, self.left
        for begin, end, low, high in self.spans:
            if at_s < begin:
                return last if math.isinf(before_s) else last + (low - last) * (at_s - before_s) / (begin - before_s)
            if at_s <= end:
                return low if end == begin else low + (high - low) * (at_s - begin) / (end - begin)
            before_s, last = end, high
        return self.right

    def breaks(self) -> Iterable[tuple[float, float, float]]:
        """Yield how long each break is (s), and from where to where."""
        for (_, end, _, last), (begin, _, first, _) in pairwise(self.spans):
            yield begin - end, last, first

    def ticks(self) -> dict[float, str]:
        """Return labels by their places."""
        shown_s = sum(end - begin for begin, end, _, _ in self.spans)
        width = sum(high - low for _, _, low, high in self.spans)
        steps = round_numbers(0, max(shown_s, 1e-3), max(int(width / 110), 2))
        step = steps[1] - steps[0]
        found: dict[float, str] = {}
        for begin, end, low, _ in self.spans:
            rounds = [
                count * step for count in range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1)
            ]
            for at_s in rounds:
                if (spot := self.x(at_s)) - max(found, default=-TICK) >= TICK:
                    found[spot] = f"{plain(round(at_s, 6))} s" if at_s else "0"
            if not rounds and low - max(found, default=-TICK) >= TICK * 0.6:
                found[self.x(begin)] = f"{begin:.1f} s"
        return found


def _breaks(gaps: Sequence[float]) -> list[int]:
    """Return the places of the gaps that are breaks, in order."""
    rest, found = sum(gaps), []
    for place in sorted(range(len(gaps)), key=lambda place: -gaps[place]):
        rest -= gaps[place]
        if gaps[place] < LONG_S or gaps[place] < SHARE * rest:
            break
        found.append(place)
    return sorted(found)


@dataclass(frozen=True)
class Plan:
    """The rows of everything."""

    row: float
    """Their height."""
    has_names: bool
    rows: Mapping[tuple[str, int], int]
    """Of a stay, by the request's name and the number of the stay."""
    num_rows: Mapping[str, int]
    """Of requests, by lane."""
    bars: Mapping[str, Sequence[tuple[Trouble, int]]]
    """Faults by lane, with the row of each."""


def _plan(happening: Happening, clock: Clock) -> Plan:
    """Put stays and faults of each lane into rows, so that none hides another."""
    bars = {lane.name: _barred(lane.name, happening.troubles, clock) for lane in happening.lanes}
    for has_names in (True, False):
        rows, num_rows = {}, {lane.name: 0 for lane in happening.lanes}
        free: dict[str, list[float]] = {lane.name: [] for lane in happening.lanes}
        stays = [
            (stay.begin_s, passage, number)
            for passage in happening.passages
            for number, stay in enumerate(passage.stays)
        ]
        for _, passage, number in sorted(stays, key=lambda one: one[0]):
            stay = passage.stays[number]
            begin, end = clock.x(stay.begin_s), clock.x(stay.end_s)
            reach = 12 + text_width(passage.label(number)) if has_names else 2
            rows[passage.name, number] = row = _free(free[stay.lane], begin - 4 * has_names, end + reach)
            num_rows[stay.lane] = max(num_rows[stay.lane], row + 1)
        total = sum(num_rows.values())
        if has_names and total * ROW <= TALLEST:
            return Plan(ROW, True, rows, num_rows, bars)
    return Plan(min(max(TALLEST / max(total, 1), THIN_ROW), 6.0), False, rows, num_rows, bars)


def _barred(lane: str, troubles: Sequence[Trouble], clock: Clock) -> list[tuple[Trouble, int]]:
    free: list[float] = []
    found = []
    for trouble in sorted(troubles, key=lambda one: one.begin_s):
        if lane in trouble.lanes:
            begin, end = clock.x(trouble.begin_s), clock.x(trouble.end_s)
            found.append((trouble, _free(free, begin, max(end, begin + text_width(trouble.label) + 10))))
    return found


def _free(ends: list[float], begin: float, end: float) -> int:
    """Return the first row that is free from here to there, and take it."""
    for row, taken in enumerate(ends):
        if taken <= begin:
            ends[row] = end
            return row
    ends.append(end)
    return len(ends) - 1


@dataclass
class Strip:
    """A lane on the picture."""

    lane: Lane
    top: float
    plan: Plan
    height: float = field(init=False)
    _head: float = field(init=False)

    def __post_init__(self) -> None:
        """Measure it."""
        bars = self.plan.bars[self.lane.name]
        self._head = LINE * max((row + 1 for _, row in bars), default=0)
        rows = self.plan.row * self.plan.num_rows[self.lane.name]
        self.height = max(self._head + rows + 6 * bool(rows), LEAST)

    def y(self, row: int) -> float:
        """Return the middle of a request's row."""
        return self.top + self._head + 3 + self.plan.row * (row + 0.5)

    @property
    def middle(self) -> float:
        """Where its name is."""
        return self.top + self.height / 2

    def background(self, clock: Clock, paint: Paint) -> Iterable[str]:
        """Yield its name, and a band while it runs."""
        colour = LIMIT if self.lane.is_flawed else INK
        weight = "bold" if self.lane.is_flawed else None
        yield element("text", x=clock.left - 10, y=self.middle + 4, text_anchor="end",
                      style=style(fill=paint(colour), font_weight=weight), text=self.lane.name)  # fmt: skip
        for begin_s, end_s in self.lane.runs:
            begin, end = clock.x(begin_s), clock.x(end_s)
            yield element("rect", x=begin, y=self.top, width=max(end - begin, 1.0), height=self.height,
                          style=style(fill=paint(GRID), fill_opacity=0.55))  # fmt: skip

    def troubles(self, clock: Clock, paint: Paint) -> Iterable[str]:
        """Yield its faults."""
        for trouble, row in self.plan.bars[self.lane.name]:
            begin, end = clock.x(trouble.begin_s), clock.x(trouble.end_s)
            top = self.top + LINE * row
            width = max(end - begin, 2.0)
            tint = element("rect", x=begin, y=self.top, width=width, height=self.height,
                           style=style(fill=paint(FAULT), fill_opacity=0.14))  # fmt: skip
            bar = element("rect", x=begin, y=top, width=width, height=2.5, style=style(fill=paint(FAULT)))
            is_left = begin + text_width(trouble.label) + 6 > clock.right
            name = element("text", x=end if is_left else begin + 4, y=top + 13, text_anchor="end" if is_left else None,
                           style=style(fill=paint(FAULT)), text=trouble.label)  # fmt: skip
            said = f"{trouble.label} {' and '.join(trouble.lanes)}, {_from(trouble.begin_s, trouble.end_s)}"
            yield _group(said, [tint, bar, name])


def _from(begin_s: float, end_s: float) -> str:
    return f"at {begin_s:.3f} s" if begin_s == end_s else f"{begin_s:.3f} to {end_s:.3f} s"


def _group(title: str, parts: Iterable[str]) -> str:
    return f"<g><title>{escape(title, quote=False)}</title>{''.join(parts)}</g>"


def _meetings(troubles: Sequence[Trouble], strips: Mapping[str, Strip], clock: Clock, paint: Paint) -> Iterable[str]:
    """Connect the lanes that a fault keeps apart."""
    for trouble in troubles:
        ends = [strips[name] for name in trouble.lanes if name in strips]
        if len(ends) == 2:
            x = clock.x(trouble.begin_s)
            yield element("line", x1=x, x2=x, y1=ends[0].middle, y2=ends[1].middle,
                          style=style(stroke=paint(FAULT), stroke_width=1.4, stroke_dasharray="1.5 3"))  # fmt: skip


def _passage(passage: Passage, strips: Mapping[str, Strip], plan: Plan, clock: Clock, paint: Paint) -> str:
    """Draw a request: its line in each lane, and its way between them."""
    colour = paint(COLOURS[passage.end])
    thick = 2.6 if plan.has_names else min(plan.row * 0.7, 2.4)
    parts = []
    spots = [
        (clock.x(stay.begin_s), clock.x(stay.end_s), strips[stay.lane].y(plan.rows[passage.name, number]))
        for number, stay in enumerate(passage.stays)
    ]
    for number, (begin, end, y) in enumerate(spots):
        first = clock.x(passage.first_s) if not number and passage.first_s is not None else end if not number else begin
        parts += [_line(begin, first, y, colour, 1.0)] if first > begin else []
        parts += [_line(first, max(end, first + 1.5), y, colour, thick)] if first < end or number else []
        if number:
            parts.append(_way(spots[number - 1] if number > 1 else spots[0], begin, y, colour, is_first=number == 1,
                              is_faint=not plan.has_names and not passage.is_flawed and len(spots) < 3))  # fmt: skip
        if plan.has_names:
            look = style(fill=colour, font_weight="bold" if passage.is_flawed else None, font_size="11px")
            label = passage.label(number)
            x, anchor = (end + 8, None) if end + 8 + text_width(label) < clock.right else (begin - 6, "end")
            parts.append(element("text", x=x, y=y + 4, text_anchor=anchor, style=look, text=label))
    parts.append(_mark(passage.end, spots[0][1], spots[0][2], colour, 3.2 if plan.has_names else max(thick * 0.7, 1.2)))
    return _group(passage.title, parts)


def _line(begin: float, end: float, y: float, colour: str, width: float) -> str:
    return element("line", x1=begin, x2=end, y1=y, y2=y,
                   style=style(stroke=colour, stroke_width=width, stroke_linecap="round"))  # fmt: skip


def _way(
    before: tuple[float, float, float], begin: float, y: float, colour: str, *, is_first: bool, is_faint: bool
) -> str:
    """Draw the way of a request to a worker: from its frontend, or from the worker before."""
    from_x, from_y = begin if is_first else min(before[1], begin), before[2]
    bend = (y - from_y) / 2
    way = f"M{from_x:.1f} {from_y:.1f}C{from_x:.1f} {from_y + bend:.1f} {begin:.1f} {y - bend:.1f} {begin:.1f} {y:.1f}"
    look = style(
        fill="none", stroke=colour, stroke_width=0.8 if is_first else 1.4, stroke_opacity=0.25 if is_faint else 0.8
    )
    return element("path", d=way, style=look)


def _mark(end: End, x: float, y: float, colour: str, half: float) -> str:
    if end == "failed" or end == "refused":
        corners = path([x - half, x + half], [y - half, y + half]) + path([x - half, x + half], [y + half, y - half])
        return element("path", d=corners, style=style(stroke=colour, stroke_width=max(half / 1.8, 0.8)))
    look = style(fill=colour) if end == "answered" else style(fill="none", stroke=colour, stroke_width=1.4)
    return element("circle", cx=x, cy=y, r=half, style=look)


def _time(clock: Clock, top: float, bottom: float, paint: Paint) -> Iterable[str]:
    """Yield lines at round times with their labels, and the breaks."""
    for x, label in clock.ticks().items():
        yield element("line", x1=x, x2=x, y1=top, y2=bottom, style=style(stroke=paint(REST), stroke_width=0.6))
        yield element("text", x=x, y=bottom + 14, text_anchor="middle", style=style(fill=paint(QUIET)), text=label)
    for long_s, first, last in clock.breaks():
        middle = (first + last) / 2
        for x in (middle - 2.5, middle + 2.5):
            yield element("line", x1=x, x2=x, y1=top, y2=bottom,
                          style=style(stroke=paint(QUIET), stroke_width=0.8, stroke_dasharray="5 4"))  # fmt: skip
        yield element("text", x=middle, y=bottom + 14 + LINE, text_anchor="middle",
                      style=style(fill=paint(QUIET), font_style="italic"), text=f"{long_s:.1f} s")  # fmt: skip


def _flags(flaws: Sequence[Flaw], clock: Clock, paint: Paint) -> tuple[list[str], float]:
    """Name what did not hold above the lanes; return that, and where the lanes begin."""
    by_time: dict[float, list[str]] = {}
    for flaw in flaws:
        by_time.setdefault(flaw.at_s, []).append(flaw.label)
    free: list[float] = []
    found, most = [], 0
    for at_s, labels in sorted(by_time.items()):
        text, x = ", ".join(dict.fromkeys(labels)), clock.x(at_s)
        begin = min(x, clock.right - text_width(text) * BOLD)
        row = _free(free, begin, begin + text_width(text) * BOLD + 10)
        most = max(most, row + 1)
        found.append((x, begin, row, text))
    parts = [
        element("text", x=begin, y=LINE * row + 11.0, style=style(fill=paint(LIMIT), font_weight="bold"), text=text)
        for _, begin, row, text in found
    ]
    return parts, LINE * most + 6


def _rules(flaws: Sequence[Flaw], clock: Clock, top: float, bottom: float, paint: Paint) -> list[str]:
    look = style(stroke=paint(LIMIT), stroke_width=1.2, stroke_dasharray="5 3")
    places = dict.fromkeys(clock.x(flaw.at_s) for flaw in flaws)
    return [element("line", x1=x, x2=x, y1=top - 4, y2=bottom, style=look, data_flaw="") for x in places]

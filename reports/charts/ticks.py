"""The ticks of axes: at round numbers, few, and with texts that say their unit."""

import math
from collections.abc import Callable, Iterable, Sequence

from reports.charts.axes import Axes, Scale

Form = Callable[[float], str]
ROUND = (1.0, 2.0, 2.5, 5.0)


def plain(value: float) -> str:
    """Format a number without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(milliseconds: float) -> str:
    """Format a time with its unit."""
    return f"{milliseconds:g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:,.4g} s"


def numbers(
    axes: Axes, which: str, low: float, high: float, *, most: int = 5, whole: bool = False, form: Form | None = None
) -> None:
    """Let an axis go from one number to another, with round ticks."""
    _set(axes, which, low, high, round_numbers(low, high, most, whole=whole), form or plain)


def round_numbers(
    low: float, high: float, most: int, *, steps: Sequence[float] = ROUND, whole: bool = False
) -> list[float]:
    """Return round numbers within a range, with at most this many gaps, but at least two numbers."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    sizes = [step * scale for scale in (power / 10, power, power * 10) for step in steps]
    if whole:
        sizes = [size for size in sizes if size >= 1 and size.is_integer()] or [1.0]
    small = [size for size in sizes if size < (high - low) / most * (1 - 1e-9)]
    found: list[float] = []
    for size in (*(sizes[len(small) : len(small) + 1]), *reversed(small)):  # ever smaller, until two are within
        first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
        found = [float(f"{place * size:.12g}") for place in range(first, last + 1)]
        if len(found) >= 2:
            break
    return found


def logarithm(axes: Axes, which: str, values: Iterable[float], form: Form | None = None, *, most: int = 6) -> None:
    """Let a logarithmic axis hold these values (above zero), with ticks at round numbers."""
    known = [value for value in values if value > 0]
    low, high = (min(known) / 1.15, max(known) * 1.15) if known else (1.0, 10.0)
    if high / low < 3:
        low, high = low / 1.3, high * 1.3
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= most:
            break
    ticks = ticks[:: -(-len(ticks) // most)] if len(ticks) > most else ticks
    _of(axes, which).is_log = True
    _set(axes, which, low, high, ticks, form or plain)


def times(axes: Axes, which: str, values: Iterable[float], *, most: int = 6) -> None:
    """Let a logarithmic axis hold these times (ms)."""
    logarithm(axes, which, values, duration, most=most)


def seconds(axes: Axes, which: str, low: float, high: float, *, most: int = 5) -> None:
    """Let an axis go from one time (s) to another, in the unit that suits it."""
    unit, size = next((one for one in (("h", 3600.0), ("min", 60.0)) if high >= 4 * one[1]), ("s", 1.0))
    ticks = round_numbers(low / size, high / size, most, steps=(1.0, 2.0, 3.0, 5.0))
    fixed(axes, which, low, high, {tick * size: f"{plain(tick)} {unit}" if tick else "0" for tick in ticks})


def fixed(axes: Axes, which: str, low: float, high: float, ticks: dict[float, str]) -> None:
    """Let an axis go from one place to another, with these ticks."""
    within = sorted((low, high))
    _set(axes, which, low, high, [tick for tick in ticks if within[0] <= tick <= within[1]], lambda tick: ticks[tick])


def categories(axes: Axes, which: str, names: Sequence[str]) -> None:
    """Give an axis a place for each name; on the y axis, from above."""
    low, high = (-0.5, len(names) - 0.5) if which == "x" else (len(names) - 0.5, -0.5)
    _set(axes, which, low, high, list(range(len(names))), lambda tick: names[int(tick)])
    _of(axes, which).has_grid = False


def no_labels(axes: Axes, which: str) -> None:
    """Leave out the tick labels, because an equal axis has them."""
    _of(axes, which).has_labels = False


def _of(axes: Axes, which: str) -> Scale:
    return axes.x if which == "x" else axes.y


def _set(axes: Axes, which: str, low: float, high: float, ticks: Sequence[float], form: Form) -> None:
    scale = _of(axes, which)
    scale.low, scale.high, scale.ticks, scale.labels = low, high, ticks, [form(tick) for tick in ticks]

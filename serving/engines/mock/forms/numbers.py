"""Numbers of a schema: which ones are within its bounds and multiples of its steps."""

import math
import sys
from fractions import Fraction
from typing import Any

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.keywords import WorkLimit, bounds_of, number_of
from serving.engines.mock.forms.nodes import EXACT, Node, Number


def number_node(raws: list[dict[str, Any]], integral: bool, where: str, work: WorkLimit) -> Node:
    """Return the multiples of a step within the bounds; without `multipleOf`, short decimals.

    Raises:
        FormError: none is found.
    """
    steps = [Fraction(str(found)) for raw in raws if (found := number_of(raw, "multipleOf")) is not None]
    if any(step <= 0 for step in steps):
        raise FormError(f'{where}: "multipleOf" is {min(steps)}; a number above 0 was expected')
    if not steps and (gap := _gap(raws)) > 1:
        grids = [gap]
    elif steps or integral:
        grids = [_common([*steps, *([Fraction(1)] if integral else [])])]
    else:
        grids = [Fraction(1, 10**digits) for digits in (2, 4, 8, 16)]
    for step in grids:
        first, last = _places(raws, step)
        if first is None or last is None or first <= last:
            number = Number(step, first, last, integral, raws)
            if number.find(work):
                return number
    raise FormError(f"{where}: the mocker finds no number within its bounds")


def _common(steps: list[Fraction]) -> Fraction:
    """Return the least common multiple."""
    found = steps[0]
    for step in steps[1:]:
        found = Fraction(math.lcm(found.numerator, step.numerator), math.gcd(found.denominator, step.denominator))
    return found


def _places(raws: list[dict[str, Any]], step: Fraction) -> tuple[int | None, int | None]:
    """Return the first and the last multiple within all bounds."""
    firsts, lasts = [], []
    for raw in raws:
        for is_low, bound, is_excluded in bounds_of(raw):
            place = _value(bound) / step
            if is_low:
                firsts.append(math.floor(place) + 1 if is_excluded else math.ceil(place))
            else:
                lasts.append(math.ceil(place) - 1 if is_excluded else math.floor(place))
    return max(firsts, default=None), min(lasts, default=None)


def _gap(raws: list[dict[str, Any]]) -> Fraction:
    """Return how far apart floats are at the bound that is nearest to zero, if zero itself is not within the bounds."""
    bounds = [bound if is_low else -bound for raw in raws for is_low, bound, _ in bounds_of(raw)]
    return Fraction(math.ulp(min(max(bounds, default=0), sys.float_info.max)))


def _value(bound: float) -> Fraction:
    """Return a bound as its digits say it; a very large float as validators read it, which is not what they say."""
    return Fraction(bound) if abs(bound) > EXACT else Fraction(str(bound))

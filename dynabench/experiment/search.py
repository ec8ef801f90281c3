"""Searching for the value of a setting at which limits begin to be met, or cease to be."""

import math
from typing import Literal

Sense = Literal["highest", "lowest"]


class Bracket:
    """Between which values of a setting the limits cease to be met, and which is to be tried next.

    It doubles from the easy end until the other side is found, then halves the ratio; of whole numbers, the distance. Where
    nobody knows which end is the easy one, it tries both ends first.
    """

    def __init__(self, low: float, high: float, *, precision: float, is_whole: bool, sense: Sense | None) -> None:
        """Begin a search.

        Args:
            low: the lowest value to try.
            high: the highest.
            precision: the relative width at which it ends; whole numbers are told apart one by one.
            is_whole: whether values are whole numbers.
            sense: what is looked for: the highest value that meets the limits, or the lowest; None: to be found out.
        """
        if is_whole:
            low, high = max(math.ceil(low), 1), math.floor(high)
        self.low, self.high = low, high
        self.sense = sense
        self.met: float | None = None
        """The best value known that meets the limits."""
        self.missed: float | None = None
        """The nearest to it that does not."""
        self._precision = precision
        self._is_whole = is_whole
        self._is_over = False
        self._is_met_at_low: bool | None = None

    @property
    def is_at_end(self) -> bool:
        """Whether the limits are met as far as was tried: there may be better values beyond."""
        return self.met is not None and self.missed is None

    def next(self) -> float | None:
        """Return the value to try, or None if the search is over."""
        if self._is_over:
            return None
        if self.sense is None:
            return self.low if self._is_met_at_low is None else self.high
        if self.met is not None and self.missed is not None:
            return self._between(self.met, self.missed)
        last = self.met if self.sense == "highest" else self.missed
        return self.low if last is None else self._whole(min(last * 2, self.high))

    def learn(self, value: float, *, is_met: bool) -> None:
        """Take note whether a value, the one to try, meets the limits."""
        if self.sense is None:
            self._learn_sense(value, is_met=is_met)
            return
        if is_met:
            self.met = value
        else:
            self.missed = value
        easy, hard = (self.low, self.high) if self.sense == "highest" else (self.high, self.low)
        if self.met is not None and self.missed is not None:
            self._is_over = self._is_narrow()
        else:
            self._is_over = value == (hard if is_met else easy)

    def forbid(self, value: float) -> None:
        """Take note that there cannot be this value, the one to try: the search stays below it."""
        self.high = value - 1 if self._is_whole else self.low
        self._is_over = self.high < self.low or self.high in (self.met, self.missed) or not self._is_whole

    def _learn_sense(self, value: float, *, is_met: bool) -> None:
        """Take note of one end; with both, it is known what to look for, or that there is nothing between them."""
        if self._is_met_at_low is None:
            self._is_met_at_low = is_met
            return
        if is_met == self._is_met_at_low:
            self.met, self.missed = (value, None) if is_met else (None, value)
            self._is_over = True
            return
        self.sense = "lowest" if is_met else "highest"
        self.met, self.missed = (self.high, self.low) if is_met else (self.low, self.high)
        self._is_over = self._is_narrow()

    def _between(self, met: float, missed: float) -> float:
        return (int(met) + int(missed)) // 2 if self._is_whole else round(math.sqrt(met * missed), 6)

    def _is_narrow(self) -> bool:
        assert self.met is not None
        assert self.missed is not None
        if self._is_whole:
            return abs(self.missed - self.met) <= 1
        return abs(math.log(self.missed / self.met)) <= math.log1p(self._precision)

    def _whole(self, value: float) -> float:
        return int(value) if self._is_whole else value

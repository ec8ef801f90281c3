"""Times, shares and moments, as users write them and as they are drawn.

200ms             this long
100ms..300ms      between these, each time as likely
200ms+-50ms       normally distributed around the mean, never below zero
0.1:200ms         with this probability
100               after 100 answers
30s               this long after it was set
"""

import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta
from xxhash import xxh3_64_intdigest

from foundation.settings import CheckedSettings, Count, Share, Wait

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|m|h)")
MOST_S = 86_400.0


def drawn(seed: int, purpose: str, key: str | int, place: int = 0) -> float:
    """Return a number from 0 up to 1 that depends on nothing else: the same for the same request and purpose."""
    return xxh3_64_intdigest(f"{purpose} {place} {key}".encode(), seed & 0xFFFF_FFFF_FFFF_FFFF) / 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Times(CheckedSettings):
    """A time that is drawn each time."""

    low_s: Wait
    """The shortest; or the mean, if there is a deviation."""

    high_s: Wait
    """The longest."""

    deviation_s: Wait = 0.0

    share: Share = 1.0
    """How often there is one at all."""

    def time_s(self, seed: int, purpose: str, key: str | int, place: int = 0) -> float:
        """Draw one (s); 0 if there is none this time."""
        if self.share < 1 and drawn(seed, f"{purpose} share", key, place) >= self.share:
            return 0.0
        if not self.deviation_s and self.low_s == self.high_s:
            return self.low_s
        number = drawn(seed, purpose, key, place)
        if self.deviation_s:
            return max(NormalDist(self.low_s, self.deviation_s).inv_cdf(max(number, 2.0**-64)), 0.0)
        return self.low_s + number * (self.high_s - self.low_s)

    def __str__(self) -> str:
        """Write it as it is read."""
        share = "" if self.share == 1 else f"{self.share:g}:"
        if self.deviation_s:
            return f"{share}{_time_text(self.low_s)}+-{_time_text(self.deviation_s)}"
        return share + ("..".join(dict.fromkeys((_time_text(self.low_s), _time_text(self.high_s)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment(CheckedSettings):
    """When something happens, counted from when it was asked for."""

    num_answers: Count | None = None
    """After this many more answers."""

    after_s: Wait | None = None
    """After this time (s)."""

    def __str__(self) -> str:
        """Write it as it is read."""
        return str(self.num_answers) if self.after_s is None else _time_text(self.after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(CheckedSettings):
    """How often a stream stops, and for how long."""

    share: Annotated[float, Meta(ge=0, le=1)]
    time_s: Wait

    def __str__(self) -> str:
        """Write it as it is read."""
        return f"{self.share:g}:{_time_text(self.time_s)}"


# Readers raise ValueError; the message says what was expected


def read_share(text: str) -> float:
    """Read a share."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError("a share from 0 to 1, such as 0.05")
    return share


def read_time(text: str) -> float:
    """Read a time (s)."""
    found = TIME.fullmatch(text)
    if found is None or (time_s := float(found[1]) * UNITS[found[2]]) > MOST_S:
        raise ValueError("a time of at most a day with its unit, such as 200ms or 30s")
    return time_s


def read_times(text: str) -> Times:
    """Read a time or a distribution of times, perhaps with a share."""
    share, colon, rest = text.partition(":")
    try:
        often = read_share(share) if colon else 1.0
        mean, sign, deviation = (rest if colon else text).partition("+-")
        if sign:
            mean_s = read_time(mean)
            return Times(low_s=mean_s, high_s=mean_s, deviation_s=read_time(deviation), share=often)
        low, _, high = (rest if colon else text).partition("..")
        low_s, high_s = read_time(low), read_time(high or low)
    except ValueError:
        low_s, high_s, often = 1.0, 0.0, 0.0
    if low_s > high_s:
        raise ValueError("a time: 200ms, 100ms..300ms or 200ms+-50ms, perhaps after a share, as in 0.1:200ms")
    return Times(low_s=low_s, high_s=high_s, share=often)


def read_stall(text: str) -> Stall:
    """Read how often a stream stops, and for how long."""
    share, _, time = text.partition(":")
    try:
        return Stall(share=read_share(share), time_s=read_time(time))
    except ValueError:
        raise ValueError("a share and a time, such as 0.01:30s") from None


def read_moment(text: str) -> Moment:
    """Read a moment."""
    try:
        return Moment(num_answers=int(text)) if text.isdecimal() else Moment(after_s=read_time(text))
    except ValueError:
        raise ValueError("a number of answers, such as 100, or a time, such as 30s") from None


def _time_text(time_s: float) -> str:
    for unit in ("s", "ms", "us"):
        if time_s >= UNITS[unit] or not time_s:
            return f"{time_s / UNITS[unit]:.9g}{unit}"
    return f"{time_s / UNITS['us']:.9g}us"

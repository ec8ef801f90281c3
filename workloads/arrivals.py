"""When requests arrive: gaps of mean one, stretched by a rate that may change over time."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Literal

Process = Literal["constant", "poisson", "gamma"]
Profile = Literal["flat", "ramp", "sine"]
Gaps = Callable[[random.Random, float], Iterator[float]]


def constant(rng: random.Random, burstiness: float) -> Iterator[float]:
    """Equal gaps."""
    while True:
        yield 1.0


def poisson(rng: random.Random, burstiness: float) -> Iterator[float]:
    """Exponential gaps: independent arrivals."""
    while True:
        yield rng.expovariate(1.0)


def gamma(rng: random.Random, burstiness: float) -> Iterator[float]:
    """Gamma gaps of shape `burstiness`, as in vLLM's benchmark: 1 is Poisson, less is burstier (CV = 1 / sqrt(shape))."""
    while True:
        yield rng.gammavariate(burstiness, 1 / burstiness)


ARRIVALS: dict[str, Gaps] = {"constant": constant, "poisson": poisson, "gamma": gamma}


def arrival_times(
    rng: random.Random,
    *,
    process: Process,
    rate: float,
    burstiness: float = 1.0,
    profile: Profile = "flat",
    rate_to: float | None = None,
    profile_s: float = 60.0,
) -> Iterator[float]:
    """Yield arrival times (s) forever, the first at 0.

    The n-th arrival is when the integral of the rate reaches the sum of the first n gaps of mean one, so the times
    are absolute and errors do not add up.

    Args:
        rng: the source of the gaps.
        process: distribution of the gaps.
        rate: arrivals per second, at the start for `ramp` and at the lowest for `sine`.
        burstiness: shape of gamma gaps.
        profile: `ramp` goes to `rate_to` within `profile_s` seconds and stays; `sine` swings up to it and back.
        rate_to: the rate at the end of a ramp, or at the highest of a sine.
        profile_s: length of the ramp, period of the sine (s).
    """
    inverse = _inverse(profile, rate, rate if rate_to is None else rate_to, profile_s)
    total = 0.0
    for gap in ARRIVALS[process](rng, burstiness):
        yield inverse(total)
        total += gap


def _inverse(profile: Profile, low: float, high: float, length: float) -> Callable[[float], float]:
    """Return the time at which the integral of the rate reaches a value."""
    if profile == "flat":
        return lambda total: total / low
    if profile == "ramp":
        slope, whole = (high - low) / length, (low + high) / 2 * length

        def ramp(total: float) -> float:
            if total >= whole:
                return length + (total - whole) / high
            return 2 * total / (low + math.sqrt(low * low + 2 * slope * total))

        return ramp
    middle, swing, turn = (low + high) / 2, (high - low) / 2, 2 * math.pi / length

    def sine(total: float) -> float:
        # rate(t) = middle - swing cos(turn t), whose integral is middle t - swing sin(turn t) / turn.
        time = total / middle
        start, stop = time - abs(swing) / turn / middle, time + abs(swing) / turn / middle
        for _ in range(60):
            time = (start + stop) / 2
            if middle * time - swing * math.sin(turn * time) / turn < total:
                start = time
            else:
                stop = time
        return time

    return sine

"""When requests arrive: gaps between arrivals, as named processes of one mean."""

import random
from collections.abc import Callable, Iterator

Process = Callable[[random.Random, float, float], Iterator[float]]


def constant(rng: random.Random, rate: float, burstiness: float) -> Iterator[float]:
    """Equal gaps."""
    while True:
        yield 1 / rate


def poisson(rng: random.Random, rate: float, burstiness: float) -> Iterator[float]:
    """Exponential gaps: arrivals that know nothing of each other."""
    while True:
        yield rng.expovariate(rate)


def gamma(rng: random.Random, rate: float, burstiness: float) -> Iterator[float]:
    """Gamma gaps of shape `burstiness`, as in vLLM's benchmark: 1 is Poisson, less is burstier (CV = 1 / sqrt(shape))."""
    while True:
        yield rng.gammavariate(burstiness, 1 / (rate * burstiness))


ARRIVALS: dict[str, Process] = {"constant": constant, "poisson": poisson, "gamma": gamma}

"""Workloads that several tests send."""

import random

from workloads import Request, Workload
from workloads.synthesize import SynthConfig, synthesize


def conversations(count, **dials):
    """Make a workload of conversations of some turns, in blocks of 512 tokens."""
    dials = {"turns": 3, "isl": 900, "osl": 60, "prefix_groups": 5} | dials
    return Workload("w", 512, synthesize(SynthConfig(requests=count, **dials)))


def bursty(count, *, seed=0):
    """Make a workload without shared prefixes in which half of the requests come within a tenth of the time."""
    rng, now, requests = random.Random(seed), 0.0, []
    for number in range(count):
        is_burst = count // 4 <= number < 3 * count // 4
        now += rng.expovariate(36.0 if is_burst else 4.0)
        length = int(rng.lognormvariate(6.5, 0.8)) + 1
        requests.append(
            Request(now, length, rng.randint(2, 200), tuple(range(64 * number, 64 * number + -(-length // 512))))
        )
    return Workload("bursty", 512, requests)

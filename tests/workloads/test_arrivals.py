import itertools
import random

import numpy as np
import pytest

from workloads.arrivals import arrival_times


def arrivals(count, **options):
    return np.array(list(itertools.islice(arrival_times(random.Random(1), **options), count)))


def test_arrivals_are_absolute_and_have_their_rate():
    assert arrivals(5, process="constant", rate=4.0).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    for process, burstiness, cv in (("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)):
        gaps = np.diff(arrivals(20_000, process=process, rate=10.0, burstiness=burstiness))
        assert gaps.mean() == pytest.approx(0.1, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_ramp_and_a_sine_have_their_rates():
    ramp = arrivals(2000, process="constant", rate=10.0, profile="ramp", rate_to=30.0, profile_s=50.0)
    rates = np.histogram(ramp, [0, 1, 24.5, 25.5, 49, 50, 60])[0] / [1, 23.5, 1, 23.5, 1, 10]
    assert rates[[0, 2, 4]] == pytest.approx([10, 20, 30], abs=1.1)
    sine = arrivals(2000, process="constant", rate=10.0, profile="sine", rate_to=30.0, profile_s=40.0)
    rates = np.histogram(sine, [0, 1, 9.5, 10.5, 19.5, 20.5, 39.5, 40.5])[0]
    assert rates[[0, 2, 4, 6]] == pytest.approx([10, 20, 30, 10], abs=1.1)

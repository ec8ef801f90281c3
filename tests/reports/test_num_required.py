"""How many values must be within a limit, held against the figures of values that are so many."""

import numpy as np
import pytest

from reports.figures.conditions import read_condition
from reports.figures.metrics import LEAST_SAMPLES, describe
from reports.figures.outcomes import num_required


@pytest.mark.parametrize(("statistic", "percent"), [("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)])
def test_a_percentile_is_within_a_limit_only_if_as_many_values_as_required_are(statistic, percent):
    limit = read_condition(f"ttft.{statistic} <= 1s")
    for count in range(370, 900):
        required = num_required(limit, count, 0.99)
        for within in (required - 1, required):
            values = np.repeat([1.0, 2.0], [within, count - within])
            smaller = values[(count - 1) * percent // 100]
            assert (smaller <= limit.value) == (within == required), count


@pytest.mark.parametrize("percentile", sorted(LEAST_SAMPLES))
def test_a_percentile_is_finite_only_with_as_many_answers_as_required(percentile):
    limit = read_condition(f"ttft.p{percentile} <= 1s")
    for count in range(370, 900):
        required = num_required(limit, count, 0.99, are_infinite=True)
        for answered in (required - 1, required):
            figures = describe(np.full(answered, 0.5), num_failed=count - answered)
            known = getattr(figures, f"adjusted_p{percentile}")
            assert (isinstance(known, float)) is (answered == required), count

"""Times between tokens in bins: what stays exact, and how far off a percentile is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.figures.gap_bins import GAP_ERROR, GapBins
from reports.figures.metrics import TokenGaps

STEPS = st.integers(1, 300)
ROWS = st.lists(
    st.tuples(st.floats(1e-6, 10), st.just(0.0) | st.floats(1e-9, 0.1), st.just(0.0), STEPS, st.integers(1, 50)),
    min_size=1,
    max_size=12,
)


def binned(*parts):
    bins = GapBins()
    for part in parts:
        bins.add(np.array(part, float).reshape(-1, 5))
    return TokenGaps(bins.rows())


@given(rows=ROWS)
def test_counts_mean_and_longest_are_exact_and_percentiles_are_off_by_less_than_a_bin(rows):
    exact, found = TokenGaps(np.array(rows, float)), binned(rows)
    assert found.count == exact.count
    assert found.mean() == pytest.approx(exact.mean(), rel=1e-9)
    assert found.max() == pytest.approx(exact.max(), rel=1e-12)
    every = np.sort(np.concatenate([np.repeat(row[0] + row[1] * np.arange(row[3]), row[4]) for row in rows]))
    for share in (0, 0.5, 0.9, 0.99, 1):
        wanted = every[int(share * (len(every) - 1))]
        assert found.quantiles([share])[0] == pytest.approx(wanted, rel=GAP_ERROR + 1e-9)


@given(rows=ROWS, others=ROWS)
def test_rows_may_come_in_parts(rows, others):
    assert binned(rows, others).rows == pytest.approx(binned(rows + others).rows)


def test_equal_gaps_take_one_row():
    assert binned([[0.01, 0, 0, 5, 2]] * 1000).rows.tolist() == [
        [pytest.approx(0.01), 0, 0, 1, 9999],
        [0.01, 0, 0, 1, 1],
    ]


def test_gaps_of_no_length_are_kept():
    assert binned([[0.0, 0, 0, 3, 1]]).count == 3


def test_nothing_is_binned_into_nothing():
    assert len(binned([]).rows) == 0

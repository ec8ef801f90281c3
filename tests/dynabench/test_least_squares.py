import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynabench.fidelity.least_squares import non_negative


@given(
    seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 40), num_columns=st.integers(1, 20), is_twice=st.booleans()
)
def test_no_small_change_of_a_coefficient_makes_the_error_less(seed, num_rows, num_columns, is_twice):
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(num_rows, num_columns)), rng.normal(size=num_rows)
    if is_twice:
        matrix[:, 0] = matrix[:, -1]
    found = non_negative(matrix, target)
    slope = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()
    assert slope.min() >= -1e-8
    assert slope[found > 0] == pytest.approx(0, abs=1e-8)


def test_what_non_negative_coefficients_made_is_found_again():
    rng = np.random.default_rng(1)
    matrix, made = rng.random((5000, 6)), np.array([0.0, 2.0, 0.0, 0.5, 1e-3, 7.0])
    assert non_negative(matrix, matrix @ made) == pytest.approx(made, abs=1e-12)


def test_a_column_of_zeros_gets_no_coefficient():
    assert non_negative(np.array([[0.0, 1.0], [0.0, 2.0]]), np.array([3.0, 6.0])) == pytest.approx([0.0, 3.0])
    assert non_negative(np.zeros((2, 2)), np.ones(2)).tolist() == [0.0, 0.0]

"""Columns of Arrow are those that pyarrow makes of the same values."""

import numpy as np
import pyarrow as pa
import pytest

from reports.record.arrow import arrow_of

MASK = [False, True, False]


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, np.inf, -0.0]),
        np.array([1, 2, 3], np.int32),
        np.arange(6)[::2],
        np.array([True, False, True] * 7),
        np.array(["a", "", "ü"], object),
        np.array([], np.int64),
    ],
)
def test_values_are_stored_as_pyarrow_stores_them(values):
    kind = pa.string() if values.dtype == object else None
    assert arrow_of(values).equals(pa.array(values, kind))
    mask = np.resize(MASK, len(values))
    found = arrow_of(np.ma.MaskedArray(values, mask))
    found.validate(full=True)
    assert found.equals(pa.array(values, kind, mask=mask))

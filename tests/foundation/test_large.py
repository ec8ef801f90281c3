"""Columns that are in files if they are large."""

import mmap
import random
import tempfile
from array import array

import numpy as np
import pytest

from foundation import large
from foundation.errors import UserError
from foundation.large import Growing, filled, let_go


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    monkeypatch.setattr(large, "LARGE_BYTES", 64)


def test_a_large_column_is_in_a_file_and_used_like_a_small_one():
    small, big = filled(array("d", [0.5]), 8), filled(array("d", [0.5]), 9)
    assert isinstance(small, array)
    assert isinstance(big.obj, mmap.mmap)
    for column in (small, big):
        column[7] = 1.5
        assert column.tolist()[6:8] == [0.5, 1.5]


def test_to_let_go_of_a_column_loses_nothing():
    column = filled(array("i", [7]), 100_000)
    column[99_999] = 8
    rows = np.frombuffer(column, np.int32)[1:]
    let_go(column)
    let_go(rows)
    let_go(array("i"))
    assert (rows[0], rows[-1], len(column)) == (7, 8, 100_000)


@pytest.mark.parametrize("seed", range(20))
def test_a_growing_column_is_what_its_parts_are_behind_each_other(seed):
    rng = random.Random(seed)
    kinds = rng.choice([(np.int32,), (np.float64,), (np.int32, np.int64), (np.int32, np.int64, object)])
    parts = [np.arange(rng.randrange(30)).astype(rng.choice(kinds)) for _ in range(rng.randrange(1, 9))]
    column = Growing()
    for part in parts:
        column.add(part)
    whole, expected = column.whole(), np.concatenate(parts)
    assert whole.dtype == expected.dtype
    assert whole.tolist() == expected.tolist()


def test_a_folder_without_room_is_named(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match=r"no room for a column .*No space left on device.*TMPDIR"):
        filled(array("d", [0.0]), 100)

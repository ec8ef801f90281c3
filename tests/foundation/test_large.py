"""Columns that are in files if they are large."""

import errno
import io
import mmap
import os
import random
import tempfile
from array import array
from pathlib import Path

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


def resident_kb(column):
    """Return how much of a mapped column is in this process's memory."""
    start = np.frombuffer(column, np.uint8).ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{start:x}-"))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is in memory")
def test_to_let_go_of_a_column_frees_its_memory_until_it_is_used_again():
    column = filled(array("i", [7]), 100_000)
    assert sum(column) == 700_000
    assert resident_kb(column) >= 390
    let_go(column)
    assert resident_kb(column) == 0
    assert column[0] == 7
    assert resident_kb(column) > 0


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
    column = Growing(kinds[0])
    for part in parts:
        column.add(part)
    whole, expected = column.whole(), np.concatenate(parts)
    assert whole.dtype == np.result_type(kinds[0], expected.dtype)
    assert whole.tolist() == expected.tolist()


def test_a_growing_column_without_rows_has_its_type():
    assert Growing(np.float64).whole().dtype == np.float64


def test_a_column_that_was_asked_for_does_not_grow():
    column = Growing(np.int32)
    column.whole()
    with pytest.raises(AssertionError):
        column.add(np.arange(3))


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


NO_ROOM = r"no room for a column .*No space left on device.*TMPDIR"


def test_a_folder_without_room_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match=NO_ROOM):
        filled(array("d", [0.0]), 100)


class FullFile(io.BytesIO):
    """A file on a disk that became full."""

    write = full


@pytest.mark.parametrize("fill", [lambda: filled(array("d", [0.0]), 100), lambda: Growing(float).add(np.zeros(100))])
def test_a_disk_that_is_full_is_named_when_a_column_is_written(monkeypatch, fill):
    monkeypatch.setattr(tempfile, "TemporaryFile", FullFile)
    with pytest.raises(UserError, match=NO_ROOM):
        fill()

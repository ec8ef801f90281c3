"""Tests of how many cores there are for processes."""

import pytest

from foundation import processes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1), ("max 100000\n", None)],
)
def test_a_quota_of_processor_time_is_as_many_cores_as_it_keeps_busy(tmp_path, text, expected):
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert processes._quota(file) == expected


def test_without_a_control_group_there_is_no_quota(tmp_path):
    assert processes._quota(tmp_path / "cpu.max") is None

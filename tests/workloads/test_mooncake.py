import gzip
import json

import pytest

from workloads import Request, WorkloadError, formats

ROW = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(path, **options):
    return formats.read(path, format="mooncake", **options).requests


def test_a_trace_is_read_plain_or_compressed(tmp_path):
    plain = write(tmp_path / "a.jsonl", ROW, ROW)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(plain) == read(packed) == [Request(1.0, 700, 5, (0, 1))] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2.*truncated"),
        (
            {key: value for key, value in ROW.items() if key != "output_length"},
            "line 2.*missing required field `output_length`",
        ),
        (ROW | {"input_length": -1}, "line 2: input_length must be at least 1, not -1"),
        (ROW | {"output_length": 0}, "line 2: output_length must be at least 1"),
        (ROW | {"timestamp": 5}, "line 2: timestamp 5 is before the line above"),
        (ROW | {"hash_ids": [1]}, "line 2: 700 tokens in blocks of 512 need 2 hash_ids, not 1"),
        (ROW | {"input_length": "many"}, "line 2.*Expected `int`"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, message):
    with pytest.raises(WorkloadError, match=message):
        read(write(tmp_path / "bad.jsonl", ROW, row))


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"none.jsonl: cannot be read"):
        read(tmp_path / "none.jsonl")
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(WorkloadError, match="cannot be read"):
        read(broken)

import gzip
import io
import json
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import Request, Workload, WorkloadError, formats
from workloads.describe import describe_workload
from workloads.merge import merge_workloads
from workloads.synthesize import SynthConfig, synthesize

TIMES = st.floats(0, 1e9, allow_nan=False)
TEXTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def workloads(draw, *, block_size=None):
    """Any workload there can be: arrivals in order, and each request behind what it waits for."""
    size = block_size or draw(st.sampled_from([1, 16, 48, 64, 512, 1000]))
    requests = []
    for number, arrival_s in enumerate(sorted(draw(st.lists(TIMES, min_size=1, max_size=8)))):
        length = draw(st.integers(1, 4 * size))
        blocks = -(-length // size)
        parts = draw(st.lists(st.integers(1, 2**16 - 1), min_size=blocks, max_size=blocks))
        ids = accumulate(parts, lambda before, part: before << 16 | part)  # chained, as all ids are
        after = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)) if number else []
        requests.append(
            Request(
                arrival_s,
                length,
                draw(st.integers(1, 10**6)),
                tuple(ids),
                draw(st.text(max_size=6)),
                tuple(after),
                draw(TIMES) if after else 0.0,
                draw(TEXTS),
                draw(st.sampled_from(["length", "stop"])),
            )
        )
    return Workload("w", size, requests, tuple(draw(st.lists(st.text(max_size=9), unique=True, max_size=2))))


def written(workload):
    buffer = io.BytesIO()
    formats.write(workload, formats.DEFAULT, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


@given(workload=workloads())
def test_what_is_written_is_what_was_there(folder, workload):
    file = folder / "w.jsonl"
    file.write_bytes(written(workload))
    assert formats.detect(file) == "dynabench"
    again = formats.read(file)
    assert again.requests == workload.requests
    assert (again.block_size, again.notes) == (workload.block_size, workload.notes)
    assert formats.lost(workload, "dynabench") == []
    assert written(again) == written(workload)
    packed = folder / "w.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert formats.read(packed).requests == workload.requests


@given(parts=st.lists(workloads(block_size=64), min_size=2, max_size=3))
def test_what_was_merged_is_written_and_read_without_loss(folder, parts):
    merged = merge_workloads(parts)
    assert len(merged) == sum(len(part) for part in parts)
    file = folder / "merged.jsonl"
    file.write_bytes(written(merged))
    again = formats.read(file)
    assert (again.requests, again.block_size, again.notes) == (merged.requests, merged.block_size, merged.notes)


@given(parts=st.lists(workloads(block_size=16), min_size=2, max_size=3))
def test_several_files_are_one_workload(folder, parts):
    inside = folder / "parts"
    inside.mkdir(exist_ok=True)
    for old in inside.iterdir():
        old.unlink()
    for number, part in enumerate(parts):
        (inside / f"{number}.jsonl").write_bytes(written(part))
    both = formats.read(inside)
    assert both.requests == formats.read(sorted(inside.iterdir())).requests
    together = sorted(request.hash_ids for part in parts for request in part)
    assert sorted(request.hash_ids for request in both) == together
    assert both.requests[0].arrival_s == 0
    for number, request in enumerate(both):
        assert all(parent < number for parent in request.after)


def test_a_synthetic_workload_survives_with_blocks_of_any_size(tmp_path):
    workload = Workload("s", 64, synthesize(SynthConfig(requests=200, turns=4, block_size=64, isl=300)))
    file = tmp_path / "s.jsonl"
    file.write_bytes(written(workload))
    assert describe_workload(formats.read(file)) == describe_workload(workload)


ONE = {"arrival_s": 1, "input_length": 65, "output_length": 1, "hash_ids": [0, 1]}
HEAD = {"schema": "dynabench.workload/1", "block_size": 64}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([HEAD | {"schema": "dynabench.workload/2"}], "line 1: not a header .*/2"),
        ([HEAD | {"block_size": 0}], "line 1: not a header .*>= 1"),
        ([HEAD | {"requests": 3}, ONE], "has only 1 of 3 requests, so it is truncated"),
        ([HEAD], "holds no request"),
        ([HEAD, ONE | {"hash_ids": [0]}], "line 2: 65 tokens in blocks of 64 need 2 hash_ids, not 1"),
        ([HEAD, ONE, ONE | {"after": [1]}], r"line 3: after names \[1\]; expected numbers of earlier requests, 0 to 0"),
        ([HEAD, ONE | {"after": [0]}], r"line 2: after names \[0\]; expected none, because this is the first request"),
        ([HEAD, ONE, ONE | {"arrival_s": 0.5}], r"line 3: arrival_s 0.5 is before that of the line above \(1\)"),
        ([HEAD, ONE | {"arrival_s": -1}], "line 2: arrival_s must not be negative, not -1"),
        ([HEAD, ONE | {"delay": 1}], "line 2: not a request .*unknown field `delay`"),
        ([HEAD, ONE | {"output_length": 0}], "line 2: output_length must be from 1 to 10,000,000, not 0"),
        ([HEAD, ONE | {"after": [], "delay_s": -1}], "line 2: delay_s must not be negative, not -1"),
        ([HEAD, ONE | {"ends": "eos"}], "line 2: not a request .*'eos'"),
        ([HEAD, []], "line 2: not a request"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong_is_named(tmp_path, rows, problem):
    file = tmp_path / "w.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(WorkloadError, match=problem) as caught:
        assert not formats.read(file).requests, "holds no request"
        raise WorkloadError("holds no request")
    assert "\n" not in str(caught.value)


def test_another_block_size_than_the_file_s_is_refused(tmp_path):
    file = tmp_path / "w.jsonl"
    file.write_text(json.dumps(HEAD) + "\n" + json.dumps(ONE) + "\n")
    with pytest.raises(WorkloadError, match="line 1: block_size is 64, not 16"):
        formats.read(file, block_size=16)

import gzip
import json

import pytest

from workloads import Request, WorkloadError, formats
from workloads.shape import ShapeConfig, shape

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
        ({key: value for key, value in ROW.items() if key != "output_length"}, "line 2: output_length is missing"),
        ({key: value for key, value in ROW.items() if key != "timestamp"}, "line 2: timestamp is missing, but rows above"),
        (ROW | {"input_length": -1}, "line 2: input_length must be at least 0, not -1"),
        (ROW | {"timestamp": -5}, "line 2: timestamp must be at least 0, not -5"),
        (ROW | {"timestamp": 1e300}, r"line 2: timestamp must be at most 1e\+14 ms, the year 5138 .*, not 1e\+300"),
        (ROW | {"timestamp": True}, "line 2: timestamp must be a finite number, not True"),
        (ROW | {"hash_ids": [1]}, "line 2: 700 tokens in blocks of 512 need 2 hash_ids, not 1"),
        (ROW | {"input_length": "many"}, "line 2: input_length must be a number, not 'many'"),
        (ROW | {"input_length": 700.5}, "line 2: input_length must be a whole number, not 700.5"),
        (ROW | {"priority": 1e300}, r"line 2: priority must be at most 2,147,483,647, not 1e\+300"),
        (ROW | {"priority": 0.5}, "line 2: priority must be a whole number, not 0.5"),
    ],
)  # fmt: skip
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


def test_numbers_may_have_an_exponent_a_fraction_of_zero_or_quotes(tmp_path):
    rows = '{"timestamp": 1e3, "input_length": 7E2, "output_length": 5.0, "hash_ids": [0, 1]}'
    quoted = {"timestamp": "1000", "input_length": "700", "output_length": "5", "hash_ids": [0, 1]}
    assert read(write(tmp_path / "a", rows, quoted)) == [Request(1.0, 700, 5, (0, 1))] * 2


def test_an_array_of_rows_is_read_like_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([ROW, ROW]))
    assert formats.read(tmp_path / "a.json").requests == [Request(1.0, 700, 5, (0, 1))] * 2


def test_requests_without_an_answer_are_left_out_and_counted(tmp_path):
    workload = formats.read(write(tmp_path / "a", ROW | {"output_length": 0}, ROW, ROW | {"input_length": 0}))
    assert workload.requests == [Request(1.0, 700, 5, (0, 1))]
    assert workload.notes == ("rows without prompt or response tokens left out: 2",)


def test_a_file_of_which_everything_is_left_out_says_why(tmp_path):
    with pytest.raises(
        WorkloadError, match=r"a has no requests \(rows without prompt or response tokens left out: 1\)"
    ):
        formats.read(write(tmp_path / "a", ROW | {"output_length": 0}))


def test_rows_may_be_in_any_order_with_a_note(tmp_path):
    workload = formats.read(write(tmp_path / "a", ROW | {"timestamp": 3000}, ROW, ROW | {"timestamp": 2000}))
    assert [request.arrival_s for request in workload] == [0.0, 1.0, 2.0]
    assert workload.notes == ("rows earlier than the row above, put in order of time: 1",)


@pytest.mark.parametrize("ids", [{}, {"hash_ids": []}, {"hash_ids": None}])
def test_without_hash_ids_it_is_not_known_what_prompts_share(tmp_path, ids):
    row = {key: value for key, value in ROW.items() if key != "hash_ids"} | ids
    workload = formats.read(write(tmp_path / "a", row, row))
    assert not workload.knows_prefixes
    assert workload.notes == ("rows without hash_ids, so what prompts share is not known: 2",)


def test_made_up_ids_never_meet_those_of_the_file(tmp_path):
    bare = {key: value for key, value in ROW.items() if key != "hash_ids"}
    ids = [0, 1], None, [2, 3], [0, 1], None, [4, 5]
    found = read(write(tmp_path / "a", *(bare if one is None else ROW | {"hash_ids": one} for one in ids)))
    sets = [set(request.hash_ids) for request in found]
    assert sets[0] == sets[3]
    assert len(set().union(*sets)) == 10


def test_rows_without_times_arrive_at_once_with_a_note(tmp_path):
    row = {key: value for key, value in ROW.items() if key != "timestamp"}
    workload = formats.read(write(tmp_path / "a", row, row))
    assert [request.arrival_s for request in workload] == [0.0, 0.0]
    assert workload.notes == ("rows without timestamp, which arrive at time 0: 2",)


def test_negative_ids_name_blocks_with_a_note(tmp_path):
    workload = formats.read(write(tmp_path / "a", ROW | {"hash_ids": [-1, -5]}, ROW | {"hash_ids": [-1, 0]}))
    one, two = (request.hash_ids for request in workload)
    assert one[0] == two[0]
    assert len({*one, *two}) == 3
    assert workload.notes == ("rows with negative hash_ids, which name blocks like any other number: 2",)


def test_times_that_are_surely_seconds_are_noted(tmp_path):
    seconds = [ROW | {"timestamp": time} for time in (0.0, 0.35, 0.91)]
    (note,) = formats.read(write(tmp_path / "a", *seconds)).notes
    assert note == "3 requests in 0.00 s: are these seconds? They were read as ms; if so, use --rate-scale 0.001"
    whole = [ROW | {"timestamp": time} for time in range(101)]
    (note,) = formats.read(write(tmp_path / "b", *whole)).notes
    assert note.startswith("101 requests in 0.10 s: are these seconds?")
    for likely in (whole[:5], [ROW | {"timestamp": 10.5 * n} for n in range(9)], [ROW, ROW]):
        assert not formats.read(write(tmp_path / "c", *likely)).notes


def test_the_question_about_the_unit_of_times_ends_with_its_answer(tmp_path):
    workload = formats.read(write(tmp_path / "a", *({**ROW, "timestamp": time} for time in (0.0, 0.35, 0.91))))
    for answer in (ShapeConfig(rate_scale=0.001), ShapeConfig(arrival="poisson", rate=1.0)):
        assert not any("?" in note for note in shape(workload, answer).notes)
    for none in (ShapeConfig(rate_scale=2), ShapeConfig(max_requests=3)):
        assert any("are these seconds?" in note for note in shape(workload, none).notes)


def test_times_in_seconds_that_are_surely_milliseconds_are_noted(tmp_path):
    row = {"chat_id": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]}
    rows = [row | {"timestamp": time} for time in (0, 2_000_000, 5_000_000)]
    assert (
        "3 requests in 5,000,000.00 s: are these milliseconds?" in formats.read(write(tmp_path / "a", *rows)).notes[1]
    )


def test_a_priority_is_read_and_written(tmp_path):
    rows = [ROW | {"priority": 2}, ROW, ROW | {"priority": -1}]
    workload = formats.read(write(tmp_path / "a", *rows))
    assert [request.priority for request in workload] == [2, 0, -1]
    with (tmp_path / "b").open("wb") as file:
        formats.write(workload, "mooncake", file)
    assert [json.loads(line) for line in (tmp_path / "b").read_text().splitlines()] == rows

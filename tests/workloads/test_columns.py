"""Logs whose columns the user names."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workloads import WorkloadError, formats

NAMES = "arrival=ts,input=prompt_tokens,output=completion_tokens"
ROWS = [
    {"ts": 12.5, "prompt_tokens": 700, "completion_tokens": 9, "user": "b"},
    {"ts": 10.0, "prompt_tokens": 600, "completion_tokens": 5, "user": "a"},
]


def csv_of(rows):
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows), ""])


def read(tmp_path, text, columns=NAMES, **options):
    file = tmp_path / "log.txt"
    file.write_text(text)
    return formats.read(file, columns=columns, **options)


def test_csv_json_lines_and_parquet_are_read_by_their_columns(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "log.parquet")
    columns = f"{NAMES},session=user"
    for workload in (
        read(tmp_path, csv_of(ROWS), columns),
        read(tmp_path, "".join(json.dumps(row) + "\n" for row in ROWS), columns),
        read(tmp_path, json.dumps(ROWS), columns),
        formats.read(tmp_path / "log.parquet", columns=columns),
    ):
        found = [(r.arrival_s, r.input_length, r.output_length, r.session) for r in workload]
        assert found == [(0.0, 600, 5, "a"), (2.5, 700, 9, "b")]
        assert not workload.knows_prefixes


@pytest.mark.parametrize(
    ("times", "arrival"),
    [
        ((1760000000, 1760000002.5), "ts"),
        ((1760000000000, 1760000002500), "ts"),
        ((1760000000000000, 1760000002500000), "ts"),
        ((0, 2500), "ts:ms"),
        ((0, 2.5), "ts:s"),
        (("2026-01-31T18:15:46.5Z", "2026-01-31T18:15:49Z"), "ts"),
        (("2026-01-31 18:15:46.5", "2026-01-31 18:15:49"), "ts"),
    ],
)
def test_the_unit_of_times_is_recognised_or_said(tmp_path, times, arrival):
    text = csv_of([{"ts": time, "in": 600, "out": 5} for time in times])
    workload = read(tmp_path, text, f"arrival={arrival},input=in,output=out")
    assert [request.arrival_s for request in workload] == [0.0, 2.5]


def test_a_column_named_after_its_unit_is_in_it_and_it_is_said_what_was_taken(tmp_path):
    workload = read(tmp_path, csv_of([{"t_ms": t, "i": 6, "o": 5} for t in (0, 2500)]), "arrival=t_ms,input=i,output=o")
    assert workload.duration_s == 2.5
    assert "t_ms read as times in ms (to change: arrival=t_ms:UNIT)" in workload.notes


def test_times_of_parquet_and_names_within_objects_are_read(tmp_path):
    start = datetime.datetime(2026, 1, 31, tzinfo=datetime.UTC)
    rows = [
        {"at": start + datetime.timedelta(seconds=2 * n), "usage": {"prompt_tokens": 6, "completion_tokens": 5}}
        for n in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    columns = "arrival=at,input=usage.prompt_tokens,output=usage.completion_tokens"
    assert formats.read(tmp_path / "log.parquet", columns=columns).duration_s == 2


def test_hash_ids_say_what_prompts_share(tmp_path):
    text = 'ts,i,o,ids\n0,600,5,1 2\n1,700,5,"[1, 3]"\n'
    workload = read(tmp_path, text, "arrival=ts,input=i,output=o,hash_ids=ids")
    assert workload.knows_prefixes
    assert [request.hash_ids for request in workload] == [(1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("arrival=ts,input=tokens,output=out", "line 2: there is no column 'tokens'; the columns are ts, in, out"),
        ("arrival=ts,input=in", "columns: output is missing; expected something like arrival=ts,input="),
        ("arival=ts", "columns: 'arival' is unknown; did you mean arrival?"),
        ("arrival=ts:h,input=in,output=out", "columns: 'h' is not a unit of ts; expected one of s, ms, us, ns"),
        ("arrival=ts,input,output=out", "columns: expected one input=COLUMN, not 'input'"),
    ],
)
def test_columns_that_are_not_there_or_not_understood_are_refused(tmp_path, columns, message):
    with pytest.raises(WorkloadError) as refused:
        read(tmp_path, "ts,in,out\n0,600,5\n", columns)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,many,5", "line 3: in must be a number, not 'many'"),
        ("soon,600,5", "line 3: ts must be a number, or a time such as 2026-01-31T18:15:46.68Z, not 'soon'"),
        ("1,600,-5", "line 3: out must be at least 0, not -5"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(tmp_path, row, message):
    with pytest.raises(WorkloadError) as refused:
        read(tmp_path, f"ts,in,out\n0,600,5\n{row}\n", "arrival=ts,input=in,output=out")
    assert message in str(refused.value)


def test_requests_that_failed_are_left_out_and_counted(tmp_path):
    workload = read(tmp_path, "ts,in,out\n0,600,5\n1,600,0\n", "arrival=ts,input=in,output=out")
    assert len(workload) == 1
    assert "rows without prompt or response tokens left out: 1" in workload.notes


FAILURES = (
    {"error": "timeout"},
    {"ts": 1, "usage": None},
    {"ts": 1, "usage": {"in": None, "out": None}},
    {"ts": 1, "usage": {"in": 600}},
)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("place", [0, 1])
def test_objects_of_failed_requests_are_left_out_wherever_they_stand(tmp_path, failure, place):
    rows = [{"ts": 0, "usage": {"in": 600, "out": 5}}]
    rows.insert(place, failure)
    workload = read(tmp_path, "\n".join(map(json.dumps, rows)), "arrival=ts,input=usage.in,output=usage.out")
    assert len(workload) == 1
    assert "rows without prompt or response tokens left out: 1" in workload.notes


def test_a_cell_of_a_length_may_be_empty(tmp_path):
    workload = read(tmp_path, "ts,in,out\n0,600,5\n1,600,\n", "arrival=ts,input=in,output=out")
    assert "rows without prompt or response tokens left out: 1" in workload.notes


def test_columns_and_a_format_are_one_too_many_and_an_empty_file_is_called_that(tmp_path):
    with pytest.raises(WorkloadError, match="leave out either --columns or --format azure"):
        read(tmp_path, csv_of(ROWS), format="azure")
    with pytest.raises(WorkloadError, match=r"log\.txt is empty"):
        read(tmp_path, " \n")

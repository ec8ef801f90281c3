import gzip
import json
import os

import pytest

from workloads import WorkloadError, formats, source

ROW = {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def refused(path, **options):
    with pytest.raises(WorkloadError) as caught:
        formats.read(path, **options)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_line_without_an_end_is_refused_before_it_is_held(tmp_path, format, monkeypatch):
    monkeypatch.setattr(source, "MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 1 << 16)
    bomb = tmp_path / "bomb.jsonl.gz"
    for start in (b'{"timestamp": 1, "hash_ids": [', b"[" + b" " * 9):
        bomb.write_bytes(gzip.compress(start + b"0" * (1 << 18)))
        assert "line 1: longer than 0 MiB" in refused(bomb, format=format)


@pytest.mark.parametrize("filler", [b" " * (1 << 16) + b"\n", b'{"a": "' + b"0" * (1 << 16) + b'"}\n'])
def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, filler):
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(json.dumps(ROW).encode() + b"\n" + filler * (2 * source.UNCHECKED_BYTES // len(filler)))
    format = "mooncake" if filler.isspace() else "weka"
    if format == "mooncake":
        assert "unpacks to more than 250 times its size; unpack it first" in refused(bomb, format=format)
    else:
        assert "line 1: block_size" not in refused(bomb, format=format)


def test_a_flood_of_blank_lines_is_refused(tmp_path):
    flood = tmp_path / "flood.jsonl.gz"
    flood.write_bytes(gzip.compress(json.dumps(ROW).encode() + b"\n" * (source.MAX_BLANK_LINES + 2)))
    assert "more than 1,000,000 blank lines in a row" in refused(flood)


def test_a_document_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path):
    bomb = tmp_path / "bomb.json.gz"
    with gzip.open(bomb, "wb") as file:
        file.write(b"[\n" + (b" " * (1 << 16) + b"\n") * (2 * source.UNCHECKED_BYTES >> 16) + b"]\n")
    assert "unpacks to more than 250 times its size" in refused(bomb, format="sharegpt")


def test_a_document_that_is_too_long_to_be_decoded_at_once_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MAX_DOCUMENT_BYTES", 1 << 20)
    file = tmp_path / "long.json"
    file.write_text("[\n" + "\n".join('{"conversations": []},' for _ in range(60_000)) + "{}]")
    assert "a JSON document of more than 1 MiB; convert it to JSON Lines" in refused(file)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("azure", CSV + "2024-01-01 00:00:00,1e18,1\n", "line 2: ContextTokens must be at most 10,000,000, not 1e+18"),
        ("azure", CSV + "2024-01-01 00:00:00,1e400,1\n", "line 2: ContextTokens must be a finite number, not '1e400'"),
        ("azure", CSV + "2024-01-01 00:00:00,nan,1\n", "ContextTokens must be a finite number"),
        ("azure", CSV + '2024-01-01 00:00:00,"' + "x" * 200_000 + '",1\n', "line 2: not CSV (field larger than"),
        ("azure", CSV.encode() + b"2024-01-01 00:00:00,\xff,1\n", "line 2: not CSV"),
        ("bailian", {"chat_id": 1, "timestamp": "1e999", "input_length": 1, "output_length": 1, "hash_ids": [1]}, "timestamp must be a finite number"),
        ("bailian", {"chat_id": 1, "timestamp": [1], "input_length": 1, "output_length": 1, "hash_ids": [1]}, "timestamp must be a number, not [1]"),
        ("vllm-custom", {"prompt": "a", "output_tokens": 10**12}, "output_tokens must be at most 10,000,000"),
        ("mooncake", ROW | {"output_length": 10**12}, "line 1: output_length must be at most 10,000,000"),
        ("mooncake", '{"hash_ids": ' + "[" * 100_000, "not readable as JSON"),
        ("openai-messages", '{"messages": ' + "[" * 100_000, "not readable as JSON"),
        ("vllm-custom", {"prompt": list(range(10_000))}, "line 1: prompt must be text, not [0, 1, 2"),
    ],
)  # fmt: skip
def test_numbers_and_nesting_without_bound_are_refused_in_a_line(tmp_path, name, text, problem):
    file = tmp_path / "bad"
    text = text if isinstance(text, str | bytes) else json.dumps(text) + "\n"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused(file, format=name)
    assert problem in message
    assert len(message) < 500


def test_packed_data_that_is_broken_is_refused(tmp_path):
    whole = gzip.compress(json.dumps(ROW).encode() * 2000)
    for broken in (whole[:100], whole[:40] + b"\xff" * 40 + whole[80:], b"plain"):
        file = tmp_path / "broken.jsonl.gz"
        file.write_bytes(broken)
        assert "cannot be read" in refused(file)


def test_a_pipe_is_refused_since_it_gives_what_it_holds_once(tmp_path):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    assert "is not a regular file; write its content to a file first" in refused(pipe)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_is_one_workload_with_its_files_in_order_of_name(tmp_path):
    write(tmp_path / "b.jsonl", ROW | {"timestamp": 3000})
    write(tmp_path / "a.jsonl", ROW | {"timestamp": 2000}, ROW | {"timestamp": 5000, "hash_ids": [0, 7]})
    (tmp_path / "README.md").write_text("what this is")
    (tmp_path / ".hidden.jsonl").write_text("rubbish")
    workload = formats.read(tmp_path)
    assert [request.arrival_s for request in workload] == [0.0, 1.0, 3.0]
    assert [request.hash_ids for request in workload] == [(0, 1), (0, 1), (0, 7)]  # parts of one trace
    assert workload.name == tmp_path.name


def test_csv_files_of_a_trace_follow_each_other_in_time(tmp_path):
    for name, day in (("b.csv", 1), ("a.csv", 2)):
        (tmp_path / name).write_text(f"{CSV}2024-05-0{day} 00:00:00+00:00,10,5\n")
    workload = formats.read([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert [request.arrival_s for request in workload] == [0.0, 86400.0]
    assert not set(workload.requests[0].hash_ids) & set(workload.requests[1].hash_ids)
    assert workload.name == "a.csv + 1 more"


def test_files_of_several_formats_are_not_one_workload(tmp_path):
    write(tmp_path / "a.jsonl", ROW)
    (tmp_path / "b.csv").write_text(CSV)
    assert "b.csv is azure; join files of different formats with dynabench workload merge" in refused(tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("")
    assert "has no .json, .jsonl, .csv, .parquet files, plain or .gz" in refused(tmp_path)


BURST = "Timestamp,Request tokens,Response tokens\n"


@pytest.mark.parametrize(
    ("format", "text", "problem"),
    [
        ("burstgpt", BURST + "0,10000000,1\n" * 3000, r"the first 205 prompts have 4,0..,... blocks of 512 tokens"),
        (
            "mooncake-delta",
            '{"session_id":"s","input_length":1,"output_length":9000000,"hash_ids":[1],"delay":1}\n' * 9,
            "line 3: the session's prompt has grown to 18,000,00. tokens",
        ),
        (
            "aiperf-multi",
            '{"session_id":"x","turns":[{"text":"hi","output_length":9000000},{"text":"x"},{"text":"y","output_length":9000000}]}',
            "turns\\[0\\]: the conversation has grown to more than 10,000,000 characters",
        ),
        ("aiperf-single", '{"texts":[5]}\n', "line 1: texts must be a list of texts"),
        ("aiperf-single", '{"texts":[{"contents":[null]}]}\n', "line 1: texts must be a list of texts"),
    ],
)
def test_short_lines_that_ask_for_gigabytes_or_nonsense_are_refused(tmp_path, format, text, problem):
    file = tmp_path / ("w.csv" if format == "burstgpt" else "w.jsonl")
    file.write_text(text)
    with pytest.raises(WorkloadError, match=problem):
        formats.read(file, format=format)


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    line = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]})
    (tmp_path / "a.jsonl").write_text(line)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as packed:
        packed.write(line)
    for paths in ([tmp_path / "a.jsonl"] * 2, [tmp_path]):
        with pytest.raises(WorkloadError, match=r"a\.jsonl.* is given twice"):
            formats.read(paths)


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(WorkloadError, match=r"a\.jsonl is empty"):
        formats.read(tmp_path / "a.jsonl")


def test_bytes_that_are_no_text_are_called_unrecognised(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"\x93\x0bwQ\rk\x02,\x1f\n")
    assert "the format is not recognised" in refused(tmp_path / "a.parquet")

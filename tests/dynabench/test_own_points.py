"""Points of one's own engines: what a validation contributes has no secrets, and narrows one's own model errors."""

import csv
import json
import os
import re

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.head import model_errors
from dynabench.experiment.model_error import OWN_POINTS, model_error
from dynabench.experiment.own_points import NUMBER, add_points, check, columns, read_points, words
from foundation.errors import UserError
from mocker.timing.config import TimingConfig
from tests.support.commands import dynabench

QWEN = ["--model", "Qwen/Qwen3-0.6B", "--gpu", "l40s"]
SECRETS = ("https://", "internal.example", "sk-", "/home/", "hunter2", "Tell me")
ROW = dict.fromkeys(columns(), "1") | {name: next(iter(known)) for name, known in words().items()}


@pytest.fixture
def real(tmp_path):
    """Records of a run, in a folder and with fields that nobody else is to see."""
    folder = tmp_path / "home" / "hunter2"
    folder.mkdir(parents=True)
    path = folder / "internal.example.jsonl"
    rows = [
        {
            "request_id": f"sk-{number}",
            "url": "https://internal.example/v1",
            "prompt": "Tell me",
            "arrival_time": 1.7e9 + number,
            "input_toks": 200,
            "output_toks": 20,
            "queued_ts": 100.0 + number,
            "first_token_ts": 100.03 + number,
            "last_token_ts": 100.09 + number,
        }
        for number in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def validate(real, *flags, out="out"):
    return dynabench("validate", "--real", real, *flags, "--block-size", 16, "--out", real.parent / out)


def test_a_validation_contributes_its_means_and_nothing_that_tells_who_measured(real, tmp_path):
    file = tmp_path / "points.csv"
    done = validate(real, *QWEN, "--engine-version", "0.32", "--contribute", file)
    assert done.returncode == 0, done.stderr
    assert f"added to {file}: 1 row" in done.stdout
    (row,) = read_points(file)
    assert {
        name: row[name] for name in ("backend", "backend_version", "model_path", "gpu", "precision", "isl", "osl")
    } == {
        "backend": "vllm",
        "backend_version": "0.32",
        "model_path": "Qwen/Qwen3-0.6B",
        "gpu": "l40s",
        "precision": "bf16",
        "isl": "200",
        "osl": "20",
    }
    assert (float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"])) == pytest.approx((30, 60 / 19), rel=1e-3)
    text = file.read_text()
    assert not [secret for secret in SECRETS if secret in text]
    known = {word for names in words().values() for word in names}
    for cells in list(csv.reader(text.splitlines()))[1:]:
        assert [cell for cell in cells if cell not in known and not NUMBER.fullmatch(cell)] == []


def test_points_of_a_file_from_before_kernels_could_be_named_ran_with_those_of_the_engine(tmp_path):
    file = tmp_path / "points.csv"
    add_points(file, [ROW])
    with file.open() as text:
        (row,) = csv.DictReader(text)
    assert row.pop("moe_backend") == "auto"
    file.write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    assert read_points(file) == [row | {"moe_backend": "auto"}]
    add_points(file, [ROW | {"moe_backend": "marlin"}])
    assert [row["moe_backend"] for row in read_points(file)] == ["auto", "marlin"]


def test_a_contribution_has_the_kernels_that_were_asked_for(real, tmp_path):
    flags = ["--model", "openai/gpt-oss-20b", "--gpu", "h100", "--moe-backend", "marlin"]
    assert validate(real, *flags, "--contribute", tmp_path / "points.csv").returncode == 0
    (row,) = read_points(tmp_path / "points.csv")
    assert row["moe_backend"] == "marlin"


def test_rows_are_added_to_a_file_of_points_and_to_no_other(real, tmp_path):
    file = tmp_path / "points.csv"
    for out in "ab":
        assert validate(real, *QWEN, "--contribute", file, out=out).returncode == 0
    assert len(read_points(file)) == 2
    file.write_text("name,secret\nhost,hunter2\n")
    refused = validate(real, *QWEN, "--contribute", file, out="c")
    assert refused.returncode == 2
    assert "the columns are not those of a file of points" in refused.stderr
    assert file.read_text() == "name,secret\nhost,hunter2\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--timing", "constant"], "give both, and no other step times"),
        ([*QWEN, "--speedup-ratio", 2], "leave out --speedup-ratio"),
        ([*QWEN, "--timed-as", "sglang"], "leave out --timed-as, so that times are those of vllm"),
        ([*QWEN, "--pipeline-parallel-size", 2], "no columns for pipelines and speculation"),
    ],
)
def test_what_a_row_could_not_say_is_refused_before_anything_is_measured(real, tmp_path, flags, message):
    refused = validate(real, "--contribute", tmp_path / "points.csv", *flags)
    assert refused.returncode == 2
    assert message in re.sub(r"\s+", " ", refused.stderr)
    assert not (tmp_path / "points.csv").exists()
    assert not (real.parent / "out").exists()


def test_a_mean_of_nothing_is_not_contributed(real, tmp_path):
    rows = [json.loads(line) for line in real.read_text().splitlines()]
    real.write_text("".join(json.dumps(row | {"last_token_ts": row["first_token_ts"]}) + "\n" for row in rows))
    refused = validate(real, *QWEN, "--contribute", tmp_path / "points.csv")
    assert refused.returncode == 2
    assert "a mean TPOT is 0, so there is nothing to contribute" in re.sub(r"\s+", " ", refused.stderr)
    assert not (tmp_path / "points.csv").exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(real):
    refused = validate(real, *QWEN, "--contribute", "nowhere/points.csv")
    assert refused.returncode == 2
    assert "there is no folder nowhere" in refused.stderr
    assert not (real.parent / "out").exists()


def test_a_model_in_a_folder_of_ones_own_is_not_named(real, tmp_path):
    (tmp_path / "hunter2.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    refused = validate(real, "--model", tmp_path / "hunter2.json", "--gpu", "l40s", "--contribute", tmp_path / "p.csv")
    assert "name a bundled model of the same shape" in re.sub(r"\s+", " ", refused.stderr)


@pytest.mark.parametrize("name", columns())
@pytest.mark.parametrize(
    "hidden", ["https://host/key", "/home/me", "sk-0123", "1e5000", "12345678901234567890", "1\n2"]
)
def test_no_column_takes_anything_but_known_words_and_numbers(name, hidden, tmp_path):
    check(ROW)
    with pytest.raises(ValueError, match=name) as refused:
        check(ROW | {name: hidden})
    assert hidden not in str(refused.value)
    with pytest.raises(ValueError, match=name):
        add_points(tmp_path / "points.csv", [ROW | {name: hidden}])
    assert not (tmp_path / "points.csv").exists()


def test_a_file_with_something_else_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "points.csv"
    add_points(file, [ROW])
    file.write_text(file.read_text().replace("own runs;", "https://host"))
    monkeypatch.setenv(OWN_POINTS, str(file))
    with pytest.raises(UserError, match=r"points.csv, line 2: silicon_data_source is not one of the names"):
        model_error(TimingConfig(model="Qwen/Qwen3-0.6B", gpu="l40s"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": "1.5"}, "tp_size is not a whole number"),
        ({"tp_size": "0"}, "tp_size is 0; expected more"),
        ({"isl": "0"}, "isl is 0; expected more"),
        ({"concurrency": "0"}, "concurrency is 0; expected more"),
        ({"ttft": "0"}, "ttft is 0; expected more"),
        ({"silicon_tpot_ms": "0.0000"}, "silicon_tpot_ms is 0; expected more"),
        ({"ttft": None}, "ttft is not a number"),
        ({"ttft": "١٢"}, "ttft is not a number"),
        ({"problem": None}, "problem is not one of the names"),
    ],
)
def test_what_has_no_ratio_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(ROW | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda lines: [lines[0], ",".join(lines[1].split(",")[: columns().index("tpot")])],
            "line 2: tpot is not a number",
        ),
        (lambda lines: [lines[0], lines[1] + ",1"], "line 2: the columns are not those"),
        (lambda lines: ["name,secret"], "points.csv: the columns are not those"),
        (lambda lines: [lines[0] + ",tpot", lines[1] + ",1"], "points.csv: the columns are not those"),
        (lambda lines: [], "points.csv: the columns are not those"),
    ],
)
def test_lines_that_are_too_short_or_too_long_are_refused(tmp_path, change, message):
    file = tmp_path / "points.csv"
    add_points(file, [ROW])
    file.write_text("\n".join(change(file.read_text().splitlines())))
    with pytest.raises(UserError, match=message):
        read_points(file)


def test_a_file_is_read_again_when_it_or_the_folder_changes(tmp_path, monkeypatch):
    timing = TimingConfig(model="Qwen/Qwen3-0.6B", gpu="l40s")
    case = {"model_path": "Qwen/Qwen3-0.6B", "gpu": "l40s", "system": "l40s", "precision": "bf16", "backend": "vllm"}
    monkeypatch.setenv(OWN_POINTS, "points.csv")
    monkeypatch.chdir(tmp_path)
    add_points(tmp_path / "points.csv", [ROW | case])
    counts = [model_error(timing).own]
    add_points(tmp_path / "points.csv", [ROW | case])
    os.utime("points.csv", ns=(1, 1))
    counts.append(model_error(timing).own)
    (tmp_path / "other").mkdir()
    add_points(tmp_path / "other" / "points.csv", [ROW | case] * 3)
    monkeypatch.chdir(tmp_path / "other")
    assert [*counts, model_error(timing).own] == [1, 2, 3]


def test_the_errors_of_several_arms_name_points_as_that_of_one_does(tmp_path, monkeypatch):
    case = {"model_path": "Qwen/Qwen3-0.6B", "gpu": "l40s", "system": "l40s", "precision": "bf16", "backend": "vllm"}
    add_points(tmp_path / "points.csv", [ROW | case])
    monkeypatch.setenv(OWN_POINTS, str(tmp_path / "points.csv"))
    timings = [TimingConfig(model=name, gpu="l40s") for name in ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-70B")]
    said = model_errors([Deployment(pools=(Pool(timing=timing),)) for timing in timings])
    assert "your own 1 point of Qwen/Qwen3-0.6B bfloat16 on vllm and l40s" in said
    assert all(model_error(timing).measured in said for timing in timings)


def test_ones_own_points_narrow_ones_own_model_error(tmp_path, monkeypatch):
    timing = TimingConfig(model="Qwen/Qwen3-0.6B-Base", gpu="l40s")  # of the same shape
    before = model_error(timing)
    case = {"model_path": "Qwen/Qwen3-0.6B", "gpu": "l40s", "system": "l40s", "precision": "bf16", "backend": "vllm"}
    means = {"silicon_ttft_ms": "33", "ttft": "30", "silicon_tpot_ms": "5.1", "tpot": "5"}
    files = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for file in files:
        add_points(file, [ROW | case | means | {"concurrency": str(count)} for count in (1, 4, 16, 64)])
    monkeypatch.setenv(OWN_POINTS, ":".join(map(str, files)))
    after = model_error(timing)
    assert str(after) == "your own 8 points of Qwen/Qwen3-0.6B bfloat16 on vllm and l40s"
    assert str(before).endswith("only a hint, because that is far away")
    for metric, ratio in (("ttft", 1.1), ("tpot", 1.02)):
        (low, high), (old_low, old_high) = (error.of(metric)[0].interval for error in (after, before))
        assert high / low < old_high / old_low / 1.2
        assert low < ratio < high

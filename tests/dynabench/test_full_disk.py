"""No room to write: one line, nothing half-written, and what was measured is kept where it can be."""

import json
import os
import resource
import shutil
import zipfile

import numpy as np
import pandas as pd
import pytest

from reports import charts, folder
from reports.folder import ReportError
from reports.record import table
from tests.dynabench.test_hostile import MANIFEST, result
from tests.support import commands


def dynabench(*arguments, largest=None, **options):
    """Run a command that can write files of so many bytes at most, which fails as a full disk does."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    return commands.dynabench(*arguments, preexec_fn=limit if largest is not None else None, **options)


@pytest.fixture
def temporary(tmp_path):
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


SIMULATE = ["simulate", "--max-requests", "20", "--router-mode", "kv", "--out"]


def test_runs_are_kept_where_the_report_does_not_fit(tmp_path, temporary):
    out = tmp_path / "x"
    done = dynabench(*SIMULATE, out, largest=30_000, env={"TMPDIR": str(temporary)})
    assert done.returncode == 2
    assert done.stderr == (
        f"dynabench: {out}: cannot be written (File too large); the runs are in {out}; make room and write "
        f"their report with: dynabench report {out}\n"
    )
    assert sorted(path.name for path in out.iterdir()) == ["experiment.json", "gaps.npz", "requests.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp", "x"]
    assert list(temporary.iterdir()) == []
    again = dynabench("report", out)
    assert again.returncode == 0, again.stderr
    assert (out / "report.html").exists()


def test_a_report_that_cannot_be_written_leaves_the_old_one_whole(tmp_path):
    out = tmp_path / "x"
    assert dynabench(*SIMULATE, out).returncode == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = dynabench("report", out, largest=30_000)
    assert (done.returncode, done.stderr) == (2, f"dynabench: {out}: the report cannot be written (File too large)\n")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_nothing_is_left_where_nothing_fits(tmp_path, temporary):
    done = dynabench(*SIMULATE, tmp_path / "x", largest=100, env={"TMPDIR": str(temporary)})
    assert done.returncode == 2
    assert done.stderr.endswith("cannot be written (File too large); no results are kept\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert list(temporary.iterdir()) == []


def test_runs_are_kept_elsewhere_when_their_folder_is_gone(tmp_path, temporary, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (tmp_path / "file").touch()
    run = result("a")
    with pytest.raises(ReportError, match=r"written \(File exists\); the runs are in .*dynabench report"):
        folder.write(tmp_path / "file" / "x", MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    (kept,) = temporary.iterdir()
    assert folder.read(kept)[1][0].arm == "a"


def test_runs_are_kept_when_the_user_does_not_wait_for_the_report(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    run = result("a")
    monkeypatch.setitem(charts.CHARTS, "timeline", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted before the report was written; the runs are in .*x; "):
        folder.write(tmp_path / "x", MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert folder.read(tmp_path / "x")[1][0].arm == "a"


def test_a_sweep_keeps_its_points(tmp_path):
    out = tmp_path / "x"
    sweep = [
        "sweep",
        "--max-requests",
        "20",
        "--jobs",
        "1",
        "--vary",
        "workers=1,2",
        "--router-mode",
        "kv",
        "--out",
        out,
    ]
    unnoted = dynabench(*sweep[:-1], tmp_path / "y", largest=4_000)
    assert (unnoted.returncode, unnoted.stderr) == (
        2,
        f"dynabench: {tmp_path / 'y'}: cannot be written (File too large)\n",
    )
    done = dynabench(*sweep, largest=16_000)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the points are kept: make room and run the same command again" in done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["points", "sweep.id"]
    again = dynabench(*sweep)
    assert (again.returncode, "2 of 2 points are already simulated" in again.stdout) == (0, True), again.stderr


@pytest.mark.parametrize("command", [["modes"], ["hardware"]])
def test_a_full_standard_output_is_one_line(command):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = dynabench(*command, stdout=full)
    assert (done.returncode, done.stderr) == (2, "dynabench: the output: No space left on device\n")


def spoil(path, how):
    if how == "zeros":
        path.write_bytes(bytes(100_000))
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_text(how)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in ("experiment.json", "gaps.npz", "requests.parquet") for how in ("zeros", "cut", "")),
        ("experiment.json", "[]"),
        ("experiment.json", '{"schema": "dynabench.experiment/2", "runs": [{"arm": 3}]}'),
        ("experiment.json", "[" * 100_000),
    ],
)
def test_a_spoilt_results_folder_is_named_in_one_line(tmp_path, name, how):
    run = result("a")
    out = tmp_path / "x"
    folder.write(out, MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    spoil(out / name, how)
    with pytest.raises(ReportError, match="x") as caught:
        folder.read(out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_workers", -1), ("num_workers", 10**9), ("wall_s", -1.0), ("limits", ["nonsense"]), ("workload", [1]),
        ("runs", []), ("bound_s", "x"),
    ],
)  # fmt: skip
def test_facts_of_a_run_that_cannot_be_are_refused(tmp_path, field, value):
    run = result("a")
    out = tmp_path / "x"
    facts = folder.run_facts(run)
    if field in facts:
        manifest = MANIFEST | {"runs": [facts | {field: value}]}
    else:
        manifest = MANIFEST | {"runs": [facts], field: value}
    folder.write(out, MANIFEST | {"runs": [facts]}, [run])
    (out / "experiment.json").write_text(json.dumps(json.loads((out / "experiment.json").read_text()) | manifest))
    with pytest.raises(ReportError, match="not a results folder"):
        folder.read(out)


@pytest.mark.parametrize(
    ("column", "value"),
    [("isl", "x"), ("sent_s", "x"), ("error", 5), ("last_token_s", np.inf), ("worker", 10**12), ("run", "a")],
)
def test_columns_that_hold_what_they_cannot_are_refused(tmp_path, column, value):
    run = result("a")
    out = tmp_path / "x"
    folder.write(out, MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    frame = pd.read_parquet(out / "requests.parquet").assign(**{column: value})
    frame.to_parquet(out / "requests.parquet", index=False)
    with pytest.raises(ReportError, match=f"not a results folder .*{column}"):
        folder.read(out)


def test_more_requests_than_memory_should_hold_are_not_read(tmp_path, monkeypatch):
    run = result("a")
    out = tmp_path / "x"
    folder.write(out, MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    monkeypatch.setattr(table, "MAX_ROWS", 1)
    with pytest.raises(ReportError, match="rows; at most 1 are read"):
        folder.read(out)


@pytest.mark.parametrize("name", ["experiment.json", "requests.parquet", "gaps.npz"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, name):
    run = result("a")
    out = tmp_path / "x"
    folder.write(out, MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(ReportError, match=f"{name} is missing or not a file"):
        folder.read(out)


def test_gaps_that_unpack_to_more_than_any_run_has_are_not_unpacked(tmp_path):
    run = result("a")
    out = tmp_path / "x"
    folder.write(out, MANIFEST | {"runs": [folder.run_facts(run)]}, [run])
    shutil.copy(out / "gaps.npz", tmp_path)
    with zipfile.ZipFile(out / "gaps.npz", "w", zipfile.ZIP_DEFLATED) as packed, packed.open("0.npy", "w") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 5)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(1 << 20))
    with pytest.raises(ReportError, match="not a results folder"):
        folder.read(out)

"""Results folders: what is written is read back, and so is what the last version wrote."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from reports import folder
from reports.folder import ReportError
from reports.record.pools import PoolUse, Use
from reports.record.records import COLUMNS
from reports.verdicts import headline
from tests.reports.runs import APART, FIELDS, apart, run
from tests.support.power import PowerCut

BEFORE = Path(__file__).parent / "version_2"
"""Written by the version before `Requests`: 12 requests, round-robin and kv; -1 stands for what is not known."""
MANIFEST = {
    "schema": folder.SCHEMA, "title": "t", "subtitle": "s", "command": "c", "limits": [], "workload": {"name": "w", "requests": 2},
}  # fmt: skip


def written(path, *runs):
    folder.write(path, MANIFEST | {"runs": [folder.run_facts(one) for one in runs]}, list(runs))
    return path


def test_runs_come_back_as_they_were(tmp_path):
    made = [
        run("a", worker=[None, 1], facts={"cpu_share": 0.5}),
        run("b", is_live=True, notes=("late",), repeat=1),
        apart("c"),
    ]
    _, found = folder.read(written(tmp_path / "x", *made))
    for before, after in zip(made, found, strict=True):
        for name in COLUMNS:
            assert getattr(after.requests, name).tolist() == getattr(before.requests, name).tolist()
        for name in FIELDS - {"requests", "gaps"}:
            assert getattr(after, name) == getattr(before, name)
        assert after.gaps.tolist() == before.gaps.tolist()


def test_results_survive_a_power_cut_as_a_whole_or_are_not_there(tmp_path, monkeypatch):
    disk = PowerCut(monkeypatch)
    made = [path for path in written(tmp_path / "x", run("a"), run("b")).rglob("*") if path.is_file()]
    assert {"experiment.json", "requests.parquet", "summary.json", "report.html"} <= {path.name for path in made}
    assert [path for path in disk.unsynced_when_renamed if "charts" not in path.parts] == []
    assert [path for path in made if not disk.is_kept(path)] == []
    assert disk.is_kept(tmp_path / "x")


def test_a_folder_of_the_last_version_is_read_and_its_minus_ones_are_unknown():
    manifest, (first, second) = folder.read(BEFORE)
    assert manifest["schema"] == "dynabench.experiment/2"
    assert first.requests.best_tokens.tolist() == [None] * 12  # round-robin follows no prefixes
    assert second.requests.best_tokens.count() == 12
    assert first.requests.preemptions.tolist() == [0] * 12


def test_a_folder_of_the_last_version_gives_the_summary_it_gave(tmp_path):
    shutil.copytree(BEFORE, tmp_path / "x")
    folder.rebuild(tmp_path / "x")
    before = json.loads((BEFORE / "summary.json").read_text())
    after = json.loads((tmp_path / "x" / "summary.json").read_text())
    del after["ranking"]  # it had none
    for arm in after["arms"].values():
        del arm["split"]  # it had none
        arm["remarks"] = []  # it had none
    for difference in (one for names in after["differences"]["kv"].values() for one in names.values() if one):
        del difference["base"]
    for name in ("verdict", "formulas"):  # their wording may change
        assert after.pop(name)
        del before[name]
    assert after == before


def test_a_folder_from_before_there_were_pools_is_read(tmp_path):
    out = written(tmp_path / "x", apart())
    manifest = json.loads((out / "experiment.json").read_text())
    for said in manifest["runs"]:
        del said["pools"], said["links"]
    (out / "experiment.json").write_text(json.dumps(manifest))
    table = parquet.read_table(out / "requests.parquet")
    late = ["second_token_s", *(name for name in COLUMNS if name.startswith(("prefill_", "decode_", "transfer_")))]
    parquet.write_table(table.drop_columns(late), out / "requests.parquet")
    _, (found,) = folder.read(out)
    assert (found.pools, found.links) == ((), ())
    arm = folder.rebuild(out)[1].arms["apart"]
    assert (arm.split.queue, arm.split.prefill, arm.split.transfer) == (1.0, 4.0, None)


def test_a_report_shows_where_ttft_goes_and_how_busy_pools_were(tmp_path):
    text = (written(tmp_path / "x", run("a"), apart("b")) / "report.html").read_text()
    assert "<h2>Where does TTFT go? (means)</h2>" in text
    assert 'id="ttft_split"' in text
    row = re.sub("<[^>]*>", " ", text[text.index("b: prefill<") :])
    assert row.split()[:7] == ["b:", "prefill", "2", "4", "25%", "/", "50%"]
    assert "<dt>TTST</dt><dd>second token - sent" in text


def test_a_report_of_workers_that_do_all_gains_nothing_but_the_parts_of_ttft(tmp_path):
    text = (written(tmp_path / "x", run("a")) / "report.html").read_text()
    assert "Where does TTFT go?" in text
    assert "TTST" not in text
    assert "How busy" not in text


def test_the_summary_has_pools_and_links_averaged_over_repeats(tmp_path):
    idle = PoolUse("prefill", "prefill", 2, 4, Use(0.0, 0.0))
    out = written(tmp_path / "x", apart("a"), apart("a", repeat=1, pools=(idle, APART[1])))
    arm = json.loads((out / "summary.json").read_text())["arms"]["a"]
    assert arm["pools"][0] == {
        "name": "prefill", "role": "prefill", "workers": 2, "gpus": 4, "busy": {"mean": 0.125, "highest": 0.25},
    }  # fmt: skip
    assert arm["links"][2]["egress"] == {"mean": 0.5, "highest": 0.5}
    assert arm["ttst"]["mean"] == 6.0


def test_first_bytes_that_the_last_version_took_for_admissions_are_none(tmp_path):
    out = written(tmp_path / "x", run(is_live=True, admitted_s=[1.0, 2.5], first_byte_s=[1.0, 3.0]), run("b"))
    first, second = folder.read(out)[1]
    assert first.requests.admitted_s.tolist() == [None, 2.5]
    assert second.requests.admitted_s.count() == 2


def test_hits_that_the_last_version_marked_as_untold_are_unknown(tmp_path):
    out = tmp_path / "x"
    shutil.copytree(BEFORE, out)
    manifest = json.loads((out / "experiment.json").read_text())
    manifest["runs"][0]["facts"]["tells_hits"] = 0.0
    (out / "experiment.json").write_text(json.dumps(manifest))
    first, second = folder.read(out)[1]
    assert (first.requests.cached_tokens.count(), second.requests.cached_tokens.count()) == (0, 12)
    assert "tells_hits" not in first.facts


def test_columns_that_the_last_version_left_out_are_unknown(tmp_path):
    out = tmp_path / "x"
    shutil.copytree(BEFORE, out)
    table = parquet.read_table(out / "requests.parquet").drop_columns(["planned_isl", "planned_osl"])
    parquet.write_table(table, out / "requests.parquet")
    assert folder.read(out)[1][0].requests.planned_osl.count() == 0


def test_another_version_is_refused_in_one_line(tmp_path):
    out = written(tmp_path / "x", run())
    manifest = json.loads((out / "experiment.json").read_text()) | {"schema": "dynabench.experiment/9"}
    (out / "experiment.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ReportError, match=r"x was written by another version \(schema dynabench.experiment/9, expected"
    ):
        folder.read(out)


def test_folders_of_two_versions_are_compared_and_written_as_one(tmp_path):
    whole = folder.read(BEFORE)[0]
    again = tmp_path / "again"
    folder.write(again, whole | {"schema": folder.SCHEMA}, folder.read(BEFORE)[1])
    manifest, runs = folder.combine([BEFORE, again])
    assert manifest["schema"] == folder.SCHEMA
    assert [one.arm for one in runs] == [
        "version_2/round-robin", "version_2/kv", "again/round-robin", "again/kv",
    ]  # fmt: skip


def test_a_comparison_names_the_layouts_and_chunks_of_all_its_folders(tmp_path):
    whole, runs = folder.read(BEFORE)
    for name, chunk in (("a", "512 tokens"), ("b", "8,192 tokens")):
        said = {"head": {"Layout": "2 workers", "Chunk": chunk}}
        folder.write(tmp_path / name, whole | {"schema": folder.SCHEMA} | said, runs)
    manifest, _ = folder.combine([tmp_path / "a", tmp_path / "b"])
    assert "Layout: 2 workers; Chunk: 512 tokens or 8,192 tokens." in headline.heading(manifest)


def test_a_comparison_names_the_step_times_of_each_folder_only_where_they_differ(tmp_path):
    whole, runs = folder.read(BEFORE)
    for name, step_times in (("a", "table"), ("b", "table"), ("c", "roofline"), ("unknown", None)):
        folder.write(tmp_path / name, whole | {"schema": folder.SCHEMA, "step_times": step_times}, runs)
    a, b, c, unknown = (tmp_path / name for name in ("a", "b", "c", "unknown"))
    assert folder.combine([a, b])[0]["step_times"] == "table"
    assert folder.combine([a, c])[0]["step_times"] == f"{a}: table; {c}: roofline"
    assert folder.combine([a, unknown])[0]["step_times"] == f"{a}: table"
    assert "<dt>Step times</dt><dd>table</dd>" in (a / "report.html").read_text()
    assert "<dt>Step times</dt>" not in (unknown / "report.html").read_text()


FIDELITY = {
    "arms": {
        "kv": {
            "deviations": [
                {
                    "metric": "ttft", "statistic": "mean", "real": 0.02, "simulated": 0.03, "error": 0.5, "spread": None,
                    "error_at_speed": 0.25, "name": "ttft.mean", "is_within_spread": False,
                },
            ],
            "distances": {"ttft": {"ks": 0.125, "wasserstein": 0.5}},
            "failed": [],
            "speed": {"prefill": 0.8, "decode": 0.5},
        }
    },
    "best": {},
}  # fmt: skip
"""As it was written when it was plain JSON."""


def test_a_comparison_with_real_runs_is_shown_again(tmp_path):
    out = tmp_path / "x"
    folder.write(out, MANIFEST | {"runs": [folder.run_facts(run())], "fidelity": FIDELITY}, [run()])
    folder.rebuild(out)
    text = (out / "report.html").read_text()
    assert "kv: simulated means are off by TTFT +50.0%." in text
    assert "TTFT 50.0% of the mean (Kolmogorov-Smirnov 0.125). On the real engine, " in text
    assert "took 25.0% more time than in the calibration with prefill and 100.0% more without" in text


def test_a_comparison_with_real_runs_that_is_none_is_refused_in_one_line(tmp_path):
    out = written(tmp_path / "x", run())
    manifest = json.loads((out / "experiment.json").read_text()) | {"fidelity": {"arms": {"kv": {}}, "best": {}}}
    (out / "experiment.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ReportError, match=r"x: not a results folder \(experiment.json: Object missing required field `deviations`"
    ):
        folder.rebuild(out)


def test_runs_of_other_workloads_are_not_compared(tmp_path):
    first, second = written(tmp_path / "x", run()), written(tmp_path / "y", run())
    manifest = json.loads((second / "experiment.json").read_text())
    manifest["workload"]["requests"] = 3
    (second / "experiment.json").write_text(json.dumps(manifest))
    with pytest.raises(ReportError, match="requests cannot be paired"):
        folder.combine([first, second])


def test_a_run_without_gaps_is_kept(tmp_path):
    _, (found,) = folder.read(written(tmp_path / "x", run(gaps=np.empty((0, 5)))))
    assert found.gaps.shape == (0, 5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A results folder with nothing wrong in it."""
    return written(tmp_path_factory.mktemp("whole") / "x", run())


@pytest.fixture
def spoilt(whole, tmp_path):
    """Copies that folder with another value in the first row of a column or in the first gap, or another manifest."""

    def copy(column=None, gap=None, **said):
        out = shutil.copytree(whole, tmp_path / "x")
        if column is not None:
            name, value = column
            table = parquet.read_table(out / "requests.parquet")
            values = pa.array([value, *table[name].to_pylist()[1:]])
            table = table.set_column(table.column_names.index(name), name, values)
            parquet.write_table(table, out / "requests.parquet")
        if gap is not None:
            rows = np.load(out / "gaps.npz")["0"]
            rows[0, gap[0]] = gap[1]
            np.savez(out / "gaps.npz", **{"0": rows})
        manifest = json.loads((out / "experiment.json").read_text()) | said
        (out / "experiment.json").write_text(json.dumps(manifest))
        return out

    return copy


@pytest.mark.parametrize("name", ["intended_s", "sent_s", "first_token_s", "last_token_s"])
@pytest.mark.parametrize("value", [1e308, -1e308, 2e12])
def test_a_time_of_no_run_is_refused_with_its_column(spoilt, name, value):
    with pytest.raises(ReportError, match=f"x: not a results folder .{name} in requests.parquet ranges from .* s"):
        folder.read(spoilt(column=(name, value)))


@pytest.mark.parametrize("place", range(5))
def test_gaps_of_no_run_are_refused(spoilt, place):
    with pytest.raises(ReportError, match=r"gaps.npz contains a value that is not a number or is beyond 1e\+12"):
        folder.read(spoilt(gap=(place, 1e308)))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"title": 3}, r"experiment.json: Expected `str`, got `int` - at `\$.title`"),
        ({"workload": {"name": "w"}}, r"missing required field `requests` - at `\$.workload`"),
        ({"bound_s": float("nan")}, r"at `\$.bound_s`"),
        ({"best_hit_shares": {"a": {"GPU memory": 1.5}}}, r"at `\$.best_hit_shares\[...\]\[...\]`"),
        ({"subtitle": "a\ud800"}, r"experiment.json contains '\\ud800', half a character"),
        ({"runs": [{"arm": "\ud800"}]}, "half a character"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused_with_its_field(spoilt, said, problem):
    with pytest.raises(ReportError, match=problem) as caught:
        folder.read(spoilt(**said))
    assert "\n" not in str(caught.value)


def test_a_run_without_a_request_has_a_report(tmp_path):
    out = written(tmp_path / "x", run("a"), run("b"))
    table = parquet.read_table(out / "requests.parquet")
    parquet.write_table(table.slice(0, 0), out / "requests.parquet")
    _, summary = folder.rebuild(out)
    assert [(arm.requests, arm.preemptions, arm.ttft.mean) for arm in summary.arms.values()] == [(0, 0, None)] * 2
    assert "No request succeeded" in (out / "report.html").read_text()


def test_the_folder_of_a_benchmark_is_refused_by_its_kind(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    with pytest.raises(
        ReportError, match=r"is the folder of a benchmark, not of runs; each load has its own in .*runs"
    ):
        folder.read(tmp_path)

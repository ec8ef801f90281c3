"""Arms, sweeps, gates, exports and trace tools, as a user runs them."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from matplotlib import image as mpl_image

from dynabench.arm import Settings
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.settings import ExperimentConfig
from mocker import EngineConfig
from reports.figures import metrics
from serving.router import RouterConfig
from tests.support import warm
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from tests.support.waiting import PATIENCE_S, until
from tests.support.workloads import conversations
from workloads import Request, Workload
from workloads.pacing import LoadConfig

SETTINGS = Settings(deployed("kv", 4))


def test_arms_are_every_combination_of_the_axes():
    experiment = ExperimentConfig(
        router_mode=("kv", "random"), vary=("num-gpu-blocks=100,200", "workers=2"), noise_floor=True
    )
    arms = comparison_of(experiment, SETTINGS).arms
    assert [arm.name for arm in arms] == [
        "kv, num_gpu_blocks 100", "kv, num_gpu_blocks 200", "random, num_gpu_blocks 100", "random, num_gpu_blocks 200",
        "kv, num_gpu_blocks 100 (A/A)",
    ]  # fmt: skip
    assert arms[3].settings.deployment.pools[0].mocker.num_gpu_blocks == 200
    assert {arm.settings.deployment.num_workers for arm in arms} == {2}
    assert arms[4].is_repeated


def test_sizes_that_an_engine_refuses_are_left_out_of_a_comparison(tmp_path):
    flags = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--router-mode", "kv", "--max-requests", "20")
    done = dynabench("simulate", *flags, "--vary", "tensor_parallel_size=3,1,2", "--out", tmp_path / "some")
    assert done.returncode == 0, done.stderr
    assert "left out: tensor_parallel_size 3 (model Qwen/Qwen3-8B: 32 attention heads cannot be divided" in done.stdout
    arms = json.loads((tmp_path / "some" / "summary.json").read_text())["arms"]
    assert list(arms) == ["tensor_parallel_size 1", "tensor_parallel_size 2"]
    done = dynabench("simulate", *flags, "--vary", "tensor_parallel_size=3", "--out", tmp_path / "none")
    assert (done.returncode, "32 attention heads cannot be divided over tensor_parallel_size 3" in done.stderr) == (
        2,
        True,
    )


def test_an_arm_whose_engines_cannot_hold_a_request_is_left_out_and_the_rest_goes_on(tmp_path):
    flags = ("--router-mode", "kv", "--router-mode", "random", "--max-requests", "20", "--noise-floor")
    done = dynabench("simulate", *flags, "--vary", "num_gpu_blocks=20,2000", "--out", tmp_path / "some")
    assert done.returncode == 0, done.stderr
    assert list(json.loads((tmp_path / "some" / "summary.json").read_text())["arms"]) == [
        "kv, num_gpu_blocks 2000",
        "random, num_gpu_blocks 2000",
    ]
    said = [f"{mode}, num_gpu_blocks 20 (chat.jsonl: request 0 has " for mode in ("kv", "random")]
    report = (tmp_path / "some" / "report.html").read_text()
    for one in said:
        assert f"left out: {one}" in done.stdout
        assert f"Left out: {one}" in report
    done = dynabench("simulate", *flags, "--vary", "num_gpu_blocks=20,21", "--out", tmp_path / "none")
    assert (done.returncode, "more than the 1216 that an engine can hold" in done.stderr) == (2, True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("vary", "problem"),
    [
        ("colour=red", "colour is not a setting that can be varied; expected one of router_mode, workers, "),
        ("workers", "is not understood; expected NAME=VALUE"),
        ("workers=2,two", "workers is 'two'; expected a whole number from 0 to 10000"),
        ("workers=x", "workers is 'x'; expected a whole number from 0 to 10000"),
        ("block_size=64,64", "contains a value twice"),
        ("block_size=0", "block_size is '0'; expected a whole number of at least 1"),
        ("timing=slow", "timing is 'slow'; expected one of polynomial"),
    ],
)
def test_an_axis_that_makes_no_sense_is_one_line(vary, problem, tmp_path):
    done = dynabench("simulate", "--vary", vary, "--out", tmp_path / "x")
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def workload():
    return conversations(300, rate=12)


def simulated(workload, mode="kv", load=None, **engine):
    return simulate_pool(
        workload, mode=mode, engine=EngineConfig(**({"num_gpu_blocks": 800} | engine)), router=RouterConfig(), workers=3, seed=1,
        load=load or LoadConfig(),
    )  # fmt: skip


def test_a_closed_loop_in_virtual_time_keeps_so_many_in_flight(workload):
    columns = simulated(workload, load=LoadConfig(concurrency=7)).requests
    for time_ in columns.sent_s[::10]:
        assert ((columns.sent_s <= time_) & (columns.done_s > time_)).sum() <= 7
    assert columns.intended_s[:7].tolist() == [0.0] * 7
    ends = set(columns.done_s.tolist())
    assert all(time_ in ends for time_ in columns.intended_s[7:].tolist())


def test_sessions_think_after_their_answers_in_virtual_time():
    rows = [Request(0.0, 600, 20, (0, n + 1), "s", (n - 1,) if n else (), 1.5 if n else 0.0) for n in range(5)]
    columns = simulated(Workload("w", 512, rows)).requests
    assert (columns.intended_s[1:] - columns.done_s[:-1]).tolist() == pytest.approx([1.5] * 4)


def test_the_warm_up_does_not_count_in_virtual_time(workload):
    whole, part = simulated(workload), simulated(workload, load=LoadConfig(warmup_s=10.0))
    for name in ("first_token_s", "last_token_s", "worker"):
        assert (getattr(whole.requests, name) == getattr(part.requests, name)).all()
    kept = part.measured.requests
    assert kept.intended_s.min() >= 10.0
    before, after = metrics.TokenGaps(whole.gaps).count, metrics.TokenGaps(part.gaps).count
    late = whole.requests.osl[whole.requests.intended_s >= 10.0].sum()
    assert late * 0.95 < after < before


@pytest.mark.parametrize(
    "mode", ["llumnix+late(4096)", "marginal+late(2048)+wspt(0.1)", "lmetric+eps(5)", "kv+stale(250)", "kv+predict(5)"]
)
def test_additions_lose_no_request(workload, mode):
    columns = simulated(workload, mode).requests
    assert (columns.done_s > 0).all()
    assert (columns.admitted_s >= columns.intended_s).all()


def test_rollouts_try_every_worker_and_leave_no_trace(workload):
    few = Workload("w", 512, workload.requests[:40])
    runs = {mode: simulated(few, mode).requests for mode in ("oracle-rollout", "round-robin")}
    waited = {mode: (columns.done_s - columns.intended_s).mean() for mode, columns in runs.items()}
    assert waited["oracle-rollout"] < waited["round-robin"]
    assert (runs["oracle-rollout"].first_token_s > runs["oracle-rollout"].intended_s).all()


def test_the_head_of_a_search_names_the_workers_it_found_and_the_step_times(tmp_path):
    flags = ("--max-requests", "20", "--jobs", "1", "--router-mode", "kv", "--slo", "ttft.mean <= 10s")
    done = dynabench("sweep", *flags, "--find", "workers", "--out", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chat.jsonl: kv: 20 requests on 1 simulated engine, in virtual time;")
    assert "\nSimulated step times: generic: a polynomial of no particular model or GPU." in done.stdout


def test_what_sweeps_found_is_one_document(tmp_path):
    flags = ("--max-requests", "60", "--jobs", "1", "--router-mode", "kv")
    done = dynabench("sweep", *flags, "--out", tmp_path / "a", "--json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    assert first["folder"] == str(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "again")
    both = dynabench("compare", tmp_path / "a", tmp_path / "again", "--out", tmp_path / "b", "--json")
    assert both.returncode == 0, both.stderr
    found = json.loads(both.stdout)
    assert found["folder"] == str(tmp_path / "b")
    assert [point["throughput"] for point in found["summary"]["points"]] == [
        first["summary"]["points"][0]["throughput"]
    ] * 2
    beside = dynabench("compare", tmp_path / "a", tmp_path / "a", "--markdown")
    assert (beside.returncode, "--markdown applies to runs" in beside.stderr) == (2, True)
    mixed = dynabench("compare", tmp_path / "a", tmp_path)
    assert (mixed.returncode, f"{tmp_path} is not a sweep, but another folder is" in mixed.stderr) == (2, True)


def test_what_simulate_and_compare_found_is_one_document(tmp_path):
    done = dynabench("simulate", "--max-requests", "60", "--jobs", "1", "--out", tmp_path / "x", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("folder") == str(tmp_path / "x")
    assert found == json.loads((tmp_path / "x" / "summary.json").read_text())
    assert "Arms compared" in done.stderr
    again = dynabench("compare", tmp_path / "x", "--json")
    assert json.loads(again.stdout)["folder"] is None
    assert list(json.loads(again.stdout)["arms"]) == list(found["arms"])


def test_a_sweep_is_resumed_and_makes_one_table(tmp_path):
    arguments = [
        "sweep",
        "--max-requests",
        "60",
        "--vary",
        "num_gpu_blocks=500,2000",
        "--jobs",
        "1",
        "--out",
        tmp_path / "s",
    ]
    first = dynabench(*arguments)
    assert first.returncode == 0, first.stderr
    points = sorted((tmp_path / "s" / "points").iterdir())
    assert len(points) == 4
    points[0].unlink()
    times = {point.name: point.stat().st_mtime_ns for point in points[1:]}
    again = dynabench(*arguments)
    assert "3 of 4 points are already simulated" in again.stdout
    assert {point.name: point.stat().st_mtime_ns for point in points[1:]} == times
    summary = json.loads((tmp_path / "s" / "sweep.json").read_text())["summary"]
    assert len(summary["rows"]) == 4
    assert (tmp_path / "s" / "table.csv").read_text().count("\n") == 5
    assert (tmp_path / "s" / "report.html").read_text().count("<figure") == 3
    other = dynabench(*arguments, "--seed", "3")
    assert (other.returncode, "contains another sweep: " in other.stderr) == (2, True)


def test_a_search_finds_where_the_limit_is_missed(tmp_path):
    done = dynabench(
        "sweep", "--find", "rate_scale", "--slo", "ttft.p90 <= 150ms", "--router-mode", "kv", "--low", "0.5", "--high", "8",
        "--precision", "0.2", "--max-requests", "150", "--jobs", "1", "--out", tmp_path / "s",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "s" / "sweep.json").read_text())["summary"]["points"]
    assert row["met"] < row["missed_at"] <= row["met"] * 1.2 + 1e-6
    assert row["point"]["ttft_sched"]["p90"] <= 0.150
    missing = dynabench("sweep", "--find", "rate_scale", "--out", tmp_path / "t")
    assert (missing.returncode, "set them with --slo or --slo-preset" in missing.stderr) == (2, True)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("r") / "x"
    assert dynabench("simulate", "--max-requests", "200", "--jobs", "1", "--out", out).returncode == 0
    return out


def test_a_gate_decides_the_exit_code(results):
    passed = dynabench("compare", results, "--fail-if", "ttft.mean > +50%", "--fail-if", "throughput < -10%")
    assert passed.returncode == 0, passed.stdout
    failed = dynabench("compare", results, "--fail-if", "e2e.p50 > 1ms", "--markdown")
    assert failed.returncode == 1
    assert "**Failed**: e2e.p50 > 1ms: kv is at" in failed.stdout
    assert "| TTFT mean (ms) |" in failed.stdout
    bad = dynabench("compare", results, "--fail-if", "speed > 1")
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("to", "start"), [("csv", b"arm,repeat"), ("parquet", b"PAR1"), ("json", b"{"), ("llm-d", b"[")]
)
def test_every_form_of_export_is_written_once(results, to, start, tmp_path):
    out = tmp_path / "file"
    assert dynabench("export", results, out, "--to", to).returncode == 0
    assert out.read_bytes().startswith(start)
    assert dynabench("export", results, out, "--to", to).returncode == 2  # it exists


def test_charts_are_exported_as_pictures(results, tmp_path):
    out = tmp_path / "pictures"
    done = dynabench("export", results, out, "--to", "png")
    assert done.returncode == 0, done.stderr
    pictures = sorted(out.glob("*.png"))
    assert done.stdout.splitlines() == [str(picture) for picture in pictures]
    assert [picture.stem for picture in pictures] == sorted(chart.stem for chart in results.glob("charts/*.svg"))
    for picture in pictures:
        pixels = mpl_image.imread(picture)
        assert pixels.shape[1] in (2 * (552 + 16), 2 * (1120 + 16))
        assert pixels.min() < 0.3 < pixels.max() == 1  # ink on white
    again = dynabench("export", results, out, "--to", "png")
    assert (again.returncode, "exists" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("svg", "problem"),
    [
        (None, "has no charts"),
        ("<svg/>", "is not a dynabench chart"),
        ('<svg viewBox="0 0 9e9 99999"/>', "is not a dynabench chart"),
    ],
)
def test_what_is_no_chart_is_not_drawn(svg, problem, tmp_path):
    if svg is not None:
        (tmp_path / "charts").mkdir()
        (tmp_path / "charts" / "a.svg").write_text(svg)
    done = dynabench("export", tmp_path, tmp_path / "out", "--to", "png")
    assert (done.returncode, problem in done.stderr, done.stderr.count("\n")) == (2, True, 1)
    assert not (tmp_path / "out").exists()


def test_the_report_rebuilt_as_another_tool_would_define_it(results):
    done = dynabench("report", results, "--metrics-like", "guidellm")
    assert "As guidellm would report it" in done.stdout


def test_a_workload_is_made_converted_fitted_and_merged_by_commands(tmp_path):
    trace, other, spec, like = (
        tmp_path / name for name in ("t.jsonl", "t.bailian.jsonl.gz", "spec.json", "like.jsonl")
    )
    assert dynabench("workload", "synth", trace, "--requests", "200", "--turns", "3").returncode == 0
    done = dynabench("workload", "convert", trace, other, "--to", "bailian", "--thin", "0.5", "--seed", "2")
    assert done.returncode == 0, done.stderr
    assert "hit share, unlimited cache" in done.stdout
    assert "bailian" in json.loads(dynabench("workload", "inspect", other, "--json").stdout)["notes"][0]
    lossy = dynabench("workload", "convert", other, tmp_path / "m.jsonl", "--to", "mooncake")
    assert (lossy.returncode, "accept it with --lossy" in lossy.stderr) == (2, True)
    assert dynabench("workload", "fit", trace, spec).returncode == 0
    assert dynabench("workload", "synth", like, "--spec", spec).returncode == 0
    assert dynabench("workload", "merge", trace, like, "--out", tmp_path / "both.jsonl").returncode == 0
    assert json.loads(dynabench("workload", "inspect", tmp_path / "both.jsonl", "--json").stdout)["requests"] == 400
    assert "openai-batch" in dynabench("workload", "formats").stdout


def test_ctrl_c_in_a_parallel_simulation_leaves_no_process(tmp_path):
    out = tmp_path / "x"
    command = [
        sys.executable,
        "-m",
        "dynabench",
        "sweep",
        "--vary",
        # Far more points than are done before the signal, however slow this machine is.
        "rate_scale=" + ",".join(str(number) for number in range(1, 201)),
        "--repeats",
        "2",
        "--jobs",
        "2",
        "--out",
        str(out),
    ]
    process = warm.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: list(out.glob("points/*.json")), process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr, stderr
    assert "interrupted" in stdout


@pytest.mark.parametrize("kind", ["plan", "sweep"])
def test_the_folder_of_a_plan_or_a_sweep_is_refused_by_its_kind(tmp_path, kind):
    (tmp_path / f"{kind}.json").write_text("{}")
    done = dynabench("report", tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} is the folder of a {kind}, not of runs; for runs of " in done.stderr.replace("\n", " ")

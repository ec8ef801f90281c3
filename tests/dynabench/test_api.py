"""`import dynabench as db`: the commands as functions, and results as objects."""

import ast
import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import matplotlib as mpl
import pandas as pd
import polars
import pytest

import dynabench as db
from dynabench.api.wording import in_python
from dynabench.cli.app import main
from dynabench.cli.flags import VirtualFlags
from dynabench.deployment.file import as_plain
from dynabench.deployment.flags import PoolConfig
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig
from dynabench.rehearsal.all_seeds import Failed, Found
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.run import Rehearsal
from serving.planner.policies.policy import Proposal
from serving.router import Policy
from workloads import describe

mpl.use("agg")

BLOCK = """
import dynabench as db
trace = db.Workload.read("trace.jsonl.gz")            # or .synth(...), .from_frame(df, arrival="ts", input="in", output="out")
fleet = db.Deployment(model="meta-llama/Llama-3.1-70B", gpu="h100", workers=8, router_mode="kv")
result = db.simulate(trace, fleet, vary={"router_mode": ["round-robin", "kv", my_mode]}, slo=["ttft.p99 <= 2s"])
result                                                # a table and the verdict, as HTML in a notebook, as text in a terminal
result.requests                                       # pandas: one row a request and arm; .steps, .workers, .events
result.compare("kv", to="round-robin").ttft.p90       # value, interval
result.plot.ttft_tails()                              # matplotlib axes, the report's own charts
"""
"""As issue 47 prints it, without its last line."""


def my_mode(candidates):
    """Cost tokens to compute, and 200 more for each request in flight."""
    return [
        tokens + 200 * requests
        for tokens, requests in zip(candidates.prefill_tokens, candidates.num_requests, strict=True)
    ]


def planned(seen):
    """Two workers in each pool."""
    return {name: Proposal(2, "two") for name in seen.pools}


class First(Policy):
    """Always the first worker."""

    def costs(self, candidates):
        return [float(place) for place in range(len(candidates.num_requests))]


@pytest.fixture(scope="module")
def trace():
    return db.Workload.synth("small", requests=120, rate=8, isl=400, osl=20)


@pytest.fixture(scope="module")
def result(trace):
    return db.simulate(trace, db.Deployment(workers=3), vary={"router_mode": ["round-robin", "kv", my_mode]})


def test_the_block_of_the_issue_runs_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    db.Workload.synth(requests=400, rate=6, isl=800, osl=40).write("trace.jsonl.gz")
    names = {"my_mode": my_mode}
    exec(BLOCK, names)  # as a cell does
    found = names["result"]
    assert list(found.arms) == ["round-robin", "kv", "my_mode"]
    assert len(found.requests) == 1200
    estimate = found.compare("kv", to="round-robin").ttft.p90
    assert estimate.interval[0] <= estimate.value <= estimate.interval[1]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl.gz"], "nothing else is written"


def test_importing_it_takes_little_time_and_loads_nothing_heavy():
    program = "import sys, time; before = time.process_time(); import dynabench; print(time.process_time() - before, *sys.modules)"
    used_s, *modules = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(used_s) < 0.15
    assert not set(modules) & {"matplotlib", "aiohttp", "fastapi", "numpy", "pandas", "rich"}


def test_simulating_loads_neither_networking_nor_pandas():
    program = "import sys, dynabench as db; db.simulate(db.Workload.synth(requests=5), jobs=1); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not set(modules) & {"matplotlib", "aiohttp", "fastapi", "pandas", "IPython"}


def test_nothing_is_printed(trace, capfd):
    db.simulate(trace, vary={"router_mode": ["random", "kv"]})
    assert capfd.readouterr() == ("", "")


def test_all_public_names_exist_and_are_documented():
    assert set(db.__all__) <= set(dir(db))
    assert all(getattr(db, name).__doc__ for name in db.__all__)
    page = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
    assert {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")} == set(db.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = db.simulat


# Deployments


def test_a_deployment_is_what_the_flags_of_the_command_describe():
    flags = VirtualFlags(pool=PoolConfig(workers=3)).deployment(None)
    made = db.Deployment(workers=3, router_mode=flags.router_mode)
    assert as_plain(made) | {"frontend": None} == as_plain(flags) | {"frontend": None}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"workers": 2, "num_gpu_blocks": 500, "kv_overlap_score_weight": 2.0},
        {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h100",
            "prefill_workers": 1,
            "decode_workers": 2,
            "decode_gpu": "a100",
        },
        {"pools": {"new": {"replicas": 2}, "old": {"replicas": 3}}, "num_gpu_blocks": 700},
        {"router": {"router_temperature": 0.5}, "planner": {"planner": "hpa"}},
    ],
)
def test_a_deployment_survives_the_way_through_yaml(settings, tmp_path):
    made = db.Deployment(**settings)
    assert db.Deployment.from_yaml(made.to_yaml()) == made
    made.to_yaml(tmp_path / "d.yaml")
    assert db.Deployment.from_yaml(tmp_path / "d.yaml") == made
    assert eval(repr(made), {"Deployment": db.Deployment}) == made


def test_short_keywords_set_the_settings_of_pools_sections_and_roles():
    made = db.Deployment(
        prefill_workers=2, decode_workers=3, num_gpu_blocks=900, prefill_max_num_seqs=7, kv_store_size=4
    )
    assert {pool.name: (pool.role, pool.replicas) for pool in made.pools} == {
        "prefill": ("prefill", 2),
        "decode": ("decode", 3),
    }
    assert [pool.mocker.num_gpu_blocks for pool in made.pools] == [900, 900]
    assert made.pool("prefill").mocker.max_num_seqs == 7 != made.pool("decode").mocker.max_num_seqs
    assert made.kv_store.kv_store_size == 4


def test_a_setting_whose_own_name_begins_with_a_role_is_that_setting():
    made = db.Deployment(decode_speedup_ratio=2.0, prefill_schedule_interval=2)
    (pool,) = made.pools
    assert pool.role == "aggregated"
    assert (pool.timing.decode_speedup_ratio, pool.mocker.prefill_schedule_interval) == (2.0, 2)
    both = db.Deployment(prefill_workers=1, decode_workers=1, decode_decode_speedup_ratio=2.0)
    assert [pool.timing.decode_speedup_ratio for pool in both.pools] == [1.0, 2.0]


def test_a_worker_has_the_gpus_that_its_model_needs_for_its_context_unless_they_are_set():
    big = {"model": "meta-llama/Llama-3.1-70B", "gpu": "h100"}
    assert db.Deployment(**big).pools[0].tensor_parallel_size == 4
    assert db.Deployment(**big, tensor_parallel_size=2).pools[0].tensor_parallel_size == 2
    with pytest.raises(db.UserError, match="raise tensor_parallel_size"):
        db.Deployment(**big, tensor_parallel_size=1)


@pytest.mark.parametrize(
    ("settings", "pool"),
    [
        ({"prefill_tensor_parallel_size": 1, "decode_workers": 2}, "prefill"),
        ({"pools": {"small": {"tensor_parallel_size": 1}, "free": None}}, "small"),
    ],
)
def test_a_worker_of_one_pool_has_the_gpus_that_are_set_there(settings, pool):
    with pytest.raises(db.UserError, match=f"pools.{pool}: .*raise tensor_parallel_size"):
        db.Deployment(model="meta-llama/Llama-3.1-70B", gpu="h100", **settings)


def test_a_deployment_can_be_changed_by_dataclasses_replace():
    made = dataclasses.replace(db.Deployment(workers=2), router_mode="kv")
    assert made == db.Deployment(workers=2, router_mode="kv")
    assert dataclasses.replace(made, router_mode=First) == db.Deployment(workers=2, router_mode=First)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wokers": 3}, "wokers is unknown; did you mean workers?"),
        ({"gpu": "h100"}, "pools.worker: gpu h100 needs a model"),
        ({"router_mode": "vk"}, "router_mode 'vk' is unknown"),
        ({"workers": -1}, "pools.worker.replicas is -1; expected"),
        ({"pools": {}}, "pools is empty"),
    ],
)
def test_a_wrong_setting_of_a_deployment_is_one_line(settings, message):
    with pytest.raises(db.UserError, match=re.escape(message)):
        db.Deployment(**settings)


# Workloads


def test_a_workload_shows_its_mean_lengths_prefixes_included(monkeypatch):
    monkeypatch.setattr(describe, "reuse_of", None)  # walks every block, which is too slow for a `repr`
    made = db.Workload.synth(requests=100, isl=1500, isl_distribution="constant", osl=64, osl_distribution="constant")
    assert ": 100 requests in " in repr(made)
    assert repr(made).endswith("; mean ISL 3,548 tokens; mean OSL 64 tokens>")


def test_a_frame_becomes_a_workload():
    frame = pd.DataFrame({"ts": [1000, 3000, 2000], "in": [10, 30, 20], "out": [1, 3, 2]})
    made = db.Workload.from_frame(frame, arrival="ts:ms", input="in", output="out", name="log")
    assert [(r.arrival_s, r.input_length, r.output_length) for r in made] == [(0, 10, 1), (1, 20, 2), (2, 30, 3)]
    also = db.Workload.from_frame(polars.from_pandas(frame), arrival="ts:ms", input="in", output="out", name="log")
    assert list(also) == list(made)
    times = frame.assign(ts=pd.to_datetime(frame.ts, unit="ms"))
    assert list(db.Workload.from_frame(times, arrival="ts", input="in", output="out")) == list(made)


@pytest.mark.parametrize(
    ("frame", "columns", "message"),
    [
        (pd.DataFrame({"ts": [1], "in": [1]}), {}, "row 1 of the frame: there is no column 'out'"),
        (pd.DataFrame({"ts": ["x"], "in": [1], "out": [1]}), {}, "row 1 of the frame: ts must be a number, or a time"),
        ("trace.csv", {}, "expected a data frame of pandas, polars or Arrow, not 'trace.csv'"),
        (
            pd.DataFrame({"ts": [1], "in": [1], "out": [1]}),
            {"sesion": "s"},
            "columns: 'sesion' is unknown; did you mean session?",
        ),
    ],
)
def test_a_wrong_frame_is_one_line(frame, columns, message):
    with pytest.raises(db.UserError, match=re.escape(message)):
        db.Workload.from_frame(frame, arrival="ts", input="in", output="out", **columns)


def test_a_workload_can_be_written_and_read(trace, tmp_path):
    trace.write(tmp_path / "t.jsonl.gz")
    assert list(db.Workload.read(tmp_path / "t.jsonl.gz")) == list(trace)
    assert len(db.Workload.read()) == 1200, "the bundled one"
    assert trace.describe().requests == 120
    with pytest.raises(db.UserError, match="requsts is unknown; did you mean requests"):
        db.Workload.synth(requsts=3)


# Results


def test_the_api_and_the_command_find_the_same(trace, tmp_path, monkeypatch):
    trace.write(tmp_path / "t.jsonl")
    out = tmp_path / "out"
    words = [
        "simulate",
        str(tmp_path / "t.jsonl"),
        "--workers",
        "3",
        "--router-mode",
        "random",
        "--router-mode",
        "kv",
        "--slo",
        "ttft <= 1s",
    ]
    monkeypatch.setattr(sys, "argv", ["dynabench", *words, "--out", str(out)])
    with pytest.raises(SystemExit):
        main()
    ours = db.simulate(trace, db.Deployment(workers=3), vary={"router_mode": ["random", "kv"]}, slo="ttft <= 1s")
    theirs = db.load(out)
    assert ours.summary == theirs.summary
    same = ours.requests.drop(columns="arm").equals(theirs.requests.drop(columns="arm"))
    assert same


def test_frames_have_units_and_the_manifest(result):
    frame = result.requests
    assert len(frame) == 3 * 120
    assert frame.groupby("arm", sort=False).ttft_sched.mean().tolist() == pytest.approx(
        [a.ttft_sched.mean for a in result.arms.values()]
    )
    assert frame.attrs["manifest"]["workload"]["name"] == "small"
    assert frame.attrs["units"]["ttft"] == "s"
    assert frame[frame.arm == "kv"].attrs["manifest"] == result.manifest
    for name in ("requests", "steps", "workers", "events"):
        assert list(getattr(result, name).columns) == list(result.columns.loc[name].index), name
    assert result.columns.loc[("requests", "isl")].tolist() == [
        "tokens",
        "prompt length as the server reported it; otherwise as in the workload",
    ]


def test_the_other_frames_agree_with_the_requests(result):
    requests, steps, workers, events = result.requests, result.steps, result.workers, result.events
    tokens = (requests.osl - requests.first_chunk_tokens).groupby(requests.arm, sort=False).sum()
    assert (steps.steps * steps.sequences).groupby(steps.arm, sort=False).sum().tolist() == tokens.tolist()
    assert workers.groupby("arm", sort=False).requests.sum().tolist() == [120] * 3
    assert workers.output_tokens.sum() == requests.osl.sum()
    assert (events.event == "first_token").sum() == 360
    assert events.groupby(["arm", "repeat"]).time_s.is_monotonic_increasing.all()


def test_polars_reads_the_tables_through_arrow(result):
    assert polars.from_arrow(result.arrow("requests")).shape == result.requests.shape
    with pytest.raises(db.UserError, match="there is no table 'stepz'"):
        result.arrow("stepz")


def test_arms_are_compared_with_any_other(result):
    first = result.compare("kv")
    assert (first.to, first.ttft.mean.value) == (
        "round-robin",
        result.summary.differences["kv"]["ttft_sched"]["mean"].mean,
    )
    there, back = result.compare("kv", to="my_mode").e2e.mean, result.compare("my_mode", to="kv").e2e.mean
    assert there.value == pytest.approx(-back.value)
    assert "TTFT p90: " in repr(first)
    assert "<td>" in first._repr_html_()
    for arms, message in (
        (("vk",), "there is no arm 'vk'; expected one of round-robin, kv, my_mode"),
        (("kv", "kv"), "with itself"),
    ):
        with pytest.raises(db.UserError, match=message):
            result.compare(*arms)


def test_a_result_is_shown_as_text_and_as_html(result):
    assert "Arms compared" in repr(result)
    assert result.verdict.split(".")[0] in " ".join(repr(result).split())
    html = result._repr_html_()
    assert "<th>my_mode</th>" in html
    assert "--all-metrics" not in repr(result) + html


def test_charts_are_axes_of_matplotlib(result):
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    drawn = result.plot()
    assert "ttft_tails" in drawn
    for name in drawn:
        axes = getattr(result.plot, name)()
        for one in axes if isinstance(axes, list) else [axes]:
            assert isinstance(one, Axes)
    tails = result.plot.ttft_tails()
    assert [len(line.get_xdata()) for line in tails.lines] == [70, 70, 70]
    worst = result.requests.groupby("arm", sort=False).ttft_sched.max() * 1000
    assert [line.get_ydata().max() for line in tails.lines] == pytest.approx(worst.tolist(), rel=0.1)
    tails.figure.canvas.draw()
    pyplot.close("all")
    with pytest.raises(db.UserError, match="failures would be empty"):
        result.plot.failures()


def test_a_result_is_saved_and_loaded(result, tmp_path):
    result.save(tmp_path / "x")
    again = db.load(tmp_path / "x")
    assert again.summary == result.summary
    assert (tmp_path / "x" / "report.html").exists()
    (tmp_path / "other").mkdir()
    with pytest.raises(db.UserError, match="exists; choose another"):
        result.save(tmp_path / "other")
    assert result.folder == tmp_path / "x"
    with pytest.raises(db.UserError, match="not a results folder"):
        db.load(tmp_path)


# Objects of the user's own


def test_a_class_is_a_router_mode_and_so_is_a_callable_object(trace):
    class Weighted:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, candidates):
            return [self.weight * count for count in candidates.num_requests]

    found = db.simulate(trace, db.Deployment(workers=3), vary={"router_mode": [First, Weighted(2.0), "least-loaded"]})
    assert list(found.arms) == ["First", "Weighted", "least-loaded"]
    assert found.workers[found.workers.arm == "First"].requests.tolist() == [120, 0, 0]


def test_an_object_is_the_router_mode_of_a_deployment(trace):
    found = db.simulate(trace, db.Deployment(workers=2, router_mode=First))
    assert list(found.arms) == ["First"]


def test_a_function_named_given_is_a_router_mode(trace):
    def given(candidates):
        return [float(place) for place in range(len(candidates.num_requests))]

    found = db.simulate(trace, db.Deployment(workers=2, router_mode=given))
    assert found.workers.requests.tolist() == [120, 0]


def test_objects_travel_to_processes_by_value(trace):
    bias = 3.0

    def biased(candidates):
        return [bias * place for place in range(len(candidates.num_requests))]

    found = db.simulate(trace, db.Deployment(workers=2), vary={"router_mode": [biased, "random"]}, jobs=2)
    assert found.workers[found.workers.arm == "biased"].requests.tolist() == [120, 0]


def test_an_object_that_cannot_travel_is_one_line(trace):
    lock = threading.Lock()

    def locked(candidates):
        with lock:
            return [0.0] * len(candidates.num_requests)

    with pytest.raises(db.UserError, match=r"router mode locked cannot be sent to the processes that use it .*lock"):
        db.simulate(trace, vary={"router_mode": [locked]})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: db.simulate(vary={"router_mode": [int]}), "int cannot be a router mode: expected a class that derives from serving.router.Policy"),
        (lambda: db.simulate(vary={"num_gpu_blocks": [max]}), "num_gpu_blocks is <built-in function max>; an object can only be a router mode or a planner"),
        (lambda: db.simulate(vary={"router_mode": [lambda c: c, lambda c: [1]]}), "own is given twice"),
        (lambda: db.simulate(vary={"router_mode": "kv"}), "expected a list of values"),
        (lambda: db.simulate(vary={"router_modes": ["kv"]}), "router_modes is not a setting"),
        (lambda: db.simulate(rate_scael=2), "rate_scael is unknown; did you mean rate_scale?"),
        (lambda: db.simulate(rate_scale="x"), "rate_scale must be"),
        (lambda: db.simulate(columns="a"), "columns is no option of simulate; give it to Workload.read"),
        (lambda: db.simulate([1, 2]), "expected a Workload or the path of one, not list"),
        (lambda: db.simulate("nowhere.jsonl"), "nowhere.jsonl"),
        (lambda: db.simulate(deployment=3), "expected a Deployment or the path of its YAML file, not int"),
        (lambda: db.simulate(slo="ttft < "), "slo"),
        (lambda: db.sweep(find="rate_scale"), "find searches for the highest value that meets the limits; set them with slo or slo_preset"),
        (lambda: db.run(url="http://127.0.0.1:9", deployment=db.Deployment()), "leave one out"),
        (lambda: db.run(url="http://127.0.0.1:9"), "127.0.0.1:9"),
        (lambda: db.load(), "name a results folder"),
        (lambda: db.rehearse(seeds=0), "seeds is '0'; expected a number"),
        (lambda: db.rehearse(seeds=range(0, 10, 2)), "seeds is range(0, 10, 2); expected consecutive seeds"),
        (lambda: db.rehearse(faults="mild"), "faults must be"),
        (lambda: db.rehearse(db.Deployment(engine="vllm", model="x")), "worker-0 (serving.vllm) cannot be rehearsed"),
        (lambda: db.Deployment(engine=my_mode), "my_mode cannot be an engine: expected `async def generate(request)` with a yield"),
        (lambda: db.Deployment(engine="pytok"), "pools.worker.engine_file is missing; expected the Python file of your engine"),
        (lambda: db.run(deployment=db.Deployment(engine="pytok", engine_file="x.py")), "pools.worker.engine_file is 'x.py': there is no such file"),
        (lambda: db.simulate(deployment=db.Deployment(engine=letters)), "pools.worker: letters is an engine of your own, whose steps are not known in advance; use run or rehearse"),
    ],
)  # fmt: skip
def test_a_wrong_call_raises_one_line_and_nothing_else(call, message):
    with pytest.raises(db.UserError, match=re.escape(message)):
        call()


def slow(prefill_tokens, num_decodes, num_kv_tokens):
    """Half a second for any step."""
    return 0.5 + 0 * (prefill_tokens + num_decodes + num_kv_tokens)


@pytest.mark.parametrize(
    ("deployment", "vary", "name"),
    [
        ({}, {"router_mode": [my_mode]}, "my_mode"),
        ({}, {"timing": [slow]}, "slow"),
        ({}, {"planner": ["static", planned]}, "planned"),
        ({"router_mode": First}, {}, "First"),
        ({"timing": slow}, {}, "slow"),
        ({"planner": planned}, {}, "planned"),
    ],
)
def test_an_object_never_travels_to_a_cluster(trace, deployment, vary, name):
    with pytest.raises(db.UserError, match=f"{name} is a Python object, which stays on this host, but backend is ray"):
        db.sweep(trace, db.Deployment(**deployment), vary=vary, backend="ray")


# Sweeps, plans, live runs


def test_a_sweep_has_a_row_per_point_and_resumes(trace, tmp_path):
    def swept():
        return db.sweep(
            trace,
            db.Deployment(workers=2),
            vary={"router_mode": ["random", my_mode], "num_gpu_blocks": [500, 1000]},
            out=tmp_path / "s",
        )

    found = swept()
    assert found.points[["router_mode", "num_gpu_blocks"]].to_numpy().tolist() == [
        ["random", 500], ["random", 1000], ["my_mode", 500], ["my_mode", 1000],
    ]  # fmt: skip
    assert found.points.ttft_mean_s.notna().all()
    assert swept().points.equals(found.points)
    assert db.load(tmp_path / "s").points.equals(found.points)
    assert "<table>" in found._repr_html_()
    assert "my_mode" in repr(found)


def test_a_search_has_a_row_per_combination(trace, tmp_path):
    found = db.sweep(trace, db.Deployment(workers=2), find="workers", high=8, slo="ttft.p50 <= 1s", out=tmp_path / "s")
    assert found.points.workers.tolist() == [1]
    assert found.is_complete


def test_a_plan_gives_the_deployment_to_simulate(trace, tmp_path):
    fleet = db.Deployment(model="meta-llama/Llama-3.1-8B", gpu="h100")
    options = {"tensor_parallel_size": [1, 2], "max_num_batched_tokens": [2048], "loads": "1", "max_gpus": 4}
    found = db.plan(trace, fleet, slo=["ttft.p50 <= 1s"], out=tmp_path / "p", **options)
    assert found.layouts.gpus[0] == 1
    assert found.deployment.num_workers == 1
    assert db.load(tmp_path / "p").verdict == found.verdict
    assert found.verdict.split(".")[0] in " ".join(repr(found).split())
    with pytest.raises(db.UserError, match="has 2 pools, but a plan chooses them"):
        db.plan(trace, db.Deployment(prefill_workers=1, decode_workers=1), slo=["ttft.p50 <= 1s"])


@pytest.fixture(scope="module")
def url():
    with known_server(SelftestConfig(ttft_ms=4, itl_ms=1)) as address:
        yield address


def test_a_server_is_measured(trace, url):
    found = db.run(trace, url=url, max_requests=20, rate_scale=20.0, server_metrics=False)
    assert list(found.arms) == ["endpoint"]
    assert len(found.requests) == 20


def test_a_manifest_has_the_call_from_a_notebook_too(trace, url):
    async def cell():
        return db.run(trace, url=url, max_requests=2, rate_scale=20.0, server_metrics=False)

    assert asyncio.run(cell()).manifest["command"].startswith("dynabench.run(")


def test_a_server_is_benchmarked(url, tmp_path):
    found = db.bench(url, concurrency=[1, 2], duration_s=0.2, isl=16, osl=4, out=tmp_path / "b", server_metrics=False)
    assert found.points.concurrency.tolist() == [1, 2]


def test_a_server_is_measured_where_an_event_loop_runs_as_in_a_notebook(trace, url):
    async def cell():
        return db.run(trace, url=url, max_requests=20, rate_scale=20.0, server_metrics=False)

    assert len(asyncio.run(cell()).requests) == 20


def test_a_mode_of_ones_own_routes_over_http(trace):
    found = db.run(trace, db.Deployment(workers=2, router_mode=First), max_requests=20, rate_scale=20.0)
    assert found.workers.requests.tolist() == [20, 0]


async def letters(request):
    """Continue the alphabet after the tokens that are there."""
    known = len(request["token_ids"])
    for number in range(known, known + request["stop_conditions"]["max_tokens"]):
        await asyncio.sleep(0.01)
        yield {"token_ids": [97 + number % 26]}
    yield {"token_ids": [], "finish_reason": "length"}


class Restarting:
    """Begins the alphabet again, whatever is there, and counts its answers."""

    num_answers = 0

    async def generate(self, request):
        self.num_answers += 1
        for number in range(request["stop_conditions"]["max_tokens"]):
            await asyncio.sleep(0.01)
            yield {"token_ids": [97 + number % 26]}
        yield {"token_ids": [], "finish_reason": "length"}


@pytest.mark.parametrize("engine", [letters, Restarting, Restarting()])
def test_an_engine_of_ones_own_answers_over_http(trace, engine):
    found = db.run(trace, db.Deployment(engine=engine, workers=2), max_requests=10, rate_scale=20.0)
    assert found.requests.osl.tolist() == [request.output_length for request in list(trace)[:10]]
    assert found.workers.requests.tolist() == [5, 5]


def test_engines_of_ones_own_are_compared(trace):
    found = db.run(
        trace, db.Deployment(engine=letters), vary={"engine": [letters, Restarting]}, max_requests=10, rate_scale=20.0
    )
    assert list(found.arms) == ["engine_file letters", "engine_file Restarting"]


def test_an_engine_of_ones_own_is_rehearsed(tmp_path):
    found = db.rehearse(db.Deployment(engine=letters, workers=2), seeds=2, faults="harsh", out=tmp_path / "r")
    assert found.violations.empty
    assert found.verdict == "2 seeds, 0 violations"
    assert sum(found.happened.values()) > 2
    assert not (tmp_path / "r").exists()


def test_violations_of_a_rehearsal_are_rows_with_the_file_that_replays_them(tmp_path):
    file = tmp_path / "seed-4.json"
    violations = [Violation("right-text", "request 3 has another text"), Violation("alive", "worker-0 ended")]
    smaller = Rehearsal(4, [], [])
    failed = Failed(4, violations, file, file.with_suffix(".html"), smaller)
    found = db.RehearsalResult(Found(5, 300, 1, 40.0, Counter({"kill": 2}), [failed]))
    assert found.violations[["seed", "invariant"]].to_numpy().tolist() == [[4, "right-text"], [4, "alive"]]
    assert set(found.violations.file) == {str(file)}
    assert found.happened == {"kill": 2}
    assert found.verdict == "5 seeds, 1 with violations (alive, right-text)"
    assert f"--replay {file}" in repr(found)
    assert "right-text" in found._repr_html_()


def test_a_deployment_file_names_an_engine_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def generate(request):\n    yield {'token_ids': [], 'finish_reason': 'stop'}\n"
    )
    made = db.Deployment(engine="pytok", engine_file=str(tmp_path / "mine.py"), workers=2)
    assert db.Deployment.from_yaml(made.to_yaml()) == made
    assert "engine_file: " in made.to_yaml()


# The words of messages


@pytest.mark.parametrize(
    ("of_command", "of_python"),
    [
        ("set them with --slo or --slo-preset", "set them with slo or slo_preset"),
        ("use --jobs 1", "use jobs=1"),
        ("name it with --backend ray or --backend dask", 'name it with backend="ray" or backend="dask"'),
        ("give its --url, without --no-server-metrics", "give its url, without server_metrics=False"),
        ("such as --slo 'ttft.p99 <= 2s'", 'such as slo="ttft.p99 <= 2s"'),
        ("or --gpus with --vary prefill_workers=1,2", 'or gpus with vary={"prefill_workers": [1, 2]}'),
        ("raise it (ulimit -Hn 9; of a container, --ulimit nofile=9), or use --clients 2", "raise it (ulimit -Hn 9; of a container, --ulimit nofile=9), or use clients=2"),
        ("run `dynabench verify --engine-core vllm` first", "run `dynabench verify --engine-core vllm` first"),
        ("Launch: vllm serve m --max-num-seqs 256, on each host", "Launch: vllm serve m --max-num-seqs 256, on each host"),
        ("kv is NVIDIA Dynamo --router-mode kv, with less", "kv is NVIDIA Dynamo --router-mode kv, with less"),
    ],
)  # fmt: skip
def test_messages_name_arguments_and_no_flags(of_command, of_python):
    assert in_python(of_command) == of_python


FOREIGN = {"all-metrics", "scheduler-cls", "ulimit", "hf-overrides", "adapters", "save-detailed"}
"""Flags in messages that the API cannot cause, or of other programs."""


def test_no_message_of_the_experiments_has_a_flag_that_is_no_argument():
    root, left = Path(__file__).parents[2], set()
    rooms = (
        "api",
        "arm.py",
        "apis.py",
        "benchmark",
        "capacity",
        "deployment",
        "experiment",
        "live",
        "rehearsal",
        "virtual",
        "../workloads",
    )
    for path in sorted(
        path
        for room in rooms
        for path in [root / "dynabench" / room, *(root / "dynabench" / room).rglob("*.py")]
        if path.is_file()
    ):
        raised = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        texts = [node.value for each in raised for node in ast.walk(each) if isinstance(node, ast.Constant)]
        left |= {
            flag
            for text in texts
            if isinstance(text, str)
            for flag in re.findall(r"(?<![\w`-])--([a-z][a-z-]+)", in_python(text))
        }
    assert left <= FOREIGN


def test_a_folder_that_exists_is_refused_in_words_of_python(result, tmp_path):
    with pytest.raises(db.UserError, match=r"exists; choose another") as caught:
        result.save(tmp_path)
    assert "--" not in str(caught.value)


@pytest.mark.parametrize("is_cell", [False, True])
def test_ctrl_c_in_a_live_run_returns_what_is_done_and_prints_nothing(url, capfd, is_cell):
    long = db.Workload.synth(requests=5000, rate=100, isl=16, osl=4)

    def measured():
        with interrupted_once(requests_reached(url, 100)):
            return db.run(long, url=url, server_metrics=False)

    async def cell():
        return measured()

    found = asyncio.run(cell()) if is_cell else measured()
    assert not found.is_complete
    assert 0 < len(found.requests) < 5000
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_in_a_benchmark_prints_nothing(url, tmp_path, capfd):
    with interrupted_once(requests_reached(url, 100)):
        found = db.bench(
            url, concurrency=[1, 2, 4, 8], duration_s=1, isl=16, osl=4, out=tmp_path / "b", server_metrics=False
        )
    assert not found.is_complete
    assert capfd.readouterr() == ("", "")


@contextlib.contextmanager
def interrupted_once(is_due):
    """Press Ctrl-C once in this block, as soon as that is due."""
    is_over = threading.Event()

    def ctrl_c():
        while not is_over.wait(0.02):
            if is_due():
                os.kill(os.getpid(), signal.SIGINT)
                return

    pressing = threading.Thread(target=ctrl_c)
    pressing.start()
    try:
        yield
    finally:
        is_over.set()
        pressing.join()


def requests_reached(url, number):
    """Return what says whether so many more requests than now have reached the known server."""

    def count():
        return httpx.get(f"{url}/stats").json()["requests"]

    before = count()
    return lambda: count() >= before + number


ROUTED = []


def counted(candidates):
    """Any worker; each request is counted."""
    ROUTED.append(None)
    return [0.0 for _ in candidates.num_requests]


def test_ctrl_c_returns_what_is_done(capfd):
    long = db.Workload.synth(requests=30_000, rate=40, isl=200, osl=50)
    with interrupted_once(lambda: len(ROUTED) >= 1000):
        found = db.simulate(long, vary={"router_mode": [counted]}, repeats=50, jobs=1)
    assert not found.is_complete
    assert "interrupted: these are the results so far" in repr(found)
    assert 0 < len(found.requests) < 50 * 30_000
    assert capfd.readouterr() == ("", "")


def test_a_function_is_a_timing_model(trace):
    found = db.simulate(trace, db.Deployment(workers=2, timing=slow))
    assert found.steps.first_s.max() == 0.5
    assert "those of slow, a class of your own" in found.manifest["step_times"]
    varied = db.simulate(trace, db.Deployment(workers=2), vary={"timing": [slow, lambda *sizes: 0.1]})
    assert list(varied.arms) == ["timing_file slow", "timing_file own"]


def test_a_timing_model_that_returns_no_time_is_one_line(trace):
    with pytest.raises(db.UserError, match=r"negative.step_s\(.*\) is -1; expected seconds"):
        negative = lambda *sizes: -1  # noqa: E731
        negative.__name__ = "negative"
        db.simulate(trace, db.Deployment(timing=negative), jobs=1)


def test_a_class_is_a_planner(trace):
    from serving.planner.policies.policy import Policy as Planner

    class Two(Planner):
        description = "always two"
        default_interval_s = 1.0

        def propose(self, seen):
            return {name: Proposal(2, "two") for name in seen.pools}

    found = db.simulate(trace, db.Deployment(workers=1, planner=Two))
    assert found.events[found.events.event == "planned"].detail.tolist() == ["1 to 2: two"]
    varied = db.simulate(trace, db.Deployment(workers=1), vary={"planner": ["static", Two]})
    assert list(varied.arms) == ["planner static", "planner Two"]


def test_progress_is_a_line_below_the_cell_which_is_gone_in_the_end():
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    from dynabench.api.notebook import Cell

    InteractiveShell.instance()
    try:
        with capture_output() as captured:
            cell = Cell()
            cell.report("1 of 2")
            cell.report("2 of 2")
            cell.end()
    finally:
        InteractiveShell.clear_instance()
    shown = [(one.data["text/plain"], one.update) for one in captured.outputs]
    assert shown == [("1 of 2", False), ("2 of 2", True), ("", True)]
    assert (captured.stdout, captured.stderr) == ("", "")


def test_progress_can_be_asked_for_and_goes_to_stderr(trace, capfd, monkeypatch):
    monkeypatch.setattr("dynabench.progress.LINE_EVERY_S", 0.001)
    db.simulate(trace, vary={"router_mode": ["random", "kv"]}, jobs=1, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "simulating: " in shown.err


def test_a_pool_without_settings_of_its_own_is_told_in_one_line():
    with pytest.raises(db.UserError, match=r"^pools\.a is 3; expected its settings, such as \{'replicas': 2\}$"):
        db.Deployment(pools={"a": 3})


def test_an_unknown_setting_is_told_in_a_line_that_can_be_read():
    with pytest.raises(db.UserError, match=r"^nope is unknown; expected one of acceptance_drafts, ") as caught:
        db.Deployment(nope=1)
    assert len(str(caught.value)) < 500

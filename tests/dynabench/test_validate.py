"""From measured steps to simulated ones, and simulated runs against past ones."""

import csv
import dataclasses
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dynabench.arm import Settings
from dynabench.deployment.overhead import Overhead, OverheadConfig, overhead_of
from dynabench.fidelity.calibrate import Probe, SentProbe, noise, overheads, probes, router_flags, spacing
from dynabench.fidelity.fitting import fit_steps, predicted
from dynabench.fidelity.past_runs import read_requests
from dynabench.fidelity.step_log import FIRST_COLUMNS, STEP_COLUMNS, EngineStepLog, read_step_log
from dynabench.fidelity.validate import as_answered, as_calibrated, at, like, mode_mismatch, speed_of
from foundation.errors import UserError
from mocker import EngineConfig
from mocker.timing.calibrated import StepCosts
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.files import SCHEMA
from mocker.timing.model import chunk
from mocker.vllm.versions import RULES
from reports.figures.metrics import TokenGaps
from reports.folder import read
from reports.record.records import Record, Requests
from serving.router import RouterConfig
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from workloads import Request, Workload
from workloads.pacing import LoadConfig

COSTS = StepCosts(
    fixed=0.004,
    mixed=0.006,
    tokens=((0.0, 1e-4), (64.0, 5e-5)),
    sequence=2e-4,
    prompt=1e-3,
    pair=2e-8,
    context=1e-6,
    kv=5e-7,
    mixed_kv=8e-7,
)


def steps(count, seed=0):
    """Draw what steps of an engine compute."""
    rng = np.random.default_rng(seed)
    has_prefill = rng.random(count) < 0.4
    prefills = np.where(has_prefill, rng.integers(1, 4, count), 0)
    tokens = prefills * rng.integers(4, 120, count)
    contexts = prefills * rng.integers(0, 500, count)
    decodes = np.where(has_prefill, rng.integers(0, 16, count), rng.integers(1, 16, count))
    columns = {
        "prefill_tokens": tokens,
        "prefill_context": contexts,
        "prefill_pairs": tokens * (contexts + tokens / 2),
        "num_prefills": prefills,
        "num_decodes": decodes,
        "kv_tokens": decodes * rng.integers(10, 1000, count),
        "preempted": np.zeros(count),
        "goes_on": np.ones(count),
    }
    return {name: np.asarray(column, float) for name, column in columns.items()}


def log_of(columns, durations, firsts=None):
    ended = np.cumsum(durations)
    times = {"scheduled_s": ended - durations, "ended_s": ended}
    empty = {name: np.zeros(0) for name in FIRST_COLUMNS}
    return EngineStepLog({"block_size": 16}, times | columns, firsts or empty)


def test_a_fit_recovers_the_costs_it_was_made_from():
    columns = steps(3000)
    fit = fit_steps([log_of(columns, predicted(COSTS, columns))])
    assert fit.held_out["mean"] < 0.1
    other = steps(500, seed=1)
    assert predicted(fit.costs, other) == pytest.approx(predicted(COSTS, other), rel=0.01)


def test_a_fit_meets_the_mean_under_noise_and_leaves_out_what_else_ran():
    columns = steps(8000)
    truth = predicted(COSTS, columns)
    rng = np.random.default_rng(2)
    noisy = truth * rng.lognormal(-0.02, 0.2, len(truth))
    noisy[::500] *= 20
    fit = fit_steps([log_of(columns, noisy)])
    assert fit.held_out["outliers"] == pytest.approx(1 / 500, abs=5e-4)
    for has_prefill in (False, True):
        kind = (columns["prefill_tokens"] > 0) == has_prefill
        assert predicted(fit.costs, columns)[kind].sum() == pytest.approx(truth[kind].sum(), rel=0.01)


def test_steps_of_a_busy_engine_last_from_end_to_end_and_of_an_idle_one_from_their_schedule():
    columns = {name: np.zeros(3) for name in STEP_COLUMNS}
    columns |= {
        "scheduled_s": np.array([1.0, 1.3, 5.0]),
        "ended_s": np.array([1.2, 1.5, 5.1]),
        "goes_on": np.array([1.0, 0, 0]),
    }
    log = EngineStepLog({}, columns, {})
    assert log.duration_s == pytest.approx([0.2, 0.3, 0.1])


def test_a_step_log_is_read_and_cut_by_time(tmp_path):
    path = tmp_path / "steps"
    rows = [
        ["engine", {"block_size": 32}],
        ["step", [1.0, 1.1, 8, 0, 32.0, 1, 0, 0, 0, 1]],
        ["first", [0.8, 0.9, 1.1, 8]],
        ["step", [2.0, 2.1, 0, 0, 0, 0, 1, 9, 0, 0]],
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_step_log(path)
    assert log.engine == {"block_size": 32}
    assert log.steps["kv_tokens"].tolist() == [0, 9]
    assert log.between(0.5, 1.5).firsts["prompt_tokens"].tolist() == [8]
    assert len(log.between(1.5, 3.0).steps["ended_s"]) == 1
    path.write_text('["engine", {}]\n')
    with pytest.raises(UserError, match="ran no steps"):
        read_step_log(path)
    path.write_text("nonsense\n")
    with pytest.raises(UserError, match="cannot be read as a log of engine steps"):
        read_step_log(path)


def test_overheads_are_what_lies_between_client_and_engine():
    lengths = np.array([100.0, 1000.0, 10000.0, 100.0])
    starts = np.array([1.0, 3.0, 5.0, 7.0])
    arrived = starts + 0.004 + lengths * 10e-6
    waited = np.array([0.001, 0.001, 0.001, 0.5])  # the last is taken in only after a step
    firsts = {
        "arrived_s": arrived,
        "added_s": arrived + waited,
        "first_token_s": arrived + 1.0,
        "prompt_tokens": lengths,
    }
    log = log_of(steps(3), np.ones(3), firsts)
    sent = [
        SentProbe(
            Probe("p", concurrency, (1, 2), (1, 2)), start, start + 1.5, np.array([0.0]), np.array([at - start + 1.003])
        )
        for concurrency, start, at in zip((1, 1, 1, 8), starts, arrived, strict=True)
    ]
    found = overheads([log], sent)
    assert found["request_ms"] == pytest.approx(5.0, abs=0.01)
    assert found["prompt_token_us"] == pytest.approx(10.0, abs=0.1)
    assert found["answer_ms"] == pytest.approx(3.0, abs=0.01)


def test_spacing_is_how_far_apart_requests_come_that_were_sent_at_once():
    arrivals = np.array([1.001, 1.003, 1.002, 1.004, 1.9, 5.0, 5.5])  # four at once and one after, then one by one
    firsts = dict.fromkeys(FIRST_COLUMNS, arrivals)
    log = log_of(steps(3), np.ones(3), firsts)
    together = SentProbe(Probe("many", 4, (1, 2), (1, 2)), 1.0, 2.0, np.zeros(5), np.zeros(5))
    alone = SentProbe(Probe("one", 1, (1, 2), (1, 2)), 5.0, 6.0, np.zeros(2), np.zeros(2))
    assert spacing([log], [together, alone]) == pytest.approx(0.001)
    assert spacing([log], [alone]) == 0


def test_noise_is_what_neither_the_model_nor_the_drift_explains():
    columns = steps(4000)
    rng = np.random.default_rng(5)
    factors = rng.choice([0.7, 0.9, 1.4], 4000)
    drift = np.repeat([1.0, 1.5], 2000)
    log = log_of(columns, predicted(COSTS, columns) * factors * drift)
    middle, end = log.steps["scheduled_s"][2000], log.steps["ended_s"][-1] + 1
    sent = [
        SentProbe(Probe("p", 1, (1, 2), (1, 2)), start, stop, np.zeros(1), np.zeros(1))
        for start, stop in ((-1.0, middle), (middle, end))
    ]
    found = np.array(noise([log], sent, COSTS))
    assert found.mean() == pytest.approx(1, abs=1e-3)
    assert found[[1, 8, 14]] == pytest.approx([0.7, 0.9, 1.4], rel=0.02)


def test_probes_stay_within_the_engines_limits():
    for limits in ((1, 64, 128), (16, 512, 2048), (256, 8192, 131072)):
        for probe in probes(*limits):
            assert 1 <= probe.concurrency <= limits[0]
            assert 1 <= probe.prompt[0] <= probe.prompt[1]
            assert probe.prompt[1] + probe.output[1] < limits[2]


def write_calibration(tmp_path, release=None, **overhead):
    path = tmp_path / "calibration.json"
    step = dataclasses.asdict(COSTS)
    engine = {
        "name": "vllm",
        "block_size": 16,
        "num_gpu_blocks": 500,
        "max_num_seqs": 8,
        "policy": "fcfs",
        "async_scheduling": False,
    }
    if release is not None:
        engine["version"] = release
    measured = {"request_ms": 2.0, "prompt_token_us": 1.0, "spacing_ms": 0.25, "answer_ms": 0.5} | overhead
    found = {"schema": SCHEMA, "engine": engine, "step": step, "overhead": measured, "noise": [0.8, 0.9, 1.3]}
    path.write_text(json.dumps(found))
    return str(path)


def test_a_simulated_engine_takes_the_calibrated_ones_settings(tmp_path):
    timing = TimingConfig(timing_file=write_calibration(tmp_path))

    def calibrated(engine):
        return as_calibrated(Settings(deployed(engine=engine, timing=timing))).deployment.pools[0].mocker

    found = calibrated(EngineConfig())
    assert (found.block_size, found.num_gpu_blocks, found.max_num_seqs) == (16, 500, 8)
    assert calibrated(EngineConfig(num_gpu_blocks=99)).num_gpu_blocks == 99


def test_a_calibration_is_printed_as_flags_of_a_router(tmp_path):
    path = Path(write_calibration(tmp_path))
    found = json.loads(path.read_text())
    base = (COSTS.mixed + COSTS.fixed + COSTS.prompt + 2 * COSTS.sequence) * 1e3
    flags = router_flags(found, path).split()
    assert flags[0] == "--step-base-ms"
    assert float(flags[1]) == pytest.approx(base, rel=0.05)
    assert flags[-2] == "--step-budget-tokens"


def test_overheads_come_from_the_flags_then_from_the_measurements(tmp_path):
    timing = TimingConfig(timing_file=write_calibration(tmp_path))
    measured = Overhead(0.002, 1e-6, 0.00025, 0.0005)
    assert overhead_of(OverheadConfig(), timing) == pytest.approx(measured)
    assert overhead_of(OverheadConfig(request_overhead_ms=7.0), timing) == pytest.approx(
        measured._replace(request_s=0.007)
    )
    assert overhead_of(OverheadConfig(), TimingConfig()) == Overhead()
    assert overhead_of(OverheadConfig(), TimingConfig(gpu="h100", model="Qwen/Qwen3-8B")).request_s > 0


def simulated(workload, overhead, load=LoadConfig()):  # noqa: B008
    engine = EngineConfig(block_size=16, num_gpu_blocks=500)
    return simulate_pool(
        workload,
        mode="round-robin",
        engine=engine,
        timing=TimingConfig(timing="constant"),
        router=RouterConfig(),
        workers=1,
        seed=0,
        load=load,
        overhead=overhead,
    )


def test_overheads_delay_first_tokens_and_ends_but_no_steps():
    workload = Workload(
        "w", 16, [Request(float(place), 160, 5, tuple(range(place * 10, place * 10 + 10))) for place in range(4)]
    )
    plain = simulated(workload, OverheadConfig()).requests
    config = OverheadConfig(request_overhead_ms=3.0, prompt_overhead_us=10.0, answer_overhead_ms=2.0)
    run = simulated(workload, config)
    late = run.requests
    before, after = 0.003 + 160e-5, 0.002
    assert late.sent_s.tolist() == plain.sent_s.tolist()
    assert late.first_token_s.tolist() == pytest.approx((plain.first_token_s + before + after).tolist())
    assert late.last_token_s.tolist() == pytest.approx((plain.last_token_s + before + after).tolist())
    ttft = plain.first_token_s - plain.sent_s
    assert run.facts["overhead_share"] == pytest.approx((before + after) / (ttft.mean() + before + after))


def test_requests_that_come_at_once_reach_the_engine_one_by_one():
    workload = Workload("w", 16, [Request(time, 16, 1, (place,)) for place, time in enumerate((0.0, 0.0, 0.0, 1.0))])
    config = OverheadConfig(request_overhead_ms=3.0, request_spacing_ms=4.0)
    run = simulated(workload, config)
    assert run.requests.admitted_s[0] == pytest.approx(0.003)
    step = run.requests.first_token_s[0] - 0.003  # the second and third wait for the first one's step, then share one
    assert run.requests.first_token_s.tolist() == pytest.approx(
        [0.003 + step, 0.003 + 2 * step, 0.003 + 2 * step, 1.003 + step]
    )
    ttft = run.requests.first_token_s - run.requests.sent_s
    assert run.facts["overhead_share"] == pytest.approx((3 + 7 + 11 + 3) / 4e3 / ttft.mean())


def test_delays_outside_the_engine_have_no_share_of_steps_without_a_duration():
    overhead = OverheadConfig(handover_overhead_ms=30.0)
    timing = TimingConfig(speedup_ratio=0.0)
    run = simulate_pool(Workload("w", 64, [Request(0.0, 64, 2, (1,))]), timing=timing, overhead=overhead)
    assert run.requests.first_token_s.tolist() == [0.0]
    assert "overhead_share" not in run.facts


def test_a_long_prompt_holds_up_no_other_unless_the_frontend_is_said_to_be_busy():
    workload = Workload("w", 16, [Request(0.0, 1600, 1, tuple(range(100))), Request(0.0, 16, 1, (100,))])
    admitted = simulated(workload, OverheadConfig(prompt_overhead_us=100.0)).requests.admitted_s
    assert admitted[1] == pytest.approx(0.0016)
    config = OverheadConfig(prompt_overhead_us=100.0, request_spacing_ms=1.0)
    assert simulated(workload, config).requests.admitted_s[1] == pytest.approx(0.0026)


def test_noise_spreads_the_gaps_between_tokens_and_leaves_their_mean(tmp_path):
    workload = Workload("w", 16, [Request(0.0, 16, 101, (0,))])
    timing = TimingConfig(timing_file=write_calibration(tmp_path))
    run = simulate_pool(workload, engine=EngineConfig(max_num_seqs=8), timing=timing)
    gaps, steady = TokenGaps(run.gaps), (run.requests.last_token_s - run.requests.first_token_s)[0] / 100
    assert gaps.count == 100
    assert gaps.mean() == pytest.approx(steady)
    assert gaps.quantiles([0.1, 0.5, 0.9]) / steady == pytest.approx([0.8, 0.9, 1.3], rel=0.02)


def test_a_closed_loop_waits_for_the_answer_to_arrive():
    workload = Workload("w", 16, [Request(0.0, 16, 3, (place,)) for place in range(3)])
    config = OverheadConfig(request_overhead_ms=3.0, answer_overhead_ms=2.0)
    columns = simulated(workload, config, LoadConfig(concurrency=1)).requests
    assert columns.sent_s[1:].tolist() == pytest.approx(columns.last_token_s[:-1].tolist())


@pytest.mark.parametrize("load", [LoadConfig(max_concurrency=1), LoadConfig(concurrency=1), LoadConfig()])
def test_what_waits_for_an_answer_waits_until_it_has_arrived(load):
    """A turn that follows, and a request that waits for room, began when the engine had ended the answer."""
    after = {0: (), 1: (), 2: (1,)} if load != LoadConfig() else {0: (), 1: (0,), 2: (1,)}
    workload = Workload("w", 16, [Request(0.0, 16, 3, (place,), after=after[place]) for place in range(3)])
    columns = simulated(workload, OverheadConfig(answer_overhead_ms=50.0), load).requests
    assert columns.admitted_s[1:].tolist() == pytest.approx(columns.last_token_s[:-1].tolist())


MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
RECORDS = [
    {
        "request_id": "b",
        "input_toks": 30,
        "output_toks": 4,
        "queued_ts": 101.0,
        "first_token_ts": 101.5,
        "last_token_ts": 102.0,
    },
    {
        "request_id": "a",
        "input_toks": 20,
        "output_toks": 3,
        "queued_ts": 100.0,
        "first_token_ts": 100.2,
        "last_token_ts": 100.6,
    },
]


def test_records_of_requests_become_a_workload_and_a_run(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in RECORDS))
    workload, run = read_requests(path)
    assert [(r.arrival_s, r.input_length, r.output_length) for r in workload] == [(0.0, 20, 3), (1.0, 30, 4)]
    assert run.requests.first_token_s.tolist() == pytest.approx([0.2, 1.5])
    with (tmp_path / "requests.csv").open("w") as file:
        writer = csv.DictWriter(file, ["arrival_s", "isl", "osl", "first_token_s", "last_token_s"])
        writer.writeheader()
        writer.writerows({"arrival_s": 5, "isl": 9, "osl": 2, "first_token_s": 6, "last_token_s": 7} for _ in range(2))
    assert read_requests(tmp_path / "requests.csv")[0].requests[0].input_length == 9
    path.write_text(json.dumps({"input_toks": 1}) + "\n")
    with pytest.raises(UserError, match=re.escape("has no column arrival_s (or queued_ts")):
        read_requests(path)


def test_vllms_requests_arrive_before_the_step_in_flight_lets_them_into_the_queue(tmp_path):
    path = tmp_path / "requests.jsonl"
    stamped = [row | {"arrival_time": day} for row, day in zip(RECORDS, (7000.97, 6999.999), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in stamped))
    workload, run = read_requests(path)
    assert [r.arrival_s for r in workload] == pytest.approx([0.0, 0.971])  # clocks differ by what the fastest waited
    assert run.requests.first_token_s.tolist() == pytest.approx([0.2, 1.5])


def test_validate_fails_by_threshold_and_writes_a_report(tmp_path):
    real = tmp_path / "requests.jsonl"
    rows = [RECORDS[1] | {"queued_ts": t, "first_token_ts": t + 0.02, "last_token_ts": t + 0.04} for t in range(40)]
    real.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--timing", "constant", "--constant-prefill-ms", 20, "--block-size", 16]  # and one worker, as if not said
    limits = ["--fail-if", "ttft > 3%", "--fail-if", "e2e.mean > 3%"]
    good = dynabench("validate", "--real", real, *common, "--out", tmp_path / "good", *limits)
    assert good.returncode == 0, good.stderr
    assert "ttft.mean (ms)" in good.stdout
    slower = ["--constant-decode-ms", 12, "--fail-if", "tpot.mean > 3%"]
    bad = dynabench("validate", "--real", real, *common, "--out", tmp_path / "bad", *slower)
    assert bad.returncode == 1
    assert "failed: round-robin: tpot.mean is off by +20.0% (tpot.mean > 3%)" in bad.stdout
    manifest, runs = read(tmp_path / "bad")
    assert [run.arm for run in runs] == ["round-robin, real", "round-robin, simulated"]
    assert set(manifest["workers"].values()) == {1}
    assert "round-robin" in manifest["fidelity"]["arms"]
    assert "Simulated against real: round-robin" in (tmp_path / "bad" / "report.html").read_text()
    again = dynabench(
        "validate", "--real", tmp_path / "bad", *common, "--max-requests", 20, "--out", tmp_path / "again"
    )
    assert again.returncode == 2
    assert "use the workload and shape of that run" in again.stderr


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "round-robin had 3 workers, but 1 would be simulated; use --workers 3"),
        (
            ("--workers", 3),
            "arrived within 7.8 s, but those of w.jsonl arrive within 39 s; use the rate or --rate-scale",
        ),
        (("--workers", 3, "--rate-scale", 5), None),
    ],
)
def test_a_past_run_is_held_against_the_same_workers_and_arrivals(flags, problem, tmp_path):
    trace = tmp_path / "w.jsonl"
    trace.write_text("".join(json.dumps(MOONCAKE | {"timestamp": 1000 * number}) + "\n" for number in range(40)))
    past = dynabench(
        "simulate", trace, "--workers", 3, "--rate-scale", 5, "--router-mode", "round-robin", "--out", tmp_path / "past"
    )
    assert past.returncode == 0, past.stderr
    done = dynabench("validate", trace, "--real", tmp_path / "past", *flags, "--out", tmp_path / "out")
    if problem is None:
        assert done.returncode == 0, done.stderr
        assert "it is not known how far such runs differ" in (tmp_path / "out" / "report.html").read_text()
    else:
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr


def test_the_router_that_is_assumed_of_an_endpoint_is_named(tmp_path):
    trace = tmp_path / "w.jsonl"
    trace.write_text("".join(json.dumps(MOONCAKE | {"timestamp": 1000 * number}) + "\n" for number in range(4)))
    past = dynabench("simulate", trace, "--workers", 1, "--router-mode", "round-robin", "--out", tmp_path / "past")
    assert past.returncode == 0, past.stderr
    head = tmp_path / "past" / "experiment.json"
    manifest = json.loads(head.read_text())
    manifest["runs"][0]["arm"] = "endpoint"
    head.write_text(json.dumps(manifest))
    done = dynabench("validate", trace, "--real", tmp_path / "past", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said = "past is not known and simulated as round-robin (--router-mode)"
    assert said in done.stdout.replace("\n", " ")
    assert said in read(tmp_path / "out")[0]["subtitle"]


def test_answers_that_the_model_ended_are_simulated_as_long_as_they_were():
    planned = [Request(float(n), 8, 10, (n,), ends="length" if n == 3 else "stop") for n in range(4)]
    found = Requests.of(  # in the order in which they ended
        request=[2, 0, 3, 1],
        intended_s=[0.0] * 4,
        isl=[8] * 4,
        osl=[20, 7, 9, 0],
        finish_reason=["length", "stop", "stop", ""],
        error=["", "", "", "HTTP 500"],
    )
    run = Record("x", found, np.empty((0, 5)), wall_s=9.0, num_workers=1)
    answered = as_answered(Workload("w", 16, planned), run)
    expected = [(7, "stop"), (10, "stop"), (20, "length"), (10, "length")]
    assert [(request.output_length, request.ends) for request in answered] == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "needs a real engine or run: use --engine vllm with --model, or --real"),
        (("--real", "no.jsonl"), "cannot be read as request records"),
        (("--fail-if", "nonsense"), "is not understood"),
        (("--real", "no.jsonl", "--gpu", "h42", "--model", "x"), "cannot be read as request records"),
    ],
)
def test_validate_refuses_in_a_line(tmp_path, flags, message):
    done = dynabench("validate", *flags, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_hardware_is_listed():
    out = dynabench("hardware").stdout
    assert "h100" in out
    assert "meta-llama/Llama-3.1-8B" in out


def test_a_model_and_a_gpu_are_all_that_simulate_needs(tmp_path):
    flags = ["--model", "meta-llama/Llama-3.1-8B", "--tensor-parallel-size", 2, "--router-mode", "kv"]
    done = dynabench("simulate", "--all-metrics", *flags, "--gpu", "h100", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "TTFT outside of the engine" in done.stdout
    done = dynabench("simulate", *flags, "--gpu", "h42", "--out", tmp_path / "other")
    assert done.returncode == 2
    assert "gpu 'h42' is not known; expected one of h100" in done.stderr


def test_ranks_that_share_experts_step_together():
    engine = EngineConfig(block_size=16, num_gpu_blocks=500, dp_size=2)
    timing = TimingConfig(
        enable_expert_parallel=True, timing="constant", constant_prefill_ms=100.0, constant_decode_ms=10.0
    )
    requests = [Request(0.0, 16, 8, (1,)), Request(0.005, 16, 8, (2,))]
    run = simulate_pool(Workload("w", 16, requests), engine=engine, timing=timing)
    first, last = run.requests.first_token_s, run.requests.last_token_s
    # The second waits for the first's prefill, and then holds up its decode.
    assert first.tolist() == pytest.approx([0.1, 0.2])
    assert last.tolist() == pytest.approx([0.2 + 6 * 0.01, 0.2 + 7 * 0.01])


def test_the_speed_of_real_runs_is_that_of_the_same_batches(tmp_path):
    timing = TimingConfig(timing_file=write_calibration(tmp_path))
    columns = steps(400)
    truth = predicted(COSTS, columns)
    took = truth * np.where(columns["prefill_tokens"] > 0, 0.8, 0.5)
    speed = speed_of([log_of(columns, took), log_of(columns, took)], timing)
    assert (speed.prefill, speed.decode) == pytest.approx((1.25, 2.0))
    fast, plain = (resolve(EngineConfig(), each).timing for each in (at(speed, timing), timing))
    assert fast.mixed(chunk(100), 3, 500) == pytest.approx(plain.mixed(chunk(100), 3, 500) * 0.8)
    assert fast.decode(3, 500).first == pytest.approx(plain.decode(3, 500).first * 0.5)
    assert speed_of([], timing) is None
    assert speed_of([log_of(columns, truth)], TimingConfig()) is None


def test_a_recording_without_times_says_so():
    path = Path(__file__).parent.parent / "golden" / "vllm-0.32" / "shared_prefix.jsonl.gz"
    done = dynabench("validate", "--real", path)
    assert done.returncode == 2
    assert "contains no times; record it again" in done.stderr
    done = dynabench("validate", "--real", path, "--fail-if", "tpot > 3%")
    assert done.returncode == 2
    assert "a recording has only step times" in done.stderr


def test_a_recordings_times_stand_beside_simulated_ones(tmp_path):
    source = Path(__file__).parent.parent / "golden" / "vllm-0.32" / "shared_prefix.jsonl.gz"
    with gzip.open(source, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    timed = [rows[0], *({**row, "duration_ms": 12.5} for row in rows[1:])]
    (tmp_path / "timed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timed))
    flags = ["--timing", "constant", "--constant-prefill-ms", "25", "--constant-decode-ms", "12.5"]
    done = dynabench("validate", "--real", tmp_path / "timed.jsonl", *flags)
    assert done.returncode == 0, done.stderr
    prefill, decode = (line.split() for line in done.stdout.splitlines()[1:])
    assert prefill[:2] == ["with", "prefill"]
    assert decode[3:] == ["12.500", "12.500", "+0.0%", "0.0%"]
    assert dynabench("verify", tmp_path / "timed.jsonl").returncode == 0


def test_a_simulated_engine_schedules_ahead_if_the_calibrated_one_did(tmp_path):
    measured = TimingConfig(timing_file=write_calibration(tmp_path))  # of a synchronous engine
    assert not resolve(EngineConfig(), measured).config.is_async
    assert resolve(EngineConfig(async_scheduling=True), measured).config.is_async
    assert resolve(EngineConfig()).config.is_async
    assert not as_calibrated(Settings(deployed(timing=measured))).deployment.pools[0].mocker.is_async
    chosen = Settings(deployed(engine=EngineConfig(async_scheduling=True), timing=measured))
    assert as_calibrated(chosen).deployment.pools[0].mocker.is_async


@pytest.mark.parametrize(("release", "version"), [("0.32.1", "0.32"), ("0.33.0", "0.33"), (None, "0.33")])
def test_a_simulated_engine_has_the_rules_of_the_version_that_was_calibrated(tmp_path, release, version):
    measured = TimingConfig(timing_file=write_calibration(tmp_path, release=release))
    assert resolve(EngineConfig(), measured).config.engine_version == version
    assert resolve(EngineConfig(engine_version="0.32"), measured).config.engine_version == "0.32"
    assert resolve(EngineConfig()).config.engine_version == "0.33"
    simulated = as_calibrated(Settings(deployed(timing=measured))).deployment.pools[0].mocker
    assert simulated.rules == RULES[version]


def test_a_calibration_of_an_unknown_version_is_refused_unless_one_is_chosen(tmp_path):
    measured = TimingConfig(timing_file=write_calibration(tmp_path, release="0.35.0"))
    with pytest.raises(ValueError, match=r"timing_file .* was measured on vLLM 0\.35\.0; expected 0\.32 or 0\.33"):
        resolve(EngineConfig(), measured)
    assert resolve(EngineConfig(engine_version="0.33"), measured).config.engine_version == "0.33"
    with pytest.raises(
        UserError, match=r"the real engine is vLLM 0\.35\.0; .* choose one of them with --engine-version"
    ):
        as_calibrated(Settings(deployed(timing=measured)))
    chosen = Settings(deployed(engine=EngineConfig(engine_version="0.32"), timing=measured))
    assert as_calibrated(chosen).deployment.pools[0].mocker.engine_version == "0.32"


def test_times_of_an_engine_in_the_other_mode_are_told(tmp_path):
    synchronous = Settings(deployed(timing=TimingConfig(timing_file=write_calibration(tmp_path))))
    assert mode_mismatch(like(synchronous, {"async_scheduling": False})) is None
    assert "those of an engine that schedules synchronously" in mode_mismatch(
        like(synchronous, {"async_scheduling": True})
    )
    assert mode_mismatch(Settings(deployed())) is None


def test_a_step_scheduled_behind_another_lasts_from_that_ones_end():
    rows = {name: np.zeros(4) for name in STEP_COLUMNS}
    rows["scheduled_s"] = np.array([0.0, 1.0, 2.1, 9.0])  # each while the one before runs, but the last
    rows["ended_s"] = np.array([2.0, 4.0, 5.0, 9.5])
    rows["goes_on"] = np.array([1.0, 1.0, 0.0, 0.0])
    assert EngineStepLog({}, rows, {}).duration_s.tolist() == [2.0, 2.0, 1.0, 0.5]

"""Requests that no number of workers answers: what is known of them before anything is simulated."""

import json

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import Longest
from dynabench.experiment.refused import missed_by_refusals
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.figures import slo
from reports.figures.metrics import Goodput
from reports.figures.outcomes import of_requests
from reports.summarize import summarize
from tests.support.commands import dynabench
from workloads import Request, Workload
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

SHAPE = ShapeConfig(max_requests=400)
WORKLOAD = source_of((), ExperimentConfig())(SHAPE)
LENGTHS = sorted((request.input_length for request in WORKLOAD), reverse=True)


@pytest.mark.parametrize(
    ("limited", "allowed"),
    [
        ("ttft.p50", 200),
        ("ttft.p90", 40),
        ("ttft.p95", 20),
        ("ttft.p99", 4),
        ("e2e.mean", 1),
        ("e2e.max", 1),
        ("itl.mean", 1),
    ],
)
@pytest.mark.parametrize("nearest", [-1, 0, 1])
def test_a_limit_is_missed_by_refusals_alone_where_a_simulation_with_any_workers_misses_it(limited, allowed, nearest):
    """Contexts that refuse about as many requests as a percentile allows, and as a mean and a maximum do not."""
    context = LENGTHS[allowed + nearest] + (allowed == 1)
    limit = slo.parse_slo(f"{limited} <= 900s")
    engine = EngineConfig(max_model_len=context, num_gpu_blocks=4000)
    deployment = Deployment(pools=(Pool(replicas=8, mocker=engine, timing=TimingConfig()),))
    record = simulate(Run.alone(Settings(deployment, SHAPE)), WORKLOAD)
    [outcome] = summarize([record], [limit]).arms[record.arm].outcomes
    reason = missed_by_refusals(WORKLOAD, LoadConfig(), Longest(context), [limit], 0.99)
    assert (reason is not None) is (outcome.state == "missed")


@pytest.mark.parametrize("attainment", [0.93, 0.95, 0.99])
def test_limits_per_request_are_not_missed_by_as_many_refusals_as_they_allow(attainment):
    """Of 100 prompts, as many do not fit the context as may be late, and one more."""
    for more in (0, 1):
        refused = round(100 * (1 - attainment)) + more
        requests = [Request(n / 10, 900 if n < refused else 50, 4, (n,)) for n in range(100)]
        workload, limit = Workload("some", 1024, requests, knows_prefixes=False), slo.parse_slo("ttft <= 900s")
        reason = missed_by_refusals(workload, LoadConfig(), Longest(500), [limit], attainment)
        outcome = of_requests([limit], Goodput(100 - refused, 100, (100 - refused) / 100, None), attainment)
        assert (reason is not None) is (outcome.state == "missed") is (more == 1)


def test_a_plan_says_at_once_that_too_many_requests_do_not_fit_and_what_to_do(tmp_path):
    flags = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--max-model-len", "6000", "--max-requests", "400")
    done = dynabench("plan", *flags, "--slo", "ttft.p90 <= 5s", "--out", tmp_path / "out")
    answer = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert (done.returncode, answer["simulated"]) == (1, 0)
    text = " ".join(done.stdout.split())
    assert "requests do not fit the context of 6,000 tokens and fail with any number of GPUs" in text
    assert "or cut prompts with --cap-isl" in text
    each = dynabench("plan", *flags, "--slo", "ttft <= 5s", "--out", tmp_path / "each")
    assert (each.returncode, "too many for ttft <= 5000 ms" in " ".join(each.stdout.split())) == (1, True)


@pytest.mark.parametrize("limit", ["ttft.mean <= 2s", "e2e.max <= 100s"])
def test_neither_a_plan_nor_a_comparison_meets_a_mean_or_maximum_of_the_few_requests_that_it_answered(tmp_path, limit):
    flags = ("--model", "Qwen/Qwen3-8B", "--gpu", "h100", "--max-model-len", "3000", "--max-requests", "60")
    plan = dynabench("plan", *flags, "--slo", limit, "--out", tmp_path / "plan")
    assert (plan.returncode, "fail with any number of GPUs" in " ".join(plan.stdout.split())) == (1, True)
    gate = limit.replace("<=", ">")
    run = dynabench("simulate", *flags, "--slo", limit, "--fail-if", gate, "--out", tmp_path / "run")
    assert (run.returncode, "is at infinity, because requests failed" in run.stdout + run.stderr) == (1, True)
    [outcome] = next(iter(json.loads((tmp_path / "run" / "summary.json").read_text())["arms"].values()))["outcomes"]
    assert (outcome["state"], outcome["reason"]) == ("missed", "requests failed, and each counts as infinite")


def test_a_search_for_workers_ends_before_it_begins_if_too_many_requests_do_not_fit(tmp_path):
    flags = ("--max-model-len", "6000", "--max-requests", "400", "--slo", "ttft.p90 <= 5s", "--out", tmp_path / "out")
    done = dynabench("sweep", "--find", "workers", "--high", "64", *flags)
    assert done.returncode == 2
    assert "requests do not fit the context of 6,000 tokens and fail with any number of GPUs" in done.stderr
    assert not list((tmp_path / "out").glob("points/*"))


def test_only_requests_that_count_are_refused_too_often():
    """Those after five seconds do not count."""
    longest = max(request.input_length for request in WORKLOAD if request.arrival_s <= 5)
    limit = slo.parse_slo("ttft.p99 <= 900s")
    shorter = sum(request.input_length > longest for request in WORKLOAD)
    assert shorter > 4
    assert missed_by_refusals(WORKLOAD, LoadConfig(), Longest(longest + 1), [limit], 0.99) is not None
    assert missed_by_refusals(WORKLOAD, LoadConfig(measure_s=5), Longest(longest + 1), [limit], 0.99) is None

"""Requests with priorities in virtual time, and what is said of settings that change nothing."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.no_effect import no_effect
from dynabench.virtual.run import simulate as run_plan
from mocker import EngineConfig
from reports.figures.insight import remarks
from serving.life import DisaggregationConfig
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from workloads import Request, Workload, formats

PRIORITY = EngineConfig(max_num_seqs=1, scheduling_policy="priority")
FCFS = EngineConfig(max_num_seqs=1)


def workload(*priorities):
    """Return requests that arrive at about the same time, the first while nothing runs."""
    return Workload("w", 16, [Request(1e-6 * n, 16, 4, (n,), priority=level) for n, level in enumerate(priorities)])


@pytest.mark.parametrize(("engine", "order"), [(PRIORITY, [0, 3, 2, 1]), (FCFS, [0, 1, 2, 3])])
def test_requests_with_the_smallest_priority_go_first_if_the_engine_schedules_by_it(engine, order):
    run = simulate_pool(workload(0, 2, 1, -1), engine=engine)
    assert np.argsort(run.requests.first_token_s).tolist() == order


@pytest.mark.parametrize(
    ("clock", "priorities", "engines", "said"),
    [
        ("virtual", (1, 1), (FCFS, PRIORITY), "orders requests by arrival, as fcfs does, because all have the same"),
        ("virtual", (0, 1), (FCFS, FCFS), "the requests' priorities, because the engines' scheduling_policy is fcfs"),
        ("virtual", (0, 1), (FCFS, PRIORITY), None),
        ("virtual", (0, 0), (FCFS, FCFS), None),
        ("wall", (0, 1), (PRIORITY,), "priorities are not sent over HTTP"),
    ],
)
def test_what_priorities_cannot_change_is_said(clock, priorities, engines, said):
    found = no_effect(clock, workload(*priorities), [deployed(engine=engine) for engine in engines])
    assert (said in found["No effect"]) if said else not found


def test_the_way_to_priorities_is_a_command_not_a_file_of_the_checkout():
    said = no_effect("virtual", workload(1, 1), [deployed(engine=PRIORITY)])["No effect"]
    assert "`dynabench workload synth --priority-levels 2` makes some with two" in said
    assert "docs/" not in said


def test_router_modes_of_one_worker_are_said_to_be_alike():
    one, two = ([deployed(mode, workers=count) for mode in ("kv", "random")] for count in (1, 2))
    assert "with one worker, router modes differ at most" in no_effect("virtual", workload(0), one)["No effect"]
    assert not no_effect("virtual", workload(0), two)


def test_priorities_made_by_the_synthesizer_tell_the_policies_apart(tmp_path):
    made = tmp_path / "made.jsonl"
    dynabench("workload", "synth", made, "--requests", 60, "--rate", 50, "--priority-levels", 2)
    policies = ("--vary", "scheduling_policy=fcfs,priority", "--max-num-seqs", 4)
    text = dynabench("simulate", made, *policies, "--router-mode", "kv", "--out", tmp_path / "out").stdout
    assert "scheduling_policy fcfs vs scheduling_policy priority" in text
    assert "No effect" not in text
    assert "exactly the same" not in text


def test_an_arm_says_how_long_requests_of_each_priority_waited():
    run = simulate_pool(workload(0, 2, 1, 2), engine=PRIORITY)
    (said,) = [remark for remark in remarks([run]) if "priority" in remark]
    ttft_ms = (run.requests.first_token_s - run.requests.intended_s) * 1e3
    shown = [f"{np.mean(ttft_ms[list(rows)]):,.4g} ms ({level})" for level, rows in enumerate([(0,), (2,), (1, 3)])]
    assert said == f"mean TTFT by priority, the lowest value first: {', '.join(shown)}"
    assert not any("priority" in remark for remark in remarks([simulate_pool(workload(1, 1), engine=PRIORITY)]))


def test_a_results_folder_keeps_priorities(tmp_path):
    made = tmp_path / "made.jsonl"
    dynabench("workload", "synth", made, "--requests", 30, "--rate", 50, "--priority-levels", 3)
    dynabench("simulate", made, "--router-mode", "kv", "--out", tmp_path / "out")
    once, again = (Counter(r.priority for r in formats.read(path)) for path in (made, tmp_path / "out"))
    assert once == again
    assert set(once) == {0, 1, 2}


@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_workers_that_only_prefill_compute_prompts_in_order_of_priority(flow):
    pools = tuple(Pool(name=role, role=role, mocker=PRIORITY) for role in ("prefill", "decode"))
    pools = (pools[0], replace(pools[1], mocker=EngineConfig(scheduling_policy="priority")))
    deployment = Deployment(pools=pools, router_mode="round-robin", disaggregation=DisaggregationConfig(flow=flow))
    run = run_plan(Run.alone(Settings(deployment)), workload(0, 2, 1, -1))
    assert np.argsort(run.requests.prefill_end_s).tolist() == [0, 3, 2, 1]

"""The fewest workers that keep the limits in each part of a trace."""

import functools
import signal
from dataclasses import replace

import pytest

from dynabench.arm import Arm, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.oracle import oracles_of
from dynabench.interrupt import Flag, Interrupt
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.figures.slo import parse_slo
from serving.planner import PlannerConfig
from tests.dynabench.test_handover import BLOCK, apart, workload
from workloads.pacing import LoadConfig

SECOND = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=10.0)
"""A worker whose prompts are computed one by one, in a second each."""
PLANNER = PlannerConfig(planner="hpa")


def deployment(**settings):
    engine = EngineConfig(block_size=BLOCK, num_gpu_blocks=1000, max_num_batched_tokens=1024, max_num_seqs=64)
    pool = Pool(replicas=1, mocker=engine, timing=SECOND)
    return Deployment(pools=(pool,), planner=PLANNER, **settings)


def source(requests, shape):
    return requests


def oracle(deployment, requests, *limits, jobs=1, load=LoadConfig()):  # noqa: B008
    arm = Arm("a", Settings(deployment, load=load), {})
    with Interrupt() as interrupt:
        found = oracles_of(
            [arm], functools.partial(source, requests), [parse_slo(limit) for limit in limits], jobs, interrupt
        )
    return found.get("a")


def each_second(start, stop, count):
    """Return so many prompts of a step each, at each whole second."""
    return [(float(second), 1024, 1) for second in range(start, stop) for _ in range(count)]


def test_each_window_has_the_fewest_workers_that_keep_it():
    """A worker computes a prompt a second: three at once take three workers to be there within 1.5 s."""
    requests = workload(
        *each_second(0, 60, 1), *each_second(60, 120, 3), *each_second(120, 180, 2), *each_second(240, 300, 1)
    )
    found = oracle(deployment(), requests, "ttft <= 1.5s")
    assert found.window_s == 60.0
    assert found.replicas == {"worker": (1, 3, 2, 1, 1)}
    assert found.possible == (1.0,) * 5


def test_requests_that_no_number_of_workers_answers_in_time_do_not_count():
    long = [(float(second) + 0.5, 4096, 1) for second in range(0, 60, 4)]
    found = oracle(
        deployment(router_mode="least-loaded"), workload(*sorted(each_second(0, 60, 1) + long)), "ttft <= 1.5s"
    )
    assert found.possible == (pytest.approx(60 / 75),)
    assert found.replicas == {"worker": (2,)}


def test_prefill_and_decode_workers_are_counted_each():
    made = replace(
        apart(1, 1, timing=replace(SECOND, constant_decode_ms=20.0), budget=1024, blocks=1000), planner=PLANNER
    )
    requests = workload(*each_second(0, 60, 2))
    assert oracle(made, requests, "ttft <= 1.5s").replicas == {"prefill": (2,), "decode": (1,)}


def test_no_more_workers_are_counted_than_there_are_gpus_for():
    found = oracle(deployment(gpus=2), workload(*each_second(0, 60, 4)), "ttft <= 1.5s")
    assert found.replicas == {"worker": (2,)}


def test_parts_are_searched_at_once_and_joined_in_order():
    counts = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    requests = workload(
        *[row for place, count in enumerate(counts) for row in each_second(60 * place, 60 * place + 60, count)]
    )
    found = oracle(deployment(), requests, "ttft <= 1.5s", jobs=2)
    assert found.replicas == {"worker": tuple(counts)}
    assert found == oracle(deployment(), requests, "ttft <= 1.5s", jobs=1)


def test_signals_are_heard_after_a_search_in_one_process():
    oracle(deployment(), workload(*each_second(0, 60, 1)), "ttft <= 1.5s")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("load", [LoadConfig(concurrency=4), LoadConfig(max_concurrency=4)])
def test_requests_that_wait_for_clients_have_no_oracle(load):
    assert oracle(deployment(), workload(*each_second(0, 60, 1)), "ttft <= 1.5s", load=load) is None


def test_a_fleet_that_stays_as_it_is_needs_no_oracle():
    static = replace(deployment(), planner=PlannerConfig())
    assert oracle(static, workload(*each_second(0, 60, 1)), "ttft <= 1.5s") is None


class RaisedLater(Flag):
    """A flag that is raised when it has been looked at twice: by the call, and for its first window."""

    looks = 0

    def is_raised(self):
        RaisedLater.looks += 1
        return RaisedLater.looks > 2


def test_an_interrupted_search_has_no_oracle_rather_than_one_of_some_windows():
    requests = workload(*each_second(0, 240, 1))
    RaisedLater.looks = 0
    with Interrupt() as interrupt:
        interrupt.flag = RaisedLater(*interrupt.flag)
        arm = Arm("a", Settings(deployment()), {})
        found = oracles_of([arm], functools.partial(source, requests), [parse_slo("ttft <= 1.5s")], 1, interrupt)
    assert RaisedLater.looks == 3
    assert found == {}

"""The installed vLLM's scheduler as judge: audits of random scenarios and of three kinds of traces."""

import random
import sys
from dataclasses import replace

import pytest

from dynabench.arm import Settings
from dynabench.fidelity.audit.run import audit, rules_for
from dynabench.fidelity.audit.scenarios import scenario
from dynabench.fidelity.audit.suspects import with_engines
from dynabench.installed.process import scheduler_process
from mocker import EngineConfig
from mocker.vllm.flipped import with_rule_flipped
from mocker.vllm.versions import RULES
from tests.installed.test_audit import CONTENDED, contended, settings
from tests.support.simulated import deployed
from tests.support.workloads import bursty, conversations
from workloads import Request, Workload

pytestmark = pytest.mark.timeout(600)
NUM_SCENARIOS = 60


@pytest.fixture(scope="module")
def process():
    with scheduler_process(sys.executable) as process:
        yield process


def test_random_scenarios_are_identical(process):
    version, num_preemptions = rules_for(process.release), 0
    for seed in range(NUM_SCENARIOS):
        found = audit(*scenario(seed, version), process, seed=seed)
        assert found.difference is None, f"scenario {seed}: {found.difference}, {found.explanations}"
        num_preemptions += int(found.left.record.requests.preemptions.sum())
    assert num_preemptions > 100


def agents(count, *, seed=0):
    """Sessions that call a model again and again, each time with the whole history and one more result."""
    rng, requests = random.Random(seed), []
    for session in range(count):
        now, length = rng.uniform(0.0, 20.0), rng.randint(600, 1500)
        for _ in range(rng.randint(3, 10)):
            ids = tuple(range(1000 * session, 1000 * session + -(-length // 64)))
            requests.append(Request(now, length, rng.randint(10, 150), ids))
            now, length = now + rng.uniform(0.5, 4.0), length + rng.randint(100, 600)
    return Workload("agents", 64, sorted(requests, key=lambda one: one.arrival_s))


TRACES = {"conversations": conversations(150), "bursts": bursty(150), "agents": agents(30)}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("mode", ["round-robin", "kv"])
def test_traces_are_identical(process, trace, mode):
    engine = EngineConfig(block_size=16, num_gpu_blocks=1500, max_num_batched_tokens=2048)
    found = audit(Settings(deployed(mode, workers=2, engine=engine)), TRACES[trace], process)
    assert found.difference is None
    assert found.right.num_steps > 300


def test_a_rule_of_ours_that_is_changed_is_found_and_named(process):
    version = rules_for(process.release)
    assert not RULES["0.32"].goes_on_after_victim
    changed = with_engines(
        settings().deployment,
        lambda config: with_rule_flipped(replace(CONTENDED, engine_version=version), "goes_on_after_victim"),
    )
    found = audit(Settings(changed), contended(), process)
    assert found.difference is not None
    assert found.explanations[0].rule == "goes_on_after_victim"
    assert found.explanations[0].difference is None

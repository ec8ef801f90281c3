"""What simulation costs: bytecode instructions of our own code for each request, the same on a busy machine as on a quiet one.

If a change costs more, make it cheaper, or raise its budget here and say in the commit what the cost buys. If it costs
less, lower the budget. `python -m tests.dynabench.test_cost` prints the costs, and the functions that cost most.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from workloads import Workload
from workloads.synthesize import SynthConfig, synthesize

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynabench", "foundation", "mocker", "reports", "serving", "workloads")
OURS = tuple(f"{ROOT / package}/" for package in PACKAGES)
NUM_REQUESTS = 300
SLACK = 0.01


def deployment(mode, workers=8, **engine):
    config = EngineConfig(block_size=64, num_gpu_blocks=4096, **engine)
    return Deployment(pools=(Pool(replicas=workers, mocker=config),), router_mode=mode)


def apart(mode):
    config = EngineConfig(block_size=64, num_gpu_blocks=4096)
    pools = [Pool(name=role, role=role, replicas=4, mocker=config) for role in ("prefill", "decode")]
    return Deployment(pools=tuple(pools), router_mode=mode)


CASES = {
    "round-robin": (deployment("round-robin"), 10_290),
    "kv": (deployment("kv"), 13_020),
    "kv, 64 workers": (deployment("kv", 64), 14_780),
    "marginal-all, 64 workers": (deployment("marginal-all", 64), 14_360),
    "kv, synchronous": (deployment("kv", async_scheduling=False), 11_250),
    "kv, host memory": (deployment("kv", kv_offloading_size=64), 22_570),
    "kv, prefill and decode apart": (apart("kv"), 23_090),
}
"""Deployments, and the instructions that a request may cost in each."""


def workload(workers):
    config = SynthConfig(requests=NUM_REQUESTS, rate=workers, isl=1000, osl=64, prefix_groups=20)
    return Workload("synthetic", 512, synthesize(config))


def costs(deployment):
    """Return the instructions for each request, by function."""
    executed = Counter()

    def enter(frame, event, argument):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return execute

    def execute(frame, event, argument):
        if event == "opcode":
            executed[frame.f_code] += 1
        return execute

    run, requests = Run.alone(Settings(deployment)), workload(sum(pool.replicas for pool in deployment.pools))
    simulate(run, requests)  # fills the caches of settings
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        simulate(run, requests)
    finally:
        sys.settrace(before)
    return Counter({code: count / NUM_REQUESTS for code, count in executed.items()})


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the instructions of another Python are others")
@pytest.mark.parametrize("name", CASES)
def test_a_request_costs_what_it_may_and_not_less(name):
    deployment, budget = CASES[name]
    cost = costs(deployment).total()
    change = f"{name}: {cost:,.0f} instructions a request, {cost / budget - 1:+.1%} of the budget of {budget:,}"
    assert budget * (1 - 3 * SLACK) <= cost <= budget * (1 + SLACK), change


if __name__ == "__main__":
    for name, (made, budget) in CASES.items():
        found = costs(made)
        print(f"{name}: {found.total():,.0f} instructions a request; budget {budget:,}")
        for code, count in found.most_common(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
            print(
                f"  {count:8.1f}  {code.co_qualname} ({Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno})"
            )

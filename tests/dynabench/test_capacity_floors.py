"""What a layout needs at least, and what it may well need, before anything is simulated."""

import pytest
from msgspec import structs

from dynabench.capacity.floors import floor_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.plan import Settings
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports import slo
from tests.support.workloads import bursty
from workloads import Workload
from workloads.shape import shape


@pytest.fixture(scope="module")
def source():
    whole = bursty(400)
    return lambda config: shape(whole, config)


def denser(count, times):
    requests = [structs.replace(one, arrival_s=one.arrival_s / times) for one in bursty(count).requests]
    return lambda config: shape(Workload("dense", 16, requests), config)


def floor(source, *limits, chunk=512, roles=("aggregated",), **engine):
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    pools = tuple(
        Pool(name=role, role=role, mocker=EngineConfig(max_num_batched_tokens=chunk, **engine), timing=timing)
        for role in roles
    )
    return floor_of(Settings(Deployment(pools=pools)), source, [slo.parse(limit) for limit in limits])


def test_where_a_step_with_a_prompt_is_beyond_the_limit_many_workers_are_expected(source):
    assert floor(source, "itl.p99 <= 500ms", chunk=8192).expected == 1
    assert floor(source, "itl.p99 <= 20ms", chunk=8192).expected > floor(source, "itl.p90 <= 20ms", chunk=8192).expected
    assert floor(source, "itl.p99 <= 20ms", chunk=8192, roles=("prefill", "decode")).expected == 1
    assert floor(source, "itl.mean <= 20ms", chunk=8192).expected == 1


def test_what_is_expected_bounds_nothing(source):
    tight, wide = (floor(source, f"itl.p99 <= {limit}ms", chunk=8192) for limit in (20, 500))
    assert tight.workers == wide.workers
    assert not tight.impossible


def test_a_worker_does_the_work_of_its_ranks():
    source = denser(4000, 200)
    limit = "ttft.p99 <= 500ms"
    one, four = floor(source, limit), floor(source, limit, dp_size=4)
    assert one.workers > 4
    assert four.workers == -(-one.workers // 4) or four.workers == one.workers // 4 + 1


def test_work_may_end_as_late_as_the_limits_allow():
    source = denser(400, 500)
    assert floor(source, "e2e.p90 <= 1000s").workers == 1
    assert floor(source, "ttft.p90 <= 100ms").workers > 1

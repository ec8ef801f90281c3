"""What a layout needs at least, and what it may well need, before anything is simulated."""

import pytest

from dynabench.capacity.floors import floor_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.plan import Settings
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports import slo
from tests.support.workloads import bursty
from workloads.shape import shape


@pytest.fixture(scope="module")
def source():
    whole = bursty(400)
    return lambda config: shape(whole, config)


def floor(source, *limits, chunk=512, roles=("aggregated",)):
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    pools = tuple(
        Pool(name=role, role=role, mocker=EngineConfig(max_num_batched_tokens=chunk), timing=timing) for role in roles
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

"""How full the KV is over time, in virtual time."""

import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.kv_use import KvUse
from dynabench.live.kv_watch import KvWatch
from dynabench.live.run import measure
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from tests.dynabench.test_pool_use import pool, simulated
from workloads import Request, Workload


def test_what_is_noted_lands_in_its_windows():
    use = KvUse()
    use.add(0.0, 0.25, 1.0)
    use.add(0.1875, 0.4375, 0.5)
    assert use.shares(0.5, [(0.0, 0.5)] * 2) == (0.125, (0.5, 0.625, 0.25, 0.125))


def test_windows_double_when_the_run_outlasts_them():
    use = KvUse()
    use.add(0.0, 1000.0, 0.25)
    use.add(1000.0, 3000.0, 0.75)
    window_s, shares = use.shares(3000.0, [(0.0, 3000.0)])
    assert window_s == 16.0
    assert len(shares) == 187
    assert shares[:62] == (0.25,) * 62
    assert shares[-1] == 0.75
    assert sum(shares) * window_s == pytest.approx(1750, rel=0.02)


def test_an_engine_in_between_two_requests_uses_nothing():
    """Six blocks of 200 for a quarter of a second, ten seconds apart."""
    workload = Workload("w", 16, [Request(at, 96, 5, tuple(range(6))) for at in (0.0, 10.0)])
    (use,) = simulated(pool("aggregated"), workload=workload).kv
    assert use.pool == "aggregated"
    assert use.shares[0] == pytest.approx(6 / 200, abs=0.006)
    assert all(share == 0 for share in use.shares[3:79])
    assert use.shares[80] == pytest.approx(6 / 200, abs=0.006)


def test_each_pool_is_told_apart():
    made = simulated(pool("prefill", replicas=2), pool("decode"))
    assert [use.pool for use in made.kv] == ["prefill", "decode"]
    assert all(max(use.shares) > 0 for use in made.kv)


def test_a_live_run_says_how_full_the_kv_is():
    """One request of 100 blocks, later 125, of the 399 that two workers have, for four seconds."""
    timing = TimingConfig(timing="constant", constant_prefill_ms=10, constant_decode_ms=10)
    engine = {"mocker": EngineConfig(block_size=16, num_gpu_blocks=200), "timing": timing}
    deployment = Deployment(
        pools=(Pool(name="mine", replicas=2, **engine),),
        router=MeasuredRouterConfig(),
        frontend=MeasuredFrontendConfig(),
    )
    workload = Workload("w", 16, [Request(0.0, 1600, 400, tuple(range(100)))])
    record = measure(Run.alone(Settings(deployment, client=ClientConfig())), workload)
    [use] = record.kv
    assert use.pool == "mine"
    assert 100 / 400 < max(use.shares) < 130 / 398


def test_what_metrics_say_is_summed_up_by_role_once_all_ranks_have_reported():
    watch = KvWatch("http://127.0.0.1:1", {"prefill": 1, "decode": 2})
    gauge = 'dynamo_component_kv_{}_blocks{{instance="1",model="m",rank="0",worker_type="{}"}} {}\n'
    rows = [
        ("total", "prefill", "1e2"),
        ("active", "prefill", 10.0),
        ("total", "decode", 100),
        ("active", "decode", 99),
    ]
    watch._note("".join(gauge.format(*row) for row in rows).encode() + b"else 1\n")
    assert set(watch._uses) == {"prefill"}
    rows += [("total", "decode", 300), ("active", "decode", 1)]
    watch._note("".join(gauge.format(*row) for row in rows).encode())
    areas = {role: sum(use._areas) for role, use in watch._uses.items()}
    assert areas["prefill"] / (watch._until_s - watch._start_s) == pytest.approx(0.1)
    assert 0 < areas["decode"] < 0.25 * (watch._until_s - watch._start_s)

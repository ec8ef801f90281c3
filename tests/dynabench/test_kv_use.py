"""How full the KV is over time, in virtual time."""

import pytest

from dynabench.virtual.kv_use import KvUse
from tests.dynabench.test_pool_use import pool, simulated
from workloads import Request, Workload


def test_what_is_noted_lands_in_its_windows():
    use = KvUse(2)
    use.add(0.0, 0.25, 1.0)
    use.add(0.1875, 0.4375, 0.5)
    assert use.shares(0.5) == (0.125, (0.5, 0.625, 0.25, 0.125))


def test_windows_double_when_the_run_outlasts_them():
    use = KvUse(1)
    use.add(0.0, 1000.0, 0.25)
    use.add(1000.0, 3000.0, 0.75)
    window_s, shares = use.shares(3000.0)
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

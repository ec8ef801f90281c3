import itertools

import pytest

from workloads.describe import describe_workload
from workloads.thin import sessions_of, thin


def test_thinning_keeps_sessions_whole(workload):
    kept = thin(workload, 0.3, seed=1)
    before, after = sessions_of(workload), set(kept.requests)
    for name, members in itertools.groupby(
        sorted(range(len(workload)), key=before.__getitem__), key=before.__getitem__
    ):
        inside = {workload.requests[number] in after for number in members}
        assert len(inside) == 1, name
    assert 0.2 < len(kept) / len(workload) < 0.4
    assert describe_workload(kept).endless_cache_hit_share == pytest.approx(
        describe_workload(workload).endless_cache_hit_share, abs=0.05
    )

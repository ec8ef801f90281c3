import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from tests.support.workloads import conversations
from workloads import Request, Workload, formats, tools
from workloads.arrivals import times
from workloads.describe import describe
from workloads.fit import fit, make, read_spec
from workloads.request import WorkloadError, select
from workloads.shape import ShapeConfig, shape

TRACES = Path(__file__).parent.parent.parent.parent / "shared" / "traces"


@pytest.fixture(scope="module")
def workload():
    return conversations(1500, rate=5, turns=4, prefix_groups=6)


def test_thinning_keeps_sessions_whole(workload):
    kept = tools.thin(workload, 0.3, seed=1)
    before, after = tools.sessions_of(workload), set(kept.requests)
    for name, members in itertools.groupby(
        sorted(range(len(workload)), key=before.__getitem__), key=before.__getitem__
    ):
        inside = {workload.requests[number] in after for number in members}
        assert len(inside) == 1, name
    assert 0.2 < len(kept) / len(workload) < 0.4
    assert describe(kept).endless_cache_hit_share == pytest.approx(describe(workload).endless_cache_hit_share, abs=0.05)


def test_longer_prompts_share_as_much(workload):
    longer = tools.scale_lengths(workload, 2.0, 0.5)
    assert longer.block_size == 1024
    assert describe(longer).isl["mean"] == pytest.approx(2 * describe(workload).isl["mean"], rel=0.01)
    assert describe(longer).osl["mean"] == pytest.approx(describe(workload).osl["mean"] / 2, rel=0.02)
    assert describe(longer).endless_cache_hit_share == pytest.approx(
        describe(workload).endless_cache_hit_share, abs=1e-3
    )


def test_merged_workloads_share_only_if_they_are_parts_of_one(workload):
    parts = [Workload("a", 512, workload.requests[:700]), Workload("b", 512, workload.requests[700:])]
    apart, together = tools.merge(parts), tools.merge(parts, is_shared=True)
    assert [request.hash_ids for request in together] == [request.hash_ids for request in workload]
    assert describe(apart).endless_cache_hit_share < describe(together).endless_cache_hit_share
    assert [request.arrival_s for request in apart] == sorted(request.arrival_s for request in workload)


def test_merging_renumbers_what_requests_wait_for():
    one = Workload("a", 64, [Request(0.0, 1, 1, (0,), "s"), Request(2.0, 1, 1, (1,), "s", (0,))])
    merged = tools.merge([one, Workload("b", 128, [Request(1.0, 100, 1, (0,))])])
    assert [request.after for request in merged] == [(), (), (0,)]
    assert merged.block_size == 64


def test_an_anonymous_trace_tells_lengths_times_and_sharing_only():
    secret = Workload(
        "w", 4, [Request(0.0, 4, 1, (7000,), "alice", (), 0.0, "text"), Request(1.0, 4, 2, (7000,), "bob")]
    )
    one, two = tools.anonymise(secret)
    assert (one.hash_ids, two.hash_ids, one.session, two.session, one.content) == ((0,), (0,), "0", "1", None)


def test_a_fitted_spec_makes_a_workload_alike(workload):
    spec = fit(workload)
    made = Workload("m", 512, make(spec, seed=3))
    real, like = describe(workload), describe(made)
    assert like.isl["mean"] == pytest.approx(real.isl["mean"], rel=0.1)
    assert like.osl["mean"] == pytest.approx(real.osl["mean"], rel=0.1)
    assert like.rate == pytest.approx(real.rate, rel=0.15)
    assert like.endless_cache_hit_share == pytest.approx(real.endless_cache_hit_share, abs=0.08)
    assert make(spec, seed=3) == make(spec, seed=3)
    with pytest.raises(WorkloadError, match="schema is 'other'"):
        read_spec(
            b'{"schema":"other","name":"","block_size":1,"requests":1,"gaps_s":[],"reuse_share":0,"reuses":[],"fresh_tokens":[],"first_tokens":[],"output_tokens":[]}',
            "f",
        )


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz"])
@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not here (../shared/traces)")
def test_the_spec_of_a_real_trace_keeps_its_sharing(name):
    trace = formats.read(TRACES / name)
    real, like = describe(trace), describe(Workload("m", 512, make(fit(trace))))
    assert like.endless_cache_hit_share == pytest.approx(real.endless_cache_hit_share, abs=0.03)
    assert like.isl["mean"] == pytest.approx(real.isl["mean"], rel=0.05)


def arrivals(count, **options):
    return np.array(list(itertools.islice(times(random.Random(1), **options), count)))


def test_arrivals_are_absolute_and_have_their_rate():
    assert arrivals(5, process="constant", rate=4.0).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    for process, burstiness, cv in (("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)):
        gaps = np.diff(arrivals(20_000, process=process, rate=10.0, burstiness=burstiness))
        assert gaps.mean() == pytest.approx(0.1, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_ramp_and_a_sine_have_their_rates():
    ramp = arrivals(2000, process="constant", rate=10.0, profile="ramp", rate_to=30.0, profile_s=50.0)
    rates = np.histogram(ramp, [0, 1, 24.5, 25.5, 49, 50, 60])[0] / [1, 23.5, 1, 23.5, 1, 10]
    assert rates[[0, 2, 4]] == pytest.approx([10, 20, 30], abs=1.1)
    sine = arrivals(2000, process="constant", rate=10.0, profile="sine", rate_to=30.0, profile_s=40.0)
    rates = np.histogram(sine, [0, 1, 9.5, 10.5, 19.5, 20.5, 39.5, 40.5])[0]
    assert rates[[0, 2, 4, 6]] == pytest.approx([10, 20, 30, 10], abs=1.1)


def test_new_arrivals_leave_the_order_and_the_sharing(workload):
    shaped = shape(workload, ShapeConfig(arrival="constant", rate=2.0))
    assert [request.hash_ids for request in shaped] == [request.hash_ids for request in workload]
    assert shaped.requests[2].arrival_s == 1.0
    kept = shape(workload, ShapeConfig(arrival="poisson"))
    assert describe(kept).rate == pytest.approx(describe(workload).rate, rel=0.1)


def test_cutting_keeps_what_requests_wait_for():
    rows = [Request(float(n), 1, 1, (n,), "", (n - 1,) if n else ()) for n in range(5)]
    assert [request.after for request in select(rows, [1, 2, 4])] == [(), (0,), ()]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rate": 2.0}, "name the process with --arrival"),
        ({"arrival": "poisson", "rate_scale": 2.0}, "with --arrival, give --rate"),
        ({"arrival": "poisson", "rate_profile": "ramp"}, "rate_to is where a ramp or sine goes to"),
        ({"thin": 1.5}, "thin is a share"),
        ({"isl_scale": 0.0}, "isl_scale must be greater than 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ShapeConfig(**settings)

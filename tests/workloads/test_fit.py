from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from workloads import Workload, WorkloadError, formats
from workloads.describe import describe_workload
from workloads.fit import fit_workload, make_workload, read_spec
from workloads.shape import ShapeConfig, shape

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def test_a_fitted_spec_makes_a_workload_alike(workload):
    spec = fit_workload(workload)
    made = Workload("m", 512, make_workload(spec, seed=3))
    real, like = describe_workload(workload), describe_workload(made)
    assert like.isl["mean"] == pytest.approx(real.isl["mean"], rel=0.1)
    assert like.osl["mean"] == pytest.approx(real.osl["mean"], rel=0.1)
    assert like.rate == pytest.approx(real.rate, rel=0.15)
    assert like.endless_cache_hit_share == pytest.approx(real.endless_cache_hit_share, abs=0.08)
    assert make_workload(spec, seed=3) == make_workload(spec, seed=3)
    with pytest.raises(WorkloadError, match="schema is 'other'"):
        read_spec(
            b'{"schema":"other","name":"","block_size":1,"requests":1,"gaps_s":[],"reuse_share":0,"reuses":[],"fresh_tokens":[],"first_tokens":[],"output_tokens":[]}',
            "f",
        )


def test_a_spec_keeps_how_answers_end(workload):
    stopped = replace(workload, requests=shape(workload, ShapeConfig(ends="stop")).requests)
    halves = replace(workload, requests=[*workload.requests[::2], *stopped.requests[1::2]])
    for source, share in ((workload, 0.0), (stopped, 1.0), (halves, 0.5)):
        ends = [request.ends for request in make_workload(fit_workload(source), requests=400)]
        assert ends.count("stop") / 400 == pytest.approx(share, abs=0.08)


def test_a_spec_keeps_the_shares_of_priorities(workload):
    with_two = [msgspec.structs.replace(request, priority=number % 4 // 3) for number, request in enumerate(workload)]
    spec = read_spec(msgspec.json.encode(fit_workload(replace(workload, requests=with_two))), "f")
    assert spec.priorities == [(0, 0.75), (1, 0.25)]
    made = [request.priority for request in make_workload(spec, requests=400)]
    assert made.count(1) / 400 == pytest.approx(0.25, abs=0.08)
    assert not fit_workload(workload).priorities


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz"])
@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not here (../shared/traces)")
def test_the_spec_of_a_real_trace_keeps_its_sharing(name):
    trace = formats.read(TRACES / name)
    real, like = describe_workload(trace), describe_workload(Workload("m", 512, make_workload(fit_workload(trace))))
    assert like.endless_cache_hit_share == pytest.approx(real.endless_cache_hit_share, abs=0.03)
    assert like.isl["mean"] == pytest.approx(real.isl["mean"], rel=0.05)

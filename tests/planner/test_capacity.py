"""C10 and C11: what an engine with NVIDIA Dynamo's polynomial step times can do."""

import pytest

from dynabench.deployment.step_times import SimulatedStepTimes
from mocker.timing.polynomial import Polynomial
from serving.planner.capacity import (
    RequestShape,
    aggregated_capacity,
    decode_capacity,
    drain_s,
    prefill_capacity,
    prefill_per_step,
)
from serving.planner.observation import RequestTraffic
from serving.planner.sizing import capacity_of, merged, workers_for
from tests.planner.fleet import facts

KV_TOKENS = 16384 * 64
DYNAMO = SimulatedStepTimes(Polynomial(KV_TOKENS, 1.0, 1.0))


@pytest.mark.parametrize(
    ("shape", "batch", "ttft_ms", "rps"),
    [
        (RequestShape(3000), 2, 122.758, 16.292),
        (RequestShape(3000, hit_share=0.5), 4, 122.758, 32.584),
        (RequestShape(20000), 1, 415.183, 2.4086),
    ],
)
def test_prefill_capacity_is_that_of_dynamo(shape, batch, ttft_ms, rps):
    found = prefill_capacity(DYNAMO, shape, max_num_seqs=256, max_num_batched_tokens=8192, ttft_s=0.5)
    assert found.batch == batch
    assert found.ttft_s * 1000 == pytest.approx(ttft_ms, abs=5e-4)
    assert found.rps == pytest.approx(rps, abs=5e-4)
    assert found.is_within


def test_decode_capacity_is_that_of_dynamo():
    found = decode_capacity(DYNAMO, RequestShape(3000, 150), max_num_seqs=256, max_kv_tokens=KV_TOKENS, itl_s=0.025)
    assert found.batch == 155
    assert found.itl_s * 1000 == pytest.approx(24.972, abs=5e-4)
    assert found.rps == pytest.approx(41.380, abs=5e-4)
    assert workers_for(40, found.rps) == 1
    assert workers_for(100, found.rps) == 3


def test_if_no_batch_keeps_the_limit_the_one_with_the_most_requests_is_used():
    found = prefill_capacity(DYNAMO, RequestShape(3000), max_num_seqs=256, max_num_batched_tokens=8192, ttft_s=0.01)
    assert not found.is_within
    assert found.batch == 2


def test_an_aggregated_engine_does_less_than_one_that_only_decodes():
    shape = RequestShape(3000, 150)
    found = aggregated_capacity(
        DYNAMO,
        shape,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_kv_tokens=KV_TOKENS,
        ttft_s=0.5,
        itl_s=0.1,
    )
    assert found.is_within
    assert prefill_per_step(shape, found.batch) <= 8192 - found.batch
    assert found.itl_s == DYNAMO.step_s(prefill_per_step(shape, found.batch), found.batch, found.batch * 3075)
    assert found.rps < decode_capacity(DYNAMO, shape, max_num_seqs=256, max_kv_tokens=KV_TOKENS, itl_s=0.1).rps


def test_a_request_that_does_not_fit_the_cache_cannot_be_run():
    assert decode_capacity(DYNAMO, RequestShape(3000, 150), max_num_seqs=256, max_kv_tokens=3000, itl_s=1) is None


def test_a_queue_drains_chunk_by_chunk():
    assert drain_s(DYNAMO, 20000, 8192) == 2 * DYNAMO.step_s(8192) + DYNAMO.step_s(3616)
    assert drain_s(DYNAMO, 0, 8192) == 0


def test_ranks_work_side_by_side():
    one, two = (
        capacity_of(facts(role="decode", num_ranks=ranks, times=DYNAMO), RequestShape(3000, 150), ttft_s=1, itl_s=1)
        for ranks in (1, 2)
    )
    assert two.rps == 2 * one.rps
    assert two.batch == 2 * one.batch


def test_means_of_two_times_are_weighted_by_their_requests():
    first, second = (
        RequestTraffic(duration_s=10, num_requests=30, isl=100),
        RequestTraffic(duration_s=5, num_requests=10, isl=500, osl=7),
    )
    both = merged([first, second])
    assert (both.duration_s, both.num_requests, both.isl, both.osl, both.itl_s) == (15, 40, 200, 7, None)

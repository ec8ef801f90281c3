"""SGLang's disaggregation in virtual time: the decode worker has room first, then the prompt is computed and sent."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.fleet import FleetConfig
from dynabench.virtual.rank_effects import GONE
from mocker import SglangConfig
from mocker.network.config import TransferConfig
from mocker.sglang.core import NO_ROOM
from mocker.timing.config import TimingConfig
from serving.life import DisaggregationConfig
from tests.dynabench.test_handover import BLOCK, CONSTANT, FREE, SLOW, cluster, simulated, workload
from tests.support.examples import worth
from workloads import Request, Workload

PREFILL_S, DECODE_S = 0.2, 0.01


def pool(role, tokens=100_000, *, replicas=1, timing=CONSTANT, **engine):
    config = SglangConfig(page_size=BLOCK, max_total_tokens=tokens, **engine)
    return Pool(name=role, role=role, replicas=replicas, engine_type="sglang", sglang=config, timing=timing)


def apart(*, transfer=FREE, decode=None, prefill=None, **settings):
    pools = (prefill or pool("prefill"), decode or pool("decode"))
    return Deployment(pools=pools, transfer=transfer, **settings)


def test_token_1_comes_from_the_prefill_worker():
    """With links that take no time, TTFT is the prefill (check C19 of the study), and each further token a decode."""
    found = simulated(apart(), workload((0.0, 100, 5), (9.0, 100, 1), (19.0, 100, 2)))
    assert (found.first_token_s - found.sent_s).tolist() == pytest.approx([PREFILL_S] * 3, abs=1e-6)
    assert (found.last_token_s - found.sent_s).tolist() == pytest.approx(
        [PREFILL_S + 4 * DECODE_S, PREFILL_S, PREFILL_S + DECODE_S], abs=1e-6
    )
    assert (found.second_token_s - found.first_token_s).tolist() == [
        pytest.approx(DECODE_S),
        None,
        pytest.approx(DECODE_S),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_token_1_is_not_lost_if_a_request_is_retracted_as_it_starts(seed):
    """Without a reserve, what starts may find no room for its next token in the same iteration, or lose it in flight."""
    rng = random.Random(seed)
    decode = pool("decode", 480, num_reserved_decode_tokens=0, clip_max_new_tokens_estimation=10)
    sizes = [(0.02 * place, rng.randint(20, 120), rng.randint(2, 200)) for place in range(60)]
    found = simulated(apart(decode=decode), workload(*sizes))
    assert (found.preemptions > 0).sum() > 10
    assert set(found.error) <= {"", NO_ROOM}
    assert found.succeeded.sum() > 50
    answered = found[found.succeeded]
    assert not np.ma.getmaskarray(answered.second_token_s).any()
    assert (answered.second_token_s > answered.first_token_s).all()


def test_the_prefill_worker_is_idle_while_the_decode_worker_is_full():
    """Each answer keeps 512 tokens and its prompt 96: a second does not fit into 1,200, and begins when the first has ended."""
    found = simulated(apart(decode=pool("decode", 1200)), workload((0.0, 96, 50), (0.0, 96, 50)))
    ended_s = found.last_token_s[0]
    assert ended_s == pytest.approx(PREFILL_S + 49 * DECODE_S)
    assert found.decode_blocks_s[1] == pytest.approx(ended_s)
    assert found.admitted_s[1] == pytest.approx(ended_s)
    assert found.first_token_s[1] == pytest.approx(ended_s + PREFILL_S)


def test_what_is_kept_for_each_answer_can_be_set():
    decode = pool("decode", 1200, num_reserved_decode_tokens=100)
    found = simulated(apart(decode=decode), workload((0.0, 96, 50), (0.0, 96, 50)))
    assert found.decode_blocks_s.tolist() == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(("overlap", "exposed_s"), [(None, 0.5), ("none", 1.0)])
def test_each_chunk_is_sent_when_it_is_computed(overlap, exposed_s):
    """A prompt of 1 GB is computed in two steps; over 1 GB/s, only its second half is waited for."""
    links = TransferConfig(bandwidth_gb_s=1.0, latency_ms=0.0, kv_bytes_per_token=1e6, overlap=overlap)
    timing = TimingConfig(timing="constant", constant_prefill_ms=600.0, constant_decode_ms=10.0)
    prefill = pool("prefill", timing=timing, chunked_prefill_size=512)
    found = simulated(apart(transfer=links, prefill=prefill), workload((0.0, 1000, 2)))
    assert found.first_token_s[0] - found.prefill_end_s[0] == pytest.approx(exposed_s, abs=0.02)


def test_a_decode_worker_that_keeps_prefixes_is_sent_the_rest():
    alike = Workload("w", BLOCK, [Request(9.0 * n, 320, 2, tuple(range(20))) for n in range(2)])
    links = TransferConfig(bandwidth_gb_s=1.0, latency_ms=0.0, kv_bytes_per_token=1e6)
    for has_tree, took_s in ((False, 0.32), (True, 0.0)):
        decode = pool("decode", disaggregation_decode_enable_radix_cache=has_tree)
        found = simulated(apart(transfer=links, decode=decode), alike)
        assert (found.transfer_end_s - found.prefill_end_s).tolist() == pytest.approx([0.32, took_s], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"disaggregation": DisaggregationConfig(flow="source-first")},
            "disaggregation.flow is 'source-first'; expected",
        ),
        (
            {"disaggregation": DisaggregationConfig(conditional_disagg="isl_bounding")},
            "its decode workers cannot compute",
        ),
        ({"disaggregation": DisaggregationConfig(prefill_fallback=True)}, "disaggregation.prefill_fallback is True"),
        ({"fleet": FleetConfig(drain_policy="hand-over")}, "fleet.drain_policy is 'hand-over'; expected 'wait'"),
        ({"decode": replace(pool("decode"), engine_type="vllm")}, "pools.decode.engine_type is 'vllm'"),
    ],
)
def test_what_sglang_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        apart(**changes)


def test_nobody_gives_an_engine_another_part_than_its_pool():
    with pytest.raises(ValueError, match="disaggregation_mode is 'decode'; expected none"):
        pool("aggregated", disaggregation_mode="decode")


@settings(max_examples=worth(60), deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_request_is_answered_once_and_all_pages_are_free_again(seed):
    rng = random.Random(seed)
    needs = rng.choice([(2000, 64), (100_000, 512)])
    engine = {
        "disable_overlap_schedule": rng.random() < 0.3,
        "chunked_prefill_size": rng.choice([64, 8192]),
        "enable_mixed_chunk": rng.random() < 0.3,
    }
    decode = pool(
        "decode",
        needs[0],
        replicas=rng.randint(1, 2),
        num_reserved_decode_tokens=needs[1],
        max_running_requests=rng.choice([2, 64]),
        disaggregation_decode_enable_radix_cache=rng.random() < 0.3,
        clip_max_new_tokens_estimation=rng.choice([10, 4096]),
        **engine,
    )
    prefill = pool("prefill", rng.choice([1000, 100_000]), replicas=rng.randint(1, 2), **engine)
    events = ""
    if prefill.replicas == decode.replicas == 2:
        events = f"at {rng.random() * 5:.3f}s: kill worker 2; at 6s: kill worker 0"
    fleet = FleetConfig(events=events, startup_s=1.0)
    made = cluster(
        apart(transfer=rng.choice([FREE, SLOW]), decode=decode, prefill=prefill, fleet=fleet),
        workload(*[(rng.random() * 5, rng.randint(1, 600), rng.randint(1, 200)) for _ in range(40)]),
    )
    log, columns = made.log, made.workload.columns
    lost = {GONE} if events else set()  # its KV was on its way, or being sent
    assert set(log.error[: len(columns)]) <= {"", *lost}
    for rank in made.ranks:
        if rank.is_gone:
            continue
        view = rank.engine.view()
        assert (rank.engine.num_free_blocks, view.num_retained, view.num_waiting) == (rank.engine.num_blocks, 0, 0)
    if not events:  # who begins again has the stamps of the last time
        assert np.all(np.array(log.prefill_end_s) <= np.array(log.first_token_s))
        assert np.all(np.array(log.decode_blocks_s) <= np.array(log.prefill_queued_s))

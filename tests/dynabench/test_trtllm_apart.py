"""TensorRT-LLM's disaggregation in virtual time: a context server first; token 1 and the KV go to a generation server."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import check_fits, engines_of
from dynabench.deployment.fleet import FleetConfig
from mocker import TrtllmConfig
from mocker.network.config import TransferConfig
from serving.life import DisaggregationConfig
from tests.dynabench.test_handover import BLOCK, CONSTANT, FREE, SLOW, cluster, simulated, workload
from tests.support.examples import worth

PREFILL_S, DECODE_S = 0.2, 0.01


def pool(role, tokens=100_000, *, replicas=1, **engine):
    config = TrtllmConfig(tokens_per_block=BLOCK, kv_cache_max_tokens=tokens, **engine)
    return Pool(name=role, role=role, replicas=replicas, engine_type="trtllm", trtllm=config, timing=CONSTANT)


def apart(*, transfer=FREE, decode=None, prefill=None, **settings):
    pools = (prefill or pool("prefill"), decode or pool("decode"))
    return Deployment(pools=pools, transfer=transfer, **settings)


def test_token_1_comes_from_the_context_server():
    """With links that take no time, TTFT is the prefill, and each further token a decode."""
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


def test_the_context_server_goes_on_while_the_generation_server_is_full():
    """An answer reserves 96 + 50 tokens of 160 until its end, so a second prompt is computed and waits for its blocks."""
    found = simulated(apart(decode=pool("decode", 160)), workload((0.0, 96, 50), (0.1, 96, 50)))
    first_ends_s = found.last_token_s[0]
    assert found.prefill_end_s.tolist() == pytest.approx([PREFILL_S, 2 * PREFILL_S])
    assert first_ends_s == pytest.approx(PREFILL_S + 49 * DECODE_S)
    assert found.decode_blocks_s[1] == pytest.approx(first_ends_s)
    assert found.first_token_s[1] == pytest.approx(first_ends_s)


def test_transfers_take_what_the_links_say():
    links = TransferConfig(bandwidth_gb_s=1.0, latency_ms=0.0, kv_bytes_per_token=1e6)
    found = simulated(apart(transfer=links), workload((0.0, 96, 3)))
    assert found.first_token_s[0] == pytest.approx(PREFILL_S + 0.096)


def test_a_generation_server_computes_a_whole_request_where_that_is_asked_for():
    config = DisaggregationConfig(conditional_disagg="prefill_load", prefill_busy_tokens=0)
    found = simulated(apart(disaggregation=config), workload((0.0, 96, 3), (0.01, 96, 3)))
    assert found.prefill_worker.tolist() == [0, None]
    assert found.first_token_s[1] == pytest.approx(0.01 + PREFILL_S)


def test_a_generation_server_takes_prompts_that_it_could_not_compute():
    decode = pool("decode", max_num_tokens=64, max_batch_size=64)
    requests = workload((0.0, 96, 3))
    check_fits(requests, engines_of(apart(decode=decode))[1])
    assert simulated(apart(decode=decode), requests).osl.tolist() == [3]


def test_the_order_of_its_steps_cannot_be_changed():
    with pytest.raises(
        ValueError, match=r"disaggregation.flow is 'destination-first'; expected 'source-first', or none"
    ):
        apart(disaggregation=DisaggregationConfig(flow="destination-first"))
    with pytest.raises(ValueError, match=r"transfer.overlap is 'chunk'; expected 'none'"):
        apart(transfer=TransferConfig(overlap="chunk"))
    with pytest.raises(ValueError, match="server_role is 'context'; expected none"):
        pool("aggregated", server_role="context")


@settings(max_examples=worth(60), deadline=None)
@given(st.integers(0, 1 << 32))
def test_every_request_is_answered_once_and_all_blocks_are_free_again(seed):
    rng = random.Random(seed)
    engine = {
        "disable_overlap_scheduler": rng.random() < 0.3,
        "enable_chunked_context": rng.random() < 0.5,
        "max_num_tokens": 1024,
        "enable_block_reuse": rng.random() < 0.7,
    }
    policy = rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
    tokens = 2000 if policy == "MAX_UTILIZATION" else 100_000
    decode = pool(
        "decode",
        tokens,
        replicas=rng.randint(1, 2),
        capacity_scheduler_policy=policy,
        max_batch_size=rng.choice([2, 64]),
        **engine,
    )
    prefill = pool("prefill", rng.choice([1000, 100_000]), replicas=rng.randint(1, 2), **engine)
    events = ""
    if prefill.replicas == decode.replicas == 2:
        events = f"at {rng.random() * 5:.3f}s: kill worker 2"
    fleet = FleetConfig(events=events, startup_s=1.0)
    made = cluster(
        apart(transfer=rng.choice([FREE, SLOW]), decode=decode, prefill=prefill, fleet=fleet),
        workload(*[(rng.random() * 5, rng.randint(1, 600), rng.randint(1, 200)) for _ in range(40)]),
    )
    log, columns = made.log, made.workload.columns
    assert set(log.error[: len(columns)]) == {""}
    for rank in made.ranks:
        if rank.is_gone:
            continue
        view = rank.engine.view()
        assert (rank.engine.num_free_blocks, view.num_retained, view.num_waiting) == (rank.engine.num_blocks, 0, 0)
    if not events:  # who begins again has the stamps of the last time
        assert np.all(np.array(log.prefill_end_s) <= np.array(log.decode_queued_s))
        assert np.all(np.array(log.transfer_end_s) <= np.array(log.first_token_s))

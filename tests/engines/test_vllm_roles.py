"""What vLLM's adapter tells the KV connector, and what it passes from one worker to the other; without vLLM."""

import os
import time
from types import SimpleNamespace

import pytest

from serving.engines.side_channel import is_loopback
from serving.engines.vllm.roles import (
    check_types,
    connector_params,
    counted,
    hand_off,
    lease_duration_s,
    prompt_only,
    side_channel,
    transfer_config,
    uses_nixl,
)
from serving.runtime.messages import CallError
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import KvTransfers
from serving.worker.make import make_engine

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 33,
    "remote_blocks_expiry_time": None,
    "tp_size": 1,
}
"""As vLLM 0.32 gives them."""
NIXL = {"kv_connector": "NixlConnector"}


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_a_role_chooses_the_connector_and_the_user_may_choose_another(role, kv_role):
    assert transfer_config(role, None) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
    }
    given = {"kv_connector": "OtherConnector", "kv_load_failure_policy": "fail"}
    assert transfer_config(role, given) == given | {"kv_role": kv_role}
    assert transfer_config("aggregated", None) is None
    assert transfer_config("aggregated", given) == given


def test_a_dry_run_shows_what_the_role_asks_for():
    engine = make_engine("vllm", WorkerConfig(model_path="m", role="decode"), ModelRunConfig())
    assert engine.calls[0].arguments["kv_transfer_config"]["kv_role"] == "kv_consumer"
    plain = make_engine("vllm", WorkerConfig(model_path="m"), ModelRunConfig())
    assert "kv_transfer_config" not in plain.calls[0].arguments


def test_a_prefill_worker_computes_the_prompt_and_no_more():
    conditions = {"max_tokens": 50, "min_tokens": 20, "ignore_eos": False, "stop": None}
    asked = {"stop_conditions": conditions, "sampling_options": {"temperature": 0.5, "logprobs": 2}, "token_ids": [1]}
    given = prompt_only(asked)
    assert given["stop_conditions"] == conditions | {"max_tokens": 1, "min_tokens": 0, "ignore_eos": True}
    assert given["sampling_options"] == {"temperature": 0.5}
    assert asked["stop_conditions"]["max_tokens"] == 50


def test_a_hand_off_is_taken_over_while_enough_is_left_of_its_lease():
    longer = NIXL | {"kv_connector_extra_config": {"kv_lease_duration": 600}}
    assert (lease_duration_s(NIXL), lease_duration_s(longer)) == (30.0, 600.0)
    assert connector_params(hand_off(PARAMS, 30.0), "decode", 30.0) == PARAMS
    now = time.time()
    assert connector_params(PARAMS | {"lease_end": now + 9.0}, "decode", 30.0) is None  # less than a third
    assert connector_params(PARAMS | {"lease_end": now + 9.0}, "decode", 600.0) is None
    assert connector_params(PARAMS | {"lease_end": now + 400.0}, "decode", 600.0) == PARAMS
    assert connector_params(PARAMS, "decode", 30.0) == PARAMS  # of a prefill worker that is none of ours
    assert connector_params(None, "decode", 30.0) is None


def test_another_connectors_parameters_pass_as_they_are():
    other = {"kv_connector": "OtherConnector"}
    params = {"do_remote_prefill": True, "what": [1, 2]}
    assert lease_duration_s(other) is None
    assert hand_off(params, None) == params
    assert connector_params(params, "decode", None) == params
    assert not uses_nixl(other)
    assert not uses_nixl(None)


def test_leases_are_those_of_nixl_beside_a_tier():
    nixl = NIXL | {"kv_connector_extra_config": {"kv_lease_duration": 600}}
    both = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [nixl, {"kv_connector": "Other"}]},
    }
    assert uses_nixl(both)
    assert lease_duration_s(both) == 600.0


def test_no_hand_off_is_an_error():
    with pytest.raises(CallError, match="does not say where the KV is") as failed:
        hand_off(None, 30.0)
    assert failed.value.kind == "engine"


@pytest.mark.parametrize(
    "change",
    [{"remote_port": "80"}, {"remote_block_ids": [[-1]]}, {"remote_engine_id": ""}, {"tp_size": 0}, {"lease_end": "x"}],
)
def test_what_vllm_would_trip_over_is_refused(change):
    with pytest.raises(CallError, match=next(iter(change))) as refused:
        check_types(PARAMS | change)
    assert refused.value.kind == "invalid"


def test_each_worker_has_a_side_channel_of_its_own_on_the_loopback_interface(monkeypatch):
    for name in (PORT, "VLLM_NIXL_SIDE_CHANNEL_HOST", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with side_channel(2):
        first = int(os.environ[PORT])
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert os.environ["UCX_NET_DEVICES"] == "lo"
    assert PORT not in os.environ
    with side_channel(2) as _:
        assert 0 < first < 65536
    monkeypatch.setenv(PORT, "5700")
    with side_channel(1):
        assert os.environ[PORT] == "5700"
    assert os.environ[PORT] == "5700"


def test_what_was_moved_adds_up():
    def stats(**found):
        stages = {"waiting_to_start": 2, "in_progress": 1, "completed_waiting": 4}
        return SimpleNamespace(kv_connector_stats=found or None, num_kv_fetch_reqs_by_stage=stages)

    moved = {"transfer_duration": [0.5, 0.25], "bytes_transferred": [100, 50], "num_failed_transfers": [1]}
    once = counted(KvTransfers(num_offered=1), stats(**moved))
    beside = counted(KvTransfers(num_offered=1), stats(NixlPullConnector=moved, OffloadingConnector={}))
    assert beside == once  # of a MultiConnector
    assert once == KvTransfers(
        num_waiting=2, num_loading=1, num_offered=1, num_read=2, num_failed=1, num_bytes=150, seconds=0.75
    )
    assert counted(once, stats()) == once
    assert counted(once, stats(num_kv_expired_reqs=[1])).num_expired == 1


def test_loopback_addresses_are_known():
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("host")

"""SGLang and TensorRT-LLM as prefill and decode workers: the adapters against stand-ins with the packages' own signatures."""

import asyncio
import importlib.util
import json
import os

import msgspec
import pytest
import uvloop

from serving.engines.side_channel import PortReservation
from serving.model.card import Bootstrap
from serving.model.files import ModelFiles
from serving.runtime.messages import CallError
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.make import make_engine
from tests.engines.test_gpu_engines import PACKAGES, STANDINS, request, standins, tokens_of
from tests.support.waiting import in_time, until_async

pytestmark = pytest.mark.usefixtures(standins.__name__)
ENGINES = pytest.mark.parametrize("name", PACKAGES)
TRANSFER = {"sglang": {"disaggregation-transfer-backend": "mooncake"}, "trtllm": {}}
"""SGLang's default of ours needs a package that is not there."""


def made(name, role, run=None, **arguments):
    flags = [f"--{key}={value}" for key, value in (TRANSFER[name] | arguments).items()]
    return make_engine(name, WorkerConfig(model_path=str(STANDINS), role=role), run or ModelRunConfig(), flags)


def with_pair(name, talk, **arguments):
    """Run `talk(prefill, decode)` with an engine of each role."""

    async def main():
        pair = []
        try:
            for role in ("prefill", "decode"):
                pair.append(made(name, role, **arguments))
                await pair[-1].start(ModelFiles({"config.json": b'{"vocab_size": 50}'}))
            async with in_time():
                await talk(*pair)
        finally:
            for engine in pair:
                await engine.close()

    uvloop.run(main())


async def items_of(engine, asked):
    return [item async for item in engine.generate(asked)]


async def apart(prefill, decode, asked, room=7):
    """Ask both as a frontend does; return the prefill engine's last item, and the decode engine's items."""
    if prefill.traits.bootstrap is not None:
        met = asked | {"kv_transfer_params": prefill.traits.bootstrap.params | {"bootstrap_room": room}}
        [last], items = await asyncio.gather(items_of(prefill, met), items_of(decode, met))
    else:
        [last] = await items_of(prefill, asked | {"kv_transfer_params": {"do_remote_decode": True}})
        sent = msgspec.json.decode(msgspec.json.encode(last["kv_transfer_params"]))  # plain data: it survives the way
        items = await items_of(decode, asked | {"kv_transfer_params": sent})
    return last, items


@ENGINES
def test_an_answer_of_two_is_that_of_one(name):
    async def talk(prefill, decode):
        last, items = await apart(prefill, decode, request([10, 20, 30], 4))
        assert last["token_ids"] == []
        assert last["finish_reason"] == "length"
        assert last["cached_tokens"] == 0
        assert tokens_of(items) == [11, 21, 31, 11]
        assert items[-1]["finish_reason"] == "length"
        again, _ = await apart(prefill, decode, request([10] * 40, 4), room=8)
        again, _ = await apart(prefill, decode, request([10] * 40, 4), room=9)
        assert again["cached_tokens"] > 0

    with_pair(name, talk)


@ENGINES
def test_ends_and_log_probabilities_are_those_of_one(name):
    async def talk(prefill, decode):
        asked = request([10, 1, 30], 9, sampling_options={"logprobs": 2})
        _, items = await apart(prefill, decode, asked)
        assert tokens_of(items) == [11, 2]
        assert items[-1]["finish_reason"] == "stop"
        assert [value for item in items for value in item["log_probs"]] == [-0.5, -0.5]
        assert items[0]["top_logprobs"][0][0] == [11, -0.5]

    with_pair(name, talk)


@ENGINES
def test_requests_side_by_side_get_their_own_kv(name):
    async def talk(prefill, decode):
        answers = await asyncio.gather(
            *(apart(prefill, decode, request([number + 20] * 3, 3), room=number) for number in range(12))
        )
        assert [tokens_of(items) for _, items in answers] == [[number + 21] * 3 for number in range(12)]

    with_pair(name, talk)


@ENGINES
def test_a_prompt_that_fails_fails_its_request(name):
    async def talk(prefill, decode):
        with pytest.raises(CallError, match=r"aborted the request|does not say where the KV") as failed:
            await apart(prefill, decode, request([13, 13], 4))
        assert failed.value.kind == ("lost" if name == "sglang" else "engine")

    with_pair(name, talk)


def test_sglang_workers_get_their_roles_and_tell_where_they_meet():
    async def talk(prefill, decode):
        ours, theirs = (engine._engine.arguments for engine in (prefill, decode))
        port = ours["disaggregation_bootstrap_port"]
        assert ours["disaggregation_mode"] == "prefill"
        assert theirs["disaggregation_mode"] == "decode"
        assert "disaggregation_bootstrap_port" not in theirs
        assert prefill.traits.bootstrap == Bootstrap(
            {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}, is_needed=True
        )
        assert decode.traits.bootstrap is None
        assert prefill._engine.environment["SGLANG_HOST_IP"] == "127.0.0.1"
        assert prefill._engine.environment["UCX_NET_DEVICES"] == "lo"
        assert "SGLANG_HOST_IP" not in os.environ
        assert prefill.traits.has_kv_events
        assert not decode.traits.has_kv_events  # it keeps no prefixes, unless told

    with_pair("sglang", talk)


def test_sglang_is_called_with_the_room_and_nothing_else_of_the_hand_off():
    async def talk(prefill, decode):
        asked = request([5, 6], 2)
        params = prefill.traits.bootstrap.params | {"bootstrap_room": 3, "do_remote_decode": True, "rid": "evil"}
        both = asked | {"kv_transfer_params": params}
        await asyncio.gather(items_of(prefill, both), items_of(decode, both))
        place = (*prefill.traits.bootstrap.params.values(), 3)
        assert place in importlib.import_module("sglang").rooms

    with_pair("sglang", talk)


def test_sglang_workers_serve_nothing_alone():
    async def talk(prefill, decode):
        for engine, other in ((prefill, "decode"), (decode, "prefill")):
            with pytest.raises(CallError, match=f"without a {other} worker") as refused:
                await items_of(engine, request([5, 6], 2))
            assert refused.value.kind == "unavailable"
            params = {"bootstrap_host": "h", "bootstrap_port": 80_000, "bootstrap_room": 1}
            with pytest.raises(CallError, match="bootstrap_port") as refused:
                await items_of(engine, request([5, 6], 2, kv_transfer_params=params))
            assert refused.value.kind == "invalid"

    with_pair("sglang", talk)


@pytest.mark.parametrize("alone", ["prefill", "decode"])
def test_sglang_is_told_when_who_waits_in_a_room_leaves(alone):
    async def talk(prefill, decode):
        engine = prefill if alone == "prefill" else decode
        params = prefill.traits.bootstrap.params | {"bootstrap_room": 4}
        waiting = asyncio.create_task(items_of(engine, request([5, 6], 2, kv_transfer_params=params)))
        await until_async(lambda: engine._engine.asked)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert engine._engine.tokenizer_manager.aborted == [engine._engine.asked[0]["rid"]]
        assert engine.load(0).num_running == 0

    with_pair("sglang", talk)


def test_sglang_settings_of_the_user_win():
    engine = made("sglang", "prefill", host="10.0.0.5", **{"disaggregation-bootstrap-port": 9000})
    [call] = engine.calls
    assert call.arguments["disaggregation_bootstrap_port"] == 9000
    assert call.arguments["host"] == "10.0.0.5"
    assert made("sglang", "prefill").calls[0].arguments["disaggregation_bootstrap_port"] == "<free port>"
    with pytest.raises(ValueError, match=r"cannot call 0\.0\.0\.0"):
        made("sglang", "prefill", host="0.0.0.0")
    decode = made("sglang", "decode", **{"disaggregation-decode-enable-radix-cache": "true"})
    assert decode.traits.has_kv_events


def test_sglang_on_several_nodes_meets_at_the_first():
    run = ModelRunConfig(num_nodes=2, node_rank=0, leader_addr="10.0.0.7:5000", tensor_parallel_size=2)
    engine = made("sglang", "prefill", run)
    assert engine._host == "10.0.0.7"
    assert "disaggregation_bootstrap_port" not in engine.calls[0].arguments  # the same on all: SGLang's default


def test_sglang_without_nixl_is_refused_before_it_starts():
    async def main():
        engine = make_engine("sglang", WorkerConfig(model_path=str(STANDINS), role="decode"), ModelRunConfig())
        try:
            with pytest.raises(EngineError, match=r"needs the Python package nixl.*: pip install nixl"):
                await engine.start(ModelFiles({"config.json": b"{}"}))
        finally:
            await engine.close()

    if importlib.util.find_spec("nixl") is not None:
        pytest.skip("nixl is installed here")
    uvloop.run(main())


def test_trtllm_workers_get_their_roles():
    assert (
        made("trtllm", "prefill").calls[0].arguments.items()
        >= {
            "cache_transceiver_config": {"backend": "DEFAULT"},
            "disable_overlap_scheduler": True,
        }.items()
    )
    given = made("trtllm", "decode", **{"cache-transceiver-config": json.dumps({"backend": "UCX"})}).calls[0].arguments
    assert given["cache_transceiver_config"] == {"backend": "UCX"}
    assert "disable_overlap_scheduler" not in given
    assert "cache_transceiver_config" not in made("trtllm", "aggregated").calls[0].arguments


def test_trtllm_gets_the_phases_with_one_id_and_the_state_as_it_was():
    async def talk(prefill, decode):
        last, _ = await apart(prefill, decode, request([10, 20], 5, sampling_options={"logprobs": 1}))
        [context], [generation] = prefill._llm.phases, decode._llm.phases
        assert context.request_type == "context_only"
        assert 1 << 42 <= context.disagg_request_id < 1 << 63
        assert generation.request_type == "generation_only"
        assert generation.disagg_request_id == generation.ctx_request_id == context.disagg_request_id
        assert generation.opaque_state == b"\x80\x00state"
        assert generation.first_gen_tokens == [11]
        assert generation.first_gen_log_probs[0][11].logprob == -0.5
        assert generation.ctx_dp_rank == 0
        assert last["kv_transfer_params"]["encoded_opaque_state"] == "gABzdGF0ZQ=="
        assert last["kv_transfer_params"]["do_remote_prefill"] is True
        assert prefill._llm.results[0]._parameters.max_tokens == 1
        assert decode._llm.results[0]._parameters.max_tokens == 5

    with_pair("trtllm", talk)


def test_trtllm_decode_workers_compute_a_prompt_that_nobody_prefilled():
    async def talk(prefill, decode):
        assert tokens_of(await items_of(decode, request([10, 20], 3))) == [11, 21, 11]
        assert decode._llm.phases == [None]

    with_pair("trtllm", talk)


@pytest.mark.parametrize(
    "change",
    [
        {"encoded_opaque_state": "no base64!"},
        {"first_gen_tokens": []},
        {"first_gen_tokens": ["a"]},
        {"ctx_request_id": -1},
        {"ctx_info_endpoint": 7},
    ],
)
def test_trtllm_hand_offs_that_are_none_are_refused(change):
    async def talk(prefill, decode):
        [last] = await items_of(prefill, request([10, 20], 3))
        with pytest.raises(CallError, match="kv_transfer_params") as refused:
            await items_of(decode, request([10, 20], 3, kv_transfer_params=last["kv_transfer_params"] | change))
        assert refused.value.kind == "invalid"
        assert decode._llm.phases == []

    with_pair("trtllm", talk)


def test_trtllm_is_told_when_a_client_leaves_in_either_phase():
    async def talk(prefill, decode):
        waiting = asyncio.create_task(items_of(prefill, request([14, 20], 3)))
        await until_async(lambda: prefill._llm.results)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert prefill._llm.results[0].was_aborted
        [last] = await items_of(prefill, request([10, 20], 300))
        answer = decode.generate(request([10, 20], 300, kv_transfer_params=last["kv_transfer_params"]))
        await anext(answer)
        await answer.aclose()
        assert decode._llm.results[0].was_aborted
        assert not prefill._llm.results[1].was_aborted

    with_pair("trtllm", talk)


def test_reserved_ports_are_nobody_elses_until_an_engine_listens_there():
    with PortReservation(count=3) as first, PortReservation(count=3) as second:
        assert abs(first.first - second.first) >= 3

        async def main():
            for number in range(3):
                server = await asyncio.start_server(lambda *_: None, "127.0.0.1", first.first + number)
                server.close()
                await server.wait_closed()

        asyncio.run(main())
    with pytest.raises(EngineError, match=r"an engine cannot listen on 192\.0\.2\.1"):
        PortReservation("192.0.2.1")

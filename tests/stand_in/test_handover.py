"""Stand-ins hand KV to each other as vLLM's instances with NixlConnector do, directed by whoever sends the requests."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from serving.engines.mock.engine import EngineConfig
from serving.engines.mock.kv.nixl_peer import KvHandoverConfig
from serving.life.lease import LeaseConfig
from serving.stand_in.config import ApiConfig, RanksConfig, StandInConfig
from serving.stand_in.faults.config import FaultConfig
from serving.stand_in.server import stand_in
from serving.transfer.config import TransferRunConfig
from tests.stand_in.metric_facts import values
from tests.stand_in.support import client_of, running
from tests.stand_in.test_metrics import of_histogram, scraped
from tests.support import proxies
from tests.support.proxies import side_car, toy_proxy
from tests.support.waiting import until_async

DETAILED = ApiConfig(enable_prompt_tokens_details=True)
NULLS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
ASK = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(NULLS)
ENGINE = EngineConfig(block_size=16, num_gpu_blocks=256)
QUICK = TransferRunConfig(transfer_latency_ms=0.0)
LOCAL = KvHandoverConfig(side_channel_host="127.0.0.1", side_channel_port=0)
LEASE = LeaseConfig(kv_lease_duration_s=0.5)
PROMPT = "".join(chr(97 + number * 7 % 26) for number in range(100))


def peer(role="kv_both", **settings):
    """Run a stand-in that hands KV over."""
    handover = settings.pop("handover", KvHandoverConfig(role=role, side_channel_host="127.0.0.1", side_channel_port=0))
    return running(**({"engine": ENGINE, "api": DETAILED, "transfer": QUICK, "kv_handover": handover} | settings))


@contextlib.asynccontextmanager
async def pair(roles=("kv_producer", "kv_consumer"), **settings):
    async with peer(roles[0], **settings) as prefill, peer(roles[1], **settings) as decode:
        yield prefill, decode


def request(prompt=PROMPT, max_tokens=12, **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "seed": 3} | more


async def ask(client, asked):
    response = await client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


async def prefill_of(client, asked):
    """Return the first answer of a proxy's two."""
    return await ask(client, asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK})


async def through(prefill, decode, asked):
    """Do what a proxy does."""
    first = await prefill_of(prefill, asked)
    return await ask(decode, asked | {"kv_transfer_params": first["kv_transfer_params"]})


def text(answer):
    return answer["choices"][0]["text"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_numbers_of_blocks_that_no_instance_has_are_refused():
    async def talk():
        async with peer("kv_consumer") as client:
            wanted = {"do_remote_prefill": True, "remote_engine_id": "a", "remote_request_id": "b"}
            wanted |= {"remote_host": "localhost", "remote_port": 9, "remote_block_ids": [[10**30]]}
            return await client.post("/v1/completions", json=request(kv_transfer_params=wanted))

    refused = asyncio.run(talk())
    assert refused.status_code == 400
    assert "kv_transfer_params" in refused.json()["error"]["message"]


def test_two_instances_answer_what_one_would_token_for_token():
    async def talk():
        async with pair() as (prefill, decode), running(engine=ENGINE) as whole:
            for length in (1, 15, 16, 17, 100, 160):
                asked = request(PROMPT * 2)
                asked["prompt"] = asked["prompt"][:length]
                apart = await through(prefill, decode, asked)
                assert text(apart) == text(await ask(whole, asked))
                assert apart["choices"][0]["finish_reason"] == "length"
                assert apart["usage"]["prompt_tokens"] == length
                assert apart.get("kv_transfer_params") is None

    asyncio.run(talk())


def test_the_parameters_have_the_names_and_types_of_nixl_connector():
    async def talk():
        async with peer(handover=KvHandoverConfig(engine_id="me", side_channel_port=0)) as client:
            first = await prefill_of(client, request())
            found = first["kv_transfer_params"]
            (blocks,) = found.pop("remote_block_ids")
            assert len(blocks) == 7
            assert 0 not in blocks
            assert found.pop("remote_request_id").count("-") >= 1
            assert found.pop("remote_port") > 0
            assert found == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "me",
                "remote_host": "localhost",
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": 100,
                "remote_blocks_expiry_time": None,
                "transfer_mode": "pull",
                "remote_prefill_cached_tokens": 0,
            }
            assert len(text(first)) == 1  # a client may read the first token here
            again = await ask(client, request(max_tokens=3, kv_transfer_params=ASK))
            assert again["kv_transfer_params"]["remote_num_tokens"] == 102
            assert "remote_prefill_cached_tokens" not in again["kv_transfer_params"]

    asyncio.run(talk())


def test_cached_tokens_are_those_that_the_instance_found_that_computed_the_prompt():
    async def talk():
        async with pair() as (prefill, decode):
            first = await through(prefill, decode, request())
            second = await through(prefill, decode, request())
            given = (await prefill_of(prefill, request()))["kv_transfer_params"]
            del given["remote_prefill_cached_tokens"]  # a proxy may drop what it does not know
            third = await ask(decode, request(kv_transfer_params=given))
            assert [cached(each) for each in (first, second, third)] == [0, 96, 100]
            counted = values(await scraped(decode))
            assert of_histogram(counted, "request_prefill_kv_computed_tokens") == (3, 100 + 4 + 0)

    asyncio.run(talk())


def test_instances_of_both_roles_hand_over_in_both_directions_and_serve_whole_requests_between():
    async def talk():
        async with pair(("kv_both", "kv_both")) as (one, other), running(engine=ENGINE) as whole:
            for number in range(4):
                asked = request(f"{number} {PROMPT}")
                expected = text(await ask(whole, asked))
                assert text(await through(one, other, asked)) == expected
                assert text(await ask(one, asked)) == expected
                back = request(f"back {number} {PROMPT}")
                assert text(await through(other, one, back)) == text(await ask(whole, back))

    asyncio.run(talk())


def test_fifty_at_once_each_get_their_answer():
    async def talk():
        async with pair() as (prefill, decode), running(engine=ENGINE) as whole:
            asked = [request(f"{number:02} {PROMPT}", max_tokens=5 + number % 7) for number in range(50)]
            apart = await asyncio.gather(*(through(prefill, decode, each) for each in asked))
            alone = await asyncio.gather(*(ask(whole, each) for each in asked))
            assert [text(each) for each in apart] == [text(each) for each in alone]

    asyncio.run(talk())


def test_the_last_token_comes_with_where_the_kv_is():
    async def talk():
        async with pair() as (prefill, decode):
            for number in range(5):
                asked = request(f"{number} {PROMPT}")
                first = await ask(prefill, asked | {"max_tokens": 1 + number % 2, "kv_transfer_params": ASK})
                again = await ask(decode, asked | {"kv_transfer_params": first["kv_transfer_params"]})
                assert text(again).startswith(text(first))

    asyncio.run(talk())


def test_what_has_been_read_is_nowhere_and_the_request_fails_as_vllm_fails_it():
    async def talk():
        async with pair() as (prefill, decode):
            given = (await prefill_of(prefill, request()))["kv_transfer_params"]
            await ask(decode, request(kv_transfer_params=given))
            other = request("z" + PROMPT, kv_transfer_params=given)
            refused = await decode.post("/v1/completions", json=other)
            assert refused.status_code == 500

    asyncio.run(talk())


@pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
def test_after_its_lease_kv_is_gone_and_the_policy_decides(policy, status):
    async def talk():
        lease = LeaseConfig(kv_lease_duration_s=0.05)
        config = StandInConfig(model="tiny", engine=ENGINE, transfer=QUICK, kv_handover=LOCAL, lease=lease)
        async with (
            stand_in(config) as server,
            client_of(server) as prefill,
            peer(engine=replace(ENGINE, kv_load_failure_policy=policy)) as decode,
        ):
            given = (await prefill_of(prefill, request()))["kv_transfer_params"]
            await server.engine.released()
            late = await decode.post("/v1/completions", json=request(kv_transfer_params=given))
            assert late.status_code == status
            if status == 200:
                assert text(late.json()) == text(await ask(prefill, request()))

    asyncio.run(talk())


@pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
def test_if_the_other_instance_is_gone_the_policy_decides(policy, status):
    async def talk():
        async with peer(engine=replace(ENGINE, kv_load_failure_policy=policy)) as decode:
            async with peer() as prefill:
                given = (await prefill_of(prefill, request()))["kv_transfer_params"]
            answer = await decode.post("/v1/completions", json=request(kv_transfer_params=given))
            assert answer.status_code == status

    asyncio.run(talk())


@pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
def test_kv_that_was_made_unreadable_fails_or_is_computed_again(policy, status):
    async def talk():
        engine, faults = replace(ENGINE, kv_load_failure_policy=policy), FaultConfig(kv_load=1)
        async with peer() as prefill, peer(engine=engine, faults=faults) as decode:
            given = (await prefill_of(prefill, request()))["kv_transfer_params"]
            answer = await decode.post("/v1/completions", json=request(kv_transfer_params=given))
            assert answer.status_code == status
            if status == 200:
                assert text(answer.json()) == text(await ask(prefill, request()))

    asyncio.run(talk())


def test_a_stream_of_two_instances_has_the_tokens_of_one():
    async def talk():
        async with pair() as (prefill, decode):
            given = (await prefill_of(prefill, request()))["kv_transfer_params"]
            asked = request(stream=True, kv_transfer_params=given)
            async with decode.stream("POST", "/v1/completions", json=asked) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            assert len(lines) >= 12
            assert response.status_code == 200

    asyncio.run(talk())


PROMPTS = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 12},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 12},
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("proxy", [toy_proxy, side_car])
def test_proxies_of_others_get_the_answer_of_one_instance(proxy, path, is_streamed):
    async def talk():
        async with pair() as (prefill, decode), running(engine=ENGINE) as whole:
            body = {"model": "tiny", "seed": 3} | PROMPTS[path]
            expected = proxies.text_of(await whole.post(path, json=body))
            more = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
            urls = str(prefill.base_url), str(decode.base_url)
            _, answer = await asyncio.to_thread(proxy, *urls, path, body | more)
            read = proxies.streamed_text if is_streamed else proxies.text_of
            assert (answer.status_code, read(answer)) == (200, expected)

    asyncio.run(talk())


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False, "do_remote_prefill": False}, None])
def test_parameters_that_ask_for_nothing_are_a_whole_request(params):
    async def talk():
        async with peer() as client:
            answer = await ask(client, request(kv_transfer_params=params))
            assert answer.get("kv_transfer_params") is None
            assert answer["usage"]["completion_tokens"] == 12

    asyncio.run(talk())


def test_an_instance_without_a_connector_ignores_the_parameters():
    async def talk():
        async with running(engine=ENGINE) as client:
            answer = await ask(client, request(kv_transfer_params=ASK))
            assert answer.get("kv_transfer_params") is None

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"do_remote_prefill": True}, "remote_engine_id"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "expected one of them"),
        (ASK | {"remote_block_ids": [[1]]}, "bidirectional_kv_xfer"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_by_name(params, why):
    async def talk():
        async with peer() as client:
            answer = await client.post("/v1/completions", json=request(kv_transfer_params=params))
            assert answer.status_code == 400
            assert why in answer.text

    asyncio.run(talk())


def test_clients_that_hang_up_at_any_moment_leave_no_blocks_held():
    async def talk():
        config = StandInConfig(model="tiny", engine=ENGINE, transfer=QUICK, kv_handover=LOCAL, lease=LEASE)
        async with stand_in(config) as server, client_of(server) as both:
            for number in range(24):
                asked = request(f"{number} {PROMPT}", max_tokens=2000)
                given = (await prefill_of(both, asked))["kv_transfer_params"] if number % 3 else ASK
                call = asyncio.create_task(both.post("/v1/completions", json=asked | {"kv_transfer_params": given}))
                await asyncio.sleep(0.004 * (number % 5))
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            await until_async(lambda: is_at_rest(server.engine.load(0)))

    asyncio.run(talk())


def is_at_rest(load):
    transfers = load.kv_transfers
    busy = load.num_running, load.num_waiting, load.kv_active_blocks
    return not any((*busy, transfers.num_held, transfers.num_waiting, transfers.num_loading))


def test_each_rank_is_a_peer_of_its_own_with_its_number_in_name_and_port():
    async def talk():
        engine = replace(ENGINE, dp_size=2)
        ranks = RanksConfig(size=4, first=2)
        handover = KvHandoverConfig(engine_id="me", side_channel_port=0)
        async with peer(engine=engine, ranks=ranks, handover=handover) as several, peer() as decode:
            firsts = [await prefill_of(several, request(f"{number} {PROMPT}")) for number in range(2)]
            found = [each["kv_transfer_params"] for each in firsts]
            assert {each["remote_engine_id"] for each in found} == {"me_dp2", "me_dp3"}
            assert len({each["remote_port"] for each in found}) == 2
            for number, each in enumerate(found):
                await ask(decode, request(f"{number} {PROMPT}", kv_transfer_params=each))
            wrong = found[0] | {"remote_port": found[1]["remote_port"]}
            answer = await decode.post("/v1/completions", json=request("x" + PROMPT, kv_transfer_params=wrong))
            assert answer.status_code == 500

    asyncio.run(talk())

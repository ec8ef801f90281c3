"""Pauses, sleep, aborted requests and emptied caches: what each does to requests and to KV."""

import asyncio

import pytest

from serving.engines.mock.engine import EngineConfig, TimingConfig
from serving.stand_in.config import ApiConfig
from tests.stand_in.metric_facts import values
from tests.stand_in.support import running
from tests.support.waiting import in_time

API = ApiConfig(enable_prompt_tokens_details=True)
LONG = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 3000}
SHORT = LONG | {"max_tokens": 2}


def in_development(ask, **engine):
    """Run `ask` with a client of a stand-in."""
    config = EngineConfig(block_size=16, num_gpu_blocks=1024, **engine)

    async def run():
        async with running(engine=config, api=API, is_dev_mode=True) as client:
            return await asyncio.wait_for(ask(client), 60)

    return asyncio.run(run())


async def begun(client, body=LONG, **headers):
    """Start a request; return its task once it is in the engine."""
    answer = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
    while (await client.post("/reset_prefix_cache")).json()["success"]:
        await asyncio.sleep(0.005)  # until a request holds blocks
    return answer


async def until_waiting(client):
    """Wait until a request is in the engine and does not run."""
    async with in_time():
        while await queues(client) != (0, 1):
            await asyncio.sleep(0.005)


async def queues(client):
    """Return how many requests run, and wait."""
    counted = values((await client.get("/metrics")).text)
    labels = ("engine", "0"), ("model_name", "tiny")
    return counted["vllm:num_requests_running", *labels], counted["vllm:num_requests_waiting", *labels]


def reason(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["finish_reason"]


@pytest.mark.parametrize("path", ["/pause", "/sleep?level=0", "/sleep?level=2", "/abort_requests"])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_requests_that_are_aborted_end_with_what_was_generated(path, async_scheduling):
    async def ask(client):
        answer = await begun(client)
        await client.post(path, json={})
        return await answer

    answer = in_development(ask, async_scheduling=async_scheduling)
    assert reason(answer) == "abort"
    assert 0 < answer.json()["usage"]["completion_tokens"] < 3000


def test_a_stream_that_is_aborted_ends_properly():
    async def ask(client):
        async with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            await client.post("/pause")
            return [line async for line in lines if line]

    *_, last, end = in_development(ask)
    assert '"finish_reason":"abort"' in last and end == "data: [DONE]"


@pytest.mark.parametrize(("begin", "end"), [("/pause", "/resume"), ("/sleep", "/wake_up"), ("/pause", "/wake_up")])
def test_requests_that_come_meanwhile_wait_and_are_answered_later(begin, end):
    async def ask(client):
        await client.post(begin)
        answer = asyncio.create_task(client.post("/v1/completions", json=SHORT))
        await until_waiting(client)
        states = (await client.get("/is_sleeping")).json(), (await client.get("/is_paused")).json()
        await client.post(end)
        return states, await answer, (await client.get("/is_sleeping")).json()

    states, answer, after = in_development(ask)
    assert states == ({"is_sleeping": True}, {"is_paused": True})
    assert reason(answer) == "length" and after == {"is_sleeping": False}


def test_kept_requests_go_on_where_they_were():
    async def ask(client):
        answer = await begun(client, LONG | {"max_tokens": 400})
        await client.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        assert await queues(client) == (1, 0) and not answer.done()
        await client.post("/resume")
        return await answer

    answer = in_development(ask)
    assert reason(answer) == "length"
    assert answer.json()["usage"]["completion_tokens"] == 400


def test_a_pause_that_waits_lets_requests_end():
    async def ask(client):
        answer = await begun(client, LONG | {"max_tokens": 200})
        paused = await client.post("/pause", params={"mode": "wait"})
        return paused.json(), await answer

    paused, answer = in_development(ask)
    assert paused == {"status": "paused"} and reason(answer) == "length"


@pytest.mark.parametrize(("path", "cached"), [("/sleep?level=1", 0), ("/sleep?level=0", 48), ("/pause", 0)])
def test_sleep_discards_kv_and_a_sleep_of_level_0_does_not(path, cached):
    async def ask(client):
        await client.post("/v1/completions", json=SHORT)
        await client.post(path)
        await client.post("/wake_up")
        answer = await client.post("/v1/completions", json=SHORT)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert in_development(ask) == cached


def test_the_engine_works_again_once_all_of_it_is_awake():
    async def ask(client):
        await client.post("/sleep")
        answer = asyncio.create_task(client.post("/v1/completions", json=SHORT))
        said = [
            (await client.post("/wake_up", params={"tags": tags})).json()
            for tags in (["weights"], ["weights", "kv_cache"], ["kv_cache", "scheduling"])
        ]
        return said, reason(await answer)

    said, finish_reason = in_development(ask)
    # What is awake already cannot be woken, and then nothing is.
    assert [each["status"] for each in said] == ["sleeping", "sleeping", "awake"]
    assert said[0]["tags"] == ["weights"] and finish_reason == "length"


def test_kv_memory_can_be_released_only_while_paused():
    async def ask(client):
        refused = await client.post("/release_kv_cache_memory")
        await client.post("/pause")
        released = await client.post("/release_kv_cache_memory")
        again = await client.post("/release_kv_cache_memory")
        woken = await client.post("/wake_up", params={"tags": "kv_cache"})
        return refused.status_code, released.json(), again.status_code, woken.json()["status"]

    assert in_development(ask) == (500, {"status": "kv_cache_released"}, 500, "awake")


def test_what_the_query_cannot_say_is_refused():
    async def ask(client):
        paths = ("/sleep?level=3", "/sleep?level=x", "/pause?mode=stop", "/reset_prefix_cache?reset_external=maybe")
        return [(await client.post(path)).json()["error"] for path in paths]

    errors = in_development(ask)
    assert [error["param"] for error in errors] == [
        "query.level",
        "query.level",
        "query.mode",
        "query.reset_external",
    ]
    assert {error["code"] for error in errors} == {400}


def test_requests_are_aborted_by_the_ids_that_vllms_engine_has():
    async def ask(client):
        answer = await begun(client, **{"x-request-id": "mine"})
        other = asyncio.create_task(client.post("/v1/completions", json=LONG | {"max_tokens": 200}))
        said = await client.post("/abort_requests", json={"request_ids": ["cmpl-mine", "cmpl-other-0"]})
        await client.post("/v1/completions", json=SHORT)  # several steps later
        waits = not answer.done()
        await client.post("/abort_requests", json={"request_ids": ["cmpl-mine-0"]})
        return said.json(), waits, reason(await answer), reason(await other)

    assert in_development(ask) == ({"status": "aborted", "aborted": 2}, True, "abort", "length")


def test_a_request_is_aborted_once_even_if_its_step_has_not_ended():
    async def run():
        slow = TimingConfig(timing="constant", constant_decode_ms=300)
        async with running(api=API, is_dev_mode=True, timing=slow) as client:
            answer = await begun(client)
            said = [(await client.post("/abort_requests", json={})).json()["aborted"] for _ in range(2)]
            return said, reason(await answer)

    assert asyncio.run(run()) == ([1, 0], "abort")


def test_what_is_no_list_of_ids_is_refused():
    async def ask(client):
        bodies = ("{", "[]", '{"request_ids": "mine"}')
        return [(await client.post("/abort_requests", content=body)).status_code for body in bodies]

    assert in_development(ask) == [400, 400, 400]


def test_the_prefix_cache_is_reset_unless_requests_hold_blocks_or_with_them():
    async def ask(client):
        answer = await begun(client, LONG | {"max_tokens": 400})
        held = (await client.post("/reset_prefix_cache")).json()
        reset = (await client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})).json()
        return held, reset, (await answer).json()["usage"]["completion_tokens"]

    assert in_development(ask) == ({"success": False}, {"success": True}, 400)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/pause?mode=keep", 501),
        ("/pause?mode=keep&clear_cache=false", 200),
        ("/pause?mode=abort", 200),
        ("/sleep?level=1&mode=wait", 501),
        ("/reset_prefix_cache?reset_running_requests=true", 501),
        ("/reset_prefix_cache", 200),
    ],
)
def test_what_would_preempt_requests_is_refused_with_kv_in_host_memory(path, status):
    async def ask():
        engine = EngineConfig(block_size=16, num_gpu_blocks=64, num_host_blocks=64)
        async with running(engine=engine, is_dev_mode=True) as client:
            return (await client.post(path)).status_code

    assert asyncio.run(ask()) == status

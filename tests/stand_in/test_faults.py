"""Faults on purpose, as clients meet them."""

import asyncio
import json
from itertools import pairwise

import httpx
import pytest

from serving.engines.mock.engine import EngineConfig, TimingConfig
from serving.stand_in.faults.app import FaultyApp
from serving.stand_in.faults.choice import fault_of
from serving.stand_in.faults.words import read_faults
from tests.stand_in.support import running
from tests.support.waiting import in_time, until_async

ASKED = {"model": "tiny", "prompt": "hello", "max_tokens": 12}
NOW = TimingConfig(timing="constant", speedup_ratio=1000.0)


def faulty(*words, seed=0, **settings):
    """Run a stand-in with faults."""
    return running(faults=read_faults(words, seed=seed), **({"timing": NOW} | settings))


async def outcome(client, **more):
    """Return how a request ends: its status, or what became of its connection."""
    try:
        answer = await client.post("/v1/completions", json=ASKED | more)
    except httpx.RemoteProtocolError as error:
        return str(error)
    return answer.status_code


async def events(client, **more):
    """Return the events of a stream, and how it ended."""
    found = []
    try:
        async with client.stream("POST", "/v1/completions", json=ASKED | more | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                found += [line.removeprefix("data: ")] if line else []
    except httpx.RemoteProtocolError as error:
        return found, str(error)
    return found, ""


async def outcomes(client, count):
    return [await outcome(client) for _ in range(count)]


def test_errors_have_their_share_and_the_form_of_errors():
    async def ask():
        async with faulty("429=0.3", "503=0.2") as client:
            found = await outcomes(client, 40)
            bodies = [await client.post("/v1/completions", json=ASKED) for _ in range(20)]
            return found, next(each for each in bodies if each.status_code == 429).json()

    found, body = asyncio.run(ask())
    config = read_faults(["429=0.3", "503=0.2"])
    assert found == [fault_of(config, number).status or 200 for number in range(1, 41)]
    assert {200, 429, 503} == set(found)
    assert body["error"]["message"] == "a 429 on purpose"


def test_the_same_seed_and_order_meet_the_same_faults_and_another_seed_others():
    async def ask(seed):
        async with faulty("500=0.3", "disconnect=0.2", "cut=0.2", seed=seed) as client:
            return await outcomes(client, 30)

    first, again, other = (asyncio.run(ask(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_by_id_a_request_meets_its_fault_whenever_it_comes():
    async def ask(ids):
        async with faulty("500=0.5", "by=id") as client:
            headers = [{"x-request-id": each} for each in ids]
            answers = [await client.post("/v1/completions", json=ASKED, headers=each) for each in headers]
            return dict(zip(ids, [each.status_code for each in answers], strict=True))

    ids = [f"request-{number}" for number in range(20)]
    found = asyncio.run(ask(ids))
    assert found == asyncio.run(ask(ids[::-1]))
    assert set(found.values()) == {200, 500}


def test_a_disconnect_comes_before_any_byte():
    async def ask():
        async with faulty("disconnect=1") as client:
            return await outcome(client), (await client.get("/health")).status_code

    assert asyncio.run(ask()) == ("Server disconnected without sending a response.", 200)


def test_a_cut_whole_answer_lacks_its_second_half():
    async def ask():
        async with faulty("cut=1") as client:
            return await outcome(client)

    assert "without sending complete message body" in asyncio.run(ask())


def test_a_cut_stream_has_some_events_and_no_end():
    async def ask():
        async with faulty("cut=1") as client:
            return [await events(client) for _ in range(8)]

    config = read_faults(["cut=1"])
    for number, (found, end) in enumerate(asyncio.run(ask()), 1):
        assert len(found) == fault_of(config, number).place
        assert "[DONE]" not in found
        assert "incomplete chunked read" in end


def test_a_stream_shorter_than_its_place_is_cut_before_its_end():
    async def ask():
        async with faulty("cut=1") as client:
            return [await events(client, max_tokens=1) for _ in range(10)]

    for found, end in asyncio.run(ask()):
        assert 1 <= len(found) <= 2
        assert "[DONE]" not in found
        assert end


def test_a_stalled_stream_stops_in_its_middle_and_goes_on_later():
    async def ask():
        loop = asyncio.get_running_loop()
        async with faulty("stall=1:300ms") as client:
            times = []
            async with client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    times += [(loop.time(), line)] if line else []
            return times

    times = asyncio.run(ask())
    assert times[-1][1] == "data: [DONE]"
    gaps = [after - before for (before, _), (after, _) in pairwise(times)]
    place = fault_of(read_faults(["stall=1:300ms"]), 1).place
    assert gaps[place - 1] >= 0.29


def test_a_client_that_leaves_a_stall_leaves_nothing_behind():
    async def ask():
        async with faulty("stall=1:1h", "first_byte=0.5:1h") as client:
            await client.get("/health")
            before = asyncio.all_tasks()
            for number in range(6):
                asked = ASKED | {"stream": number % 2 == 0, "max_tokens": 2000}
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=asked, timeout=httpx.Timeout(30, read=0.3))
            async with in_time():
                await until_async(lambda: not {each for each in asyncio.all_tasks() - before if not each.done()})
            return (await client.get("/health")).status_code

    assert asyncio.run(ask()) == 200


def test_time_is_added_before_the_first_byte_and_before_each_event():
    async def ask(*words):
        loop = asyncio.get_running_loop()
        async with faulty(*words) as client:
            start = loop.time()
            found, _ = await events(client)
            return len(found), loop.time() - start

    count, time_s = asyncio.run(ask("token=20ms"))
    assert time_s >= count * 0.02
    count, time_s = asyncio.run(ask("first_byte=250ms"))
    assert time_s >= 0.25
    assert count >= 12  # one event for each token although they come together


def test_a_slow_engine_takes_longer():
    async def ask():
        timing = TimingConfig(timing="constant", constant_prefill_ms=10, constant_decode_ms=10)
        async with faulty("slow=10", timing=timing) as client:
            start = asyncio.get_running_loop().time()
            await outcome(client, max_tokens=4)
            return asyncio.get_running_loop().time() - start

    assert asyncio.run(ask()) >= 0.4  # four steps of 100 ms


@pytest.mark.parametrize(
    ("words", "status"), [(["health=down"], 503), (["unready=1h"], 503), (["unready=1h", "health=up"], 200)]
)
def test_health_may_lie_and_come_late(words, status):
    async def ask():
        async with faulty(*words) as client:
            return (await client.get("/health")).status_code, await outcome(client)

    assert asyncio.run(ask()) == (status, 200)


def test_a_dead_engine_ends_what_is_in_progress_and_answers_nothing_more():
    async def ask():
        timing = TimingConfig(timing="constant", speedup_ratio=0.01)
        async with faulty("engine_death=500ms", timing=timing, outlives_engine=True) as client:
            asked = [outcome(client, max_tokens=2000), events(client, max_tokens=2000)]
            alive = (await client.get("/health")).status_code
            whole, (found, _) = await asyncio.gather(*asked)
            return alive, whole, found, (await client.get("/health")).status_code, await outcome(client)

    alive, whole, found, dead, after = asyncio.run(ask())
    assert (alive, whole, dead, after) == (200, 500, 503, 500)
    assert (
        not found
        or "EngineDeadError" in json.loads(found[-1] if found[-1] != "[DONE]" else found[-2])["error"]["message"]
    )


def test_a_dead_engine_may_look_healthy():
    async def ask():
        async with faulty("engine_death=1", "health=up", outlives_engine=True) as client:
            first = await outcome(client)
            await asyncio.sleep(0)
            return first, await outcome(client), (await client.get("/health")).status_code

    assert asyncio.run(ask()) == (200, 500, 200)


def test_without_faults_nothing_stands_in_front_of_the_application():
    from serving.stand_in.config import StandInConfig
    from serving.stand_in.server import stand_in

    async def look():
        config = StandInConfig(model="tiny", engine=EngineConfig(block_size=16, num_gpu_blocks=256))
        async with stand_in(config) as server:
            return isinstance(server.app, FaultyApp)

    assert not asyncio.run(look())

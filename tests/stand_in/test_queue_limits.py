"""Requests beyond the limits of the queue are turned away, and counted; without limits, none is."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from serving.engines.mock.engine import MAX_WAITING, EngineConfig, Mocker, TimingConfig
from serving.model.files import ModelFiles
from serving.runtime.server import AnswerStream
from serving.stand_in.config import ApiConfig, StandInConfig
from serving.stand_in.server import stand_in
from serving.worker.config import WorkerConfig
from tests.serving.test_mock_engine import Reader, request
from tests.stand_in.support import running
from tests.support.waiting import in_time

SLOW = TimingConfig(timing="constant", constant_prefill_ms=2000, constant_decode_ms=50)


def turned_away(limits, *, asked_for=1, prompt="x" * 40):
    """Have one request in progress, and return the answer to another with these limits, and what was counted."""

    async def talk():
        async with running(api=replace(ApiConfig(), **limits), timing=SLOW) as client:
            request = {"model": "tiny", "prompt": prompt, "max_tokens": 40}
            first = asyncio.create_task(client.post("/v1/completions", json=request))

            running_1 = 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0'
            async with in_time():
                while running_1 not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.01)
            second = await client.post("/v1/completions", json=request | {"n": asked_for, "stream": True})
            lines = (await client.get("/metrics")).text.splitlines()
            first.cancel()
            return second, [line for line in lines if line.startswith("vllm:admission_rejections_total")]

    return asyncio.run(talk())


@pytest.mark.parametrize(
    ("limits", "asked_for", "reason"),
    [
        ({"max_num_queued_reqs": 1}, 1, "max_num_queued_reqs"),
        ({"max_num_queued_reqs": 3}, 3, "max_num_queued_reqs"),
        ({"max_num_queued_tokens": 40}, 1, "max_num_queued_tokens"),
    ],
)
def test_a_request_beyond_a_limit_gets_503_before_its_stream_begins(limits, asked_for, reason):
    answer, counted = turned_away(limits, asked_for=asked_for)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "Service Unavailable"
    assert [line.rpartition(" ")[2] for line in counted if reason in line] == ["1.0"]


def test_a_request_within_the_limits_is_answered():
    answer, counted = turned_away({"max_num_queued_reqs": 3, "max_num_queued_tokens": 41}, asked_for=2)
    assert answer.status_code == 200
    assert [line.rpartition(" ")[2] for line in counted] == ["0.0", "0.0"]


def sent_at_once(engine, count):
    """Send this many requests before the engine can begin with any; return how some of them ended."""
    reader, asked = Reader(), msgspec.Raw(msgspec.msgpack.encode(request([1], 1)))
    for number in range(count):
        engine.service(asked, AnswerStream(reader, number))
    return [(number, end.kind) for number, end in reader.ends.items()]


def test_without_limits_any_number_of_requests_may_wait():
    async def send():
        async with stand_in(StandInConfig(model="tiny", engine=EngineConfig(num_gpu_blocks=256))) as server:
            return sent_at_once(server.engine, MAX_WAITING + 2)

    assert asyncio.run(send()) == []


def test_a_worker_refuses_requests_beyond_its_own_limit():
    async def send(**limit):
        engine = Mocker(WorkerConfig(), EngineConfig(num_gpu_blocks=256), **limit)
        await engine.start(ModelFiles({}))
        engine.run()
        ends = sent_at_once(engine, 4)
        await engine.close()
        return ends

    assert asyncio.run(send(max_waiting=2)) == [(2, "overloaded"), (3, "overloaded")]
    assert asyncio.run(send()) == []

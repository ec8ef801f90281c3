"""Many stand-ins in a few processes."""

import asyncio
import dataclasses
import json
import re
import socket
from dataclasses import replace

import httpx
import pytest

from serving.engines.mock.engine import EngineConfig
from serving.stand_in.config import ApiConfig, HttpConfig, KvEventsConfig, KvHandoverConfig, StandInConfig
from serving.stand_in.faults.config import AdminConfig
from serving.stand_in.replicas import ReplicaError, programs_of, replicas_of, serve_replicas
from serving.supervision.group import GroupError
from tests.support.servers import consecutive_ports

CONFIG = StandInConfig(
    model="tiny",
    engine=EngineConfig(block_size=16, num_gpu_blocks=64),
    api=ApiConfig(enable_prompt_tokens_details=True),
)


def served(count, num_processes):
    """Return what each of several replicas answers to two requests."""
    first = consecutive_ports(count)[0]

    async def ask(client, port):
        url = f"http://127.0.0.1:{port}/v1/completions"
        while True:
            try:
                answer = await client.post(url, json={"model": "tiny", "prompt": "x" * 64, "max_tokens": 2})
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
            else:
                return answer.json()

    async def run():
        stopping = asyncio.Event()
        api = ApiConfig(enable_prompt_tokens_details=True)
        config = replace(CONFIG, http=HttpConfig(host="127.0.0.1", port=first), api=api)
        serving = asyncio.create_task(serve_replicas(config, count, num_processes, stopping))
        try:
            async with httpx.AsyncClient(timeout=60) as client:
                return [[await ask(client, port) for _ in range(2)] for port in range(first, first + count)]
        finally:
            stopping.set()
            await serving

    return asyncio.run(run())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_replica_has_a_port_and_a_cache_of_its_own(num_processes):
    for answers in served(3, num_processes):
        assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers] == [0, 48]


def test_the_settings_of_many_replicas_fit_into_one_variable():
    """128 KiB is the longest that Linux lets a process hand to another."""
    for program in programs_of(CONFIG, range(3, 1027), 2):
        config, *others = program.settings
        assert len(json.dumps([dataclasses.asdict(config), *map(list, others)], default=str)) < 128 << 10


def test_any_free_port_is_one_for_every_replica():
    config = replace(CONFIG, http=HttpConfig(port=8000), kv_events=KvEventsConfig(endpoint="tcp://*:0"))
    assert [each.kv_events.endpoint for each in replicas_of(config, 2)] == ["tcp://*:0"] * 2


def test_the_topic_of_kv_events_may_have_the_number_of_the_replica():
    config = replace(CONFIG, http=HttpConfig(port=8000), kv_events=KvEventsConfig(topic="kv@pod-{replica}@tiny"))
    topics = [each.kv_events.topic for each in replicas_of(config, 3)]
    assert topics == ["kv@pod-0@tiny", "kv@pod-1@tiny", "kv@pod-2@tiny"]


def test_replicas_answer_the_same():
    texts = {answers[0]["choices"][0]["text"] for answers in served(2, 1)}
    assert len(texts) == 1


def test_whatever_has_a_port_gets_its_own_in_each_replica():
    config = replace(
        CONFIG,
        http=HttpConfig(port=8000),
        kv_events=KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/replay"),
        kv_handover=KvHandoverConfig(side_channel_port=5600, engine_id="one"),
    )
    first, second, third = replicas_of(config, 3)
    assert first == config
    assert [each.http.port for each in (second, third)] == [8001, 8002]
    assert [each.kv_events.endpoint for each in (second, third)] == ["tcp://*:5558", "tcp://*:5559"]
    assert second.kv_events.replay_endpoint == "ipc:///tmp/replay_replica1"
    assert (third.kv_handover.side_channel_port, third.kv_handover.engine_id) == (5602, None)


@pytest.mark.parametrize(
    ("http", "words"),
    [
        (HttpConfig(uds="/tmp/x"), "uds is /tmp/x"),
        (HttpConfig(port=0), "port is 0"),
        (HttpConfig(port=65_530), "no room for 10"),
    ],
)
def test_replicas_that_would_be_at_one_place_are_refused(http, words):
    with pytest.raises(ValueError, match=words):
        replicas_of(replace(CONFIG, http=http), 10)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"admin": AdminConfig(port=8009)}, "--port (8000 to 8009) and of --admin-port (8009 to 8018)"),
        (
            {"kv_events": KvEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")},
            "--kv-events-config.endpoint (5557 to 5566) and of --kv-events-config.replay_endpoint (5558 to 5567)",
        ),
        (
            {"kv_handover": KvHandoverConfig(side_channel_port=7995)},
            "--port (8000 to 8009) and of VLLM_NIXL_SIDE_CHANNEL_PORT (7995 to 8004)",
        ),
    ],
)
def test_ports_of_replicas_that_overlap_are_refused(settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        replicas_of(replace(CONFIG, http=HttpConfig(port=8000), **settings), 10)


def test_one_port_at_two_addresses_is_two():
    config = replace(CONFIG, http=HttpConfig(host="127.0.0.1", port=8000), admin=AdminConfig(host="::1", port=8000))
    assert len(replicas_of(config, 3)) == 3


@pytest.mark.parametrize("num_processes", [1, 2])
def test_replicas_end_and_name_the_one_that_does_not_start(num_processes):
    first = consecutive_ports(5).start
    config = replace(
        CONFIG, http=HttpConfig(host="127.0.0.1", port=first), admin=AdminConfig(host="127.0.0.1", port=first + 2)
    )
    words = f"the replica on port {first + 1} does not start: port {first + 3} on 127.0.0.1 cannot be used"
    with socket.create_server(("127.0.0.1", first + 3)), pytest.raises((ReplicaError, GroupError), match=words):
        asyncio.run(serve_replicas(config, 2, num_processes, asyncio.Event()))

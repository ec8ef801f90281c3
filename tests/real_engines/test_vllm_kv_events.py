"""KV events of a stand-in are those of vLLM, message for message and byte for byte except for times."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys

import msgspec
import pytest

from mocker.timing.choose import resolve
from serving.engines.mock.answers.author import AnswerPlan
from serving.engines.mock.engine import EngineConfig, MockEngine, TimingConfig
from serving.engines.mock.stepping import step_together
from serving.stand_in.config import KvEventsConfig, StandInConfig
from serving.stand_in.vllm.kv_events.ranks import sinks_of
from serving.worker.protocol import CacheScope
from tests.real_engines.conftest import ROOT
from tests.real_engines.serving_vllm import installed_version
from tests.stand_in.kv_subscriber import Subscriber
from tests.stand_in.test_kv_events import World
from tests.support.waiting import in_time, until_async

pytestmark = pytest.mark.timeout(500)
BLOCK = 32
SETTINGS = {
    "block_size": BLOCK,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
}
NUM_BLOCKS = 25


def waves():
    """Prompts with shared beginnings, more than the cache holds; with salts; several at once; and a reset between them."""
    rng = random.Random(5)
    shared = rng.choices(range(10, 1000), k=5 * BLOCK + 3)
    number = 0

    def request(prompt, max_tokens, salt=None, session=None):
        nonlocal number
        number += 1
        more = {"cache_salt": salt} if salt else {}
        return {"id": str(number), "prompt": prompt, "max_tokens": max_tokens, "more": more, "session_id": session}

    def fresh(length):
        return rng.choices(range(10, 1000), k=length)

    return [
        [request(shared, 2)],
        [request(shared, 40, session="s")],
        [request(shared + fresh(70), 3), request(shared + fresh(10), 30), request(shared[:64], 1)],
        [request(shared, 2, "mine"), request(shared, 40, "yours")],
        [request(shared, 2, "mine")],
        *[[request(fresh(rng.randrange(20, 330)), rng.randrange(1, 50))] for _ in range(6)],
        [request(shared, 5), request(shared, 5)],  # computed twice: neither is cached yet
        "reset",
        [request(shared, 5)],
        [request(fresh(rng.randrange(100, 200)), rng.randrange(60, 90)) for _ in range(5)],  # some are preempted
        [request(shared + fresh(3), 9)],
    ]


class Told:
    """An author who repeats what vLLM said."""

    words = ()

    def __init__(self, outputs):
        self._outputs = outputs

    def may_be_formed(self, request):
        return False

    def plan(self, request, tokens, *, most):
        return AnswerPlan(self._outputs[request.request_id], len(self._outputs[request.request_id]))


def of_vllm(model, folder, scenario, environment):
    scenario |= {"model": str(model), "folder": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.real_engines.vllm_kv_events"],
        input=json.dumps(scenario),
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    return said["outputs"], [(topic, number, bytes.fromhex(data)) for topic, number, data in said["frames"]]


async def of_stand_in(folder, waves, outputs, config):
    async with in_time(), sinks_of(config) as [sink]:
        engine = MockEngine(resolve(config.engine, config.timing), events=sink, author=Told(outputs))
        running = asyncio.create_task(step_together([engine]))
        subscriber = Subscriber(config.kv_events.endpoint, config.kv_events.replay_endpoint)
        world = World(engine, subscriber)
        for wave in waves:
            if wave == "reset":
                assert await engine.control.reset_prefix_cache()
                continue
            for request in wave:
                salt = request["more"].get("cache_salt")
                scope = CacheScope(salt=salt) if salt else None
                more = {"cache_scope": scope, "session_id": request["session_id"], "request_id": request["id"]}
                world.start(request["prompt"], request["max_tokens"], **more)
            await until_async(lambda: engine.engine.is_idle)
        found = await subscriber.frames(0)
        subscriber.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return [(topic.decode(), number, payload) for topic, number, payload in found]


def without_time(payload):
    _, *rest = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode(rest)


@pytest.mark.parametrize(
    ("is_async", "algorithm", "is_short"),
    [(False, "sha256", True), (True, "sha256_cbor", False), (True, "xxhash", True)],
)
def test_both_publish_the_same(folder, tmp_path, is_async, algorithm, is_short):
    (tmp_path / "v").mkdir()
    scenario = {
        "engine": SETTINGS
        | {"async_scheduling": is_async, "prefix_caching_hash_algo": algorithm, "num_gpu_blocks_override": NUM_BLOCKS},
        "waves": waves(),
    }
    environment = {"PYTHONHASHSEED": "0", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(is_short))}
    outputs, theirs = of_vllm(folder, tmp_path / "v", scenario, environment)

    config = StandInConfig(
        engine=EngineConfig(
            engine_version=installed_version(), **SETTINGS, num_gpu_blocks=NUM_BLOCKS, async_scheduling=is_async
        ),
        timing=TimingConfig(timing="constant", speedup_ratio=100.0),
        kv_events=KvEventsConfig(
            endpoint=f"ipc://{tmp_path}/e",
            replay_endpoint=f"ipc://{tmp_path}/r",
            topic="kv",
            hash_algorithm=algorithm,
            hash_seed="0",
            use_int_block_hashes=is_short,
        ),
    )
    ours = asyncio.run(of_stand_in(tmp_path, waves(), outputs, config))

    decoded = [[msgspec.msgpack.decode(payload)[1:] for *_, payload in found] for found in (ours, theirs)]
    kinds = {event["type"] for [events, _] in decoded[1] for event in events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert decoded[0] == decoded[1]
    assert [(*head, without_time(payload)) for *head, payload in ours] == [
        (*head, without_time(payload)) for *head, payload in theirs
    ]

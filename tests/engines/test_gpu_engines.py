"""SGLang and TensorRT-LLM, which need GPUs: the adapters against stand-ins with the packages' own signatures."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvloop

from dynabench.deployment.description import Deployment, Pool
from dynabench.live.stack import LocalStack
from serving.frontend.config import FrontendConfig
from serving.model.files import ModelFiles
from serving.router.events import BlocksCleared, BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.messages import CallError
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.make import make_engine
from tests.support.model import write_model
from tests.support.waiting import PATIENCE_S, in_time, until, until_async, wait_for

STANDINS = Path(__file__).parent / "standins"
PACKAGES = {"sglang": "sglang", "trtllm": "tensorrt_llm"}
ENGINES = pytest.mark.parametrize("name", PACKAGES)


@pytest.fixture(autouse=True)
def standins(monkeypatch):
    monkeypatch.syspath_prepend(str(STANDINS))
    yield
    for package in PACKAGES.values():
        sys.modules.pop(package, None)


class Publisher:
    """Keeps what it is to publish."""

    def __init__(self):
        self.events = []

    def publish(self, events):
        self.events += events


def request(tokens, max_tokens=5, **more):
    conditions = {"max_tokens": max_tokens, "min_tokens": 0, "ignore_eos": False, "stop": None}
    given = {"request_id": "r", "dp_rank": 0, "sampling_options": {}, "eos_token_ids": [2], "annotations": []}
    conditions |= more.pop("stop_conditions", {})
    return given | {"token_ids": list(tokens), "stop_conditions": conditions} | more


def with_engine(name, talk, run=None, **arguments):
    """Run `talk(engine, publisher, package)` with a started engine."""

    async def main():
        flags = [f"--{key}={value}" for key, value in arguments.items()]
        engine = make_engine(name, WorkerConfig(model_path=str(STANDINS)), run or ModelRunConfig(), flags)
        publisher = Publisher()
        try:
            await engine.start(ModelFiles({"config.json": b'{"vocab_size": 50}'}))
            engine.publish_to([publisher])
            async with in_time():
                await talk(engine, publisher, importlib.import_module(PACKAGES[name]))
        finally:
            await engine.close()

    uvloop.run(main())


def tokens_of(items):
    return [token for item in items for token in item["token_ids"]]


def names(tokens, size):
    return sequence_hashes(block_hashes(np.array(tokens, np.uint32), size))


@ENGINES
def test_an_answer_comes_token_by_token_with_its_reason(name):
    async def talk(engine, publisher, package):
        items = [item async for item in engine.generate(request([10, 20, 30], 4))]
        assert tokens_of(items) == [11, 21, 31, 11]
        assert items[0]["cached_tokens"] == 0
        assert [item.get("finish_reason") for item in items] == [None, None, None, "length"]
        items = [item async for item in engine.generate(request([10, 1, 30], 9))]
        assert tokens_of(items) == [11, 2]
        assert items[-1]["finish_reason"] == "stop"
        unending = request([10, 1, 30], 6, stop_conditions={"ignore_eos": True})
        assert len(tokens_of([item async for item in engine.generate(unending)])) == 6

    with_engine(name, talk)


@ENGINES
def test_leaving_early_aborts_the_request_in_the_engine(name):
    async def talk(engine, publisher, package):
        answer = engine.generate(request([10, 20], 300))
        await anext(answer)
        await answer.aclose()
        if name == "sglang":
            latest = package.Engine.latest
            assert latest.tokenizer_manager.aborted == [latest.asked[0]["rid"]]
        else:
            assert package.LLM.latest.results[0].was_aborted
        done = [item async for item in engine.generate(request([10, 20], 2))]
        assert tokens_of(done) == [11, 21]
        if name == "sglang":
            assert len(latest.tokenizer_manager.aborted) == 1
        else:
            assert not package.LLM.latest.results[1].was_aborted

    with_engine(name, talk)


@ENGINES
def test_the_same_request_id_twice_is_two_requests(name):
    async def talk(engine, publisher, package):
        async def ask(tokens):
            return tokens_of([item async for item in engine.generate(request(tokens, 3))])

        assert await asyncio.gather(ask([10]), ask([20])) == [[11] * 3, [21] * 3]
        if name == "sglang":
            assert len({each["rid"] for each in package.Engine.latest.asked}) == 2

    with_engine(name, talk)


@ENGINES
def test_sampling_options_arrive_under_the_engines_names(name):
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
    }

    async def talk(engine, publisher, package):
        asked = request([10], 3, sampling_options=options, stop_conditions={"min_tokens": 2})
        assert len(tokens_of([item async for item in engine.generate(asked)])) == 3
        if name == "sglang":
            given = dict(package.Engine.latest.asked[0])
            assert given.pop("sampling_seed") == 7
            assert (given["max_new_tokens"], given["min_new_tokens"], given["stop_token_ids"]) == (3, 2, [2])
        else:
            parameters = package.LLM.latest.results[0]._parameters
            given = {field: getattr(parameters, field) for field in parameters.__dataclass_fields__}
            assert (given["max_tokens"], given["min_tokens"], given["end_id"], given["seed"]) == (3, 2, 2, 7)
            assert not given["detokenize"]
        assert {key: given[key] for key in options if key != "seed"} == {
            key: value for key, value in options.items() if key != "seed"
        }

    seeds = {"enable_deterministic_inference": True} if name == "sglang" else {}
    with_engine(name, talk, **seeds)


def test_a_seed_that_sglang_would_ignore_is_refused():
    async def talk(engine, publisher, package):
        with pytest.raises(CallError, match="seed is 7; expected none, or temperature 0") as refused:
            await anext(engine.generate(request([10], 3, sampling_options={"seed": 7})))
        assert refused.value.kind == "invalid"
        await anext(engine.generate(request([10], 3, sampling_options={"seed": 7, "temperature": 0})))

    with_engine("sglang", talk)


@ENGINES
def test_what_an_answer_must_look_like_arrives_under_the_engines_names(name):
    schema, grammar = {"type": "object", "properties": {"a": {"type": "integer"}}}, 'root ::= "a"'
    forms = ({"json": schema}, {"regex": "a|b"}, {"choice": ["a.", "b"]}, {"grammar": grammar})

    async def talk(engine, publisher, package):
        assert engine.traits.guided_decoding == ("json", "regex", "choice", "grammar")
        for form in forms:
            [item async for item in engine.generate(request([10], 1, sampling_options={"guided_decoding": form}))]
        if name == "sglang":
            names = ("json_schema", "regex", "ebnf")
            given = [{key: asked[key] for key in names if key in asked} for asked in package.Engine.latest.asked]
            assert given == [
                {"json_schema": json.dumps(schema)}, {"regex": "a|b"}, {"regex": r"(a\.|b)"}, {"ebnf": grammar}
            ]  # fmt: skip
        else:
            made = package.llmapi.GuidedDecodingParams
            given = [result._parameters.guided_decoding for result in package.LLM.latest.results]
            assert given == [made(json=schema), made(regex="a|b"), made(regex=r"(a\.|b)"), made(grammar=grammar)]
            assert not package.LLM.latest.arguments["skip_tokenizer_init"]

    with_engine(name, talk, **({} if name == "sglang" else {"guided-decoding-backend": "xgrammar"}))


@pytest.mark.parametrize(
    ("name", "arguments", "able"),
    [
        ("sglang", {"grammar-backend": "none"}, ()),
        ("sglang", {"skip-tokenizer-init": "true"}, ()),
        ("sglang", {"grammar-backend": "outlines"}, ("json", "regex", "choice")),
        ("trtllm", {}, ()),
        ("trtllm", {"guided-decoding-backend": "xgrammar", "skip-tokenizer-init": "true"}, ()),
    ],
)
def test_an_engine_without_what_guides_answers_says_so_and_refuses(name, arguments, able):
    async def talk(engine, publisher, package):
        assert engine.traits.guided_decoding == able
        with pytest.raises(CallError, match="cannot guide answers by grammar") as caught:
            [
                item
                async for item in engine.generate(request([10], sampling_options={"guided_decoding": {"grammar": "x"}}))
            ]
        assert caught.value.kind == "invalid"

    with_engine(name, talk, **arguments)


def test_sglangs_processes_outlive_the_thread_that_started_them():
    async def talk(engine, publisher, package):
        await asyncio.sleep(0.3)
        assert package.Engine.latest.scheduler.poll() is None

    with_engine("sglang", talk)
    assert sys.modules["sglang"].Engine.latest.scheduler.poll() is not None


def test_a_node_that_follows_runs_until_it_is_asked_to_end(tmp_path):
    model = write_model(tmp_path / "model")
    words = ["in=none", "out=sglang", str(model), "--num-nodes", "2", "--node-rank", "1", "--leader-addr", "10.0.0.1:5"]
    environment = os.environ | {"PYTHONPATH": str(STANDINS)}
    command = [sys.executable, "-m", "serving.cli.dynamo_run", *words]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        below = until(lambda: [int(pid) for task in children.parent.parent.iterdir() for pid in (task / "children").read_text().split()], process)  # fmt: skip
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (0, "")
        until(lambda: not Path(f"/proc/{below[0]}").exists())
    finally:
        process.kill()
        process.wait()


def test_trtllm_samples_where_nothing_is_said():
    async def talk(engine, publisher, package):
        [item async for item in engine.generate(request([10], 1))]
        assert package.LLM.latest.results[0]._parameters.temperature == 1.0  # its own default is greedy

    with_engine("trtllm", talk)


@ENGINES
def test_log_probabilities_come_with_token_ids(name):
    async def talk(engine, publisher, package):
        items = [item async for item in engine.generate(request([10], 2, sampling_options={"logprobs": 2}))]
        assert [item["log_probs"] for item in items] == [[-0.5], [-0.5]]
        assert items[0]["top_logprobs"] == [[[11, -0.5], [12, -1.5]]]

    with_engine(name, talk)


@ENGINES
def test_what_the_engine_refuses_is_the_requests_own_error(name):
    async def talk(engine, publisher, package):
        with pytest.raises(CallError) as caught:
            [item async for item in engine.generate(request([5] * 500))]
        assert caught.value.kind == "invalid"
        assert "500" in str(caught.value)
        if name == "sglang":
            with pytest.raises(CallError, match="out of luck") as caught:
                [item async for item in engine.generate(request([13]))]
            assert caught.value.kind == "engine"
        assert tokens_of([item async for item in engine.generate(request([10], 1))]) == [11]

    with_engine(name, talk)


@ENGINES
def test_kv_events_name_blocks_as_the_router_does(name):
    size = 4
    tokens = list(range(20, 33))  # three blocks and one token

    async def talk(engine, publisher, package):
        [item async for item in engine.generate(request(tokens, 1))]
        await until_async(lambda: publisher.events)
        ours = names(tokens[:12], size)
        assert publisher.events == [BlocksStored(ours, None)]
        [item async for item in engine.generate(request([*tokens[:8], 40, 41, 42, 43, 44], 1))]
        await until_async(lambda: len(publisher.events) > 1)
        longer = names([*tokens[:8], 40, 41, 42, 43], size)
        assert publisher.events[1] == BlocksStored(longer[2:], ours[1])
        if name == "sglang":
            package.Engine.latest.forget_all()
            await until_async(lambda: len(publisher.events) > 2)
            assert publisher.events[2] == BlocksCleared()
        else:
            llm = package.LLM.latest
            last = [theirs for theirs, (_, block) in llm._held.items() if block == (40, 41, 42, 43)]
            llm._tell({"type": "removed", "block_hashes": last}, window=512)  # of layers with a shorter memory
            llm.forget(*last)
            await until_async(lambda: len(publisher.events) > 2)
            assert publisher.events[2:] == [BlocksRemoved([longer[2]])]
            first = next(theirs for theirs, (_, block) in llm._held.items() if block == tuple(tokens[:4]))
            level = {"type": "event_diff", "new_value": 1, "old_value": 0}
            llm._tell({"type": "updated", "block_hash": first, "cache_level": level, "priority": None})
            llm.forget(first)
            await until_async(lambda: len(publisher.events) > 5)
            assert publisher.events[3:] == [
                BlocksStored(ours[:1], None, "CPU"),
                BlocksRemoved(ours[:1], "GPU"),
                BlocksRemoved(ours[:1], "CPU"),
            ]

    size_flag = {"page-size": size} if name == "sglang" else {"kv-cache-config": '{"tokens_per_block": 4}'}
    with_engine(name, talk, **size_flag)


@ENGINES
def test_load_is_told(name):
    async def talk(engine, publisher, package):
        answer = engine.generate(request([10, 20], 200))
        await anext(answer)
        await until_async(lambda: engine.load(0).num_running == 1)
        await answer.aclose()
        await until_async(lambda: engine.load(0).num_running == 0)
        if name == "trtllm":
            assert engine.load(0).kv_total_blocks == 100

    with_engine(name, talk)


@ENGINES
def test_an_argument_that_the_engine_does_not_have_is_named(name):
    async def talk(engine, publisher, package):
        raise AssertionError("it should not have started")

    with pytest.raises(EngineError, match="no_such_thing"):
        with_engine(name, talk, **{"no-such-thing": 1})


@ENGINES
def test_it_is_shut_down_in_the_end(name):
    async def talk(engine, publisher, package):
        pass

    with_engine(name, talk)
    package = importlib.import_module(PACKAGES[name])
    latest = package.Engine.latest if name == "sglang" else package.LLM.latest
    assert latest.was_shut_down


@ENGINES
def test_the_whole_stack_serves_it_and_the_router_finds_its_blocks(name, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(STANDINS))
    settings = '{"page_size": 16}' if name == "sglang" else '{"kv_cache_config": {"tokens_per_block": 16}}'
    extra = tmp_path / "extra.json"
    extra.write_text(settings)

    async def main():
        pool = Pool(
            replicas=2,
            engine=name,
            run=ModelRunConfig(extra_engine_args=extra),
            worker=WorkerConfig(model_path=str(write_model(tmp_path / "model")), drain_s=2),
        )
        frontend = FrontendConfig(http_port=0, drain_s=2)
        stack = LocalStack(Deployment(pools=(pool,), router_mode="kv", frontend=frontend))
        async with stack, httpx.AsyncClient(base_url=stack.url) as client:

            async def ask(prompt):
                body = {"model": stack.model, "prompt": prompt, "max_tokens": 3, "stream": True}
                answer = await client.post("/v1/completions", json=body)
                return int(answer.headers["x-worker-slot"]), int(answer.headers["x-overlap-tokens"])

            await asyncio.to_thread(wait_for, stack.url, 2)
            first = [await ask([number + 3] * 70) for number in range(4)]
            assert {slot for slot, _ in first} == {0, 1}
            async with in_time():
                while (await ask([3] * 70 + [9] * 5)) != (first[0][0], 64):
                    await asyncio.sleep(0.02)

    uvloop.run(main())

"""Workers and frontends that die, drain or hang up in the middle of things: every request has one end, and it is told.

The long ones stream until something is found to be gone, and then until it is back, for many seconds of several processes;
tests/serving/test_attempts.py and tests/runtime test the same losses without processes.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import signal
import socket
import sys
import threading
import time

import httpx
import msgspec
import numpy as np
import openai
import pytest
import uvloop

from serving.engines.mock.answers.made_up import answer_tokens
from serving.frontend.config import FrontendConfig
from serving.frontend.models import Models
from serving.model.card import ModelCard, ModelType
from serving.model.tokenizer import ByteTokenizer
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.server import GeneratorService
from serving.worker.registration import register_llm
from tests.support import warm
from tests.support.processes import children
from tests.support.servers import Etcd, Nats, free_port
from tests.support.stacks import running
from tests.support.waiting import PATIENCE_S, in_time, instances, until, until_async, wait_for

STEP_S = 0.01
STEADY = {
    "timing": "constant",
    "constant_decode_ms": 1000 * STEP_S,
    "constant_prefill_ms": 1000 * STEP_S,
    "speedup_ratio": 1.0,
}
ENDLESS = 30_000
"""Tokens of an answer that cannot be over, however slow this machine, before the test hangs up."""


def ask(url, prompts, max_tokens, during, *, more=None, num_begun=None):
    """Stream many completions at once; `during` runs as soon as each (or so many) has begun. Return each one's text or error.

    `more` hangs up on each once it has so many tokens that a steady engine made after `during`, however many a reader
    that is slow had not read by then; without it they are wanted whole.
    """
    began_s = time.monotonic()

    async def main():
        begun = asyncio.Semaphore(0)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            wanted = math.inf

            async def one(prompt):
                text, reason = "", None
                try:
                    stream = await client.completions.create(
                        model="mock", prompt=prompt, max_tokens=max_tokens, stream=True
                    )
                    async for event in stream:
                        if not text:
                            begun.release()
                        text += event.choices[0].text
                        reason = event.choices[0].finish_reason
                        if len(text) >= wanted:
                            await stream.close()
                            return text
                except openai.APIError as error:
                    return error
                assert reason == "length"  # a stream that ends without a reason would be a silent loss
                return text

            tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
            for _ in range(num_begun or len(prompts)):
                await begun.acquire()
            await asyncio.to_thread(during)
            if more is not None:
                wanted = (time.monotonic() - began_s) / STEP_S + more
            return await asyncio.gather(*tasks)

    return asyncio.run(main())


def whole(url, prompt, max_tokens):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(model="mock", prompt=prompt, max_tokens=max_tokens).choices[0].text


def expected(prompt, count):
    """Return the mocker's answer, which is a function of the prompt alone, wherever it was made."""
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.uint32)
    return bytes(answer_tokens(tokens, 0, 0, count, ByteTokenizer().speakable())).decode()


def are_beginnings(texts, prompts):
    """Whether these are the beginnings of the answers to these prompts."""
    return all(text and expected(prompt, len(text)) == text for prompt, text in zip(prompts, texts, strict=True))


def busy(url):
    """Return how many requests run or wait in the engines, as they reported last."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    names = ("dynamo_component_requests_running{", "dynamo_component_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def test_streams_of_a_killed_worker_go_on_elsewhere_with_no_token_lost_or_repeated():
    with running(3, engine=STEADY) as stack:
        prompts = [f"prompt number {number}" for number in range(24)]

        def kill():
            os.kill(stack.group.processes["worker-1"], signal.SIGKILL)

        assert are_beginnings(ask(stack.url, prompts, ENDLESS, kill, more=50), prompts)
        metrics = httpx.get(f"{stack.url}/metrics").text
        moved = 'dynamo_frontend_model_migration_total{migration_type="ongoing_request",model="mock"}'
        assert any(line.startswith(moved) for line in metrics.splitlines())
        wait_for(stack.url, 2)
        until(lambda: busy(stack.url) == 0)


def test_an_answer_that_moved_is_as_long_as_one_that_did_not():
    with running(2, engine=STEADY) as stack:
        victim = stack.group.processes["worker-0"]
        prompts = [f"prompt number {number}" for number in range(8)]
        texts = ask(stack.url, prompts, 100, lambda: os.kill(victim, signal.SIGKILL))
        assert texts == [expected(prompt, 100) for prompt in prompts]


def test_without_migration_a_killed_worker_is_one_clear_error_for_its_requests_alone():
    with running(
        2, engine=STEADY, worker={"migration_limit": 0}, frontend={"migration_limit": 0, "router_mode": "round-robin"}
    ) as stack:
        victim = stack.group.processes["worker-0"]
        prompts = [f"prompt number {number}" for number in range(10)]
        ends = ask(stack.url, prompts, ENDLESS, lambda: os.kill(victim, signal.SIGKILL), more=20)
        errors = [end for end in ends if isinstance(end, openai.APIError)]
        assert len(errors) == 5
        assert all("is gone" in error.message for error in errors)
        others = {prompt: end for prompt, end in zip(prompts, ends, strict=True) if end not in errors}
        assert are_beginnings(others.values(), others)


def test_a_request_moves_no_more_often_than_the_limit_allows():
    with running(3, engine=STEADY, worker={"migration_limit": 1}, frontend={"router_mode": "round-robin"}) as stack:

        def kill_two():
            os.kill(stack.group.processes["worker-0"], signal.SIGKILL)
            until(lambda: len(instances(stack.url)) == 2 and busy(stack.url) == 12)
            os.kill(stack.group.processes["worker-1"], signal.SIGKILL)

        prompts = [f"p{number}" for number in range(12)]
        ends = ask(stack.url, prompts, ENDLESS, kill_two, more=20)
        errors = [end for end in ends if isinstance(end, openai.APIError)]
        assert errors
        assert all("migration limit of 1 is exhausted" in error.message for error in errors)
        others = {prompt: end for prompt, end in zip(prompts, ends, strict=True) if end not in errors}
        assert len(others) >= 8  # those that were not with both
        assert are_beginnings(others.values(), others)


def test_a_worker_asked_to_end_finishes_what_it_has():
    worker = {"migration_limit": 0, "drain_s": 90.0}
    with running(2, engine=STEADY, frontend={"router_mode": "round-robin"}, worker=worker) as stack:
        process = stack.group.processes["worker-0"]
        prompts = [f"prompt number {number}" for number in range(8)]
        late = []

        def drain():
            os.kill(process, signal.SIGTERM)
            late.extend(whole(stack.url, f"late {number}", 3) for number in range(6))

        texts = ask(stack.url, prompts, 200, drain)
        assert [len(text) for text in texts] == [200] * 8
        assert [len(text) for text in late] == [3] * 6
        until(lambda: stack.group.dead == ["worker-0"])
        assert stack.group.returncode("worker-0") == 0


def test_a_frontend_asked_to_end_refuses_new_requests_and_finishes_the_others():
    with running(2, engine=STEADY, frontend={"drain_s": 90.0}) as stack:
        seen = {}

        def drain():
            with httpx.Client(base_url=stack.url) as kept:
                kept.get("/live")
                os.kill(stack.group.processes["frontend"], signal.SIGTERM)
                until(lambda: kept.get("/health").status_code == 503)
                answer = kept.post("/v1/completions", json={"model": "mock", "prompt": "x"})
                seen.update(status=answer.status_code, retry=answer.headers["retry-after"], body=answer.json())

        texts = ask(stack.url, [f"prompt number {number}" for number in range(8)], 1000, drain)
        assert [len(text) for text in texts] == [1000] * 8
        assert (seen["status"], seen["retry"]) == (503, "1")
        assert seen["body"]["error"]["type"] == "service_unavailable_error"
        until(lambda: "frontend" in stack.group.dead)
        assert stack.group.returncode("frontend") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_that_takes_too_long_ends_answers_with_the_promised_error(stream):
    with running(1, engine=STEADY, frontend={"drain_s": 0.5}) as stack:
        ends = []

        def one():
            body = {"model": "mock", "prompt": "x", "max_tokens": 5000, "stream": stream}
            answer = httpx.post(f"{stack.url}/v1/completions", json=body)
            ends.append((answer.status_code, answer.text))

        asking = [threading.Thread(target=one) for _ in range(3)]
        for thread in asking:
            thread.start()
        until(lambda: busy(stack.url) == 3)
        os.kill(stack.group.processes["frontend"], signal.SIGTERM)
        for thread in asking:
            thread.join()
        error = {"message": "the server shut down before the answer was complete", "type": "service_unavailable_error"}
        for status, text in ends:
            assert status == (200 if stream else 503)
            last = json.loads(text.strip().rpartition("\n")[2].removeprefix("data: "))
            assert last == {"error": error | {"param": None, "code": None}}


def test_a_client_that_hangs_up_frees_its_place_in_the_engine():
    with running(1, engine=STEADY | {"max_num_seqs": 2}) as stack:
        with httpx.Client() as client:
            for _ in range(4):  # more than the engine runs at once
                body = {"model": "mock", "prompt": "for ever", "max_tokens": 10_000, "stream": True}
                with client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer:
                    next(answer.iter_bytes())
        until(lambda: busy(stack.url) == 0)
        assert len(whole(stack.url, "next", 5)) == 5


def test_a_killed_frontend_leaves_no_work_behind():
    with running(1, engine=STEADY, restart=True) as stack:

        def kill():
            os.kill(stack.group.processes["frontend"], signal.SIGKILL)

        ends = ask(stack.url, ["a", "b", "c"], ENDLESS, kill)
        assert all(isinstance(end, openai.APIConnectionError) for end in ends)
        wait_for(stack.url, 1)
        until(lambda: busy(stack.url) == 0)


def test_more_requests_than_allowed_are_turned_away_at_once():
    with running(1, engine=STEADY, frontend={"max_inflight_requests": 4}) as stack:
        refused = []

        def one_more():
            answer = httpx.post(f"{stack.url}/v1/completions", json={"model": "mock", "prompt": "x"})
            refused.append((answer.status_code, answer.headers.get("retry-after"), answer.json()["error"]["type"]))

        prompts = ["a", "b", "c", "d"]
        texts = ask(stack.url, prompts, ENDLESS, one_more, more=1)
        assert refused == [(429, "1", "rate_limit_error")]
        assert are_beginnings(texts, prompts)


def test_a_model_goes_with_its_last_instance_and_comes_back_with_the_next():
    with running(1, restart=True) as stack:
        os.kill(stack.group.processes["worker-0"], signal.SIGKILL)
        until(lambda: httpx.get(f"{stack.url}/v1/models").json()["data"] == [])
        answer = httpx.post(f"{stack.url}/v1/completions", json={"model": "mock", "prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")  # clients try again
        never = httpx.post(f"{stack.url}/v1/completions", json={"model": "never known", "prompt": "x"})
        assert (never.status_code, never.json()["error"]["code"]) == (404, "model_not_found")
        until(lambda: len(httpx.get(f"{stack.url}/v1/models").json()["data"]) == 1)
        assert len(whole(stack.url, "again", 5)) == 5


DEPLOYMENT = """
router_mode: kv
frontend: {{http_port: {port}}}
runtime: {{discovery_dir: {folder}}}
standalone_router: {has_router}
pools:
  worker: {settings}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("has_router", "count", "killed"),
    [("true", 2, "serving.router_service"), ("false", 1, "serving.mocker")],
    ids=["the router's process", "the only worker"],
)
def test_streams_wait_for_what_was_killed_to_be_started_again(tmp_path, has_router, count, killed):
    port = free_port()
    file = tmp_path / "deployment.yaml"
    pool = json.dumps({"replicas": count, "model_name": "mock", "migration_limit": 3} | STEADY)
    file.write_text(DEPLOYMENT.format(port=port, folder=tmp_path / "d", has_router=has_router, settings=pool))
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("w") as log:
        process = warm.start([sys.executable, "-m", "dynabench", "serve", "-f", file], stdout=log, stderr=log)
    try:
        wait_for(url, 1, process)

        def kill():
            (victim,) = [pid for pid, words in children(process).items() if killed in words]
            os.kill(victim, signal.SIGKILL)

        prompts = [f"prompt number {number}" for number in range(6)]
        assert are_beginnings(ask(url, prompts, ENDLESS, kill, more=200), prompts)
    finally:
        process.terminate()
        process.wait()


@pytest.mark.long
def test_a_worker_that_hangs_loses_its_streams_to_others_and_is_back_when_it_answers():
    with running(2, engine=STEADY, frontend={"router_mode": "round-robin"}) as stack:
        pid = stack.group.processes["worker-0"]
        prompts = [f"prompt number {number}" for number in range(8)]
        try:
            stop = functools.partial(os.kill, pid, signal.SIGSTOP)
            assert are_beginnings(ask(stack.url, prompts, ENDLESS, stop, more=200), prompts)
            until(lambda: len(instances(stack.url)) == 1)
            assert [whole(stack.url, prompt, 3) for prompt in prompts] == [expected(prompt, 3) for prompt in prompts]
            assert len(instances(stack.url)) == 1  # its socket takes connections, and it does not answer
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(stack.url, 2)
        assert [whole(stack.url, prompt, 3) for prompt in prompts] == [expected(prompt, 3) for prompt in prompts]


@contextlib.asynccontextmanager
async def serving(config, context_length):
    """Run a worker of a model that has no files."""
    address = EndpointAddress("back", "backend", "generate")

    async def generate(request):
        yield 1

    async with await DistributedRuntime.connect(config) as runtime:
        await runtime.serve(address, GeneratorService(generate))
        card = ModelCard(
            name="mock",
            model_type=ModelType.Backend,
            instance_id=runtime.instance_id,
            context_length=context_length,
            **dict(zip(("namespace", "component", "endpoint"), address, strict=True)),
        )
        await runtime.register(card.key, msgspec.json.encode(card))
        yield


def test_a_model_that_comes_back_with_other_settings_is_served_with_those(tmp_path, monkeypatch):
    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as runtime, in_time():
            models = Models(runtime, FrontendConfig(), RouterConfig())
            await models.start()

            async def served(context_length):
                async with serving(config, context_length):
                    model = await until_async(lambda: models.get("mock"))
                await until_async(lambda: models.get("mock") is None)
                assert models.all() == []
                return model

            first, again, other = await served(100), await served(100), await served(200)
            assert first is again
            assert (first.card.context_length, other.card.context_length) == (100, 200)
            monkeypatch.setattr("serving.frontend.models.PATIENCE_S", 0.0)
            kept = await served(200)
            await asyncio.sleep(0.1)
            assert await served(200) is not kept
            await models.close()

    uvloop.run(main())


def test_the_preparer_of_a_model_that_is_gone_has_ended_when_the_frontend_has(tmp_path):
    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        async with await DistributedRuntime.connect(config) as runtime, in_time():
            models = Models(runtime, FrontendConfig(), RouterConfig())
            await models.start()
            async with serving(config, 100):
                model = await until_async(lambda: models.get("mock"))
                await model.preparer.start()
                models._drop(next(iter(models._pools)))  # as it is some time after its last worker left
                await models.close()
                assert model.preparer._process._process.returncode is not None

    uvloop.run(main())


def test_metrics_name_no_worker_that_is_gone():
    with running(2, frontend={"router_mode": "round-robin"}, restart=True) as stack:

        def workers():
            lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
            return {line for line in lines if line.startswith("dynamo_frontend_router_decisions_total")}

        for _ in range(2):
            whole(stack.url, "hello", 1)
        before = workers()
        assert len(before) == 2
        os.kill(stack.group.processes["worker-0"], signal.SIGKILL)
        until(lambda: len(workers() & before) == 1)


def test_a_client_that_does_not_read_is_hung_up_on_and_holds_up_nobody():
    with running(
        1, frontend={"write_timeout_s": 1.0}, engine={"speedup_ratio": 1000.0, "num_gpu_blocks": 20_000}
    ) as stack:
        port = int(stack.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = b'{"model":"mock","prompt":"x","max_tokens":100000,"stream":true}'
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            lazy.sendall(head.encode() + body)
            time.sleep(0.5)
            assert len(whole(stack.url, "me", 100)) == 100
            until(lambda: "model_cancellation_total" in httpx.get(f"{stack.url}/metrics").text)
            until(lambda: busy(stack.url) == 0)


@pytest.mark.long
@pytest.mark.parametrize("which", ["etcd", "nats", "both"])
def test_servers_that_go_away_and_come_back_break_no_stream(which):
    with Etcd() as etcd, Nats() as nats:
        runtime = RuntimeConfig(etcd_endpoints=etcd.url, nats_server=nats.url, lease_ttl_s=4.0)
        with running(2, engine=STEADY, runtime=runtime) as stack:

            def outage():
                down = [server for server, name in ((etcd, "etcd"), (nats, "nats")) if which in (name, "both")]
                for server in down:
                    server.stop()
                time.sleep(3)
                for server in down:
                    server.start()

            prompts = [f"prompt number {number}" for number in range(8)]
            texts = ask(stack.url, prompts, 500, outage)
            assert not stack.group.dead
            assert texts == [expected(prompt, 500) for prompt in prompts]
            wait_for(stack.url, 2)


def test_a_model_that_comes_back_is_offered_once_its_instance_is_there_and_not_with_its_card(tmp_path):
    config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
    address = EndpointAddress("dynamo", "backend", "generate")

    async def generate(request):
        yield 1

    async def main():
        async with in_time(), await DistributedRuntime.connect(config) as watching:
            models = Models(watching, FrontendConfig(), RouterConfig())
            await models.start()
            for is_back in (False, True):
                async with await DistributedRuntime.connect(config) as serving:
                    await register_llm(ModelType.Backend, serving.endpoint(address), "", "mock")
                    if is_back:
                        await until_async(lambda: len(models.all()) == 1)
                        assert models.answering() == []
                    await serving.serve(address, GeneratorService(generate))
                    await until_async(lambda: len(models.answering()) == 1)
                await until_async(lambda: models.all() == [])
            await models.close()

    uvloop.run(main())

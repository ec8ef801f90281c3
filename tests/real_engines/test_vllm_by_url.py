"""Plain `vllm serve` processes behind our frontend, by URL: one that prefills, and one that decodes."""

import asyncio
import contextlib
import json
import os
import signal

import httpx
import pytest

from serving.engines.openai.engine import OpenAiServer
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.loop import run_worker
from tests.real_engines.serving_vllm import until_ready, vllm_serve
from tests.real_engines.test_vllm import tokens
from tests.support.apart import apart
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)
BLOCK = 32
ROLES = ("prefill", "decode")
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as started:
        flags = ("--enable-prompt-tokens-details", f"--kv-transfer-config={json.dumps(TRANSFER)}")
        found = {role: started.enter_context(vllm_serve(folder, logs / role, *flags)) for role in ROLES}
        for role, (url, process) in found.items():
            until_ready(url, process, logs / role)
        yield found


@pytest.fixture(scope="module")
def stack(servers, folder, tmp_path_factory):
    with apart(tmp_path_factory.mktemp("discovery"), enforce_disagg=True) as made:
        made.ended = {}

        async def work(role, stopping):
            component = "prefill" if role == "prefill" else "backend"
            endpoint = f"dyn://apart.{component}.generate"
            worker = WorkerConfig(endpoint=endpoint, role=role, model_name="tiny", model_path=str(folder), drain_s=5.0)
            run = ModelRunConfig(kv_cache_block_size=BLOCK)
            try:
                await run_worker(made._network, worker, OpenAiServer(servers[role][0], worker, run, {}), stopping)
            except EngineError as error:
                made.ended[role] = str(error)

        async def start(role):
            stopping = asyncio.Event()
            made._running[role] = asyncio.create_task(work(role, stopping)), stopping

        for role in ROLES:
            made.do(start(role))
        made.until_there(2)
        yield made


def body(prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return body | {"nvext": {"extra_fields": ["worker_id"], "ignore_eos": True}} | more


def ask(stack, prompt, **more):
    answer = httpx.post(f"{stack.url}/v1/completions", json=body(prompt, **more), timeout=240)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_are_those_of_the_weights_prefilled_by_one_server_and_said_by_another(stack, reference, tokenizer):
    for number, length in enumerate((5, BLOCK, 10 * BLOCK + 3)):
        prompt = tokens(f"by url {number}", length)
        answer = ask(stack, prompt)
        assert answer["choices"][0]["text"] == tokenizer.decode(reference.greedy(prompt, 8)[0])
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (length, 8)
        workers = answer["nvext"]["worker_id"]
        assert workers["prefill_worker_id"] != workers["decode_worker_id"]


def test_answers_that_are_streamed_are_the_same(stack, reference, tokenizer):
    prompt = tokens("by url, streamed", 3 * BLOCK + 1)
    said = []
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body(prompt, stream=True), timeout=240) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                said += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    assert len([text for text in said if text]) > 1
    assert "".join(said) == tokenizer.decode(reference.greedy(prompt, 8)[0])


def test_the_decode_server_read_the_kv_and_the_prefill_server_freed_it(stack, servers):
    def read():
        lines = httpx.get(f"{servers['decode'][0]}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:nixl_xfer_time_seconds_count"))

    def used():
        lines = httpx.get(f"{servers['prefill'][0]}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kv_cache_usage_perc"))

    before = read()
    ask(stack, tokens("by url, read", 20 * BLOCK))
    until(lambda: read() > before)
    until(lambda: used() == 0)


def test_cached_tokens_are_those_of_the_prefill_server(stack):
    prompt = tokens("by url, cached", 4 * BLOCK + 5)
    first, again = ask(stack, prompt), ask(stack, prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK


def test_a_server_that_is_killed_ends_its_worker_with_a_line(stack, servers):
    """The last of all: it takes the decode server away."""
    url, process = servers["decode"]
    os.killpg(process.pid, signal.SIGKILL)
    until(lambda: "decode" in stack.ended)
    assert stack.ended["decode"].startswith(f"{url} no longer answers")
    answer = httpx.post(f"{stack.url}/v1/completions", json=body([5, 6, 7]), timeout=240)
    assert answer.status_code in (404, 503), answer.text

"""Prefill and decode mockers behind the real frontend, over HTTP: their answers are those of one worker, whatever happens."""

import asyncio
import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from serving.engines.mock.answers.made_up import answer_tokens
from serving.model.tokenizer import ByteTokenizer
from tests.support.apart import apart
from tests.support.waiting import PATIENCE_S, in_time, until

PROMPT = "tell me of the two pools, one that reads and one that writes, and of what goes between them"
FLOWS = ("source-first", "destination-first")


@pytest.fixture(scope="module", params=FLOWS)
def stack(request, tmp_path_factory):
    """Two prefill and two decode workers of one model, and an aggregated one of another, whose answers are to be the same."""
    with apart(tmp_path_factory.mktemp("apart") / "d", flow=request.param) as stack:
        for number, role in enumerate(("decode", "prefill", "prefill", "decode")):
            stack.worker(f"{role}-{number}", role)
        stack.worker("whole", "aggregated", model="whole")
        stack.until_there(5)
        yield stack


def complete(stack, prompt=PROMPT, **options):
    answer = httpx.post(f"{stack.url}/v1/completions", json={"prompt": prompt, **options}, timeout=PATIENCE_S)
    return answer.json()


def both(stack, **options):
    """Return what the workers that share a request answer, and what the one answers that does not."""
    return complete(stack, model="apart", **options), complete(stack, model="whole", **options)


def choices(answer):
    return sorted(answer["choices"], key=lambda choice: choice["index"])


# Answers


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40, "seed": 7},
        {"max_tokens": 1},
        {"max_tokens": 60, "stop": ["e", "qu"]},
        {"max_tokens": 60, "stop_token_ids": [101], "min_tokens": 20},
        {"max_tokens": 5, "logprobs": 3, "echo": True},
        {"max_tokens": 12, "n": 2, "seed": 3},
        {"max_tokens": 9, "prompt": ["the first", "and a second that is longer than a block"]},
        {"max_tokens": 30, "nvext": {"stop_after": 11}},
    ],
    ids=[
        "seeded",
        "one token",
        "stops",
        "stop tokens",
        "log-probabilities",
        "two choices",
        "two prompts",
        "its own end",
    ],
)
def test_an_answer_is_that_of_one_worker(stack, options):
    shared, whole = both(stack, **options)
    assert choices(shared) == choices(whole), shared
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [shared["usage"][name] for name in names] == [whole["usage"][name] for name in names]


def test_a_streamed_answer_is_that_of_one_worker(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:

        def events(model):
            stream = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=25, stream=True, seed=9, stream_options={"include_usage": True}
            )
            return [
                (event.choices and event.choices[0].text, event.usage and event.usage.total_tokens) for event in stream
            ]

        assert events("apart") == events("whole")


def test_a_chat_is_answered_as_by_one_worker(stack):
    def ask(model):
        body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 10}
        return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["choices"]

    assert ask("apart") == ask("whole")


def test_cached_tokens_are_those_that_the_prefill_worker_found(stack):
    prompt = f"once more: {PROMPT}, and so on"
    counts = []

    def is_found():
        answer = complete(stack, prompt, model="apart", max_tokens=3)
        counts.append((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        return counts[-1]

    until(is_found)  # the router hears of what is cached a moment later, and there are two prefill workers
    assert counts[0] == 0
    assert counts[-1] == len(prompt) // 16 * 16


def test_an_answer_says_who_did_what_and_when(stack):
    extra = {"extra_fields": ["worker_id", "timing", "routing"]}
    shared, whole = (answer["nvext"] for answer in both(stack, max_tokens=3, nvext=extra))
    ids = {
        kind: {
            each["instance_id"]
            for each in httpx.get(f"{stack.url}/health").json()["instances"]
            if each["worker_type"] == kind
        }
        for kind in ("prefill", "decode", "aggregated")
    }
    workers = shared["worker_id"]
    assert workers["prefill_worker_id"] in ids["prefill"]
    assert workers["decode_worker_id"] in ids["decode"]
    assert (workers["prefill_dp_rank"], workers["decode_dp_rank"]) == (0, 0)
    assert whole["worker_id"]["decode_worker_id"] in ids["aggregated"]
    assert "prefill_worker_id" not in whole["worker_id"]
    assert ("prefill_slot" in shared["routing"], "prefill_slot" in whole["routing"]) == (True, False)
    stages = shared["timing"]["stages"]
    names = ["prefill_queued", "admitted", "prefill_end", "decode_queued", "decode_blocks"]
    assert {*names, "transfer_start", "transfer_end", "decode_start"} == stages.keys()
    assert stages["prefill_queued"] <= stages["admitted"] <= stages["prefill_end"]
    assert (
        stages["decode_blocks"] <= stages["transfer_end"] <= stages["decode_start"] <= shared["timing"]["ttft_ms"] + 1
    )
    assert shared["timing"]["ttft_ms"] <= shared["timing"]["total_time_ms"]
    assert {"prefill_wait_time_ms", "prefill_time_ms", "kv_transfer_estimated_latency_ms"} <= shared["timing"].keys()


def test_metrics_tell_the_pools_apart_and_count_what_went_between_them(stack):
    names = ("remote_prefills_total", "kv_transfer_bytes_total", "kv_transfer_seconds_count")
    stages = [f"request_{stage}_time_seconds_count" for stage in ("queue", "prefill", "decode_queue")]

    def counted():
        return [stack.total(f"dynamo_frontend_{name}", model="apart") for name in (*names, *stages)]

    before = counted()
    complete(stack, model="apart", max_tokens=2)
    prefills, num_bytes, reads, *times = (now - then for now, then in zip(counted(), before, strict=True))
    assert (prefills, reads, *times) == (1, 1, 1, 1, 1)
    assert num_bytes >= 0  # all of it may have been there
    assert stack.total("dynamo_frontend_kv_transfer_bytes_total", model="apart") > 0
    workers = {
        kind: stack.total("dynamo_frontend_workers", worker_type=kind) for kind in ("prefill", "decode", "aggregated")
    }
    assert workers == {"prefill": 2, "decode": 2, "aggregated": 1}
    for name in ("requests_running", "requests_waiting", "kv_active_blocks"):
        until(lambda name=name: stack.total(f"dynamo_component_{name}") == 0)  # workers report once a second
    until(lambda: stack.total("dynamo_component_kv_total_blocks", worker_type="prefill") == 2 * 1999)
    last = {
        name: {dict(labels)["worker_type"] for labels in stack.metrics()[f"dynamo_frontend_worker_last_{name}"]}
        for name in ("time_to_first_token_seconds", "input_sequence_tokens", "inter_token_latency_seconds")
    }
    assert "prefill" in last["time_to_first_token_seconds"] and "prefill" in last["input_sequence_tokens"]
    assert "decode" in last["inter_token_latency_seconds"]
    assert "decode" not in last["time_to_first_token_seconds"]
    assert stack.total("dynamo_component_kv_prompts_held") == stack.total("dynamo_component_kv_prompts_loading") == 0
    for name in ("worker_active_prefill_tokens", "worker_active_decode_blocks", "worker_requests"):
        assert len(stack.metrics()[f"dynamo_frontend_{name}"]) == 5
        assert stack.total(f"dynamo_frontend_{name}") == 0


def test_a_model_is_listed_once(stack):
    listed = httpx.get(f"{stack.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["apart", "whole"]


# Pools that come and go


def expected(prompt, count):
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.uint32)
    return bytes(answer_tokens(tokens, 0, 0, count, ByteTokenizer().speakable())).decode()


def test_a_model_is_there_as_long_as_decode_workers_are(tmp_path):
    with apart(tmp_path / "d") as stack:
        stack.worker("prefill", "prefill")
        until(lambda: "prefill workers only" in httpx.get(f"{stack.url}/health").json()["message"])
        answer = httpx.post(f"{stack.url}/v1/completions", json={"model": "apart", "prompt": "x"})
        assert answer.status_code == 503
        assert "a decode worker (--role decode) is needed" in answer.json()["error"]["message"]
        stack.worker("decode", "decode")
        stack.until_there(2)
        assert complete(stack, model="apart", max_tokens=9)["choices"][0]["text"] == expected(PROMPT, 9)
        stack.stop("prefill")
        stack.until_there(1)
        assert complete(stack, model="apart", max_tokens=9)["choices"][0]["text"] == expected(PROMPT, 9)
        assert stack.total("dynamo_frontend_remote_prefills_total") == 1
        [gone] = [n for k, n in stack.metrics()["dynamo_frontend_workers"].items() if ("worker_type", "prefill") in k]
        assert gone == 0
        stack.worker("another", "prefill")
        stack.until_there(2)
        assert complete(stack, model="apart", max_tokens=9)["choices"][0]["text"] == expected(PROMPT, 9)
        assert stack.total("dynamo_frontend_remote_prefills_total") == 2
        stack.stop("decode")
        until(lambda: httpx.get(f"{stack.url}/health").status_code == 503)
        answer = httpx.post(f"{stack.url}/v1/completions", json={"model": "apart", "prompt": "x"})
        assert answer.status_code == 503


@pytest.mark.parametrize("flow", FLOWS)
def test_every_request_has_one_end_while_workers_are_killed_and_drained_and_clients_leave(tmp_path, flow):
    """C20: answers are whole or one error, and nothing is left at any worker."""
    count, rng = 1000, random.Random(20)
    leaving = {number: rng.random() * 0.05 for number in rng.sample(range(count), count // 100)}
    begun = threading.Semaphore(0)

    async def one(client, number):
        prompt = f"{number} {PROMPT * (number % 4)}"
        try:
            answer = await client.completions.create(
                model="apart", prompt=prompt, max_tokens=20, stream=number % 2 == 0
            )
            text = answer.choices[0].text if number % 2 else "".join([event.choices[0].text async for event in answer])
        except openai.APIError as error:
            return error
        assert text == expected(prompt, 20), number
        return text

    async def main(stack):
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client, in_time():

            async def work(number):
                task = asyncio.create_task(one(client, number))
                if number in leaving:
                    asyncio.get_running_loop().call_later(leaving[number], task.cancel)
                done = (await asyncio.gather(task, return_exceptions=True))[0]
                begun.release()
                return done

            slots = asyncio.Semaphore(32)

            async def bounded(number):
                async with slots:
                    return await work(number)

            return await asyncio.gather(*map(bounded, range(count)))

    with apart(tmp_path / "d", flow=flow) as stack:
        doomed = {role: stack.process(role) for role in ("prefill", "decode")}
        for number in range(2):
            stack.worker(f"decode-{number}", "decode")
        stack.worker("prefill-0", "prefill", lease={"kv_lease_duration_s": 5.0})
        stack.until_there(5)
        faults = (doomed["prefill"].kill, lambda: stack.stop("decode-1"), doomed["decode"].kill)

        def break_one_after_the_other():
            for fault in faults:
                for _ in range(count // (len(faults) + 1)):
                    begun.acquire()
                fault()

        breaking = threading.Thread(target=break_one_after_the_other)
        breaking.start()
        ends = asyncio.run(main(stack))
        breaking.join()
        for number, end in enumerate(ends):
            assert isinstance(end, str | openai.APIError) or (
                number in leaving and isinstance(end, asyncio.CancelledError)
            ), end
        assert sum(isinstance(end, str) for end in ends) > count / 10  # a lease may run out on a busy machine
        stack.until_there(2)
        for name in ("component_requests_running", "component_requests_waiting", "component_kv_active_blocks"):
            until(lambda name=name: stack.total(f"dynamo_{name}") == 0)
        for name in ("worker_requests", "worker_active_prefill_tokens", "worker_active_decode_blocks"):
            assert stack.total(f"dynamo_frontend_{name}") == 0
        assert complete(stack, model="apart", max_tokens=9)["choices"][0]["text"] == expected(PROMPT, 9)


def test_a_prompt_that_its_decode_worker_has_cached_stays_there(tmp_path):
    with apart(tmp_path / "d", conditional_disagg="isl_bounding") as stack:
        stack.worker("prefill", "prefill")
        stack.worker("decode", "decode")
        stack.until_there(2)

        def bypasses():
            assert complete(stack, model="apart", max_tokens=9)["choices"][0]["text"] == expected(PROMPT, 9)
            return stack.total("dynamo_frontend_prefill_bypasses_total")

        assert bypasses() == 0
        until(bypasses)  # the router hears of what is cached a moment later
        assert stack.total("dynamo_frontend_remote_prefills_total") >= 1


def test_where_disaggregation_is_enforced_requests_wait_for_a_prefill_worker(tmp_path):
    with apart(tmp_path / "d", enforce_disagg=True) as stack:
        stack.worker("decode", "decode")
        stack.until_there(1)
        with ThreadPoolExecutor(2) as clients:
            waiting = [
                clients.submit(complete, stack, model="apart", max_tokens=9, n=number, **more)
                for number, more in ((1, {}), (2, {"temperature": 1.0}))
            ]
            until(lambda: stack.total("dynamo_frontend_input_tokens_total") or waiting[0].done())
            stack.worker("prefill", "prefill")
            found = [client.result(PATIENCE_S)["choices"] for client in waiting]
        assert [len(choices) for choices in found] == [1, 2]
        assert found[0][0]["text"] == expected(PROMPT, 9)


def test_where_disaggregation_is_enforced_a_model_whose_prefill_workers_do_not_come_is_503(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.life.life.PATIENCE_S", 0.2)
    with apart(tmp_path / "d", enforce_disagg=True) as stack:
        stack.worker("decode", "decode")
        stack.until_there(1)
        answer = httpx.post(f"{stack.url}/v1/completions", json={"model": "apart", "prompt": "x", "n": 3})
        assert (answer.status_code, "there is no prefill worker" in answer.text) == (503, True)
        assert answer.headers["retry-after"]
        assert stack.total("dynamo_frontend_inflight_requests") == 0


def test_a_client_that_leaves_while_it_waits_for_a_prefill_worker_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.life.life.PATIENCE_S", 1e6)
    body = json.dumps({"model": "apart", "prompt": "x"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with apart(tmp_path / "d", frontend={"max_inflight_requests": 1}, enforce_disagg=True) as stack:
        stack.worker("decode", "decode")
        stack.until_there(1)

        def status():
            return httpx.post(f"{stack.url}/v1/completions", json={}).status_code

        url = httpx.URL(stack.url)
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(head.encode() + body)
            until(lambda: status() == 429)  # it waits
        until(lambda: status() == 400)

"""A stand-in answers over HTTP, from an engine in its own process."""

import asyncio

import httpx
import pytest

from serving.engines.mock.engine import EngineConfig, TimingConfig
from serving.stand_in.config import ApiConfig, HttpConfig, RanksConfig
from tests.stand_in.support import running

DETAILS = ApiConfig(enable_prompt_tokens_details=True)


def test_it_answers_completions_and_chats():
    async def ask():
        async with running() as client:
            completion = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 7})
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            return completion.json(), (await client.post("/v1/chat/completions", json=asked)).json()

    completion, chat = asyncio.run(ask())
    assert (completion["usage"]["completion_tokens"], completion["choices"][0]["finish_reason"]) == (7, "length")
    assert chat["usage"]["completion_tokens"] == 3
    assert chat["choices"][0]["message"]["role"] == "assistant"


def test_a_long_prompt_which_another_process_reads_is_streamed_too():
    async def ask():
        async with running(engine=EngineConfig(block_size=16, num_gpu_blocks=8192)) as client:
            asked = {"model": "tiny", "prompt": "x " * 50_000, "max_tokens": 3, "stream": True}
            async with client.stream("POST", "/v1/completions", json=asked) as response:
                return [line async for line in response.aiter_lines() if line]

    lines = asyncio.run(ask())
    assert (len(lines), lines[-1]) == (4, "data: [DONE]")


def test_the_same_prompt_is_found_in_the_cache_by_the_scheduler():
    async def ask():
        async with running(api=DETAILS) as client:
            asked = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 1}
            answers = [(await client.post("/v1/completions", json=asked)).json() for _ in range(2)]
            return [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]

    assert asyncio.run(ask()) == [0, 48]  # the block with the last token is computed


def test_each_of_several_ranks_has_its_own_cache_and_the_least_loaded_is_asked():
    async def ask():
        engine = EngineConfig(block_size=16, num_gpu_blocks=256, dp_size=2)
        async with running(api=DETAILS, engine=engine, ranks=RanksConfig(size=2)) as client:
            asked = {"model": "tiny", "prompt": "x" * 64, "max_tokens": 200}
            both = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(2)))
            return [each.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for each in both]

    assert asyncio.run(ask()) == [0, 0]


def test_a_large_request_may_use_any_of_the_models_names():
    async def ask(name):
        async with running(served_model_names=("one", "two")) as client:
            # Bodies of this size are read by the model's preparer, which knows the model by its first name.
            asked = {"model": name, "prompt": "x" * 200_000, "max_tokens": 1}
            answer = await asyncio.wait_for(client.post("/v1/completions", json=asked), 60)
            return answer.status_code

    assert [asyncio.run(ask(name)) for name in ("one", "two", "three")] == [400, 400, 404]


@pytest.mark.parametrize(("shutdown_timeout_s", "is_said"), [(0, False), (1, True)])
def test_it_says_that_it_waits_for_requests_only_if_it_does(shutdown_timeout_s, is_said, caplog):
    async def stop_while_it_answers():
        http, slow = HttpConfig(shutdown_timeout_s=shutdown_timeout_s), TimingConfig(speedup_ratio=0.1)
        async with httpx.AsyncClient(timeout=30) as patient:
            async with running(http=http, timing=slow) as client:
                asked = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "stream": True}
                request = patient.build_request("POST", client.base_url.join("/v1/completions"), json=asked)
                response = await patient.send(request, stream=True)
            await response.aclose()

    with caplog.at_level("INFO"):
        asyncio.run(stop_while_it_answers())
    assert ("waiting for requests in progress (1)" in caplog.text) is is_said

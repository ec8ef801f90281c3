"""Routers of others in front of stand-ins: whole answers, dead workers, prefixes that stay with their worker."""

import asyncio

import openai
import pytest

from tests.routers.fleet import MODEL, stand_ins, three
from tests.routers.routers import LITELLM, SGLANG, VLLM, each_of
from tests.support.waiting import until

CHAT = [{"role": "user", "content": "Say something."}]


def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def complete(url, prompts, **fields):
    """Have all prompts completed at once; return the answers."""
    asking = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with asking:
        calls = [asking.completions.create(model=MODEL, prompt=each, **{"max_tokens": 4} | fields) for each in prompts]
        return await asyncio.gather(*calls)


@pytest.fixture(scope="module")
def workers():
    with three() as found:
        yield found


@pytest.fixture(scope="module", params=each_of(SGLANG, VLLM, LITELLM))
def url(request, workers, tmp_path_factory):
    with request.param.in_front_of(workers, tmp_path_factory.mktemp("router")) as found:
        yield found


def test_answers_arrive_whole(url):
    asked = client(url)
    answer = asked.completions.create(model=MODEL, prompt="one two three", max_tokens=7)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")
    chat = asked.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=5)
    assert (chat.usage.completion_tokens, chat.choices[0].message.role) == (5, "assistant")


def test_a_stream_has_the_text_of_the_answer_and_its_usage(url):
    asked = client(url)
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 9}
    whole = asked.chat.completions.create(**options).choices[0].message.content
    chunks = list(asked.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == 9


def test_every_request_is_served_once_and_every_worker_serves_some(url, workers):
    before = [worker.num_answers for worker in workers]
    answers = asyncio.run(complete(url, [f"{number} is the number of this prompt" for number in range(48)]))
    assert {answer.usage.completion_tokens for answer in answers} == {4}
    served = [worker.num_answers - earlier for worker, earlier in zip(workers, before, strict=True)]
    assert sum(served) == 48
    assert all(served)


def test_a_request_that_the_model_refuses_is_refused_with_its_status(url):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client(url).completions.create(model=MODEL, prompt="a", temperature=-1)


@pytest.mark.parametrize("router", each_of(SGLANG, VLLM, LITELLM))
def test_a_worker_that_dies_gets_nothing_more_and_the_others_serve_on(router, tmp_path):
    with stand_ins((), (), ()) as workers, router.in_front_of(workers, tmp_path) as url:
        asyncio.run(complete(url, [f"{number} before" for number in range(6)]))
        workers[0].kill()
        until(lambda: are_all_served(url))  # once the router has noticed
        alive = workers[1:]
        before = sum(worker.num_answers for worker in alive)
        answers = asyncio.run(complete(url, [f"{number} after" for number in range(24)]))
        assert len(answers) == 24
        assert sum(worker.num_answers for worker in alive) - before == 24


def are_all_served(url):
    try:
        asyncio.run(complete(url, [f"{number} meanwhile" for number in range(6)]))
    except openai.APIError:
        return False
    return True


@pytest.mark.parametrize("router", each_of(SGLANG, VLLM))
def test_cache_aware_routing_sends_a_prefix_where_it_is_cached(router, tmp_path):
    """Of three long prefixes, each with eight ends, all but the first of each are found in the cache."""
    with three() as workers, router.in_front_of(workers, tmp_path, "--policy", "cache_aware") as url:
        for number in range(8):
            for prefix in ("alpha ", "beta ", "gamma "):
                asyncio.run(complete(url, [prefix * 100 + f"{number}"]))
        hits = sum(worker.num_hits for worker in workers)
        asked = sum(worker.num_tokens[0] for worker in workers)
        most = sum(7 * (len(prefix) * 100 // 16 * 16) for prefix in ("alpha ", "beta ", "gamma "))
        assert hits == most, f"{hits} of {asked} tokens were found, and {most} could be"


@pytest.mark.parametrize("router", each_of(SGLANG, VLLM))
def test_round_robin_routing_finds_a_prefix_only_where_it_happens_to_be(router, tmp_path):
    """The counterpart of the test above: the first request of a prefix on each of three workers finds nothing."""
    with three() as workers, router.in_front_of(workers, tmp_path, "--policy", "round_robin") as url:
        for number in range(9):
            asyncio.run(complete(url, ["alpha " * 100 + f"{number}"]))
        assert [worker.num_hits for worker in workers] == [2 * (600 // 16 * 16)] * 3

"""vLLM's router has one stand-in compute a prompt and another continue it."""

import json

import openai
import pytest

from tests.routers.fleet import MODEL, needs, stand_ins
from tests.routers.routers import VLLM_APART

PROMPT = "A prompt that is long enough for some blocks of its own. " * 8


def with_role(role):
    return ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role}))


def complete(url, **fields):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, **fields)
        return list(answer) if fields.get("stream") else answer


@pytest.fixture(scope="module")
def workers():
    with stand_ins(with_role("kv_producer"), with_role("kv_consumer"), ()) as found:
        yield found


@pytest.fixture(scope="module")
def url(workers, tmp_path_factory):
    with VLLM_APART.in_front_of(workers[:2], tmp_path_factory.mktemp("router")) as found:
        yield found


@needs("vllm-router")
def test_two_answer_what_one_would_and_the_second_computes_nothing_of_the_prompt(url, workers):
    prefill, decode, whole = workers
    apart, alone = complete(url), complete(whole.url)
    assert (apart.choices[0].text, apart.usage.completion_tokens) == (alone.choices[0].text, 12)
    assert prefill.num_tokens == (len(PROMPT), 1)
    source = "vllm:prompt_tokens_by_source_total"
    assert decode.count(source, source="external_kv_transfer") >= len(PROMPT) - 1
    assert decode.count(source, source="local_compute") <= 1


@needs("vllm-router")
def test_a_stream_through_both_has_the_same_text(url, workers):
    streamed = "".join(chunk.choices[0].text for chunk in complete(url, stream=True) if chunk.choices)
    assert streamed == complete(workers[2].url).choices[0].text

"""LoRA adapters of a model are served like models: listed, asked for by name, and with KV of their own."""

import httpx
import numpy as np
import pytest

from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.prepared import PreparedPrompt
from serving.worker.protocol import CacheScope, StopConditions
from tests.support.stacks import running

PROMPT = list(range(1, 129))


@pytest.fixture(scope="module")
def served():
    engine = {"enable_lora": True, "lora_modules": "poems, code", "max_loras": 2, "lora_read_ms": 0.0}
    with running(1, engine=engine) as stack, httpx.Client(base_url=stack.url, timeout=60) as client:
        client.model = stack.model
        yield client


def ask(client, model, prompt=PROMPT, **fields):
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True} | fields
    done = client.post("/v1/completions", json=body)
    assert done.status_code == 200, done.text
    return done.json()


def cached(answer):
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def test_adapters_are_listed_after_their_model(served):
    listed = served.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        (served.model, None),
        ("poems", served.model),
        ("code", served.model),
    ]
    assert served.get("/v1/models/poems").json()["parent"] == served.model


def test_an_answer_names_the_adapter_that_was_asked_for(served):
    assert ask(served, "poems", prompt=[7] * 20)["model"] == "poems"
    chat = {"model": "code", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert served.post("/v1/chat/completions", json=chat).json()["model"] == "code"
    for name in ("code", served.model):
        assert served.post("/v1/embeddings", json={"model": name, "input": "hello"}).json()["model"] == name


def test_only_requests_with_the_same_adapter_find_each_others_kv(served):
    found = [(model, cached(ask(served, model))) for model in (served.model, "poems", "poems", "code", served.model)]
    assert [model for model, hits in found if hits] == ["poems", served.model]


def test_an_adapter_that_is_not_served_is_named(served):
    refused = served.post("/v1/completions", json={"model": "prose", "prompt": PROMPT, "max_tokens": 1})
    assert refused.status_code == 404
    assert "model 'prose' is not served here" in refused.json()["error"]["message"]


def test_the_hashes_of_a_prompt_are_those_of_its_adapter_also_after_a_part_of_the_answer():
    tokens, poems = np.arange(32, dtype=np.uint32), CacheScope(lora_name="poems", lora_id=1)
    plain = PreparedPrompt(tokens[:24], 8)
    assert plain.within(None) is plain
    scoped, salted = plain.within(poems), plain.within(CacheScope(salt="x"))
    assert len({*plain.hashes, *scoped.hashes, *salted.hashes}) == 9
    request = ChoiceRequest(
        prompt=scoped,
        conditions=StopConditions(max_tokens=20),
        sampling={},
        eos_token_ids=[],
        request_id="r",
        scope=poems,
    )
    after = request.after(tokens[24:].tolist())
    assert after.prompt.hashes == PreparedPrompt(tokens, 8).within(poems).hashes
    assert after.prompt.hashes[:3] == scoped.hashes


def test_an_unknown_model_is_answered_with_the_models_and_their_adapters(served):
    done = served.post("/v1/completions", json={"model": "stories", "prompt": PROMPT})
    assert done.status_code == 404
    assert f"served: '{served.model}', 'poems', 'code'" in done.json()["error"]["message"]

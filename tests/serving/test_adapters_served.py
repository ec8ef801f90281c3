"""LoRA adapters of a model are served like models: listed, asked for by name, and with KV of their own."""

import httpx
import pytest

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


def test_only_requests_with_the_same_adapter_find_each_others_kv(served):
    found = [(model, cached(ask(served, model))) for model in (served.model, "poems", "poems", "code", served.model)]
    assert [model for model, hits in found if hits] == ["poems", served.model]


def test_an_adapter_that_is_not_served_is_named(served):
    refused = served.post("/v1/completions", json={"model": "prose", "prompt": PROMPT, "max_tokens": 1})
    assert refused.status_code == 404
    assert "model 'prose' is not served here" in refused.json()["error"]["message"]

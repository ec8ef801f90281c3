"""A vLLM serves LoRA adapters behind our frontend: listed, asked for by name, and with KV of their own."""

import json

import httpx
import pytest

from dynabench.fidelity.vllm.tiny_model import write_adapter
from tests.real_engines.conftest import running
from tests.real_engines.test_vllm import BLOCK, tokens
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(500)
NAMES = ("poems", "code")


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    home = tmp_path_factory.mktemp("adapters")
    config = json.loads((engine.model / "config.json").read_text())
    for seed, name in enumerate(NAMES):
        write_adapter(home / name, config, seed)
    modules = [f"{name}={home / name}" for name in NAMES]
    flags = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8", "--lora-modules", *modules)
    with running(engine, flags=flags) as stack, httpx.Client(base_url=stack.url, timeout=120) as client:
        yield client


def ask(client, model, prompt, max_tokens=8):
    """Ask; return the text, the cached tokens that vLLM found, and those that the router expected."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["model"] == model
    usage = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return found["choices"][0]["text"], usage, int(answer.headers["x-overlap-tokens"])


def test_adapters_are_listed_after_their_model(served):
    listed = served.get("/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed] == [
        ("tiny", None),
        *[(name, "tiny") for name in NAMES],
    ]


def test_each_adapter_answers_in_its_own_way(served):
    prompt = tokens("what do you say?", BLOCK)
    answers = {model: ask(served, model, prompt)[0] for model in ("tiny", *NAMES)}
    assert len(set(answers.values())) == 3
    assert {model: ask(served, model, prompt)[0] for model in answers} == answers


def test_what_the_router_expects_of_an_adapters_prompt_is_what_vllm_finds(served):
    prompt = tokens("long", 6 * BLOCK + 5)
    first = {model: ask(served, model, prompt) for model in ("tiny", *NAMES)}
    assert [(cached, overlap) for _, cached, overlap in first.values()] == [(0, 0)] * 3  # nobody shares another's KV
    for model, (text, _, _) in first.items():
        until(lambda model=model: ask(served, model, prompt)[2] == 6 * BLOCK)  # events travel
        assert ask(served, model, prompt) == (text, 6 * BLOCK, 6 * BLOCK)
    assert ask(served, "code", prompt[:BLOCK] + tokens("other", 3 * BLOCK))[1:3] == (BLOCK, BLOCK)

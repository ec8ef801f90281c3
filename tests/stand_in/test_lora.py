"""Adapters: names of the model with a cache of their own."""

import asyncio
import json

import pytest

from serving.engines.mock.engine import EngineConfig
from serving.stand_in.config import ApiConfig, LoraConfig, LoraModule, StandInConfig
from serving.stand_in.server import stand_in
from tests.stand_in.support import running

API = ApiConfig(enable_prompt_tokens_details=True)
ENGINE = EngineConfig(block_size=16, num_gpu_blocks=256)


async def load(client, name, path, **more):
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


async def cached(client, model, prompt="x" * 64):
    answer = await client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 20})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_adapter_is_a_model_with_a_parent_until_it_is_unloaded():
    async def ask():
        modules = (LoraModule(name="a", path="org/a"),)
        async with running(lora=LoraConfig(modules=modules, may_change=True)) as client:
            loaded = await load(client, "b", "org/b")
            cards = (await client.get("/v1/models")).json()["data"]
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
            asked = {"model": "a", "prompt": "x", "max_tokens": 1}
            return loaded, cards, gone, (await client.post("/v1/completions", json=asked)).status_code

    loaded, cards, gone, after = asyncio.run(ask())
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'b' added successfully.")
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("tiny", "tiny", None),
        ("a", "org/a", "tiny"),
        ("b", "org/b", "tiny"),
    ]
    assert gone.text == "Success: LoRA adapter 'a' removed successfully."
    assert after == 404


def test_sagemakers_paths_do_the_same():
    async def ask():
        async with running(lora=LoraConfig(may_change=True)) as client:
            loaded = await client.post("/adapters", json={"name": "a", "src": "org/a"})
            names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
            gone = [await client.delete("/adapters/a") for _ in range(2)]
            return loaded.status_code, names, [each.status_code for each in gone]

    assert asyncio.run(ask()) == (200, ["tiny", "a"], [200, 404])


@pytest.mark.parametrize(
    ("name", "path", "status", "type"),
    [
        ("", "", 400, "InvalidUserInput"),
        ("tiny", "org/a", 400, "InvalidUserInput"),
        ("there", "org/other", 400, "InvalidUserInput"),
        ("a", "/no/such/folder", 404, "NotFoundError"),
        ("a", "./no/such/folder", 404, "NotFoundError"),
        ("a", "a/b/c", 404, "NotFoundError"),
        ("a", "~nosuchuser/x", 404, "NotFoundError"),
        ("a", "/" + "x" * 5000, 404, "NotFoundError"),
        ("a", "/a\0b", 404, "NotFoundError"),
    ],
)
def test_adapters_that_cannot_be_are_refused(name, path, status, type):
    async def ask():
        modules = (LoraModule(name="there", path="org/there"),)
        async with running(lora=LoraConfig(modules=modules, may_change=True)) as client:
            return await load(client, name, path)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, type)


def test_a_folder_need_not_have_weights_but_its_rank_must_not_be_too_high(tmp_path):
    async def ask():
        async with running(lora=LoraConfig(may_change=True, max_lora_rank=16)) as client:
            empty = await load(client, "empty", str(tmp_path))
            (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 64}))
            return empty.status_code, (await load(client, "high", str(tmp_path)))

    empty, high = asyncio.run(ask())
    assert empty == 200
    assert high.status_code == 500 and "LoRA rank 64" in high.json()["error"]["message"]


@pytest.mark.parametrize("description", ["[" * 5000, '{"r": ' + "9" * 5000 + "}", " " * (1 << 20) + '{"r": 1}', "[]"])
def test_an_adapter_whose_description_cannot_be_read_is_refused_as_vllm_does(tmp_path, description):
    (tmp_path / "adapter_config.json").write_text(description)

    async def ask():
        async with running(lora=LoraConfig(may_change=True)) as client:
            return await load(client, "a", str(tmp_path))

    refused = asyncio.run(ask())
    assert refused.json()["error"]["message"].endswith("adapter_config.json is not an object in JSON")


def test_adapters_from_the_start_that_cannot_be_loaded_stop_the_start():
    async def start():
        lora = LoraConfig(modules=(LoraModule(name="a", path="/no/such/folder"),))
        async with stand_in(StandInConfig(model="tiny", engine=ENGINE, lora=lora)):
            pass

    with pytest.raises(ValueError, match="No adapter found for /no/such/folder"):
        asyncio.run(start())


def test_adapters_share_no_cached_blocks_with_each_other_or_the_model():
    async def ask():
        modules = (LoraModule(name="a", path="org/a"), LoraModule(name="b", path="org/b"))
        async with running(
            engine=ENGINE, api=API, lora=LoraConfig(max_loras=2, modules=modules, may_change=True)
        ) as client:
            first = [await cached(client, model) for model in ("tiny", "a", "b")]
            again = [await cached(client, model) for model in ("tiny", "a", "b")]
            await load(client, "a", "org/elsewhere", load_inplace=True)
            return first, again, await cached(client, "a")

    assert asyncio.run(ask()) == ([0, 0, 0], [48, 48, 48], 0)


def test_a_short_prompts_blocks_are_also_kept_apart_and_found_in_the_next_turn():
    async def ask():
        modules = (LoraModule(name="a", path="org/a"),)
        async with running(engine=ENGINE, api=API, lora=LoraConfig(modules=modules)) as client:
            body = {"model": "a", "prompt": "short", "max_tokens": 40}
            answer = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
            turn = "short" + answer
            return [await cached(client, model, turn) for model in ("a", "tiny")]

    own, other = asyncio.run(ask())
    assert own >= 32 and other == 0

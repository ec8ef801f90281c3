"""Which LoRA adapters a vLLM serves; without vLLM."""

import pytest

from serving.engines.vllm.adapters import LoraModule, take_modules
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.make import make_engine


def made(*flags):
    return make_engine("vllm", WorkerConfig(model_path="m"), ModelRunConfig(), flags).calls[0].arguments


@pytest.mark.parametrize(
    "given",
    [["poems=/a/b=c", "code=d"], [{"name": "poems", "path": "/a/b=c"}, "code=d"]],
    ids=["words", "JSON"],
)
def test_adapters_are_numbered_in_their_order(given):
    arguments = {"enable_lora": True, "lora_modules": given}
    assert take_modules(arguments) == (LoraModule("poems", 1, "/a/b=c"), LoraModule("code", 2, "d"))
    assert arguments == {"enable_lora": True}


def test_one_adapter_needs_no_list():
    assert take_modules({"enable_lora": True, "lora_modules": "poems=x"}) == (LoraModule("poems", 1, "x"),)
    assert take_modules({"enable_lora": True}) == ()


def test_vllm_itself_hears_of_adapters_only_that_there_may_be_some():
    arguments = made("--enable-lora", "--max-loras=2", "--lora-modules", "poems=x", "code=y")
    assert (arguments["enable_lora"], arguments["max_loras"]) == (True, 2)
    assert "lora_modules" not in arguments


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-modules", "a=x"], "enable_lora is not set; expected --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "lora_modules has 'a'; expected name=path"),
        (["--enable-lora", "--lora-modules", "=x"], "lora_modules has '=x'; expected name=path"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "expected name=path"),
        (["--enable-lora", "--lora-modules", "a=x", "a=y"], "names a, a; expected each name once"),
    ],
)
def test_what_is_no_adapter_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        made(*flags)

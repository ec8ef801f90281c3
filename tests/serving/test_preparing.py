"""Requests become tokens without holding others up: what is quick at once, what may take long in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from serving.engines.processes import descendants
from serving.frontend.api.embedding import EmbeddingRequest
from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import parse_request
from serving.frontend.api.openai import ChatRequest, CompletionRequest
from serving.frontend.prepared import HandedThrough, Prepared
from serving.frontend.preparing.messages import Elsewhere
from serving.frontend.preparing.preparer import Preparer
from serving.frontend.preprocess import is_quick, prepare, preprocess
from serving.frontend.request import GUESS_BYTES, guess_model
from serving.frontend.text_model import TextModel
from serving.model.card import ModelCard, ModelType
from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.model.tokenizer import HuggingFaceTokenizer
from serving.runtime.world import SeededWorld, World, within
from tests.support.model import CORPUS, TEMPLATE, write_model
from tests.support.stacks import running
from tests.support.waiting import until

GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(pattern=None, normalizer=None, ignore_merges=False):
    """Train a small tokenizer of the kind that a family of models uses."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split = pattern and pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain]) if pattern else GPT_2
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), encodes=True)


FAMILIES = {
    "GPT-2": byte_level(),
    "Llama 3": byte_level(LLAMA_3, ignore_merges=True),
    "Qwen 2": byte_level(QWEN_2, normalizers.NFC()),
}


def slow_model(folder):
    """Write a model whose texts fastokens does not encode as they should be: it has no such model type."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1 << 20, "vocab_size": 3}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def text_model(folder=None, is_preparer=False, **card):
    files = ModelFiles.read(str(folder)) if folder else ModelFiles({})
    values = {"name": "m", "model_type": ModelType.Backend, "namespace": "n", "component": "c", "endpoint": "e"}
    card = ModelCard(**(values | {"instance_id": 1, "context_length": 100} | card))
    return TextModel(card, files, is_preparer=is_preparer)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_usual_families_are_encoded_fast(family):
    assert FAMILIES[family].is_fast


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(max_size=200) | st.text(st.sampled_from("aé e\u0301 'll12 \n\t<|im_start|>日🙂"), max_size=200))
def test_fast_tokens_are_the_real_ones(family, text):
    tokenizer = FAMILIES[family]
    for special in (True, False):
        real = tokenizer._tokenizer.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, special=special).tolist() == real


def test_a_tokenizer_that_fastokens_encodes_otherwise_is_left_to_tokenizers(monkeypatch):
    import fastokens

    class Wrong:
        @staticmethod
        def from_json_str(text):
            return Wrong()

        def encode_batch_flat(self, texts, add_special_tokens):
            return np.array([3], "<u4").tobytes(), b""

    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    tokenizer = byte_level()
    assert not tokenizer.is_fast
    assert tokenizer.encode("once", special=False).tolist() == tokenizer._tokenizer.encode("once").ids


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(min_size=1, max_size=60))
def test_no_text_has_fewer_tokens_than_its_length_says(family, text):
    tokenizer = FAMILIES[family]
    assert len(text) <= tokenizer.longest_token * len(tokenizer.encode(text, special=False))


@pytest.mark.parametrize(("path", "field"), [(CompletionRequest, "prompt"), (EmbeddingRequest, "input")])
def test_token_ids_are_checked_alike_wherever_they_come(tmp_path, path, field):
    body = json.dumps({"model": "m", field: [0, 99_999_999]}).encode()
    any_ids, few_ids = (text_model(folder, has_embeddings=True) for folder in (None, slow_model(tmp_path / "m")))
    assert preprocess(parse_request(body, path), body, any_ids).prompts[0].tokens.tolist() == [0, 99_999_999]
    with pytest.raises(ApiError, match="there is no token 99999999; the model has 3 tokens") as refused:
        preprocess(parse_request(body, path), body, few_ids)
    assert refused.value.param == field


def test_what_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    model = text_model()
    monkeypatch.setattr(model.tokenizer, "encode", None)
    for asked in (
        CompletionRequest(model="m", prompt="x" * 101, max_tokens=1),
        parse_request(
            json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 101}]}).encode(), ChatRequest
        ),
    ):
        with pytest.raises(ApiError) as refused:
            prepare(asked, model)
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("num_prompt", "asked", "given"), [(60, 40, 40), (60, 100, 40), (99, 7, 1)])
def test_an_answer_for_which_the_prompt_leaves_too_little_room_is_cut_as_by_vllm(num_prompt, asked, given):
    request = CompletionRequest(model="m", prompt=[1] * num_prompt, max_tokens=asked)
    assert prepare(request, text_model()).limits == [given]


@pytest.mark.parametrize(("num_prompt", "asked"), [(60, 101), (100, 1), (101, 1)])
def test_what_is_longer_than_the_context_is_400(num_prompt, asked):
    with pytest.raises(ApiError, match=f"is 100 tokens; the request has {num_prompt} prompt tokens") as refused:
        prepare(CompletionRequest(model="m", prompt=[1] * num_prompt, max_tokens=asked), text_model())
    assert refused.value.status == 400


def test_what_does_not_fit_is_neither_hashed_nor_keeps_the_next_prompt_busy(monkeypatch):
    model, texts = text_model(), []
    encode = model.tokenizer.encode
    monkeypatch.setattr("serving.frontend.prepared.block_hashes", None)
    monkeypatch.setattr(
        model.tokenizer, "encode", lambda text, *, special: texts.append(text) or encode(text, special=special)
    )
    for prompts in (["x" * 100, "y"], [[1] * 100, "y"]):
        with pytest.raises(ApiError) as refused:
            prepare(CompletionRequest(model="m", prompt=prompts, max_tokens=1), model)
        assert refused.value.code == "context_length_exceeded"
    assert texts == ["x" * 100]


def test_only_what_is_quick_and_no_code_of_the_models_runs_at_once(model_path):
    ours, theirs = text_model(), text_model(model_path)

    def quick(model, **asked):
        kind = ChatRequest if "messages" in asked else CompletionRequest
        return is_quick(parse_request(json.dumps({"model": "m"} | asked).encode(), kind), model)

    message = [{"role": "user", "content": "hello"}]
    assert quick(ours, prompt="hello")
    assert quick(ours, messages=message)
    assert quick(theirs, prompt="hello")
    assert not quick(theirs, messages=message)
    assert quick(theirs, messages=message, nvext={"use_raw_prompt": True})
    assert not quick(theirs, prompt="hello" * 30_000)
    assert not quick(ours, prompt=[1] * 20_000)
    long = "x" * ours.tokenizer.num_quick
    for more in ({"documents": [{"text": long}]}, {"chat_template_kwargs": {"x": long}}, {"tools": [{"x": long}]}):
        assert not quick(ours, messages=message, **more)
    for more in ({"reasoning": long}, {"tool_calls": [{"x": long}]}, {"content": long + "x"}):
        assert not quick(ours, messages=[*message, {"role": "assistant", "content": "x"} | more])


def test_what_names_no_model_is_for_the_only_one(preparing):
    import asyncio

    async def run(is_only):
        model = text_model()
        preparer = Preparer(model.card, model.files, timeout_s=60)
        try:
            return await preparer.prepare("tokenize", b'{"prompt": "hi"}', is_only=is_only)
        finally:
            await preparer.close()

    assert asyncio.run(run(True)).tokens == [104, 105]
    assert asyncio.run(run(False)) == Elsewhere(None)


def test_a_bodys_model_is_guessed_from_its_ends():
    far = b'"x":"' + b"y" * GUESS_BYTES + b'",'
    assert guess_model(b'{"model": "a/b", ' + far + b'"prompt": "x"}') == "a/b"
    assert guess_model(b'{"prompt": "x", ' + far + b'"model" : "b"}') == "b"
    assert guess_model(b'{"prompt": "x", ' + far + b'"model": "c", ' + far + b'"n": 1}') == ""


# The process


@pytest.fixture
def preparing():
    """Return what prepares bodies for a model in a process of its own."""
    return preparing_in(World())


@pytest.fixture(params=["process", "virtual time"])
def preparing_anywhere(request):
    """Return what prepares bodies for a model in a process of its own, or in virtual time."""
    return preparing_in(World() if request.param == "process" else SeededWorld(1, "frontend"))


def preparing_in(node):
    import asyncio

    async def run(model, jobs, timeout_s):
        with within(node):
            preparer = Preparer(model.card, model.files, timeout_s=timeout_s)
            try:
                return await asyncio.gather(*(preparer.prepare(*job) for job in jobs), return_exceptions=True)
            finally:
                await preparer.close()

    return lambda model, *jobs, timeout_s=60.0: asyncio.run(run(model, jobs, timeout_s))


def chat(text, model="m"):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 3, "logprobs": True}
    return ("chat", json.dumps(body).encode())


def test_a_preparer_gives_what_would_be_made_here(preparing_anywhere, model_path):
    model = text_model(model_path)
    (there,) = preparing_anywhere(model, chat("once upon a time"))
    here = prepare(parse_request(chat("once upon a time")[1], ChatRequest), text_model(model_path, is_preparer=True))
    assert isinstance(there, Prepared)
    assert there.prompts[0].tokens.tolist() == here.prompts[0].tokens.tolist()
    assert there.prompts[0].hashes == here.prompts[0].hashes
    assert (there.options.max_tokens, there.num_logprobs, there.limits) == (3, 0, here.limits)
    assert there.formatted == here.formatted


def test_what_has_no_effect_does_not_come_back_from_a_preparer(preparing_anywhere, model_path):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    body |= {"metadata": {"a": 10**30, "b": "x" * 100_000}, "prediction": {"c": 10**30}}
    (outcome,) = preparing_anywhere(text_model(model_path), ("chat", json.dumps(body).encode()))
    assert isinstance(outcome, Prepared)
    assert (outcome.options.metadata, outcome.options.prediction) == (None, None)


def test_a_template_whose_text_is_no_unicode_is_400(preparing_anywhere, tmp_path):
    (outcome,) = preparing_anywhere(text_model(template_model(tmp_path / "m", "{{ '\\ud800' }}x")), chat("x"))
    assert isinstance(outcome, ApiError)
    assert outcome.status == 400


def test_a_preparer_refuses_and_passes_on(preparing_anywhere):
    refused, elsewhere = preparing_anywhere(text_model(), chat("x" * 101), chat("x", model="other"))
    assert isinstance(refused, ApiError)
    assert refused.code == "context_length_exceeded"
    assert elsewhere == Elsewhere("other")
    (through,) = preparing_anywhere(text_model(model_type=ModelType.Chat), chat("x"))
    assert isinstance(through, HandedThrough)


def template_model(folder, template):
    write_model(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SOMETIMES = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}" + TEMPLATE


def test_a_template_without_end_costs_only_the_request_that_asked_for_it(preparing, tmp_path):
    model = text_model(template_model(tmp_path / "m", SOMETIMES))
    outcomes = preparing(model, chat("loop"), chat("one"), chat("two"), chat("loop"), chat("three"), timeout_s=4.0)
    assert [type(outcome) for outcome in outcomes] == [ApiError, Prepared, Prepared, ApiError, Prepared]
    assert {outcomes[0].code, outcomes[3].code} == {"preparation_timeout"}
    assert outcomes[0].status == 400


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' * 8000000000 }}", "{{ '%099999999999d' % 5 }}", "{{ 1 // 0 }}", "{{ 'abc'.index('z') }}", "{{ [].pop() }}",
     "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ 'a'.encode('nope') }}", "{{ messages[5].content.x }}"],
)  # fmt: skip
def test_templates_that_fail_or_take_all_memory_are_400(preparing, tmp_path, template):
    (outcome,) = preparing(text_model(template_model(tmp_path / "m", template)), chat("x"))
    assert isinstance(outcome, ApiError)
    assert (outcome.status, outcome.param) == (400, "messages")
    assert " at 0x" not in outcome.message


def test_a_preparer_runs_below_a_limit_of_memory_that_was_there_before():
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
    code = limited + "from serving.frontend.preparing import process as p; p._limit_memory(); p._limit_memory()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_in_virtual_time_a_preparer_starts_no_process_and_says_why_a_model_cannot_be_loaded(tmp_path):
    import asyncio

    async def run():
        model = text_model(template_model(tmp_path / "m", "{{ messages[0].content }}"))
        before = descendants(os.getpid())
        good = Preparer(model.card, model.files, timeout_s=60.0)
        await good.start()
        assert descendants(os.getpid()) == before
        await good.close()
        broken = Preparer(model.card, ModelFiles({"tokenizer.json": b"?"}), timeout_s=60.0)
        with pytest.raises(ModelError):
            await broken.start()
        await broken.close()

    with within(SeededWorld(1, "frontend")):
        asyncio.run(run())


def test_requests_of_a_preparer_that_is_killed_are_prepared_by_the_next(tmp_path):
    import asyncio

    model = text_model(template_model(tmp_path / "m", SOMETIMES))

    async def run():
        preparer = Preparer(model.card, model.files, timeout_s=60.0)
        try:
            await preparer.start()
            first = preparer._process
            first._process.send_signal(signal.SIGSTOP)  # else it may have answered before it is killed
            asking = asyncio.create_task(preparer.prepare(*chat("once")))
            while not first._waiting:
                await asyncio.sleep(0)
            first.kill()
            outcome = await asking
            assert preparer._process is not first
            return outcome
        finally:
            await preparer.close()

    assert isinstance(asyncio.run(run()), Prepared)


# The whole stack


def test_while_a_long_text_is_encoded_others_are_answered(tmp_path):
    folder = slow_model(tmp_path / "slow")
    settings = {"worker": {"model_path": str(folder), "model_name": "slow"}, "engine": {"num_gpu_blocks": 50_000}}
    with running(1, frontend={"prepare_timeout_s": 60}, **settings) as stack:
        answer = []

        def ask():
            body = {"model": "slow", "prompt": "a b, " * 200_000, "max_tokens": 1}
            answer.append(httpx.post(f"{stack.url}/v1/completions", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        answered = 0
        with httpx.Client() as other:
            while asking.is_alive():
                other.get(f"{stack.url}/live")
                answered += 1
        assert answer[0].status_code == 200
        assert answer[0].json()["usage"]["prompt_tokens"] == 600_000
        assert answered > 5  # two at most if the frontend did nothing else meanwhile


def test_a_template_without_end_holds_up_neither_other_models_nor_the_end(tmp_path):
    folder = template_model(tmp_path / "m", SOMETIMES)
    with running(
        1, worker={"model_path": str(folder), "model_name": "m"}, frontend={"prepare_timeout_s": 120, "drain_s": 120.0}
    ) as stack:
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
            for _ in range(3):
                with pytest.raises(openai.APITimeoutError):
                    client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "loop"}], timeout=0.2
                    )
            fine = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], max_tokens=2)
            assert fine.usage.completion_tokens == 2
        frontend = stack.group.processes["frontend"]
        preparers = descendants(frontend)
        assert preparers
        os.kill(frontend, signal.SIGTERM)  # nobody waits for the three: there is nothing to finish
        until(lambda: stack.group.returncode("frontend") == 0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in preparers)

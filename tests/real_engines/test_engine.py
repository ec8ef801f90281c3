"""What every engine must do, asked over HTTP with the openai client: the answers are those of the weights."""

import concurrent.futures
import json
import re
import time

import httpx
import jsonschema
import numpy as np
import openai
import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.timeout(400)
PROMPT = "the router sends a request to the worker that holds most of its prefix, and what about the rest of the block"

SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 2, "maxItems": 3},
        "is_open": {"type": "boolean"},
    },
    "required": ["size", "counts", "is_open"],
    "additionalProperties": False,
}


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as found:
        yield found


def ask(client, prompt=PROMPT, max_tokens=12, temperature=0.0, **more):
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=temperature, **more
    )


def load(stack):
    """Return (running, waiting) as the worker reports them."""
    values = {"requests_running": 0.0, "requests_waiting": 0.0}
    for line in httpx.get(f"{stack.url}/metrics").text.splitlines():
        for name in values:
            if line.startswith(f"dynamo_component_{name}{{"):
                values[name] = float(line.rpartition(" ")[2])
    return tuple(values.values())


@pytest.fixture
def text_of(tokenizer, engine):
    """What an answer of these tokens reads; mistral.rs takes blanks off its front."""

    def text(tokens):
        whole = tokenizer.decode(tokens)
        return whole.lstrip() if engine.gives_text else whole

    return text


def test_it_says_what_the_weights_say(client, reference, tokenizer, text_of):
    expected, _ = reference.greedy(tokenizer.encode(PROMPT).ids, 24)
    answer = ask(client, max_tokens=24)
    assert answer.choices[0].text == text_of(expected)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokenizer.encode(PROMPT).ids), 24)


def test_a_chat_goes_through_the_models_template(client, reference, tokenizer, text_of):
    prompt = "<s><|system|>be brief<|end|><|user|>hello world<|end|><|assistant|>"
    expected, _ = reference.greedy(tokenizer.encode(prompt).ids, 10)
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"}],
        max_tokens=10,
        temperature=0,
    )
    assert answer.choices[0].message.content == text_of(expected)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(prompt).ids)


def test_a_stream_comes_in_pieces_with_its_usage(client, reference, tokenizer, text_of):
    expected, _ = reference.greedy(tokenizer.encode(PROMPT).ids, 16)
    chunks = list(ask(client, max_tokens=16, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text_of(expected)
    assert chunks[-1].usage.completion_tokens == 16
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].text) > 8


def test_log_probabilities_are_those_of_the_weights(client, reference, tokenizer, text_of):
    expected, values = reference.greedy(tokenizer.encode(PROMPT).ids, 4)
    found = ask(client, max_tokens=4, logprobs=2).choices[0].logprobs
    assert "".join(found.tokens) == text_of(expected)
    assert found.token_logprobs == pytest.approx(values, abs=0.02)
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(value)


def test_log_probabilities_of_the_prompt_are_those_of_the_weights_or_refused(client, engine, reference, tokenizer):
    if engine.name != "vllm":
        with pytest.raises(openai.BadRequestError, match="log-probabilities"):
            ask(client, max_tokens=1, logprobs=1, echo=True)
        return
    ids = tokenizer.encode(PROMPT).ids
    logits = reference.logits(ids)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    found = ask(client, max_tokens=1, logprobs=1, echo=True).choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(
        [logits[n, ids[n + 1]] for n in range(len(ids) - 1)], abs=0.02
    )
    best = [max(top.values()) for top in found.top_logprobs[1 : len(ids)]]
    assert best == pytest.approx(logits.max(-1)[:-1].tolist(), abs=0.02)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(client):
    whole = ask(client, max_tokens=16).choices[0].text
    stop = whole[6:9]
    answer = ask(client, max_tokens=16, stop=[stop])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_the_models_end_token_ends_the_answer(client):
    answer = ask(client, max_tokens=20, logit_bias={"1": 100})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    ignored = ask(client, max_tokens=7, logit_bias={"1": 100}, extra_body={"ignore_eos": True})
    assert (ignored.choices[0].finish_reason, ignored.usage.completion_tokens) == ("length", 7)


def test_a_least_length_is_kept_or_refused(client, engine):
    def short():
        return ask(client, max_tokens=20, logit_bias={"1": 30}, extra_body={"min_tokens": 5})

    if engine.gives_text:
        with pytest.raises(openai.BadRequestError, match="min_tokens"):
            short()
    else:
        assert short().usage.completion_tokens in (5, 6)  # with the end or without


def test_sampling_options_reach_the_engine(client, tokenizer, text_of):
    token = tokenizer.encode(" worker").ids[0]
    assert ask(client, max_tokens=3, logit_bias={str(token): 100}).choices[0].text == text_of([token] * 3)
    first, second = (ask(client, temperature=1.5, max_tokens=30).choices[0].text for _ in range(2))
    assert first != second
    assert (
        ask(client, temperature=1.5, max_tokens=30, extra_body={"top_k": 1}).choices[0].text
        == ask(client, max_tokens=30).choices[0].text
    )


def test_a_seed_repeats_an_answer_or_is_refused(client, engine):
    def answer(seed, temperature=1.5):
        return ask(client, temperature=temperature, max_tokens=30, seed=seed).choices[0].text

    if engine.name in ("mistralrs", "sglang"):
        with pytest.raises(openai.BadRequestError, match=r"seed is 1; expected none, or temperature 0"):
            answer(1)
        assert answer(1, temperature=0) == answer(2, temperature=0)
    else:
        assert len({answer(1), answer(1), answer(2)}) == 2


def test_several_answers_without_a_seed_are_different_each_time(client):
    texts = [choice.text for _ in range(2) for choice in ask(client, temperature=1.5, max_tokens=30, n=2).choices]
    assert len(set(texts)) == 4


def test_requests_run_side_by_side_without_disturbing_each_other(client, stack):
    prompts = [f"{PROMPT} number {number}" for number in range(6)]
    alone = [ask(client, prompt, max_tokens=40).choices[0].text for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        together = threads.map(lambda prompt: ask(client, prompt, max_tokens=40).choices[0].text, prompts)
        assert list(together) == alone
        streams = [ask(client, prompt, 1200, stream=True, extra_body={"ignore_eos": True}) for prompt in prompts[:4]]
        for stream in streams:
            next(iter(stream))
        until(lambda: load(stack)[0] >= 3)
        for stream in streams:
            stream.close()


def test_a_request_that_nobody_waits_for_is_stopped(client, stack):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        left = ask(client, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        next(iter(left))
        stays = thread.submit(ask, client, max_tokens=2500, extra_body={"ignore_eos": True})
        until(lambda: load(stack)[0] == 2)
        left.close()
        until(lambda: load(stack) == (1, 0))
        assert not stays.done()  # which would have ended first
        assert stays.result().usage.completion_tokens == 2500
    until(lambda: load(stack) == (0, 0))


@pytest.fixture
def guided(client, tokenizer):
    """Ask for an answer that looks a certain way; between the parts of JSON, a model at random would never stop with blanks."""
    blank = [token for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token]).isspace()]

    def ask_guided(**form):
        answer = ask(client, max_tokens=60, logit_bias=dict.fromkeys(map(str, blank), -100), extra_body=form)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    return ask_guided


@pytest.mark.parametrize("form", ["structured_outputs", "response_format"])
def test_an_answer_follows_a_schema(guided, form):
    wanted = {"json_schema": {"name": "shirt", "schema": SCHEMA}, "type": "json_schema"}
    answer = json.loads(guided(**{form: {"json": SCHEMA} if form == "structured_outputs" else wanted}))
    jsonschema.validate(answer, SCHEMA)


def test_an_answer_matches_a_regular_expression(guided):
    assert re.fullmatch(r"[qz]{3}-\d\d(x|yé)", guided(structured_outputs={"regex": r"[qz]{3}-\d\d(x|yé)"}))


def test_an_answer_is_one_of_the_choices(guided):
    choices = ["1+1 (two)", 'a "quoted" word', "back\\slash"]
    for left in (choices, choices[1:], choices[2:]):
        assert guided(structured_outputs={"choice": left}) in left


def test_an_answer_follows_a_grammar_or_is_refused(guided, engine):
    grammar = 'root ::= "<" letter ">"\nletter ::= [a-c]'
    if engine.gives_text:
        with pytest.raises(openai.BadRequestError, match="grammar"):
            guided(structured_outputs={"grammar": grammar})
        return
    assert guided(structured_outputs={"grammar": grammar}) in ("<a>", "<b>", "<c>")


def test_what_an_answer_must_look_like_concerns_no_other_request(client, guided, reference, tokenizer, text_of):
    expected, _ = reference.greedy(tokenizer.encode(PROMPT).ids, 40)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        free = [threads.submit(ask, client, max_tokens=40) for _ in range(2)]
        bound = threads.submit(guided, structured_outputs={"choice": ["yes", "no"]})
        assert [one.result().choices[0].text for one in free] == [text_of(expected)] * 2
        assert bound.result() in ("yes", "no")


def test_the_tokens_of_such_an_answer_have_log_probabilities(client):
    answer = ask(client, max_tokens=3, logprobs=3, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert all(-1000 < value <= 0 for value in answer.choices[0].logprobs.token_logprobs)


@pytest.mark.parametrize("form", [{"regex": "[ab"}, {"json": {"type": "nonsense"}}])
def test_what_no_answer_can_look_like_is_refused(client, form):
    with pytest.raises(openai.BadRequestError):
        ask(client, max_tokens=5, extra_body={"structured_outputs": form})
    assert ask(client, max_tokens=5).usage.completion_tokens == 5


def test_one_bad_request_hurts_no_other(client):
    stream = ask(client, max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    pieces = iter(stream)
    next(pieces)
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, prompt=[5] * 5000)
    for bad in ({"prompt": [5, 99_999]}, {"logit_bias": {"99999": 1}}):
        with pytest.raises(openai.BadRequestError, match="there is no token 99999"):
            ask(client, **bad)
    assert sum(1 for _ in pieces) > 100


def test_a_second_turn_does_not_compute_the_first_again(client):
    prompt = f"{time.time()} " + PROMPT * 6
    first = ask(client, prompt, max_tokens=3)
    second = ask(client, f"{prompt}{first.choices[0].text} and then?", max_tokens=3).usage
    assert first.usage.prompt_tokens_details.cached_tokens < 40
    assert second.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 32


def test_the_router_knows_what_the_worker_holds(client, stack, engine):
    prompt = f"{time.time()} " + PROMPT * 6
    usage = ask(client, prompt, max_tokens=3).usage

    def overlap():
        with client.completions.with_streaming_response.create(
            model="tiny", prompt=prompt, max_tokens=1, temperature=0
        ) as response:
            return int(response.headers["x-overlap-tokens"])

    until(lambda: overlap() >= usage.prompt_tokens - 64)

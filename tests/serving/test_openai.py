"""The frontend, asked by OpenAI's own client."""

import json

import httpx
import openai
import pytest

from tests.support.stacks import running
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "what is the capital of south africa"}]


def test_models_are_listed_and_told_one_by_one(client, stack):
    assert [model.id for model in client.models.list().data] == ["mock"]
    assert client.models.retrieve("mock").id == "mock"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nobody/knows")
    assert missing.value.code == "model_not_found"


def test_a_streamed_completion_is_the_whole_one_token_by_token(client):
    asked = {"model": "mock", "prompt": "once upon a time", "max_tokens": 20}
    whole = client.completions.create(**asked)
    events = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = [event.choices[0].text for event in events if event.choices]
    assert "".join(texts) == whole.choices[0].text
    assert len(whole.choices[0].text) == 20
    assert len(texts) == 21  # one a token, and the finish reason
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert events[-1].usage.prompt_tokens == 16
    assert whole.choices[0].finish_reason == "length"


def test_the_usage_so_far_comes_with_each_token_if_it_is_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "mock", "prompt": "once", "max_tokens": 5, "stream": True, "stream_options": options}
    events = list(client.completions.create(**asked))
    assert [event.usage.completion_tokens for event in events] == [1, 2, 3, 4, 5, 5, 5]  # the reason, the usage
    assert {event.usage.prompt_tokens for event in events} == {4}
    echoed = list(client.completions.create(**asked, extra_body={"echo": True}))
    assert [event.usage.completion_tokens for event in echoed] == [0, 1, 2, 3, 4, 5, 5, 5]
    chat = client.chat.completions.create(
        model="mock", messages=HELLO, max_tokens=2, stream=True, stream_options=options
    )
    assert [event.usage.completion_tokens for event in chat] == [0, 1, 2, 2, 2]  # the role first


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(client):
    asked = {"model": "mock", "messages": HELLO, "max_completion_tokens": 5}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_an_answer_without_a_limit_ends_by_itself(client):
    answer = client.chat.completions.create(model="mock", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    assert 16 <= answer.usage.completion_tokens <= 271


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_differ_and_each_ends(client, stream):
    answer = client.completions.create(model="mock", prompt="hello", max_tokens=12, n=3, stream=stream)
    if stream:
        texts, reasons = {}, {}
        for event in answer:
            choice = event.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    else:
        texts = {choice.index: choice.text for choice in answer.choices}
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) == 3
    assert set(reasons.values()) == {"length"}
    assert all(len(text) == 12 for text in texts.values())


def test_several_prompts_give_a_choice_each_and_equal_what_each_gives_alone(client):
    both = client.completions.create(model="mock", prompt=["one", "two"], max_tokens=8)
    alone = [client.completions.create(model="mock", prompt=prompt, max_tokens=8) for prompt in ("one", "two")]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]
    assert both.usage.prompt_tokens == 6
    ids = client.completions.create(model="mock", prompt=[[111, 110, 101], [116, 119, 111]], max_tokens=8)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in both.choices]


def test_the_seed_decides_the_answer(client):
    def ask(seed):
        return client.completions.create(model="mock", prompt="hello", max_tokens=20, seed=seed).choices[0].text

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)


def test_echo_puts_the_prompt_first(client):
    answer = client.completions.create(model="mock", prompt="hello", max_tokens=3, echo=True)
    assert answer.choices[0].text.startswith("hello")
    assert len(answer.choices[0].text) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_before_it(client, stream):
    whole = client.completions.create(model="mock", prompt="stop here", max_tokens=40).choices[0].text
    stop = whole[17:21]
    place = whole.index(stop)
    answer = client.completions.create(
        model="mock", prompt="stop here", max_tokens=40, stop=["no such", stop], stream=stream
    )
    if stream:
        events = list(answer)
        text, reason = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == place + 4
    assert (text, reason) == (whole[:place], "stop")


def test_a_stop_string_within_the_least_number_of_tokens_is_text_like_any_other(client):
    whole = client.completions.create(model="mock", prompt="stop here", max_tokens=40).choices[0].text
    stop = whole[17:21]
    assert whole.count(stop) == 1
    asked = {"model": "mock", "prompt": "stop here", "max_tokens": 40, "stop": stop}
    late = client.completions.create(**asked, extra_body={"min_tokens": 30})
    assert (late.choices[0].text, late.choices[0].finish_reason) == (whole, "length")
    assert late.usage.completion_tokens == 40
    across = client.completions.create(**asked, extra_body={"min_tokens": 20})
    assert (across.choices[0].text, across.choices[0].finish_reason) == (whole[:17], "stop")
    assert across.usage.completion_tokens == 21


def test_text_held_back_for_a_stop_string_that_does_not_come_is_given_at_the_end(client):
    whole = client.completions.create(model="mock", prompt="hold", max_tokens=10).choices[0].text
    answer = client.completions.create(model="mock", prompt="hold", max_tokens=10, stop=whole[-2:] + "never")
    assert answer.choices[0].text == whole


def test_a_completion_without_a_limit_has_16_tokens_as_at_openai(client):
    assert client.completions.create(model="mock", prompt="hello").usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_comes_with_the_log_probabilities_of_the_prompt(client, prompt, stream):
    asked = {"model": "mock", "prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 2}
    answer = client.completions.create(**asked, stream=stream)
    choices = [event.choices[0] for event in answer if event.choices[0].logprobs] if stream else answer.choices
    parts = [choice.logprobs for choice in choices]
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    assert tokens[:5] == ["h", "e", "l", "l", "o"]
    assert len(tokens) == len(values) == len(tops) == 7
    assert values[0] is tops[0] is None  # nothing comes before it
    assert values[2] == values[3]  # a function of the token
    assert all(
        value == max(top.values()) == top[token]
        for token, value, top in zip(tokens[1:], values[1:], tops[1:], strict=True)
    )
    assert all(len(top) == 2 for top in tops[1:])
    assert [offset for part in parts for offset in part.text_offset] == list(range(7))
    assert "".join(choice.text for choice in choices) == "".join(tokens)


def test_log_probabilities_of_a_chat(client):
    asked = {"model": "mock", "messages": HELLO, "max_tokens": 3, "logprobs": True}
    for count in (0, 3):
        content = client.chat.completions.create(**asked, top_logprobs=count).choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in content] == [count] * 3
        assert all(-5 < entry.logprob < 0 for entry in content)


def test_stop_token_ids_end_an_answer(client):
    whole = client.completions.create(model="mock", prompt="hello", max_tokens=30).choices[0].text
    answer = client.completions.create(
        model="mock", prompt="hello", max_tokens=30, extra_body={"stop_token_ids": [ord(whole[7])], "ignore_eos": True}
    )
    assert answer.choices[0].text == whole[: whole.index(whole[7])]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(answer.choices[0].text) + 1  # the stop token counts, as in vLLM


def test_tokens_of_texts_and_conversations_as_vllm_and_sglang_tell_them(tiny, stack):
    def ask(path, **body):
        return httpx.post(tiny.url + path, json=body).json()

    text = "once upon a time"
    found = ask("/tokenize", model="tiny", prompt=text, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert "".join(found["token_strs"]) == text
    assert found["max_model_len"] == 4096
    assert ask("/tokenize", prompt=text)["tokens"] == found["tokens"]  # there is one model
    assert ask("/detokenize", tokens=found["tokens"]) == {"prompt": text, "text": text}
    with_prompt = ask("/tokenize", model="tiny", messages=HELLO)
    without = ask("/tokenize", model="tiny", messages=HELLO, add_generation_prompt=False)
    assert with_prompt["count"] > without["count"] > ask("/tokenize", prompt=HELLO[0]["content"])["count"]
    assert with_prompt["tokens"][: without["count"]] == without["tokens"]
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert httpx.post(tiny.url + path, json=body).status_code == 400
    assert httpx.post(f"{tiny.url}/tokenize", json={"model": "nobody", "prompt": "x"}).status_code == 404
    assert httpx.post(f"{stack.url}/tokenize", json={"prompt": "hé"}).json()["tokens"] == [104, 195, 169]


def test_facts_of_the_server_and_its_model(tiny):
    assert httpx.get(f"{tiny.url}/version").json()["version"]
    for path in ("/get_model_info", "/model_info"):
        facts = httpx.get(tiny.url + path).json()
        assert facts["served_model_name"] == "tiny"
        assert facts["is_generation"]
    assert httpx.get(f"{tiny.url}/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_web_pages_of_named_origins_may_call():
    def ask(stack, origin):
        asking = {"origin": origin, "access-control-request-method": "POST"}
        preflight = httpx.options(f"{stack.url}/v1/completions", headers=asking)
        body = {"model": "mock", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{stack.url}/v1/completions", headers={"origin": origin}, json=body)
        assert answer.status_code == 200
        return [each.headers.get("access-control-allow-origin") for each in (preflight, answer)]

    with running(1, frontend={"cors_allow_origins": "https://a.example, https://b.example"}) as stack:
        assert ask(stack, "https://b.example") == ["https://b.example"] * 2
        assert ask(stack, "https://c.example") == [None] * 2
    with running(1) as stack:
        assert ask(stack, "https://b.example") == [None] * 2


def test_a_real_tokenizer_and_template_are_fetched_from_the_worker(tiny_client):
    answer = tiny_client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=10)
    words = answer.choices[0].message.content.split()
    assert words
    assert all(word.isalpha() for word in words)
    assert answer.usage.completion_tokens == 10
    raw = tiny_client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=1, extra_body={"nvext": {"use_raw_prompt": True}}
    )
    # The template adds its marks, the role twice, and line ends.
    assert answer.usage.prompt_tokens > raw.usage.prompt_tokens


def test_the_second_turn_of_a_conversation_goes_where_the_first_is_cached(tiny_client):
    messages = [{"role": "user", "content": "once upon a time there was a small server " * 8}]

    def ask(max_tokens, **nvext):
        return tiny_client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=max_tokens, extra_body={"nvext": nvext}
        )

    first = ask(40)
    there = {"backend_instance_id": int(first.headers["x-worker-id"], 16)}
    until(lambda: int(ask(1, **there).headers["x-overlap-tokens"]) > 0)  # the router has heard of the blocks
    told = first.parse().choices[0].message.content
    messages += [{"role": "assistant", "content": told}, {"role": "user", "content": "and then"}]
    second = ask(5)
    assert second.headers["x-worker-id"] == first.headers["x-worker-id"]
    cached = second.parse().usage.prompt_tokens_details.cached_tokens
    assert cached >= int(second.headers["x-overlap-tokens"]) > 0
    assert cached >= first.parse().usage.prompt_tokens // 16 * 16


def test_nvext_annotations_worker_and_timing(client, stack):
    with client.completions.with_streaming_response.create(
        model="mock",
        prompt="abc",
        max_tokens=2,
        stream=True,
        extra_body={
            "nvext": {"annotations": ["token_ids", "formatted_prompt"], "extra_fields": ["worker_id", "timing"]}
        },
    ) as response:
        lines = list(response.iter_lines())
    assert lines[:2] == ["event: token_ids", ": [97,98,99]"]
    assert ': "abc"' in lines
    last = json.loads(lines[-4].removeprefix("data: "))
    assert f"{last['nvext']['worker_id']['decode_worker_id']:x}" == response.headers["x-worker-id"]
    assert last["nvext"]["timing"]["total_time_ms"] > 0


def test_a_request_can_be_sent_to_one_instance(client, stack):
    health = httpx.get(f"{stack.url}/health").json()
    ids = [instance["instance_id"] for instance in health["instances"]]
    assert len(ids) == 2
    for id in ids * 2:
        answer = client.completions.with_raw_response.create(
            model="mock", prompt="to you", max_tokens=1, extra_body={"nvext": {"backend_instance_id": id}}
        )
        assert answer.headers["x-worker-id"] == f"{id:x}"
    with pytest.raises(openai.APIStatusError) as unknown:
        client.completions.create(
            model="mock", prompt="to you", max_tokens=1, extra_body={"nvext": {"backend_instance_id": 1}}
        )
    assert unknown.value.status_code == 503


def test_query_instance_id_tells_where_and_generates_nothing(stack):
    body = {"model": "mock", "prompt": "abc", "nvext": {"annotations": ["query_instance_id"]}}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body)
    lines = answer.text.split("\n")
    assert lines[0] == "event: worker_instance_id"
    ids = {str(entry["instance_id"]) for entry in httpx.get(f"{stack.url}/health").json()["instances"]}
    assert json.loads(lines[1].removeprefix(": ")) in ids
    assert lines[4] == ": [97,98,99]"


def test_metrics_count_what_happened(client, stack):
    def read():
        text = httpx.get(f"{stack.url}/metrics").text
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    blocks = "dynamo_component_kv_total_blocks{"
    until(lambda: sum(name.startswith(blocks) for name in read()) == 2)  # workers report once a second
    before = read()
    list(client.completions.create(model="mock", prompt="count me", max_tokens=7, stream=True))
    after = read()

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('dynamo_frontend_output_tokens_total{model="mock"}') == 7
    assert grown('dynamo_frontend_input_sequence_tokens_sum{model="mock"}') == 8
    assert grown('dynamo_frontend_inter_token_latency_seconds_count{model="mock"}') <= 6
    assert grown('dynamo_frontend_time_to_first_token_seconds_count{model="mock"}') == 1
    done = 'dynamo_frontend_requests_total{endpoint="completions",model="mock",request_type="stream",status="success"}'
    assert grown(done) == 1
    assert after['dynamo_frontend_inflight_requests{model="mock"}'] == 0
    assert after['dynamo_frontend_workers{model="mock",worker_type="aggregated"}'] == 2
    assert (
        sum(value for name, value in after.items() if name.startswith("dynamo_component_kv_total_blocks")) == 2 * 1999
    )


@pytest.mark.parametrize("is_large", [False, True], ids=["at once", "by a preparer"])
def test_a_request_that_cannot_be_prepared_is_counted(stack, is_large):
    name = 'dynamo_frontend_requests_total{endpoint="completions",model="mock",request_type="stream",status="error"} '

    def counted():
        lines = httpx.get(f"{stack.url}/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = counted()
    body = {
        "model": "mock",
        "stream": True,
        "prompt": "x",
        "allowed_token_ids": [1],
        "metadata": {"a": "x" * 200_000 * is_large},
    }
    assert httpx.post(f"{stack.url}/v1/completions", json=body).status_code == 400
    assert counted() == before + 1


def test_health_live_and_the_description_of_the_interface(stack):
    assert httpx.get(f"{stack.url}/health").json()["status"] == "healthy"
    assert httpx.get(f"{stack.url}/live").json()["status"] == "live"
    document = httpx.get(f"{stack.url}/openapi.json").json()
    assert "/v1/chat/completions" in document["paths"]


def test_the_request_id_is_kept(stack):
    body = {"model": "mock", "prompt": "abc", "max_tokens": 1}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"


def test_the_mocker_says_eos_where_the_request_wants_it(client):
    for kind in (client.completions, client.chat.completions):
        asked = {"prompt": "hello"} if kind is client.completions else {"messages": HELLO}
        answer = kind.create(model="mock", max_tokens=30, extra_body={"nvext": {"stop_after": 11}}, **asked)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 11)
        forced = {"nvext": {"stop_after": 11}, "ignore_eos": True}
        answer = kind.create(model="mock", max_tokens=30, extra_body=forced, **asked)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 30)

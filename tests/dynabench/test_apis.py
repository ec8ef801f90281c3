"""Which API requests go to, what they ask there, and what its events say."""

import json

import msgspec
import pytest

from dynabench.apis import PATHS, Endpoint, Way, endpoint_of
from dynabench.arm import ClientConfig
from dynabench.experiment.limits import check_has_tokens
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.events import AnswerError, AnswerReader
from dynabench.live.grammars import GRAMMARS
from dynabench.live.run import server_at
from foundation.errors import UserError
from reports.figures import metrics
from reports.figures.insight import remarks
from reports.figures.slo import parse_slo
from serving.frontend.api.answer_format import Usage
from serving.frontend.api.messages.format import MessagesFormat
from serving.frontend.api.messages.request import MessagesRequest
from serving.frontend.api.responses.format import ResponsesFormat
from serving.frontend.api.responses.request import ResponseOptions, ResponsesRequest
from serving.model.parts import Arguments, CallStart, Content, Reasoning
from tests.dynabench.test_load import send, workload
from tests.reports.runs import run
from tests.support.commands import dynabench
from tests.support.strange_server import DONE, EVENT, FINISH, says, strange_server, usage
from workloads import Request

HOST = "http://h:1"
CALLED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "user", "content": "Thanks. And tomorrow?"},
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FIELDS = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "temperature": 0.5,
    "max_completion_tokens": 7,
}


@pytest.mark.parametrize(
    ("url", "base", "api"),
    [
        ("http://h:1", "http://h:1", None),
        ("http://h:1/", "http://h:1", None),
        ("http://h:1/v1", "http://h:1", None),
        ("http://h:1/v1/", "http://h:1", None),
        ("http://h:1/v1/completions", "http://h:1", "completions"),
        ("http://h:1/v1/chat/completions/", "http://h:1", "chat"),
        ("http://h:1/v1/responses", "http://h:1", "responses"),
        ("https://h/v1/messages", "https://h", "messages"),
        ("http://h:1/proxy/v1", "http://h:1/proxy", None),
        ("http://u:p@h:1/proxy/v1/chat/completions", "http://u:p@h:1/proxy", "chat"),
        ("http://h:1/v1x", "http://h:1/v1x", None),
    ],
)
def test_trailing_parts_of_an_address_are_understood(url, base, api):
    assert endpoint_of(url) == Endpoint(base, api)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("h:1", "url must begin with http:// or https://, not 'h:1'"),
        ("http://h/v1?key=abc", r"url http://h/v1\?\*\*\* has parts after its path"),
        ("http://h/chat/completions", "names an API without /v1 before it"),
    ],
)
def test_an_address_below_which_nothing_can_be_sent_is_refused(url, problem):
    with pytest.raises(ValueError, match=problem):
        endpoint_of(url)


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({}, Way("tokens", None)),
        ({"prompts": "text"}, Way("text", None)),
        ({"prompts": "chat"}, Way("text", "chat")),
        ({"api": "chat"}, Way("text", "chat")),
        ({"api": "completions"}, Way("tokens", "completions")),
        ({"api": "completions", "prompts": "text"}, Way("text", "completions")),
        ({"api": "responses"}, Way("text", "responses")),
        ({"url": f"{HOST}/v1/messages"}, Way("text", "messages")),
        ({"url": f"{HOST}/v1/messages", "api": "messages"}, Way("text", "messages")),
    ],
)
def test_prompts_are_of_a_kind_that_their_api_takes(settings, way):
    client = ClientConfig(**settings)
    assert client.way == way
    assert (client.shown["prompts"], client.shown["api"]) == way


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompts": "chat", "api": "messages"}, "prompts is 'chat', but api is 'messages'"),
        (
            {"prompts": "tokens", "api": "chat"},
            "prompts is 'tokens', but api is 'chat': only completions and embeddings take token ids",
        ),
        ({"prompts": "tokens", "url": f"{HOST}/v1/responses"}, "prompts is 'tokens', but api is 'responses'"),
        (
            {"api": "chat", "url": f"{HOST}/v1/completions"},
            "api is 'chat', but the url http://h:1/v1/completions is that of 'completions'; leave one of them out",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ClientConfig(**settings)


def body(api, content=CALLED, fields=FIELDS, **target):
    request = Request(0.0, 4, 3, (0,), content=content, extra_body=fields)
    return json.loads(Bodies(MeasuredServer(HOST, "m", api=api, **target), 64, "").of(request))


def test_a_chat_is_a_response_in_that_api_s_words():
    made = body("responses")
    assert made == {
        "model": "m",
        "stream": True,
        "store": False,
        "max_output_tokens": 3,
        "temperature": 0.5,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "weather"},
        "input": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"role": "assistant", "content": "Let me see."},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"role": "user", "content": "Thanks. And tomorrow?"},
        ],
    }


def test_a_chat_is_a_message_in_that_api_s_words():
    made = body("messages")
    assert made == {
        "model": "m",
        "stream": True,
        "max_tokens": 3,
        "temperature": 0.5,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather"},
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                    {"type": "text", "text": "Thanks. And tomorrow?"},
                ],
            },
        ],
    }


@pytest.mark.parametrize(("api", "kind"), [("responses", ResponsesRequest), ("messages", MessagesRequest)])
def test_our_frontend_understands_the_same_chat_from_every_api(api, kind):
    chat = msgspec.convert(body(api), kind).to_chat()
    assert [message.role for message in chat.messages][:4] == ["system", "user", "assistant", "tool"]
    assert chat.messages[2].tool_calls
    assert chat.max_tokens == 3
    assert chat.tools[0]["function"]["name"] == "weather"


@pytest.mark.parametrize("api", ["responses", "messages", "chat"])
@pytest.mark.parametrize("content", [None, "Hello"])
def test_any_workload_can_be_sent_to_any_api(api, content):
    made = body(api, content, None)
    text = made["input"] if api == "responses" else made["messages"][0]["content"]
    assert text == "Hello" if content else len(text.split()) == 4


def test_a_user_s_fields_are_in_the_words_of_the_api():
    made = body("messages", extra_body={"thinking": {"type": "disabled"}, "stop_sequences": ["x"]})
    assert (made["thinking"], made["stop_sequences"]) == ({"type": "disabled"}, ["x"])


def test_a_chat_is_no_text_for_completions():
    made = body("completions", prompts="text")
    assert len(made["prompt"].split()) == 4
    assert "tools" not in made


def test_an_image_is_one_in_every_api():
    url = "data:image/png;base64,QUJD"
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    [item] = body("responses", parts)["input"]
    assert item["content"] == [{"type": "input_image", "image_url": url, "detail": "auto"}]
    [turn] = body("messages", parts)["messages"]
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    assert turn["content"] == [{"type": "image", "source": source}]


def test_the_key_is_where_servers_of_an_api_look_for_it():
    target = MeasuredServer(HOST, "m", api_key="k")
    assert target.headers_of("responses")["authorization"] == "Bearer k"
    messages = target.headers_of("messages")
    assert (messages["x-api-key"], messages["anthropic-version"]) == ("k", "2023-06-01")
    assert "x-api-key" not in target.headers_of("chat")


PARTS = [Reasoning("hm"), Reasoning(" so"), Content("It"), Content(" is"), CallStart("weather", None), Arguments("{}")]
COUNTED = Usage(20, 6, num_cached=16, num_reasoning=2)


def streamed(api, reason="length"):
    """Return what our frontend says in an API, event by event."""
    made = formatter(api)
    return [made.first(COUNTED), *(made.parts([part]) for part in PARTS), made.last(reason, COUNTED)]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_what_the_model_generates_is_a_token_in_every_api(api):
    reader = AnswerReader(16, grammar=GRAMMARS[api])
    assert [reader.take(part) for part in streamed(api)] == [0, 1, 1, 1, 1, 1, 1, 0]
    reader.end()
    said = reader.usage
    assert (reader.finish_reason, said.prompt_tokens, said.completion_tokens) == ("length", 20, 6)
    assert (said.prompt_tokens_details.cached_tokens, said.reasoning_tokens) == (16, 2)


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_an_api_s_events_are_counted_alike_wherever_the_reads_are_cut(api):
    whole = b"".join(streamed(api, "stop"))
    for size in (1, 7, 50, 113, len(whole)):
        reader = AnswerReader(16, grammar=GRAMMARS[api])
        assert sum(reader.take(whole[at : at + size]) for at in range(0, len(whole), size)) == 6, size
        reader.end()


def formatter(api):
    """Return what writes our frontend's answers in an API."""
    if api == "messages":
        return MessagesFormat("m", seed="1", fingerprint="f")
    return ResponsesFormat(ResponseOptions(echo={}), seed="1", fingerprint="f", created_at=0)


@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.parametrize("part", [Content, Reasoning])
def test_many_deltas_of_a_kind_are_counted_without_parsing(monkeypatch, api, part):
    made = formatter(api)
    reader = AnswerReader(600, grammar=GRAMMARS[api])
    reader.take(made.first(COUNTED) + made.parts([part("a")]))
    reader.take(made.parts([part("b")]))
    monkeypatch.setattr(AnswerReader, "_read", None)
    assert reader.take(made.parts([part(f't{number}"delta":"') for number in range(500)])) == 500
    assert reader.num_reasoning == (502 if part is Reasoning else 0)


@pytest.mark.parametrize("number", ["first", "last"])
def test_empty_deltas_of_a_response_are_no_tokens_wherever_its_numbers_are(number):
    def event(place, text):
        numbered = {"sequence_number": place}
        fields = {"content_index": 0, "delta": text, "item_id": "m1"}
        fields = numbered | fields if number == "first" else fields | numbered
        return b"data: " + json.dumps(fields | {"type": "response.output_text.delta"}).encode() + b"\n\n"

    reader = AnswerReader(600, grammar=GRAMMARS["responses"])
    counts = [reader.take(event(place, "" if place % 3 == 2 else "a")) for place in range(120)]
    assert counts == [1, 1, 0] * 40


@pytest.mark.parametrize(
    ("api", "event", "problem"),
    [
        (
            "responses",
            {"type": "response.failed", "response": {"error": {"message": "boom"}}},
            "error in the stream: .*boom",
        ),
        ("responses", {"type": "error", "message": "boom"}, "error in the stream: boom"),
        ("responses", {"delta": "x"}, "an event is malformed"),
        ("responses", [1], "an event is malformed"),
        (
            "messages",
            {"type": "error", "error": {"type": "overloaded_error"}},
            "error in the stream: .*overloaded_error",
        ),
        ("messages", {"type": "content_block_delta", "delta": 5}, "an event is malformed"),
        ("messages", {"choices": []}, "an event is malformed"),
    ],
)
def test_an_error_or_a_malformed_event_of_an_api_fails_the_request(api, event, problem):
    reader = AnswerReader(16, grammar=GRAMMARS[api])
    with pytest.raises(AnswerError, match=problem):
        reader.take(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.mark.parametrize("event", [{"type": "ping"}, {"type": "response.in_progress"}, {"type": "anything.new"}])
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_events_of_no_meaning_to_a_client_are_passed_over(api, event):
    assert AnswerReader(16, grammar=GRAMMARS[api]).take(b"data: " + json.dumps(event).encode() + b"\n\n") == 0


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_an_answer_of_an_api_is_measured_as_any_other(api):
    events = [part.decode() for part in streamed(api)]
    with strange_server(says(*events), seen := [], heads=[]) as url:
        columns = send(url, workload(2, tokens=6), api=api).requests
    assert columns.error.tolist() == ["", ""]
    assert (columns.isl.tolist(), columns.osl.tolist(), columns.cached_tokens.tolist()) == ([20] * 2, [6] * 2, [16] * 2)
    assert columns.finish_reason.tolist() == ["length"] * 2
    assert (columns.first_token_s < columns.last_token_s).all()
    assert all("ignore_eos" not in body for body in seen)


def test_requests_go_to_the_path_of_their_api():
    paths = []

    async def answer(reader, writer):
        await says(EVENT, FINISH + usage(16, 1) + DONE)(reader, writer)

    with strange_server(answer, paths=paths) as url:
        for address in (f"{url}/v1/chat/completions", f"{url}/proxy/v1", f"{url}/v1/"):
            target = server_at(address, "m", ClientConfig())
            columns = send(target.url, workload(1), prompts=target.prompts, api=target.api).requests
            assert columns.error.tolist() == [""]
    assert paths == [PATHS["chat"], "/proxy/v1/completions", "/v1/completions"]


def test_a_run_names_the_api_and_refuses_ends_that_our_stack_cannot_be_told(tmp_path):
    events = [part.decode() for part in streamed("messages")]
    with strange_server(says(*events)) as url:
        done = dynabench(
            "run", "--url", f"{url}/v1/messages", "--max-requests", "2", "--rate-scale", "200", "--out", tmp_path / "m"
        )
    assert "(messages API)" in " ".join(done.stdout.split()), done.stderr
    done = dynabench("run", "--api", "responses", "--ends", "stop", "--max-requests", "2", "--out", tmp_path / "x")
    assert (done.returncode, "api responses has no field that says where" in done.stderr) == (2, True), done.stderr


async def embeds(reader, writer):
    await whole(
        {"data": [{"index": 0, "embedding": [0.5] * 2000}], "usage": {"prompt_tokens": 12, "total_tokens": 12}}
    )(reader, writer)


async def ranks(reader, writer):
    await whole({"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": 12}})(reader, writer)


def whole(value):
    """Make the behaviour of a server that answers with an object, in two writes."""

    async def answer(reader, writer):
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data[:5]))
        await writer.drain()
        writer.write(data[5:])
        await writer.drain()

    return answer


@pytest.mark.parametrize(("api", "answer"), [("embeddings", embeds), ("rerank", ranks)])
def test_answers_without_tokens_have_an_end_and_no_other_times(api, answer):
    with strange_server(answer, seen := [], heads=(heads := []), paths=(paths := [])) as url:
        sent = send(url, workload(2), api=api)
    columns = sent.requests
    assert columns.error.tolist() == ["", ""]
    assert (columns.isl.tolist(), columns.osl.tolist()) == ([12, 12], [0, 0])
    assert columns.planned_osl.mask.all() and columns.first_token_s.mask.all()
    assert columns.last_token_s.tolist() == columns.done_s.tolist()
    assert (sent.facts["without_tokens"], sent.facts["without_usage"]) == (2, 0)
    assert paths == [PATHS[api]] * 2
    assert heads[0]["accept"] == "application/json"
    assert all({"stream", "max_tokens", "ignore_eos"}.isdisjoint(body) for body in seen)
    record = run(facts=sent.facts, osl=[0, 0], first_token_s=[None, None])
    assert metrics.throughput(record).output_tokens_per_s is None
    assert any("no TTFT, TPOT, ITL or output tokens/s" in note for note in remarks([record]))


USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
WORDS = {"input_tokens": 12, "output_tokens": 3}


@pytest.mark.parametrize(
    ("api", "answer", "end"),
    [
        ("completions", {"choices": [{"text": "a b c", "finish_reason": "length"}], "usage": USAGE}, "length"),
        ("chat", {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": USAGE}, "stop"),
        ("responses", {"status": "completed", "output": [{"type": "message"}], "usage": WORDS}, "stop"),
        (
            "responses",
            {
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
                "output": [{"type": "message"}],
                "usage": WORDS,
            },
            "length",
        ),
        ("messages", {"content": [{"type": "text"}], "stop_reason": "tool_use", "usage": WORDS}, "tool_calls"),
    ],
)
def test_answers_that_are_not_streamed_have_tokens_but_no_times_of_them(api, answer, end):
    with strange_server(whole(answer), seen := [], heads=(heads := [])) as url:
        sent = send(url, workload(2), api=api, prompts="text", is_streamed=False)
    columns = sent.requests
    assert columns.error.tolist() == ["", ""]
    assert (columns.isl.tolist(), columns.osl.tolist()) == ([12, 12], [3, 3])
    assert columns.finish_reason.tolist() == [end] * 2
    assert columns.first_token_s.mask.all() and columns.last_token_s.tolist() == columns.done_s.tolist()
    assert (sent.facts["as_whole"], sent.facts["without_tokens"], sent.facts["without_usage"]) == (2, 0, 0)
    assert all(body["stream"] is False and "stream_options" not in body for body in seen)
    assert heads[0]["accept"] == "application/json"
    record = run(facts=sent.facts, osl=[3, 3], first_token_s=[None, None])
    assert metrics.throughput(record).output_tokens_per_s
    assert any("came as a whole (--no-stream)" in note for note in remarks([record]))


def test_a_whole_answer_without_usage_has_an_unknown_number_of_tokens():
    answer = {"choices": [{"text": "a b c", "finish_reason": "length"}]}
    with strange_server(whole(answer)) as url:
        sent = send(url, workload(2), prompts="text", is_streamed=False)
    assert sent.requests.error.tolist() == ["", ""]
    assert (sent.facts["as_whole"], sent.facts["uncounted"], sent.facts["without_tokens"]) == (2, 2, 0)
    record = run(facts=sent.facts, osl=[0, 0], first_token_s=[None, None])
    assert any("it is not known how many tokens they have" in note for note in remarks([record]))


def test_what_needs_streams_is_refused_without_them():
    with pytest.raises(ValueError, match="stream is false, which applies to another server"):
        ClientConfig(stream=False)
    with pytest.raises(ValueError, match="only streamed answers can be repeated"):
        ClientConfig(url=HOST, api="chat", history="server", stream=False)
    with pytest.raises(UserError, match="answers that are not streamed have none; expected a limit on e2e"):
        check_has_tokens([parse_slo("ttft.p50 <= 1s")], ClientConfig(url=HOST, stream=False))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "the answer is malformed"),
        ({"data": []}, "the answer has no data"),
        ({"object": "error", "message": "no"}, "the answer has no data"),
        ({"error": {"message": "boom"}}, "error in the answer: {'message': 'boom'}"),
    ],
)
def test_an_answer_that_is_none_fails_the_request(value, problem):
    with strange_server(whole(value)) as url:
        columns = send(url, workload(1), api="embeddings").requests
    assert columns.error[0].startswith(problem)


def test_embeddings_are_of_token_ids_or_texts_and_of_a_chat_s_text():
    assert body("embeddings", "Hello", None) == {"model": "m", "input": "Hello"}
    assert len(body("embeddings", None, None, prompts="tokens")["input"]) == 4
    assert "Thanks. And tomorrow?" in body("embeddings", CALLED, FIELDS)["input"]
    assert set(body("embeddings", CALLED, FIELDS, extra_body={"dimensions": 8})) == {"model", "input", "dimensions"}


@pytest.mark.parametrize(("num_words", "query", "documents"), [(1, 1, [1]), (10, 5, [5]), (400, 32, [128, 128, 112])])
def test_the_words_of_a_prompt_are_a_query_and_documents(num_words, query, documents):
    made = body("rerank", " ".join(map(str, range(num_words))), None)
    assert len(made["query"].split()) == query
    assert [len(document.split()) for document in made["documents"]] == documents

"""Whatever is sent, the answer is OpenAI's error body with the right status."""

import contextlib
import gzip
import http.client
import json
import socket
import zlib

import httpx
import pytest

from tests.support.stacks import running
from tests.support.waiting import PATIENCE_S

GOOD = {"model": "mock", "prompt": "x", "max_tokens": 1}
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
RESPONSE = {"model": "mock", "input": "x"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def check(answer, status, param=None, code=None):
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    if status in (429, 503):
        assert "retry-after" in answer.headers
    for secret in ("Traceback", "/work/", "site-packages", "0x7f"):
        assert secret not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'"text"', b"[1]", b"null", b"3", b"\xff\xfe", b'{"model": "mock", "prompt": "\xff"}',
        b'{"model": "mock", "prompt": "x", "temperature": NaN}', b'{"model": "mock", "prompt": "x", "seed": Infinity}',
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"[" * 100_000, b'{"a":' * 5_000,
        b'{"model": "mock", "prompt": "x", "seed": 1' + b"0" * 100_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_400(stack, body):
    for path in (COMPLETIONS, CHATS):
        answer = httpx.post(stack.url + path, content=body, headers={"content-type": "application/json"})
        check(answer, 400)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 3]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 40]}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"] * 200}, "n"),
        (COMPLETIONS, {"temperature": -1}, "temperature"),
        (COMPLETIONS, {"temperature": 3}, "temperature"),
        (COMPLETIONS, {"temperature": "warm"}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"top_p": 2}, "top_p"),
        (COMPLETIONS, {"n": 0}, "n"),
        (COMPLETIONS, {"n": 129}, "n"),
        (COMPLETIONS, {"n": 10**9}, "n"),
        (COMPLETIONS, {"best_of": 10**9}, "best_of"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 10**12}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"five": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"²": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"٣": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"-5": 1}}, "logit_bias"),
        (COMPLETIONS, {"logit_bias": {"": 1}}, "logit_bias"),
        (COMPLETIONS, {"nvext": {"annotations": ["dp_rank:²"]}}, "nvext"),
        (COMPLETIONS, {"nvext": {"annotations": ["dp_rank:" + "9" * 240]}}, "nvext"),
        (COMPLETIONS, {"nvext": {"annotations": ["dp_rank:"]}}, "nvext"),
        (COMPLETIONS, {"nvext": {"annotations": ["token_id"]}}, "nvext"),
        (COMPLETIONS, {"seed": 1.5}, "seed"),
        (COMPLETIONS, {"stop": list(map(str, range(65)))}, "stop"),
        (COMPLETIONS, {"stop": ""}, "stop"),
        (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty"),
        (COMPLETIONS, {"stream": "yes"}, "stream"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"nvext": {"top_k": -2}}, "nvext"),
        (COMPLETIONS, {"nvext": {"ignor_eos": True}}, "nvext"),
        (COMPLETIONS, {"stream": True, "stream_options": {"include_usag": True}}, "stream_options"),
        (COMPLETIONS, {"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x" * 31_000, "n": 128, "echo": True, "max_tokens": 1}, None),
        (COMPLETIONS, {"model": 5}, "model"),
        (CHATS, {"messages": []}, "messages"),
        (CHATS, {"messages": None}, "messages"),
        (CHATS, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": None}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": []}]}, "messages"),
        (CHATS, {"service_tier": 7}, "service_tier"),
        (CHATS, {"parallel_tool_calls": "x"}, "parallel_tool_calls"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages"),
        (
            CHATS,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]}
                ]
            },
            "messages",
        ),
        (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs"),
        (CHATS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHATS, {"tool_choice": "required"}, "tool_choice"),
        (CHATS, {"chat_template": "{{ 1 }}"}, "chat_template"),
        (CHATS, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_fields_out_of_their_range_are_400_and_named(stack, path, change, param):
    body = (GOOD if path == COMPLETIONS else CHAT) | change
    check(httpx.post(stack.url + path, json=body), 400, param)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_fields_are_named(stack, missing):
    body = {name: value for name, value in GOOD.items() if name != missing}
    check(httpx.post(stack.url + COMPLETIONS, json=body), 400, missing)


UNSUPPORTED = [
    {"prompt_logprobs": 1}, {"guided_grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}, {"structured_outputs": {"grammar": "x"}},
    {"return_token_ids": True}, {"prompt_embeds": "AAAA"}, {"cache_salt": "x"}, {"allowed_token_ids": [1]},
    {"use_beam_search": True}, {"skip_special_tokens": False}, {"include_stop_str_in_output": True}, {"length_penalty": 2},
]  # fmt: skip


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_no_engine_here_can_do_is_refused_not_ignored(stack, field):
    (name,) = field
    for path, body in ((COMPLETIONS, GOOD), (CHATS, CHAT)):
        check(httpx.post(stack.url + path, json=body | field), 400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    "field",
    [{"modalities": ["text", "audio"]}, {"functions": [{}]}, {"web_search_options": {}},
     {"chat_template": "{{ 1 }}"}, {"echo": True},
     {"continue_final_message": True}],
)  # fmt: skip
def test_the_same_for_what_only_chats_have(stack, field):
    (name,) = field
    check(httpx.post(stack.url + CHATS, json=CHAT | field), 400, name, "unsupported_parameter")


def test_a_field_that_nobody_knows_is_refused_by_its_name(stack):
    answer = httpx.post(stack.url + COMPLETIONS, json=GOOD | {"temprature": 0.5})
    check(answer, 400, "temprature", "unknown_parameter")
    check(httpx.post(stack.url + CHATS, json=CHAT | {"x" * 5000: [[]]}), 400, code="unknown_parameter")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_field_that_is_there_twice_is_refused(stack, path):
    whole = json.dumps(GOOD if path == COMPLETIONS else CHAT)
    for name in ("model", "max_tokens", "store"):
        body = whole[:-1] + f', "{name}": 1, "{name}": 1' + "}"
        answer = httpx.post(stack.url + path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
    body = whole[:-1] + ', "store": true, "store": true}'
    check(httpx.post(stack.url + path, content=body, headers={"content-type": "application/json"}), 400, "store")


def test_a_body_with_thousands_of_fields_is_walked_once(stack):
    body = (
        "{" + ",".join(f'"k{number}":null' for number in range(8000)) + ', "model":"mock","prompt":"x","max_tokens":1}'
    )
    with httpx.Client() as client:
        for _ in range(5):  # 2 s each, if every name were searched for
            answer = client.post(stack.url + COMPLETIONS, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200
    twice = body[:-1] + ', "k7":null}'
    check(httpx.post(stack.url + COMPLETIONS, content=twice, headers={"content-type": "application/json"}), 400, "k7")


def test_log_probabilities_of_prompts_are_bounded(stack):
    asked = GOOD | {"prompt": [97] * 20_000, "echo": True, "logprobs": 5}
    check(httpx.post(stack.url + COMPLETIONS, json=asked), 400, "logprobs")
    asked = GOOD | {"prompt": [97] * 2_000, "echo": True, "logprobs": 5, "n": 4}
    assert httpx.post(stack.url + COMPLETIONS, json=asked).status_code == 200


def test_a_limit_that_is_not_given_is_not_held_against_the_request(stack):
    for asked in ({"min_tokens": 20}, {"prompt": "x" * 31_980}):
        body = {name: value for name, value in (GOOD | asked).items() if name != "max_tokens"}
        answer = httpx.post(stack.url + COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text


def test_null_is_the_same_as_absent_and_what_asks_for_nothing_is_taken(stack):
    neutral = {
        "logprobs": None, "seed": None, "stop": None, "suffix": None, "prompt_logprobs": None, "nobody_knows": None,
        "repetition_penalty": 1.0, "use_beam_search": False, "skip_special_tokens": True, "priority": 0,
        "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
        "stream_options": None, "min_tokens": None, "nvext": None, "n": None, "return_token_ids": False, "bad_words": [],
    }  # fmt: skip
    for path, body in ((COMPLETIONS, GOOD), (CHATS, CHAT)):
        assert httpx.post(stack.url + path, json=body | neutral).status_code == 200


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NULLS = {"name": None, "tool_calls": None, "tool_call_id": None, "refusal": None, "function_call": None, "audio": None}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a", **NULLS}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", **NULLS},
            {"role": "user", "content": "c"},
        ],
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [], "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "d"},
        ],
    ],
    ids=["nulls", "an answer as its SDK dumps it", "no content beside tool calls"],
)
def test_null_is_the_same_as_absent_in_messages(stack, messages):
    answer = httpx.post(stack.url + CHATS, json=CHAT | {"messages": messages})
    assert answer.status_code == 200, answer.text
    bare = [{name: value for name, value in message.items() if value not in (None, [])} for message in messages]
    tokens = [
        httpx.post(stack.url + "/tokenize", json={"messages": these}).json()["tokens"] for these in (messages, bare)
    ]
    assert tokens[0] == tokens[1]


def test_null_is_the_same_as_absent_in_extensions(stack):
    extension = dict.fromkeys(("annotations", "extra_fields", "session_id"))
    answer = httpx.post(stack.url + CHATS, json=CHAT | {"nvext": extension})
    assert answer.status_code == 200, answer.text
    assert httpx.post(stack.url + CHATS, json=CHAT | {"nvext": extension, "stream": True}).status_code == 200
    flags = {"add_generation_prompt": None, "return_token_strs": None}
    plain = httpx.post(stack.url + "/tokenize", json={"messages": CHAT["messages"]})
    assert httpx.post(stack.url + "/tokenize", json={"messages": CHAT["messages"], **flags}).json() == plain.json()


def test_a_user_message_without_content_is_400(stack):
    for content in (None, []):
        messages = [{"role": "user", "content": content}]
        check(httpx.post(stack.url + CHATS, json=CHAT | {"messages": messages}), 400, "messages")


@pytest.mark.parametrize(
    ("coding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)]
)
def test_a_compressed_body_is_read(stack, coding, encode):
    body = encode(json.dumps(GOOD | {"prompt": "x" * 9_000}).encode())
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = httpx.post(stack.url + COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 9_000
    for broken in (body[:-5], body + b"x", b"{}"):
        check(httpx.post(stack.url + COMPLETIONS, content=broken, headers=headers), 400)


@pytest.mark.parametrize("size", [1, 9, 1 << 20])
def test_a_gzip_body_of_several_members_is_read(stack, size):
    body = json.dumps(GOOD | {"prompt": "x" * 900}).encode()
    parts = gzip.compress(body[:500]) + gzip.compress(b"") + gzip.compress(body[500:])
    chunks = (parts[place : place + size] for place in range(0, len(parts), size))
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(stack.url + COMPLETIONS, content=chunks, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 900
    check(httpx.post(stack.url + COMPLETIONS, content=parts[:-5], headers=headers), 400)
    bombs = gzip.compress(b" " * (20 << 20)) * 10
    check(httpx.post(stack.url + COMPLETIONS, content=bombs, headers=headers), 413)


def test_a_compressed_body_is_bounded_as_it_is_decoded(stack):
    bomb = gzip.compress(b" " * (200 << 20))
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check(httpx.post(stack.url + COMPLETIONS, content=bomb, headers=headers), 413)


def test_other_encodings_are_415_and_say_which_are_read(stack):
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    answer = httpx.post(stack.url + COMPLETIONS, content=b"x", headers=headers)
    check(answer, 415)
    assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_a_slash_at_the_end_of_a_path_changes_nothing(stack):
    for path in ("/v1/models", "/health", "/version"):
        assert httpx.get(stack.url + path + "/").json().keys() == httpx.get(stack.url + path).json().keys()
    assert httpx.post(stack.url + COMPLETIONS + "/", json=GOOD).status_code == 200


@pytest.mark.parametrize("model", ["nobody", "../../etc/passwd", "a\0b", "x" * 9_000])
def test_an_unknown_model_is_404(stack, model):
    check(httpx.post(stack.url + COMPLETIONS, json=GOOD | {"model": model}), 404, "model", "model_not_found")


def test_more_than_the_context_holds_is_400(stack):
    long = httpx.post(stack.url + COMPLETIONS, json=GOOD | {"prompt": "x" * 40_000})
    check(long, 400, "prompt", "context_length_exceeded")
    longer = CHAT | {"messages": [{"role": "user", "content": "x" * 40_000}], "max_tokens": 200_000}
    check(httpx.post(stack.url + CHATS, json=longer), 400, "messages", "context_length_exceeded")
    check(httpx.post(stack.url + "/v1/responses", json=RESPONSE | {"input": "x" * 40_000}), 400, "input")
    check(httpx.post(stack.url + COMPLETIONS, json=GOOD | {"n": 128, "max_tokens": 31_000}), 400)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_alone_is_more_than_the_context_is_named(stack, name):
    for path, body in ((CHATS, CHAT), (COMPLETIONS, GOOD)):
        check(httpx.post(stack.url + path, json=body | {name: 200_000}), 400, name, "context_length_exceeded")


def test_the_limit_of_a_response_is_named_as_its_api_does(stack):
    greedy = httpx.post(stack.url + "/v1/responses", json=RESPONSE | {"max_output_tokens": 200_000})
    check(greedy, 400, "max_output_tokens", "context_length_exceeded")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/x-www-form-urlencoded", 415),
        ("text/plain", 415),
        ("application/json; charset=utf-16", 415),
    ],
)
def test_the_content_type_must_be_json(stack, kind, status):
    answer = httpx.post(stack.url + COMPLETIONS, content=json.dumps(GOOD), headers={"content-type": kind})
    assert answer.status_code == status
    if status != 200:
        check(answer, status)


def test_a_missing_content_type_is_taken_as_json(stack):
    assert httpx.post(stack.url + COMPLETIONS, content=json.dumps(GOOD).encode()).status_code == 200


def test_routes_and_methods_that_are_not_there(stack):
    check(httpx.get(f"{stack.url}/v1/nothing"), 404)
    check(httpx.post(f"{stack.url}/admin/shutdown"), 404)
    wrong = httpx.get(stack.url + COMPLETIONS)
    check(wrong, 405)
    assert wrong.headers["allow"] == "POST"
    kept = httpx.post(f"{stack.url}/v1/responses/resp_1")
    check(kept, 405)
    assert set(kept.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
    assert httpx.head(f"{stack.url}/v1/models").status_code == 200
    assert httpx.options(stack.url + COMPLETIONS).status_code == 204


def test_too_much_of_anything_is_refused(stack):
    check(httpx.get(f"{stack.url}/v1/models?{'x' * 20_000}"), 414)
    check(httpx.get(f"{stack.url}/v1/models", headers={"x-big": "y" * 20_000}), 431)
    check(httpx.get(f"{stack.url}/v1/models", headers={f"x-{number}": "y" for number in range(1000)}), 431)


def test_a_body_larger_than_the_limit_is_413(stack):
    check(httpx.post(stack.url + COMPLETIONS, content=b"x" * (46 << 20)), 413)


def test_a_body_that_never_ends_is_413_and_not_kept(stack):
    def forever():
        while True:
            yield b"x" * (1 << 20)

    with contextlib.suppress(httpx.WriteError):  # hung up on while writing: that is a refusal, too
        check(httpx.post(stack.url + COMPLETIONS, content=forever()), 413)


def test_broken_http_is_400_and_the_connection_closed(stack):
    port = int(stack.url.rpartition(":")[2])
    for garbage in (b"GARBAGE\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), 5) as raw:
            raw.sendall(garbage)
            assert raw.recv(1000).startswith(b"HTTP/1.1 400")
            assert raw.recv(1000) == b""


def test_pipelined_requests_are_answered_in_order(stack):
    port = int(stack.url.rpartition(":")[2])
    one = b"GET /v1/models/%d HTTP/1.1\r\nhost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 5) as raw:
        raw.sendall(b"".join(one % number for number in range(50)))
        data = b""
        while data.count(b"model_not_found") < 50:
            data += (more := raw.recv(1 << 16))
            assert more, data[-500:]
    places = [data.index(b"model '%d'" % number) for number in range(50)]
    assert places == sorted(places)


def test_nothing_is_open_without_the_key():
    from tests.support.stacks import running

    with running(1, frontend={"api_key": "secret"}) as stack:
        for method, path in [
            ("POST", COMPLETIONS),
            ("POST", CHATS),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ]:
            for key in (None, "Bearer secre", "Bearer secret2", "secret", "Basic secret"):
                headers = {"authorization": key} if key else {}
                check(httpx.request(method, stack.url + path, headers=headers, json=GOOD), 401, code="invalid_api_key")
        assert {httpx.get(stack.url + path).status_code for path in ("/health", "/health/", "/live", "/live/")} == {200}
        headers = {"authorization": "Bearer secret"}
        assert httpx.post(stack.url + COMPLETIONS, json=GOOD, headers=headers).status_code == 200


def test_expect_100_continue_is_handled(stack):
    connection = http.client.HTTPConnection("127.0.0.1", int(stack.url.rpartition(":")[2]), timeout=PATIENCE_S)
    body = json.dumps(GOOD)
    connection.putrequest("POST", COMPLETIONS)
    for name, value in {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "expect": "100-continue",
    }.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(body.encode())
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_an_unknown_field_that_asks_for_nothing_is_accepted(stack, value):
    assert httpx.post(stack.url + CHATS, json=CHAT | {"temprature": value}).status_code == 200


def test_strictly_no_unknown_field_is_accepted():
    with running(num_workers=1, frontend={"strict": True}) as strict:
        known = CHAT | {"messages": [{"role": "user", "content": "x", "name": None}], "bad_words": []}
        assert httpx.post(strict.url + CHATS, json=known).status_code == 200
        check(httpx.post(strict.url + CHATS, json=CHAT | {"temprature": None}), 400, "temprature", "unknown_parameter")
        odd = [{"role": "user", "content": "x", "cache_control": None}]
        refused = httpx.post(strict.url + CHATS, json=CHAT | {"messages": odd})
        check(refused, 400, "messages[0].cache_control", "unknown_parameter")
        text = {"model": "mock", "prompt": "x", "messages": None}
        assert httpx.post(strict.url + "/tokenize", json=text).status_code == 200
        item = {"model": "mock", "input": [{"role": "user", "content": "x", "foo": None}]}
        check(httpx.post(strict.url + "/v1/responses", json=item), 400, "input[0].foo", "unknown_parameter")

"""`--strict`: an unknown field is refused whatever its value, wherever it stands."""

import msgspec
import pytest

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import strictly
from serving.frontend.api.kinds import KINDS, LikeChat, parse_request
from serving.frontend.api.openai import ChatRequest
from serving.frontend.api.unsupported import check_fields

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
SAID = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FORMAT = {"type": "json_schema", "schema": {}}


def _read(kind, is_strict, fields):
    body = msgspec.json.encode(fields)
    request = parse_request(body, KINDS[kind].type)
    check_fields(body, request, is_strict=is_strict)
    if isinstance(request, LikeChat):
        with strictly(is_strict):
            request.to_chat()


@pytest.mark.parametrize("value", [None, False, "", [], {}])
@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", lambda foo: {"messages": [SAID], **foo}, "foo"),
        ("chat", lambda foo: {"messages": [SAID, SAID | foo]}, "messages[1].foo"),
        ("chat", lambda foo: {"messages": [SAID | {"content": [TEXT, TEXT | foo]}]}, "messages[0].content[1].foo"),
        ("response", lambda foo: {"input": [SAID | foo]}, "input[0].foo"),
        ("response", lambda foo: {"input": [SAID | {"content": [TEXT | {"type": "input_text"} | foo]}]}, "input[0].content[0].foo"),
        ("response", lambda foo: {"input": "hi", "tools": [FUNCTION | {"type": "function"} | foo]}, "tools[0].foo"),
        ("response", lambda foo: {"input": "hi", "reasoning": {"effort": "low"} | foo}, "reasoning.foo"),
        ("response", lambda foo: {"input": "hi", "text": {"format": {"type": "text"} | foo}}, "text.format.foo"),
        ("message", lambda foo: {"max_tokens": 9, "messages": [SAID | foo]}, "messages[0].foo"),
        ("message", lambda foo: {"max_tokens": 9, "messages": [SAID | {"content": [TEXT | foo]}]}, "messages[0].content[0].foo"),
        ("message", lambda foo: {"max_tokens": 9, "messages": [SAID | {"content": [TEXT | {"cache_control": {"type": "ephemeral"} | foo}]}]}, "messages[0].content[0].cache_control.foo"),
        ("message", lambda foo: {"max_tokens": 9, "messages": [SAID], "tools": [TOOL | foo]}, "tools[0].foo"),
        ("message", lambda foo: {"max_tokens": 9, "messages": [SAID], "metadata": {"user_id": "u"} | foo}, "metadata.foo"),
        ("message", lambda foo: {"max_tokens": 9, "messages": [SAID], "output_config": {"format": FORMAT | foo}}, "output_config.format.foo"),
        ("message_tokens", lambda foo: {"messages": [SAID | foo]}, "messages[0].foo"),
        ("tokenize", lambda foo: {"messages": [SAID | foo]}, "messages[0].foo"),
    ],
)  # fmt: skip
def test_an_unknown_field_that_asks_for_nothing_is_refused_only_if_strict(kind, fields, param, value):
    asked = {"model": "m", **fields({"foo": value})}
    _read(kind, False, asked)
    with pytest.raises(ApiError) as caught:
        _read(kind, True, asked)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_null_in_place_of_objects_is_absent_if_strict():
    _read("tokenize", True, {"prompt": "x", "messages": None, "tools": None})


def test_what_goes_to_the_template_as_it_is_may_have_any_field_if_strict():
    tool = {"type": "function", "function": FUNCTION | {"foo": None}, "foo": None}
    _read("chat", True, {"model": "m", "messages": [SAID], "tools": [tool]})


def test_parts_of_messages_that_are_not_text_are_named():
    parts = [TEXT, {"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": parts}]})
    said = r"messages\[0\].content\[1\] has type 'image_url', which is not supported; expected 'text'"
    with pytest.raises(ApiError, match=said):
        parse_request(body, ChatRequest)

"""Whatever JSON a client sends as a tool's parameters, its request is served or refused with 400."""

import json
from random import Random

import pytest
from hypothesis import given, settings, strategies

from serving.engines.mock.answers.calls import call_tokens
from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.writer import Writer
from serving.frontend.answers.splitting import AnswerParts
from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import parse_request
from serving.frontend.api.openai import ChatRequest
from serving.frontend.api.tools import ToolUse
from serving.frontend.prepared import Prepared
from serving.frontend.preprocess import preprocess
from serving.frontend.shape import combined
from serving.model.tokenizer import ByteTokenizer
from tests.model.parsers.test_schema_types import json_values, keywords
from tests.serving.test_preparing import text_model
from tests.support.examples import worth

objects = strategies.dictionaries(keywords, json_values, max_size=4)
choices = strategies.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}])
CALL = b"<tool_call>\\n<function=f>\\n<parameter=p>1</parameter></function></tool_call>"


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@settings(max_examples=worth(200), deadline=None)
@given(objects, objects, choices)
def test_any_parameters_are_served_or_refused(first, second, choice):
    model = text_model(context_length=10_000, guided_decoding=("json",), tool_call_parser="qwen3_coder")
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [tool("f", first), tool("g", second)],
            "tool_choice": choice,
        }
    ).encode()
    try:
        prepared = preprocess(parse_request(body, ChatRequest), body, model)
    except ApiError as error:
        assert error.status == 400
        return
    assert isinstance(prepared, Prepared)
    parts = AnswerParts(prepared.shape)
    parts.push(CALL)
    parts.end()
    assert parts.num_calls == (choice == "auto")


def test_definitions_that_are_none_are_refused_by_the_name_of_their_tool():
    use = ToolUse(tools=[tool("f", {}), tool("g", {"$defs": [1]})], choice="required")
    with pytest.raises(ApiError, match="the parameters of 'g': \\$defs must be an object, not \\[1\\]") as refused:
        combined(use, None)
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_what_cannot_be_combined_for_any_other_reason_is_refused():
    deep = {"$ref": "#"}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="tools: their parameters do not make one schema") as refused:
        combined(ToolUse(tools=[tool("f", deep)], choice="required"), None)
    assert (refused.value.status, refused.value.param) == (400, "tools")


@settings(max_examples=worth(100), deadline=None)
@given(objects)
def test_the_mocker_calls_a_tool_of_any_parameters_or_refuses(parameters):
    writer = Writer(ByteTokenizer())
    try:
        tokens = call_tokens([tool("f", parameters)], Random(1), 20, writer, "hermes", 1.0)
    except FormError:
        return
    assert tokens

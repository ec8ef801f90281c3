"""Answers that must call tools."""

import json

import jsonschema
import pytest

from serving.model.parsers import calls_schema, required_calls_parser
from serving.model.parts import Arguments, CallStart, Content
from tests.model.parsers.texts import read


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name} | ({"parameters": parameters} if parameters else {})}


ADDRESS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SEND = tool("send", type="object", properties={"to": {"$ref": "#/$defs/Address"}}, **{"$defs": {"Address": ADDRESS}})
NOW = tool("now")
ONE = {"type": "function", "function": {"name": "send"}}


def accepts(schema, answer):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(answer)


def test_any_tool_may_be_called_with_arguments_of_its_own_schema():
    schema = calls_schema([SEND, NOW], "required")
    send, now = {"name": "send", "parameters": {"to": {"city": "Ulm"}}}, {"name": "now", "parameters": {}}
    assert accepts(schema, [send])
    assert accepts(schema, [send, now])
    assert not accepts(schema, [])
    assert not accepts(schema, [{"name": "send", "parameters": {"to": {}}}])
    assert not accepts(schema, [{"name": "other", "parameters": {}}])
    assert not accepts(schema, [{"name": "now"}])


def test_without_parallel_calls_there_is_one():
    schema = calls_schema([NOW], "required", parallel=False)
    call = {"name": "now", "parameters": {}}
    assert accepts(schema, [call])
    assert not accepts(schema, [call, call])


def test_a_named_function_takes_its_arguments_alone():
    schema = calls_schema([NOW, SEND], ONE)
    assert accepts(schema, {"to": {"city": "Ulm"}})
    assert not accepts(schema, {"to": {}})


def test_the_tools_are_left_as_they_were():
    before = json.dumps([SEND, NOW])
    calls_schema([SEND, NOW], "required")
    calls_schema([SEND, NOW], ONE)
    assert json.dumps([SEND, NOW]) == before


def test_a_name_that_is_no_tool_is_refused():
    with pytest.raises(ValueError, match="tool_choice names 'send', which is not in tools: now"):
        calls_schema([NOW], ONE)


def fits(schema, value):
    """Return whether a value fits a schema that engines can use: all that it refers to is in it."""
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_each_tool_has_its_own_definitions_even_of_the_same_name():
    own = {"type": "object", "properties": {"to": {"$ref": "#/$defs/Address"}}, "required": ["to"]}
    as_text, as_number = ({**own, "$defs": {"Address": {"type": type}}} for type in ("string", "number"))
    schema = calls_schema([tool("send", **as_text), tool("ask", **as_number)], "required")
    for name, good, bad in (("send", "x", 1), ("ask", 1, "x")):
        assert fits(schema, [{"name": name, "parameters": {"to": good}}])
        assert not fits(schema, [{"name": name, "parameters": {"to": bad}}])


@pytest.mark.parametrize("target", ["#", "#/properties/next"])
def test_a_tool_may_refer_to_its_own_root(target):
    step = {"type": "object", "properties": {"next": {"type": "object"}, "after": {"$ref": target}}}
    schema = calls_schema([tool("plan", **step), NOW], "required")
    assert fits(schema, [{"name": "plan", "parameters": {"after": {"after": {}}}}])
    assert not fits(schema, [{"name": "plan", "parameters": {"after": 5}}])
    assert fits(schema, [{"name": "now", "parameters": {}}])


def test_names_and_arguments_are_passed_on_as_they_arrive():
    parser = required_calls_parser("required")
    assert parser.push('[{"name": "se') == []
    assert parser.push('nd", "parameters": {"to": ') == [CallStart("send"), Arguments('{"to": ')]
    assert parser.push('{}}}, {"name": "now"') == [Arguments("{}}")]
    assert parser.push(', "parameters": {}}]\n') == [CallStart("now"), Arguments("{}")]
    assert parser.end() == []


def test_arguments_of_a_named_function_are_passed_on_as_they_arrive():
    parser = required_calls_parser(ONE)
    assert parser.push(' {"to": ') == [CallStart("send"), Arguments('{"to": ')]
    assert parser.push("{}} ") == [Arguments("{}}")]
    assert parser.end() == []


@pytest.mark.parametrize("choice", ["required", ONE])
def test_an_answer_that_was_not_constrained_is_content(choice):
    assert read(required_calls_parser(choice), "I cannot [do] that") == [Content("I cannot [do] that")]


def test_a_call_that_was_cut_off_has_the_arguments_so_far():
    parts = read(required_calls_parser("required"), '[{"name": "send", "parameters": {"to": {"ci')
    assert parts == [CallStart("send"), Arguments('{"to": {"ci')]

"""The types of tools' parameters, by schemas that clients wrote."""

import json

import pytest
from hypothesis import given, settings, strategies

from serving.model.parsers import answer_parser, calls_schema
from serving.model.parsers.schema_types import ToolTypes
from tests.model.parsers.texts import calls_of, parsed, read
from tests.support.examples import worth

keywords = strategies.sampled_from(
    [
        "type",
        "properties",
        "p",
        "x",
        "$ref",
        "$defs",
        "definitions",
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "items",
    ]
)
leaves = strategies.sampled_from(["#", "#/x", "#/$defs/x", "string", "integer", 1, 0.5, True, None, ""])
json_values = strategies.recursive(
    leaves,
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(keywords, inner, max_size=3),
    max_leaves=20,
)


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Counted(dict):
    """An object of a schema that counts how often it is looked into."""

    looks = 0

    def get(self, key, default=None):
        Counted.looks += 1
        return super().get(key, default)


def counted(schema):
    return json.loads(json.dumps(schema), object_pairs_hook=Counted)


def looks(schema, *names):
    types = ToolTypes([tool("f", counted(schema))])
    Counted.looks = 0
    found = [types.of("f", name) for name in names]
    return Counted.looks, found


@pytest.mark.parametrize("width", [10, 60])
def test_each_place_of_a_schema_is_visited_once_however_often_it_is_named(width):
    schema = {
        "properties": {"p": {"$ref": "#/x"}, "q": {"$ref": "#/x"}},
        "x": {"anyOf": [{"$ref": "#/x"}] * width + [{"type": "integer"}]},
    }
    num_looks, found = looks(schema, "p", "q", "p")
    assert found == [{"integer"}] * 3
    assert num_looks <= 10 * width


def test_the_parameters_of_one_tool_share_the_work():
    names = [f"p{number}" for number in range(50)]
    schema = {
        "properties": {name: {"$ref": "#/x"} for name in names},
        "x": {"anyOf": [{"const": number} for number in range(50)]},
    }
    num_looks, found = looks(schema, *names)
    assert found == [{"integer"}] * 50
    assert num_looks <= 10 * 100


def test_types_are_found_at_any_depth_and_in_circles():
    schema = {
        "properties": {"p": {"anyOf": [{"$ref": "#/a"}, {"type": "null"}]}},
        "a": {"$ref": "#/b"},
        "b": {"oneOf": [{"$ref": "#/a"}, {"allOf": [{"enum": [1]}, {"type": ["boolean", "made-up"]}]}]},
    }
    assert looks(schema, "p")[1] == [{"null", "integer", "boolean", "any"}]


@settings(max_examples=worth(300), deadline=None)
@given(json_values, json_values)
def test_any_json_is_a_schema_whose_types_can_be_asked_for(parameters, described):
    types = ToolTypes([tool("f", parameters), tool("g", {"properties": {"p": described}, "x": parameters})])
    for name in ("f", "g"):
        assert types.of(name, "p")


@settings(max_examples=worth(300), deadline=None)
@given(strategies.dictionaries(keywords, json_values), strategies.dictionaries(keywords, json_values))
def test_any_object_is_a_schema_of_calls_or_is_refused_by_the_name_of_its_tool(first, second):
    tools = [tool("first", first), tool("second", second)]
    assert calls_schema(tools, {"function": {"name": "first"}}) == (first or {"type": "object", "properties": {}})
    try:
        schema = calls_schema(tools, "required")
    except ValueError as error:
        assert "'first'" in str(error) or "'second'" in str(error)
    else:
        assert json.dumps(schema["items"])


@pytest.mark.parametrize("definitions", [[1], 5, "x", None])
@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_definitions_that_are_no_object_are_refused_by_name(key, definitions):
    with pytest.raises(ValueError, match=r"the parameters of 'second': \S+ must be an object, not"):
        calls_schema([tool("first", {}), tool("second", {key: definitions})], "required")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("x", "x"),
        (' "x" ', "x"),
        ("'x", "x"),
        ('"x" string="true"', "x"),
        ('"x"y', '"x"y'),
        ('string="true"', 'string="true"'),
        (" " * 20_000 + '"x"y', '"x"y'),
        ("a " * 20_000 + "'y'z", "a " * 20_000 + "'y'z"),
    ],
)
def test_a_parameters_name_may_be_in_quotes_and_takes_no_backtracking(key, name):
    text = f"<tool_call>\n<function=f>\n<parameter={key}>1</parameter></function></tool_call>"
    found = parsed(calls_of(read(answer_parser("qwen3_coder", "", [tool("f", {})]), text)))
    assert found == [("f", {name: "1"})]

"""Values of JSON schemas that the mocker makes up: right, about as long as asked, refused by name, in bounded time."""

import contextlib
import datetime
import enum
import ipaddress
import json
import tracemalloc
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.fit import json_tokens
from tests.support.calls import at_most
from tests.support.examples import worth
from tests.support.schemas import ANYTHING, MISTYPED, SATISFIABLE, value_of, writers

TOKENIZERS = st.sampled_from(["bytes", "byte-level", "pieces"])
TARGETS = st.integers(1, 200)
QUICKLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def validator(raw):
    return jsonschema.Draft202012Validator(raw)


@QUICKLY
@given(SATISFIABLE, st.integers(0, 2**64 - 1), TARGETS, TOKENIZERS)
def test_a_value_fits_its_schema(raw, seed, target, tokenizer):
    value, _ = value_of(raw, seed, target, tokenizer)
    validator(raw).validate(value)


@settings(QUICKLY, max_examples=worth(300))
@given(ANYTHING, st.integers(0, 2**64 - 1), TARGETS)
@example({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, 0, 9)
@example({"oneOf": [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}]}, 3, 200)
@example({"allOf": [{"properties": {"a": True}, "additionalProperties": False}, {"required": ["b"]}]}, 3, 20)
def test_keywords_in_any_combination_are_honoured_or_refused(raw, seed, target):
    try:
        value, _ = value_of(raw, seed, target)
    except FormError:
        assume(False)
    try:
        validator(raw).check_schema(raw)  # in one that is not, what is wrong may be left out
        valid = validator(raw).is_valid(value)
    except (jsonschema.SchemaError, RecursionError, jsonschema.exceptions._WrappedReferencingError):
        assume(False)
    assert valid, value


@settings(QUICKLY, max_examples=worth(500))
@given(MISTYPED, st.integers(0, 2**64 - 1), TARGETS)
@example({"type": "string", "format": ["date"]}, 0, 20)
@example({"const": "x", "pattern": None}, 0, 20)
@example({"minItems": 1e308}, 0, 20)
@example({"multipleOf": 1e308}, 0, 20)
@example({"const": 1e308, "multipleOf": 1e-300}, 0, 20)
@example({"minimum": 2**70}, 0, 20)
@example({"required": [[1]], "const": {"a": 1}}, 0, 20)
def test_a_keyword_of_the_wrong_type_is_refused_or_honoured_and_breaks_nothing(raw, seed, target):
    with contextlib.suppress(FormError):
        value_of(raw, seed, target)


@QUICKLY
@given(SATISFIABLE, st.integers(0, 2**64 - 1), TARGETS, TOKENIZERS)
def test_a_value_is_a_function_of_schema_seed_and_length(raw, seed, target, tokenizer):
    writer = writers()[tokenizer]
    assert json_tokens(raw, seed, target, writer) == json_tokens(raw, seed, target, writer)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Step(pydantic.BaseModel):
    explanation: str
    output: str


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=1, le=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, pydantic.StringConstraints(min_length=2, max_length=12)]


class Node(pydantic.BaseModel):
    value: int
    left: "Node | None" = None
    children: "list[Node]" = []


class Everything(pydantic.BaseModel):
    steps: list[Step]
    colour: Colour
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    pets: list[Cat | Dog] = []
    tree: Node
    nickname: str | None
    score: Annotated[float, pydantic.Field(gt=0, lt=1)]
    pair: tuple[int, str]
    labels: dict[str, int]
    by_colour: dict[Colour, float]
    unique: Annotated[set[int], pydantic.Field(min_length=2)]
    when: datetime.datetime
    day: datetime.date
    at: datetime.time
    lasts: datetime.timedelta
    id: uuid.UUID
    address: ipaddress.IPv4Address
    home: pydantic.AnyUrl
    code: Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Z]{3}-\d{2,4}$")]
    anything: Any
    empty: None = None


@pytest.mark.parametrize("tokenizer", ["bytes", "byte-level", "pieces"])
@pytest.mark.parametrize("model", [Everything, Node, Step, Cat])
@pytest.mark.parametrize("target", [1, 300, 900])
def test_pydantic_reads_its_own_models_back(model, target, tokenizer):
    for seed in range(10):
        for mode in ("validation", "serialization"):
            value, _ = value_of(model.model_json_schema(mode=mode), seed, target, tokenizer)
            model.model_validate(value)


@pytest.mark.parametrize("tokenizer", ["bytes", "byte-level", "pieces"])
@pytest.mark.parametrize("target", [40, 100, 271, 1000])
@pytest.mark.parametrize(
    "raw",
    [
        {"type": "object"},
        Step.model_json_schema(),
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": Step.model_json_schema()},
        {"type": "object", "additionalProperties": {"type": "number"}},
        {"type": "string"},
    ],
)
def test_an_answer_is_nearly_as_long_as_asked_and_no_longer(raw, target, tokenizer):
    for seed in range(5):
        _, count = value_of(raw, seed, target, tokenizer)
        assert 0.85 * target - 10 <= count <= target


def test_the_shortest_value_is_made_if_even_that_is_too_long():
    raw = {"type": "object", "properties": {"a": {"const": "x" * 30}, "b": {"type": "string"}}, "required": ["a"]}
    assert value_of(raw, 0, 5)[0] == {"a": "x" * 30}


@pytest.mark.parametrize("type", ["integer", "number"])
@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 1e300},
        {"maximum": -1e300},
        {"minimum": 1.797e308},
        {"minimum": 2**63 - 1},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"exclusiveMinimum": 2**60},
        {"exclusiveMinimum": 1e17},
        {"exclusiveMinimum": 1e300},
        {"exclusiveMinimum": 1.797e308},
        {"minimum": 1e300, "maximum": 1e300},
        {"minimum": -1e308, "maximum": 1e308},
    ],
)
def test_extreme_numbers_fit_as_whole_numbers_and_as_floats(type, bounds):
    for raw in ({"type": type} | bounds, {"oneOf": [{"type": "null"}, {"type": type} | bounds]}):
        for seed in range(5):
            value, _ = value_of(raw, seed, 20)
            validator(raw).validate(value)
            validator(raw).validate(None if value is None else float(value))


class Line(pydantic.BaseModel):
    sku: str
    price: float


class Order(pydantic.BaseModel):
    customer: str
    lines: list[Line]
    tags: list[str] = []
    note: str | None = None


@pytest.mark.parametrize("tokenizer", ["bytes", "byte-level", "pieces"])
def test_a_value_with_room_has_elements_and_optional_properties_and_texts_of_words(tokenizer):
    orders = [Order(**value_of(Order.model_json_schema(), seed, 300, tokenizer)[0]) for seed in range(20)]
    assert all(1 <= len(order.lines) <= 3 for order in orders)
    assert sum(bool(order.tags) for order in orders) >= 14
    for order in orders:
        texts = [order.customer, *order.tags, *(line.sku for line in order.lines)]
        assert all(text == " ".join(text.split()) for text in texts)
        assert sum(len(text) > 30 for text in texts) <= 2  # what is padded


def test_free_texts_are_words():
    text = value_of({"type": "string"}, 1, 60)[0]
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
    assert " " in text


def test_an_object_without_properties_is_an_object_with_some_and_one_with_none_stays_empty():
    assert len(value_of({"type": "object"}, 0, 60)[0]) >= 1
    assert value_of({"type": "object", "properties": {}}, 0, 60)[0] == {}


def test_what_differs_between_prompts_is_drawn_from_the_seed():
    raw = Everything.model_json_schema()
    assert len({json.dumps(value_of(raw, seed, 300)[0]) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"not": {"type": "string"}}, '#: "not" is not supported'),
        ({"properties": {"a": {"if": {}}}, "required": ["a"]}, '#/properties/a: "if" is not supported'),
        ({"type": "object", "patternProperties": {"^a": {}}}, '"patternProperties" is not supported'),
        ({"type": "string", "pattern": "(?<=a)b"}, "lookbehind is not supported"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreference is not supported"),
        ({"type": "string", "pattern": "("}, "is not understood"),
        ({"$ref": "https://example.com/schema"}, "#: \"$ref\" 'https://example.com/schema' is not supported"),
        ({"$ref": "#/$defs/none"}, "refers to nothing"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number within its bounds"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, '"minLength" is 3 and "maxLength" is 2'),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "allows no type"),
        ({"enum": [1, 2], "type": "string"}, "no value of its enum fits"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 3}, "no 3 elements that differ"),
        ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "fits only one branch"),
        ({"properties": {"self": {"$ref": "#"}}, "required": ["self"]}, "contains itself without end"),
        ({"type": "nothing"}, "#: \"type\" 'nothing' is unknown"),
        (False, "#: nothing is allowed"),
        ([], "a schema was expected"),
        ({"type": "string", "minLength": "3"}, "\"minLength\" is '3'; a whole number was expected"),
        ({"type": "array", "minItems": 1.5}, '"minItems" is 1.5; a whole number was expected'),
        ({"type": "array", "minItems": 1e308}, '"minItems" is 1e+308; a whole number was expected'),
        ({"type": "array", "minItems": 5000}, '"minItems" is 5,000; the mocker makes at most 4,000 values'),
        ({"type": "string", "format": ["date"]}, '"format" is an array; a text was expected'),
        ({"type": "object", "required": ["a", [1]]}, "\"required\" is ['a', [1]]; a list of names was expected"),
        ({"const": "x", "pattern": None}, '"pattern" is null; a text was expected'),
        (
            {"properties": {"a/b": {"items": {"anyOf": [{"not": {}}]}, "minItems": 1}}, "required": ["a/b"]},
            '#/properties/a~1b/items/anyOf/0: "not" is not supported by the mocker',
        ),
        ({"properties": {"a": {"required": [1]}}, "required": ["a"]}, '#/properties/a: "required" is [1]; a list'),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(raw, message):
    with pytest.raises(FormError) as found:
        value_of(raw, 0, 50)
    assert message in str(found.value)


def test_what_cannot_be_honoured_is_left_out_where_the_schema_allows_it():
    raw = {"anyOf": [{"not": {}}, {"type": "null"}]}
    assert value_of(raw, 0, 50)[0] is None
    raw = {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "required": ["b"]}
    assert value_of(raw, 0, 50)[0] == {"b": 1}


def deep(count):
    raw = {"type": "integer"}
    for _ in range(count):
        raw = {"properties": {"a": raw}, "required": ["a"]}
    return raw


def doubling(keyword, count):
    defs = {f"d{place}": {keyword: [{"$ref": f"#/$defs/d{place + 1}"}] * 2} for place in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "integer"}}}


def many(items, count):
    return {"type": "array", "minItems": count, "items": items}


def nested(count):
    value = 1
    for _ in range(count):
        value = [value]
    return value


HOSTILE = {
    "deep constants": many({"enum": [nested(600)]}, 1) | {"uniqueItems": True},
    "long texts of a pattern": many({"type": "string", "pattern": "^(a|b)*$", "minLength": 60_000}, 1500),
    "long constants": many({"const": "x" * 200_000}, 1500),
    "numbers that floats miss": {
        "type": "object",
        "properties": {
            f"p{n}": {"allOf": [{"multipleOf": 0.1 + n / 1000}, {"multipleOf": 0.3}], "type": "number", "minimum": 1e17}
            for n in range(1000)
        },
        "required": [f"p{n}" for n in range(1000)],
    },
    "many long patterns": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "pattern": f"{n}[a-f]" + "ab" * 2000} for n in range(100)},
        "required": [f"p{n}" for n in range(100)],
    },
    "many values": {"type": "array", "minItems": 10**6},
    "a long text": {"type": "string", "minLength": 10**9},
    "deep": deep(400),
    "a doubling oneOf": doubling("oneOf", 60),
    "a long repeat": {"type": "string", "pattern": "(a{9999}){9999}"},
    "an empty repeat": {"type": "string", "pattern": "((a?){4000}){4000}"},
    "slow to match": {"type": "string", "pattern": "^(?!((a*)*)*$)a{3000}$"},
    "groups": {"type": "string", "pattern": "(" * 3000 + ")" * 3000},
    "a wide object": {
        "type": "object",
        "properties": {f"p{n}": {"type": "integer", "minimum": n} for n in range(9000)},
    },
    "distinct values": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 500},
    "a long reference in each branch": {
        "$defs": {"A" * 30_000: {"type": "string"}},
        "x": {"$ref": "#/$defs/" + "%41" * 30_000},
        "oneOf": [{"$ref": "#/x", "title": str(place)} for place in range(1_900)],
    },
    "many required names": {"type": "object", "required": [f"a{place}" for place in range(28_000)]},
    "long texts of an enum": many({"enum": ["x" * 100_000, "y" * 100_000]}, 1900),
    "a long name in each element": many(
        {"type": "object", "properties": {"k" * 100_000: {"type": "null"}}, "required": ["k" * 100_000]}, 1000
    ),
    "a wide oneOf": {"oneOf": [True] * 13_000},
    "nested unions": {"oneOf": [{"oneOf": [{"oneOf": [{"type": "string"}] * 9}] * 9}] * 9},
    "wide recursion": {
        "type": "object",
        "properties": {name: {"$ref": "#"} for name in "abcdefgh"},
        "required": list("abcdefgh"),
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_in_bounded_work(name):
    writer = writers()["bytes"]
    with pytest.raises(FormError), at_most(3_000_000):
        json_tokens(HOSTILE[name], 0, 1000, writer)


def test_a_large_constant_is_compared_few_times():
    branches = [{"$ref": "#/$defs/c"}] * 1500
    raw = {"$defs": {"c": {"const": list(range(30_000))}}, "oneOf": [*branches, {"type": "string"}]}
    with at_most(3_000_000):
        assert isinstance(value_of(raw, 5, 100)[0], str)
    with pytest.raises(FormError), at_most(3_000_000):
        value_of({"$defs": raw["$defs"], "oneOf": branches}, 5, 100)


def test_the_branches_of_a_oneof_are_not_copied_for_each_of_them():
    writer = writers()["bytes"]
    tracemalloc.start()
    try:
        for count in (1_900, 13_000):
            with pytest.raises(FormError):
                json_tokens({"oneOf": [True] * count}, 0, 20, writer)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5_000_000


LARGE = {
    "long texts": many({"type": "string", "minLength": 60_000}, 120),
    "long texts in properties": {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "minLength": 20_000} for n in range(100)},
        "required": [f"p{n}" for n in range(100)],
    },
    "long texts of one branch": {
        "oneOf": [many({"type": "string", "minLength": 60_000}, 120), {"type": "string", "minLength": 60_000}]
    },
    "long texts that differ": many({"type": "string", "minLength": 60_000}, 120) | {"uniqueItems": True},
}


@pytest.mark.parametrize("name", LARGE)
def test_of_a_value_that_is_cut_off_only_the_start_is_made(name):
    raw, writer = LARGE[name], writers()["bytes"]
    with at_most(40_000):
        cut = json_tokens(raw, 2, 20, writer, enough=20)
    assert len(cut) >= 20
    assert json_tokens(raw, 2, 20, writer, enough=40)[:20] == cut[:20]
    with at_most(6_000_000), contextlib.suppress(FormError):
        json_tokens(raw, 2, 20, writer)


def test_a_short_value_is_whole_however_little_is_wanted_of_it():
    raw = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    writer = writers()["bytes"]
    assert json.loads(writer.text(json_tokens(raw, 0, 5, writer, enough=40))).keys() == {"a"}


def test_a_schema_that_only_refers_to_itself_says_nothing():
    assert value_of({"$ref": "#"}, 0, 10)[1] <= 10


def test_a_value_is_found_among_more_combinations_than_could_be_tried():
    raw = {"allOf": [{"anyOf": [{"title": f"{n}a"}, {"title": f"{n}b"}]} for n in range(40)], "type": "integer"}
    assert isinstance(value_of(raw, 0, 10)[0], int)


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_schemas_that_double_at_each_step_are_understood_once(keyword):
    value, _ = value_of(doubling(keyword, 25), 0, 100)
    assert isinstance(value, int)


def test_very_many_tokens_of_numbers_are_cut_short_rather_than_made_without_end():
    value, count = value_of({"type": "array", "items": {"type": "integer"}}, 0, 100_000)
    assert 1000 < len(value) <= 2500
    assert count < 10_000


def test_very_many_tokens_of_text_are_made():
    _, count = value_of({"type": "string"}, 0, 100_000)
    assert count == 100_000

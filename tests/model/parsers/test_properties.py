"""What holds for every format."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings, strategies

from serving.model.parsers import REASONING_PARSERS, answer_parser, required_calls_parser, write_calls
from serving.model.parsers.formats import CALLS
from serving.model.parsers.harmony import Harmony
from serving.model.parsers.tag_calls import TagCalls
from serving.model.parts import CallStart
from tests.model.parsers.texts import (
    CALLS as WRITTEN,
)
from tests.model.parsers.texts import (
    FORMATS,
    TOOLS,
    arguments,
    calls,
    calls_of,
    content_of,
    cut,
    fragments,
    parsed,
    read,
    reasoning_of,
    safe_texts,
)
from tests.support.examples import worth

places = strategies.lists(strategies.integers(0, 400))
quickly = settings(max_examples=worth(30), deadline=None)


@pytest.mark.parametrize("name", FORMATS)
@quickly
@given(strategies.data())
def test_what_a_model_writes_is_read_back(name, data):
    made, prose = data.draw(calls), data.draw(safe_texts.filter(lambda text: "{" not in text))
    prose = "" if name == "openai" else prose
    text = prose + write_calls(name, made)
    parts = read(answer_parser(name, "", TOOLS), *cut(text, data.draw(places)))
    assert parsed(calls_of(parts)) == parsed(made)
    assert content_of(parts) == (prose if prose.strip() else "")


@pytest.mark.parametrize(
    ("name", "reasoning"), [*zip(FORMATS, itertools.cycle([""])), ("qwen3_coder", "qwen3"), ("mistral", "mistral")]
)
@quickly
@given(strategies.data())
def test_parts_do_not_depend_on_how_the_text_was_cut(name, reasoning, data):
    text = data.draw(fragments(name))
    whole = read(answer_parser(name, reasoning, TOOLS), text)
    assert read(answer_parser(name, reasoning, TOOLS), *cut(text, data.draw(places))) == whole
    assert read(answer_parser(name, reasoning, TOOLS), *text) == whole


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openai"])  # drops markers between messages
@quickly
@given(strategies.data())
def test_a_text_without_a_call_is_content_as_it_is(name, data):
    text = data.draw(fragments(name))
    parts = read(answer_parser(name, "", TOOLS), text)
    if not any(isinstance(part, CallStart) for part in parts):
        assert content_of(parts) == text


@pytest.mark.parametrize("name", FORMATS)
@quickly
@given(strategies.data())
def test_a_call_that_is_cut_off_has_the_arguments_so_far(name, data):
    text = write_calls(name, [("look_up", data.draw(arguments))])
    whole = calls_of(read(answer_parser(name, "", TOOLS), text))
    text = text[: data.draw(strategies.integers(0, len(text)))]
    found = calls_of(read(answer_parser(name, "", TOOLS), text))
    assert [function for function, _ in found] in ([], ["look_up"])
    # Values between tags are strings if they are cut off; half a marker of Harmony's is part of what precedes it.
    if found and not isinstance(CALLS[name], TagCalls | Harmony):
        assert whole[0][1].startswith(found[0][1])


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_calls_stay_text(name):
    text = write_calls(name, [("look_up", "{}")])
    parts = read(answer_parser(name, "", ()), text)
    assert calls_of(parts) == []
    assert name == "openai" or content_of(parts) == text


@pytest.mark.parametrize("name", [name for name in REASONING_PARSERS if name != "openai_gptoss"])
@quickly
@given(
    strategies.text(),
    strategies.lists(strategies.sampled_from(["<think>", "</think>", "</", "think>", "\n", "[THINK]", "[/THINK]"])),
    places,
)
def test_reasoning_does_not_depend_on_how_the_text_was_cut(name, text, markers, cuts):
    text = "".join(markers) + text
    whole = read(answer_parser("", name), text)
    assert read(answer_parser("", name), *cut(text, cuts)) == whole


@quickly
@given(calls, places)
def test_required_calls_are_read_back(made, cuts):
    text = "[" + ", ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in made) + "]"
    parts = read(required_calls_parser("required"), *cut(text, cuts))
    assert calls_of(parts) == made
    assert content_of(parts) == reasoning_of(parts) == ""


HALVES = ["\\ud800", "\\udc00", "\\ud800x\\udc00"]
"""Halves of surrogate pairs, as models may escape them: no text can hold one of them alone."""


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_part_can_be_encoded_wherever_a_model_writes_half_a_surrogate_pair(name, half):
    text = write_calls(name, WRITTEN)
    for place in range(len(text)):
        msgspec.json.encode(read(answer_parser(name, "", TOOLS), text[:place] + half + text[place:]))


@pytest.mark.parametrize("half", HALVES)
def test_every_part_of_a_required_call_can_be_encoded(half):
    text = '[{"name": "look_up", "parameters": "{\\"text\\": \\"a\\"}"}]'
    for place in range(len(text)):
        msgspec.json.encode(read(required_calls_parser("required"), text[:place] + half + text[place:]))


@pytest.mark.parametrize("name", FORMATS)
@quickly
@given(strategies.data())
def test_every_part_of_any_text_can_be_encoded(name, data):
    text = data.draw(fragments(name, *HALVES))
    msgspec.json.encode(read(answer_parser(name, "", TOOLS), text))


def test_halves_of_a_surrogate_pair_become_one_character_and_single_ones_the_replacement():
    written = '[look_up(text="\\ud83d\\ude00 \\ud83d", list=["\\ude00"])]'
    assert parsed(calls_of(read(answer_parser("pythonic", "", TOOLS), written))) == [
        ("look_up", {"text": "\U0001f600 \ufffd", "list": ["\ufffd"]})
    ]

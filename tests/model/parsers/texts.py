"""Texts for parsers, and what parsers make of them."""

import itertools
import json

from hypothesis import strategies

from serving.model.parsers import TOOL_CALL_PARSERS, visible_tokens, write_calls
from serving.model.parts import Arguments, CallStart, Content, Reasoning

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "list": {"type": "array"},
    "object": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look_up", "files.write", "other_1")
]

safe_texts = strategies.text(strategies.characters(codec="utf-8", exclude_characters="<[｜\r")).filter(
    lambda text: text == text.strip("\n")
)
values = {
    "text": safe_texts,
    "count": strategies.integers(),
    "ratio": strategies.floats(allow_nan=False, allow_infinity=False),
    "flag": strategies.booleans(),
    "nothing": strategies.none(),
    "list": strategies.lists(safe_texts | strategies.integers(), max_size=3),
    "object": strategies.dictionaries(safe_texts, strategies.none() | strategies.booleans() | safe_texts, max_size=3),
}
arguments = strategies.fixed_dictionaries({}, optional=values).map(lambda found: json.dumps(found, ensure_ascii=False))
calls = strategies.lists(
    strategies.tuples(strategies.sampled_from(["look_up", "files.write", "other_1"]), arguments), min_size=1
)

CALLS = [("look_up", '{"text": "a\\n\\"b\\"", "count": 3, "list": [1, {"x": null}]}'), ("files.write", "{}")]


def fragments(name, *more):
    """Return texts of pieces of a format's markers and calls, in any order, with more pieces among them."""
    whole = write_calls(name, CALLS)
    tokens = sorted(visible_tokens(name, ""))
    pieces = [
        *tokens,
        *whole.split(),
        whole,
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        " ",
        "\n",
        "a",
        "\\",
        "name",
        "\0",
        *more,
    ]
    cuts = strategies.tuples(strategies.integers(0, len(whole)), strategies.integers(0, len(whole)))
    parts = strategies.sampled_from(pieces) | cuts.map(lambda ends: whole[min(ends) : max(ends)])
    return strategies.lists(parts, max_size=12).map("".join)


def cut(text, places):
    """Return the pieces of a text between places in it."""
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def read(parser, *pieces):
    """Return an answer's parts, neighbours of one kind as one."""
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.end()
    merged = []
    for part in parts:
        if merged and type(part) is type(merged[-1]) and not isinstance(part, CallStart):
            merged[-1] = type(part)(merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def calls_of(parts):
    """Return the names and arguments of an answer's calls."""
    found = []
    for part in parts:
        if isinstance(part, CallStart):
            found.append((part.name, ""))
        elif isinstance(part, Arguments):
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return found


def parsed(found):
    """Return calls with their arguments read."""
    return [(name, json.loads(text)) for name, text in found]


def content_of(parts):
    """Return an answer's content."""
    return "".join(part.text for part in parts if isinstance(part, Content))


def reasoning_of(parts):
    """Return an answer's reasoning."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


FORMATS = sorted(TOOL_CALL_PARSERS)

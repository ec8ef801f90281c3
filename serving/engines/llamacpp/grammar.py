"""Grammars for llama.cpp, in its GBNF: from JSON schemas, regular expressions and lists of texts.

JSON schemas are converted by llama-cpp-python, which passes over what it does not know. An answer could then break its
schema, so such a schema is refused.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

from serving.engines.guided import Guide
from serving.engines.parsed_regex import operation, parsed, repetitions

MAX_NESTING = 256
"""llama.cpp reads nested groups by recursion: thousands would end its process."""

MAX_PATTERN = 16_384
"""Characters of a regular expression: Python's parser takes time that grows with the square of what branches share."""

NOTES = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "readOnly",
    "title", "writeOnly",
}  # fmt: skip
FORMATS = {"date", "date-time", "time", "uuid"}
FORMS = (
    {"$ref"},
    {"anyOf"},
    {"oneOf"},
    {"type", "const"},
    {"type", "enum"},
    {"type", "properties", "required", "additionalProperties"},
    {"type", "items", "minItems", "maxItems"},
    {"type", "pattern"},
    {"type", "format"},
    {"type", "minLength", "maxLength"},
)
"""Keywords that the converter honours together."""

TEXT, PRINTABLE = r'[^"\\]', r'[^"\\\x00-\x1F\x7F]'
CATEGORIES = {"DIGIT": "0-9", "SPACE": r" \t\n\r\x0B\x0C", "WORD": "a-zA-Z0-9_"}


def gbnf(guide: Guide) -> str:
    """Return the grammar of the answers that are wanted.

    Raises:
        ValueError: there is none.
    """
    match guide.kind:
        case "json":
            grammar = _of_schema(guide.value)
        case "regex":
            grammar = f"root ::= {_of_regex(guide.value)}"
        case "choice":
            grammar = "root ::= " + " | ".join(f'"{_characters(text)}"' for text in guide.value)
        case _:
            grammar = guide.value
    if _nesting(grammar) > MAX_NESTING:
        raise ValueError(f"it has more than {MAX_NESTING} groups inside each other")
    return grammar


def _of_schema(schema: Any) -> str:
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):  # type: ignore[misc]
        def _format_literal(self, literal: str) -> str:
            # Its own lets llama.cpp take JSON's escapes for those of a grammar.
            return f'"{_characters(literal)}"'

    converter = Converter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    try:
        _check(schema)
        converter.visit(converter.resolve_refs(json.loads(json.dumps(schema)), "schema"), "")
        # Its texts may contain what JSON wants escaped.
        return str(converter.format_grammar()).replace(TEXT, PRINTABLE)
    except (AssertionError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"llama.cpp cannot convert this schema: {error}") from error


def _check(schema: Any) -> None:
    """Refuse keywords that the converter would pass over."""
    if not isinstance(schema, dict):
        raise TypeError(f"{schema!r} is not an object")
    words = schema.keys() - NOTES
    if schema.get("format") not in FORMATS:
        words -= {"format"}  # JSON Schema asks nobody to check formats
    if not any(words <= form for form in FORMS) or (isinstance(schema.get("type"), list) and len(words) > 1):
        raise ValueError(f"llama.cpp cannot convert a schema with {', '.join(sorted(words))} together")
    if missing := set(schema.get("required", ())) - schema.get("properties", {}).keys():
        raise ValueError(f"{', '.join(sorted(missing))} of `required` is not among `properties`")
    for below in _below(schema):
        _check(below)


def _below(schema: dict[str, Any]) -> Iterable[Any]:
    for word in ("properties", "$defs", "definitions"):
        yield from schema.get(word, {}).values()
    for word in ("anyOf", "oneOf"):
        yield from schema.get(word, ())
    if "items" in schema:
        yield schema["items"]
    if isinstance(more := schema.get("additionalProperties"), dict):
        yield more


def _of_regex(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a regular expression of {len(pattern)} characters; at most {MAX_PATTERN} are supported")
    try:
        return _sequence(_without_anchors(pattern))
    except RecursionError as error:
        raise ValueError("not a regular expression: nested too deeply") from error


def _without_anchors(pattern: str) -> list[Any]:
    """Return the parts of a pattern but for the anchors at its ends: a whole answer is matched."""
    try:
        parts, flags = parsed(pattern)
    except ValueError as error:
        raise ValueError(f"not a regular expression: {error}") from error
    if flags:
        raise ValueError("flags in a regular expression are not supported")
    if parts and operation(parts[0]) == "AT" and str(parts[0][1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        del parts[0]
    if parts and operation(parts[-1]) == "AT" and str(parts[-1][1]) in ("AT_END", "AT_END_STRING"):
        del parts[-1]
    return parts


def _sequence(parts: Iterable[Any]) -> str:
    return " ".join(map(_part, parts)) or '""'


def _part(part: Any) -> str:
    name, value = operation(part), part[1]
    match name:
        case "LITERAL":
            return f'"{_character(value)}"'
        case "NOT_LITERAL":
            return f"[^{_character(value)}]"
        case "ANY":
            return r"[^\x0A]"
        case "IN":
            return _class(value)
        case "BRANCH":
            return f"({' | '.join(map(_sequence, value[1]))})"
        case "SUBPATTERN" if not value[1] and not value[2]:
            return f"({_sequence(value[3])})"
        case "MAX_REPEAT" | "MIN_REPEAT":  # the same texts match, whichever is tried first
            least, most = repetitions(value)
            limit = "" if most == math.inf else most
            return f"({_sequence(value[2])}){{{least},{limit}}}"
    raise ValueError(f"{name.lower()} in a regular expression is not supported")


def _class(items: list[Any]) -> str:
    is_negated = operation(items[0]) == "NEGATE"
    body = ""
    for item in items[is_negated:]:
        match operation(item), item[1]:
            case "LITERAL", code:
                body += _character(code)
            case "RANGE", (first, last):
                body += f"{_character(first)}-{_character(last)}"
            case "CATEGORY", category if (word := str(category).removeprefix("CATEGORY_")) in CATEGORIES:
                body += CATEGORIES[word]
            case "CATEGORY", category if len(items) == 1:
                return f"[^{CATEGORIES[str(category).removeprefix('CATEGORY_NOT_')]}]"
            case kind, _:
                raise ValueError(f"{kind.lower()} beside others in [] is not supported")
    return f"[{'^' if is_negated else ''}{body}]"


def _characters(text: str) -> str:
    return "".join(_character(ord(character)) for character in text)


def _character(code: int) -> str:
    """Return a character as GBNF has it in texts and classes."""
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02X}" if code < 0x80 else f"\\U{code:08X}"


def _nesting(grammar: str) -> int:
    depth = deepest = 0
    for character in grammar:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest

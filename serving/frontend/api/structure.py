"""What an answer must look like: one constraint for engines, whichever of OpenAI's, vLLM's and SGLang's forms asks for it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import OpenAiRequest
from serving.frontend.api.plain import check_plain
from serving.model.constraints import CONSTRAINTS

MAX_BYTES = 1 << 18
"""Maximum size of a constraint as JSON."""

MAX_CHOICES = 4096
ANY_OBJECT = {"type": "object"}
FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Fields that are a constraint themselves."""


class Constraint(NamedTuple):
    """What an answer must look like."""

    field: str
    """The field of the request that says so."""
    kind: str
    """One of `CONSTRAINTS`."""
    value: Any
    """A JSON schema, a regular expression, a list of texts, or a grammar in EBNF."""


def constraint(request: OpenAiRequest) -> Constraint | None:
    """Return what a request's answer must look like, None if it may look like anything.

    Raises:
        ApiError: it asks for several things at once, or for something that does not exist.
    """
    found = list(_asked(request))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(each.field for each in found)
        raise ApiError(400, f"expected one constraint on the answer, not {names}", param=found[1].field)
    [(field, kind, value)] = found
    value = _checked(field, kind, value)
    check_plain(value, field)
    if len(msgspec.json.encode(value)) > MAX_BYTES:
        raise ApiError(400, f"{field} may have at most {MAX_BYTES:,} bytes", param=field)
    return Constraint(field, kind, value)


def _asked(request: OpenAiRequest) -> Iterator[Constraint]:
    """Yield each constraint of a request; an empty value asks for none, like null."""
    if request.response_format:
        yield from _from_response_format(request.response_format)
    if request.structured_outputs:
        yield from _from_structured_outputs(request.structured_outputs)
    for name, kind in FIELDS.items():
        if value := getattr(request, name):
            yield Constraint(name, kind, value)


def _from_response_format(form: Any) -> Iterator[Constraint]:
    name = "response_format"
    _check_object(name, form)
    match form.get("type"):
        case "text":
            return
        case "json_object":
            yield Constraint(name, "json", ANY_OBJECT)
        case "json_schema":
            named = form.get("json_schema")
            if not isinstance(named, dict) or named.get("schema") is None:
                raise ApiError(400, f"{name}: expected json_schema: {{name, schema}}", param=name)
            yield Constraint(name, "json", named["schema"])
        case other:
            raise ApiError(400, f"{name}: expected text, json_object or json_schema, not {other!r:.100}", param=name)


def _from_structured_outputs(form: Any) -> Iterator[Constraint]:
    name = "structured_outputs"
    _check_object(name, form)
    for key, value in form.items():
        if not value:
            continue
        if key == "json_object":
            yield Constraint(name, "json", ANY_OBJECT)
        elif key in CONSTRAINTS:
            yield Constraint(name, key, value)
        else:
            raise ApiError(
                400, f"{name}: {key[:100]} is not supported; expected one of {', '.join(CONSTRAINTS)}", param=name
            )


def _check_object(name: str, form: Any) -> None:
    if not isinstance(form, dict):
        raise ApiError(400, f"{name}: expected an object", param=name)


def _checked(name: str, kind: str, value: Any) -> Any:
    """Return a constraint's value: a schema may come as JSON."""
    if kind == "json" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"{name}: the schema is not JSON: {error}", param=name) from error
    if kind == "json" and not isinstance(value, dict):
        raise ApiError(400, f"{name}: expected a JSON schema, an object", param=name)
    if kind in ("regex", "grammar") and not (isinstance(value, str) and value):
        raise ApiError(400, f"{name}: expected a {kind}, a text", param=name)
    if kind == "choice" and not _are_choices(value):
        raise ApiError(400, f"{name}: expected 1 to {MAX_CHOICES} texts to choose from", param=name)
    return value


def _are_choices(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= MAX_CHOICES and all(isinstance(x, str) and x for x in value)

"""What a user adds to each request to another server: headers, whose values are secrets, and fields of the body."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

FROM_ENVIRONMENT = "env:"
"""Before the name of the variable that holds a header's value, so that no list of processes shows the value."""
USUAL_KEY = "OPENAI_API_KEY"
OWN_HEADERS = ("accept", "connection", "content-length", "content-type", "expect", "transfer-encoding", "upgrade")
OWN_FIELDS = {
    "model": "use --model",
    "messages": "the workload has the prompts",
    "prompt": "the workload has the prompts",
    "input": "the workload has the prompts",
    "stream": "use --no-stream",
    "max_tokens": "the workload has the lengths; scale them with --osl-scale",
    "max_completion_tokens": "the workload has the lengths; scale them with --osl-scale",
    "max_output_tokens": "the workload has the lengths; scale them with --osl-scale",
    "ignore_eos": "use --ends",
}
"""Fields of a body that the load generator sets itself, and what to do instead."""
NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


def read_headers(texts: Sequence[str]) -> dict[str, str]:
    """Read headers, each `NAME: VALUE` or `NAME: env:VARIABLE`; names become lower-case.

    Raises:
        ValueError: one is invalid, is given twice, or names a variable that is not set. No message has a value.
    """
    found: dict[str, str] = {}
    for text in texts:
        before, colon, value = text.partition(":")
        name, value = before.strip().lower(), value.strip()
        if not colon or NAME.fullmatch(name) is None:
            raise ValueError("header is not understood; expected 'NAME: VALUE', such as 'x-tenant: a'")
        if name in OWN_HEADERS:
            raise ValueError(f"header {name} is set by dynabench itself; leave it out")
        if name in found:
            raise ValueError(f"header {name} is given twice")
        if value.startswith(FROM_ENVIRONMENT):
            value = _from_environment(name, value.removeprefix(FROM_ENVIRONMENT))
        if not value or not value.isprintable():
            raise ValueError(f"header {name} must have a value of printable characters")
        found[name] = value
    return found


def _from_environment(name: str, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"header {name} is in the environment variable {variable}, which is not set")
    return value


def read_key(source: str) -> str:
    """Read an API key: from a file, from the variable of `env:NAME`, or from OPENAI_API_KEY if no source is given.

    Raises:
        ValueError: there is none. No message has a part of it.
    """
    if not source:
        return os.environ.get(USUAL_KEY, "").strip()
    if source.startswith(FROM_ENVIRONMENT):
        variable = source.removeprefix(FROM_ENVIRONMENT)
        key = os.environ.get(variable, "").strip()
        if not key:
            raise ValueError(f"api_key_file is the environment variable {variable}, which is not set")
    else:
        try:
            key = Path(source).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise ValueError(f"api_key_file {source} cannot be read: {why}") from None
    if not key or not key.isprintable() or " " in key:
        raise ValueError(f"api_key_file {source} must hold one word of printable characters")
    return key


def masked_header(text: str) -> str:
    """Return a header as it was given, without its value; the name of a variable is not secret."""
    name, _, value = text.partition(":")
    return text if value.strip().startswith(FROM_ENVIRONMENT) else f"{name}: ***"


def read_extra_body(text: str) -> dict[str, Any]:
    """Read the fields to add to each body: a JSON object, "" for none.

    Raises:
        ValueError: it is something else, or has a field that the load generator sets itself.
    """
    if not text:
        return {}
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"extra_body is {text!r}; expected a JSON object ({error})") from None
    if own := next((name for name in fields if name in OWN_FIELDS), None):
        raise ValueError(f"extra_body cannot set {own}: {OWN_FIELDS[own]}")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or "include_usage" in options:
        raise ValueError(
            f"extra_body: stream_options is {options!r}; expected an object without include_usage, which is always set, "
            'such as {"continuous_usage_stats": true}'
        )
    return fields

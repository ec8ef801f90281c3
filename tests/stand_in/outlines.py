"""The outline of an answer: what two servers with the same model must agree on, although their models say other things."""

import itertools
import json
import re
from typing import Any

import httpx

from tests.stand_in.vllm_cases import Case

EXACT = {
    "code", "completion_tokens", "cached_tokens", "finish_reason", "index", "model", "name", "object", "param",
    "prompt_tokens", "prompt_token_ids", "role", "status", "stop_reason", "stop_sequence", "total_tokens", "type",
}  # fmt: skip
"""Names of fields whose values are the same."""

OPAQUE = {"bytes", "fingerprint"}
"""Names of fields of which only the type is the same."""

IDS = re.compile(r"(cmpl|chatcmpl|resp|msg|rs|chatcmpl-tool|call)[-_](.*)", re.S)
VALIDATION = re.compile(r"\d+ validation errors?:\n")


def ask(client: httpx.Client, case: Case) -> dict[str, Any]:
    """Send a request; return the outline of its answer."""
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    headers = {"content-type": "application/json"} | case.headers
    return outline(client.request(case.method, case.path, content=content, headers=headers), case)


def outline(response: httpx.Response, case: Case) -> dict[str, Any]:
    """Return the outline of an answer."""
    kind = response.headers.get("content-type")
    found: dict[str, Any] = {"status": response.status_code, "type": kind}
    for name in ("x-request-id", "allow"):
        if (value := response.headers.get(name)) is not None:
            found[name] = value if name == "allow" or value == case.headers.get(name) else "drawn"
    if (kind or "").startswith("text/event-stream"):
        found["events"] = runs(_by_choice([_event(block, case) for block in response.text.split("\n\n") if block]))
    elif "json" in (kind or ""):
        found["body"] = tree(response.json(), case)
    else:
        found["body"] = response.text
    return found


def tree(value: Any, case: Case, name: str = "") -> Any:
    """Return the outline of a JSON value that a field of this name has."""
    match value:
        case _ if name in OPAQUE and value is not None:
            return type(value).__name__
        case _ if name in EXACT and not isinstance(value, dict):
            return value
        case dict() if name == "top_logprobs" or (value and all(key.isdigit() for key in value)):
            return {"*": tree(next(iter(value.values()), None), case)}  # how many there are depends on the model
        case dict():
            return {key: tree(entry, case, key) for key, entry in value.items()}
        case list():
            return runs([tree(entry, case, name) for entry in value])
        case str() if name == "message":
            return "validation" if VALIDATION.match(value) else "text"
        case str():
            return _text(value, name)
        case bool() | None:
            return value
        case int() | float():
            return "number"
    raise AssertionError(value)


def runs(values: list[Any]) -> list[Any]:
    """Return each value once, with the number of times that it is there in a row."""
    return [[len(list(group)), value] for value, group in itertools.groupby(values)]


def _text(value: str, name: str) -> str:
    if (found := IDS.fullmatch(value)) and name == "id":
        return f"{found[1]}-{found[2] if len(found[2]) < 12 else 'drawn'}"
    return "text"


def _by_choice(events: list[Any]) -> list[Any]:
    """Return the events of the first choice before those of the second: each engine mixes them in its own way."""

    def place(event: Any) -> int:
        choices = event.get("choices") if isinstance(event, dict) else None
        return choices[0][1]["index"] if choices else 1 << 30

    return sorted(events, key=place)


def _event(block: str, case: Case) -> Any:
    """Return the outline of a server-sent event."""
    lines = [line.partition(": ") for line in block.split("\n")]
    values = [
        value if value == "[DONE]" else tree(json.loads(value), case) for name, _, value in lines if name == "data"
    ]
    names = [value for name, _, value in lines if name == "event"]
    return {"event": names[0], "data": values[0]} if names else values[0]

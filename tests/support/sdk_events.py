"""Streams of named events, and what SDKs make of them."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Return the events' data; each is named after its type."""
    events = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def models_in(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        value = dict(value)
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from models_in(entry)

"""A turn of a conversation, as aiperf writes it: its text, when it arrives, and what it waits for."""

from typing import Any

from workloads import texts
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source


def request(source: Source, row: Row, *, history: str = "", session: str, before: int | None) -> Request:
    """Make a request from a turn of aiperf, which waits for the request `before`, if any."""
    arrival_s, after, delay_s = timing(row, before)
    return texts.request(
        source,
        row,
        text(row),
        history=history,
        arrival_s=arrival_s,
        session=session,
        after=after,
        delay_s=delay_s,
    )


def timing(row: Row, before: int | None) -> tuple[float, tuple[int, ...], float]:
    """Return when a turn arrives, what it waits for, and its delay, from `timestamp` and `delay` (ms)."""
    arrival_s = row.seconds("timestamp", default=0)
    delays = ("delay", "delay_ms")  # Dynamo allows either name
    is_scheduled = row.has("timestamp") and not any(row.has(name) for name in delays)
    if before is None or is_scheduled:
        return arrival_s, (), 0.0
    return arrival_s, (before,), row.seconds(*delays, default=0)


def text(row: Row) -> str:
    """Return the text of a turn of aiperf."""
    entries = row.values.get("texts")
    if not isinstance(entries, list):
        return row.text("text")
    parts: list[Any] = []
    for entry in entries:
        contents = entry.get("contents", []) if isinstance(entry, dict) else [entry]
        parts += contents if isinstance(contents, list) else [contents]
    if not all(isinstance(part, str) for part in parts):
        raise row.fail("texts must be a list of texts, or of objects with contents")
    return "".join(parts)

"""Mooncake's rows of sessions in which a turn holds only what it adds to the session's last prompt and answer.

An addition starts inside a block, so its blocks get new names; full blocks of the previous prompt keep theirs.
"""

from collections.abc import Iterator
from typing import Any

from workloads.formats import turns
from workloads.formats.format import Format
from workloads.formats.mooncake import refuse_waits
from workloads.request import Request
from workloads.row import MAX_TOKENS
from workloads.source import Source, first_object


def _adds_to_sessions(first: dict[str, Any] | None, start: bytes) -> bool:
    """Return whether later rows of sessions start with another id than the first; a whole prompt would start with the same."""
    if first is None or not {"session_id", "hash_ids"} <= set(first):
        return False
    firsts: dict[str, list[Any]] = {}
    for line in start.split(b"\n")[:-1]:
        row = first_object(line)
        if row is not None and isinstance(row.get("hash_ids"), list):
            firsts.setdefault(str(row.get("session_id")), []).append(row["hash_ids"][:1])
    later = [ids == begun[0] for begun in firsts.values() for ids in begun[1:]]
    return bool(later) and not any(later)


def _read(source: Source) -> Iterator[Request]:
    last: dict[str, tuple[int, Request]] = {}
    for number, row in enumerate(source.objects()):
        refuse_waits(row)
        session, length = row.text("session_id"), row.count("input_length")
        ids = source.blocks(row, length)
        before, earlier = last.get(session, (None, None))
        if earlier is not None:
            length += earlier.input_length + earlier.output_length
            if length > MAX_TOKENS:
                raise row.fail(f"the session's prompt has grown to {length:,} tokens; the limit is {MAX_TOKENS:,}")
            ids = source.namer.extended(earlier, length)
        arrival_s, after, delay_s = turns.timing(row, before)
        output = source.output(row, "output_length")
        request = Request(arrival_s, length, output, ids, session, after, delay_s, priority=row.priority())
        yield request
        last[session] = number, request


FORMAT = Format(
    name="mooncake-delta",
    description="Mooncake rows of sessions as aiperf makes them: a turn holds only what it adds to the prompt and answer before",
    tried="tried on ai-dynamo/aiperf: the first sessions of docs/traces/inference-day-2026/dataset.jsonl",
    is_like=_adds_to_sessions,
    read=_read,
    time_unit="ms",
)

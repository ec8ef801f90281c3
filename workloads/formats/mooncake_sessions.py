"""Mooncake's rows with `session_id`: a row with `delay` (ms), or without a time, follows the one before it."""

from collections.abc import Iterator
from typing import IO

import msgspec

from workloads.formats import turns
from workloads.formats.format import Format, has, json_adapter, json_priority
from workloads.formats.mooncake import refuse_waits
from workloads.request import Request
from workloads.source import Source
from workloads.workload import Workload


def _read(source: Source) -> Iterator[Request]:
    last: dict[str, int] = {}
    for number, row in enumerate(source.objects()):
        refuse_waits(row)
        session, length = row.text("session_id"), row.count("input_length")
        ids, output = source.blocks(row, length), source.output(row, "output_length")
        arrival_s, after, delay_s = turns.timing(row, last.get(session))
        yield Request(
            arrival_s, length, output, ids, session, after, delay_s, priority=row.priority(), adapter=row.adapter()
        )
        last[session] = number


def _write(workload: Workload, file: IO[bytes]) -> None:
    """Write whole prompts with sessions; turns that wait have a delay instead of a timestamp."""
    for place, request in enumerate(workload):
        row = {
            "session_id": request.session or f"request {place}",
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
            **json_priority(request),
            **json_adapter(request),
        }
        row |= (
            {"delay": round(request.delay_s * 1000, 3)}
            if request.after
            else {"timestamp": round(request.arrival_s * 1000, 3)}
        )
        file.write(msgspec.json.encode(row) + b"\n")


FORMAT = Format(
    name="mooncake-sessions",
    description="Mooncake rows of sessions, each the whole prompt: session_id, delay (ms) after the turn before",
    is_like=has("session_id", "input_length"),
    read=_read,
    write=_write,
    time_unit="ms",
    keeps=frozenset({"times", "sharing", "sessions", "priorities", "adapters"}),
)

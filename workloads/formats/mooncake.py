"""Mooncake's trace format: one JSON object per line, plain or gzip.

`{"timestamp": ms, "input_length", "output_length", "hash_ids": [one chained id per block of 512 tokens]}`
(kvcache-ai/Mooncake, FAST '25). Tools that write such rows leave out `timestamp` or `hash_ids`, or add `priority`.
We add `adapter`, the LoRA adapter that a request asks for.
"""

from collections.abc import Iterator
from typing import IO, Any

import msgspec

from workloads.formats.format import Format, json_adapter, json_priority
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source
from workloads.workload import Workload

OTHERS = {"session_id", "chat_id", "arrival_s"}
"""Names that occur only in formats that resemble this one."""


def write(workload: Workload, file: IO[bytes]) -> None:
    """Write requests, one per line, in blocks of the workload's size."""
    encode = msgspec.json.Encoder().encode
    for request in workload:
        row = {
            "timestamp": round(request.arrival_s * 1000, 3),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
            **json_priority(request),
            **json_adapter(request),
        }
        file.write(encode(row) + b"\n")


def refuse_waits(row: Row) -> None:
    """Refuse a row that waits for others by name, which would be sent at its time.

    Raises:
        WorkloadError: it does.
    """
    if row.values.get("wait_for"):
        raise row.fail(
            "wait_for belongs to agentic Mooncake version 1; dynabench reads version 2, which has dependencies"
        )


def _is_like(first: dict[str, Any] | None, start: bytes) -> bool:
    return first is not None and ("hash_ids" in first or "input_length" in first) and not OTHERS & set(first)


def _read(source: Source) -> Iterator[Request]:
    is_timed = None
    for row in source.objects():
        refuse_waits(row)
        sizes = source.sizes(row, "input_length", "output_length")
        if sizes is None:
            continue
        if is_timed is None:
            is_timed = row.has("timestamp")
        arrival_s = _arrival_s(row, source, is_timed=is_timed)
        yield Request(arrival_s, *sizes, source.blocks(row, sizes[0]), priority=row.priority(), adapter=row.adapter())


def _arrival_s(row: Row, source: Source, *, is_timed: bool) -> float:
    """Return when a request arrives: at 0 if no row has a time.

    Raises:
        WorkloadError: only some rows have one.
    """
    if row.has("timestamp") != is_timed:
        raise row.fail(
            "timestamp is missing, but rows above have one" if is_timed else "only rows from here have a timestamp"
        )
    if not is_timed:
        source.count("rows without timestamp, which arrive at time 0")
        return 0.0
    return row.seconds("timestamp")


FORMAT = Format(
    name="mooncake",
    description="Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
    tried="tried on kvcache-ai/Mooncake: FAST25-release/traces/conversation_trace.jsonl and synthetic_trace.jsonl",
    is_like=_is_like,
    read=_read,
    write=write,
    time_unit="ms",
    keeps=frozenset({"times", "sharing", "priorities", "adapters"}),
    is_plain=True,
)

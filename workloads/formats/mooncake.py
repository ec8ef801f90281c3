"""Mooncake's trace format: one JSON object per line, plain or gzip.

`{"timestamp": ms, "input_length", "output_length", "hash_ids": [one chained id per block of 512 tokens]}`
(kvcache-ai/Mooncake, FAST '25).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from workloads.blocks import wrong_count
from workloads.formats.format import Format
from workloads.request import Request, Workload, WorkloadError
from workloads.source import MAX_TOKENS, Source, lines

OTHERS = {"session_id", "chat_id", "arrival_s"}
"""Names that occur only in formats that resemble this one."""


class _Row(msgspec.Struct, gc=False):
    """A line of the format."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def write(workload: Workload, file: IO[bytes]) -> None:
    """Write requests, one per line, in blocks of the workload's size."""
    encode = msgspec.json.Encoder().encode
    for request in workload:
        ms = request.arrival_s * 1000
        row = _Row(round(ms, 3), request.input_length, request.output_length, request.hash_ids)
        file.write(encode(row) + b"\n")


def _is_like(first: dict[str, Any] | None, start: bytes) -> bool:
    return first is not None and ("hash_ids" in first or "input_length" in first) and not OTHERS & set(first)


def _read(source: Source) -> Iterator[Request]:
    for path in source.files:
        yield from _requests(path, source.namer.block_size)


def _requests(path: Path, block_size: int) -> Iterator[Request]:
    decode = msgspec.json.Decoder(_Row).decode
    last = 0.0
    for number, line in lines(path):
        try:
            row = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            expected = "expected an object with timestamp, input_length, output_length and hash_ids"
            raise WorkloadError(f"{path}, line {number}: {error}; {expected}") from error
        if problem := _problem(row, block_size, last):
            raise WorkloadError(f"{path}, line {number}: {problem}")
        last = row.timestamp
        yield Request(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)


def _problem(row: _Row, block_size: int, last: float) -> str | None:
    if row.timestamp < 0:
        return f"timestamp must not be negative, not {row.timestamp}"
    if row.timestamp < last:
        return f"timestamp {row.timestamp:g} is before the line above ({last:g}); expected lines in order of time"
    if row.input_length < 1:
        return f"input_length must be at least 1, not {row.input_length}"
    if row.output_length < 1:
        return f"output_length must be at least 1, not {row.output_length}"
    if max(row.input_length, row.output_length) > MAX_TOKENS:
        return f"lengths must be at most {MAX_TOKENS:,}, not {max(row.input_length, row.output_length)}"
    problem = wrong_count(row.input_length, row.hash_ids, block_size)
    return None if problem is None else f"{problem} (is --trace-block-size right?)"


FORMAT = Format(
    name="mooncake",
    description="Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
    tried="tried on kvcache-ai/Mooncake: FAST25-release/traces/conversation_trace.jsonl and synthetic_trace.jsonl",
    is_like=_is_like,
    read=_read,
    write=write,
    keeps=frozenset({"times", "sharing"}),
    is_in_order=True,
)

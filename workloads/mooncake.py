"""Mooncake's trace format: one JSON object a line, plain or gzip.

`{"timestamp": ms, "input_length", "output_length", "hash_ids": [one chained id per block of 512 tokens]}`
(kvcache-ai/Mooncake, FAST '25).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from workloads.blocks import wrong_count
from workloads.request import Request, WorkloadError
from workloads.source import MAX_TOKENS, lines

BLOCK_SIZE = 512


class Row(msgspec.Struct, gc=False):
    """A line of the format."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(path: Path, *, block_size: int = BLOCK_SIZE) -> Iterator[Request]:
    """Yield the requests of a file as they are read.

    Raises:
        WorkloadError: the file cannot be read, or a line is not what the format says.
    """
    decode = msgspec.json.Decoder(Row).decode
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


def write(requests: Iterable[Request], file: IO[bytes]) -> None:
    """Write requests, a line each."""
    encode = msgspec.json.Encoder().encode
    for request in requests:
        ms = request.arrival_s * 1000
        row = Row(round(ms, 3), request.input_length, request.output_length, request.hash_ids)
        file.write(encode(row) + b"\n")


def _problem(row: Row, block_size: int, last: float) -> str | None:
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

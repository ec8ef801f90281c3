"""Our own format, which loses nothing: JSON Lines with a header and then one request per line.

`{"schema": "dynabench.workload/1", "block_size": 64, "requests": 2, "notes": []}`
`{"arrival_s": 0.0, "input_length": 130, "output_length": 5, "hash_ids": [0, 1, 2], "session": "a"}`
`{"arrival_s": 1.5, ..., "after": [0], "delay_s": 0.25}`: this request waits for line 0 of the requests. Defaults are left out.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from workloads.blocks import wrong_count
from workloads.formats.format import Format
from workloads.media import MediaCheck
from workloads.request import Request, WorkloadError
from workloads.row import MAX_PRIORITY, MAX_S, MAX_TOKENS
from workloads.source import MAX_LINE_BYTES, Source, blocks, lines
from workloads.workload import Workload

if TYPE_CHECKING:
    from workloads.columns import RequestColumns

SCHEMA: Final = "dynabench.workload/1"


class Header(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The first line."""

    schema: Literal["dynabench.workload/1"]
    block_size: Annotated[int, Meta(ge=1)]
    requests: int | None = None
    """The number of requests, so that a truncated file is recognised."""
    notes: tuple[str, ...] = ()
    knows_prefixes: bool = True
    """False if ids are made up, because only lengths were known."""


def _write(workload: Workload, file: IO[bytes]) -> None:
    """Write a workload so that `_read` returns an equal one."""
    from workloads.columns import CHUNK

    encoder = msgspec.json.Encoder()
    file.write(
        encoder.encode(Header(SCHEMA, workload.block_size, len(workload), workload.notes, workload.knows_prefixes))
        + b"\n"
    )
    for start in range(0, len(workload), CHUNK):
        file.write(encoder.encode_lines(workload.requests[start : start + CHUNK]))


def block_size(path: Path) -> int:
    """Return the block size in a file's header."""
    first = next(lines(path), (1, b""))
    return _header(first[1], f"{path}, line {first[0]}").block_size


def _read(source: Source) -> Iterator[Request]:
    """Yield the requests of files that `_write` wrote; equal ids in several files are equal blocks.

    Raises:
        WorkloadError: a file cannot be read, or a line does not match the format.
    """
    for part in _read_columns(source):
        yield from part


def _read_columns(source: Source) -> "Iterator[RequestColumns]":
    """Yield the requests of files, many at a time; the errors are those of `_read`."""
    before, media = 0, MediaCheck()
    for path in source.files:
        before += yield from _parts(path, source, before, media)


def _is_like(first: dict[str, Any] | None, start: bytes) -> bool:
    """Return whether a file is in any version of this format."""
    return first is not None and str(first.get("schema", "")).startswith("dynabench.workload/")


def _parts(path: Path, source: Source, before: int, media: MediaCheck) -> "Generator[RequestColumns, None, int]":
    """Yield the requests of a file that follows this many of other files; return their number."""
    header, last, found = None, 0.0, 0
    for number, block in blocks(path):
        if header is None:
            line, _, rest = block.lstrip().partition(b"\n")
            number += block[: -len(rest) or len(block)].count(b"\n")
            place = f"{path}, line {number - 1}"
            header, block = _header(line, place), rest
            _note(header, source, place)
        plain = None if media.has_any else _plain(block, header.block_size, last)
        part = plain or _checked(block, header.block_size, last, found, path, number, media)
        if len(part):
            last, found = part.arrival_s.item(-1), found + len(part)
        if before and "after" in part.more:
            waits = [tuple(number + before for number in after) for after in part.more["after"]]
            part = part.replace(after=waits)
        yield part
    if header is not None and header.requests not in (None, found):
        raise WorkloadError(f"{path}: has only {found:,} of {header.requests:,} requests, so it is truncated")
    return found


def _note(header: Header, source: Source, place: str) -> None:
    """Take over what a header says of its file."""
    if header.block_size != source.namer.block_size:
        raise WorkloadError(f"{place}: block_size is {header.block_size}, not {source.namer.block_size}")
    source.keep(header.notes)
    source.knows_prefixes &= header.knows_prefixes


def _plain(block: bytes, block_size: int, last: float) -> "RequestColumns | None":
    """Decode lines all at once if nothing is wrong with any; return None if something is, or must be looked at singly."""
    import numpy as np

    from workloads.columns import RequestColumns

    try:
        part = RequestColumns.of(msgspec.json.Decoder(Request).decode_lines(block))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if part.more or not len(part) or len(part) != sum(bool(line.strip()) for line in block.split(b"\n")):
        return None
    times, lengths = part.arrival_s, (part.input_length, part.output_length)
    is_in_range = all(
        values.dtype == np.int32 and 1 <= values.min() <= values.max() <= MAX_TOKENS for values in lengths
    )
    is_in_order = last <= times[0] and times[-1] <= MAX_S and bool((times[1:] >= times[:-1]).all())
    counts = np.diff(part.starts) * block_size - part.input_length
    return part if is_in_range and is_in_order and 0 <= counts.min() <= counts.max() < block_size else None


def _checked(
    block: bytes, block_size: int, last: float, found: int, path: Path, first: int, media: MediaCheck
) -> "RequestColumns":
    """Decode lines one by one, of which the first has this number in its file.

    Raises:
        WorkloadError: one is not a request that may follow `found` others, the last of which arrives at `last`.
    """
    from workloads.columns import RequestColumns

    decode, made, places = msgspec.json.Decoder(Request).decode, list[Request](), list[str]()
    for number, line in enumerate(block.split(b"\n"), first):
        place = f"{path}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise WorkloadError(f"{place}: longer than {MAX_LINE_BYTES >> 20} MiB")
        if not line.strip():
            continue
        try:
            request = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WorkloadError(f"{place}: not a request ({error})") from error
        problem = _problem(request, block_size, last, found + len(made))
        if problem is None and request.media:
            problem = media.problem(request, block_size)
        if problem is not None:
            raise WorkloadError(f"{place}: {problem}")
        last = request.arrival_s
        made.append(request)
        places.append(place)
    for place, request in zip(places, made, strict=True) if media.has_any else ():
        if not request.media and (problem := media.problem_of_text(request)):
            raise WorkloadError(f"{place}: {problem}")
    return RequestColumns.of(made)


def _header(line: bytes, place: str) -> Header:
    try:
        return msgspec.json.decode(line, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WorkloadError(f'{place}: not a header ({error}); expected {{"schema": "{SCHEMA}", ...}}') from error


def _problem(request: Request, block_size: int, last: float, number: int) -> str | None:
    for name in ("input_length", "output_length"):
        if not 1 <= getattr(request, name) <= MAX_TOKENS:
            return f"{name} must be from 1 to {MAX_TOKENS:,}, not {getattr(request, name)}"
    for name in ("arrival_s", "delay_s"):
        if getattr(request, name) < 0:
            return f"{name} must not be negative, not {getattr(request, name):g}"
        if getattr(request, name) > MAX_S:
            return f"{name} must be at most {MAX_S:g}, not {getattr(request, name):g}"
    if request.arrival_s < last:
        return f"arrival_s {request.arrival_s:g} is before that of the line above ({last:g}); expected requests in order of time"
    if abs(request.priority) > MAX_PRIORITY:
        return f"priority must be from -{MAX_PRIORITY:,} to {MAX_PRIORITY:,}, not {request.priority}"
    if (problem := wrong_count(request.input_length, request.hash_ids, block_size)) is not None:
        return problem
    if not all(0 <= earlier < number for earlier in request.after):
        expected = (
            f"numbers of earlier requests, 0 to {number - 1}" if number else "none, because this is the first request"
        )
        return f"after names {list(request.after)}; expected {expected}"
    return None


FORMAT = Format(
    name="dynabench",
    description="our own JSONL, which holds all that a workload does: a header, then a request a line",
    tried="what dynabench writes",
    is_like=_is_like,
    read=_read,
    read_columns=_read_columns,
    write=_write,
    block_size=None,
    block_size_of=block_size,
    keeps=frozenset(
        {"times", "sharing", "sessions", "graphs", "text", "ends", "priorities", "adapters", "media", "fields"}
    ),
    is_plain=True,
)

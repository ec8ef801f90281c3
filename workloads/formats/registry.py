"""Every workload format: how files are detected, read and written, and what a format loses."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from foundation.text import instead_of
from workloads.blocks import BlockNamer, Encode, chained, estimate_tokens, reblocked
from workloads.formats import (
    agentic_mooncake,
    aiperf_export,
    aiperf_multi,
    aiperf_single,
    applied_compute,
    azure,
    bailian,
    burstgpt,
    dynamo_batch,
    dynamo_trace,
    llmservingsim,
    mooncake,
    mooncake_delta,
    mooncake_sessions,
    native,
    openai_batch,
    openai_messages,
    results,
    sharegpt,
    vllm_bench,
    vllm_custom,
    weka,
)
from workloads.formats.columns import columns as columns_format
from workloads.formats.columns import columns_of
from workloads.formats.format import Format
from workloads.request import Request, WorkloadError
from workloads.shape import MS_AS_SECONDS, SECONDS_AS_MS, unit_hint
from workloads.source import FrameSource, Source, files_of, first_object, header
from workloads.workload import Workload, extra_fields, in_order

if TYPE_CHECKING:
    from workloads.columns import RequestColumns

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        native,
        mooncake,
        mooncake_delta,
        mooncake_sessions,
        bailian,
        weka,
        agentic_mooncake,
        dynamo_trace,
        applied_compute,
        llmservingsim,
        burstgpt,
        azure,
        results,
        vllm_bench,
        aiperf_export,
        openai_batch,
        aiperf_multi,
        sharegpt,
        openai_messages,
        vllm_custom,
        dynamo_batch,
        aiperf_single,
    )
}
"""Every format by name, in the order in which they are tried on a file."""

BUNDLED = Path(__file__).parents[1] / "bundled" / "chat.jsonl"
"""A small workload to try things with."""

DEFAULT = "dynabench"
"""The format that is written by default; it loses nothing."""


FASTEST = 500
"""More requests per second than a trace has: a request every two seconds, its times read in ms, comes to that."""
MANY = 100
"""Fewer whole numbers in a row (0, 1, 2) may be a try of milliseconds."""
SLOWEST_S = 600
"""More seconds between requests than a trace has: two requests per second, their times in ms read in s, come to 500."""


def detect(path: Path) -> str:
    """Return the format of a file.

    Raises:
        WorkloadError: no format matches.
    """
    first = first_object(_start(path))
    if (name := like(path)) is not None:
        return name
    shown = (
        f"its first object has {', '.join(list(first)[:8]) or 'nothing'}"
        if first is not None
        else "it is neither JSON nor a known CSV"
    )
    raise WorkloadError(
        f"{path}: the format is not recognised ({shown}); expected one of {', '.join(FORMATS)} (--format), "
        "or name the columns of a log with --columns"
    )


def like(path: Path) -> str | None:
    """Return the format that a file is in, if it is in any.

    Raises:
        WorkloadError: it cannot be read.
    """
    start = header(path)
    first = first_object(start)
    return next((name for name, format in FORMATS.items() if format.is_like(first, start)), None)


def _start(path: Path) -> bytes:
    start = header(path)
    if not start.strip():
        raise WorkloadError(f"{path} is empty")
    return start


def read(
    paths: Path | Sequence[Path],
    *,
    format: str | None = None,
    block_size: int | None = None,
    encode: Encode | None = None,
    columns: str | None = None,
    default_osl: int = 128,
) -> Workload:
    """Read a workload.

    Args:
        paths: files, plain or .gz, and folders of such files; equal ids in several files are equal blocks.
        format: the name of the format (none: detected).
        block_size: tokens per id in the file, or per block of a text (none: the format's).
        columns: the columns of a log, as in arrival=ts,input=prompt_tokens,output=completion_tokens.
        encode: converts text to tokens (none: their number is estimated).
        default_osl: output tokens if the file does not say.

    Raises:
        WorkloadError: it cannot be read, or is empty.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = files_of(paths)
    for file in files:
        _start(file)
    kind = _format_of(files, format) if columns is None else _of_columns(columns, format)
    if block_size is None:
        block_size = kind.block_size or (kind.block_size_of or native.block_size)(files[0])
    namer = BlockNamer(block_size)
    source = Source(files, namer, encode or estimate_tokens, default_osl)
    title = paths[0].name if len(paths) == 1 else f"{paths[0].name} + {len(paths) - 1} more"
    return _whole(kind, source, title, is_text_counted=encode is not None)


def read_frame(frame: Any, names: Mapping[str, str], *, title: str, block_size: int | None = None) -> Workload:
    """Read a workload from the rows of a data frame of pandas, polars or Arrow.

    Args:
        frame: a row per request.
        names: the columns that hold what is known of a request (`FIELDS`); a time's unit may follow after a colon.
        title: what the workload is called.
        block_size: tokens per id of `hash_ids` (none: 512).

    Raises:
        WorkloadError: it is not a data frame, a column is missing, or has a value that is not understood.
    """
    kind = columns_of(names)
    size = kind.block_size if block_size is None else block_size
    assert size is not None, "rows of columns name blocks"
    return _whole(kind, FrameSource(frame, BlockNamer(size)), title)


def _whole(kind: Format, source: Source, title: str, *, is_text_counted: bool = False) -> Workload:
    """Read all requests, put them in order, and note what a reader should know."""
    from workloads.columns import RequestColumns

    name, files = kind.name, source.files
    requests = (
        RequestColumns.joined(kind.read_columns(source)) if kind.read_columns else RequestColumns.of(kind.read(source))
    )
    if not requests and source.notes:
        raise WorkloadError(f"{title} has no requests ({'; '.join(source.notes)})")
    num_late = int((requests.arrival_s[1:] < requests.arrival_s[:-1]).sum())
    if num_late and kind.is_plain and len(files) == 1:
        source.keep([f"rows earlier than the row above, put in order of time: {num_late:,}"])
    if num_late or len(files) > 1 or not kind.is_plain:
        requests = in_order(requests, title)
    notes = [*([] if kind.is_plain else [f"read as {name}"]), *source.notes, *_doubts(requests, kind.time_unit)]
    if "content" in requests.more and not is_text_counted and name != DEFAULT:
        notes.append("token counts estimated from the text")
    return chained(Workload(title, source.namer.block_size, requests, tuple(notes), source.knows_prefixes))


def _doubts(requests: "RequestColumns", unit: str | None) -> list[str]:
    """Ask whether times are in another unit than they were read in, if they are hardly possible in this one."""
    times = requests.scheduled_s
    span, gaps = float(times.max(initial=0.0) - times.min(initial=math.inf)), len(times) - 1
    if unit is None or span <= 0:
        return []
    shown = f"{len(times):,} requests in {span:,.2f} s: are these"
    if unit == "ms" and gaps / span > FASTEST and (gaps >= MANY or ((times * 1000).round(6) % 1).any()):
        return [f"{shown} seconds? They were read as ms; {unit_hint(SECONDS_AS_MS)}"]
    if unit == "s" and span / gaps > SLOWEST_S:
        return [f"{shown} milliseconds? They were read as s; {unit_hint(MS_AS_SECONDS)}"]
    return []


def _format_of(files: Sequence[Path], name: str | None) -> Format:
    name = name or _detect_all(files)
    if name not in FORMATS:
        raise WorkloadError(f"format {name!r} is unknown; {instead_of(name, FORMATS)}")
    return FORMATS[name]


def _of_columns(text: str, format: str | None) -> Format:
    if format is not None:
        raise WorkloadError(
            f"--columns describes files of an unknown format; leave out either --columns or --format {format}"
        )
    return columns_format(text)


def _detect_all(files: Sequence[Path]) -> str:
    """Return the format that all files are in."""
    found: dict[str, Path] = {}
    for file in files:
        found.setdefault(detect(file), file)
    if len(found) > 1:
        shown = ", ".join(f"{file} is {name}" for name, file in found.items())
        raise WorkloadError(
            f"the files of one workload must have the same format, but {shown}; join files of different formats with dynabench workload merge"
        )
    return next(iter(found))


def lost(workload: Workload, name: str) -> list[str]:
    """Return the parts of a workload that a format cannot hold; empty if nothing is lost.

    Raises:
        WorkloadError: there is no such format, or it cannot be written.
    """
    writer(name)
    format, requests = FORMATS[name], workload.requests
    found = []
    if "times" not in format.keeps and any(request.arrival_s > 0 for request in requests):
        found.append("arrival times")
    if "sharing" not in format.keeps and len({id for r in requests for id in r.hash_ids}) < sum(
        len(r.hash_ids) for r in requests
    ):
        found.append("what prompts share")
    elif "sharing" in format.keeps and name != DEFAULT and not workload.knows_prefixes:
        found.append("the fact that sharing is unknown (each prompt would get its own ids, as if they shared nothing)")
    elif "text" not in format.keeps and format.block_size and workload.block_size < format.block_size:
        found.append(f"sharing in blocks smaller than {format.block_size} tokens")
    if not {"sessions", "names"} & format.keeps and any(request.session for request in requests):
        found.append("sessions")
    if "sessions" not in format.keeps and workload.has_dependencies:
        found.append("turns that wait for answers")
    elif "graphs" not in format.keeps and not _are_chains(requests):
        found.append("requests that wait for several others, or for one other than the turn before")
    if "text" not in format.keeps and any(request.content is not None for request in requests):
        found.append("texts")
    if "ends" not in format.keeps and any(request.ends != "length" for request in requests):
        found.append("answers that end by EOS")
    if "priorities" not in format.keeps and workload.has_priorities:
        found.append("priorities")
    if "adapters" not in format.keeps and workload.columns.adapters:
        found.append("adapters")
    if "media" not in format.keeps and workload.columns.has_media:
        found.append("images and other media")
    if "fields" not in format.keeps and (names := extra_fields(workload.requests)):
        found.append(f"fields of bodies ({', '.join(names)})")
    if "text" in format.keeps and name != DEFAULT and any(request.content is None for request in requests):
        raise WorkloadError(f"{workload.name} has no texts, only lengths and ids, so it cannot be written as {name}")
    return found


def writer(name: str) -> Callable[[Workload, IO[bytes]], None]:
    """Return the writer of a format.

    Raises:
        WorkloadError: there is no such format, or it cannot be written.
    """
    format = FORMATS.get(name)
    if format is None or format.write is None:
        known = [other for other, format in FORMATS.items() if format.write is not None]
        raise WorkloadError(f"format {name!r} cannot be written; expected one of {', '.join(known)}")
    return format.write


def check_name(out: Path, name: str) -> None:
    """Refuse to write a format to a file with the suffix of another kind.

    Raises:
        WorkloadError: the suffix is of another kind, or the format cannot be written.
    """
    writer(name)
    suffix, kinds = Path(out.name.removesuffix(".gz")).suffix, {format.suffix for format in FORMATS.values()}
    if suffix in kinds and suffix != FORMATS[name].suffix:
        like = [other for other, format in FORMATS.items() if format.write is not None and format.suffix == suffix]
        raise WorkloadError(
            f"{out}: {name} is {FORMATS[name].suffix[1:].upper()}; name the file *{FORMATS[name].suffix}, "
            f"or choose --to {' or '.join(like)}"
        )


def write(workload: Workload, name: str, file: IO[bytes]) -> None:
    """Write a workload in a format, in the format's block size."""
    format = FORMATS[name]
    is_blocked = "sharing" in format.keeps and format.block_size is not None
    writer(name)(reblocked(workload, format.block_size or 0) if is_blocked else workload, file)


def _are_chains(requests: Sequence[Request]) -> bool:
    """Return whether each waiting request waits for the one before it in its session."""
    last: dict[str, int] = {}
    for number, request in enumerate(requests):
        before = last.get(request.session) if request.session else None
        if request.after and request.after != (before,):
            return False
        last[request.session] = number
    return True

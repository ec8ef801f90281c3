"""Workload formats: what each looks like, how it is read and written, and which one a file is in."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from workloads import mooncake, traces
from workloads.blocks import BlockNamer, Encode, estimate_tokens, join_ids, split_ids
from workloads.request import Request, Workload, WorkloadError
from workloads.source import head
from workloads.texts import TextReader

Writer = Callable[[Iterable[Request], IO[bytes]], None]


@dataclass(frozen=True)
class Format:
    """A way to write down a workload."""

    description: str
    read: Callable[[Path, TextReader, BlockNamer], Iterator[Request]]
    is_like: Callable[[dict[str, Any] | None, bytes], bool]
    """Whether a file is in it, from its first object (none: it is no JSON) and its beginning."""
    block_size: int = 512
    write: Writer | None = None
    keeps: frozenset[str] = frozenset()
    """What it can tell of requests, of `times`, `sharing`, `sessions`, `graphs`, `text`."""


def _write_mooncake(requests: Iterable[Request], file: IO[bytes]) -> None:
    mooncake.write(requests, file)


def _write_sessions(requests: Iterable[Request], file: IO[bytes]) -> None:
    for place, request in enumerate(requests):
        row = {
            "session_id": request.session or f"request {place}",
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        row |= (
            {"delay": round(request.delay_s * 1000, 3)}
            if request.after
            else {"timestamp": round(request.arrival_s * 1000, 3)}
        )
        file.write(msgspec.json.encode(row) + b"\n")


def _write_bailian(requests: Iterable[Request], file: IO[bytes]) -> None:
    last: dict[str, tuple[int, int]] = {}
    for place, request in enumerate(requests):
        parent, turn = last.get(request.session, (-1, 0)) if request.session else (-1, 0)
        row = {
            "chat_id": place,
            "parent_chat_id": parent,
            "timestamp": round(request.arrival_s, 6),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "type": "text",
            "turn": turn + 1,
            "hash_ids": request.hash_ids,
        }
        last[request.session] = (place, turn + 1)
        file.write(msgspec.json.encode(row) + b"\n")


def _write_azure(requests: Iterable[Request], file: IO[bytes]) -> None:
    import datetime

    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    file.write(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")
    for request in requests:
        time = start + datetime.timedelta(microseconds=round(request.arrival_s * 1e6))
        file.write(f"{time:%Y-%m-%d %H:%M:%S.%f}0,{request.input_length},{request.output_length}\n".encode())


def _write_burstgpt(requests: Iterable[Request], file: IO[bytes]) -> None:
    file.write(b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
    for request in requests:
        sizes = f"{request.input_length},{request.output_length},{request.input_length + request.output_length}"
        file.write(f"{request.arrival_s:.6f},{request.session},,,{sizes},API log\n".encode())


def _write_batch(requests: Iterable[Request], file: IO[bytes]) -> None:
    for place, request in enumerate(requests):
        is_chat = not isinstance(request.content, str)
        body = {"model": "", "messages" if is_chat else "prompt": request.content, "max_tokens": request.output_length}
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        file.write(msgspec.json.encode({"custom_id": str(place), "method": "POST", "url": url, "body": body}) + b"\n")


def _write_prompts(requests: Iterable[Request], file: IO[bytes]) -> None:
    for request in requests:
        if not isinstance(request.content, str):
            raise WorkloadError("vllm-custom has one text a prompt, not chat messages; convert to openai-batch")
        row = {"prompt": request.content, "output_tokens": request.output_length}
        file.write(msgspec.json.encode(row) + b"\n")


def _has(*names: str) -> Callable[[dict[str, Any] | None, bytes], bool]:
    return lambda first, _: first is not None and all(name in first for name in names)


def _csv(*names: bytes) -> Callable[[dict[str, Any] | None, bytes], bool]:
    return lambda first, start: first is None and all(name in start.split(b"\n", 1)[0] for name in names)


def _conversations(first: dict[str, Any] | None, start: bytes) -> bool:
    return first is not None and isinstance(first.get("conversations"), list)


FORMATS: dict[str, Format] = {
    "mooncake": Format(
        "Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
        lambda path, _, namer: mooncake.read(path, block_size=namer.block_size),
        lambda first, _: (
            first is not None
            and ("hash_ids" in first or "input_length" in first)
            and not {"session_id", "chat_id"} & set(first)
        ),
        write=_write_mooncake,
        keeps=frozenset({"times", "sharing"}),
    ),
    "mooncake-sessions": Format(
        "Mooncake rows of sessions: session_id, delay (ms) after the turn before, perhaps delta: true",
        lambda path, _, namer: traces.read_mooncake_sessions(path, namer),
        _has("session_id", "hash_ids"),
        write=_write_sessions,
        keeps=frozenset({"times", "sharing", "sessions"}),
    ),
    "bailian": Format(
        "Alibaba Qwen-Bailian JSONL: chat_id, parent_chat_id, timestamp (s), hash_ids of 16 tokens",
        lambda path, _, namer: traces.read_bailian(path, namer),
        _has("chat_id", "hash_ids"),
        block_size=16,
        write=_write_bailian,
        keeps=frozenset({"times", "sharing", "names"}),
    ),
    "weka": Format(
        "Weka / kv-cache-tester: a JSON object per conversation, 64-token ids local to it, think times, sub-agents",
        lambda path, _, namer: traces.read_weka(path, namer),
        lambda first, _: first is not None and isinstance(first.get("requests"), list),
        block_size=64,
    ),
    "burstgpt": Format(
        "BurstGPT CSV: Timestamp (s), Request tokens, Response tokens",
        lambda path, _, namer: traces.read_burstgpt(path, namer),
        _csv(b"Timestamp", b"Request tokens"),
        write=_write_burstgpt,
        keeps=frozenset({"times", "names"}),
    ),
    "azure": Format(
        "Azure 2023 / 2024 CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
        lambda path, _, namer: traces.read_azure(path, namer),
        _csv(b"TIMESTAMP", b"ContextTokens"),
        write=_write_azure,
        keeps=frozenset({"times"}),
    ),
    "openai-batch": Format(
        "OpenAI batch JSONL: custom_id, method, url, body",
        lambda path, reader, _: reader.openai_batch(path),
        _has("body"),
        block_size=16,
        write=_write_batch,
        keeps=frozenset({"sharing", "text"}),
    ),
    "aiperf-multi": Format(
        "aiperf multi_turn JSONL: session_id, turns of text, delay (ms)",
        lambda path, reader, _: reader.aiperf_multi(path),
        lambda first, _: first is not None and isinstance(first.get("turns"), list),
        block_size=16,
    ),
    "sharegpt": Format(
        "ShareGPT JSON (an array) or JSONL of conversations (SGLang's custom form): from / role, value / content",
        lambda path, reader, _: reader.sharegpt(path),
        _conversations,
        block_size=16,
    ),
    "openai-messages": Format(
        "a chat request body a line: messages, max_tokens (SGLang's openai form)",
        lambda path, reader, _: reader.openai_messages(path),
        _has("messages"),
        block_size=16,
    ),
    "vllm-custom": Format(
        "vLLM's custom dataset: prompt, perhaps output_tokens",
        lambda path, reader, _: reader.prompts(path),
        _has("prompt"),
        block_size=16,
        write=_write_prompts,
        keeps=frozenset({"sharing", "text"}),
    ),
    "dynamo-batch": Format(
        "Dynamo's batch input: text",
        lambda path, reader, _: reader.prompts(path),
        lambda first, _: first is not None and set(first) == {"text"},
        block_size=16,
    ),
    "aiperf-single": Format(
        "aiperf single_turn JSONL: text or texts, timestamp or delay (ms), output_length",
        lambda path, reader, _: reader.aiperf_single(path),
        lambda first, _: first is not None and ("text" in first or "texts" in first),
        block_size=16,
    ),
}
"""Every format by name, in the order in which a file is held against them."""


def detect(path: Path) -> str:
    """Tell which format a file is in.

    Raises:
        WorkloadError: none.
    """
    start = head(path)
    first = _first_object(start)
    for name, format in FORMATS.items():
        if format.is_like(first, start):
            return name
    shown = (
        f"its first object has {', '.join(list(first)[:8]) or 'nothing'}"
        if first is not None
        else "it is neither JSON nor a CSV that is known"
    )
    raise WorkloadError(
        f"{path}: the format is not recognised ({shown}); expected one of {', '.join(FORMATS)} (--format)"
    )


def read(
    path: Path,
    *,
    format: str | None = None,
    block_size: int | None = None,
    encode: Encode | None = None,
    default_osl: int = 128,
) -> Workload:
    """Read a workload.

    Args:
        path: a file, plain or .gz; for some formats a folder.
        format: its name (none: detected).
        block_size: tokens each id of the file stands for, or each block of a text is to have (none: the format's).
        encode: turns text into tokens (none: their number is estimated).
        default_osl: output tokens where the file does not say.

    Raises:
        WorkloadError: it cannot be read, or holds nothing.
    """
    name = format or detect(path)
    if name not in FORMATS:
        raise WorkloadError(f"format {name!r} is unknown; expected one of {', '.join(FORMATS)}")
    kind = FORMATS[name]
    namer = BlockNamer(block_size or kind.block_size)
    reader = TextReader(namer, encode or estimate_tokens, default_osl)
    requests = list(kind.read(path, reader, namer))
    if name != "mooncake" or not requests:  # whose lines must be in order
        requests = traces.in_order(requests, path)
    notes = [] if name == "mooncake" else [f"read as {name}"]
    if any(request.content is not None for request in requests) and encode is None:
        notes.append("token counts estimated from the text")
    return Workload(path.name, namer.block_size, requests, tuple(notes))


def lost(workload: Workload, name: str) -> list[str]:
    """Say what a format cannot tell of a workload; empty if nothing is lost.

    Raises:
        WorkloadError: there is no such format, or it is not written.
    """
    if name not in FORMATS or FORMATS[name].write is None:
        known = [other for other, format in FORMATS.items() if format.write is not None]
        raise WorkloadError(f"format {name!r} is not written; expected one of {', '.join(known)}")
    format, requests = FORMATS[name], workload.requests
    found = []
    if "times" not in format.keeps and any(request.arrival_s > 0 for request in requests):
        found.append("arrival times")
    if "sharing" not in format.keeps and len({id for r in requests for id in r.hash_ids}) < sum(
        len(r.hash_ids) for r in requests
    ):
        found.append("what prompts share")
    elif "text" not in format.keeps and "sharing" in format.keeps and workload.block_size < format.block_size:
        found.append(f"sharing in blocks smaller than {format.block_size} tokens")
    if not {"sessions", "names"} & format.keeps and any(request.session for request in requests):
        found.append("sessions")
    if "sessions" not in format.keeps and workload.has_dependencies:
        found.append("turns that wait for answers")
    elif any(len(r.after) > 1 or (r.after and requests[r.after[0]].session != r.session) for r in requests):
        found.append("requests that wait for several others")
    if "text" not in format.keeps and any(request.content is not None for request in requests):
        found.append("texts")
    if "text" in format.keeps and any(request.content is None for request in requests):
        raise WorkloadError(f"{workload.name} has no texts, only lengths and ids: it cannot be written as {name}")
    return found


def write(workload: Workload, name: str, file: IO[bytes]) -> None:
    """Write a workload in a format, in the format's block size."""
    format = FORMATS[name]
    assert format.write is not None
    format.write(reblocked(workload, format.block_size).requests if "sharing" in format.keeps else workload, file)


def reblocked(workload: Workload, size: int) -> Workload:
    """Name the same prompts in blocks of another size.

    Raises:
        WorkloadError: neither size divides the other.
    """
    before = workload.block_size
    if before == size:
        return workload
    if before % size and size % before:
        raise WorkloadError(f"blocks of {before} tokens cannot be made blocks of {size}: neither divides the other")
    cut = split_ids if size < before else join_ids
    requests = [
        msgspec.structs.replace(request, hash_ids=cut(request.hash_ids, request.input_length, before, size))
        for request in workload
    ]
    return Workload(workload.name, size, requests, workload.notes)


def _first_object(start: bytes) -> dict[str, Any] | None:
    """Return the first object of a JSON Lines file or JSON array, from its beginning; it may be cut off."""
    text = start.lstrip()
    line = text.split(b"\n", 1)[0]
    for candidate in (line, text):
        try:
            value = msgspec.json.decode(candidate)
        except msgspec.DecodeError:
            continue
        if isinstance(value, list) and value:
            value = value[0]
        return value if isinstance(value, dict) else None
    if text[:1] == b"[":
        text = text[1:].lstrip()
    if text[:1] != b"{":
        return None
    import json

    try:
        value, _ = json.JSONDecoder().raw_decode(text.decode(errors="ignore"))
    except ValueError:
        return _names_of(text)
    return value if isinstance(value, dict) else None


def _names_of(text: bytes) -> dict[str, Any]:
    """Return the names of an object that does not end within the beginning, each list and object as an empty list."""
    import re

    depth = 0
    names: dict[str, Any] = {}
    for match in re.finditer(rb'"((?:[^"\\]|\\.)*)"\s*(:?)\s*([\[{]?)|([\[{}\]])', text):
        if match[4]:
            depth += 1 if match[4] in b"[{" else -1
        else:
            if match[2] and depth == 1:
                names[match[1].decode(errors="replace")] = [] if match[3] else None
            depth += bool(match[3])
    return names

"""Workload formats: what each looks like, how it is read and written, and which one a file is in."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from workloads import mooncake, native, traces
from workloads.blocks import BlockNamer, Encode, estimate_tokens, join_ids, split_ids
from workloads.request import Request, Workload, WorkloadError
from workloads.source import Source, files_of, first_object, head
from workloads.texts import TextReader, write_openai_batch, write_prompts

Writer = Callable[[Workload, IO[bytes]], None]


@dataclass(frozen=True)
class Format:
    """A way to write down a workload."""

    description: str
    read: Callable[[Source, TextReader], Iterator[Request]]
    is_like: Callable[[dict[str, Any] | None, bytes], bool]
    """Whether a file is in it, from its first object (none: it is no JSON) and its beginning."""
    block_size: int | None = 512
    """Tokens that an id stands for, or a block of text; None: the file says."""
    write: Writer | None = None
    keeps: frozenset[str] = frozenset()
    """What it can tell of requests, of `times`, `sharing`, `names` of sessions, `sessions`, `graphs`, `text`."""
    tried: str = "not tried on real data, which could not be reached: read as its makers describe it"
    """The public data that its reader was held against."""


def _has(*names: str) -> Callable[[dict[str, Any] | None, bytes], bool]:
    return lambda first, _: first is not None and all(name in first for name in names)


def _csv(*names: bytes) -> Callable[[dict[str, Any] | None, bytes], bool]:
    return lambda first, start: first is None and all(name in start.split(b"\n", 1)[0] for name in names)


def _adds_to_sessions(first: dict[str, Any] | None, start: bytes) -> bool:
    """Tell whether later rows of sessions begin elsewhere than the first: a whole prompt would begin with the same id."""
    if first is None or not {"session_id", "hash_ids"} <= set(first):
        return False
    firsts: dict[str, list[Any]] = {}
    for line in start.split(b"\n")[:-1]:
        row = first_object(line)
        if row is not None and isinstance(row.get("hash_ids"), list):
            firsts.setdefault(str(row.get("session_id")), []).append(row["hash_ids"][:1])
    later = [ids == begun[0] for begun in firsts.values() for ids in begun[1:]]
    return bool(later) and not any(later)


def _conversations(first: dict[str, Any] | None, start: bytes) -> bool:
    return first is not None and isinstance(first.get("conversations"), list)


FORMATS: dict[str, Format] = {
    "dynabench": Format(
        "our own JSONL, which holds all that a workload does: a header, then a request a line",
        lambda source, _: native.read(source),
        native.is_like,
        block_size=None,
        write=native.write,
        keeps=frozenset({"times", "sharing", "sessions", "graphs", "text"}),
        tried="what dynabench writes",
    ),
    "mooncake": Format(
        "Mooncake JSONL: timestamp (ms), input_length, output_length, hash_ids of 512 tokens",
        lambda source, _: itertools.chain.from_iterable(
            mooncake.read(file, block_size=source.namer.block_size) for file in source.files
        ),
        lambda first, _: (
            first is not None
            and ("hash_ids" in first or "input_length" in first)
            and not {"session_id", "chat_id", "arrival_s"} & set(first)
        ),
        write=mooncake.write,
        keeps=frozenset({"times", "sharing"}),
        tried="tried on kvcache-ai/Mooncake: FAST25-release/traces/conversation_trace.jsonl and synthetic_trace.jsonl",
    ),
    "mooncake-delta": Format(
        "Mooncake rows of sessions as aiperf makes them: a turn holds only what it adds to the prompt and answer before",
        lambda source, _: traces.read_mooncake_delta(source),
        _adds_to_sessions,
        tried="tried on ai-dynamo/aiperf: the first sessions of docs/traces/inference-day-2026/dataset.jsonl",
    ),
    "mooncake-sessions": Format(
        "Mooncake rows of sessions, each the whole prompt: session_id, delay (ms) after the turn before",
        lambda source, _: traces.read_mooncake_sessions(source),
        _has("session_id", "input_length"),
        write=traces.write_mooncake_sessions,
        keeps=frozenset({"times", "sharing", "sessions"}),
    ),
    "bailian": Format(
        "Alibaba Qwen-Bailian JSONL: chat_id, parent_chat_id, timestamp (s), hash_ids of 16 tokens",
        lambda source, _: traces.read_bailian(source),
        _has("chat_id", "hash_ids"),
        block_size=16,
        write=traces.write_bailian,
        keeps=frozenset({"times", "sharing", "names"}),
    ),
    "weka": Format(
        "Weka / kv-cache-tester: a JSON object per conversation, 64-token ids local to it, think times, sub-agents",
        lambda source, _: traces.read_weka(source),
        lambda first, _: first is not None and isinstance(first.get("requests"), list),
        block_size=64,
        tried="tried on callanjfox/kv-cache-tester: 710 of the 739 files of traces/",
    ),
    "burstgpt": Format(
        "BurstGPT CSV: Timestamp (s), Request tokens, Response tokens",
        lambda source, _: traces.read_burstgpt(source),
        _csv(b"Timestamp", b"Request tokens"),
        write=traces.write_burstgpt,
        keeps=frozenset({"times", "names"}),
        tried="tried on rows of HPMLL/BurstGPT: data/BurstGPT_1.csv (its own copy is a pointer), in fnstggl/energy2: tests/fixtures",
    ),
    "azure": Format(
        "Azure 2023 / 2024 CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
        lambda source, _: traces.read_azure(source),
        _csv(b"TIMESTAMP", b"ContextTokens"),
        write=traces.write_azure,
        keeps=frozenset({"times"}),
        tried="tried on Azure/AzurePublicDataset: data/AzureLLMInferenceTrace_code.csv and _conv.csv; rows of 2024 in its notebook",
    ),
    "openai-batch": Format(
        "OpenAI batch JSONL: custom_id, method, url, body",
        lambda _, texts: texts.openai_batch(),
        _has("body"),
        block_size=16,
        write=write_openai_batch,
        keeps=frozenset({"sharing", "text"}),
        tried="tried on vllm-project/vllm: examples/offline_inference/openai_batch/openai_example_batch.jsonl",
    ),
    "aiperf-multi": Format(
        "aiperf multi_turn JSONL: session_id, turns of text, delay (ms)",
        lambda _, texts: texts.aiperf_multi(),
        lambda first, _: first is not None and isinstance(first.get("turns"), list),
        block_size=16,
        tried="tried on examples in ai-dynamo/aiperf: aiperf/dataset/loader/multi_turn.py",
    ),
    "sharegpt": Format(
        "ShareGPT JSON (an array) or JSONL of conversations (SGLang's custom form): from / role, value / content",
        lambda _, texts: texts.sharegpt(),
        _conversations,
        block_size=16,
        tried="tried on lm-sys/FastChat: data/dummy_conversation.json; hiyouga/LLaMA-Factory: data/glaive_toolcall_en_demo.json; rows of "
        "sgl-project/sglang: benchmark/stress_suite/data/synthetic_trace.jsonl",
    ),
    "openai-messages": Format(
        "a chat request body a line: messages, max_tokens (SGLang's openai form)",
        lambda _, texts: texts.openai_messages(),
        _has("messages"),
        block_size=16,
    ),
    "vllm-custom": Format(
        "vLLM's custom dataset: prompt, perhaps output_tokens",
        lambda _, texts: texts.prompts(),
        _has("prompt"),
        block_size=16,
        write=write_prompts,
        keeps=frozenset({"sharing", "text"}),
    ),
    "dynamo-batch": Format(
        "Dynamo's batch input: text",
        lambda _, texts: texts.prompts(),
        lambda first, _: first is not None and set(first) == {"text"},
        block_size=16,
    ),
    "aiperf-single": Format(
        "aiperf single_turn JSONL: text or texts, timestamp or delay (ms), output_length",
        lambda _, texts: texts.aiperf_single(),
        lambda first, _: first is not None and ("text" in first or "texts" in first),
        block_size=16,
        tried="tried on examples in ai-dynamo/aiperf: aiperf/dataset/loader/single_turn.py",
    ),
}
"""Every format by name, in the order in which a file is held against them."""

DEFAULT = "dynabench"
"""What is written where no format is named: it loses nothing."""
IN_ORDER = ("dynabench", "mooncake")
"""Formats whose lines must be in order of time."""


def detect(path: Path) -> str:
    """Tell which format a file is in.

    Raises:
        WorkloadError: none.
    """
    start = head(path)
    first = first_object(start)
    for name, format in FORMATS.items():
        if format.is_like(first, start):
            return name
    if not start.strip():
        raise WorkloadError(f"{path}: is empty")
    shown = (
        f"its first object has {', '.join(list(first)[:8]) or 'nothing'}"
        if first is not None
        else "it is neither JSON nor a CSV that is known"
    )
    raise WorkloadError(
        f"{path}: the format is not recognised ({shown}); expected one of {', '.join(FORMATS)} (--format)"
    )


def read(
    paths: Path | Sequence[Path],
    *,
    format: str | None = None,
    block_size: int | None = None,
    encode: Encode | None = None,
    default_osl: int = 128,
) -> Workload:
    """Read a workload.

    Args:
        paths: files, plain or .gz, and folders of such; of several, equal ids are equal blocks, as in one file.
        format: its name (none: detected).
        block_size: tokens each id of the file stands for, or each block of a text is to have (none: the format's).
        encode: turns text into tokens (none: their number is estimated).
        default_osl: output tokens where the file does not say.

    Raises:
        WorkloadError: it cannot be read, or holds nothing.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = files_of(paths)
    name = format or _detect_all(files)
    if name not in FORMATS:
        raise WorkloadError(f"format {name!r} is unknown; expected one of {', '.join(FORMATS)}")
    kind = FORMATS[name]
    source = Source(files, BlockNamer(block_size or kind.block_size or native.block_size(files[0])))
    requests = list(kind.read(source, TextReader(source, encode or estimate_tokens, default_osl)))
    title = paths[0].name if len(paths) == 1 else f"{paths[0].name} + {len(paths) - 1} more"
    if len(files) > 1 or name not in IN_ORDER:
        requests = traces.in_order(requests, title)
    notes = [*([] if name in IN_ORDER else [f"read as {name}"]), *source.notes]
    if any(request.content is not None for request in requests) and encode is None and name != DEFAULT:
        notes.append("token counts estimated from the text")
    return Workload(title, source.namer.block_size, requests, tuple(notes))


def _detect_all(files: Sequence[Path]) -> str:
    """Tell which format all files are in."""
    found: dict[str, Path] = {}
    for file in files:
        found.setdefault(detect(file), file)
    if len(found) > 1:
        shown = ", ".join(f"{file} is {name}" for name, file in found.items())
        raise WorkloadError(
            f"several files are one workload only in one format, but {shown}; join others with dynabench workload merge"
        )
    return next(iter(found))


def lost(workload: Workload, name: str) -> list[str]:
    """Say what a format cannot tell of a workload; empty if nothing is lost.

    Raises:
        WorkloadError: there is no such format, or it is not written.
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
    elif "text" not in format.keeps and format.block_size and workload.block_size < format.block_size:
        found.append(f"sharing in blocks smaller than {format.block_size} tokens")
    if not {"sessions", "names"} & format.keeps and any(request.session for request in requests):
        found.append("sessions")
    if "sessions" not in format.keeps and workload.has_dependencies:
        found.append("turns that wait for answers")
    elif "graphs" not in format.keeps and not _are_chains(requests):
        found.append("requests that wait for several others, or not for the turn before")
    if "text" not in format.keeps and any(request.content is not None for request in requests):
        found.append("texts")
    if "text" in format.keeps and name != DEFAULT and any(request.content is None for request in requests):
        raise WorkloadError(f"{workload.name} has no texts, only lengths and ids: it cannot be written as {name}")
    return found


def writer(name: str) -> Writer:
    """Return what writes a format.

    Raises:
        WorkloadError: there is no such format, or it is not written.
    """
    format = FORMATS.get(name)
    if format is None or format.write is None:
        known = [other for other, format in FORMATS.items() if format.write is not None]
        raise WorkloadError(f"format {name!r} is not written; expected one of {', '.join(known)}")
    return format.write


def write(workload: Workload, name: str, file: IO[bytes]) -> None:
    """Write a workload in a format, in the format's block size."""
    format = FORMATS[name]
    is_blocked = "sharing" in format.keeps and format.block_size is not None
    writer(name)(reblocked(workload, format.block_size or 0) if is_blocked else workload, file)


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


def _are_chains(requests: list[Request]) -> bool:
    """Tell whether each request that waits does so for the one before it in its session."""
    last: dict[str, int] = {}
    for number, request in enumerate(requests):
        before = last.get(request.session) if request.session else None
        if request.after and request.after != (before,):
            return False
        last[request.session] = number
    return True

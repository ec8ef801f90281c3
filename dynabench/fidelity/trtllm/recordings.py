"""Recordings of TensorRT-LLM's Python scheduler: a first line with the scenario and its requests, then a line per step.

NVIDIA's scheduler classes decided who passes, who is paused, who computes how much, who waits and which rank takes what. The
requests, the KV blocks and the loop around them were stand-ins. So `free`, `free_end`, `reuse`, `cached` and `evicted` are what
those stand-ins, and not TensorRT-LLM, had.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynabench.fidelity.recordings import (
    MALFORMED,
    Json,
    NumTokens,
    RecordingError,
    Step,
    Token,
    is_head,
    rows_of,
    why_unreadable,
)
from mocker.chain import BlockChain
from mocker.trtllm.request import Request
from mocker.trtllm.settings import BalanceSettings, Settings

VERSION = "2026 (Python scheduler)"
"""Recordings do not name a version: the classes are of 2026, and not all of one commit."""
KNOWN_SETTINGS = {
    *("name", "policy", "block", "blocks", "max_batch_size", "max_num_tokens", "chunk", "reuse", "overlap", "prefix_aware"),
    *("two_step", "capacity", "max_active", "wait_iters", "wait_ratio", "adapters", "transfer_iters", "drafts", "store"),
    *("no_kv", "adp"),
}  # fmt: skip
MAX_LENGTH = 1 << 24
"""Tokens of the longest request that is read."""
NUM_SPARE_OUTPUTS = 8
"""Outputs that a request may have beyond those asked for, if it is paused when its last one is in flight."""


@dataclass
class Arrival:
    """A request, and when its cancel arrives."""

    request: Request
    step: int
    cancelled_at: int | None


@dataclass
class Recording:
    """A scenario, and what TensorRT-LLM's scheduler decided in each step."""

    path: Path
    settings: Settings
    transfer_iters: int
    """Steps from the allocation of a prompt's blocks until its KV has come from elsewhere."""
    arrivals: list[Arrival]
    steps: list[Json]


class RecordedRequest(msgspec.Struct):
    """A request as a recording has it; its tokens count up from the first of each run."""

    id: int
    arrive: Step
    prompt: list[tuple[Token, NumTokens]]
    max_new: NumTokens
    out: Token
    stop_at: int | None = None
    abort: Step | None = None
    gen_init: bool = False
    lora: int | None = None
    rank: Step | None = None
    relax: bool = False


def read(path: Path) -> Recording:
    """Read a recording.

    Raises:
        RecordingError: the file is not a recording, or has settings that the mocker does not know.
    """
    try:
        rows = list(rows_of(path))
        if not rows or not is_head(rows[0], "scenario"):
            raise RecordingError(f"{path}: expected a first line with `scenario`")
        recording = _read(path, rows)
    except MALFORMED as error:
        raise RecordingError(f"{path}: cannot be read as a recording ({why_unreadable(error)})") from error
    return recording


def _read(path: Path, rows: list[Json]) -> Recording:
    scenario, steps = rows[0]["scenario"], rows[1:]
    unknown = sorted(scenario.keys() - KNOWN_SETTINGS)
    if unknown:
        raise RecordingError(f"{path}: recorded with {', '.join(unknown)}, which the mocker does not know")
    if not steps:
        raise RecordingError(f"{path}: contains no steps")
    for number, row in enumerate(steps):
        if row["step"] != number:
            raise RecordingError(f"{path}, line {number + 2}: has step {row['step']} instead of {number}")
    given = msgspec.convert(rows[0]["requests"], list[RecordedRequest])
    arrivals = [Arrival(_request(each, scenario["block"]), each.arrive, each.abort) for each in given]
    return Recording(path, _settings(scenario), scenario.get("transfer_iters", 0), arrivals, steps)


def _settings(scenario: Json) -> Settings:
    chunk, adp, adapters = scenario["chunk"], scenario.get("adp"), scenario.get("adapters")
    return Settings(
        scenario["blocks"],
        scenario["block"],
        scenario["max_batch_size"],
        scenario["max_num_tokens"],
        scenario["policy"],
        chunk_unit=chunk and chunk[1],
        has_equal_progress=bool(chunk) and chunk[0] == "EQUAL_PROGRESS",
        enable_block_reuse=scenario["reuse"],
        has_overlap=scenario.get("overlap", False),
        batch_wait_timeout_iters=scenario.get("wait_iters", 0),
        batch_wait_max_tokens_ratio=scenario.get("wait_ratio", 0.0),
        num_ranks=adp and adp["ranks"],
        balance=_balance(adp) if adp and adp["balance"] else None,
        max_draft_len=scenario.get("drafts", 0),
        is_prefix_aware=scenario.get("prefix_aware", True),
        num_steps_ahead=2 if scenario.get("two_step") else 1,
        max_passed=scenario.get("capacity"),
        max_active=scenario.get("max_active"),
        adapter_pages=adapters and (adapters[0], {int(adapter): pages for adapter, pages in adapters[1].items()}),
        stores_chunks=scenario.get("store", "end") == "chunk",
        has_kv_cache=not scenario.get("no_kv", False),
        pauses_ended=True,
    )


def _balance(adp: Json) -> BalanceSettings:
    return BalanceSettings(
        adp["timeout_iters"], adp["batching_wait_iters"], adp.get("min_gen", 0), adp.get("low_timeout", 0)
    )


def _request(row: RecordedRequest, block_size: int) -> Request:
    num_prompt = sum(length for _, length in row.prompt)
    if num_prompt + row.max_new > MAX_LENGTH:
        raise ValueError(f"request {row.id} has {num_prompt + row.max_new:,} tokens; expected at most {MAX_LENGTH:,}")
    tokens = [first + offset for first, length in row.prompt for offset in range(length)]
    tokens += range(row.out, row.out + row.max_new + NUM_SPARE_OUTPUTS)
    return Request(
        row.id,
        num_prompt=num_prompt,
        max_tokens=row.max_new,
        chain=BlockChain(content_ids(tokens, block_size, row.lora)),
        stop_after=row.stop_at,
        adapter=row.lora,
        is_generation_only=row.gen_init,
        rank=row.rank,
        has_strict_rank=row.rank is not None and not row.relax,
    )


def content_ids(tokens: list[int], block_size: int, adapter: int | None) -> list[Hashable]:
    """Name each full block of a token sequence by its adapter, its content and everything before it."""
    ids: list[Hashable] = []
    parent: Hashable = adapter
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, tuple(tokens[start : start + block_size])))
        ids.append(parent)
    return ids

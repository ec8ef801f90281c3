"""Recordings of a real SGLang scheduler: the requests that it was given, and what it decided in each iteration.

A file has the scenario on line 1, then a line for each iteration of the event loop.
"""

from dataclasses import dataclass, field
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
from dynabench.fidelity.sglang.copies import Direction
from mocker.sglang.config import SglangConfig

NOT_MODELLED = (
    "hicache_storage_backend",
    "enable_lora",
    "speculative_algorithm",
    "disaggregation_mode",
    "enable_dp_attention",
    "enable_session_radix_cache",
)
"""Settings that must be off."""
ENVIRONMENT = {
    "decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "no_consecutive": "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP",
}
"""Names in a scenario's configuration for what SGLang reads of its environment while it runs."""
OURS = ("overlap", "clip", *ENVIRONMENT)
"""Names in a scenario's configuration that are not SGLang's: also whether schedules overlap, and what SGLang reads once of
SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION."""
HOST_FREE = "host_free"
"""Room in host memory; recordings without HiCache are without."""
STATE = (
    "kind",
    "reqs",
    "decode_rows",
    "chunked",
    "running",
    "waiting",
    "requeued",
    "full",
    "free",
    "evictable",
    "ratio",
    HOST_FREE,
)
RESULT = (
    "processed",
    "tokens",
    "finished",
    "aborted",
    "free_after",
    "evictable_after",
    "ratio_after",
    f"{HOST_FREE}_after",
)
SENT = "published"
"""Whether SGLang sends the events of its cache in this step. Recordings may be without."""
LISTS = ("reqs", "requeued", "tokens", "finished", "aborted")
"""Fields that are left out if they are empty."""


class Add(msgspec.Struct, tag="add", tag_field="op"):
    """A recorded request."""

    before_step: Step
    id: str
    prompt: list[Token]
    max_new_tokens: NumTokens
    resolved_max_new_tokens: NumTokens | None = None
    """What SGLang made of it, if that is less."""
    ignore_eos: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class Abort(msgspec.Struct, tag="abort", tag_field="op"):
    """A recorded request that its client gives up."""

    before_step: Step
    id: str


class Flush(msgspec.Struct, tag="flush", tag_field="op"):
    """A recorded flush of the cache, and whether SGLang did it."""

    before_step: Step
    ok: bool


class EndCopy(msgspec.Struct, tag="end_copy", tag_field="op"):
    """A recorded end of the oldest copy in a direction, if there was any."""

    before_step: Step
    direction: Direction


@dataclass
class Action:
    """A call of the scheduler: `add`, `abort` or `flush`; or the end of a copy, `end_copy`."""

    kind: str
    before_step: int
    id: str = ""
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    max_new: int = 0
    stop_after: int | None = None
    ignores_eos: bool = False
    priority: int | None = None
    salt: str | None = None
    extra_key: str | None = None
    is_done: bool = False
    """Whether SGLang flushed its cache."""
    is_store: bool = False
    """Whether the copy that ends goes to host memory."""


@dataclass
class Iteration:
    """One iteration of SGLang's event loop."""

    number: int
    scheduled: Json
    processed: Json
    events: list[Json]


@dataclass
class Recording:
    """A scenario and what SGLang did, in order."""

    path: Path
    config: SglangConfig
    version: str
    num_tokens: int
    """Room in its KV cache."""
    num_host_tokens: int
    """Room in its host memory; 0: it has none."""
    hash_bits: int
    """How many bits of each page's hash are recorded."""
    actions: list[Action]
    iterations: list[Iteration]


def read(path: Path) -> Recording:
    """Read a recording.

    Raises:
        RecordingError: the file is not a recording, or uses a feature that the mocker does not model.
    """
    try:
        rows = list(rows_of(path))
        if not rows or not is_head(rows[0], "scenario"):
            raise RecordingError(f"{path}: expected a first line with `scenario`")
        scenario, steps = rows[0]["scenario"], rows[1:]
        config = _config(path, scenario)
        outputs: dict[str, list[int]] = {}
        for row in steps:
            for id, token in row.get("tokens", ()):
                outputs.setdefault(id, []).append(token)
        calls = msgspec.convert(scenario["actions"], list[Add | Abort | Flush | EndCopy])
        actions = [_action(call, outputs, scenario["resolved"]) for call in calls]
        iterations = [_iteration(path, number, row) for number, row in enumerate(steps)]
        resolved = scenario["resolved"]
        recording = Recording(
            path,
            config,
            resolved["sglang"],
            resolved["max_total_num_tokens"],
            resolved["host_num_tokens"] if config.enable_hierarchical_cache else 0,
            resolved.get("hash_bits", 64),
            actions,
            iterations,
        )
    except MALFORMED as error:
        raise RecordingError(f"{path}: cannot be read as a recording ({why_unreadable(error)})") from error
    if not iterations:
        raise RecordingError(f"{path}: contains no steps")
    return recording


def _config(path: Path, scenario: Json) -> SglangConfig:
    asked, resolved = scenario["config"], scenario["resolved"]
    for name in NOT_MODELLED:
        if asked.get(name) not in (None, False, "null"):
            raise RecordingError(f"{path}: recorded with {name} {asked[name]!r}, which the mocker does not model yet")
    unknown = [name for name in asked if name not in SglangConfig.__dataclass_fields__ and name not in OURS]
    if unknown:
        raise RecordingError(
            f"{path}: recorded with {unknown[0]} {asked[unknown[0]]!r}, which the mocker does not know"
        )
    known = {name: value for name, value in asked.items() if name not in (*OURS, "max_total_tokens")}
    chunk = resolved["chunked_prefill_size"]
    known |= {
        "page_size": resolved["page_size"],
        "chunked_prefill_size": -1 if chunk is None else chunk,
        "max_prefill_tokens": resolved["max_prefill_tokens"],
        "max_running_requests": resolved["max_running_requests"],
        "context_length": None if "max_req_len" not in resolved else resolved["max_req_len"] + 1,
        "enable_mixed_chunk": resolved["mixed_chunk"],
        "prefill_decode_interval": resolved["prefill_decode_interval"],
        "prefill_decode_interval_min_bs": resolved["prefill_decode_interval_min_bs"],
        "disable_overlap_schedule": not resolved["overlap"],
        "clip_max_new_tokens_estimation": resolved["clip"],
        "new_token_ratio_decay_steps": asked.get("decay_steps", 600),
    }
    return SglangConfig(**known)


def _action(call: Add | Abort | Flush | EndCopy, outputs: dict[str, list[int]], resolved: Json) -> Action:
    match call:
        case Flush():
            return Action("flush", call.before_step, is_done=call.ok)
        case EndCopy():
            return Action("end_copy", call.before_step, is_store=call.direction == "store")
        case Abort():
            return Action("abort", call.before_step, call.id)
        case Add():
            output = outputs.get(call.id, [])
            has_stop = not call.ignore_eos and resolved["eos"] in output
            resolved_max = call.resolved_max_new_tokens
            return Action(
                "add",
                call.before_step,
                call.id,
                call.prompt,
                output,
                call.max_new_tokens if resolved_max is None else resolved_max,
                stop_after=output.index(resolved["eos"]) + 1 if has_stop else None,
                ignores_eos=call.ignore_eos,
                priority=call.priority,
                salt=call.cache_salt,
                extra_key=call.extra_key,
            )


def _iteration(path: Path, number: int, row: Json) -> Iteration:
    if row["step"] != number:
        raise RecordingError(
            f"{path}, line {number + 2}: has step {row['step']} instead of {number}; lines are missing, or not in order"
        )
    known = {*STATE, *RESULT, "step", "events", SENT}
    if unknown := [name for name in row if name not in known]:
        raise RecordingError(f"{path}, line {number + 2}: has {unknown[0]!r}, which is not known")
    absent: Json = {name: [] for name in LISTS}
    row = absent | {"processed": None, "decode_rows": 0} | row
    row.setdefault(HOST_FREE, 0)
    for name in ("free", "evictable", "ratio", HOST_FREE):
        row.setdefault(f"{name}_after", row[name])
    return Iteration(
        number,
        {name: row[name] for name in STATE},
        {name: row[name] for name in (*RESULT, *([SENT] if SENT in row else []))},
        row.get("events", []),
    )

"""Recordings in the compact format: one file, the scenario on line 1, then a line per step (see `record`)."""

from collections import deque
from pathlib import Path

from dynabench.fidelity.recordings import Json, RecordingError
from dynabench.fidelity.vllm.entries import OF_GROUP, UNNAMED, Action, Entry, Event, Recording, Scheduled, Updated
from dynabench.fidelity.vllm.fields import not_compared_of_steps
from dynabench.fidelity.vllm.settings import config_of, layout_of_layers, num_stages_of, version_named
from mocker.vllm.versions import EngineVersion

MAY_BE_NONE = ("prefix_cache_retention_interval",)
"""Settings to which `null` is a value; of others, it says that this vLLM lacks them."""
SCHEDULED = (
    "new",
    "resumed",
    "running",
    "waiting",
    "num_waiting",
    "free_blocks",
    "drafts",
    "tables",
    "junction",
)
"""Facts of a compact row of which a replay has the same."""
FIELDS = {"tokens": "token_ids", "parent": "parent_block_hash", "adapter": "lora_name", "adapter_number": "lora_id"}
"""Fields of vLLM's events, by our names of them."""


def read_compact(path: Path, rows: list[Json], version: EngineVersion | None) -> Recording:
    """Read one from its rows; see `read` of `recordings`."""
    scenario, steps = rows[0]["scenario"], rows[1:]
    for number, row in enumerate(steps):
        if row["step"] != number:
            raise RecordingError(
                f"{path}, line {number + 2}: has step {row['step']} instead of {number}; lines are missing, or not in order"
            )
    resolved = scenario["resolved"].items()
    settings = scenario["engine"] | {key: value for key, value in resolved if value is not None or key in MAY_BE_NONE}
    outputs: dict[str, list[int]] = {}
    for row in steps:
        for id, tokens in row["tokens"].items():
            outputs.setdefault(id, []).extend(tokens)
    layout = layout_of_layers(settings, settings.get("groups", []))
    duration_s = {row["step"]: row["duration_ms"] / 1e3 for row in steps if "duration_ms" in row}
    names = dict.fromkeys(request["adapter"] for request in scenario["requests"] if request.get("adapter"))
    numbers = {name: number for number, name in enumerate(names, 1)}
    waiting = deque(sorted(scenario["requests"], key=lambda request: request["arrival_step"]))
    entries: list[Entry] = []
    for row in steps:
        while waiting and waiting[0]["arrival_step"] <= row["step"]:
            request = waiting.popleft()
            action = _added(request, outputs.get(request["id"], []), settings.get("eos_token_id"))
            action.adapter_number = numbers.get(action.adapter)
            entries.append(action)
        updated = row.get("updated", row["step"])  # older recordings, all synchronous, lack it
        if "running" in row or updated == row["step"]:
            entries.append(Scheduled(row["step"], _scheduled_in(row)))
        if updated is not None:
            events = [Event(_kind_in(event), event.get("hashes", []), _facts_of(event)) for event in row["events"]]
            ended = Updated(updated, _updated_in(row), events, duration_s.get(updated))
            ended.accepted, ended.drafts = row.get("accepted", {}), row.get("proposed", {})
            entries.append(ended)
    if waiting:
        raise RecordingError(
            f"{path}: the recording ends before step {waiting[0]['arrival_step']}, when request {waiting[0]['id']!r} "
            "arrives"
        )
    release = scenario["vllm_version"]
    config = config_of(path, settings, version or version_named(path, release))
    num_stages = num_stages_of(path, settings)
    unseen = not_compared_of_steps(steps)
    return Recording(path, config, release or UNNAMED, None, num_stages, layout, entries, unseen)


def _added(request: Json, output: list[int], end_token: int | None) -> Action:
    stops = {*request.get("stop_token_ids", ()), None if request.get("ignore_eos", True) else end_token}
    return Action(
        "add",
        request["id"],
        request["prompt"],
        output,
        request["max_tokens"],
        stops=frozenset(stops - {None}),
        priority=request.get("priority", 0),
        adapter=request.get("adapter", ""),
    )


def _kind_in(event: Json) -> str:
    """Say what an event of a compact recording reports, and of which group of layers if there are several."""
    kind: str = event["type"]
    return f"{kind}{OF_GROUP}{event['group']}" if "group" in event else kind


def _facts_of(event: Json) -> Json:
    """Return what else an event says, by vLLM's fields."""
    return {name: event[key] for key, name in FIELDS.items() if key in event}


def _scheduled_in(row: Json) -> Json:
    facts = {key: row[key] for key in SCHEDULED if key in row}
    return facts | {"scheduled": row.get("scheduled", {}), "preempted": sorted(row.get("preempted", []))}


def _updated_in(row: Json) -> Json:
    finished = row["finished"]
    facts: Json = {
        "sampled": {id: len(tokens) for id, tokens in row["tokens"].items()},
        "free_blocks": row["free_blocks_after"],
    }
    # A list of finished requests means that all answers ended by length.
    facts["finished"] = finished if isinstance(finished, dict) else dict.fromkeys(finished, "length")
    return facts | ({"wasted": row["wasted"]} if "wasted" in row else {})

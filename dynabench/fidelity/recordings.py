"""Recordings of a real vLLM scheduler: read them, replay them through the mocker, show the first difference.

Two formats are read. *Compact*: one file, the scenario on line 1, then a line per step. *Full*: a trace of
adds, aborts, schedules and updates, with the prompts in a scenario file (`../scenarios/NAME.json[.gz]`).
"""

import gzip
import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.errors import UserError
from mocker import AllBlocksCleared, BlockChain, BlockStored, Engine, EngineConfig, Sequence
from mocker.events import KvEvent
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig

Json = dict[str, Any]


class RecordingError(UserError):
    """A file that is no recording, or one whose scheduler the mocker does not model."""


@dataclass
class Action:
    """Something done to the engine just before a step: `add`, `abort` or `reset`."""

    kind: str
    id: str = ""
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    max_tokens: int = 0
    priority: int = 0
    salt: str | None = None


@dataclass
class RecordedStep:
    """What vLLM did in one step; a value of None was not recorded."""

    number: int
    facts: Json
    events: list[tuple[str, list[Hashable]]]
    actions: list[Action] = field(default_factory=list)
    duration_s: float | None = None


@dataclass
class Recording:
    """A scenario and what vLLM made of it."""

    path: Path
    config: EngineConfig
    vllm_version: str
    steps: list[RecordedStep]


@dataclass
class Verdict:
    """The outcome of a replay: `difference` is None where every step agreed."""

    path: Path
    vllm_version: str
    num_steps: int
    num_events: int
    difference: Json | None


def read(path: Path) -> Recording:
    """Read a recording in either format.

    Raises:
        RecordingError: the file is none, or uses a feature that the mocker does not model.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
            rows = [json.loads(line) for line in lines]
    except (OSError, ValueError, EOFError) as error:
        raise RecordingError(f"{path}: not a readable recording ({error})") from error
    if rows and isinstance(rows[0], dict) and "scenario" in rows[0] and isinstance(rows[0]["scenario"], dict):
        return _read_compact(path, rows)
    if rows and isinstance(rows[0], dict) and rows[0].get("op") == "meta":
        return _read_full(path, rows)
    raise RecordingError(f"{path}: expected a first line with `scenario` or `op: meta`")


def is_recording(path: Path) -> bool:
    """Tell whether a file is a recording, by its first line."""
    if not path.is_file():
        return False
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError, EOFError):
        return False
    return isinstance(first, dict) and ("scenario" in first or first.get("op") == "meta")


def verify(recording: Recording) -> Verdict:
    """Replay a recording step by step and stop at the first difference."""
    engine = _engine(recording)
    sequences: dict[str, Sequence] = {}
    names: dict[Hashable, Hashable] = {}  # vLLM's hash -> our name of that content
    now, num_events = 0.0, 0
    for step in recording.steps:
        facts: Json = {}
        for action in step.actions:
            is_reset = _act(engine, sequences, action)
            if is_reset is not None:
                facts["reset"] = is_reset
        flight = engine.schedule(now)
        facts["free_blocks"] = engine.num_free_blocks
        facts["num_waiting"] = len(engine.scheduler.waiting)
        facts["scheduled"], facts["finished"] = {}, []
        facts["new"], facts["resumed"], facts["preempted"], facts["running"] = {}, [], [], []
        if flight is not None:
            batch = flight.batch
            facts["scheduled"] = {sequence.id: count for sequence, count in engine.num_new_tokens()}
            facts["new"] = {sequence.id: sequence.cached_tokens for sequence in batch.admitted}
            facts["resumed"] = [sequence.id for sequence in batch.resumed]
            facts["preempted"] = sorted(sequence.id for sequence in batch.preempted)
            facts["running"] = [sequence.id for sequence in engine.scheduler.running]
            now = flight.end
            facts["finished"] = sorted(sequence.id for sequence in engine.complete().finished)
        facts["free_blocks_after"] = engine.num_free_blocks
        ours = list(_event_rows(engine.take_events()))
        for key, expected in step.facts.items():
            if facts.get(key) != expected or (key == "scheduled" and list(facts[key]) != list(expected)):
                return _differ(recording, step.number, num_events, key, expected, facts.get(key))
        if [(kind, len(keys)) for kind, keys in ours] != [(kind, len(keys)) for kind, keys in step.events]:
            return _differ(recording, step.number, num_events, "events", step.events, ours)
        for (kind, keys), (_, hashes) in zip(ours, step.events, strict=True):
            for name, recorded in zip(keys, hashes, strict=True):
                if names.setdefault(recorded, name) != name:
                    return _differ(recording, step.number, num_events, f"content of {kind} blocks", recorded, name)
            num_events += 1
    return Verdict(recording.path, recording.vllm_version, len(recording.steps), num_events, None)


def step_times(recording: Recording, timing: TimingConfig) -> list[tuple[bool, float, float]]:
    """Replay a recording with another engine's step times.

    Returns:
        for each step that was timed: whether it had prefill, what it took, what it takes in simulation (s).

    Raises:
        RecordingError: no step was timed.
    """
    engine = _engine(recording, timing)
    sequences: dict[str, Sequence] = {}
    now, found = 0.0, []
    for step in recording.steps:
        for action in step.actions:
            _act(engine, sequences, action)
        flight = engine.schedule(now)
        if flight is None:
            continue
        if step.duration_s is not None:
            found.append((bool(flight.batch.chunks), step.duration_s, flight.end - now))
        now = flight.end
        engine.complete()
    if not found:
        raise RecordingError(
            f"{recording.path}: has no times; record it again, which `dynabench record` does with times"
        )
    return found


def _engine(recording: Recording, timing: TimingConfig = TimingConfig()) -> Engine:  # noqa: B008 (frozen)
    simulated = resolve(recording.config, timing)
    return Engine(simulated.config, simulated.timing, num_blocks=simulated.num_blocks)


def _act(engine: Engine, sequences: dict[str, Sequence], action: Action) -> bool | None:
    """Do to the engine what was done to vLLM; of a reset, tell whether it was carried out."""
    if action.kind == "add":
        sequences[action.id] = sequence = _sequence(action, engine.config.block_size, len(sequences))
        engine.add(sequence)
    elif action.kind == "abort":
        engine.abort(sequences[action.id])
    else:
        return engine.reset_prefix_cache()
    return None


def content_ids(tokens: list[int], block_size: int, salt: str | None = None) -> list[Hashable]:
    """Name each full block of a token sequence by its content and everything before it."""
    ids: list[Hashable] = []
    parent: Hashable = ("salt", salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, tuple(tokens[start : start + block_size])))
        ids.append(parent)
    return ids


def _sequence(action: Action, block_size: int, order: int) -> Sequence:
    return Sequence(
        action.id,
        num_prompt=len(action.prompt),
        max_tokens=action.max_tokens,
        chain=BlockChain(content_ids(action.prompt + action.output, block_size, action.salt)),
        priority=action.priority,
        arrival=order,
    )


def _event_rows(events: Iterable[KvEvent]) -> Iterator[tuple[str, list[Hashable]]]:
    for event in events:
        if isinstance(event, BlockStored):
            yield "stored", event.keys()
        elif isinstance(event, AllBlocksCleared):
            yield "cleared", []
        else:
            for key in event.keys():  # noqa: SIM118 (an event, not a dict)
                yield "removed", [key]


def _differ(recording: Recording, step: int, num_events: int, what: str, expected: object, got: object) -> Verdict:
    difference = {"step": step, "what": what, "vllm": expected, "mocker": got}
    return Verdict(recording.path, recording.vllm_version, step, num_events, difference)


def _config(path: Path, settings: Json) -> EngineConfig:
    if settings.get("async_scheduling"):
        raise RecordingError(f"{path}: recorded with async_scheduling, which the mocker does not model yet")
    known = {name: settings[name] for name in EngineConfig.__dataclass_fields__ if name in settings}
    known["scheduling_policy"] = settings.get("policy", "fcfs")
    return EngineConfig(**known)


def _read_compact(path: Path, rows: list[Json]) -> Recording:
    scenario = rows[0]["scenario"]
    outputs: dict[str, list[int]] = {}
    for row in rows[1:]:
        for id, tokens in row["tokens"].items():
            outputs.setdefault(id, []).extend(tokens)
    waiting = sorted(scenario["requests"], key=lambda request: request["arrival_step"])
    steps = []
    for row in rows[1:]:
        facts: Json = {
            key: row[key] for key in ("new", "resumed", "running", "num_waiting", "free_blocks") if key in row
        }
        facts |= {"scheduled": row.get("scheduled", {}), "free_blocks_after": row["free_blocks_after"]}
        facts |= {"preempted": sorted(row.get("preempted", [])), "finished": sorted(row["finished"])}
        events = [(event["type"], event.get("hashes", [])) for event in row["events"]]
        step = RecordedStep(row["step"], facts, events)
        step.duration_s = row["duration_ms"] / 1e3 if "duration_ms" in row else None
        while waiting and waiting[0]["arrival_step"] <= row["step"]:
            request = waiting.pop(0)
            action = Action(
                "add", request["id"], request["prompt"], outputs.get(request["id"], []), request["max_tokens"]
            )
            action.priority = request.get("priority", 0)
            step.actions.append(action)
        steps.append(step)
    settings = scenario["engine"] | {key: value for key, value in scenario["resolved"].items() if value is not None}
    return Recording(path, _config(path, settings), scenario["vllm_version"], steps)


_KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


def _read_full(path: Path, rows: list[Json]) -> Recording:
    meta = rows[0]
    config = _config(path, meta["config"])
    prompts = {
        action["id"]: action for action in _scenario(path, meta["scenario"])["actions"] if "prompt_token_ids" in action
    }
    outputs = {row["id"]: row["output_token_ids"] for row in rows if row["op"] == "summary"}
    steps: list[RecordedStep] = []
    actions: list[Action] = []
    reset: bool | None = None
    for row in rows[1:]:
        if row["op"] == "add":
            source = prompts[row["id"]]
            action = Action("add", row["id"], source["prompt_token_ids"], outputs[row["id"]], source["max_tokens"])
            action.priority, action.salt = row["priority"], row["cache_salt"]
            actions.append(action)
        elif row["op"] == "abort":
            actions.append(Action("abort", row["id"]))
        elif row["op"] == "reset_prefix_cache":
            actions.append(Action("reset"))
            reset = row["ok"]
        elif row["op"] == "schedule":
            facts = {
                "scheduled": row["num_scheduled_tokens"],
                "new": {new["id"]: new["num_computed_tokens"] for new in row["new"]},
                "resumed": [known["id"] for known in row["cached"] if known["resumed"]],
                "preempted": sorted(row["preempted"]),
                "running": row["running"],
                "num_waiting": len(row["waiting"]),
                "free_blocks": row["free_blocks"],
            }
            if reset is not None:
                facts["reset"] = reset
            steps.append(RecordedStep(row["step"], facts, [], actions))
            actions, reset = [], None
        elif row["op"] == "update":
            steps[-1].facts |= {"finished": sorted(row["finished"]), "free_blocks_after": row["free_blocks"]}
            steps[-1].events = [(_KINDS[event["type"]], event.get("block_hashes", [])) for event in row["kv_events"]]
    return Recording(path, config, meta["vllm"], steps)


def _scenario(path: Path, name: str) -> Json:
    for folder in (path.parent, path.parent.parent / "scenarios"):
        for candidate in (folder / f"{name}.json", folder / f"{name}.json.gz"):
            if candidate.exists():
                with (gzip.open if candidate.suffix == ".gz" else open)(candidate, "rt") as file:
                    scenario: Json = json.load(file)
                    return scenario
    raise RecordingError(f"{path}: the scenario {name}.json is neither beside it nor in ../scenarios")

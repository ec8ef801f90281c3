"""Recordings of a real vLLM scheduler: read them, replay them through the mocker, show the first difference.

Two formats are read. *Compact*: one file, the scenario on line 1, then a line per step (see `record`). *Full*: a trace of
adds, aborts, schedules and updates, with the prompts in a scenario file (`../scenarios/NAME.json[.gz]`).
"""

import gzip
import json
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.errors import UserError
from foundation.text import one_line
from mocker import AllBlocksCleared, BlockChain, BlockStored, EngineConfig, Sequence
from mocker.events import KvEvent
from mocker.scheduler import Batch, Scheduler
from mocker.sequence import OVER
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Prefill, TimingModel, chunk

Json = dict[str, Any]

MAX_BYTES = 1 << 28
"""Largest recording that is read, unpacked."""
MALFORMED = (OSError, EOFError, zlib.error, LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading or replaying a file that is no whole recording may end with."""
NOT_MODELLED = {"kv_connector": None, "num_speculative_tokens": 0, "max_loras": 0, "pipeline_parallel_size": 1}
"""Settings that change what a scheduler does, and their values that do not."""
CACHE_STATS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
STATE = ("running", "waiting", "free_blocks")
KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


class RecordingError(UserError):
    """A file that is no recording, or one whose scheduler the mocker does not model."""


@dataclass
class Action:
    """Something done to the scheduler: `add`, `abort` or `reset`."""

    kind: str
    id: str = ""
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    max_tokens: int = 0
    stops: frozenset[int] = frozenset()
    """Tokens, EOS among them, that end the answer."""
    priority: int = 0
    salt: str | None = None
    is_done: bool | None = None
    """Whether vLLM carried out a reset."""


@dataclass
class Scheduled:
    """What vLLM put into a step."""

    number: int
    facts: Json


@dataclass
class Updated:
    """What a step brought, and the KV events that vLLM published with it."""

    number: int
    facts: Json
    events: list[tuple[str, list[Hashable]]]
    duration_s: float | None = None


@dataclass
class Recording:
    """A scenario and what vLLM made of it, in order: asynchronously, a step is scheduled before the last is known."""

    path: Path
    config: EngineConfig
    vllm_version: str
    entries: list[Action | Scheduled | Updated]


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
        rows = list(_rows(path))
        if not rows:
            raise RecordingError(f"{path}: is empty")
        if _is_head(rows[0], "scenario"):
            recording = _read_compact(path, rows)
        elif _is_head(rows[0], "op"):
            recording = _read_full(path, rows)
        else:
            raise RecordingError(f"{path}: expected a first line with `scenario` or `op: meta`")
    except MALFORMED as error:
        raise RecordingError(f"{path}: not a readable recording ({_reason(error)})") from error
    if not any(isinstance(entry, Scheduled) for entry in recording.entries):
        raise RecordingError(f"{path}: holds no step")
    return recording


def is_recording(path: Path) -> bool:
    """Tell whether a file is a recording, by its first line."""
    if not path.is_file():
        return False
    try:
        first = next(_rows(path))
    except (*MALFORMED, RecordingError, StopIteration):
        return False
    return _is_head(first, "scenario") or _is_head(first, "op")


def _rows(path: Path) -> Iterator[Any]:
    """Yield the objects of a file of JSON lines, packed or not.

    Raises:
        RecordingError: a line, or all together, unpack to more than any recording has.
    """
    left = MAX_BYTES
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
        while line := lines.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise RecordingError(f"{path}: more than {MAX_BYTES >> 20} MiB, which no recording has")
            yield json.loads(line, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_head(row: Any, key: str) -> bool:
    return isinstance(row, dict) and (isinstance(row.get(key), dict) or row.get(key) == "meta")


def _reason(error: BaseException) -> str:
    """Say what is wrong with a file, by what reading it ended with."""
    return one_line(f"it has no {error}" if isinstance(error, KeyError) else error)


def verify(recording: Recording) -> Verdict:
    """Replay a recording step by step and stop at the first difference.

    Raises:
        RecordingError: it cannot be replayed: requests or steps are missing.
    """
    num_steps = num_events = 0
    try:
        replay = _Replay(recording.config)
    except ValueError as error:
        raise RecordingError(f"{recording.path}: cannot be replayed ({one_line(error)})") from error
    for entry in recording.entries:
        try:
            difference = replay.compare(entry)
        except MALFORMED as error:
            where = f"{recording.path}, after step {num_steps - 1}" if num_steps else str(recording.path)
            raise RecordingError(f"{where}: cannot be replayed ({_reason(error)})") from error
        if difference is not None:
            return Verdict(recording.path, recording.vllm_version, num_steps, num_events, difference)
        num_steps += isinstance(entry, Scheduled)
        num_events += len(entry.events) if isinstance(entry, Updated) else 0
    if replay.num_unfinished:
        raise RecordingError(
            f"{recording.path}: ends after {num_steps} steps, before {replay.num_unfinished} of its requests do"
        )
    return Verdict(recording.path, recording.vllm_version, num_steps, num_events, None)


class _Replay:
    """The mocker's scheduler, told to do what vLLM's did."""

    def __init__(self, config: EngineConfig) -> None:
        if config.num_gpu_blocks is None:
            raise ValueError("num_gpu_blocks is not recorded")
        self._block_size = config.block_size
        self._scheduler = Scheduler(config, config.num_gpu_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[Batch | None] = deque()
        self._names: dict[Hashable, Hashable] = {}  # vLLM's hash -> our name of that content
        self._cache_stats = dict.fromkeys(CACHE_STATS, 0)

    @property
    def num_unfinished(self) -> int:
        """Requests that still wait or run."""
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def compare(self, entry: Action | Scheduled | Updated) -> Json | None:
        """Do what was done, and return the first difference in what came of it."""
        if isinstance(entry, Action):
            is_done = _act(self._scheduler, self._sequences, entry, self._block_size)
            return None if is_done is entry.is_done else _difference(None, "reset", entry.is_done, is_done)
        if isinstance(entry, Scheduled):
            return _first_difference(entry, self._schedule())
        if not self._in_flight:
            raise ValueError(f"step {entry.number} ends, but was never scheduled")
        in_flight = self._in_flight.popleft()
        return _first_difference(entry, self._update(in_flight)) or self._compare_events(entry)

    def _schedule(self) -> Json:
        scheduler = self._scheduler
        batch = scheduler.schedule()
        self._in_flight.append(batch)
        facts: Json = {"scheduled": {}, "new": {}, "resumed": [], "preempted": []}
        if batch is not None:
            facts["scheduled"] = {sequence.id: count for sequence, count in scheduler.num_new_tokens(batch)}
            facts["new"] = {sequence.id: sequence.cached_tokens for sequence in batch.admitted}
            facts["resumed"] = [sequence.id for sequence in batch.resumed]
            facts["preempted"] = sorted(sequence.id for sequence in batch.preempted)
            self._count_hits(batch)
        return facts | self._state()

    def _update(self, batch: Batch | None) -> Json:
        facts: Json = {"sampled": set(), "finished": {}, "wasted": {}}
        if batch is not None:
            facts["wasted"] = {
                sequence.id: 1 for sequence in (*batch.decodes, *batch.sampled) if sequence.state == OVER
            }
            speaking = [sequence for sequence in batch.decodes if sequence.state != OVER]
            sampled, finished = self._scheduler.update(batch)
            facts["sampled"] = {sequence.id for sequence in (*speaking, *sampled)}
            facts["finished"] = {sequence.id: sequence.finish_reason for sequence in finished}
        facts["prefix_cache_stats"] = self._cache_stats
        self._cache_stats = dict.fromkeys(CACHE_STATS, 0)
        return facts | self._state()

    def _state(self) -> Json:
        scheduler = self._scheduler
        running, waiting = ([sequence.id for sequence in queue] for queue in (scheduler.running, scheduler.waiting))
        free = scheduler.pool.num_free
        return {"running": running, "waiting": waiting, "num_waiting": len(waiting), "free_blocks": free}

    def _count_hits(self, batch: Batch) -> None:
        """Count prefix hits as vLLM does: at admission, those of resumed requests apart."""
        if not self._scheduler.config.enable_prefix_caching:
            return
        counts = dict(batch.chunks)
        for prefix, sequences in (("", batch.admitted), ("preempted_", batch.resumed)):
            for sequence in sequences:
                self._cache_stats[f"{prefix}requests"] += 1
                self._cache_stats[f"{prefix}queries"] += sequence.num_known
                self._cache_stats[f"{prefix}hits"] += sequence.num_computed - counts[sequence]

    def _compare_events(self, entry: Updated) -> Json | None:
        pool = self._scheduler.pool
        ours, pool.events = list(_event_rows(pool.events)), []
        if [(kind, len(keys)) for kind, keys in ours] != [(kind, len(keys)) for kind, keys in entry.events]:
            return _difference(entry.number, "events", entry.events, ours)
        for (kind, keys), (_, hashes) in zip(ours, entry.events, strict=True):
            for name, recorded in zip(keys, hashes, strict=True):
                if self._names.setdefault(recorded, name) != name:
                    return _difference(entry.number, f"content of {kind} blocks", recorded, name)
        return None


def _first_difference(entry: Scheduled | Updated, ours: Json) -> Json | None:
    """Return the first recorded fact that is not ours; the order of what is scheduled counts."""
    for key, expected in entry.facts.items():
        if ours[key] != expected or (key == "scheduled" and list(ours[key]) != list(expected)):
            return _difference(entry.number, key, expected, ours[key])
    return None


def _difference(step: int | None, what: str, expected: object, got: object) -> Json:
    return {"step": step, "what": what, "vllm": expected, "mocker": got}


def step_times(recording: Recording, timing: TimingConfig) -> list[tuple[bool, float, float]]:
    """Replay a recording with another engine's step times.

    Returns:
        for each step that was timed: whether it had prefill, what it took, what it takes in simulation (s).

    Raises:
        RecordingError: no step was timed.
    """
    # Where it was recorded steps do not overlap, however they are scheduled.
    simulated = resolve(replace(recording.config, async_scheduling=False), timing)
    scheduler = Scheduler(recording.config, simulated.num_blocks)
    sequences: dict[str, Sequence] = {}
    in_flight, found = deque[tuple[Batch | None, float]](), []
    for entry in recording.entries:
        if isinstance(entry, Action):
            _act(scheduler, sequences, entry, recording.config.block_size)
        elif isinstance(entry, Scheduled):
            batch = scheduler.schedule()
            expected_s = 0.0 if batch is None else _duration(simulated.timing, batch, scheduler.iteration - 1)
            in_flight.append((batch, expected_s))
        else:
            batch, expected_s = in_flight.popleft()
            if batch is None:
                continue
            if entry.duration_s is not None and not batch.is_empty:
                found.append((bool(batch.chunks), entry.duration_s, expected_s))
            scheduler.update(batch)
    if not found:
        raise RecordingError(
            f"{recording.path}: has no times; record it again, which `dynabench record` does with times"
        )
    return found


def _duration(timing: TimingModel, batch: Batch, iteration: int) -> float:
    """Return what a batch just scheduled takes in an iteration: one of decodes stands for several in a row."""
    num_decodes = len(batch.decodes)
    num_kv_tokens = batch.num_kv_tokens + num_decodes * (iteration - batch.iteration)
    if batch.is_empty:
        return 0.0
    if not batch.chunks:
        return timing.decode(num_decodes, num_kv_tokens).first
    parts = [chunk(count, sequence.num_computed - count) for sequence, count in batch.chunks]
    return timing.mixed(Prefill(*map(sum, zip(*parts, strict=True))), num_decodes, num_kv_tokens)


def _act(scheduler: Scheduler, sequences: dict[str, Sequence], action: Action, block_size: int) -> bool | None:
    """Do what was done to vLLM; of a reset, tell whether it was carried out."""
    if action.kind == "add":
        if action.id in sequences:
            raise ValueError(f"request {action.id!r} is added twice")
        sequences[action.id] = sequence = _sequence(action, block_size, len(sequences))
        scheduler.add(sequence)
    elif action.kind == "abort":
        scheduler.abort(sequences[action.id])
    else:
        return scheduler.reset_prefix_cache()
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
    stop = next((place for place, token in enumerate(action.output) if token in action.stops), None)
    return Sequence(
        action.id,
        num_prompt=len(action.prompt),
        max_tokens=action.max_tokens,
        stop_after=None if stop is None else stop + 1,
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


def _config(path: Path, settings: Json) -> EngineConfig:
    for name, without in NOT_MODELLED.items():
        if settings.get(name, without) != without:
            raise RecordingError(
                f"{path}: recorded with {name} {settings[name]!r}, which the mocker does not model yet"
            )
    known = {name: settings[name] for name in EngineConfig.__dataclass_fields__ if name in settings}
    known["scheduling_policy"] = settings.get("policy", "fcfs")
    known["async_scheduling"] = settings.get("async_scheduling", False)
    return EngineConfig(**known)


def _read_compact(path: Path, rows: list[Json]) -> Recording:
    scenario, steps = rows[0]["scenario"], rows[1:]
    settings = scenario["engine"] | {key: value for key, value in scenario["resolved"].items() if value is not None}
    outputs: dict[str, list[int]] = {}
    for row in steps:
        for id, tokens in row["tokens"].items():
            outputs.setdefault(id, []).extend(tokens)
    duration_s = {row["step"]: row["duration_ms"] / 1e3 for row in steps if "duration_ms" in row}
    waiting = deque(sorted(scenario["requests"], key=lambda request: request["arrival_step"]))
    entries: list[Action | Scheduled | Updated] = []
    for row in steps:
        while waiting and waiting[0]["arrival_step"] <= row["step"]:
            request = waiting.popleft()
            entries.append(_added(request, outputs.get(request["id"], []), settings.get("eos_token_id")))
        updated = row.get("updated", row["step"])  # older recordings, all synchronous, do not say
        if "running" in row or updated == row["step"]:
            entries.append(Scheduled(row["step"], _scheduled_in(row)))
        if updated is not None:
            events = [(event["type"], event.get("hashes", [])) for event in row["events"]]
            entries.append(Updated(updated, _updated_in(row), events, duration_s.get(updated)))
    if waiting:
        raise RecordingError(
            f"{path}: ends before step {waiting[0]['arrival_step']}, when request {waiting[0]['id']!r} arrives"
        )
    return Recording(path, _config(path, settings), scenario["vllm_version"], entries)


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
    )


def _scheduled_in(row: Json) -> Json:
    facts = {key: row[key] for key in ("new", "resumed", "running", "num_waiting", "free_blocks") if key in row}
    return facts | {"scheduled": row.get("scheduled", {}), "preempted": sorted(row.get("preempted", []))}


def _updated_in(row: Json) -> Json:
    finished = row["finished"]
    facts: Json = {"sampled": set(row["tokens"]), "free_blocks": row["free_blocks_after"]}
    # A list of those that finished is one of answers that end by length.
    facts["finished"] = finished if isinstance(finished, dict) else dict.fromkeys(finished, "length")
    return facts | ({"wasted": row["wasted"]} if "wasted" in row else {})


def _read_full(path: Path, rows: list[Json]) -> Recording:
    meta = rows[0]
    config = _config(path, meta["config"])
    prompts = {
        action["id"]: action for action in _scenario(path, meta["scenario"])["actions"] if "prompt_token_ids" in action
    }
    outputs = {row["id"]: row["output_token_ids"] for row in rows if row["op"] == "summary"}
    entries: list[Action | Scheduled | Updated] = []
    known: set[str] = set()
    for row in rows[1:]:
        match row["op"]:
            case "add":
                source = prompts[row["id"]]
                action = Action("add", row["id"], source["prompt_token_ids"], outputs[row["id"]], source["max_tokens"])
                action.stops = frozenset([*row.get("stop_token_ids", ()), row.get("eos_token_id")]) - {None}
                action.priority, action.salt = row["priority"], row["cache_salt"]
                entries.append(action)
            case "abort":
                entries.append(Action("abort", row["id"]))
            case "reset_prefix_cache":
                entries.append(Action("reset", is_done=row["ok"]))
            case "schedule":
                entries.append(Scheduled(row["step"], _scheduled(row, known)))
                known |= {new["id"] for new in row["new"]}
            case "update":
                events = [(KINDS[event["type"]], event.get("block_hashes", [])) for event in row["kv_events"]]
                entries.append(Updated(row["step"], _updated(row), events))
            case "summary" | "drafts":
                pass
            case other:
                raise RecordingError(f"{path}: expected add, abort, schedule, update or summary, not op {other!r}")
    return Recording(path, config, meta["vllm"], entries)


def _scheduled(row: Json, known: set[str]) -> Json:
    """Return the facts of a `schedule`; vLLM's second model runner reports as new also what it resumes."""
    resumed = [new["id"] for new in row["new"] if new["id"] in known]
    facts = {
        "scheduled": row["num_scheduled_tokens"],
        "new": {new["id"]: new["num_computed_tokens"] for new in row["new"] if new["id"] not in known},
        "resumed": resumed + [cached["id"] for cached in row["cached"] if cached["resumed"]],
        "preempted": sorted(row["preempted"]),
    }
    return facts | {key: row[key] for key in STATE}


def _updated(row: Json) -> Json:
    stats = row["prefix_cache_stats"]
    facts = {"sampled": set(row["sampled"]), "finished": row["finished"]}
    if "wasted" in row:
        facts["wasted"] = row["wasted"]
    if stats is not None:
        facts["prefix_cache_stats"] = {key: stats[key] for key in CACHE_STATS}
    return facts | {key: row[key] for key in STATE}


def _scenario(path: Path, name: str) -> Json:
    for folder in (path.parent, path.parent.parent / "scenarios"):
        for candidate in (folder / f"{name}.json", folder / f"{name}.json.gz"):
            if candidate.exists():
                with (gzip.open if candidate.suffix == ".gz" else open)(candidate, "rt") as file:
                    scenario: Json = json.load(file)
                    return scenario
    raise RecordingError(f"{path}: the scenario {name}.json is neither beside it nor in ../scenarios")

"""Recordings of a real vLLM scheduler: the calls it received, what it scheduled, and the output of each step.

Two formats are read. *Compact*: one file, the scenario on line 1, then a line per step (see `record`). *Full*: a trace
of adds, aborts, schedules and updates, with the prompts in a scenario file (`../scenarios/NAME.json[.gz]`).
"""

import gzip
import json
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from dynabench.fidelity.recordings import MALFORMED, Json, RecordingError, is_head, rows_of, why_unreadable
from mocker import EngineConfig
from mocker.models.kv_groups import KvLayout, LayerKv, layout_of
from mocker.tiers.config import HostMemory
from mocker.vllm.versions import EngineVersion, version_of

CONNECTORS = (None, "NixlConnector", "OffloadingConnector")
CACHE_STATS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
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
STATE = ("running", "waiting", "free_blocks")
TRANSFER_STATE = ("kv_holding", "loading", "reserved_blocks")
KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


@dataclass
class Action:
    """A call of the scheduler: `add`, `abort` or `reset`."""

    kind: str
    id: str = ""
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    max_tokens: int = 0
    stops: frozenset[int] = frozenset()
    """Tokens that end the answer, including EOS."""
    priority: int = 0
    salt: str | None = None
    adapter: str = ""
    remote: str | None = None
    """The role of another engine: `decode` if this one loads KV from it, `prefill` if it reads KV from this one."""
    is_done: bool | None = None
    """Whether vLLM carried out a reset."""


@dataclass
class Scheduled:
    """What vLLM put into a step."""

    number: int
    facts: Json
    ended: list[str] = field(default_factory=list)
    """Requests that had ended, in the order in which vLLM handled them, if that is recorded."""


@dataclass
class Updated:
    """The output of a step, and the KV events that vLLM published with it."""

    number: int
    facts: Json
    events: list[tuple[str, list[Hashable]]]
    duration_s: float | None = None
    arrivals: list[tuple[str, int | None]] = field(default_factory=list)
    """Requests whose KV had arrived, with the number of valid blocks if some are invalid."""
    sent: list[str] = field(default_factory=list)
    """Requests whose KV was read or given up."""
    copies: list[int] = field(default_factory=list)
    """Numbers of the completed copies to or from host memory."""
    host_events: list[tuple[str, list[Hashable]]] = field(default_factory=list)
    """KV events of host memory; the last hash of a stored chunk identifies it."""
    accepted: dict[str, int] = field(default_factory=dict)
    """How many of each request's drafts the model accepted."""
    drafts: dict[str, int] = field(default_factory=dict)
    """How many drafts there were then for each request's next step, if scheduling was synchronous."""


UNNAMED = "of unknown version"
"""Follows the name of an engine whose version a recording does not name."""


@dataclass
class Recording:
    """A scenario and what vLLM did, in order; asynchronously, each step is scheduled before the last one ends."""

    path: Path
    config: EngineConfig
    version: str
    offloading: HostMemory | None
    """Host memory, if it stores KV."""
    max_loras: int | None
    """How many adapters may run at once, if requests have any."""
    num_stages: int
    """Stages of the pipeline."""
    layout: KvLayout | None
    """Groups of layers, if they were recorded."""
    entries: list[Action | Scheduled | Updated]


def read(path: Path, version: EngineVersion | None = None) -> Recording:
    """Read a recording in either format, to be replayed with the rules of a version (None: of the one that it names).

    Raises:
        RecordingError: the file is not a recording, or uses a feature that the mocker does not model, or its version is not
            known.
    """
    try:
        rows = list(rows_of(path))
        if not rows:
            raise RecordingError(f"{path}: the file is empty")
        if is_head(rows[0], "scenario"):
            recording = _read_compact(path, rows, version)
        elif is_head(rows[0], "op"):
            recording = _read_full(path, rows, version)
        else:
            raise RecordingError(f"{path}: expected a first line with `scenario` or `op: meta`")
    except MALFORMED as error:
        raise RecordingError(f"{path}: cannot be read as a recording ({why_unreadable(error)})") from error
    if not any(isinstance(entry, Scheduled) for entry in recording.entries):
        raise RecordingError(f"{path}: contains no steps")
    return recording


def _version(path: Path, release: object) -> EngineVersion:
    try:
        return version_of(release)
    except ValueError as error:
        raise RecordingError(f"{path}: recorded from {error}") from error


def _config(path: Path, settings: Json, version: EngineVersion) -> EngineConfig:
    if settings.get("kv_connector") not in CONNECTORS:
        raise RecordingError(
            f"{path}: recorded with kv_connector {settings['kv_connector']!r}; expected one of {', '.join(CONNECTORS[1:])} or none"
        )
    known = {name: settings[name] for name in EngineConfig.__dataclass_fields__ if name in settings}
    known["engine_version"] = version
    if not known.get("max_loras"):
        known.pop("max_loras", None)  # 0: none
    known["scheduling_policy"] = settings.get("policy", "fcfs")
    known["async_scheduling"] = settings.get("async_scheduling", False)
    if known.get("num_speculative_tokens"):
        if "spec_method" not in settings:
            raise RecordingError(f"{path}: it speculates, and does not say what drafts; expected config.spec_method")
        known["speculative_method"] = settings["spec_method"]
    if known.get("speculative_method") == "ngram" and known["async_scheduling"]:
        known["speculative_method"] = "ngram_gpu"  # only that knows its drafts in time
    if settings.get("kv_connector") == "OffloadingConnector":
        known["kv_role"] = None  # kv_both: no other engine is involved
    return EngineConfig(**known)


def _offloading(meta: Json) -> HostMemory | None:
    settings = meta["config"]
    if settings.get("kv_connector") != "OffloadingConnector":
        return None
    given = settings["kv_connector_extra_config"]
    known = {name: given[name] for name in HostMemory.__dataclass_fields__ if name in given}
    budget = given.get("sync_load_budget_bytes", 0)
    if budget:
        known["load_tokens_within_step"] = budget // meta["kv_bytes_per_token"]
    return HostMemory(num_chunks=given["num_cpu_chunks"], **known)


def _kind_of(event: Json, layout: KvLayout | None) -> str:
    """Say what an event reports, and of which group of layers if there are several."""
    kind = KINDS[event["type"]]
    return kind if layout is None or event["type"] == "AllBlocksCleared" else f"{kind} of group {event['group_idx']}"


def _layout(settings: Json, recorded: list[Json]) -> KvLayout | None:
    """Return the groups of a model's layers, which must be those of vLLM.

    Raises:
        ValueError: vLLM grouped them otherwise.
    """
    if "layers" not in settings:
        return None
    layout = layout_of(
        [_layer(layer) for layer in settings["layers"]],
        settings["block_size"],
        state_block_size=None if settings["enable_prefix_caching"] else settings["max_model_len"],
        is_block_outermost=settings["kv_cache_layout"].startswith("B"),
    )
    ours = [(group.layer.kind, group.block_size, list(group.layers)) for group in layout.groups]
    theirs = [(group["kind"], group["block_size"], group["layers"]) for group in recorded]
    if ours != theirs:
        raise ValueError(f"the layers form the groups {ours}; expected those that are recorded, {theirs}")
    return layout


def _layer(layer: Json) -> LayerKv:
    if layer["kind"] == "mamba":
        return LayerKv(0.0, state=layer["state_bytes"])
    window: int = layer["window" if layer["kind"] == "sliding" else "chunk"] if layer["kind"] != "full" else 0
    token = 2 * layer.get("element_bytes", 2) * layer["heads"] * layer["head_size"]
    return LayerKv(token, window, layer["kind"] == "chunked")


def _read_compact(path: Path, rows: list[Json], version: EngineVersion | None) -> Recording:
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
    layout = _layout(settings, settings.get("groups", []))
    duration_s = {row["step"]: row["duration_ms"] / 1e3 for row in steps if "duration_ms" in row}
    waiting = deque(sorted(scenario["requests"], key=lambda request: request["arrival_step"]))
    entries: list[Action | Scheduled | Updated] = []
    for row in steps:
        while waiting and waiting[0]["arrival_step"] <= row["step"]:
            request = waiting.popleft()
            entries.append(_added(request, outputs.get(request["id"], []), settings.get("eos_token_id")))
        updated = row.get("updated", row["step"])  # older recordings, all synchronous, lack it
        if "running" in row or updated == row["step"]:
            entries.append(Scheduled(row["step"], _scheduled_in(row)))
        if updated is not None:
            events = [(_kind_in(event), event.get("hashes", [])) for event in row["events"]]
            ended = Updated(updated, _updated_in(row), events, duration_s.get(updated))
            ended.accepted, ended.drafts = row.get("accepted", {}), row.get("proposed", {})
            entries.append(ended)
    if waiting:
        raise RecordingError(
            f"{path}: the recording ends before step {waiting[0]['arrival_step']}, when request {waiting[0]['id']!r} "
            "arrives"
        )
    release = scenario["vllm_version"]
    config = _config(path, settings, version or _version(path, release))
    max_loras, num_stages = _beside(path, settings)
    return Recording(path, config, release or UNNAMED, None, max_loras, num_stages, layout, entries)


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
    return f"{kind} of group {event['group']}" if "group" in event else kind


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


def _read_full(path: Path, rows: list[Json], version: EngineVersion | None) -> Recording:
    meta = rows[0]
    config = _config(path, meta["config"], version or _version(path, meta["vllm"]))
    prompts = {
        action["id"]: action for action in _scenario(path, meta["scenario"])["actions"] if "prompt_token_ids" in action
    }
    outputs = {row["id"]: row["output_token_ids"] for row in rows if row["op"] == "summary"}
    entries: list[Action | Scheduled | Updated] = []
    known: set[str] = set()
    loads: dict[str, tuple[int, list[int]]] = {}  # blocks hit before, and ids of the blocks to load
    offloading, layout = _offloading(meta), _layout(meta["config"], meta.get("groups", []))
    for row in rows[1:]:
        match row["op"]:
            case "add":
                source = prompts[row["id"]]
                action = Action("add", row["id"], source["prompt_token_ids"], outputs[row["id"]], source["max_tokens"])
                action.stops = frozenset([*row.get("stop_token_ids", ()), row.get("eos_token_id")]) - {None}
                action.priority, action.salt = row["priority"], row["cache_salt"]
                action.adapter = row["lora"][0] if row.get("lora") else ""
                action.remote = row["kv"]["kind"] if "kv" in row else None
                entries.append(action)
            case "abort":
                entries.append(Action("abort", row["id"]))
            case "reset_prefix_cache":
                entries.append(Action("reset", is_done=row["ok"]))
            case "schedule":
                entries.append(Scheduled(row["step"], _scheduled(row, known), row.get("finished_order", [])))
                known |= {new["id"] for new in row["new"]}
                loads |= _loads(row, config.block_size)
            case "update":
                events = [(_kind_of(event, layout), event.get("block_hashes", [])) for event in row["kv_events"]]
                arrivals, sent = _transferred(row.get("kv_out", {}), loads)
                updated = Updated(row["step"], _updated(row), events, arrivals=arrivals, sent=sent)
                updated.accepted = row.get("accepted", {})
                updated.copies = row.get("kv_out", {}).get("completed_jobs", [])
                updated.host_events = [
                    (KINDS[event["type"]], event["block_hashes"]) for event in row.get("connector_events", ())
                ]
                entries.append(updated)
            case "drafts":
                updated.drafts = {id: len(tokens) for id, tokens in row["drafts"].items()}
            case "summary":
                pass
            case other:
                raise RecordingError(f"{path}: expected add, abort, schedule, update or summary, not op {other!r}")
    settings = meta["config"]
    max_loras, num_stages = _beside(path, settings)
    return Recording(path, config, meta["vllm"] or UNNAMED, offloading, max_loras, num_stages, layout, entries)


def _beside(path: Path, settings: Json) -> tuple[int | None, int]:
    """Return how many adapters may run at once, if requests have any, and the number of stages."""
    num_stages = settings.get("pipeline_parallel_size", 1)
    if not isinstance(num_stages, int) or num_stages < 1:
        raise RecordingError(f"{path}: pipeline_parallel_size is {num_stages!r}; expected a number of stages")
    return settings.get("max_loras") or None, num_stages


def _scheduled(row: Json, known: set[str]) -> Json:
    """Return the facts of a `schedule`; vLLM's second model runner also reports resumed requests as new."""
    resumed = [new["id"] for new in row["new"] if new["id"] in known]
    facts = {
        "scheduled": row["num_scheduled_tokens"],
        "new": {new["id"]: new["num_computed_tokens"] for new in row["new"] if new["id"] not in known},
        "resumed": resumed + [cached["id"] for cached in row["cached"] if cached["resumed"]],
        "preempted": sorted(row["preempted"]),
    }
    for key in ("junction", "tables"):
        if key in row:
            facts[key] = row[key]
    if "spec" in row:
        facts["drafts"] = {id: len(tokens) for id, tokens in row["spec"].items()}
    if "cpu_free_chunks" in row:
        meta = row["kv_meta"]
        facts["host_loads"] = {
            int(number): [load["id"], *row["matched"][load["id"]], load["cpu_chunks"], load.get("sync", False)]
            for number, load in meta["load"].items()
        }
        facts["host_stores"] = {int(number): [copy["id"], copy["cpu_chunks"]] for number, copy in meta["store"].items()}
        facts["flushed"] = set(meta["flush"])
    elif "kv_meta" in row:
        meta = row["kv_meta"]
        recv = {id: len(load["block_ids"]) for id, load in meta["recv"].items()}
        facts["loads"] = {id: [*row["matched"][id], count] for id, count in recv.items() if count}
        facts["unread"] = {id for id, count in recv.items() if not count}
        facts["send"], facts["in_batch"] = set(meta["send"]), set(meta["in_batch"])
        facts["not_processed"] = set(meta["not_processed"])
    return facts | _state(row)


def _state(row: Json) -> Json:
    facts = {key: row[key] for key in STATE}
    if "kv_holding" in row:
        facts |= {key: row[key] for key in TRANSFER_STATE}
        facts |= {"held": set(row["held"]), "fenced_blocks": [len(ids) for _, ids in row["deferred_free"]]}
        facts |= {"free_host_chunks": row["cpu_free_chunks"]} if "cpu_free_chunks" in row else {"fetch": row["fetch"]}
    return facts


def _loads(row: Json, block_size: int) -> dict[str, tuple[int, list[int]]]:
    """Return the transfers that a step began: the number of blocks hit before, and the ids of the blocks to fill."""
    if "cpu_free_chunks" in row:  # these loads never fail
        return {load["id"]: (0, []) for load in row["kv_meta"]["load"].values()}
    recv = row.get("kv_meta", {}).get("recv", {})
    return {
        id: (row["matched"][id][0] // block_size, load["block_ids"]) for id, load in recv.items() if load["block_ids"]
    }


def _transferred(out: Json, loads: dict[str, tuple[int, list[int]]]) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Return the transfers that ended with a step: arrivals with their valid blocks, and requests that were read."""
    failed, invalid = set(out.get("failed_recving", ())), set(out.get("invalid_block_ids", ()))
    arrivals: list[tuple[str, int | None]] = []
    for id in out.get("finished_recving", ()):
        hits, blocks = loads[id]
        first_bad = next((place for place, block in enumerate(blocks) if block in invalid), None)
        arrivals.append((id, 0 if id in failed else None if first_bad is None else hits + first_bad))
    return arrivals, list(out.get("finished_sending", ()))


def _updated(row: Json) -> Json:
    stats = row["prefix_cache_stats"]
    facts = {"sampled": {id: len(tokens) for id, tokens in row["sampled"].items()}, "finished": row["finished"]}
    if "kv_out" in row:
        given = row.get("kv_transfer_params", {})
        facts["handed_over"] = {
            id: [len(answer["remote_block_ids"][0]), answer["remote_prefill_cached_tokens"]]
            for id, answer in given.items()
        }
        facts["connector_prefix_cache_stats"] = {key: row["connector_prefix_cache_stats"][key] for key in CACHE_STATS}
    if "wasted" in row:
        facts["wasted"] = row["wasted"]
    if stats is not None:
        facts["prefix_cache_stats"] = {key: stats[key] for key in CACHE_STATS}
    return facts | _state(row)


def _scenario(path: Path, name: str) -> Json:
    here = path.resolve().parent
    for folder in (here, here.parent / "scenarios"):
        for candidate in (folder / f"{name}.json", folder / f"{name}.json.gz"):
            if candidate.exists():
                with (gzip.open if candidate.suffix == ".gz" else open)(candidate, "rt") as file:
                    scenario: Json = json.load(file)
                    return scenario
    raise RecordingError(f"{path}: the scenario {name}.json is neither in the same folder nor in ../scenarios")

"""Recordings in the full format: a trace of adds, aborts, schedules and updates, with the prompts in a scenario file.

The scenario is `../scenarios/NAME.json[.gz]`, or in the same folder.
"""

import gzip
import json
from collections.abc import Hashable
from pathlib import Path

from dynabench.fidelity.recordings import Json, RecordingError
from dynabench.fidelity.vllm.entries import (
    OF_GROUP,
    UNNAMED,
    Action,
    Ended,
    Entry,
    Event,
    Recording,
    Scheduled,
    Updated,
)
from dynabench.fidelity.vllm.fields import OF_EVENTS, SUMMARY, not_compared_of_trace
from dynabench.fidelity.vllm.settings import (
    config_of,
    layout_of_layers,
    num_stages_of,
    offloading_of,
    version_named,
)
from mocker.media import MediaItem
from mocker.models.kv_groups import KvLayout
from mocker.vllm.versions import EngineVersion

CACHE_STATS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
STATE = ("running", "waiting", "free_blocks")
TRANSFER_STATE = ("kv_holding", "loading", "reserved_blocks")
OF_ALL_STEPS = (*STATE, "usage", "free_queue", "junction", "tables", "num_encoded", "encoder_cache", "spec")
"""Fields that each step has, if one has them."""
KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


def read_trace(path: Path, rows: list[Json], version: EngineVersion | None) -> Recording:
    """Read one from its rows; see `read` of `recordings`."""
    meta = rows[0]
    config = config_of(path, meta["config"], version or version_named(path, meta["vllm"]))
    _check_steps(path, rows)
    prompts = {
        action["id"]: action for action in _scenario(path, meta["scenario"])["actions"] if "prompt_token_ids" in action
    }
    outputs = {row["id"]: row["output_token_ids"] for row in rows if row["op"] == "summary"}
    entries: list[Entry] = []
    tables: dict[str, list[int]] = {}  # vLLM's numbers of each request's blocks
    known: set[str] = set()
    loads: dict[str, tuple[int, list[int]]] = {}  # blocks hit before, and ids of the blocks to load
    offloading, layout = offloading_of(meta), layout_of_layers(meta["config"], meta.get("groups", []))
    for row in rows[1:]:
        match row["op"]:
            case "add":
                source = prompts[row["id"]]
                action = Action("add", row["id"], source["prompt_token_ids"], outputs[row["id"]], source["max_tokens"])
                action.stops = frozenset([*row.get("stop_token_ids", ()), row.get("eos_token_id")]) - {None}
                action.end_token = row.get("eos_token_id")
                action.priority, action.salt = row["priority"], row["cache_salt"]
                action.adapter, action.adapter_number = row["lora"] if row.get("lora") else ("", None)
                action.media = tuple([MediaItem(*item) for item in source.get("media", ())])
                action.remote = row["kv"]["kind"] if "kv" in row else None
                action.facts, action.hashes = _said_of(row, has_numbers=meta.get("int_block_hashes", True))
                entries.append(action)
            case "abort":
                entries.append(Action("abort", row["id"], facts={"was": row["was"]} if "was" in row else {}))
            case "reset_prefix_cache":
                entries.append(Action("reset", is_done=row["ok"]))
            case "schedule":
                scheduled = Scheduled(row["step"], _scheduled(row, known), row.get("finished_order", []))
                if layout is None:
                    scheduled.tables = _blocks_to_load(row, config.block_size) | _new_blocks(row, tables)
                entries.append(scheduled)
                known |= {new["id"] for new in row["new"]}
                loads |= _loads(row, config.block_size)
            case "update":
                events = [_event(event, layout) for event in row["kv_events"]]
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
                entries.append(Ended(row["id"], {key: row[key] for key in SUMMARY}))
            case other:
                raise RecordingError(f"{path}: expected add, abort, schedule, update or summary, not op {other!r}")
    settings = meta["config"]
    num_stages = num_stages_of(path, settings)
    unseen = not_compared_of_trace(rows[1:])
    return Recording(path, config, meta["vllm"] or UNNAMED, offloading, num_stages, layout, entries, unseen)


def _check_steps(path: Path, rows: list[Json]) -> None:
    """Refuse a trace in which some steps lack what others are compared by.

    Raises:
        RecordingError: it is one.
    """
    for op in ("schedule", "update"):
        steps = [(number, row) for number, row in enumerate(rows, 1) if row["op"] == op]
        for field in OF_ALL_STEPS:
            lacking = [number for number, row in steps if field not in row]
            if 0 < len(lacking) < len(steps):
                raise RecordingError(
                    f"{path}, line {lacking[0]}: no {field} in this {op}; expected it, as in other lines"
                )


def _said_of(row: Json, *, has_numbers: bool) -> tuple[Json, dict[int, Hashable]]:
    """Return facts of a request that is added, and names of its blocks as events have them: the last 64 bits, or all."""
    facts: Json = {"prompt_len": row["prompt_len"]}
    names = dict(enumerate(row.get("block_hashes", ())))
    count = len(names)
    if "hashes" in row:
        count, last = row["hashes"]
        names = {count - 1: last} if count else {}
    if "hashes" in row or "block_hashes" in row:
        facts["num_hashes"] = count
    return facts, {place: int(name[-16:], 16) if has_numbers else name for place, name in names.items()}


def _event(event: Json, layout: KvLayout | None) -> Event:
    kind = KINDS[event["type"]]
    if layout is not None and kind != "cleared":
        kind = f"{kind}{OF_GROUP}{event['group_idx']}"
    return Event(kind, event.get("block_hashes", []), {key: event[key] for key in OF_EVENTS if key in event})


def _blocks_to_load(row: Json, block_size: int) -> dict[str, tuple[int, list[int]]]:
    """Return the blocks of requests whose KV begins to come from elsewhere, which have no part in a step yet."""
    meta = row.get("kv_meta", {})
    found = {load["id"]: load["gpu_blocks"] for load in meta.get("load", {}).values()}
    found |= {id: load["block_ids"] for id, load in meta.get("recv", {}).items()}
    return {id: (row["matched"][id][0] // block_size, blocks) for id, blocks in found.items() if blocks}


def _new_blocks(row: Json, tables: dict[str, list[int]]) -> dict[str, tuple[int, list[int]]]:
    """Return the blocks that requests have now and had not before, and add them to their tables."""
    found: dict[str, tuple[int, list[int]]] = {}
    for new in row["new"]:
        found[new["id"]] = (0, new["block_ids"])
    for cached in row["cached"]:
        before = 0 if cached["resumed"] else len(tables[cached["id"]])
        found[cached["id"]] = (before, cached["new_block_ids"])
    for id, (before, blocks) in found.items():
        tables[id] = tables.get(id, [])[:before] + blocks
    return {id: new for id, new in found.items() if new[1]}


def _scheduled(row: Json, known: set[str]) -> Json:
    """Return the facts of a `schedule`; vLLM's second model runner also reports resumed requests as new."""
    resumed = [new["id"] for new in row["new"] if new["id"] in known]
    facts = {
        "scheduled": row["num_scheduled_tokens"],
        "new": {new["id"]: new["num_computed_tokens"] for new in row["new"] if new["id"] not in known},
        "resumed": resumed + [cached["id"] for cached in row["cached"] if cached["resumed"]],
        "preempted": sorted(row["preempted"]),
        "cached": {
            cached["id"]: [cached["num_computed_tokens"], cached["num_output_tokens"]] for cached in row["cached"]
        },
        "ended": set(row["finished_before"]),
        "total": row["total"],
    }
    for key in ("junction", "tables", "num_encoded", "encoder_cache"):
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
    facts = {key: row[key] for key in (*STATE, "usage", "free_queue") if key in row}
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
    for key in ("wasted", "stop_reason"):
        if key in row:
            facts[key] = row[key]
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

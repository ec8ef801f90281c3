"""Which fields of a recording a replay compares or follows; what else it has must be said where the result is read."""

from collections.abc import Iterable, Iterator
from typing import Final

from dynabench.fidelity.recordings import Json

SUMMARY: Final = ("num_preemptions", "status")
OF_EVENTS: Final = (
    "parent_block_hash",
    "block_size",
    "token_ids",
    "tokens",
    "lora_id",
    "lora_name",
    "extra_keys",
    "lookahead_token_ids",
    "medium",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
"""Fields of KV events that are compared, beside the blocks."""
NESTED: Final = frozenset(
    {"new", "cached", "kv_events", "connector_events", "kv_meta", "kv_out", "prefix_cache_stats"}
    | {"connector_prefix_cache_stats", "events"}
)
"""Fields whose parts are looked at one by one; those of `BY_ID` below are by request, or by number."""
BY_ID: Final = frozenset({"load", "store", "recv", "kv_transfer_params"})
STATS: Final = tuple(
    f"{stats}.{key}"
    for stats in ("prefix_cache_stats", "connector_prefix_cache_stats")
    for key in ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
)
STATE: Final = (
    *("running", "waiting", "free_blocks", "usage", "free_queue"),
    *("kv_holding", "loading", "held", "fetch", "reserved_blocks", "cpu_free_chunks"),
)
FIELDS: Final = {
    "add": (
        *("id", "before_step", "max_tokens", "priority", "cache_salt", "eos_token_id", "stop_token_ids", "lora", "kv"),
        *("prompt_len", "block_hashes", "hashes"),
    ),
    "abort": ("id", "before_step", "was"),
    "reset_prefix_cache": ("before_step", "ok"),
    "schedule": (
        *STATE,
        *("step", "total", "num_scheduled_tokens", "new.id", "new.num_computed_tokens", "cached.id", "cached.resumed"),
        *(
            "cached.num_computed_tokens",
            "cached.num_output_tokens",
            "preempted",
            "finished_before",
            "finished_order",
            "junction",
            "tables",
            "num_encoded",
            "encoder_cache",
            "spec",
        ),
        *("kv_meta.send", "kv_meta.in_batch", "kv_meta.not_processed", "kv_meta.flush"),
        *("kv_meta.load.id", "kv_meta.load.cpu_chunks", "kv_meta.load.sync"),
        *("kv_meta.store.id", "kv_meta.store.cpu_chunks"),
    ),
    "drafts": ("step", "drafts"),
    "update": (
        *STATE,
        *STATS,
        *("step", "sampled", "finished", "stop_reason", "accepted", "wasted"),
        *("kv_events.type", "kv_events.block_hashes", *[f"kv_events.{field}" for field in OF_EVENTS]),
        *("connector_events.type", "connector_events.block_hashes"),
        *("kv_out.finished_recving", "kv_out.finished_sending", "kv_out.invalid_block_ids", "kv_out.failed_recving"),
        *("kv_out.completed_jobs", "kv_transfer_params.remote_prefill_cached_tokens"),
    ),
    "summary": ("id", "output_token_ids", *SUMMARY),
}
"""By the kind of a row: what is compared, or is what vLLM received and the replay repeats. The first row is the settings."""
OF_TABLES: Final = ("new.block_ids", "cached.new_block_ids")
"""Parts of the tables of a row that has them whole."""
OF_STEPS: Final = (
    *(
        "step",
        "scheduled",
        "new",
        "resumed",
        "preempted",
        "running",
        "waiting",
        "num_waiting",
        "free_blocks",
        "updated",
    ),
    *("tokens", "finished", "wasted", "free_blocks_after", "duration_ms"),
    *("drafts", "accepted", "proposed", "tables", "junction"),
    *("events.type", "events.hashes", "events.parent", "events.tokens", "events.group"),
    *("events.adapter", "events.adapter_number"),
)
"""The same of the rows of a compact recording; `duration_ms` is for `validate`."""


def not_compared_of_trace(rows: Iterable[Json]) -> list[str]:
    """Name the fields of a trace that nothing is compared with, the kind of their row first."""
    found: dict[str, None] = {}
    for row in rows:
        known = FIELDS[row["op"]] + (OF_TABLES if "tables" in row else ())
        found |= {f"{row['op']}.{field}": None for field in _fields(row) if field != "op" and field not in known}
    return sorted(found)


def not_compared_of_steps(rows: Iterable[Json]) -> list[str]:
    """Name the fields of compact rows that nothing is compared with."""
    return sorted({field for row in rows for field in _fields(row) if field not in OF_STEPS})


def _fields(row: Json, before: str = "") -> Iterator[str]:
    """Yield the fields of a row that say something, and their parts in place of those that have any."""
    for key, value in row.items():
        if (not value and value != 0) or value is False:  # nothing is said
            continue
        name = f"{before}{key}"
        if key in BY_ID and isinstance(value, dict):
            parts = [part for part in value.values() if isinstance(part, dict)]
        elif key in NESTED and isinstance(value, dict | list):
            parts = [value] if isinstance(value, dict) else [part for part in value if isinstance(part, dict)]
            # The compact rows have numbers under some of these names.
            parts = [part for part in parts if key != "new" or "id" in part]
        else:
            parts = []
        if parts:
            for part in parts:
                yield from _fields(part, f"{name}.")
        else:
            yield name

"""Watch the scheduler of a vLLM engine in this process while it steps, and write a row for each call that steps it."""

from time import perf_counter
from typing import Any

from dynabench.fidelity.recordings import Json


class Watch:
    """The rows of an engine's steps: see `record`."""

    def __init__(self, engine: Any, *, has_times: bool) -> None:
        """Watch an idle engine; `has_times` says whether its steps run one after another, so that each takes a time."""
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._has_times = has_times
        self._speculates = self._core.vllm_config.speculative_config is not None
        self._has_groups = has_groups(self._scheduler)
        self._row: Json = {}
        self._events: list[Any] = []
        self._names: dict[str, str] = {}  # vLLM's name of a request, which may end in a random part -> ours
        self._in_flight: dict[int, int] = {}  # id of vLLM's output of a step -> the step
        scheduler = self._scheduler
        schedule, update, take_drafts = (
            scheduler.schedule,
            scheduler.update_from_output,
            scheduler.update_draft_token_ids,
        )

        def scheduled(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self._in_flight[id(output)] = self._row["step"]
            self._row |= self._scheduled(output)
            return output

        def updated(output: Any, made: Any, *arguments: Any, **options: Any) -> Any:
            self._row |= self._made(output, made)
            return update(output, made, *arguments, **options)

        def drafted(drafts: Any) -> None:
            found = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            self._row["proposed"] = {self._names[id]: len(tokens) for id, tokens in found if tokens}
            take_drafts(drafts)

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        scheduler.update_draft_token_ids = drafted
        if (publisher := getattr(scheduler, "kv_event_publisher", None)) is not None:
            publisher.publish = lambda batch: self._events.extend(batch.events)

    def know(self, id: str, name: str) -> None:
        """Know a request, by vLLM's name and by ours."""
        self._names[id] = name

    def step(self, number: int) -> Json:
        """Step the engine, and return the row of that."""
        self._row, self._events = {"step": number, "updated": None}, []
        live = dict(self._scheduler.requests)
        known = {id: len(request.output_token_ids) for id, request in live.items()}
        started = perf_counter()
        self._engine.step()
        if self._has_times:
            self._row["duration_ms"] = round((perf_counter() - started) * 1e3, 4)
        new = {id: list(live[id].output_token_ids[count:]) for id, count in known.items()}
        self._row["tokens"] = {self._names[id]: tokens for id, tokens in new.items() if tokens}
        if self._row["updated"] is not None:
            made: Json = self._row.pop("made")
            dropped = {self._names[id]: count - len(new.get(id, ())) for id, count in made.items()}
            self._row["wasted"] = {name: count for name, count in dropped.items() if count}
        over = [request for id, request in live.items() if id not in self._scheduler.requests]
        self._row["finished"] = {
            self._names[request.request_id]: str(request.get_finished_reason()) for request in over
        }
        self._row["free_blocks_after"] = self._free_blocks()
        self._row["events"] = [_event(event, has_groups=self._has_groups) for event in self._events]
        return self._row

    def _scheduled(self, output: Any) -> Json:
        cached, names, scheduler = output.scheduled_cached_reqs, self._names, self._scheduler
        row: Json = {
            "new": {names[request.req_id]: request.num_computed_tokens for request in output.scheduled_new_reqs},
            "resumed": sorted(names[id] for id in cached.resumed_req_ids),
            "preempted": sorted(names[id] for id in output.preempted_req_ids or ()),
            "running": [names[request.request_id] for request in scheduler.running],
            "waiting": [names[request.request_id] for request in scheduler.waiting],
            "num_waiting": len(scheduler.waiting),
            "free_blocks": self._free_blocks(),
        }
        if output.num_scheduled_tokens:
            row["scheduled"] = {names[id]: count for id, count in output.num_scheduled_tokens.items()}
        if self._speculates:
            drafts = output.scheduled_spec_decode_tokens
            row["drafts"] = {names[id]: len(tokens) for id, tokens in drafts.items()}
        if self._has_groups:
            ids, manager = output.num_scheduled_tokens, scheduler.kv_cache_manager
            row["tables"] = {names[id]: [list(table) for table in manager.get_block_ids(id)] for id in ids}
            junctions = {names[id]: scheduler.requests[id].shared_prefix_boundary for id in ids}
            row["junction"] = {name: place for name, place in junctions.items() if place}
        return row

    def _made(self, output: Any, made: Any) -> Json:
        """Return the step whose result arrived, how many tokens it made, and how many drafts it accepted."""
        counts = {id: len(made.sampled_token_ids[place]) for id, place in made.req_id_to_index.items()}
        row = {"updated": self._in_flight.pop(id(output)), "made": {id: count for id, count in counts.items() if count}}
        if self._speculates:
            drafts = output.scheduled_spec_decode_tokens
            row["accepted"] = {self._names[id]: max(counts[id] - 1, 0) for id in drafts}
        return row

    def _free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def has_groups(scheduler: Any) -> bool:
    """Return whether a scheduler keeps KV in another way than one table for layers that all keep everything."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) > 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def _event(event: Any, *, has_groups: bool) -> Json:
    kind = type(event).__name__
    if kind == "AllBlocksCleared":
        return {"type": "cleared", "hashes": []}
    row: Json = {
        "type": {"BlockStored": "stored", "BlockRemoved": "removed"}[kind],
        "hashes": [str(block) for block in event.block_hashes],
    }
    if has_groups:
        row["group"] = event.group_idx
    if kind == "BlockStored":
        parent = event.parent_block_hash
        row |= {"parent": None if parent is None else str(parent), "tokens": list(event.token_ids)}
        if event.lora_name is not None:
            row |= {"adapter": event.lora_name, "adapter_number": event.lora_id}
    return row

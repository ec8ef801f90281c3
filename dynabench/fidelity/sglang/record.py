"""Record how an installed SGLang schedules a scenario, step by step, in the format of `recordings`.

A scenario is `{"name", "config": {...}, "actions": [...]}`, or a recording whose scenario is repeated. The configuration has
settings of SGLang, and those of `recordings.OURS`. Actions happen before a step.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dynabench.fidelity.recordings import Json, Recorded, RecordingError, rows_of
from dynabench.fidelity.sglang.copies import Direction
from dynabench.fidelity.sglang.real import EOS, FORMAT, VERSION, RealScheduler, environment
from dynabench.fidelity.sglang.recordings import SENT
from foundation.files import new_file
from foundation.text import one_line

MAX_IDLE_STEPS = 64
"""So many idle steps in a row end a recording: what waits then waits forever."""
MAX_STEPS = 100_000


class Action(msgspec.Struct, tag_field="op"):
    """Something that is done before a step."""

    before_step: Annotated[int, Meta(ge=0)]


class Add(Action, tag="add"):
    """A request."""

    id: str
    prompt: list[int]
    max_new_tokens: int
    ignore_eos: bool = False
    eos_at: int | None = None
    """The place from 1 of the model's end token in its output."""
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class Abort(Action, tag="abort"):
    """The end of all requests whose names begin so."""

    id: str


class Flush(Action, tag="flush"):
    """A wish that SGLang forget its cache."""


class EndCopy(Action, tag="end_copy"):
    """The end of the oldest copy between device and host memory, if there is any; SGLang hears of it at the next step."""

    direction: Direction


class Scenario(msgspec.Struct):
    """What is recorded. It is checked before SGLang is loaded, and then used as it was written."""

    config: dict[str, Any]
    actions: list[Add | Abort | Flush | EndCopy]


ADDED = tuple(name for name in Add.__struct_fields__ if name != "before_step")


def record(scenario_path: Path, out: Path) -> Recorded:
    """Record a scenario.

    Raises:
        RecordingError: SGLang is not installed or of another version, refuses a setting, or the scenario cannot be read.
    """
    if out.exists():
        raise RecordingError(f"{out} exists; choose another file, or remove it")
    head, rows = recorded(read_scenario(scenario_path))
    lines = (json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in (head, *rows))
    with new_file(out) as file:
        file.writelines(lines)
    return Recorded(len(rows), len(rows[-1]["waiting"]))


def read_scenario(path: Path) -> Json:
    """Read a scenario, of which a recording has one in its first line.

    Raises:
        RecordingError: it is none.
    """
    try:
        scenario = next(rows_of(path)) if path.name.endswith((".jsonl", ".jsonl.gz")) else json.loads(path.read_text())
    except (OSError, ValueError, StopIteration) as error:
        raise RecordingError(f"{path}: cannot be read as a scenario ({error})") from error
    if isinstance(scenario, dict):
        scenario = scenario.get("scenario", scenario)
    try:
        checked = msgspec.convert(scenario, Scenario)
    except msgspec.ValidationError as error:
        raise RecordingError(f"{path}: not a scenario, {one_line(error)}; expected as in {FORMAT}") from error
    interval = checked.config.get("scheduler_recv_interval", 1)
    if interval != 1:
        raise RecordingError(
            f"{path}: scheduler_recv_interval is {interval!r}; expected 1, because requests are handed to the scheduler "
            "past the place where SGLang waits for that interval"
        )
    read: Json = scenario
    return read


def recorded(scenario: Json) -> tuple[Json, list[Json]]:
    """Return the first line of the recording of a scenario, and a row for each step."""
    with environment(scenario["config"]), tempfile.TemporaryDirectory() as folder:
        recorder = _Recorder(scenario, RealScheduler(Path(folder), scenario["config"]))
        rows = recorder.run()
    head: Json = {key: scenario[key] for key in ("name", "why", "seed") if key in scenario}
    head |= {"config": scenario["config"], "resolved": recorder.resolved, "actions": recorder.actions}
    return {"scenario": head}, rows


class _Recorder:
    """Acts, steps, and notes what happened."""

    def __init__(self, scenario: Json, real: RealScheduler) -> None:
        self.actions: list[Json] = []
        self.resolved = _resolved(real.scheduler, scenario)
        self._real = real
        self._scheduler = real.scheduler
        self._planned = sorted(scenario["actions"], key=lambda action: action["before_step"])
        self._bits = self.resolved["hash_bits"]

    def run(self) -> list[Json]:
        """Step until nothing is left to do."""
        rows: list[Json] = []
        num_idle = 0
        while num_idle == 0 or not self._is_over(num_idle):
            step = len(rows)
            if step > MAX_STEPS:
                raise RecordingError(f"the scenario is not over after {MAX_STEPS} steps")
            while self._planned and self._planned[0]["before_step"] <= step:
                self._act(self._planned.pop(0), step)
            rows.append(self._step(step))
            num_idle = num_idle + 1 if rows[-1]["kind"] == "idle" else 0
        return rows

    def _is_over(self, num_idle: int) -> bool:
        if self._planned:
            return False
        needed = 1 + self._scheduler.enable_overlap  # with it, the first still processes a result
        return num_idle >= (needed if self._scheduler.is_fully_idle() else MAX_IDLE_STEPS)

    def _act(self, action: Json, step: int) -> None:
        real, kind = self._real, action["op"]
        row: Json = {"before_step": step, "op": kind}
        if kind == "flush":
            row["ok"] = real.flush()
        elif kind == "end_copy":
            row["direction"] = action["direction"]
            real.end_copy(action["direction"])
        elif kind == "abort":
            row["id"] = action["id"]
            real.abort(action["id"])
        elif kind == "add":
            row |= {key: action[key] for key in ADDED if key in action}
            if (most := real.add(action)) != action["max_new_tokens"]:
                row["resolved_max_new_tokens"] = most
        self.actions.append(row)

    def _step(self, step: int) -> Json:
        scheduler, real = self._scheduler, self._real
        batch = real.schedule()
        row: Json = {"step": step} | self._scheduled(batch)
        scheduler.kv_events_publisher.was_asked = False
        known = {id(each): len(each.output_ids) for each in self._awaited(batch)}
        if (processed := real.run(batch, step)) is not None:
            if scheduler.enable_overlap:
                row["processed"] = processed[1]
            row |= self._result(processed[0].reqs, known)
        if real.aborted:
            row["aborted"] = list(real.aborted)
            real.aborted.clear()
        row[SENT] = scheduler.kv_events_publisher.was_asked
        row |= {f"{key}_after": value for key, value in self._counts().items() if value != row[key]}
        if events := [each for event in scheduler.tree_cache.take_events() for each in self._event(event)]:
            row["events"] = events
        return row

    def _awaited(self, batch: Any) -> list[Any]:
        """Return the requests whose results may come in this step."""
        queued = [request for waiting, _ in self._scheduler.result_queue for request in waiting.reqs]
        return queued + ([] if batch is None else list(batch.reqs))

    def _scheduled(self, batch: Any) -> Json:
        scheduler = self._scheduler
        row: Json = {"kind": "idle"}
        if batch is not None:
            mode = batch.forward_mode
            row["kind"] = "mixed" if mode.is_mixed() else "extend" if mode.is_extend() else "decode"
            row["reqs"] = _rows(batch)
            if mode.is_mixed():
                row["decode_rows"] = len(batch.decoding_reqs)
        row["chunked"] = None if scheduler.chunked_req is None else scheduler.chunked_req.rid
        row["running"] = [request.rid for request in scheduler.running_batch.reqs]
        row["waiting"] = [request.rid for request in scheduler.waiting_queue]
        if self._real.requeued:
            row["requeued"] = [request.rid for request in self._real.requeued]
        row["full"] = scheduler.running_batch.batch_is_full
        return row | self._counts()

    def _counts(self) -> Json:
        scheduler = self._scheduler
        counts: Json = {
            "free": int(scheduler.token_to_kv_pool_allocator.available_size()),
            "evictable": int(scheduler.tree_cache.evictable_size()),
            "ratio": round(scheduler.new_token_ratio_tracker.current, 9),
        }
        if scheduler.enable_hierarchical_cache:
            counts["host_free"] = int(scheduler.tree_cache.cache_controller.mem_pool_host.available_size())
        return counts

    def _result(self, requests: list[Any], known: dict[int, int]) -> Json:
        tokens, finished = [], []
        for request in requests:
            if len(request.output_ids) > known[id(request)]:
                tokens.append([request.rid, int(request.output_ids[-1])])
                if request.finished():
                    finished.append([request.rid, request.finished_reason.to_json()["type"]])
        return {"tokens": tokens, "finished": finished}

    def _event(self, event: Any) -> list[Json]:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            return [{"t": kind}]
        hashes = [self._name(each) for each in event.block_hashes]
        where: Json = {} if event.medium in (None, "GPU") else {"medium": event.medium.value}
        if kind == "BlockRemoved":
            return [{"t": "removed", "hashes": hashes} | where]
        parent = event.parent_block_hash
        row: Json = {"t": "stored", "hashes": hashes, "parent": None if parent is None else self._name(parent)} | where
        if self._bits == 64:
            row["tokens"] = list(event.token_ids)
        if (salt := getattr(event, "cache_salt", None)) is not None:
            row["salt"] = salt
        return [row]

    def _name(self, block_hash: int) -> int:
        return block_hash if self._bits == 64 else block_hash & ((1 << self._bits) - 1)


def _rows(batch: Any) -> list[list[Any]]:
    """Return for each request of a batch: name, tokens before, tokens computed."""
    if batch.forward_mode.is_extend():
        facts = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        return [[request.rid, before, count] for request, before, count in facts]
    lengths = batch.seq_lens_cpu.tolist()
    return [[request.rid, length - 1, 1] for request, length in zip(batch.reqs, lengths, strict=True)]


def _resolved(scheduler: Any, scenario: Json) -> Json:
    """Return what the scheduler holds of its settings."""
    from sglang.srt.managers import schedule_policy

    ratio = scheduler.new_token_ratio_tracker
    bits = 16 if scheduler.page_size == 1 else 64
    return {
        "sglang": VERSION,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "page_size": scheduler.page_size,
        "chunked_prefill_size": scheduler.chunked_prefill_size,
        "max_prefill_tokens": scheduler.max_prefill_tokens,
        "max_running_requests": scheduler.max_running_requests,
        "max_req_len": scheduler.max_req_len,
        "max_req_input_len": scheduler.max_req_input_len,
        "prefill_decode_interval": scheduler.prefill_decode_interval,
        "prefill_decode_interval_min_bs": scheduler.prefill_decode_interval_min_bs,
        "mixed_chunk": scheduler.is_mixed_chunk,
        "policy": scheduler.policy.policy.value,
        "overlap": scheduler.enable_overlap,
        "tree": type(scheduler.tree_cache).__name__,
        "ratio_init": ratio.init,
        "ratio_min": ratio.min,
        "ratio_decay": ratio.decay,
        "priority_scheduling": scheduler.enable_priority_scheduling,
        "priority_preemption": scheduler.enable_priority_preemption,
        "hash_bits": scenario.get("resolved", {}).get("hash_bits", bits),
        "clip": schedule_policy.CLIP_MAX_NEW_TOKENS,
        "eos": EOS,
    } | _hicache(scheduler)


def _hicache(scheduler: Any) -> Json:
    """Return the room in its host memory, if it has any."""
    if not scheduler.enable_hierarchical_cache:
        return {}
    return {"host_num_tokens": int(scheduler.tree_cache.cache_controller.mem_pool_host.available_size())}

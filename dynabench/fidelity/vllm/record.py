"""Drive an installed vLLM step by step, and record its scheduler's decisions and the time of each step.

The format is the compact one of `recordings`, with a row for each call that steps the engine. With asynchronous
scheduling, the first part of a row belongs to the step that was scheduled, the second to the step before it, whose
result arrived:

    step 7, scheduled, new, ..., free_blocks, duration_ms | updated 6, tokens, finished, wasted, free_blocks_after, events

The model is a tiny random Llama made on the spot: scheduling does not depend on weights, and nothing is downloaded. On
a CPU it runs in this process, between the two parts of a row, so nothing overlaps: `duration_ms` is the time to
schedule and compute that step and to handle the result. If a GPU computes a step while the next is scheduled, that time
is not defined, and none is written.
"""

import gzip
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from dynabench.fidelity.recordings import Json, Recorded, RecordingError
from foundation.extras import install
from foundation.files import new_file
from foundation.text import one_line
from serving.engines.package import require
from serving.engines.vllm.on_cpu import keep_async_scheduling
from serving.worker.engine import EngineError

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
RESOLVED = (
    "watermark",
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
    "policy",
    "async_scheduling",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
)


def record(scenario_path: Path, out: Path) -> Recorded:
    """Record a scenario `{"name", "engine": {vLLM settings}, "requests": [{id, prompt, max_tokens, arrival_step}]}`.

    A request may also have `priority`, `stop_token_ids`, and `ignore_eos: false`, which lets the model's end token end
    it. Without `async_scheduling` in the settings, vLLM's default applies: on, but off on CPUs.

    Raises:
        RecordingError: vLLM is not installed, does not support a setting, or the scenario cannot be read.
    """
    if out.exists():
        raise RecordingError(f"{out} exists; choose another file, or remove it")
    scenario = _read(scenario_path)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler must be in this process to be watched
    try:
        vllm = require("vllm", "EngineArgs", "config.KVEventsConfig", "v1.engine.llm_engine.LLMEngine")
    except EngineError as error:
        raise RecordingError(f"{error}; without a GPU: {install('record')}") from error
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        try:
            engine = _engine(vllm, folder, scenario["engine"])
        except (TypeError, ValueError) as error:
            raise RecordingError(
                f"vLLM {vllm.__version__} rejects the settings of the scenario: {one_line(error)}"
            ) from error
        core = engine.engine_core.engine_core
        if scenario["engine"].get("async_scheduling") and core.batch_queue is None:
            raise RecordingError(f"vLLM {vllm.__version__} cannot schedule asynchronously on this machine")
        rows = _Recorder(vllm, engine).run(scenario["requests"])
    scheduler = core.scheduler
    resolved = {name: getattr(scheduler.scheduler_config, name, None) for name in RESOLVED}
    resolved |= {
        "num_gpu_blocks": scheduler.cache_config.num_gpu_blocks,
        "block_size": scheduler.cache_config.block_size,
        "eos_token_id": MODEL["eos_token_id"],
    }
    head = {"scenario": scenario | {"vllm_version": vllm.__version__, "resolved": resolved}}
    lines = (json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in (head, *rows))
    with new_file(out) as file:
        file.writelines(lines)
    return Recorded(len(rows))


def _read(path: Path) -> Json:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            scenario = json.loads(file.readline() if path.name.endswith((".jsonl", ".jsonl.gz")) else file.read())
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path}: cannot be read as a scenario ({error})") from error
    scenario = scenario.get("scenario", scenario) if isinstance(scenario, dict) else None
    if not isinstance(scenario, dict) or not {"engine", "requests"} <= scenario.keys():
        raise RecordingError(f"{path}: expected an object with `engine` and `requests`")
    kept: Json = {key: value for key, value in scenario.items() if key not in ("resolved", "vllm_version")}
    return kept


def _engine(vllm: Any, folder: str, settings: Json) -> Any:
    from vllm.config import KVEventsConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    settings = dict(settings)
    blocks = settings.pop("num_gpu_blocks", None)
    caching = settings.get("enable_prefix_caching", True)
    arguments = vllm.EngineArgs(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        dtype="float32",
        num_gpu_blocks_override=blocks,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if caching else None,
        **settings,
    )
    keep_async_scheduling(arguments)
    return LLMEngine.from_engine_args(arguments)


class _Recorder:
    """Watches the scheduler of an engine while it steps."""

    def __init__(self, vllm: Any, engine: Any) -> None:
        self._vllm = vllm
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._is_serial = vllm.platforms.current_platform.is_cpu() or self._core.batch_queue is None
        self._row: Json = {}
        self._events: list[Any] = []
        self._names: set[str] = set()
        self._in_flight: dict[int, int] = {}  # id of vLLM's output of a step -> the step
        schedule, update = self._scheduler.schedule, self._scheduler.update_from_output

        def scheduled(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            self._in_flight[id(output)] = self._row["step"]
            self._row |= self._scheduled(output)
            return output

        def updated(output: Any, *arguments: Any, **options: Any) -> Any:
            self._row |= self._updated(output)
            return update(output, *arguments, **options)

        self._scheduler.schedule, self._scheduler.update_from_output = scheduled, updated
        if (publisher := getattr(self._scheduler, "kv_event_publisher", None)) is not None:
            publisher.publish = lambda batch: self._events.extend(batch.events)

    def run(self, requests: list[Json]) -> list[Json]:
        """Step until every request is finished and no step is in flight."""
        waiting = sorted(requests, key=lambda request: request["arrival_step"])
        rows: list[Json] = []
        while waiting or self._engine.has_unfinished_requests() or self._core.batch_queue:
            while waiting and waiting[0]["arrival_step"] <= len(rows):
                self._add(waiting.pop(0))
            self._row, self._events = {"step": len(rows), "updated": None}, []
            live = dict(self._scheduler.requests)
            known = {id: len(request.output_token_ids) for id, request in live.items()}
            started = perf_counter()
            self._engine.step()
            if self._is_serial:
                self._row["duration_ms"] = round((perf_counter() - started) * 1e3, 4)
            tokens = {id: list(live[id].output_token_ids[count:]) for id, count in known.items()}
            over = [request for id, request in live.items() if id not in self._scheduler.requests]
            self._row["tokens"] = {self._name(id): new for id, new in tokens.items() if new}
            self._row["finished"] = {
                self._name(request.request_id): str(request.get_finished_reason()) for request in over
            }
            self._row["free_blocks_after"] = self._free_blocks()
            self._row["events"] = [row for event in self._events for row in _event(event)]
            rows.append(self._row)
        return rows

    def _name(self, id: str) -> str:
        """Return our name of a request, because vLLM may append a random part to it."""
        return id if id in self._names else id.rpartition("-")[0]

    def _add(self, request: Json) -> None:
        self._names.add(request["id"])
        parameters = self._vllm.SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=0.0,
            ignore_eos=request.get("ignore_eos", True),
            stop_token_ids=request.get("stop_token_ids"),
            detokenize=False,
        )
        prompt = {"prompt_token_ids": request["prompt"]}
        self._engine.add_request(request["id"], prompt, parameters, priority=request.get("priority", 0))

    def _scheduled(self, output: Any) -> Json:
        cached = output.scheduled_cached_reqs
        name = self._name
        row: Json = {
            "new": {name(request.req_id): request.num_computed_tokens for request in output.scheduled_new_reqs},
            "resumed": sorted(name(id) for id in cached.resumed_req_ids),
            "preempted": sorted(name(id) for id in output.preempted_req_ids or ()),
            "running": [name(request.request_id) for request in self._scheduler.running],
            "num_waiting": len(self._scheduler.waiting),
            "free_blocks": self._free_blocks(),
        }
        if output.num_scheduled_tokens:
            row["scheduled"] = {name(id): count for id, count in output.num_scheduled_tokens.items()}
        return row

    def _updated(self, output: Any) -> Json:
        """Return the step whose result arrived, and its tokens that are discarded because their request has stopped."""
        wasted = {self._name(id): 1 for id in output.num_scheduled_tokens if id not in self._scheduler.requests}
        return {"updated": self._in_flight.pop(id(output)), "wasted": wasted}

    def _free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _event(event: Any) -> list[Json]:
    kind = type(event).__name__
    if kind == "BlockStored":
        parent = event.parent_block_hash
        return [
            {
                "type": "stored",
                "hashes": [str(block) for block in event.block_hashes],
                "parent": None if parent is None else str(parent),
                "tokens": list(event.token_ids),
            }
        ]
    if kind == "BlockRemoved":
        return [{"type": "removed", "hashes": [str(block) for block in event.block_hashes]}]
    return [{"type": "cleared", "hashes": []}]

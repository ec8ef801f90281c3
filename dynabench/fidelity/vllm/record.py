"""Drive an installed vLLM step by step, and record its scheduler's decisions and the time of each step.

The format is the compact one of `recordings`, with a row for each call that steps the engine. If batches are in flight
while the next is scheduled (asynchronously, or with several stages), the first part of a row belongs to the step that was
scheduled, the second to the one whose result arrived:

    step 7, scheduled, new, ..., free_blocks, duration_ms | updated 6, tokens, finished, wasted, free_blocks_after, events

With speculation, a row also has `drafts` and `accepted` of its two steps, and `proposed`: drafts for the next. Where layers
do not all keep all tokens, it has the `tables` of its requests by group, and where their prompts leave others' (`junction`).

The model is a tiny random one made on the spot, and so are adapters: scheduling does not depend on weights, and nothing is
downloaded. On a CPU it runs in this process, between the two parts of a row, so nothing overlaps: `duration_ms` is the time
to schedule and compute that step and to handle the result. If a GPU computes a step while the next is scheduled, or stages
work at once, that time is not defined, and none is written.
"""

import gzip
import json
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from dynabench.fidelity.recordings import Json, Recorded, RecordingError
from dynabench.fidelity.vllm.tiny_model import LLAMA, write_adapter, write_model
from dynabench.fidelity.vllm.watch import Watch, has_groups
from foundation.extras import install
from foundation.files import new_file
from foundation.text import one_line
from serving.engines.package import require
from serving.engines.vllm.on_cpu import keep_async_scheduling, prepare_stages
from serving.worker.engine import EngineError

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

    A request may also have `priority`, `stop_token_ids`, `adapter` (any name, with `enable_lora` in the settings), and
    `ignore_eos: false`, which lets the model's end token end it. A scenario may have a `model`: a config.json to use in place
    of that of a tiny Llama. Without `async_scheduling` in the settings, vLLM's default applies: on, but off on CPUs.

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
    model = scenario.get("model", LLAMA)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            engine = _engine(vllm, folder, model, scenario["engine"])
        except (TypeError, ValueError) as error:
            raise RecordingError(
                f"vLLM {vllm.__version__} rejects the settings of the scenario: {one_line(error)}"
            ) from error
        core = engine.engine_core.engine_core
        is_async = core.vllm_config.scheduler_config.async_scheduling and core.batch_queue is not None
        if scenario["engine"].get("async_scheduling") and not is_async:
            raise RecordingError(f"vLLM {vllm.__version__} cannot schedule these settings asynchronously")
        rows = _run(vllm, engine, scenario["requests"], _adapters(scenario, model, folder))
    head = {"scenario": scenario | {"vllm_version": vllm.__version__, "resolved": _resolved(core, model)}}
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


def _engine(vllm: Any, folder: Path, model: Json, settings: Json) -> Any:
    """Start an engine with a tiny model; what drafts, if that is another model, is one with a single layer."""
    from vllm.config import KVEventsConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    write_model(folder / "model", model)
    settings = {"dtype": "float32", **settings}
    drafting: Json = settings.get("speculative_config", {})
    if drafting.get("method") == "draft_model" and "model" not in drafting:
        write_model(folder / "draft", model | {"num_hidden_layers": 1})
        settings["speculative_config"] = drafting | {"model": str(folder / "draft")}
    blocks = settings.pop("num_gpu_blocks", None)
    caching = settings.get("enable_prefix_caching", True)
    arguments = vllm.EngineArgs(
        model=str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        num_gpu_blocks_override=blocks,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if caching else None,
        **settings,
    )
    keep_async_scheduling(arguments)
    engine = LLMEngine.from_engine_args(arguments)
    prepare_stages(engine)
    return engine


def _adapters(scenario: Json, model: Json, folder: Path) -> dict[str, Any]:
    """Make the adapters that requests name; return vLLM's words for each."""
    from vllm.lora.request import LoRARequest

    names = dict.fromkeys(request["adapter"] for request in scenario["requests"] if request.get("adapter"))
    if names and not scenario["engine"].get("enable_lora"):
        raise RecordingError("requests name adapters, and the settings have no enable_lora; expected it to be true")
    found = {}
    for number, name in enumerate(names, start=1):
        write_adapter(folder / f"adapter {number}", model, seed=number)
        found[name] = LoRARequest(name, number, str(folder / f"adapter {number}"))
    return found


def _run(vllm: Any, engine: Any, requests: list[Json], adapters: dict[str, Any]) -> list[Json]:
    """Step until every request is finished and no step is in flight."""
    core = engine.engine_core.engine_core
    num_stages = core.vllm_config.parallel_config.pipeline_parallel_size
    is_serial = vllm.platforms.current_platform.is_cpu() or core.batch_queue is None
    watch = Watch(engine, has_times=is_serial and num_stages == 1)
    waiting = deque(sorted(requests, key=lambda request: request["arrival_step"]))
    rows: list[Json] = []
    while waiting or engine.has_unfinished_requests() or core.batch_queue:
        while waiting and waiting[0]["arrival_step"] <= len(rows):
            request = waiting.popleft()
            watch.know(_add(vllm, engine, request, adapters), request["id"])
        rows.append(watch.step(len(rows)))
    return rows


def _add(vllm: Any, engine: Any, request: Json, adapters: dict[str, Any]) -> str:
    """Send a request, and return what vLLM calls it."""
    parameters = vllm.SamplingParams(
        max_tokens=request["max_tokens"],
        temperature=0.0,
        ignore_eos=request.get("ignore_eos", True),
        stop_token_ids=request.get("stop_token_ids"),
        detokenize=False,
    )
    known = set(engine.engine_core.engine_core.scheduler.requests)
    engine.add_request(
        request["id"],
        {"prompt_token_ids": request["prompt"]},
        parameters,
        priority=request.get("priority", 0),
        lora_request=adapters.get(request.get("adapter", "")),
    )
    [added] = set(engine.engine_core.engine_core.scheduler.requests) - known
    return str(added)


def _resolved(core: Any, model: Json) -> Json:
    """Return the settings with which an engine ran."""
    scheduler, config = core.scheduler, core.vllm_config
    found = {name: getattr(scheduler.scheduler_config, name, None) for name in RESOLVED}
    found |= {
        "num_gpu_blocks": scheduler.cache_config.num_gpu_blocks,
        "block_size": scheduler.cache_config.block_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        "eos_token_id": model["eos_token_id"],
    }
    if (speculative := config.speculative_config) is not None:
        found |= {
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "spec_method": speculative.method,
        }
    if config.lora_config is not None:
        found["max_loras"] = config.lora_config.max_loras
    return found | (_groups(scheduler) if has_groups(scheduler) else {})


def _groups(scheduler: Any) -> Json:
    """Return what each layer of a model keeps, the groups that vLLM made of them, and what decides how they keep it."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    layers: dict[int, Json] = {}
    groups = []
    for number, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        places = sorted(_place(name) for name in group.layer_names)
        match spec:
            case MambaSpec():
                kind, layer = "mamba", {"kind": "mamba", "state_bytes": spec.page_size_bytes}
            case SlidingWindowSpec():
                kind, layer = "sliding_window", {"kind": "sliding", "window": spec.sliding_window}
            case ChunkedLocalAttentionSpec():
                kind, layer = "chunked_local_attention", {"kind": "chunked", "chunk": spec.attention_chunk_size}
            case FullAttentionSpec():
                kind, layer = "full_attention", {"kind": "full"}
            case other:
                raise RecordingError(f"the model's layers keep KV as {type(other).__name__}, which is not recorded")
        if kind != "mamba":
            layer |= {"heads": spec.num_kv_heads, "head_size": spec.head_size, "element_bytes": spec.dtype.itemsize}
        layers |= dict.fromkeys(places, layer)
        groups.append({"group": number, "kind": kind, "block_size": spec.block_size, "layers": places})
    cache = scheduler.cache_config
    return {
        "layers": [layers[place] for place in sorted(layers)],
        "groups": groups,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "prefix_cache_retention_interval": cache.prefix_cache_retention_interval,
        "kv_cache_layout": str(scheduler.kv_cache_config.kv_cache_layout),
    }


def _place(name: str) -> int:
    """Return the place of a layer in its model, from its name: `model.layers.3.self_attn.attn`."""
    return next(int(part) for part in name.split(".") if part.isdigit())

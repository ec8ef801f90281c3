"""The head of a report: the model, the GPUs, their layout, the chunk, the workload, and the error of its times."""

import shlex
from collections.abc import Iterable, Iterator, Sequence

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import longest_prompt
from dynabench.deployment.launch import engine_command
from dynabench.experiment import rooms
from dynabench.experiment.model_error import FAR, ModelError, model_error
from dynabench.experiment.rooms import span
from dynabench.experiment.speculation import speculation_of
from dynabench.experiment.step_times import describe_step_times
from dynabench.experiment.vllm_defaults import other_defaults
from foundation.text import listed
from mocker.config import SCHEDULERS
from mocker.models.description import approximations, doubt, summary
from mocker.timing.choose import version_in
from mocker.timing.config import TimingConfig
from mocker.timing.encoder import needs_whole_items
from mocker.timing.groups import is_one_table
from reports.verdicts.engines import EngineError
from serving.runtime.config import masked
from workloads import Workload
from workloads.describe import lengths_of
from workloads.pacing import LoadConfig

GENERIC = ("polynomial", "constant")
"""Step times of no particular GPU."""
IN_OTHERS = "; in other arms: "
"""Between values that have punctuation of their own."""
MOST = 3
"""Differences between arms are listed individually up to this number."""


def head_of(
    workload: Workload, deployments: Sequence[Deployment], loads: Sequence[LoadConfig], url: str | None = None
) -> dict[str, str]:
    """Return labelled facts about the deployment and the workload; unknown ones are left out."""
    if url:
        return {"Server": masked(url), "Workload": _workload(workload, loads), "Lengths": lengths_of(workload)}
    decoders = [_decoder(deployment) for deployment in deployments]
    said = {
        "Model": _each(_model(pool) for pool in decoders),
        "GPU": _each(pool.timing.gpu for pool in decoders if pool.engine == "mocker"),
        "Layout": _layouts(deployments),
        "Scheduler": _schedulers([pool for deployment in deployments for pool in deployment.pools]),
        "Room for KV": rooms.rooms(decoders),
        "KV groups": _each((rooms.groups(pool) for pool in decoders if pool.engine == "mocker"), IN_OTHERS),
        "LoRA": rooms.adapters([pool for pool in decoders if pool.engine == "mocker"]),
        "Chunk": _each(_chunk(pool) for pool in decoders if pool.engine == "mocker"),
        "KV tiers": kv_tiers(deployments),
        "Engine": _each(pool.engine_name for pool in decoders if pool.engine != "mocker"),
        "Speculation": speculation_of(pool for deployment in deployments for pool in deployment.pools),
        "Encoder": _each(
            _encoder(pool) for deployment in deployments for pool in deployment.pools if pool.engine == "mocker"
        ),
        "Workload": _workload(workload, loads),
        "Lengths": lengths_of(workload),
        "Step times": describe_step_times(deployments),
        "Approximated": _each(_approximations(pool) for pool in decoders if pool.timing.timing_name == "roofline"),
        "Context": _each(_longer_context(pool) for pool in decoders if pool.timing.timing_name == "roofline"),
        "Not vLLM's defaults": _each(other_defaults(pool) for pool in decoders if pool.engine == "mocker"),
        "Model error": _errors(decoders),
        "Launch": _launches(deployments),
    }
    if said["KV tiers"] and said["Model error"]:
        said["Model error"] += UNCHECKED
    if said["KV tiers"] and any(note.startswith("cut to ") for note in workload.notes):
        said["Cut trace"] = (
            "prompts that recur later in the trace are missing, so the whole trace has more hits in the KV tiers"
        )
    return {name: text for name, text in said.items() if text}


UNCHECKED = (
    "; KV tiers are not validated: their scheduling matches recordings of the engine, but their sizes and bandwidths are "
    "as configured"
)
"""Note about deployments with KV tiers, whose times have not been compared with real ones."""


BETWEEN_ENGINES = "; a difference between engines that is smaller than these errors does not decide between them"


def engine_error(deployment: Deployment) -> EngineError | None:
    """Return how far the times of a deployment's simulated engines are known to be off.

    None if nothing is simulated, or step times are generic: then engines differ only in how they schedule.
    """
    pool = _decoder(deployment)
    if pool.engine != "mocker" or pool.timing.timing_name in GENERIC:
        return None
    known = model_error(pool.timing)
    return EngineError(pool.engine_type, known and known.ttft.mean_error, known and known.tpot.mean_error)


def model_errors(deployments: Sequence[Deployment]) -> str:
    """Describe the error of the times of several deployments, by engine."""
    return _errors(list(map(_decoder, deployments)))


def _decoder(deployment: Deployment) -> Pool:
    """Return the pool that answers requests; it decides the time between tokens."""
    return next(pool for pool in deployment.pools if pool.role != "prefill")


def _model(pool: Pool) -> str | None:
    """Name the model, and say what was understood of it where that determines times and memory."""
    if pool.engine != "mocker" or pool.timing.timing_name != "roofline":
        return pool.model
    shape = pool.timing.shape
    said = f"{pool.model}: {summary(shape, pool.timing.kv_dtype)}"
    note = doubt(pool.model or "", shape)
    return f"{said} ({note})" if note else said


def _approximations(pool: Pool) -> str:
    """Return what is not simulated exactly as vLLM does it, in a clause."""
    found = [approximations(pool.timing.shape)]
    if pool.engine == "mocker" and is_one_table(pool.engine_config, pool.timing):
        found.append(
            "KV is transferred, so layers with windows count as if they kept all tokens, as without vLLM's hybrid manager, "
            "and states take no blocks"
        )
    return "; ".join(filter(None, found))


def _encoder(pool: Pool) -> str | None:
    """Say what is known of the encoder of images, and what is not modelled."""
    engine = pool.mocker
    if pool.engine_type != "vllm" or not engine.has_encoder:
        return None
    said = f"items of up to {engine.max_tokens_per_mm_item:,} tokens; "
    if engine.encoding_ms_per_1000_tokens:
        said += f"1,000 tokens take {engine.encoding_ms_per_1000_tokens:g} ms, as set"
    else:
        said += "its time is not modelled (encoding_ms_per_1000_tokens is 0), so times to first tokens are too short"
    if needs_whole_items(engine, pool.timing):
        said += "; each is computed in one step, as vLLM sets it for this model (disable_chunked_mm_input)"
    return f"{said}; its weights and its cache take no memory here"


def _longer_context(pool: Pool) -> str | None:
    """Say that a longer context is simulated than the model's own, which vLLM refuses."""
    given, own = pool.mocker.max_model_len, pool.timing.shape.context_length
    if pool.engine_type != "vllm" or given is None or own is None or given <= own:
        return None
    return (
        f"max_model_len {given:,} is more than the model's {own:,}; vLLM starts with it only if --hf-overrides scales the "
        "positions, or with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
    )


def _chunk(pool: Pool) -> str | None:
    """Return how many tokens of a prompt a step computes, or how long a prompt may be that is computed whole."""
    if pool.chunk_size:
        return f"{pool.chunk_size:,} tokens"
    longest = longest_prompt(pool.engine_config)
    return None if longest is None else f"none (prompts are computed whole, at most {longest:,} tokens a step)"


def _schedulers(pools: Sequence[Pool]) -> str:
    """Name the simulated schedulers, with the version whose rules apply."""
    return _each(_scheduler(pool) for pool in pools if pool.engine == "mocker")


def _scheduler(pool: Pool) -> str:
    if pool.engine_type != "vllm":
        return SCHEDULERS[pool.engine_type]
    return f"vLLM {version_in(pool.mocker, pool.timing)}'s"


def _each(texts: Iterable[str | None], between: str = " or ") -> str:
    """List the distinct values of the arms; many amounts as a range."""
    found = list(dict.fromkeys(filter(None, texts)))
    if any(";" in text or ", " in text for text in found):
        between = IN_OTHERS
    if len(found) <= MOST:
        return between.join(found)
    if between == IN_OTHERS:
        return f"{found[0]}{IN_OTHERS}{len(found) - 1} others, the last of them {found[-1]}"
    if all(text[0].isdigit() for text in found):
        found.sort(key=lambda text: int(text.split()[0].replace(",", "")))
        return f"{found[0]} to {found[-1]} ({len(found)} values, by arm)"
    return listed(found, "or")


def _workload(workload: Workload, loads: Sequence[LoadConfig]) -> str:
    return f"{workload.name}: {_each(load.of(workload) for load in loads)}"


def _layouts(deployments: Sequence[Deployment]) -> str:
    layouts = list(dict.fromkeys(map(_layout, deployments)))
    if len(layouts) <= MOST:
        return " or ".join(layouts)
    workers = [deployment.num_workers for deployment in deployments]
    gpus = [_simulated_gpus(deployment) for deployment in deployments]
    return _range(workers, "worker") + f", {_range(gpus, 'GPU')}" * any(gpus)


def _range(counts: Sequence[int], noun: str) -> str:
    """Name the lowest and the highest of some counts, or the only one."""
    low, high = min(counts), max(counts)
    return f"{low} to {high} {noun}s" if low < high else f"{high} {noun}{'s' * (high != 1)}"


def _layout(deployment: Deployment) -> str:
    """Describe how many workers there are, and how many GPUs they have."""
    gpus = _simulated_gpus(deployment)
    sizes = dict.fromkeys(pool.tensor_parallel_size for pool in deployment.pools)
    workers = " + ".join(f"{pool.replicas}{f' {pool.name}' * (len(deployment.pools) > 1)}" for pool in deployment.pools)
    layout = f"{workers} worker{'s' * (deployment.num_workers != 1)}, TP {' and '.join(map(str, sizes))}"
    if stages := dict.fromkeys(n for pool in deployment.pools if (n := pool.pipeline_parallel_size) > 1):
        layout += f", PP {' and '.join(map(str, stages))}"
    if ranks := dict.fromkeys(pool.num_attention_ranks for pool in deployment.pools if pool.num_attention_ranks > 1):
        layout += f", attention DP {' and '.join(map(str, ranks))}"
    return layout + (f" ({gpus} GPU{'s' * (gpus != 1)})" if gpus else "")


def _simulated_gpus(deployment: Deployment) -> int:
    """Return the number of GPUs that are simulated; engines that run a model may do so on a CPU."""
    return sum(pool.num_gpus for pool in deployment.pools if pool.engine == "mocker")


def kv_tiers(deployments: Sequence[Deployment]) -> str:
    """Describe the sizes and speeds of the KV tiers of simulated workers; return nothing if there are none."""
    settings = [pool.mocker for deployment in deployments for pool in deployment.pools if pool.engine == "mocker"]
    hosts = [each for each in settings if each.has_host_memory]
    disks = [each for each in hosts if each.kv_disk_size]
    stores = [deployment.kv_store for deployment in deployments if hosts and deployment.kv_store.kv_store_size]
    parts = list(_hicache(deployments))
    if hosts:
        sizes = span(each.kv_offloading_size for each in settings if not each.num_host_blocks) + " GiB"
        if blocks := [each.num_host_blocks for each in settings if each.num_host_blocks]:
            sizes = f"{span(blocks)} blocks"
        speeds = span(each.host_bandwidth_gb_s for each in hosts)
        parts.append(f"host memory of {sizes} a worker at {speeds} GB/s a GPU")
    if disks:
        sizes, speeds = (
            span(each.kv_disk_size for each in hosts),
            span(each.kv_disk_bandwidth_gb_s for each in disks),
        )
        parts.append(f"disk of {sizes} GiB a worker at {speeds} GB/s")
    if stores:
        sizes = span(deployment.kv_store.kv_store_size for deployment in deployments)
        speeds = span(store.kv_store_bandwidth_gb_s for store in stores)
        parts.append(f"shared store of {sizes} GiB at {speeds} GB/s")
    return f"{'; '.join(parts)}; each way" if parts else ""


def _hicache(deployments: Sequence[Deployment]) -> Iterator[str]:
    """Yield how large SGLang's host memory is, and how fast, if any worker has it."""
    pools = [pool for deployment in deployments for pool in deployment.pools if pool.engine_type == "sglang"]
    hosts = [pool.sglang for pool in pools if pool.engine == "mocker" and pool.sglang.enable_hierarchical_cache]
    if not hosts:
        return
    sizes = [each.hicache_size for each in hosts if each.hicache_size]
    ratios = [each.host_ratio for each in hosts if not each.hicache_size]
    parts = [f"{span(ratios)} times the KV cache"] if ratios else []
    parts += [f"{span(sizes)} GB a GPU"] if sizes else []
    speeds = span(each.hicache_bandwidth_gb_s for each in hosts)
    policies = ", ".join(dict.fromkeys(each.hicache_write_policy for each in hosts))
    yield f"HiCache ({policies}) of {' or '.join(parts)} at {speeds} GB/s a GPU"


def _launches(deployments: Sequence[Deployment]) -> str:
    """Return the command lines of the simulated engines, if a model and a GPU are given."""
    pools = [pool for deployment in deployments for pool in deployment.pools if pool.engine == "mocker"]
    return _each((_launch(pool) for pool in pools if pool.timing.gpu and pool.timing.model), IN_OTHERS)


def _launch(pool: Pool) -> str:
    words, left_out = engine_command(pool)
    return f"{shlex.join(words)} ({'; '.join(left_out)})" if left_out else shlex.join(words)


def _errors(pools: Sequence[Pool]) -> str:
    """Describe the error of simulated times, once for all arms of an engine; with its name if engines differ."""
    by_engine: dict[str, list[TimingConfig]] = {}
    for pool in pools:
        if pool.engine == "mocker":
            by_engine.setdefault(pool.engine_type, []).append(pool.timing)
    said = {kind: _error(timings) for kind, timings in by_engine.items()}
    if len(set(said.values())) > 1:
        text = "; ".join(f"{kind}: {text}" for kind, text in said.items()) + BETWEEN_ENGINES
    else:
        text = next(iter(said.values()), "")
    return f"{text}{_unlike(pools)}" if text else ""


def _unlike(pools: Sequence[Pool]) -> str:
    """Say what of the simulated engines none of the published points had."""
    simulated = [pool for pool in pools if pool.engine == "mocker" and pool.timing.timing_name == "roofline"]
    lacks = [
        what
        for what, is_so in (
            (
                "speculated",
                any(pool.engine_type == "vllm" and pool.mocker.num_speculative_tokens for pool in simulated),
            ),
            ("had stages", any(pool.pipeline_parallel_size > 1 for pool in simulated)),
        )
        if is_so
    ]
    return f"; none of those points {' or '.join(lacks)}" if lacks else ""


def _error(timings: Sequence[TimingConfig]) -> str:
    """Describe the error of simulated times, compared with published ones: over all arms, and why it is not known of some."""
    known = {found.text: found for timing in timings if (found := model_error(timing))}
    unknown = dict.fromkeys(_why_unknown(timing) for timing in timings if not model_error(timing))
    said = [_widest(list(known.values()))] if known else []
    return IN_OTHERS.join([*said, *unknown])


def _widest(errors: Sequence[ModelError]) -> str:
    """Describe several errors at once: the lowest and the highest ratio that any has, and the measured cases behind them."""
    if len(errors) == 1:
        return errors[0].text
    tpot, ttft = (_hull([ratios.interval for ratios in each]) for each in zip(*(e[:2] for e in errors), strict=True))
    cases = dict.fromkeys(error.measured for error in errors)
    named = [*cases][:MOST] + [f"those of {len(cases) - MOST} other cases"] * (len(cases) > MOST)
    far = sum(error.distance > FAR for error in errors)
    hint = "; only a hint, because that is far away" + " from some arms" * (far < len(errors))
    return (
        f"in 9 of 10 cases, the real mean TPOT is {tpot} times the simulated, the real mean TTFT {ttft} times, over all arms, "
        f"by the nearest measured case{'s' * (len(cases) > 1)}, {listed(named)}{hint * bool(far)}"
    )


def _hull(intervals: Sequence[tuple[float, float]]) -> str:
    """Return the lowest and the highest end of some intervals."""
    return f"{min(low for low, _ in intervals):.2f} to {max(high for _, high in intervals):.2f}"


def _why_unknown(timing: TimingConfig) -> str:
    """Say why nothing measured is like simulated times."""
    if timing.timing_name in GENERIC:
        return "step times are generic: compare arms, but do not read the times as those of a GPU"
    if timing.timing_name != "roofline":
        return "not known; dynabench validate measures it"
    return "not known, because the step times are divided; compare arms only"

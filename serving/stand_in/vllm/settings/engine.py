"""The simulated engine that vLLM's arguments describe: its scheduler, its cache, and its step times."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mocker.models.catalog import find_model
from mocker.models.kv_cache import kv_cache
from mocker.models.shape import ModelShape
from mocker.timing.catalog import find_gpu
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.parts import moe_backends_of
from mocker.timing.vllm_defaults import GPU_MEMORY_UTILIZATION, USUAL, server_defaults
from mocker.vllm.config import EngineConfig
from mocker.vllm.versions import version_of
from serving.stand_in.config import RanksConfig
from serving.stand_in.simulation import SimulationConfig
from serving.stand_in.vllm.flags.arguments import version
from serving.stand_in.vllm.settings.speculation import speculation_of

BLOCK_SIZE = 16
LOW_LATENCY = ("deepep_low_latency", "nixl_ep")
"""Ways to exchange tokens between experts with which vLLM's default step is small."""
LOW_LATENCY_TOKENS = 256
AUTO = -1

SAME = (
    "max_num_active_seqs", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "scheduling_policy",
    "scheduler_reserve_full_isl", "watermark", "async_scheduling", "enable_prefix_caching", "enable_chunked_prefill",
)  # fmt: skip
"""Arguments with the names of our settings."""

KV_TYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
"""Types of the KV cache by their sizes."""


def shape_name(given: Mapping[str, Any], own: SimulationConfig) -> tuple[str | None, ModelShape | None]:
    """Return the name under which the model's shape is found, and the shape; None if it is not.

    Raises:
        ValueError: it is needed, because a GPU's times depend on it, or it was named for its shape.
    """
    name = own.model_shape or given["model"]
    try:
        return name, find_model(name)
    except ValueError as error:
        if own.model_shape is not None:
            raise ValueError(f"--model-shape {name}: {error}") from None
        if own.predicts:
            raise ValueError(
                f"{error}; name its shape with --model-shape, or leave out --gpu for generic step times"
            ) from None
        return None, None


def step_times_of(given: Mapping[str, Any], own: SimulationConfig) -> TimingConfig:
    """Return where the step times come from: a file, a GPU, or a formula.

    Raises:
        ValueError: they cannot be determined, or not with these arguments.
    """
    name, shape = shape_name(given, own)
    if own.predicts:
        _check_dtype(given.get("dtype", "auto"))
    return TimingConfig(
        timing=None if own.gpu or own.timing_file else "polynomial",
        timing_file=own.timing_file,
        model=name,
        gpu=own.gpu,
        tensor_parallel_size=given.get("tensor_parallel_size", 1),
        enable_expert_parallel=given.get("enable_expert_parallel", False),
        quantization="fp8" if own.predicts and _becomes_fp8(given.get("quantization"), shape) else None,
        kv_cache_dtype=_kv_type(given.get("kv_cache_dtype", "auto")),
        gpu_memory_utilization=given.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION),
        link_gbps=own.link_gbps,
        max_cudagraph_capture_size=given.get("max_cudagraph_capture_size"),
        moe_backend=_moe_backend(given.get("moe_backend", "auto"), own, shape),
        speedup_ratio=own.speedup_ratio,
        decode_speedup_ratio=own.decode_speedup_ratio,
    )


def _moe_backend(asked: str, own: SimulationConfig, shape: ModelShape | None) -> str:
    """Return the kernels of experts whose times are known: those that are asked for, if they were measured."""
    if not own.predicts or shape is None:
        return "auto"
    assert own.gpu is not None
    return asked if asked in moe_backends_of(shape, find_gpu(own.gpu)) else "auto"


def _check_dtype(dtype: str) -> None:
    if dtype in ("float", "float32"):
        raise ValueError(f"--dtype {dtype}: step times of --gpu are those of 16 bits; leave it out")


def _becomes_fp8(quantization: str | None, shape: ModelShape | None) -> bool:
    """Whether vLLM makes FP8 of weights in 16 bits; a checkpoint of fewer bits keeps its types.

    Raises:
        ValueError: it would make something else of them.
    """
    if quantization is None or shape is None or shape.weights != "bfloat16":
        return False
    if quantization != "fp8":
        raise ValueError(
            f"--quantization {quantization}: the model's weights have 16 bits, of which only fp8 is made; expected fp8, or a "
            "model that is stored so (--model-shape)"
        )
    return True


def _kv_type(dtype: str) -> Any:
    if dtype not in KV_TYPES:
        raise ValueError(f"--kv-cache-dtype {dtype}: it is not simulated; expected one of {', '.join(KV_TYPES)}")
    return KV_TYPES[dtype]


def simulated_engine(
    given: Mapping[str, Any], own: SimulationConfig, timing: TimingConfig, *, num_ranks: int, kv: Mapping[str, Any]
) -> EngineConfig:
    """Return the settings of each rank's scheduler and cache, with vLLM's defaults on this GPU.

    Args:
        given: vLLM's arguments.
        own: our settings.
        timing: the step times.
        num_ranks: data-parallel ranks that run here.
        kv: settings of KV beyond the GPU.

    Raises:
        ValueError: vLLM would not start with them, or they cannot be simulated.
    """
    same = {name: given[name] for name in SAME if given.get(name) is not None}
    asked, block_size = given.get("max_model_len"), block_size_of(given)
    longest = _context(timing) if asked in (None, AUTO) else asked
    seqs, tokens = _step_limits(given, own, longest)
    engine = EngineConfig(
        engine_version=version_of(version()),  # it has the arguments, paths and metrics of that version
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        num_gpu_blocks=_given_blocks(given, timing, block_size),
        dp_size=num_ranks,
        **same,
        **kv,
        **speculation_of(given, predicts=own.predicts),
    )
    return _fitted(engine, timing, may_shorten=asked == AUTO or (asked is None and not own.predicts))


def block_size_of(given: Mapping[str, Any]) -> int:
    """Return the tokens in a KV block."""
    return _or(given.get("block_size"), BLOCK_SIZE)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _context(timing: TimingConfig) -> int | None:
    return None if timing.model is None else timing.shape.context_length


def _step_limits(given: Mapping[str, Any], own: SimulationConfig, longest: int | None) -> tuple[int, int]:
    """Return the most sequences and tokens of a step.

    Raises:
        ValueError: vLLM would refuse them.
    """
    asked_seqs, asked_tokens = given.get("max_num_seqs"), given.get("max_num_batched_tokens")
    seqs, tokens = USUAL if own.gpu is None else server_defaults(find_gpu(own.gpu))
    if _is_low_latency(given):
        tokens = LOW_LATENCY_TOKENS
    if given.get("performance_mode") == "throughput":
        seqs, tokens = 2 * seqs, 2 * tokens
    seqs, tokens = _or(asked_seqs, seqs), _or(asked_tokens, tokens)
    if asked_tokens is None and longest is not None:
        if given.get("enable_chunked_prefill") is False:
            tokens = max(longest, tokens)
        tokens = min(seqs * longest, tokens)
    if asked_seqs is None:
        seqs = min(seqs, tokens)
    scheduled = given.get("max_num_scheduled_tokens")
    if scheduled not in (None, tokens):
        raise ValueError(
            f"--max-num-scheduled-tokens {scheduled}: expected {tokens}, as many as --max-num-batched-tokens"
        )
    if given.get("enable_chunked_prefill") is False and longest is not None and tokens < longest:
        raise ValueError(
            f"--max-num-batched-tokens {tokens}: expected at least {longest}, the longest sequence, with --no-enable-chunked-prefill"
        )
    return seqs, tokens


def _is_low_latency(given: Mapping[str, Any]) -> bool:
    has_ranks = given.get("enable_expert_parallel", False) and given.get("data_parallel_size", 1) > 1
    return bool(has_ranks and given.get("all2all_backend") in LOW_LATENCY)


def _given_blocks(given: Mapping[str, Any], timing: TimingConfig, block_size: int) -> int | None:
    """Return the KV blocks that are asked for, by number or by size.

    Raises:
        ValueError: their size is not known.
    """
    blocks: int | None = given.get("num_gpu_blocks_override")
    num_bytes = given.get("kv_cache_memory_bytes")
    if blocks is not None or num_bytes is None:
        return blocks
    if timing.model is None:
        raise ValueError(
            f"--kv-cache-memory-bytes {num_bytes}: the size of the model's KV is not known; name its shape with --model-shape"
        )
    cache = kv_cache(
        timing.shape, block_size=block_size, num_gpus=timing.tensor_parallel_size, kv_dtype=timing.kv_dtype
    )
    return int(num_bytes // cache.layout.block)


def _fitted(engine: EngineConfig, timing: TimingConfig, *, may_shorten: bool) -> EngineConfig:
    """Return the settings with a longest sequence that fits in the cache.

    Raises:
        ValueError: it does not, and is not to be shortened.
    """
    room = resolve(engine, timing).longest_sequence
    if engine.max_model_len is None or engine.max_model_len <= room:
        return engine
    if may_shorten:
        return replace(engine, max_model_len=room)
    raise ValueError(
        f"the longest sequence has {engine.max_model_len:,} tokens, and the KV cache has room for {room:,}; lower it with "
        f"--max-model-len {room} (or auto), or raise --gpu-memory-utilization"
    )


def check_experts(timing: TimingConfig, ranks: RanksConfig, num_ranks: int) -> None:
    """Refuse ranks whose steps depend on other ranks in a way that is not simulated."""
    if ranks.size == 1 or timing.model is None:
        return
    has_experts = timing.shape.num_experts > 0
    if ranks.is_external and not has_experts:
        raise ValueError(
            f"--data-parallel-size {ranks.size}: vLLM lets something in front choose between ranks only if the model has "
            "experts; start instances without --data-parallel flags"
        )
    if not has_experts or timing.timing_name != "roofline":
        return
    if not timing.enable_expert_parallel:
        raise ValueError(
            f"--data-parallel-size {ranks.size}: experts that are sliced over ranks are not simulated with --gpu; expected "
            "--enable-expert-parallel with it"
        )
    if num_ranks < ranks.size:
        raise ValueError(
            f"--data-parallel-size {ranks.size}: its ranks share experts, so step times of --gpu need all of them in one "
            "stand-in; leave out the flags that spread them, or use a --timing-file"
        )

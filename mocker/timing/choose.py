"""What an engine's settings imply before it is built: its step-time model and its number of KV blocks."""

import functools
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from mocker.contract import AdapterMemory, EngineSettings
from mocker.models.catalog import find_model
from mocker.models.kv_cache import kv_cache, layers_of
from mocker.models.kv_groups import KvLayout
from mocker.models.layout import refusal, unmeasured
from mocker.models.shape import ModelShape
from mocker.sglang.config import SglangConfig
from mocker.speculation.rates import rates_of
from mocker.tiers.config import HostMemory, Tier, whole_chunks
from mocker.timing.calibrated import Calibrated
from mocker.timing.catalog import find_engine, find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.constant import Constant
from mocker.timing.drafting import Drafting, FixedDrafting, ModelDrafting, Speculating
from mocker.timing.files import read_calibration, read_table
from mocker.timing.kv_size import kv_size_of
from mocker.timing.memory import GIB, peak_of_a_step, room_for_kv, size_of_weights
from mocker.timing.model import Faster, TimingModel
from mocker.timing.parts import coefficients, drafter_coefficients, layer_with_head
from mocker.timing.polynomial import Polynomial
from mocker.timing.roofline import Coefficients, Roofline
from mocker.timing.sglang_defaults import static_share, usual_chunk
from mocker.timing.stages import USUAL_STEP, layers_of_stages, saved_by_stages, shares_of_stages
from mocker.timing.table import Table
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import EngineConfig
from mocker.vllm.versions import NEWEST, EngineVersion, version_of

DEFAULT_NUM_BLOCKS = 16384
DEFAULT_NUM_TOKENS = 1 << 20
MOST_BLOCKS = 1 << 22
"""Most blocks of TensorRT-LLM's pool, which has an object for each."""
SGLANG_OUTSIDE = 0.7 * GIB
"""Bytes that are not free on each GPU when SGLang begins to load weights: CUDA's own. An H100 had 78.48 of 79.18 GiB in a
public log (Qwen3-30B-A3B-FP8, 2026-08-27)."""
SGLANG_OUTSIDE_TP = 1.9 * GIB
"""The same with the communication buffers of GPUs that share a model: H200s of an InferenceX run had 137.9 of 139.8 GiB."""


USUAL_ADAPTER = 81920 * 32
"""Parameters of an adapter of rank 1 for Llama 3.1 8B, where the model is not known."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Everything from which an `Engine` is built."""

    config: EngineConfig
    """Its settings as those of vLLM, for whoever asks about size and budgets only."""
    timing: TimingModel
    num_blocks: int
    """KV blocks; vLLM's include a null block, which holds nothing."""
    host: HostMemory | None
    """Host memory for KV, if any."""
    layout: KvLayout | None
    """The groups of the model's layers, if they do not all keep all tokens."""
    noise: tuple[float, ...]
    """Times of a calibrated engine's steps over those of the model: equally likely factors whose mean is 1, or none."""
    is_lockstep: bool
    """Whether a worker's ranks run their steps together, because each holds experts of all."""
    settings: EngineSettings
    """Its settings by the names of its own family."""
    num_ranks: int = 1
    """Ranks of attention DP within one engine, each with `num_blocks`; `config.dp_size` counts them, too."""
    adapters: AdapterMemory | None = None
    """Room for LoRA adapters, if it serves any."""
    stage_shares: tuple[float, ...] = ()
    """The share of a step's time that each stage takes, if the model is cut into stages."""
    acceptance: tuple[float, ...] = ()
    """How often each draft of a step is accepted, by position; none: it does not speculate."""
    timing_alone: TimingModel | None = None
    """With such ranks, the step times of one while the others have nothing to do; None: as `timing`."""

    @property
    def at_best(self) -> "SimulatedEngine":
        """The engine in steps that no other rank makes longer, and that lose no draft, for lower bounds."""
        timing = self.timing
        if isinstance(timing, Speculating):
            timing = timing.at_best(len(self.acceptance))
        elif self.timing_alone is not None:
            timing = self.timing_alone
        if self.stage_shares:  # so many batches are in flight
            timing = Faster(timing, len(self.stage_shares), len(self.stage_shares))
        return self if timing is self.timing else replace(self, timing=timing)

    @property
    def num_engines(self) -> int:
        """Engines of a worker, each of which requests are sent to: vLLM's ranks, or one that deals requests out to its ranks."""
        return self.config.dp_size // self.num_ranks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens."""
        return self.num_blocks - isinstance(self.settings, EngineConfig)

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that sequences can keep in the KV cache; with groups of layers, those of sequences of full length."""
        if self.layout is None:
            return self.num_usable_blocks * self.config.block_size
        length = self.config.max_model_len or DEFAULT_NUM_TOKENS
        return int(self.num_blocks / self.num_blocks_of(length) * length)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of this many tokens holds, shared with nobody."""
        if self.layout is None:
            return -(-num_tokens // self.config.block_size)
        config = self.config
        num_in_flight = config.max_num_batched_tokens * (1 + config.is_async)
        return self.layout.num_blocks_of(num_tokens, num_in_flight, config.num_speculative_tokens)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that the KV cache can hold alone."""
        sizes = [self.config.block_size] if self.layout is None else [g.block_size for g in self.layout.groups]
        lengths = range(self.num_usable_blocks * max(sizes) + 1)
        return bisect_right(lengths, self.num_usable_blocks, key=self.num_blocks_of) - 1

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens the KV cache holds, null block included, as Dynamo's polynomial counts them."""
        return self.num_blocks * self.config.block_size


@functools.lru_cache(maxsize=64)
def resolve(
    engine: EngineConfig | SglangConfig | TrtllmConfig,
    timing: TimingConfig = TimingConfig(),  # noqa: B008 (frozen)
) -> SimulatedEngine:
    """Find an engine's step times and KV blocks; equal settings share one model, which has no state of an engine.

    Raises:
        ValueError: a file cannot be read, the GPU or model is unknown, or the model does not fit or cannot be divided.
    """
    if timing.model is not None and timing.is_generic:
        raise ValueError(
            f"model {timing.model} needs a gpu for its step times and KV blocks, such as h100 (`dynabench hardware` "
            "lists them); with timing polynomial these are generic, and the model provides only its name and "
            "the size of its KV"
        )
    if isinstance(engine, SglangConfig):
        return _resolve_sglang(engine, timing)
    if isinstance(engine, TrtllmConfig):
        return _resolve_trtllm(engine, timing)
    _check_layout(timing)
    engine = replace(
        engine,
        engine_version=version_in(engine, timing),
        async_scheduling=_is_async(engine, timing),
        max_model_len=engine.max_model_len or _context_length(timing),
    )
    stages = _stages(engine, timing)
    num_blocks = engine.num_gpu_blocks or _blocks_that_fit(engine, timing)
    acceptance = rates_of(engine)
    step_times = _timing_model(engine, timing, num_blocks)
    return SimulatedEngine(
        engine,
        Speculating(step_times, _drafting(engine, timing)) if acceptance else step_times,
        num_blocks,
        host=_host_memory(engine, timing),
        layout=groups_of(engine, timing),
        noise=() if timing.calibration is None else read_calibration(timing.calibration)["noise"],
        is_lockstep=timing.enable_expert_parallel and engine.dp_size > 1,
        settings=engine,
        adapters=_adapters(engine, timing),
        acceptance=acceptance,
        stage_shares=stages,
    )


def _stages(engine: EngineConfig, timing: TimingConfig) -> tuple[float, ...]:
    """Return the share of a step's time that each stage of the model takes; nothing if it is not cut into stages.

    Raises:
        ValueError: that cannot be, or not with these settings.
    """
    num_stages = timing.pipeline_parallel_size
    if num_stages == 1:
        return ()
    for is_so, what in (
        (engine.kv_role is not None, "prefill and decode apart"),
        (engine.has_host_memory, "host memory for KV"),
        (engine.dp_size > 1, "data-parallel ranks"),
        (engine.enable_lora, "LoRA adapters"),
        (engine.num_speculative_tokens > 0, "speculative decoding"),
        (not _layout(engine, timing).is_plain, f"{timing.model}, whose layers do not all keep all tokens"),
    ):
        if is_so:
            raise ValueError(
                f"pipeline_parallel_size is {num_stages}; expected 1 with {what}: it is not simulated with stages"
            )
    layers = layers_of_stages(timing.shape.num_layers, num_stages)
    return shares_of_stages(layers, *_roofline(engine, timing, 1).parts_of_a_step(USUAL_STEP))


def with_sglang_defaults(engine: SglangConfig, timing: TimingConfig) -> SglangConfig:
    """Set what SGLang would choose for the GPU and the model; what is set stays as it is.

    Raises:
        ValueError: the GPU or the model is unknown.
    """
    if timing.gpu is None or timing.model is None:
        return engine
    gpu = find_gpu(timing.gpu)
    if engine.chunked_prefill_size is None:
        engine = replace(engine, chunked_prefill_size=usual_chunk(gpu))
    if engine.mem_fraction_static is None:
        share = static_share(
            gpu,
            timing.shape,
            num_gpus=timing.tensor_parallel_size,
            num_tokens=engine.chunk_size or engine.max_prefill_tokens,
            max_running=engine.max_running_requests,
            num_ranks=engine.attn_dp_size,
            mode=engine.disaggregation_mode,
        )
        engine = replace(engine, mem_fraction_static=share)
    return engine


def _resolve_sglang(engine: SglangConfig, timing: TimingConfig) -> SimulatedEngine:
    """Find the same for SGLang, whose memory is divided otherwise."""
    engine, num_ranks = with_sglang_defaults(engine, timing), engine.attn_dp_size
    whole, timing = timing, _of_rank("attn_dp_size", num_ranks, timing, value=str(num_ranks), off="1")
    _check_layout(timing)
    _check_layers("SGLang", engine, timing)
    own = engine.of_rank(num_ranks) if num_ranks > 1 else engine
    budget = own.chunk_size or own.max_prefill_tokens
    given = _blocks_for("max_total_tokens", engine.max_total_tokens, engine, timing)
    num_pages = _pages_that_fit(engine, timing, whole.tensor_parallel_size) if given is None else given
    described = EngineConfig(
        block_size=engine.page_size,
        num_gpu_blocks=num_pages + 1,  # with a null block
        dp_size=num_ranks,
        max_num_seqs=min(own.num_rows(DEFAULT_NUM_TOKENS), budget),
        max_num_batched_tokens=budget,
        max_model_len=engine.context_length,
        enable_prefix_caching=engine.has_tree,
        async_scheduling=engine.is_async,
        kv_role=engine.kv_role,
    )
    found = resolve(described, timing)
    settings = replace(engine, context_length=found.config.max_model_len)
    host = _hicache(engine, timing, num_pages)
    return _with_ranks(replace(found, settings=settings, num_blocks=num_pages, host=host), timing)


def _hicache(engine: SglangConfig, timing: TimingConfig, num_pages: int) -> HostMemory | None:
    """Return the host memory of an engine with so many pages on its GPUs, in pages as SGLang divides it (`HostKVCache`).

    Raises:
        ValueError: the size of the model's KV is unknown.
    """
    if not engine.enable_hierarchical_cache:
        return None
    page_size = engine.page_size
    size = kv_size_of(timing, block_size=page_size)
    num_tokens = int(num_pages * page_size * engine.host_ratio)
    if engine.hicache_size:
        num_tokens = int(engine.hicache_size * 1e9 // (size.block / page_size / size.num_parts))
    return HostMemory(
        num_chunks=num_tokens // page_size + 1,
        eviction_policy="lru",  # of no use: the radix tree evicts by radix_eviction_policy
        offload_prompt_only=False,
        chunk_bytes=size.block,
        bandwidth=engine.hicache_bandwidth_gb_s * 1e9 * size.num_parts,
        latency_s=engine.hicache_latency_us / 1e6,
        num_layers=size.num_layers,
    )


def _with_ranks(found: SimulatedEngine, timing: TimingConfig) -> SimulatedEngine:
    """Let data-parallel ranks that share experts be those of one engine."""
    config, num_ranks = found.config, found.config.dp_size
    if num_ranks == 1:
        return found
    alone = None
    if timing.timing_name == "roofline":
        alone = _timing_model(config, timing, found.num_blocks, num_busy_ranks=1)
    return replace(found, num_ranks=num_ranks, timing_alone=alone, is_lockstep=False)


def _of_rank(name: str, num_ranks: int, timing: TimingConfig, *, value: str, off: str) -> TimingConfig:
    """Return the layout of one rank of attention DP, whose GPUs share attention; all GPUs share the experts.

    Without expert parallelism, each GPU has a slice of all experts and not some whole ones. That is as many bytes and
    products, so it is counted as the same.

    Raises:
        ValueError: the GPUs cannot be divided among the ranks, or the model has no experts to share.
    """
    if num_ranks == 1:
        return timing
    num_gpus = timing.tensor_parallel_size
    if num_gpus % num_ranks:
        raise ValueError(f"{name} is {value}; expected a divisor of tensor_parallel_size ({num_gpus})")
    is_known = timing.timing_name == "roofline"
    if is_known and not timing.shape.num_experts:
        raise ValueError(
            f"{name} is {value}, but {timing.model} has no experts, and ranks share nothing else here; expected {off}"
        )
    return replace(timing, tensor_parallel_size=num_gpus // num_ranks, enable_expert_parallel=is_known)


def _check_layers(name: str, engine: EngineSettings, timing: TimingConfig) -> None:
    """Refuse a model whose layers do not all keep all tokens, or in stages, which only vLLM's scheduler has here."""
    if timing.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size is {timing.pipeline_parallel_size}; expected 1: {name}'s scheduler has no stages here"
        )
    if timing.timing_name == "roofline" and len(_layout(engine, timing).groups) > 1:
        raise ValueError(
            f"model {timing.model} has layers that do not keep all tokens, which {name}'s scheduler does not have here yet"
        )


def _blocks_for(name: str, num_tokens: int | None, engine: EngineSettings, timing: TimingConfig) -> int | None:
    """Return the blocks for so many tokens, or the default if neither they nor a GPU and a model are given."""
    if num_tokens is None:
        if timing.gpu is not None and timing.model is not None:
            return None
        num_tokens = DEFAULT_NUM_TOKENS
    if num_tokens < engine.block_size:
        raise ValueError(f"{name} is {num_tokens}; expected at least the {engine.block_size} tokens of a block")
    return num_tokens // engine.block_size


def _pages_that_fit(engine: SglangConfig, timing: TimingConfig, num_all_gpus: int) -> int:
    """Return the pages of KV in a share of the memory that is free before the weights are loaded, beside them.

    All GPUs share the experts if any are shared, those of a rank the rest.

    Raises:
        ValueError: the weights leave no room.
    """
    assert timing.gpu is not None
    assert engine.mem_fraction_static is not None
    gpu, num_gpus = find_gpu(timing.gpu), timing.tensor_parallel_size
    num_expert_gpus = num_all_gpus if timing.enable_expert_parallel else 1
    free = gpu.memory - (SGLANG_OUTSIDE_TP if num_all_gpus > 1 else SGLANG_OUTSIDE)
    weights = size_of_weights(timing.shape, num_gpus, num_expert_gpus)
    room = engine.mem_fraction_static * free - weights
    page = _layout(engine, timing).block
    if room < 2 * page:
        raise ValueError(
            f"the weights need {weights / GIB:.1f} GiB on each GPU and leave no room for KV in mem_fraction_static "
            f"({engine.mem_fraction_static:g}) of the {free / GIB:.1f} GiB that are free on {gpu.name} before they are "
            "loaded; raise tensor_parallel_size"
        )
    return int(room // page)


def _resolve_trtllm(engine: TrtllmConfig, timing: TimingConfig) -> SimulatedEngine:
    """Find the same for TensorRT-LLM, whose memory is divided otherwise."""
    num_all_gpus = timing.tensor_parallel_size
    num_ranks = num_all_gpus if engine.enable_attention_dp else 1
    timing = _of_rank("enable_attention_dp", num_ranks, timing, value="true", off="false")
    _check_layout(timing)
    _check_layers("TensorRT-LLM", engine, timing)
    given = _blocks_for("kv_cache_max_tokens", engine.kv_cache_max_tokens, engine, timing)
    num_blocks = _blocks_of_free_memory(engine, timing, num_all_gpus) if given is None else given
    if num_blocks > MOST_BLOCKS:
        raise ValueError(
            f"the KV cache has {num_blocks:,} blocks; expected at most {MOST_BLOCKS:,}: raise tokens_per_block"
        )
    described = EngineConfig(
        block_size=engine.tokens_per_block,
        num_gpu_blocks=num_blocks + 1,  # with a null block
        dp_size=num_ranks,
        max_num_seqs=min(engine.max_batch_size, engine.max_num_tokens),
        max_num_batched_tokens=engine.max_num_tokens,
        max_model_len=engine.max_seq_len,
        enable_prefix_caching=engine.enable_block_reuse,
        enable_chunked_prefill=engine.enable_chunked_context,
        async_scheduling=engine.is_async,
        kv_role=engine.kv_role,
    )
    found = resolve(described, timing)
    settings = replace(engine, max_seq_len=found.config.max_model_len)
    return _with_ranks(replace(found, settings=settings, num_blocks=num_blocks), timing)


def _blocks_of_free_memory(engine: TrtllmConfig, timing: TimingConfig, num_all_gpus: int) -> int:
    """Return the blocks of KV in a share of what the weights and the largest step leave (`configure_kv_cache_capacity`).

    What a step needs is taken as for vLLM, which nobody has compared with TensorRT-LLM's logs.

    Raises:
        ValueError: they leave no room.
    """
    assert timing.gpu is not None
    gpu, num_gpus = find_gpu(timing.gpu), timing.tensor_parallel_size
    num_expert_gpus = num_all_gpus if timing.enable_expert_parallel else 1
    needed = size_of_weights(timing.shape, num_gpus, num_expert_gpus)
    needed += peak_of_a_step(timing.shape, engine.max_num_tokens, engine.max_batch_size, num_gpus)
    free = max(gpu.memory - needed, 0)
    block = _layout(engine, timing).block
    room = engine.kv_cache_free_gpu_memory_fraction * free
    if room < 2 * block:
        raise ValueError(
            f"the weights and the largest step need {needed / GIB:.1f} GiB on each GPU and leave {free / GIB:.1f} of "
            f"{gpu.name}'s {gpu.memory / GIB:.1f} GiB free; kv_cache_free_gpu_memory_fraction "
            f"({engine.kv_cache_free_gpu_memory_fraction:g}) of that has no room for KV; raise tensor_parallel_size"
        )
    return int(room // block)


def _context_length(timing: TimingConfig) -> int | None:
    """Return the context length of the model; None if there is no model, or measured or generic times only name one."""
    if timing.model is None:
        return None
    try:
        return timing.shape.context_length
    except ValueError:
        if timing.timing_name == "roofline":
            raise
        return None


def _check_layout(timing: TimingConfig) -> None:
    """Refuse a model that the engine could not divide over its GPUs, or not as was measured, if both are known."""
    if timing.gpu is None or timing.model is None:
        return
    for check in (refusal, unmeasured):
        reason = check(
            timing.shape,
            tensor_parallel_size=timing.tensor_parallel_size,
            enable_expert_parallel=timing.enable_expert_parallel,
        )
        if reason is not None:
            raise ValueError(f"model {timing.model}: {reason}")


def _blocks_that_fit(engine: EngineConfig, timing: TimingConfig) -> int:
    """Return the KV blocks that fit.

    Raises:
        ValueError: not even one fits, because the weights fill the memory.
    """
    if timing.timing_file is not None:
        return _measured_engine(timing).get("num_gpu_blocks") or DEFAULT_NUM_BLOCKS
    if timing.gpu is None or timing.model is None:
        return DEFAULT_NUM_BLOCKS
    gpu, num_gpus = find_gpu(timing.gpu), timing.tensor_parallel_size
    num_expert_gpus = _expert_parallel_size(engine, timing)
    room = room_for_kv(
        timing.shape,
        gpu,
        utilization=timing.gpu_memory_utilization,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        tensor_parallel_size=num_gpus,
        expert_parallel_size=num_expert_gpus,
    )
    needed = size_of_weights(timing.shape, num_gpus, num_expert_gpus)
    if (drafter := _drafter_shape(engine, timing)) is not None:
        extra = size_of_weights(drafter, num_gpus, num_expert_gpus)
        room, needed = room - extra, needed + extra
    if engine.enable_lora:  # vLLM makes the slots before it looks how much room is left
        slots = 2 * engine.max_loras * timing.shape.num_adapter_parameters(engine.max_lora_rank)
        room, needed = room - slots, needed + slots
    block = _layout(engine, timing).block
    if timing.pipeline_parallel_size > 1:
        layers = layers_of_stages(timing.shape.num_layers, timing.pipeline_parallel_size)
        saved = saved_by_stages(
            timing.shape, layers, size_of_weights(timing.shape, num_gpus, num_expert_gpus), num_gpus
        )
        room, needed, block = room + saved, needed - saved, block * max(layers) / sum(layers)
    blocks = int(room // block)
    if blocks < 2:
        raise ValueError(
            f"the weights need {needed / GIB:.1f} GiB on each GPU and leave no room for KV blocks in "
            f"{timing.gpu_memory_utilization:.0%} of {gpu.name}'s {gpu.memory / GIB:.1f} GiB; raise tensor_parallel_size"
        )
    return blocks


def groups_of(engine: EngineSettings, timing: TimingConfig) -> KvLayout | None:
    """Return the groups of the model's layers, if it is known and they do not all keep all tokens."""
    if timing.timing_name != "roofline" or not isinstance(engine, EngineConfig):
        return None
    layout = _layout(engine, timing)
    return None if layout.is_plain else layout


def is_one_table(engine: EngineSettings, timing: TimingConfig) -> bool:
    """Return whether layers are counted as if all kept all tokens, because KV is transferred."""
    if timing.timing_name != "roofline" or not (isinstance(engine, EngineConfig) and _transfers(engine)):
        return False
    return any(not layer.is_full for layer in layers_of(timing.shape, timing.tensor_parallel_size, timing.kv_dtype))


def _transfers(engine: EngineConfig) -> bool:
    return engine.kv_role is not None or engine.has_host_memory


def _layout(engine: EngineSettings, timing: TimingConfig) -> KvLayout:
    """Return how the model's layers keep KV; vLLM transfers KV, to another engine or host memory, from one table only."""
    state_block_size, transfers, drafter = None, False, None
    if isinstance(engine, EngineConfig):
        drafter = _drafter_shape(engine, timing)
        state_block_size = None if engine.enable_prefix_caching else engine.max_model_len or _context_length(timing)
        transfers = _transfers(engine)
    return kv_cache(
        timing.shape,
        block_size=engine.block_size,
        num_gpus=timing.tensor_parallel_size,
        kv_dtype=timing.kv_dtype,
        state_block_size=state_block_size,
        drafter=drafter,
        is_one_table=transfers,
    ).layout


def _host_memory(engine: EngineConfig, timing: TimingConfig) -> HostMemory | None:
    """Return the host memory of a rank, in whole chunks as vLLM divides it.

    Raises:
        ValueError: it has no room for a chunk, or the size of the model's KV is unknown.
    """
    if not engine.has_host_memory:
        return None
    size = kv_size_of(timing, block_size=engine.block_size)
    num_bytes = engine.blocks_per_chunk * (size.block + size.window_block)
    num_chunks = engine.num_host_blocks // engine.blocks_per_chunk
    return HostMemory(
        num_chunks=num_chunks or _whole_chunks(engine, "kv_offloading_size", num_bytes),
        blocks_per_chunk=engine.blocks_per_chunk,
        eviction_policy=engine.eviction_policy,
        store_threshold=engine.store_threshold,
        offload_prompt_only=engine.offload_prompt_only,
        load_tokens_within_step=_tokens_within(engine.sync_load_budget_bytes, num_bytes, engine),
        chunk_bytes=num_bytes,
        bandwidth=engine.host_bandwidth_gb_s * 1e9 * size.num_parts,
        latency_s=engine.host_latency_us / 1e6,
        tiers=_tiers(engine, num_bytes),
        prefetch_policy=engine.kv_prefetch_policy,
        timeout_s=engine.kv_prefetch_timeout_s if engine.kv_prefetch_policy == "timeout" else math.inf,
        timeout_s_per_chunk=engine.kv_prefetch_timeout_s_per_1k_tokens
        * engine.blocks_per_chunk
        * engine.block_size
        / 1024,
    )


def _adapters(engine: EngineConfig, timing: TimingConfig) -> AdapterMemory | None:
    """Return the room for adapters; each GPU copies whole ones, because vLLM divides only one of an adapter's two matrices."""
    if not engine.enable_lora:
        return None
    load_s = 0.0 if engine.lora_load_ms is None else engine.lora_load_ms / 1e3
    if engine.lora_load_ms is None:
        rank = engine.max_lora_rank
        count = USUAL_ADAPTER * rank if timing.model is None else timing.shape.num_adapter_parameters(rank)
        load_s = engine.host_latency_us / 1e6 + 2 * count / (engine.host_bandwidth_gb_s * 1e9)
    return AdapterMemory(
        engine.max_loras, engine.max_cpu_loras or engine.max_loras, load_s=load_s, read_s=engine.lora_read_ms / 1e3
    )


def _tokens_within(budget: int, chunk_bytes: float, engine: EngineConfig) -> int:
    """Return how many tokens' KV so many bytes are."""
    return int(budget * engine.blocks_per_chunk * engine.block_size // chunk_bytes)


def _tiers(engine: EngineConfig, chunk_bytes: float) -> tuple[Tier, ...]:
    """Return a rank's tiers behind its host memory.

    Raises:
        ValueError: one has no room for a chunk.
    """
    if not engine.kv_disk_size:
        return ()
    disk = Tier(
        name="disk",
        num_chunks=_whole_chunks(engine, "kv_disk_size", chunk_bytes),
        bandwidth=engine.kv_disk_bandwidth_gb_s * 1e9,
        latency_s=engine.kv_disk_latency_ms / 1e3,
        lookup_s=engine.kv_disk_lookup_ms / 1e3,
        write_policy=engine.kv_disk_write_policy,
        eviction_policy=engine.kv_disk_eviction_policy,
    )
    return (disk,)


def _whole_chunks(engine: EngineConfig, setting: str, chunk_bytes: float) -> int:
    return whole_chunks(
        setting, getattr(engine, setting), chunk_bytes=chunk_bytes, blocks_per_chunk=engine.blocks_per_chunk
    )


def version_in(engine: EngineConfig, timing: TimingConfig) -> EngineVersion:
    """Return whose rules apply: as set, else those of the calibrated engine, else the newest.

    Raises:
        ValueError: the rules of the calibrated engine are not known.
    """
    if engine.engine_version is not None:
        return engine.engine_version
    release = _measured_engine(timing).get("version", NEWEST)
    try:
        return version_of(release)
    except ValueError as error:
        raise ValueError(
            f"timing_file {timing.timing_file} was measured on {error}; choose one with engine_version, whose rules are "
            "then assumed"
        ) from error


def _is_async(engine: EngineConfig, timing: TimingConfig) -> bool:
    """Return whether steps are scheduled ahead: as set, else as on the calibrated engine."""
    if engine.async_scheduling is not None:
        return engine.async_scheduling
    return _measured_engine(timing).get("async_scheduling") is not False


def _measured_engine(timing: TimingConfig) -> dict[str, Any]:
    """Return the settings of the engine that a calibration measured."""
    if timing.calibration is None:
        return {}
    found: dict[str, Any] = read_calibration(timing.calibration)["engine"]
    return found


def _timing_model(
    engine: EngineConfig, timing: TimingConfig, num_blocks: int, *, num_busy_ranks: int | None = None
) -> TimingModel:
    """Return the step-time model, with so many ranks that compute as much as the one it is asked for (default: all)."""
    speedup, decode_speedup = timing.speedup, timing.decode_speedup
    match timing.timing_name:
        case "polynomial":
            return Polynomial(num_blocks * engine.block_size, speedup, decode_speedup)
        case "constant":
            return Constant(
                timing.constant_prefill_ms / 1000 / speedup, timing.constant_decode_ms / 1000 / decode_speedup
            )
        case "roofline":
            model: TimingModel = _roofline(engine, timing, num_busy_ranks or engine.dp_size)
        case _:
            model = _measured(timing)
    return model if speedup == decode_speedup == 1 else Faster(model, speedup, decode_speedup)


def _roofline(engine: EngineConfig, timing: TimingConfig, num_busy_ranks: int) -> Roofline:
    assert timing.gpu is not None
    gpu = find_gpu(timing.gpu)
    found = coefficients(
        timing.shape,
        gpu,
        find_engine(timing.timed_as, gpu.architecture),
        tensor_parallel_size=timing.tensor_parallel_size,
        expert_parallel_size=_expert_parallel_size(engine, timing),
        attention_ranks=num_busy_ranks,
        kv_dtype=timing.kv_dtype,
        link_gbps=timing.link_gbps,
        async_scheduling=engine.is_async,
    )
    return Roofline(found)


def _drafting(engine: EngineConfig, timing: TimingConfig) -> Drafting:
    """Return how long drafting takes.

    Raises:
        ValueError: the model or the GPU on which that depends is unknown, or the method needs another model.
    """
    method = engine.speculative_method
    if (method == "draft_model") != (engine.draft_model is not None):
        raise ValueError(
            f"speculative_method is {method}, and draft_model is {engine.draft_model}; expected both to be of a draft model"
        )
    speedup = timing.decode_speedup
    if engine.drafting_ms is not None:
        return FixedDrafting(engine.drafting_ms / 1000 / speedup)
    if method in ("ngram", "ngram_gpu"):
        return FixedDrafting(0.0)
    if timing.timing_name != "roofline":
        raise ValueError(
            f"num_speculative_tokens is {engine.num_speculative_tokens}, and timing {timing.timing_name} does not say how long "
            f"{method} drafts; expected drafting_ms with it, or a gpu and a model"
        )
    model: TimingModel = Roofline(_drafter(engine, timing))
    if speedup != 1:
        model = Faster(model, timing.speedup, speedup)
    return ModelDrafting(model, engine.num_speculative_tokens)


def _drafter_shape(engine: EngineConfig, timing: TimingConfig) -> ModelShape | None:
    """Return what drafts: a model of its own, or a layer that shares the model's embeddings and head; None: neither."""
    if not engine.num_speculative_tokens or engine.speculative_method in ("ngram", "ngram_gpu"):
        return None
    return (
        find_model(engine.draft_model) if engine.draft_model else replace(layer_with_head(timing.shape), vocab_size=0)
    )


def _drafter(engine: EngineConfig, timing: TimingConfig) -> Coefficients:
    assert timing.gpu is not None
    gpu = find_gpu(timing.gpu)
    return drafter_coefficients(
        find_model(engine.draft_model) if engine.draft_model else layer_with_head(timing.shape),
        gpu,
        find_engine(timing.timed_as, gpu.architecture),
        tensor_parallel_size=timing.tensor_parallel_size,
        expert_parallel_size=_expert_parallel_size(engine, timing),
        kv_dtype=timing.kv_dtype,
        link_gbps=timing.link_gbps,
    )


def _measured(timing: TimingConfig) -> TimingModel:
    assert timing.timing_file is not None
    if timing.timing_name == "calibrated":
        return Calibrated(read_calibration(timing.timing_file)["step"])
    return Table(read_table(timing.timing_file))


def _expert_parallel_size(engine: EngineConfig, timing: TimingConfig) -> int:
    """Count the GPUs over which whole experts are spread."""
    return timing.tensor_parallel_size * engine.dp_size if timing.enable_expert_parallel else 1

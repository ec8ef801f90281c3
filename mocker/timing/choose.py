"""What an engine's settings imply before it is built: its step-time model and its number of KV blocks."""

import functools
from bisect import bisect_right
from dataclasses import dataclass, replace

from mocker.contract import AdapterMemory, EngineSettings
from mocker.models.kv_groups import KvLayout
from mocker.models.layout import refusal, unmeasured
from mocker.sglang.config import SglangConfig
from mocker.speculation.rates import rates_of
from mocker.tiers.config import HostMemory
from mocker.timing.adapters import adapter_memory
from mocker.timing.blocks import DEFAULT_NUM_TOKENS, blocks_for, blocks_of_free_memory, blocks_that_fit, pages_that_fit
from mocker.timing.config import TimingConfig
from mocker.timing.drafter import drafting_of
from mocker.timing.drafting import Speculating
from mocker.timing.encoder import with_whole_items
from mocker.timing.engine_times import measured_engine, timing_model
from mocker.timing.files import read_calibration
from mocker.timing.groups import check_layers, check_retention, context_length, groups_of
from mocker.timing.host_memory import hicache_memory, host_memory
from mocker.timing.model import Faster, TimingModel
from mocker.timing.sglang_defaults import with_sglang_defaults
from mocker.timing.stages import stages_of
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import EngineConfig
from mocker.vllm.versions import NEWEST, EngineVersion, version_of

MOST_BLOCKS = 1 << 22
"""Most blocks of TensorRT-LLM's pool, which has an object for each."""


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
    encoding_s: float = 0.0
    """How long the encoder takes for a token of an image (s)."""
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

    def num_blocks_decoding(self, num_tokens: int) -> int:
        """Return the blocks that it holds while it decodes, when windows have no prompt in flight beside them."""
        if self.layout is None:
            return self.num_blocks_of(num_tokens)
        num_drafts = self.config.num_speculative_tokens
        return self.layout.num_blocks_of(num_tokens, (1 + num_drafts) * (1 + self.config.is_async), num_drafts)

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
    asked = engine.max_model_len
    engine = replace(
        with_whole_items(engine, timing),
        engine_version=version_in(engine, timing),
        async_scheduling=_is_async(engine, timing),
        max_model_len=engine.max_model_len or context_length(timing),
    )
    check_retention(engine, timing)
    stages = stages_of(engine, timing)
    num_blocks = engine.num_gpu_blocks or blocks_that_fit(engine, timing)
    acceptance = rates_of(engine)
    step_times = timing_model(engine, timing, num_blocks)
    found = SimulatedEngine(
        engine,
        Speculating(step_times, drafting_of(engine, timing)) if acceptance else step_times,
        num_blocks,
        host=host_memory(engine, timing),
        layout=groups_of(engine, timing),
        noise=() if timing.calibration is None else read_calibration(timing.calibration)["noise"],
        is_lockstep=timing.enable_expert_parallel and engine.dp_size > 1,
        settings=engine,
        adapters=adapter_memory(engine, timing),
        acceptance=acceptance,
        encoding_s=engine.encoding_ms_per_1000_tokens / 1e6 / timing.speedup,
        stage_shares=stages,
    )
    if asked and not engine.num_gpu_blocks and timing.timing_name == "roofline" and timing.host_times == "vllm":
        _check_room(found, asked, timing)
    return found


def _check_room(found: SimulatedEngine, max_model_len: int, timing: TimingConfig) -> None:
    """Refuse a context that is longer than the KV cache, with which vLLM does not start.

    Raises:
        ValueError: it is.
    """
    needed = found.num_blocks_of(max_model_len)
    if needed > found.num_blocks:
        raise ValueError(
            f"max_model_len is {max_model_len}, and a sequence of so many tokens takes {needed:,} blocks of the KV cache, which "
            f"has {found.num_blocks:,}: vLLM does not start with it; expected at most {found.longest_sequence}, none, or a larger "
            f"gpu_memory_utilization than {timing.gpu_memory_utilization:g}"
        )


def _resolve_sglang(engine: SglangConfig, timing: TimingConfig) -> SimulatedEngine:
    """Find the same for SGLang, whose memory is divided otherwise."""
    engine, num_ranks = with_sglang_defaults(engine, timing), engine.attn_dp_size
    whole, timing = timing, _of_rank("attn_dp_size", num_ranks, timing, value=str(num_ranks), off="1")
    _check_layout(timing)
    check_layers("SGLang", engine, timing)
    own = engine.of_rank(num_ranks) if num_ranks > 1 else engine
    budget = own.chunk_size or own.max_prefill_tokens
    given = blocks_for("max_total_tokens", engine.max_total_tokens, engine, timing)
    num_pages = pages_that_fit(engine, timing, whole.tensor_parallel_size) if given is None else given
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
    host = hicache_memory(engine, timing, num_pages)
    return _with_ranks(replace(found, settings=settings, num_blocks=num_pages, host=host, layout=None), timing)


def _with_ranks(found: SimulatedEngine, timing: TimingConfig) -> SimulatedEngine:
    """Let data-parallel ranks that share experts be those of one engine."""
    config, num_ranks = found.config, found.config.dp_size
    if num_ranks == 1:
        return found
    alone = None
    if timing.timing_name == "roofline":
        alone = timing_model(config, timing, found.num_blocks, num_busy_ranks=1)
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


def _resolve_trtllm(engine: TrtllmConfig, timing: TimingConfig) -> SimulatedEngine:
    """Find the same for TensorRT-LLM, whose memory is divided otherwise."""
    num_all_gpus = timing.tensor_parallel_size
    num_ranks = num_all_gpus if engine.enable_attention_dp else 1
    timing = _of_rank("enable_attention_dp", num_ranks, timing, value="true", off="false")
    _check_layout(timing)
    check_layers("TensorRT-LLM", engine, timing)
    given = blocks_for("kv_cache_max_tokens", engine.kv_cache_max_tokens, engine, timing)
    num_blocks = blocks_of_free_memory(engine, timing, num_all_gpus) if given is None else given
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
    return _with_ranks(replace(found, settings=settings, num_blocks=num_blocks, layout=None), timing)


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


def version_in(engine: EngineConfig, timing: TimingConfig) -> EngineVersion:
    """Return whose rules apply: as set, else those of the calibrated engine, else the newest.

    Raises:
        ValueError: the rules of the calibrated engine are not known.
    """
    if engine.engine_version is not None:
        return engine.engine_version
    release = measured_engine(timing).get("version", NEWEST)
    try:
        return version_of(release)
    except ValueError as error:
        raise ValueError(f"timing_file {timing.timing_file} was measured on {error}") from error


def _is_async(engine: EngineConfig, timing: TimingConfig) -> bool:
    """Return whether steps are scheduled ahead: as set, else as on the calibrated engine."""
    if engine.async_scheduling is not None:
        return engine.async_scheduling
    return measured_engine(timing).get("async_scheduling") is not False

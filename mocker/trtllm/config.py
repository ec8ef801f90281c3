"""Every setting of one engine's scheduler and cache, named as in TensorRT-LLM, with its defaults.

Sources: `tensorrt_llm/llmapi/llm_args.py` of 2026 (`TorchLlmArgs`, `KvCacheConfig`, `SchedulerConfig`). Settings of its
nested configurations stand here beside the others, the sizes of the KV cache with the names of `trtllm-serve`'s flags.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, Whole, check_settings
from mocker.contract import KvRole

CapacitySchedulerPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
ContextChunkingPolicy = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]
ServerRole = Literal["context", "generation"]
ROLES: dict[ServerRole, KvRole] = {"context": "kv_producer", "generation": "kv_consumer"}
"""What vLLM calls its parts in disaggregation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """Settings of one engine."""

    tokens_per_block: Count = 32
    """Tokens in a KV block."""

    kv_cache_max_tokens: Count | None = None
    """Tokens of KV cache (default: as many as fit on --gpu beside --model, else 1048576)."""

    kv_cache_free_gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU memory that weights and the largest step leave, for the KV cache."""

    max_batch_size: Count = 2048
    """Most requests in one step."""

    max_num_tokens: Count = 8192
    """Most tokens that one step may compute."""

    max_seq_len: Count | None = None
    """Most tokens of a request, prompt and output together (default: no limit)."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = "GUARANTEED_NO_EVICT"
    """Whose KV must fit: a request's until its end, so that nobody is paused; that of the next step, so that the last ones
    are paused when it does not; or, with STATIC_BATCH, until their ends and only when nothing runs."""

    enable_chunked_context: bool = False
    """Allow a prompt to be computed over several steps (enable_chunked_prefill in newer versions)."""

    context_chunking_policy: ContextChunkingPolicy = "FIRST_COME_FIRST_SERVED"
    """How prompts share what a step's generating requests leave: the first takes all, or each a unit in turn."""

    chunk_unit_size: Count | None = None
    """Tokens of which a chunk that does not end its prompt is a multiple (default: tokens_per_block)."""

    batch_wait_timeout_iters: Whole = 0
    """Steps for which prompts wait for others, so that more are computed at once (0: they do not wait)."""

    batch_wait_max_tokens_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of max_num_tokens from which on they do not wait."""

    enable_attention_dp: bool = False
    """Give each of the GPUs attention and KV of its own: tensor_parallel_size ranks, whose steps begin and end together."""

    attention_dp_enable_balance: bool = False
    """With attention DP, let prompts wait until all ranks have some (enable_balance of attention_dp_config)."""

    attention_dp_timeout_iters: Whole = 50
    """Steps for which prompts of some ranks wait for those of others (timeout_iters of attention_dp_config)."""

    attention_dp_batching_wait_iters: Whole = 10
    """Steps for which they wait for more, once all ranks have some (batching_wait_iters of attention_dp_config)."""

    enable_block_reuse: bool = True
    """Reuse the KV blocks of identical prefixes."""

    disable_overlap_scheduler: bool = False
    """Schedule a step only when the one before it has ended; a context server always does."""

    server_role: ServerRole | None = None
    """What it does with a request: only its prompt (context), or only its answer (generation); a worker's role decides that
    (default: all of it)."""

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.tokens_per_block

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request."""
        return self.max_seq_len

    @property
    def chunk_size(self) -> int | None:
        """Most prompt tokens in one step, if prompts are cut."""
        return self.max_num_tokens if self.enable_chunked_context else None

    @property
    def is_async(self) -> bool:
        """Whether a step is scheduled ahead."""
        return not self.disable_overlap_scheduler and self.server_role != "context"

    @property
    def kv_role(self) -> KvRole | None:
        """Its part in disaggregation."""
        return None if self.server_role is None else ROLES[self.server_role]

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it may read KV from other engines."""
        return self.server_role == "generation"

    @property
    def unit(self) -> int:
        """Tokens of which a chunk that does not end its prompt is a multiple."""
        return self.chunk_unit_size or self.tokens_per_block

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        check_settings(self)
        if self.attention_dp_enable_balance and not self.enable_attention_dp:
            raise ValueError(
                "attention_dp_enable_balance is true; expected enable_attention_dp, whose ranks it balances"
            )
        if self.enable_attention_dp and self.server_role is not None:
            raise ValueError(
                f"enable_attention_dp is not modelled with server_role {self.server_role} yet; expected only one of them"
            )
        if self.enable_attention_dp and self.batch_wait_timeout_iters:
            raise ValueError(
                f"batch_wait_timeout_iters is {self.batch_wait_timeout_iters} with enable_attention_dp, which waits by "
                "attention_dp_enable_balance; expected 0"
            )
        if self.enable_chunked_context and not self.tokens_per_block <= self.unit <= self.max_num_tokens:
            raise ValueError(
                f"chunks are multiples of {self.unit} tokens; expected at least tokens_per_block ({self.tokens_per_block}) and "
                f"at most max_num_tokens ({self.max_num_tokens}): set chunk_unit_size"
            )

"""Every setting of one engine's scheduler and cache, named as in TensorRT-LLM, with its defaults.

Sources: `tensorrt_llm/llmapi/llm_args.py` of 2026 (`TorchLlmArgs`, `KvCacheConfig`, `SchedulerConfig`,
`AttentionDpConfig`). Settings of its nested configurations stand here beside the others.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, Whole, check_settings
from mocker.contract import KvRole

CapacitySchedulerPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
ContextChunkingPolicy = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmConfig:
    """Settings of one engine."""

    tokens_per_block: Count = 32
    """Tokens in a KV block."""

    num_gpu_blocks: Count | None = None
    """KV blocks of one engine (default: as many as fit on --gpu beside --model)."""

    max_batch_size: Count = 2048
    """Most requests in one step."""

    max_num_tokens: Count = 8192
    """Most tokens that one step may compute."""

    max_seq_len: Count | None = None
    """Most tokens of a request, prompt and output together (default: no limit)."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = "GUARANTEED_NO_EVICT"
    """Whose KV must fit: a request's until its end, so that nobody is paused; that of the next step, so that the last ones
    are paused when it does not; or, with STATIC_BATCH, until their ends and only when nothing runs."""

    enable_chunked_prefill: bool = False
    """Allow a prompt to be computed over several steps (enable_chunked_context in older versions)."""

    context_chunking_policy: ContextChunkingPolicy = "FIRST_COME_FIRST_SERVED"
    """How prompts share what a step's generating requests leave: the first takes all, or each a unit in turn."""

    chunk_unit_size: Count | None = None
    """Tokens of which a chunk that does not end its prompt is a multiple (default: tokens_per_block)."""

    batch_wait_timeout_iters: Whole = 0
    """Steps for which prompts wait for others, so that more are computed at once (0: they do not wait)."""

    batch_wait_max_tokens_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Share of max_num_tokens from which on they do not wait."""

    enable_block_reuse: bool = True
    """Reuse the KV blocks of identical prefixes."""

    disable_overlap_scheduler: bool = False
    """Schedule a step only when the one before it has ended."""

    enable_attention_dp: bool = False
    """Give each rank its own requests; all compute a step together."""

    enable_balance: bool = False
    """With attention DP: let prompts wait until each rank has some."""

    timeout_iters: Whole = 50
    """With enable_balance: steps for which they wait at most."""

    batching_wait_iters: Whole = 10
    """With enable_balance: steps for which they wait for more once each rank has some."""

    max_draft_len: Whole = 0
    """Tokens that are guessed for each generating request in a step (speculation)."""

    kv_role: KvRole | None = None
    """Part in disaggregation (none: not modelled yet)."""

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self.tokens_per_block

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request."""
        return self.max_seq_len

    @property
    def is_async(self) -> bool:
        """Whether a step is scheduled ahead."""
        return not self.disable_overlap_scheduler

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it may read KV from other engines."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def unit(self) -> int:
        """Tokens of which a chunk that does not end its prompt is a multiple."""
        return self.chunk_unit_size or self.tokens_per_block

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        check_settings(self)
        if self.enable_chunked_prefill and not self.tokens_per_block <= self.unit <= self.max_num_tokens:
            raise ValueError(
                f"chunks are multiples of {self.unit} tokens; expected at least tokens_per_block ({self.tokens_per_block}) and "
                f"at most max_num_tokens ({self.max_num_tokens}): set chunk_unit_size"
            )
        if self.enable_balance and not self.enable_attention_dp:
            raise ValueError(
                "enable_balance is true, and enable_attention_dp is false; expected attention DP: it has ranks"
            )

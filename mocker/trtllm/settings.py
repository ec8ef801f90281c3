"""What the scheduler is made of: the settings of `config.py`, and what recordings vary beyond them."""

from typing import NamedTuple

from mocker.trtllm.config import CapacitySchedulerPolicy, TrtllmConfig


class BalanceSettings(NamedTuple):
    """Settings of the balance between the ranks of attention DP."""

    timeout_iters: int
    batching_wait_iters: int
    min_generating: int = 0
    """If a rank generates fewer requests, `low_timeout_iters` takes the place of `timeout_iters`."""
    low_timeout_iters: int = 0


class Settings(NamedTuple):
    """Settings of one scheduler."""

    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    policy: CapacitySchedulerPolicy = "GUARANTEED_NO_EVICT"
    chunk_unit: int | None = None
    """Tokens of which chunks are multiples (None: prompts are not cut)."""
    has_equal_progress: bool = False
    """Whether chunks are given in turn."""
    enable_block_reuse: bool = True
    has_overlap: bool = True
    """Whether a step is scheduled while the one before it is computed."""
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    num_ranks: int | None = None
    """Ranks of attention DP (None: without)."""
    balance: BalanceSettings | None = None
    max_draft_len: int = 0
    is_prefix_aware: bool = True
    """Whether what is cached costs nothing of the token budget, and requests are skipped for reuse."""
    num_steps_ahead: int = 1
    """Steps that MAX_UTILIZATION looks ahead."""
    max_passed: int | None = None
    """Most requests that the capacity scheduler lets pass (default: max_batch_size)."""
    max_active: int | None = None
    """Most requests that are active (default: max_batch_size); more with pipeline parallelism."""
    adapter_pages: tuple[int, dict[int, int]] | None = None
    """Pages for adapters, and how many each takes."""
    has_adapters: bool = True
    """Whether requests may have adapters."""
    has_inits: bool = True
    """Whether the KV of prompts may come from elsewhere."""
    stores_chunks: bool = False
    """Whether each chunk of a prompt is stored, and not only the whole prompt. Which of them TensorRT-LLM does was assumed."""
    has_kv_cache: bool = True
    """Whether the capacity scheduler looks at blocks."""
    pauses_ended: bool = False
    """Whether a pause has no test for the end, so that a request that is paused with its last token in flight computes its
    prompt again, and one token more than asked for. So it was in the recordings' stand-in; the engine's own was not read."""

    settles_stuck: bool = False
    """Whether the tokens of a step are known at its end even if the next iteration computes nothing, because another rank
    has nothing that may run. In TensorRT-LLM they are known one iteration later, which an engine here cannot express: what
    it reports at the end of a step is what that step brought."""

    @property
    def active_limit(self) -> int:
        """Most requests that are active."""
        return self.max_batch_size if self.max_active is None else self.max_active


def settings_of(config: TrtllmConfig, num_blocks: int, num_ranks: int = 1) -> Settings:
    """Return the settings of one engine's scheduler."""
    balance = None
    if config.attention_dp_enable_balance:
        balance = BalanceSettings(config.attention_dp_timeout_iters, config.attention_dp_batching_wait_iters)
    return Settings(
        num_blocks,
        config.tokens_per_block,
        config.max_batch_size,
        config.max_num_tokens,
        config.capacity_scheduler_policy,
        config.unit if config.enable_chunked_context else None,
        config.context_chunking_policy == "EQUAL_PROGRESS",
        config.enable_block_reuse,
        config.is_async,
        config.batch_wait_timeout_iters,
        config.batch_wait_max_tokens_ratio,
        num_ranks=num_ranks if num_ranks > 1 else None,
        balance=balance if num_ranks > 1 else None,
        settles_stuck=True,
        has_adapters=False,
        has_inits=config.is_kv_consumer,
    )

"""Every setting of one engine's scheduler and cache, named as in SGLang."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, NotNegative, Positive, Whole, check_settings
from mocker.contract import KvRole

SchedulePolicy = Literal["fcfs", "lof", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
LoadBalanceMethod = Literal["auto", "round_robin", "total_requests", "total_tokens"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"]
OF_DECODE = (
    "num_reserved_decode_tokens",
    "disaggregation_decode_enable_radix_cache",
    "disaggregation_decode_extra_slots",
)
"""Settings that only decode workers have."""

DisaggregationMode = Literal["null", "prefill", "decode"]
INITIAL_RATIO = 0.7
LEAST_SHARE = 0.14
"""The new token ratio begins at the first times `schedule_conservativeness`, and never falls below this share of that."""
DEFAULT_HOST_RATIO = 2.0
OF_HICACHE = (
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_bandwidth_gb_s",
    "hicache_latency_us",
)
NUM_SPARE_INPUT_TOKENS = 5
CONSERVATIVENESS_OF_RANKS = 0.3
"""What `schedule_conservativeness` is multiplied by with attention DP."""
MOST_EXTRA_SLOTS = 32
"""Requests that may run up to which a decode worker has slots beyond them by default."""
ROLES: dict[DisaggregationMode, KvRole] = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""What vLLM calls its parts in disaggregation."""
USUAL_CHUNK = 8192
"""Most prompt tokens in one step where SGLang knows no GPU, and on one with 60 to 160 GiB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """Settings of one engine. The defaults are those of SGLang 0.5.23."""

    attn_dp_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Ranks with attention and KV of their own, among which the GPUs are divided (--dp-size with --enable-dp-attention in
    older versions). Their steps begin and end together. Each has its share of chunked_prefill_size and
    max_running_requests, and 0.3 of schedule_conservativeness."""

    load_balance_method: LoadBalanceMethod = "auto"
    """Which of those ranks a request goes to (auto: round_robin)."""

    page_size: Count = 1
    """Tokens in a page of KV, the unit of allocation, caching and eviction."""

    max_running_requests: Count | None = None
    """Most requests that may run at once (default: as many as fill the KV cache at context_length, times 512, but at
    least 2048 and at most 4096)."""

    max_queued_requests: Count | None = None
    """Most requests that may wait; one more is refused (default: no limit)."""

    context_length: Count | None = None
    """Most tokens of a request, prompt and output together (default: no limit but that of the KV cache)."""

    chunked_prefill_size: Annotated[int, Meta(ge=-1)] | None = None
    """Most prompt tokens in one step; a longer prompt is computed in chunks (-1 or 0: prompts are never cut; default: what
    SGLang chooses for --gpu, 2048 to 16384 by its memory; without --gpu, 8192)."""

    max_prefill_tokens: Count = 16384
    """Most prompt tokens in one step; without chunks, the first prompt of a step may exceed it."""

    prefill_max_requests: Count | None = None
    """Most prompts in one step (default: no limit)."""

    enable_mixed_chunk: bool = False
    """Compute prompts and decodes in the same step; otherwise decodes wait while prompts are computed."""

    scheduler_recv_interval: Count = 1
    """Steps of decoding after which the scheduler looks for new requests again; after a step with prompts, it does at once."""

    prefill_decode_interval: Whole = 0
    """Steps of decoding between two steps that compute prompts."""

    prefill_decode_interval_min_bs: Whole = 0
    """Requests that must run for that interval to apply."""

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of admission."""

    schedule_conservativeness: NotNegative = 1.0
    """How much of their output limits running requests are expected to use; lower values admit more, and retract more."""

    enable_priority_scheduling: bool = False
    """Admit by priority, the highest value first."""

    schedule_low_priority_values_first: bool = False
    """With priority scheduling, admit the lowest value first."""

    disable_priority_preemption: bool = False
    """With priority scheduling, never stop a running request for a more urgent one."""

    priority_scheduling_preemption_threshold: int = 10
    """By how much more urgent a request must be to stop a running one."""

    retraction_policy: Literal["length", "priority"] = "length"
    """Which running requests are stopped first when the KV cache is full: those with the shortest output, or the least
    urgent ones."""

    mem_fraction_static: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """Share of the GPU memory that is free before the weights are loaded, for weights and KV cache together (default: what
    SGLang chooses for --gpu and --model)."""

    max_total_tokens: Count | None = None
    """Tokens of KV cache (default: as many as fit on --gpu beside --model, else 1048576)."""

    disable_radix_cache: bool = False
    """Do not reuse the KV of identical prefixes."""

    radix_eviction_policy: EvictionPolicy = "lru"
    """Which cached KV is evicted first."""

    enable_hierarchical_cache: bool = False
    """Keep KV in host memory as well (HiCache)."""

    hicache_ratio: Positive | None = None
    """Host memory for KV, as a multiple of the KV cache on the GPUs (default: 2, unless hicache_size is given)."""

    hicache_size: Whole = 0
    """Host memory for KV per GPU (GB of 1e9 bytes; 0: hicache_ratio applies)."""

    hicache_write_policy: WritePolicy = "write_through"
    """When KV is copied to host memory: at its first use (write_through), at its second (write_through_selective), or when
    the GPU evicts it (write_back), which the scheduler waits for."""

    hicache_storage_backend: str | None = None
    """Storage behind host memory; it is not modelled yet, so only none is accepted."""

    hicache_bandwidth_gb_s: Positive = 32.0
    """Bandwidth between each GPU and host memory, in each direction (GB/s); not a setting of SGLang's."""

    hicache_latency_us: NotNegative = 20.0
    """Fixed time of each copy between a GPU and host memory, in addition to the time for its bytes (us); not a setting of
    SGLang's."""

    disable_overlap_schedule: bool = False
    """Schedule a step only when the result of the one before it is known."""

    decode_log_interval: Count = 40
    """Steps without prompts after which KV events are sent; they are also sent after each step with prompts, and when the
    engine becomes idle."""

    new_token_ratio_decay_steps: Count = 600
    """Steps in which the expected share of output limits falls to its lowest value (SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS)."""

    clip_max_new_tokens_estimation: Count = 4096
    """Most output tokens expected of one request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION)."""

    disaggregation_mode: DisaggregationMode = "null"
    """What it does with a request: all of it (null), only its prompt, or only its answer; a worker's role decides that."""

    num_reserved_decode_tokens: Whole = 512
    """Decode workers: tokens that are kept free for the answer of each request, when another one is given room."""

    disaggregation_decode_enable_radix_cache: bool = False
    """Decode workers: reuse the KV of identical prefixes, so that only the rest is sent."""

    disaggregation_decode_extra_slots: Whole | None = None
    """Decode workers: requests beyond max_running_requests whose KV may be on its way, or wait (default: twice
    max_running_requests where that is at most 32, else 0)."""

    def _refuse_together(self) -> None:
        """Refuse what is modelled, but not in one engine."""
        used = {
            "enable_hierarchical_cache": self.enable_hierarchical_cache,
            f"attn_dp_size {self.attn_dp_size}": self.attn_dp_size > 1,
            f"disaggregation_mode {self.disaggregation_mode}": self.disaggregation_mode != "null",
        }
        both = [name for name, is_used in used.items() if is_used]
        if len(both) > 1:
            raise ValueError(f"{both[0]} is not modelled with {both[1]} yet; expected only one of them")

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        check_settings(self)
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise ValueError(
                f"enable_priority_scheduling is true and schedule_policy is {self.schedule_policy}; expected fcfs or lof"
            )
        if self.disable_radix_cache and self.schedule_policy == "shortest-prefill-first":
            raise ValueError(
                "schedule_policy is shortest-prefill-first and disable_radix_cache is true; expected false: it orders by "
                "what is not cached"
            )
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise ValueError(
                "enable_hierarchical_cache is true and disable_radix_cache is true; expected false: the radix cache is what "
                "finds KV in host memory"
            )
        if self.hicache_storage_backend is not None:
            raise ValueError(
                f"hicache_storage_backend is {self.hicache_storage_backend}; expected none, because storage behind SGLang's "
                "host memory is not modelled yet"
            )
        if self.hicache_size and self.hicache_ratio is not None:
            raise ValueError(
                f"hicache_size is {self.hicache_size}, and hicache_ratio is {self.hicache_ratio:g}; expected only one of them: "
                "both set the size of host memory"
            )
        self._refuse_together()
        if 0 < (self.chunked_prefill_size or 0) < self.page_size:
            raise ValueError(
                f"chunked_prefill_size ({self.chunked_prefill_size}) must be at least page_size ({self.page_size})"
            )
        if (
            self.attn_dp_size > 1
            and self.chunk_size is not None
            and self.chunk_size // self.attn_dp_size < self.page_size
        ):
            raise ValueError(
                f"chunked_prefill_size ({self.chunk_size}) is divided among {self.attn_dp_size} ranks (attn_dp_size); "
                f"expected at least page_size ({self.page_size}) for each"
            )

    # What engines of every family have

    @property
    def block_size(self) -> int:
        """Tokens in a page."""
        return self.page_size

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request."""
        return self.context_length

    @property
    def kv_role(self) -> KvRole | None:
        """Its part in disaggregation."""
        return ROLES.get(self.disaggregation_mode)

    @property
    def is_async(self) -> bool:
        """Whether a batch is closed while the one before it is computed."""
        return not self.disable_overlap_schedule

    @property
    def is_kv_consumer(self) -> bool:
        """Whether it reads KV from other engines."""
        return self.disaggregation_mode == "decode"

    # What follows from them

    def of_rank(self, num_ranks: int) -> "SglangConfig":
        """Return the settings of each rank of attention DP.

        Source: SGLang 0.5.23, `srt/arg_groups/parallel_hook.py` (`handle_data_parallelism`) and `resolve_max_num_reqs`.
        """
        most = self.max_running_requests
        return replace(
            self,
            attn_dp_size=1,
            chunked_prefill_size=-1 if self.chunk_size is None else self.chunk_size // num_ranks,
            max_running_requests=None if most is None else max(most // num_ranks, 1),
            schedule_conservativeness=self.schedule_conservativeness * CONSERVATIVENESS_OF_RANKS,
        )

    @property
    def host_ratio(self) -> float:
        """Room in host memory for each token of the KV cache, where `hicache_size` does not apply."""
        return DEFAULT_HOST_RATIO if self.hicache_ratio is None else self.hicache_ratio

    @property
    def chunk_size(self) -> int | None:
        """Most prompt tokens in one step, if prompts are cut."""
        size = USUAL_CHUNK if self.chunked_prefill_size is None else self.chunked_prefill_size
        return size if size > 0 else None

    @property
    def has_tree(self) -> bool:
        """Whether it keeps the KV of prefixes; a decode worker does not, unless it is told to."""
        if self.disaggregation_mode == "decode":
            return self.disaggregation_decode_enable_radix_cache
        return not self.disable_radix_cache

    @property
    def num_extra_slots(self) -> int:
        """Requests beyond those that may run whose KV a decode worker may hold."""
        if self.disaggregation_decode_extra_slots is not None:
            return self.disaggregation_decode_extra_slots
        limit = self.max_running_requests
        return 2 * limit if limit is not None and limit <= MOST_EXTRA_SLOTS else 0

    @property
    def may_preempt(self) -> bool:
        """Whether a more urgent request may stop a running one."""
        return self.enable_priority_scheduling and not self.disable_priority_preemption

    @property
    def urgency_sign(self) -> int:
        """What a priority is multiplied by so that the smallest product goes first."""
        return 1 if self.schedule_low_priority_values_first else -1

    @property
    def policy(self) -> SchedulePolicy:
        """Order of admission; those that match prefixes need a cache."""
        if self.disable_radix_cache and self.schedule_policy in ("lpm", "dfs-weight", "hrrn"):
            return "fcfs"
        return self.schedule_policy

    def num_rows(self, num_tokens: int) -> int:
        """Return how many requests may run at once, with room for this many tokens in the KV cache."""
        if self.max_running_requests is not None:
            return self.max_running_requests
        return min(max(int(num_tokens / (self.context_length or num_tokens) * 512), 2048), 4096)

    def max_request_tokens(self, num_tokens: int) -> int:
        """Return the most tokens of a request, with room for this many in the KV cache."""
        most = num_tokens - 1
        return most if self.context_length is None else min(self.context_length - 1, most)

    def max_input_tokens(self, num_tokens: int) -> int:
        """Return with how many tokens a prompt is refused, with room for this many in the KV cache."""
        return self.max_request_tokens(num_tokens) - NUM_SPARE_INPUT_TOKENS

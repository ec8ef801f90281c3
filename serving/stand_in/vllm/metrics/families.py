"""The families of vLLM 0.32's metrics, in the order in which it lists them. Those that need a setting come only with it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from serving.stand_in.vllm.metrics import buckets
from serving.stand_in.vllm.metrics.series import Labels

Kind = Literal["counter", "gauge", "histogram"]

MODEL, ENGINE = "model_name", "engine"


@dataclass(frozen=True, slots=True)
class Family:
    """One family. A counter's samples have `_total` after its name."""

    name: str
    kind: Kind
    text: str
    bounds: Sequence[float] = ()
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The labels that it has beside the model's and the engine's, and their values, if they are known from the start."""
    is_per_engine: bool = True
    is_there_at_once: bool = True
    """Whether it has samples before anything was counted."""

    def start(self) -> Iterable[Labels]:
        """Return the values of its own labels that it has from the start."""
        return product(*self.own.values()) if self.is_there_at_once else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSettings:
    """The settings on which the families depend."""

    max_model_len: int
    has_stats: bool = True
    has_nixl: bool = False
    has_offloading: bool = False
    is_kv_consumer: bool = False
    has_adapters: bool = False
    has_tool_calls: bool = False


SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
REASONS = ("stop", "length", "abort", "error", "repetition")
STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
WAITING_REASONS = ("capacity", "deferred")
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
COPIES = ("CPU_to_GPU", "GPU_to_CPU")
ADAPTERS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


def families(shown: MetricSettings) -> list[Family]:
    """Return the families of the engine that a server shows."""
    if not shown.has_stats:
        return []
    lengths = buckets.lengths(shown.max_model_len)
    return [
        *(NIXL if shown.has_nixl else ()),
        *(OFFLOADING if shown.has_offloading else ()),
        *ESTIMATES,
        *_state(shown),
        *CACHES,
        *_tokens(),
        *_lengths(lengths),
        *TIMES,
        Family("vllm:request_num_preemptions", "histogram", "Preemptions of a request", buckets.PREEMPTIONS),
        Family("vllm:request_prefill_kv_computed_tokens", "histogram", "Prompt tokens of a request computed", lengths),
        *((LORA,) if shown.has_adapters else ()),
    ]


CACHE_CONFIG = "vllm:cache_config_info"

TOOL_CALLS = Family(
    "vllm:tool_call_parser_invocations",
    "counter",
    "Times that an answer, or a piece of a stream, was searched for tool calls",
    own={
        "mode": ("streaming", "non_streaming"),
        "outcome": ("tool_call", "no_tool_call"),
        "request_type": ("chat_completions", "responses", "other"),
    },
    is_per_engine=False,
)

LORA = Family(
    "vllm:lora_requests_info",
    "gauge",
    "When these adapters were last in use",
    own=dict.fromkeys(ADAPTERS, ()),
    is_per_engine=False,
    is_there_at_once=False,
)

ESTIMATES = [
    Family(f"vllm:estimated_{what}_per_gpu", "counter", f"Estimated {text} of one GPU")
    for what, text in (
        ("flops", "floating-point operations"),
        ("read_bytes", "bytes read from memory"),
        ("write_bytes", "bytes written to memory"),
    )
]

CACHES = [
    Family(f"vllm:{name}", "counter", text)
    for name, text in (
        ("prefix_cache_queries", "Tokens looked up in the prefix cache"),
        ("prefix_cache_hits", "Tokens found in the prefix cache"),
        ("external_prefix_cache_queries", "Tokens looked up beyond the prefix cache, through a KV connector"),
        ("external_prefix_cache_hits", "Tokens found there"),
        ("mm_cache_queries", "Images and the like looked up in their cache"),
        ("mm_cache_hits", "Images and the like found in their cache"),
        ("num_preemptions", "Preemptions"),
    )
]

TIMES = [
    Family(f"vllm:{name}_seconds", "histogram", text, bounds)
    for name, text, bounds in (
        ("time_to_first_token", "Time to first token", buckets.TTFTS_S),
        ("inter_token_latency", "Time between tokens", buckets.ITLS_S),
        ("request_time_per_output_token", "Mean time between the tokens of a request", buckets.ITLS_S),
        ("e2e_request_latency", "Time from the arrival of a request to its end", buckets.LATENCIES_S),
        ("request_queue_time", "Time that a request waited for its turn", buckets.LATENCIES_S),
        ("request_inference_time", "Time from a request's turn to its last token", buckets.LATENCIES_S),
        ("request_prefill_time", "Time from a request's turn to its first token", buckets.LATENCIES_S),
        ("request_decode_time", "Time from a request's first token to its last", buckets.LATENCIES_S),
    )
]

NIXL = [
    Family("vllm:nixl_xfer_time_seconds", "histogram", "Time of a KV transfer", buckets.TRANSFERS_S),
    Family("vllm:nixl_post_time_seconds", "histogram", "Time to start a KV transfer", buckets.POSTS_S),
    Family("vllm:nixl_bytes_transferred", "histogram", "Bytes of a KV transfer", buckets.TRANSFER_BYTES),
    Family("vllm:nixl_num_descriptors", "histogram", "Pieces of memory of a KV transfer", buckets.DESCRIPTORS),
    Family("vllm:nixl_num_failed_transfers", "counter", "KV transfers that failed"),
    Family("vllm:nixl_num_failed_notifications", "counter", "Notifications of KV transfers that failed"),
    Family("vllm:nixl_num_kv_expired_reqs", "counter", "Requests whose KV nobody read in time"),
    Family("vllm:nixl_num_notifications_after_expiry", "counter", "Notifications that came after that"),
]


def _amount(name: str, text: str) -> Family:
    return Family(f"vllm:kv_offload_{name}", "counter", text, is_there_at_once=False)


def _size(name: str, text: str, bounds: Sequence[float]) -> Family:
    return Family(f"vllm:kv_offload_{name}", "histogram", text, bounds, is_there_at_once=False)


OFFLOADING = [
    Family("vllm:kv_offload_total_bytes", "counter", "Bytes of KV copied", own={"transfer_type": COPIES}),
    Family("vllm:kv_offload_total_time", "counter", "Seconds of copies of KV", own={"transfer_type": COPIES}),
    Family(
        "vllm:kv_offload_size",
        "histogram",
        "Bytes of a copy of KV",
        buckets.COPY_BYTES,
        own={"transfer_type": COPIES},
    ),
    *(
        Family(f"vllm:kv_offload_{name}", "gauge", text, is_there_at_once=False)
        for name, text in (
            ("cpu_cache_usage_perc", "Share of host memory that copies use now"),
            ("cpu_cache_write_usage_perc", "Share that copies to host memory use now"),
            ("cpu_cache_read_usage_perc", "Share that copies from host memory use now"),
        )
    ),
    _size("cpu_allocation_size", "Chunks of host memory that a copy asked for", buckets.CHUNKS),
    _amount("load_bytes", "Bytes of KV copied to the GPU"),
    _amount("load_time", "Seconds of copies to the GPU"),
    _size("load_size", "Bytes of a copy to the GPU", buckets.COPY_BYTES),
    _amount("store_bytes", "Bytes of KV copied from the GPU"),
    _amount("store_time", "Seconds of copies from the GPU"),
    _size("store_size", "Bytes of a copy from the GPU", buckets.COPY_BYTES),
    _size("lookup_sync_delay_seconds", "Time of a look-up in host memory", buckets.SYNC_LOOK_UPS_S),
    _size("lookup_async_delay_seconds", "Time until a look-up was answered", buckets.ASYNC_LOOK_UPS_S),
    _amount("allocation_failure", "Copies for which host memory had no room"),
]


def _state(shown: MetricSettings) -> list[Family]:
    fetching = Family(
        "vllm:num_requests_kv_fetch_by_stage", "gauge", "Waiting requests whose KV is loaded", own={"stage": STAGES}
    )
    reasons, states = {"reason": WAITING_REASONS}, {"sleep_state": SLEEP_STATES}
    return [
        Family("vllm:num_requests_running", "gauge", "Requests in the batch"),
        Family("vllm:num_requests_waiting", "gauge", "Requests that wait"),
        Family("vllm:num_requests_waiting_by_reason", "gauge", "Requests that wait, by what for", own=reasons),
        *([fetching] if shown.is_kv_consumer else []),
        Family("vllm:engine_sleep_state", "gauge", "Whether the engine is awake or how deep it sleeps", own=states),
        Family("vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks in use, 1 for all"),
    ]


def _tokens() -> list[Family]:
    return [
        Family("vllm:prompt_tokens", "counter", "Tokens of the prompts computed"),
        Family("vllm:prompt_tokens_by_source", "counter", "Those by where their KV came from", own={"source": SOURCES}),
        Family("vllm:prompt_tokens_cached", "counter", "Those that were found in a cache"),
        Family(
            "vllm:prompt_tokens_cached_by_source", "counter", "Prompt tokens found, by cache", own={"source": TIERS}
        ),
        Family("vllm:generation_tokens", "counter", "Tokens generated"),
        Family(
            "vllm:request_success", "counter", "Requests that ended, by how they did", own={"finished_reason": REASONS}
        ),
        Family(
            "vllm:admission_rejections",
            "counter",
            "Requests turned away because too many wait",
            own={"reason": LIMITS},
            is_per_engine=False,
        ),
    ]


def _lengths(bounds: Sequence[float]) -> list[Family]:
    return [
        Family("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request", bounds),
        Family("vllm:request_generation_tokens", "histogram", "Generated tokens of a request", bounds),
        Family("vllm:iteration_tokens_total", "histogram", "Tokens of a step", buckets.STEP_TOKENS),
        Family("vllm:request_max_num_generation_tokens", "histogram", "Tokens of a request's longest answer", bounds),
        Family("vllm:request_params_n", "histogram", "Answers that a request asked for", buckets.CHOICES),
        Family("vllm:request_params_max_tokens", "histogram", "Most tokens that a request asked for", bounds),
    ]

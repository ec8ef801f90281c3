"""What the metrics of inference servers, and of exporters of GPUs, are called.

One table for each software. A figure may have had several names; the first that a server publishes counts. Names are those
of samples as Prometheus text has them, so counters end in `_total` where their server writes that.

    vLLM            vllm/v1/metrics/loggers.py of 0.32; names before: 0.6 (gpu_cache_usage_perc)
    SGLang          sglang/srt/observability/metrics_collector.py of 0.5.23
    TensorRT-LLM    tensorrt_llm/metrics/collector.py; times only with `return_perf_metrics`
    Dynamo          lib/runtime/src/metrics/prometheus_names.rs; what workers report is of our own frontend, under such names
    llama.cpp       tools/server, with `--metrics`; only means
    TGI             router/src/infer; its time per token has the first token in it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["running", "waiting", "kv"]
Count = Literal["requests", "preemptions", "prompt_tokens", "output_tokens"]
Time = Literal["ttft", "tpot", "itl", "queue", "prefill", "e2e"]

START = "process_start_time_seconds"
"""When the process that answers started, which the usual client libraries publish."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A share: the sum of one metric over the sum of others."""

    part: str
    whole: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Software:
    """The names that one server uses."""

    name: str
    prefix: str
    states: Mapping[State, tuple[str, ...]]
    """Gauges: summed over engines; of shares (`kv`), the mean."""
    times: Mapping[Time, tuple[str, ...]]
    """Histograms of seconds, without `_bucket`, `_sum` and `_count`."""
    counts: Mapping[Count, tuple[str, ...]] = field(default_factory=dict)
    kv: Ratio | None = None
    """The use of the KV cache, if no gauge says it."""
    hits: tuple[Ratio, ...] = ()
    """Prompt tokens found in the prefix cache, of those looked up."""
    means: Mapping[Time, tuple[str, str]] = field(default_factory=dict)
    """Total seconds and their number, where there is no histogram."""
    ranks: tuple[str, ...] = ()
    """Labels of processes that say the same of one engine: the highest counts."""
    empty: tuple[str, ...] = ()
    """Labels of which the empty value has the total of the others."""


VLLM = Software(
    "vLLM",
    "vllm:",
    states={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    },
    times={
        "ttft": ("vllm:time_to_first_token_seconds",),
        "tpot": ("vllm:request_time_per_output_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "queue": ("vllm:request_queue_time_seconds",),
        "prefill": ("vllm:request_prefill_time_seconds",),
        "e2e": ("vllm:e2e_request_latency_seconds",),
    },
    counts={
        "requests": ("vllm:request_success_total",),
        "preemptions": ("vllm:num_preemptions_total",),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "output_tokens": ("vllm:generation_tokens_total",),
    },
    hits=(
        Ratio("vllm:prefix_cache_hits_total", ("vllm:prefix_cache_queries_total",)),
        Ratio("vllm:gpu_prefix_cache_hits_total", ("vllm:gpu_prefix_cache_queries_total",)),
    ),
)
SGLANG = Software(
    "SGLang",
    "sglang:",
    states={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv": ("sglang:token_usage",),
    },
    times={
        "ttft": ("sglang:time_to_first_token_seconds",),
        "tpot": ("sglang:request_time_per_output_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "queue": ("sglang:queue_time_seconds",),
        "e2e": ("sglang:e2e_request_latency_seconds",),
    },
    counts={
        "requests": ("sglang:num_requests_total",),
        "preemptions": ("sglang:num_retracted_requests_total",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "output_tokens": ("sglang:generation_tokens_total",),
    },
    hits=(Ratio("sglang:cached_tokens_total", ("sglang:prompt_tokens_total",)),),
    ranks=("tp_rank", "pp_rank", "moe_ep_rank"),
    empty=("priority",),
)
TRTLLM = Software(
    "TensorRT-LLM",
    "trtllm_",
    states={
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "kv": ("trtllm_kv_cache_utilization",),
    },
    times={
        "ttft": ("trtllm_time_to_first_token_seconds",),
        "tpot": ("trtllm_time_per_output_token_seconds",),
        "queue": ("trtllm_request_queue_time_seconds",),
        "prefill": ("trtllm_request_prefill_time_seconds",),
        "e2e": ("trtllm_e2e_request_latency_seconds",),
    },
    counts={
        "requests": ("trtllm_request_success_total", "trtllm_num_requests_completed_total"),
        "prompt_tokens": ("trtllm_prompt_tokens_total",),
        "output_tokens": ("trtllm_generation_tokens_total",),
    },
    hits=(
        Ratio("trtllm_prompt_cached_tokens_total", ("trtllm_prompt_tokens_total",)),
        Ratio(
            "trtllm_kv_cache_reused_blocks_total",
            ("trtllm_kv_cache_reused_blocks_total", "trtllm_kv_cache_missed_blocks_total"),
        ),
    ),
)
DYNAMO = Software(
    "Dynamo's frontend",
    "dynamo_",
    states={
        "running": ("dynamo_component_requests_running",),
        "waiting": ("dynamo_component_requests_waiting", "dynamo_frontend_queued_requests"),
        "kv": ("dynamo_component_gpu_cache_usage_percent", "dynamo_component_kvstats_gpu_cache_usage_percent"),
    },
    kv=Ratio("dynamo_component_kv_active_blocks", ("dynamo_component_kv_total_blocks",)),
    times={
        "ttft": ("dynamo_frontend_time_to_first_token_seconds",),
        "itl": ("dynamo_frontend_inter_token_latency_seconds",),
        "queue": ("dynamo_frontend_request_queue_time_seconds",),
        "prefill": ("dynamo_frontend_request_prefill_time_seconds",),
        "e2e": ("dynamo_frontend_request_duration_seconds",),
    },
    counts={
        "requests": ("dynamo_frontend_requests_total",),
        "prompt_tokens": ("dynamo_frontend_input_tokens_total", "dynamo_frontend_input_sequence_tokens_sum"),
        "output_tokens": ("dynamo_frontend_output_tokens_total",),
    },
    hits=(
        Ratio("dynamo_frontend_cached_tokens_total", ("dynamo_frontend_ended_input_tokens_total",)),
        Ratio("dynamo_frontend_cached_tokens_sum", ("dynamo_frontend_input_sequence_tokens_sum",)),
    ),
)
LLAMACPP = Software(
    "llama.cpp",
    "llamacpp:",
    states={
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "kv": ("llamacpp:kv_cache_usage_ratio",),
    },
    times={},
    means={"itl": ("llamacpp:tokens_predicted_seconds_total", "llamacpp:tokens_predicted_total")},
    counts={
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "output_tokens": ("llamacpp:tokens_predicted_total",),
    },
    hits=(
        Ratio(
            "llamacpp:prompt_tokens_cached_total",
            ("llamacpp:prompt_tokens_cached_total", "llamacpp:prompt_tokens_total"),
        ),
    ),
)
TGI = Software(
    "TGI",
    "tgi_",
    states={"running": ("tgi_batch_current_size",), "waiting": ("tgi_queue_size",)},
    times={
        "tpot": ("tgi_request_mean_time_per_token_duration",),
        "queue": ("tgi_request_queue_duration",),
        "e2e": ("tgi_request_duration",),
    },
    counts={
        "requests": ("tgi_request_success",),
        "prompt_tokens": ("tgi_request_input_length_sum",),
        "output_tokens": ("tgi_request_generated_tokens_sum",),
    },
)

SERVERS = (DYNAMO, VLLM, SGLANG, TRTLLM, LLAMACPP, TGI)
"""A figure that several say is that of the first: a frontend's, before its workers'."""


@dataclass(frozen=True, slots=True, eq=False)
class GpuExporter:
    """The names that an exporter of GPUs uses, and the factors that make them W, shares and bytes."""

    power: tuple[str, float]
    busy: tuple[str, float]
    used: tuple[str, float]
    whole: tuple[tuple[str, float], ...]
    """Gauges whose sum is the capacity of the memory."""
    labels: tuple[str, ...]
    """Labels that name a GPU; further ones (a pod, a container) do not."""

    @property
    def names(self) -> dict[str, float]:
        """The factor of each gauge."""
        return dict((self.power, self.busy, self.used, *self.whole))


MIB = float(1 << 20)
DCGM = GpuExporter(
    ("DCGM_FI_DEV_POWER_USAGE", 1.0),
    ("DCGM_FI_DEV_GPU_UTIL", 0.01),
    ("DCGM_FI_DEV_FB_USED", MIB),
    (("DCGM_FI_DEV_FB_USED", MIB), ("DCGM_FI_DEV_FB_FREE", MIB)),
    ("Hostname", "gpu", "UUID"),
)
"""https://github.com/NVIDIA/dcgm-exporter, etc/default-counters.csv"""
NVIDIA_SMI = GpuExporter(
    ("nvidia_smi_power_draw_watts", 1.0),
    ("nvidia_smi_utilization_gpu_ratio", 1.0),
    ("nvidia_smi_memory_used_bytes", 1.0),
    (("nvidia_smi_memory_total_bytes", 1.0),),
    ("uuid",),
)
"""https://github.com/utkuozdemir/nvidia_gpu_exporter, docs/METRICS.md"""
GPU_EXPORTERS = (DCGM, NVIDIA_SMI)

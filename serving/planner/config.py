"""Every setting of a planner."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import FINITE, Count, NotNegative, Positive, Share, check_settings

Headroom = Annotated[float, Meta(ge=0, lt=1)]
Workers = Annotated[int, Meta(ge=1, le=10_000)]
Factor = Annotated[float, Meta(ge=1, le=FINITE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of a planner."""

    planner: str = "static"
    """Policy that decides how many workers each pool has; static changes nothing."""

    planner_interval_s: Annotated[float, Meta(ge=0.001, le=86400)] | None = None
    """How often the planner looks at the pools and decides (s; default: the policy's own)."""

    advisory: bool = False
    """Report what the planner would decide, but change nothing."""

    min_endpoint: Workers = 1
    """Fewest workers of each pool."""

    max_replicas: Workers | None = None
    """Most workers of each pool (none: no limit)."""

    max_gpu_budget: Count | None = None
    """Most GPUs of all pools together, starting and draining workers included (none: no limit)."""

    min_gpu_budget: Count | None = None
    """Fewest GPUs of all pools together (none: no limit)."""

    max_scale_step: Count | None = None
    """Most workers that one decision adds to a pool or removes from it (none: no limit)."""

    startup_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 1800.0
    """How long a worker may take to start before the planner gives up on it (s)."""

    planner_ttft_ms: Positive | None = None
    """dynamo-sla, dynamo-sla-2025, lead-time: TTFT limit (ms; default: that of --slo)."""

    planner_itl_ms: Positive | None = None
    """dynamo-sla, dynamo-sla-2025, lead-time: ITL limit (ms; default: that of --slo)."""

    load_predictor: Literal["constant", "seasonal", "kalman", "arima", "prophet"] = "constant"
    """dynamo-sla, dynamo-sla-2025, lead-time: how the coming load is predicted from the past."""

    season_s: Positive = 86400.0
    """load_predictor seasonal: period after which the load repeats (s)."""

    hpa_metric: Literal["queue", "kv_usage", "concurrency"] = "queue"
    """hpa: metric per worker to keep at its target: waiting requests, share of the KV cache in use, or all requests."""

    hpa_target: Positive | None = None
    """hpa: target of the metric (default: queue 3, kv_usage 0.75, concurrency 70% of what a worker runs at once)."""

    hpa_tolerance: Share = 0.1
    """hpa: no change while the metric is within this share of its target."""

    hpa_down_window_s: NotNegative = 300.0
    """hpa: a pool shrinks no further than the largest size it needed within this time (s)."""

    kpa_target_concurrency: Positive | None = None
    """kpa: requests per worker to aim at (default: 70% of what it runs at once)."""

    kpa_stable_window_s: Positive = 60.0
    """kpa: time over which the concurrency is averaged (s)."""

    kpa_panic_window_s: Positive = 6.0
    """kpa: time over which the concurrency is averaged in panic mode (s)."""

    kpa_panic_threshold: Factor = 2.0
    """kpa: panic when the average over the panic window calls for this many times the ready workers."""

    kpa_max_up_rate: Factor = 1000.0
    """kpa: largest factor by which one decision grows a pool."""

    kpa_max_down_rate: Factor = 2.0
    """kpa: largest factor by which one decision shrinks a pool."""

    wva_kv_threshold: Share = 0.8
    """wva: a worker is saturated when this share of its KV cache is in use."""

    wva_queue_threshold: Positive = 5.0
    """wva: a worker is saturated when this many requests wait."""

    wva_spare_kv: Share = 0.1
    """wva: add a worker when the average KV usage of unsaturated workers is within this distance of the threshold."""

    wva_spare_queue: NotNegative = 3.0
    """wva: add a worker when the average queue of unsaturated workers is within this distance of the threshold."""

    wva_down_window_s: NotNegative = 60.0
    """wva: a pool shrinks no further than the largest size it needed within this time (s)."""

    dynamo_target: Literal["throughput", "latency"] = "throughput"
    """dynamo-load: add workers when the present ones are full (throughput), or well before (latency)."""

    dynamo_throughput_interval_s: Positive = 180.0
    """dynamo-sla, dynamo-sla-2025: how often the pools are sized for the predicted load (s)."""

    dynamo_down_sensitivity: Share = 0.8
    """dynamo-sla: remove a worker if the others would stay within this share of the limits."""

    lead_window_s: Positive = 30.0
    """lead-time: time over which the arriving requests are counted (s)."""

    lead_headroom: Headroom = 0.2
    """lead-time: smallest share of the pool's capacity to keep free."""

    lead_share: Share = 0.99
    """lead-time: share of the requests that the pool must have room for, judged by how far recent load exceeded expectations."""

    lead_memory_s: Positive = 3600.0
    """lead-time: how far back 'recent' goes in lead_share (s)."""

    lead_late_weight: NotNegative = 3.0
    """lead-time: cost of a late request, as a multiple of the GPU-seconds it uses."""

    lead_hold: NotNegative = 10.0
    """lead-time: how long to keep a worker that is not needed, in multiples of its start-up time."""

    def __post_init__(self) -> None:
        """Refuse meaningless values."""
        check_settings(self)
        if self.max_replicas is not None and self.max_replicas < self.min_endpoint:
            raise ValueError(
                f"max_replicas must be at least min_endpoint ({self.min_endpoint}), not {self.max_replicas}"
            )
        if None not in (self.min_gpu_budget, self.max_gpu_budget) and self.min_gpu_budget > self.max_gpu_budget:  # type: ignore[operator]
            raise ValueError(
                f"min_gpu_budget must be at most max_gpu_budget ({self.max_gpu_budget}), not {self.min_gpu_budget}"
            )

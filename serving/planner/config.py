"""Every setting of a planner."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import FINITE, Count, NotNegative, Positive, Share, check

Headroom = Annotated[float, Meta(ge=0, lt=1)]
Factor = Annotated[float, Meta(ge=1, le=FINITE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of a planner."""

    planner: str = "static"
    """Policy that decides how many workers each pool has; static leaves them as they are."""

    planner_interval_s: Positive | None = None
    """How often the planner looks at the pools and decides (s; default: the policy's own)."""

    advisory: bool = False
    """Note what would be decided, and change nothing."""

    min_endpoint: Count = 1
    """Workers that each pool keeps at least."""

    max_replicas: Count | None = None
    """Workers that each pool has at most (none: no limit)."""

    max_gpu_budget: Count | None = None
    """GPUs that all pools have at most, starting and draining workers included (none: no limit)."""

    min_gpu_budget: Count | None = None
    """GPUs that all pools keep at least (none: no limit)."""

    max_scale_step: Count | None = None
    """Workers by which one decision changes a pool at most (none: no limit)."""

    startup_timeout_s: Positive = 1800.0
    """How long a worker may take to start before the planner gives it up (s)."""

    planner_ttft_ms: Positive | None = None
    """dynamo-sla, dynamo-sla-2025, lead-time: TTFT to keep (ms; default: that of --slo)."""

    planner_itl_ms: Positive | None = None
    """dynamo-sla, dynamo-sla-2025, lead-time: ITL to keep (ms; default: that of --slo)."""

    load_predictor: Literal["constant", "seasonal", "kalman", "arima", "prophet"] = "constant"
    """dynamo-sla, dynamo-sla-2025, lead-time: how the coming load is predicted from the past."""

    season_s: Positive = 86400.0
    """Predictor seasonal: after how long the load repeats (s)."""

    hpa_metric: Literal["queue", "kv_usage", "concurrency"] = "queue"
    """hpa: what is held at its target, per worker: requests that wait, share of the KV cache in use, or requests."""

    hpa_target: Positive | None = None
    """hpa: value per worker that the metric is held at (default: queue 3, kv_usage 0.75, concurrency 70% of what runs at once)."""

    hpa_tolerance: Share = 0.1
    """hpa: no change while the metric is within this share of its target."""

    hpa_down_window_s: NotNegative = 300.0
    """hpa: a pool shrinks to the most that was asked for in this time (s)."""

    kpa_target_concurrency: Positive | None = None
    """kpa: requests per worker to aim at (default: 70% of what it runs at once)."""

    kpa_stable_window_s: Positive = 60.0
    """kpa: time over which the concurrency is averaged (s)."""

    kpa_panic_window_s: Positive = 6.0
    """kpa: time over which it is averaged in a panic (s)."""

    kpa_panic_threshold: Factor = 2.0
    """kpa: panic when the short average asks for this many times the ready workers."""

    kpa_max_up_rate: Factor = 1000.0
    """kpa: factor by which a pool grows at most at once."""

    kpa_max_down_rate: Factor = 2.0
    """kpa: factor by which a pool shrinks at most at once."""

    wva_kv_threshold: Share = 0.8
    """wva: a worker whose KV cache is full to this share is saturated."""

    wva_queue_threshold: Positive = 5.0
    """wva: a worker with this many waiting requests is saturated."""

    wva_spare_kv: Share = 0.1
    """wva: one worker more when the workers that are not saturated have less than this below the KV threshold."""

    wva_spare_queue: NotNegative = 3.0
    """wva: one worker more when they have less than this below the queue threshold."""

    wva_down_window_s: NotNegative = 60.0
    """wva: a pool shrinks to the most that was asked for in this time (s)."""

    dynamo_target: Literal["throughput", "latency"] = "throughput"
    """dynamo-load: whether workers are added when the present ones are full, or long before."""

    dynamo_throughput_interval_s: Positive = 180.0
    """dynamo-sla, dynamo-sla-2025: how often the pools are sized for the predicted load (s)."""

    dynamo_down_sensitivity: Share = 0.8
    """dynamo-sla: a worker leaves if the rest would stay within this share of the limits."""

    lead_window_s: Positive = 30.0
    """lead-time: time over which the arriving requests are counted (s)."""

    lead_headroom: Headroom = 0.2
    """lead-time: share of the pool's capacity to leave free at least."""

    lead_share: Share = 0.99
    """lead-time: share of what comes for which the pool must be large enough, as often as it came as a surprise lately."""

    lead_memory_s: Positive = 3600.0
    """lead-time: how long surprises are remembered (s)."""

    lead_late_weight: NotNegative = 3.0
    """lead-time: GPU-seconds that a late request is worth avoiding with, as a multiple of those that it takes itself."""

    lead_hold: NotNegative = 10.0
    """lead-time: how long a worker that is not needed is kept, in start-up times."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        check(self)
        if self.max_replicas is not None and self.max_replicas < self.min_endpoint:
            raise ValueError(
                f"max_replicas must be at least min_endpoint ({self.min_endpoint}), not {self.max_replicas}"
            )
        if None not in (self.min_gpu_budget, self.max_gpu_budget) and self.min_gpu_budget > self.max_gpu_budget:  # type: ignore[operator]
            raise ValueError(
                f"min_gpu_budget must be at most max_gpu_budget ({self.max_gpu_budget}), not {self.min_gpu_budget}"
            )

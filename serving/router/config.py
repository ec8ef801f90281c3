"""Every dial of a router."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from foundation.settings import CheckedSettings, Count, NotNegative, Share
from serving.router.tiers import PerTier


class StepCosts(NamedTuple):
    """What a step costs, as the predicting modes reckon: base + prefill tokens, sequences and context tokens decoded."""

    base_s: float
    prefill_token_s: float
    decode_sequence_s: float
    context_token_s: float
    budget_tokens: int

    @property
    def settings(self) -> dict[str, float | int]:
        """These costs as settings of a router."""
        return {
            "step_base_ms": self.base_s * 1e3,
            "step_prefill_us": self.prefill_token_s * 1e6,
            "step_decode_us": self.decode_sequence_s * 1e6,
            "step_context_ns": self.context_token_s * 1e9,
            "step_budget_tokens": self.budget_tokens,
        }

    @property
    def flags(self) -> str:
        """These costs as flags."""
        return " ".join(f"--{name.replace('_', '-')} {value:.4g}" for name, value in self.settings.items())


DYNAMO_COSTS = StepCosts(0.0222, 1.86e-5, 0.0, 3.9e-8, 8192)
"""NVIDIA Dynamo's default step times (the mocker's `polynomial`), straightened, with its default engine's cache."""

USUAL_FETCHES = PerTier(4.1e-6, 18.7e-6, 13.1e-6)
"""What a token's KV of Llama 3.1 8B, 128 KiB, takes over PCIe 5 (32 GB/s), from an NVMe disk (7 GB/s) and a store (10 GB/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(CheckedSettings):
    """Settings of a router."""

    kv_overlap_score_weight: NotNegative = 1.0
    """Weight of prefill work in the kv mode's cost; 0 balances decode blocks alone."""

    router_temperature: NotNegative = 0.0
    """Draw from a softmax of the costs instead of taking the lowest (0: take the lowest)."""

    use_kv_events: bool = True
    """Learn from the workers' KV events what they hold; otherwise assume it from what was routed."""

    router_ttl_s: NotNegative = 120.0
    """Without KV events, how long a routed prompt is assumed to stay cached (s)."""

    busy_threshold: Share | None = None
    """Live: share of a worker's KV blocks in use beyond which it gets no new requests (none: no limit)."""

    max_queue_depth: NotNegative | None = 1.0
    """Live: queue limit as a multiple of what a worker runs at once; when every worker is over it, new requests get 429 (none: no limit)."""

    kv_event_delay_s: NotNegative = 0.0
    """Virtual time: delay until a KV event reaches the router (s)."""

    prefill_load_scale: NotNegative = 1.0
    """dynamo-kv: weight of prefill work (P); 4 to 8 lets long prompts stay where their prefix is."""

    overlap_score_credit: NotNegative = 1.0
    """dynamo-kv: share of a cached block that counts as work saved (c)."""

    overlap_score_credit_decay: NotNegative = 0.0
    """dynamo-kv: how fast the credit falls with the queue of the worker that has the prefix (0: not at all)."""

    router_host_cache_hit_weight: Share = 0.75
    """kv, dynamo-kv: share of a block in host memory that counts as cached."""

    router_disk_cache_hit_weight: Share = 0.25
    """kv, dynamo-kv: share of a block on a worker's disks that counts as cached."""

    shared_cache_multiplier: Share = 0.5
    """kv, dynamo-kv: share of a block in the shared store that counts as cached."""

    prefix_key_tokens: Count = 1024
    """chwbl, dualmap: prompts that share this many leading tokens belong together."""

    ttft_slo_s: NotNegative = 2.0
    """dualmap: leave the worker with the prefix if its predicted TTFT is longer than this (s)."""

    interference: NotNegative | None = None
    """marginal: weight of the delay that a prompt's computation causes running requests (alpha; default: 0.1, marginal-all 0.2)."""

    expected_osl: Count | None = None
    """marginal, preble-e2: output tokens to expect (default: 200; marginal-all 50, as tokens further ahead are
    uncertain)."""

    step_base_ms: NotNegative | None = None
    """Predicting modes: duration of an empty step (ms; default: what the workers report, as simulated engines do)."""

    step_prefill_us: NotNegative | None = None
    """Predicting modes: time for each prompt token computed (us; same default)."""

    step_decode_us: NotNegative | None = None
    """Predicting modes: time for each sequence decoded (us; same default)."""

    step_context_ns: NotNegative | None = None
    """Predicting modes: time for each context token read by a decoding sequence (ns; same default)."""

    step_budget_tokens: Count | None = None
    """Predicting modes: tokens one step may compute (same default)."""

    host_load_us_per_token: NotNegative | None = None
    """Predicting modes, kv-tiered: time to load a token's KV from host memory (us; default: as the simulated engine does, else 4.1)."""

    disk_load_us_per_token: NotNegative | None = None
    """Predicting modes, kv-tiered: time to load a token's KV from a worker's disks (us; same default, else 18.7)."""

    shared_load_us_per_token: NotNegative | None = None
    """Predicting modes, kv-tiered: time to load a token's KV from the store that workers share (us; same default, else 13.1)."""

    @property
    def step_costs(self) -> StepCosts:
        """What is given, and Dynamo's where nothing is."""
        given = (
            None if self.step_base_ms is None else self.step_base_ms / 1e3,
            None if self.step_prefill_us is None else self.step_prefill_us / 1e6,
            None if self.step_decode_us is None else self.step_decode_us / 1e6,
            None if self.step_context_ns is None else self.step_context_ns / 1e9,
            self.step_budget_tokens,
        )
        return StepCosts(*(own if own is not None else usual for own, usual in zip(given, DYNAMO_COSTS, strict=True)))  # type: ignore[arg-type]

    def with_costs(self, costs: StepCosts) -> "RouterConfig":
        """Set the costs of steps that are not given."""
        missing = {name: value for name, value in costs.settings.items() if getattr(self, name) is None}
        return replace(self, **missing)  # type: ignore[arg-type]

    @property
    def hit_weights(self) -> PerTier:
        """What a block beyond the GPU counts for in NVIDIA Dynamo's modes."""
        return PerTier(
            self.router_host_cache_hit_weight, self.router_disk_cache_hit_weight, self.shared_cache_multiplier
        )

    @property
    def fetch_costs(self) -> PerTier:
        """Seconds to fetch a token's KV: what is given, and what is usual where nothing is."""
        given = (self.host_load_us_per_token, self.disk_load_us_per_token, self.shared_load_us_per_token)
        return PerTier(*(usual if own is None else own / 1e6 for own, usual in zip(given, USUAL_FETCHES, strict=True)))

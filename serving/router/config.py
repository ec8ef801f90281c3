"""Every dial of a router."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of a router."""

    kv_overlap_score_weight: float = 1.0
    """Weight of prefill work in the kv mode's cost; 0 balances decode blocks alone."""

    router_temperature: float = 0.0
    """Draw from a softmax of the costs instead of taking the lowest (0: take the lowest)."""

    use_kv_events: bool = True
    """Learn from the workers' KV events what they hold; otherwise assume it from what was routed."""

    router_ttl_s: float = 120.0
    """Without KV events, how long a routed prompt is assumed to stay cached (s)."""

    busy_threshold: float | None = None
    """Live: share of a worker's KV blocks in use beyond which it gets no new requests (none: no limit)."""

    kv_event_delay_s: float = 0.0
    """Virtual time: delay until a KV event reaches the router (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        for name in ("kv_overlap_score_weight", "router_temperature", "router_ttl_s", "kv_event_delay_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.busy_threshold is not None and not 0 <= self.busy_threshold <= 1:
            raise ValueError(f"busy_threshold is a share of the blocks, from 0 to 1, not {self.busy_threshold}")

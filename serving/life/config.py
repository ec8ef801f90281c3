"""What a frontend does with workers that only prefill or only decode."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Whole, check
from serving.life.lease import LeaseConfig

Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig(LeaseConfig):
    """How requests are spread over prefill and decode workers; without effect where no pool prefills."""

    flow: Literal["source-first", "destination-first"] = "source-first"
    """Who goes first: the prompt is computed, then a decode worker is chosen, computes the last prompt token again and
    says token 1 (vLLM); or both are chosen at once, the decode worker takes its blocks first, and token 1 comes with the
    KV (SGLang)."""

    conditional_disagg: Literal["never", "isl_bounding", "prefill_load", "isl_or_load"] = "never"
    """When a decode worker prefills by itself: never; what is left of the prompt behind its cached prefix is short; the
    prefill worker that would be chosen is busy; either."""

    bypass_max_tokens: Whole = 2048
    """A prompt is short if fewer tokens than this are left to compute ..."""

    bypass_max_ratio: Share = 0.7
    """... and they are less than this share of it."""

    prefill_busy_tokens: Whole = 8192
    """A prefill worker is busy if it has more tokens than this to compute."""

    decode_guard: Share | None = None
    """Bypass only while the decode worker's KV blocks, with this request's, fill at most this share (none: always)."""

    enforce_disagg: bool = False
    """Fail requests while there is no prefill worker; otherwise decode workers take them whole."""

    prefill_fallback: bool = False
    """Let decode workers compute a prompt whose prefill failed; otherwise the request fails."""

    @property
    def lease(self) -> LeaseConfig:
        """What workers are told of it."""
        return LeaseConfig(kv_lease_duration_s=self.kv_lease_duration_s, kv_lease_renewal=self.kv_lease_renewal)

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        check(self)

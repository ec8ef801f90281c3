"""How a frontend uses workers that only prefill or only decode."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Whole, check_settings
from serving.life.lease import LeaseConfig

Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig(LeaseConfig):
    """How requests are spread over prefill and decode workers; has no effect without prefill workers."""

    flow: Literal["source-first", "destination-first"] | None = None
    """Which worker starts first. source-first (vLLM, TensorRT-LLM): the prompt is computed, then a decode worker is chosen.
    In vLLM that computes the last prompt token again and produces token 1; in TensorRT-LLM, token 1 arrives with the KV.
    destination-first (SGLang): both are chosen at once, the decode worker allocates its blocks first, and token 1 arrives
    with the KV (default: as the engine does, source-first where that is not known)."""

    conditional_disagg: Literal["never", "isl_bounding", "prefill_load", "isl_or_load"] = "never"
    """When a decode worker computes a prompt itself: never; if little of the prompt is left after its cached prefix
    (isl_bounding); if the prefill worker that would be chosen is busy (prefill_load); or in either case (isl_or_load)."""

    bypass_max_tokens: Whole = 2048
    """A prompt is short if fewer tokens than this are left to compute, and it is short by bypass_max_ratio too."""

    bypass_max_ratio: Share = 0.7
    """A prompt is short only if the tokens left to compute are less than this share of it."""

    prefill_busy_tokens: Whole = 8192
    """A prefill worker is busy if it has more tokens than this to compute."""

    decode_guard: Share | None = None
    """Bypass only if the decode worker, with this request, uses at most this share of its KV blocks (none: always)."""

    enforce_disagg: bool = False
    """While there is no prefill worker, let requests wait up to 30 s for one, and then fail; otherwise decode workers serve
    them whole."""

    prefill_fallback: bool = False
    """Let decode workers compute a prompt whose prefill failed; otherwise the request fails."""

    @property
    def lease(self) -> LeaseConfig:
        """The part that workers receive."""
        return LeaseConfig(kv_lease_duration_s=self.kv_lease_duration_s, kv_lease_renewal=self.kv_lease_renewal)

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)

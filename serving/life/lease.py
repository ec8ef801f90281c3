"""How long KV waits at a prefill worker."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from foundation.settings import check_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Settings of the lease under which a prefill worker keeps a prompt's KV."""

    kv_lease_duration_s: Annotated[float, Meta(gt=0, le=1e9)] = 30.0
    """How long a prefill worker keeps a prompt's KV for a decode worker that has not asked for it (s)."""

    kv_lease_renewal: bool = True
    """Decode workers renew the leases of requests that wait: every sixth of the duration, by two thirds of it. Older vLLM
    had one time limit of 480 s and no renewal."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)

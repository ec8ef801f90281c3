"""How long KV waits at a prefill worker."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from foundation.settings import check


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    """Settings of the lease under which a prefill worker keeps a prompt's KV."""

    kv_lease_duration_s: Annotated[float, Meta(gt=0, le=1e9)] = 30.0
    """How long a prefill worker keeps a prompt's KV for a decode worker that does not ask for it (s)."""

    kv_lease_renewal: bool = True
    """Decode workers renew leases for requests that wait there, by two thirds of their duration every sixth of it; older
    vLLM had one time limit of 480 s and no renewal."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        check(self)

"""How workers move KV to each other."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, Positive, check


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRunConfig:
    """How simulated workers that prefill hand KV to those that decode; engines that run models do it themselves."""

    transfer: Literal["auto", "shm", "tcp", "nixl"] = "auto"
    """How KV moves: shared memory on one host, TCP between hosts, NIXL where its package is installed; or the best of them."""

    transfer_host: str = "127.0.0.1"
    """Address on which a worker lets others read over TCP."""

    transfer_memory_mb: Count = 256
    """Memory for KV that is to be read (MiB)."""

    kv_bytes_scale: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the model's bytes of KV that are really moved."""

    transfer_read_timeout_s: Positive = 30.0
    """How long a transfer may take (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        check(self)

"""Settings of a KV store's process."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from foundation.settings import Unit, check_settings

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreServiceConfig:
    """Settings of a KV store, which all workers share."""

    kv_store_size: Annotated[float, Meta(gt=0, le=1_000_000_000), Unit("GiB")] = 4.0
    """Memory for chunks of KV (GiB)."""

    host: str = "127.0.0.1"
    """Address at which workers reach the store. Workers on other hosts need etcd, which keeps the token."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 7600
    """Port to listen on (0: any free port; the log shows it)."""

    def __post_init__(self) -> None:
        """Refuse meaningless values."""
        check_settings(self)

    @property
    def num_bytes(self) -> int:
        """Memory for chunks."""
        return int(self.kv_store_size * GIB)

"""The settings of a KV store's process."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from foundation.settings import Positive, check

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreServiceConfig:
    """Settings of a KV store, which all workers share."""

    kv_store_size: Positive = 4.0
    """Memory for chunks of KV (GiB)."""

    host: str = "127.0.0.1"
    """Address of this host at which workers reach it; on others than this host they need etcd, where the token lies."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 7600
    """Where it listens (0: at a free port, which the log names)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        check(self)

    @property
    def num_bytes(self) -> int:
        """Memory for chunks."""
        return int(self.kv_store_size * GIB)

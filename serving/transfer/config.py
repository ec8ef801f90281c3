"""How KV travels."""

from dataclasses import dataclass
from typing import Literal

from foundation.settings import Count, Positive, Share, check
from serving.transfer.make import Transport

OF_TIERS = ("kv_bytes_scale", "kv_disk_folder", "kv_store", "kv_store_write_policy")
"""Settings of tiers beyond a worker's GPUs, which it may have whatever its role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRunConfig:
    """Settings of workers whose KV travels: to other workers, or to tiers beyond their GPUs."""

    transfer: Transport = "auto"
    """How KV travels: through shared memory, over TCP, or by NIXL (auto: shared memory on one host, else TCP)."""

    transfer_host: str = "127.0.0.1"
    """Address of this host at which other hosts' workers reach it."""

    transfer_memory_mb: Count = 256
    """Memory for KV that leaves, or comes (MB)."""

    kv_bytes_scale: Share = 0.01
    """Share of the KV's bytes that is really moved and kept; all of an 8,192-token prompt of Llama-3.1-8B are 1 GB."""

    kv_bytes_per_token: Positive | None = None
    """Bytes of a token's KV (default: the model's; where none is named, the 131,072 of Llama-3.1-8B)."""

    transfer_read_timeout_s: Positive = 30.0
    """How long a read may take, once those before it are done (s)."""

    transfer_meeting_timeout_s: Positive = 300.0
    """Destination first: how long one worker of a request waits for a sign of the other, which gives one as long as the request
    is queued there (s)."""

    kv_disk_folder: str = ""
    """Folder in which each rank keeps the KV of its disk (--kv-disk-size), in a folder of its own; it is found there again after a
    restart (none: a temporary one, removed in the end)."""

    kv_store: str = ""
    """KV store that workers share, as HOST:PORT (python -m serving.kv_store; none: no store)."""

    kv_store_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """When a chunk is written to the store: as soon as host memory has it, once it was loaded from there again, or when it leaves
    host memory."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        check(self)

    @property
    def num_bytes(self) -> int:
        """Memory for KV."""
        return self.transfer_memory_mb * 1_000_000

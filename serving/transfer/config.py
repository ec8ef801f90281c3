"""How KV travels."""

from dataclasses import dataclass
from typing import Literal

from foundation.settings import Count, Positive, Share, check
from serving.transfer.make import Transport

OF_TIERS = ("kv_bytes_scale", "kv_store", "kv_store_write_policy")
"""Settings of tiers beyond a worker's GPUs; a worker of any role may have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRunConfig:
    """Settings of workers whose KV travels: to other workers, or to tiers beyond their GPUs."""

    transfer: Transport = "auto"
    """How KV is transferred: through shared memory, over TCP, or with NIXL (auto: shared memory on one host, else TCP)."""

    transfer_host: str = "127.0.0.1"
    """Address at which workers on other hosts reach this one."""

    transfer_memory_mb: Count = 256
    """Memory for KV in transfer, each way (MB)."""

    kv_bytes_scale: Share = 0.01
    """Share of the KV's bytes that is really moved and kept; an 8,192-token prompt of Llama-3.1-8B has 1 GB."""

    kv_bytes_per_token: Positive | None = None
    """Bytes of one token's KV (default: the model's; with no model named, 131,072, as for Llama-3.1-8B)."""

    transfer_read_timeout_s: Positive = 30.0
    """How long a read may take once the reads before it are done (s)."""

    transfer_meeting_timeout_s: Positive = 300.0
    """Destination first: how long one worker of a request waits to hear from the other, which reports for as long as it
    queues the request (s)."""

    kv_store: str = ""
    """Address of the KV store that workers share, HOST:PORT (see python -m serving.kv_store; empty: no store)."""

    kv_store_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """When a chunk is written to the store: when host memory stores it (write_through), after it is loaded from host memory
    (write_through_selective), or when host memory evicts it (write_back)."""

    def __post_init__(self) -> None:
        """Refuse meaningless values."""
        check(self)
        if self.kv_store_write_policy != "write_through" and not self.kv_store:
            raise ValueError(
                f"kv_store_write_policy is {self.kv_store_write_policy}, but there is no store; expected kv_store with it"
            )

    @property
    def num_bytes(self) -> int:
        """Memory for KV."""
        return self.transfer_memory_mb * 1_000_000

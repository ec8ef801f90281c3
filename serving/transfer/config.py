"""How KV travels, or would: the mocker's has no bytes."""

from dataclasses import dataclass
from typing import Literal

from foundation.settings import NotNegative, Positive, Share, check_settings

Transport = Literal["auto", "shm", "tcp"]

OF_TIERS = ("kv_bytes_scale", "kv_store", "kv_store_write_policy")
"""Settings of tiers beyond a worker's GPUs; a worker of any role may have them."""

OF_LINKS = ("kv_bytes_per_token", "transfer_bandwidth_gb_s", "transfer_latency_ms", "transfer_block_us")
"""What the section `transfer` of a deployment says for both clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRunConfig:
    """Settings of workers whose KV travels: to other workers, or to tiers beyond their GPUs."""

    transfer: Transport = "auto"
    """How workers tell each other about KV: through sockets on one host, or over TCP (auto: the first on one host, else
    TCP)."""

    transfer_host: str = "127.0.0.1"
    """Address at which workers on other hosts reach this one."""

    transfer_bandwidth_gb_s: NotNegative = 20.0
    """Bandwidth of each GPU of a worker, each way (GB/s; 0: unlimited)."""

    transfer_latency_ms: NotNegative = 0.4
    """Fixed cost of a transfer, before its first byte (ms)."""

    transfer_block_us: NotNegative = 0.0
    """Cost of each block of a transfer (us), such as posting its descriptor."""

    kv_bytes_scale: Share = 0.01
    """Share of the KV's bytes that is really kept in the store that workers share."""

    kv_bytes_per_token: Positive | None = None
    """Bytes of one token's KV (default: the model's; with no model named, 131,072, as for Llama-3.1-8B)."""

    transfer_read_timeout_s: Positive = 30.0
    """How long a prefill worker may take to confirm that it still keeps KV (s)."""

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
        check_settings(self)
        if self.kv_store_write_policy != "write_through" and not self.kv_store:
            raise ValueError(
                f"kv_store_write_policy is {self.kv_store_write_policy}, but there is no store; expected kv_store with it"
            )

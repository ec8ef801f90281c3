"""How KV travels."""

from dataclasses import dataclass

from foundation.settings import Count, Positive, Share, check
from serving.transfer.make import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRunConfig:
    """Settings of workers between which KV travels; without effect on a worker that does all of a request."""

    transfer: Transport = "auto"
    """How KV travels: through shared memory, over TCP, or by NIXL (auto: shared memory on one host, else TCP)."""

    transfer_host: str = "127.0.0.1"
    """Address of this host at which other hosts' workers reach it."""

    transfer_memory_mb: Count = 256
    """Memory for KV that leaves, or comes (MB)."""

    kv_bytes_scale: Share = 0.01
    """Share of the KV's bytes that is really moved; all of an 8,192-token prompt of Llama-3.1-8B are 1 GB."""

    kv_bytes_per_token: Positive | None = None
    """Bytes of a token's KV (default: the model's; where none is named, the 131,072 of Llama-3.1-8B)."""

    transfer_read_timeout_s: Positive = 30.0
    """How long a read may take, once those before it are done (s)."""

    transfer_meeting_timeout_s: Positive = 300.0
    """Destination first: how long one worker of a request waits for a sign of the other, which gives one as long as the request
    is queued there (s)."""

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        check(self)

    @property
    def num_bytes(self) -> int:
        """Memory for KV."""
        return self.transfer_memory_mb * 1_000_000

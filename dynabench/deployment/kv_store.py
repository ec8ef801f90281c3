"""A store of KV that all workers share, behind the host memory of each."""

from dataclasses import dataclass

from foundation.settings import NotNegative, Positive, check
from mocker.offload.config import GIB, HostMemory, Policy, Size, Tier, WritePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreConfig:
    """Settings of a store that all workers share; what is in it passes through their host memory."""

    kv_store_size: Size = 0.0
    """KV that all workers share, such as in a Mooncake store or on a shared file system (GiB; 0: none)."""

    kv_store_bandwidth_gb_s: Positive = 80.0
    """What all workers together read from the store, and write to it, at the same time (GB/s each way); each is limited by its own
    links, too."""

    kv_store_latency_ms: NotNegative = 0.5
    """What each read from the store, and each write, takes before its first byte (ms)."""

    kv_store_lookup_ms: NotNegative = 0.5
    """How long it takes to learn which chunks of a prompt are in the store (ms)."""

    kv_store_write_policy: WritePolicy = "write_through"
    """When a chunk is written to the store: as soon as host memory has it, once it was loaded from there again, or when it leaves
    host memory."""

    kv_store_eviction_policy: Policy = "lru"
    """Which chunks leave the store first."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can run with."""
        check(self)

    def tier(self, host: HostMemory) -> Tier | None:
        """Return the store as workers with this host memory use it, if there is one.

        Raises:
            ValueError: it has no room for a chunk.
        """
        if not self.kv_store_size:
            return None
        num_chunks = int(self.kv_store_size * GIB // host.chunk_bytes)
        if not num_chunks:
            raise ValueError(
                f"kv_store_size is {self.kv_store_size:g} GiB; expected at least {host.chunk_bytes / GIB:.4g}, one chunk of "
                f"{host.blocks_per_chunk} blocks, or 0 for none"
            )
        return Tier(
            name="store",
            num_chunks=num_chunks,
            bandwidth=self.kv_store_bandwidth_gb_s * 1e9,
            latency_s=self.kv_store_latency_ms / 1e3,
            lookup_s=self.kv_store_lookup_ms / 1e3,
            write_policy=self.kv_store_write_policy,
            eviction_policy=self.kv_store_eviction_policy,
        )

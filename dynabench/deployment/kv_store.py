"""A store of KV that all workers share, behind the host memory of each."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Annotated

from msgspec import Meta

from foundation.settings import CheckedSettings, NotNegative, Positive, Unit
from mocker.tiers.config import MAX_GIB, HostMemory, Policy, Tier, WritePolicy, refuse_idle, whole_chunks

StoreSize = Annotated[float, Meta(ge=0, le=MAX_GIB), Unit("GiB for all workers together")]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreConfig(CheckedSettings):
    """Settings of a store that all workers share; what is in it passes through their host memory."""

    kv_store_size: StoreSize = 0.0
    """Store of KV that all workers share, such as Mooncake or a shared file system (GiB; 0: none)."""

    kv_store_bandwidth_gb_s: Positive = 80.0
    """Bandwidth of the store for all workers together, for reads and for writes (GB/s each); each worker's own links limit it,
    too."""

    kv_store_latency_ms: NotNegative = 0.5
    """Time before the first byte of each read from the store and each write to it (ms)."""

    kv_store_lookup_ms: NotNegative = 0.5
    """Time to look up which chunks of a prompt are in the store (ms)."""

    kv_store_write_policy: WritePolicy = "write_through"
    """When a chunk is written to the store: when host memory stores it (write_through), after it is loaded from host memory
    (write_through_selective), or when host memory evicts it (write_back)."""

    kv_store_eviction_policy: Policy = "lru"
    """How the store chooses the chunks to evict."""

    def tier(self, host: HostMemory) -> Tier | None:
        """Return the store for workers with this host memory, None if there is no store.

        Raises:
            ValueError: it is too small for a chunk.
        """
        if not self.kv_store_size:
            return None
        return Tier(
            name="store",
            num_chunks=whole_chunks(
                "kv_store_size",
                self.kv_store_size,
                chunk_bytes=host.chunk_bytes,
                blocks_per_chunk=host.blocks_per_chunk,
            ),
            bandwidth=self.kv_store_bandwidth_gb_s * 1e9,
            latency_s=self.kv_store_latency_ms / 1e3,
            lookup_s=self.kv_store_lookup_ms / 1e3,
            write_policy=self.kv_store_write_policy,
            eviction_policy=self.kv_store_eviction_policy,
        )


def refuse_idle_store(stores: Collection[KvStoreConfig]) -> None:
    """Refuse settings of a store if none of the deployments of an experiment, which may vary the size, has one.

    Raises:
        ValueError: such a setting is not at its default.
    """
    if not any(store.kv_store_size for store in stores):
        names = [field.name for field in fields(KvStoreConfig)]
        refuse_idle(stores, names, "there is no store; set kv_store_size as well")

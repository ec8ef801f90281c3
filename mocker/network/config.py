"""Links that carry KV from prefill to decode workers, and between workers and a store."""

import math
from dataclasses import dataclass
from typing import Literal

from foundation.settings import Count, NotNegative, Positive, check_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Links between workers; without effect unless a pool prefills or there is a store.

    Workers fill nodes in the order of their numbers, and nodes fill racks. A transfer within a node passes only through
    its two workers, and one within a rack also through their nodes.
    """

    bandwidth_gb_s: NotNegative = 20.0
    """Bandwidth of each GPU of a worker, each way (GB/s; 0: unlimited); a worker has that times its GPUs."""

    latency_ms: NotNegative = 0.4
    """Fixed cost of a transfer, before its first byte (ms)."""

    block_us: NotNegative = 0.0
    """Cost of each block of a transfer (us), such as posting its descriptor."""

    kv_bytes_per_token: Positive | None = None
    """Bytes of a token's KV, on all GPUs of a worker (default: the model's; where none is named, the 131,072 of Llama-3.1-8B)."""

    gpus_per_node: Count | None = None
    """GPUs that share a node's link (default: each worker has a node of its own)."""

    node_bandwidth_gb_s: Positive | None = None
    """Bandwidth between a node and the others, each way (GB/s; default: that of its workers together)."""

    nodes_per_rack: Count | None = None
    """Nodes that share a rack's link (default: there is one rack)."""

    rack_bandwidth_gb_s: Positive | None = None
    """Bandwidth between a rack and the others, each way (GB/s; default: that of its nodes together)."""

    overlap: Literal["none", "chunk", "layer"] | None = None
    """When KV is sent: after the prefill (vLLM with NIXL, TensorRT-LLM); each chunk of a prompt when it is computed (SGLang);
    each layer (Splitwise, Mooncake) (default: as the engine does)."""

    def __post_init__(self) -> None:
        """Refuse impossible networks."""
        check_settings(self)
        if self.node_bandwidth_gb_s is not None and self.gpus_per_node is None:
            raise ValueError("node_bandwidth_gb_s needs gpus_per_node, the number of GPUs that share it")
        if self.rack_bandwidth_gb_s is not None and self.nodes_per_rack is None:
            raise ValueError("rack_bandwidth_gb_s needs nodes_per_rack, the number of nodes that share it")

    @property
    def gpu_bandwidth(self) -> float:
        """What each GPU can send, and receive (bytes/s)."""
        return self.bandwidth_gb_s * 1e9 or math.inf

    @property
    def latency_s(self) -> float:
        """Fixed cost of a transfer (s)."""
        return self.latency_ms * 1e-3

    @property
    def block_s(self) -> float:
        """Cost of each block of a transfer (s)."""
        return self.block_us * 1e-6

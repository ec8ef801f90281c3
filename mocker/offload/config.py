"""Every dial of offloading to host memory, named as vLLM names it."""

from dataclasses import dataclass
from typing import Literal

from foundation.settings import Count, Whole, check


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Settings of one engine's host memory."""

    num_cpu_chunks: Count
    """Chunks that it holds."""

    blocks_per_chunk: Count = 1
    """KV blocks of a chunk; a chunk is stored, loaded and evicted as a whole."""

    eviction_policy: Literal["lru", "arc"] = "lru"
    """Which chunks are evicted: the least recently used, or as ARC decides."""

    store_threshold: Whole = 0
    """The offer of a chunk at which it is stored (below 2: the first)."""

    offload_prompt_only: bool = True
    """Keep prompts, not answers."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can run with."""
        check(self)

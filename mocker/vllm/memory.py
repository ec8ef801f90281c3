"""Where an engine has KV: in its blocks on the GPU, which others may retain, and in host memory."""

from mocker.contract import Outbox
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.tiers.config import HostMemory
from mocker.vllm.block_pool import BlockPool
from mocker.vllm.config import EngineConfig
from mocker.vllm.offload.host_offload import HostOffload
from mocker.vllm.offload.offload import Offload
from mocker.vllm.retention import Retention


class Memory:
    """The pool of blocks, who retains them, and the scheduler's side of host memory."""

    def __init__(
        self, config: EngineConfig, num_blocks: int, host: HostMemory | None, outbox: Outbox, *, num_stages: int
    ) -> None:
        """Start with nothing cached."""
        assert host is None or config.enable_prefix_caching, "prefix caching is what finds KV in host memory"
        # vLLM's null block is one of them, and is never used.
        self.pool = BlockPool(num_blocks - 1, enable_prefix_caching=config.enable_prefix_caching)
        self.has_host = host is not None
        """Whether there is host memory; where a call for each iteration would cost, this is asked first."""
        self.offload = Offload() if host is None else HostOffload(host, self.pool, config.block_size, outbox)
        may_overlap = config.is_async or num_stages > 1
        self.retention = Retention(self.pool, has_fence=may_overlap and (config.is_kv_consumer or self.has_host))
        self.prefix_cache_stats = PrefixCacheStats()
        """How much of the prompts was found there."""
        self.watermark_blocks = int(config.watermark * num_blocks)

"""Where an engine has KV: in its blocks on the GPU, which others may retain, and in host memory."""

from mocker.contract import Outbox
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.tiers.config import HostMemory
from mocker.vllm.block_pool import BlockPool
from mocker.vllm.blocks import Blocks, OneTable
from mocker.vllm.config import EngineConfig
from mocker.vllm.groups.blocks import GroupedBlocks
from mocker.vllm.groups.settings import GroupSettings
from mocker.vllm.offload.host_offload import HostOffload
from mocker.vllm.offload.offload import Offload
from mocker.vllm.pool import Pool
from mocker.vllm.retention import Retention
from mocker.vllm.speculation import Speculation


class Memory:
    """The pool of blocks, who retains them, and the scheduler's side of host memory."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        host: HostMemory | None,
        outbox: Outbox,
        *,
        groups: GroupSettings | None,
        num_stages: int,
    ) -> None:
        """Start with nothing cached."""
        self.watermark_blocks = int(config.watermark * num_blocks)
        self.pool: Pool
        self.blocks: Blocks
        self._runs: BlockPool | None = None
        self._one_table: OneTable | None = None
        looks_ahead = config.rules.hashes_look_ahead and Speculation(config).drops_last_hit
        has_connector = host is not None or config.kv_role is not None
        self.num_named_ahead = int(looks_ahead and config.enable_prefix_caching and not has_connector)
        """Tokens after a block that are part of its name: it can be cached once they are known, and no hit is dropped."""
        if groups is None:
            # vLLM's null block is one of them, and is never used.
            self._runs = BlockPool(num_blocks - 1, enable_prefix_caching=config.enable_prefix_caching)
            self._one_table = OneTable(config, self._runs, self.watermark_blocks, looks_ahead=self.num_named_ahead > 0)
            self.pool, self.blocks = self._runs, self._one_table
        else:
            blocks = GroupedBlocks(config, groups, num_blocks, self.watermark_blocks)
            self.pool, self.blocks = blocks.pool, blocks
        self.has_host = host is not None
        """Whether there is host memory; where a call for each iteration would cost, this is asked first."""
        self.offload = Offload()
        if host is not None:
            self.offload = HostOffload(host, self.runs, config.block_size, outbox, config.rules)
        may_overlap = config.is_async or num_stages > 1
        self.retention = Retention(self.blocks, has_fence=may_overlap and (config.is_kv_consumer or self.has_host))
        self.prefix_cache_stats = PrefixCacheStats()
        """How much of the prompts was found there."""

    @property
    def has_groups(self) -> bool:
        """Whether layers that keep different things have tables of their own."""
        return self._runs is None

    @property
    def runs(self) -> BlockPool:
        """The pool of an engine without groups."""
        assert self._runs is not None, "groups of layers have a pool of numbered blocks"
        return self._runs

    @property
    def one_table(self) -> OneTable:
        """The blocks of an engine without groups."""
        assert self._one_table is not None, "groups of layers have several tables"
        return self._one_table

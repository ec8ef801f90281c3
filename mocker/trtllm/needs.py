"""How many blocks a request may need: the numbers that the capacity policies compare with the free blocks.

These are counted as in TensorRT-LLM's C++ KV cache manager (`getRemainingBlocksToCompletion`, `getNeededBlocksOneStep`), read
and not run. A cached block that somebody holds costs nothing; one that is free costs as much as a new one.
"""

from mocker.trtllm.block_pool import BlockPool
from mocker.trtllm.request import INIT, Request


class Needs:
    """Counts blocks, and finds cached ones, for requests of one engine."""

    def __init__(self, pool: BlockPool, *, tokens_per_block: int, max_draft_len: int = 0, num_steps: int = 1) -> None:
        """Count for a pool; MAX_UTILIZATION looks `num_steps` steps ahead."""
        self.pool = pool
        self.reuses = pool.enable_block_reuse
        self._size = tokens_per_block
        self._num_ahead = num_steps * (1 + max_draft_len)

    def num_cached(self, request: Request) -> int:
        """Count the full blocks of a prompt, from the first on, that are cached."""
        return self.pool.num_cached(request.chain, request.num_prompt // self._size) if self.reuses else 0

    def _num_free_of_charge(self, request: Request) -> int:
        """Count the cached blocks of a prompt that others hold, before its first chunk."""
        if not self.reuses or not request.is_first_chunk:
            return 0
        return self.pool.num_in_use(request.chain, self.num_cached(request))

    def to_end(self, request: Request) -> int:
        """Count the blocks that a request may still need until its end."""
        total = -(-(request.num_prompt + request.num_left) // self._size)
        return total - len(request.blocks) - self._num_free_of_charge(request)

    def to_ends(self, generating: list[Request]) -> int:
        """Count the blocks that requests that generate may still need until their ends."""
        size = self._size
        return sum(
            [-((request.num_prompt + request.num_left) // -size) - len(request.blocks) for request in generating]
        )

    def one_step(self, request: Request) -> int:
        """Count the blocks that a request needs for its next step, or its next two."""
        size = self._size
        if request.is_generating:
            slots = request.slots
            count = min(self._num_ahead, request.num_left - (slots - request.num_prompt))
            return -(-(slots + count) // size) - -(-slots // size)
        if request.is_first_chunk or request.state == INIT:
            return -(-request.num_prompt // size) - self._num_free_of_charge(request)
        return 0

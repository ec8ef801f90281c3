"""Many iterations of a batch in which each sequence decodes, taken as one.

iteration    first ................. stop           nothing but tokens and blocks in between, since
               |                       |
               the batch is steady     the next sequence ends, or blocks run out (bisected), or a limit of the driver
"""

from mocker.batch import Batch
from mocker.vllm.config import EngineConfig
from mocker.vllm.memory import Memory
from mocker.vllm.queues import Queues
from mocker.vllm.running import Running


class Leaps:
    """Decides how far a leap may go, and takes it."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        running: Running,
        queues: Queues,
        *,
        has_adapters: bool,
    ) -> None:
        self._config = config
        self._running = running
        self._interval = running.interval
        self._queues = queues
        self._pool = memory.pool
        self._most_blocks = running.decoding.most_blocks
        self._frees_blocks = memory.has_groups  # while sequences decode
        self._retention = memory.retention
        self._offload = memory.offload
        self._has_host = memory.has_host
        self._max_running = config.max_running
        self._has_adapters = has_adapters

    def num_iterations(self, batch: Batch, limit: int) -> int:
        """Return how many iterations the batch in flight may span; it must be the last scheduled one."""
        if limit <= 1 or not batch.is_undisturbed or self._retention.fenced:
            return 1
        if self._has_host and not self._is_host_idle():
            return 1
        if self._interval.is_on and self._may_hold():
            return 1
        decodes, size, queues = batch.decodes, self._config.block_size, self._queues
        has_waiting = bool(queues.waiting or queues.holding)
        if has_waiting and self._frees_blocks and len(self._running.sequences) < self._max_running:
            return 1
        if has_waiting and any(s.chain.num_named * size > s.num_prompt for s in decodes):
            return 1  # named output blocks, once cached, may admit a waiting sequence
        decoding, first = self._running.decoding, self._running.iteration
        # In flight is `first - 1`, or asynchronously `first - 2`. The count is the same, because then the batch without the
        # finished sequence is also closed one iteration earlier.
        count = min(limit, decoding.next_finish - first + 2)
        return 1 + decoding.num_iterations(decodes, first, count - 1) if count > 1 else 1

    def _may_hold(self) -> bool:
        """Return whether a prompt may be held back, which will be computed when a prefill is due."""
        return not self._interval.is_bound and bool(self._queues.num_sequences or self._running.prefilling())

    def _is_host_idle(self) -> bool:
        """Return whether host memory has no part in iterations that only decode.

        Decodes may evict cached blocks that the next waiting sequence would have shared. Then it may

        - have to ask host memory again, so that those behind it may start. This needs a copy in progress, or a look-up in
          tiers that was not made.
        - load KV instead of computing it. This admits nobody if the blocks of a whole prompt must be free.
        """
        offload = self._offload
        if not (offload.is_prompt_only and offload.is_quiet):
            return False
        waiting = self._queues.waiting
        is_nobody_asked = not waiting and all(sequence.num_blocks for sequence in self._queues.holding)
        if is_nobody_asked or len(self._running.sequences) == self._max_running:
            return True
        if not self._config.scheduler_reserve_full_isl or offload.is_copying or self._has_adapters:
            return False  # with adapters, the first that waits need not be the next
        return not (waiting and offload.may_look_up(waiting[0]))

    def may_evict(self, num_iterations: int) -> bool:
        """Return whether this many more iterations might evict a cached block."""
        most = len(self._running.sequences) * self._most_blocks * (num_iterations // self._config.block_size + 1)
        return most > self._pool.num_blank

    def take(self, num_iterations: int, *, is_ordered: bool) -> None:
        """Schedule the last batch for this many more iterations, in which only a token for each sequence happens.

        Blocks are allocated and cached in vLLM's order or, unless `is_ordered`, at once.
        """
        running = self._running
        assert running.steady is not None, "no steady decoding is in progress"
        decodes, first, stop = running.steady.decodes, running.iteration, running.iteration + num_iterations
        running.iteration = stop
        if is_ordered:
            running.decoding.grow_in_order(decodes, first, stop)
            return
        running.decoding.grow_at_once(decodes, first, stop)

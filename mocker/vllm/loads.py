"""KV that is computed or kept elsewhere: at another engine, or in host memory.

A sequence gets the blocks first, and its KV comes outside of iterations; the driver reports when:

    in `waiting`                        in `holding`                                            in `running`
    WAITING -- `start`: blocks are free --> LOADING -- `end` --> LOADED -- `promote` --> WAITING --> RUNNING
"""

from mocker.contract import Outbox
from mocker.sequence import LOADED, LOADING, WAITING, Sequence
from mocker.vllm.block_pool import num_blocks_of
from mocker.vllm.config import EngineConfig
from mocker.vllm.memory import Memory
from mocker.vllm.queues import Queues
from mocker.vllm.running_queue import RunningQueue
from mocker.vllm.speculation import Speculation


class Loads:
    """Starts loads, and takes in what has arrived."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        running: RunningQueue,
        queues: Queues,
        outbox: Outbox,
    ) -> None:
        self._size = config.block_size
        self._reserves_whole = config.scheduler_reserve_full_isl
        self._num_decode_places = Speculation(config).num_decode_places
        self._fails = config.kv_load_failure_policy == "fail"
        self._pool = memory.runs
        self._blocks = memory.one_table
        self._running = running
        self._queues = queues
        self._retention = memory.retention
        self._offload = memory.offload
        self._stats = memory.prefix_cache_stats
        self._outbox = outbox

    def start(self, sequence: Sequence, num_local: int, num_computed: int) -> bool:
        """Allocate the blocks of this many tokens after the cached ones, and start their load; False if not free.

        Blocks that prefills in flight still need stay free, so that loads, which cannot be preempted, never block them.
        A token that arrives with the KV has its place at once, because it can be the first of a block, unless it is the
        last of all: then it needs none.
        """
        reach = min(num_computed + int(sequence.is_token_shipped), sequence.num_total - 1)
        hits = num_local // self._size
        if not self._is_free(sequence, hits, reach):
            return False
        self._blocks.start(sequence, num_local)
        sequence.num_blocks = num_blocks_of(reach, self._size)
        self._pool.allocate(sequence.num_blocks - hits)
        sequence.num_computed = num_computed
        sequence.state = LOADING
        self._queues.await_kv(sequence)
        self._running.expect_load(sequence)
        self._stats.count(sequence, num_local)
        if sequence.is_remote_prefill:
            sequence.is_remote_prefill = False
            self._outbox.loads.append(sequence)
            self._stats.count_load(sequence, num_computed - num_local)
        else:
            self._offload.load(sequence, num_local, num_computed - num_local)
            self._stats.count_load(sequence, 0)
        return True

    def num_needed(self, sequence: Sequence) -> int:
        """Count the blocks that must be free for a load of a sequence's whole prompt to start, if nobody runs."""
        size = self._size
        return num_blocks_of(sequence.num_prompt, size) + num_blocks_of(self._num_decode_places, size)

    def _is_free(self, sequence: Sequence, hits: int, reach: int) -> bool:
        free, is_alone, blocks = self._pool.num_free, not self._running.sequences, self._blocks
        if self._reserves_whole:
            whole = max(reach, sequence.num_known)
            if blocks.num_needed_first(sequence, hits, whole, is_alone=is_alone) > free:
                return False
        reserved = self.num_reserved_blocks() + num_blocks_of(self._num_decode_places, self._size)
        return blocks.num_needed_first(sequence, hits, reach, is_alone=is_alone) + reserved <= free

    def num_reserved_blocks(self) -> int:
        """Count the blocks that prefills in flight still need to compute their prompts.

        vLLM counts a prompt from its first chunk, or from the start of its load, until it is computed. A load from
        another engine already has all its blocks, so of those only a prompt whose load failed counts.
        """
        more, prefills = self._num_decode_places, self._running.prefilling()
        return sum([max(num_blocks_of(s.num_known + more, self._size) - s.num_blocks, 0) for s in prefills])

    def end(self, sequence: Sequence, num_valid_blocks: int | None) -> bool:
        """Record that a sequence's KV, or only this many of its first blocks, is loaded; return whether that ends it.

        The rest is computed if `kv_load_failure_policy` asks for it.
        """
        if self._retention.release(sequence):  # it was aborted meanwhile
            return False
        sequence.state = LOADED
        if num_valid_blocks is None:
            return sequence.is_token_shipped and sequence.num_total == sequence.num_prompt + 1
        sequence.num_computed = min(num_valid_blocks * self._size, sequence.num_known)
        sequence.is_failed = self._fails
        return sequence.is_failed

    def promote(self, sequence: Sequence) -> None:
        """Cache the loaded blocks, and let the sequence wait for a seat.

        The prompt's last token is computed here again, unless the next token arrived with the KV. If KV is missing,
        that token is useless: it is computed here, and gets its place then.
        """
        sequence.state = WAITING
        is_whole = sequence.num_computed == sequence.num_known
        sequence.is_token_shipped &= is_whole
        if not sequence.num_computed:
            self._pool.release(sequence, sequence.num_blocks)
            return
        self._pool.store(sequence, sequence.num_computed // self._size)
        if not is_whole:
            needed = num_blocks_of(sequence.num_known, self._size)
            if sequence.num_blocks > needed:  # a place for a token that did not arrive
                self._pool.give_back(sequence.num_blocks - needed)
                sequence.num_blocks = needed
        elif sequence.is_token_shipped:
            sequence.num_known += 1
        else:
            sequence.num_computed -= 1

"""The sequences that run, as the other parts of the scheduler see them.

There are two ways to keep count of their tokens:

    `Running`         in closed form: each decode gets one token in each iteration, so no iteration touches a sequence
    `CountedRunning`  per sequence and iteration: for speculation and pipelines, where that does not hold

A class to derive from and not a protocol, as `Core`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from mocker.batch import Batch
from mocker.sequence import Sequence
from mocker.vllm.block_pool import num_blocks_of
from mocker.vllm.config import EngineConfig
from mocker.vllm.memory import Memory
from mocker.vllm.queues import Queues, priority
from mocker.vllm.speculation import Speculation


class RunningQueue(ABC):
    """The running sequences and the count of iterations."""

    def __init__(self, config: EngineConfig, memory: Memory, queues: Queues) -> None:
        self.sequences: list[Sequence] = []
        self.iteration = 0  # the next to be scheduled
        self.num_ended = 0
        self.dropped: list[Sequence] = []  # whose output in flight does not count
        self.drains = False
        """Whether a preempted sequence may have to wait until its tokens in flight are known: see `is_draining`."""
        self._config = config
        self._blocks = memory.blocks
        self._size = config.block_size
        self._queues = queues
        self._retention = memory.retention
        self._offload = memory.offload
        self._has_fence = memory.retention.has_fence
        self._by_priority = config.scheduling_policy == "priority"
        self._num_slots = Speculation(config).num_slots
        self._drops_output = False  # of sequences that are preempted: their KV is gone

    # An iteration

    @abstractmethod
    def schedule(self, batch: Batch) -> int:
        """Give each running sequence its next tokens, preempting when blocks run out; return the rest of the budget."""

    @abstractmethod
    def grant(self, sequence: Sequence, computed: int, needed: int, *, num_cacheable: int) -> None:
        """Give a running sequence the blocks for its tokens up to `computed`, and cache those whose tokens are known."""

    @abstractmethod
    def start(self, batch: Batch, sequence: Sequence, count: int, num_padding: int, *, was_holding: bool) -> None:
        """Let a sequence run, with a first chunk of `count` tokens, of which the last `num_padding` only pad it.

        `was_holding` says whether it waited with blocks, because its KV was loaded.
        """

    @abstractmethod
    def close(self, batch: Batch, *, is_disturbed: bool) -> Batch:
        """Go on to the next iteration; return the batch, or the one before if it goes on unchanged."""

    @abstractmethod
    def end(self, batch: Batch, num_iterations: int) -> tuple[list[Sequence], list[Sequence]]:
        """End iterations of a batch; return the sequences that it gave their first token, and those that have their last."""

    def num_padding(self, batch: Batch, num_computed: int) -> int:
        """Count the tokens that pad the only one that a waiting sequence needs, so that its step is like a decode's."""
        return 0

    # The rule, as far as it is the same

    def cut_to_threshold(self, count: int) -> int:
        """Cut a chunk to the longest that is allowed beside other sequences."""
        threshold = self._config.long_prefill_token_threshold
        if threshold <= 0:
            return count
        present = len(self.sequences) + self._queues.num_sequences
        if present == 1:
            return count
        if self._config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self._config.max_num_batched_tokens // present)
        return min(count, threshold)

    def _make_room(self, batch: Batch, sequence: Sequence, needed: int, granted: dict[Sequence, int]) -> int | None:
        """Preempt until this many blocks are free; return the tokens taken back, None if it cannot continue."""
        refunds = 0
        while self._blocks.num_free < needed:
            victim = max(self.sequences, key=priority) if self._by_priority else self.sequences[-1]
            if self._has_fence and self.is_in_flight(victim):
                return None  # its blocks would not be free at once
            refund = granted.pop(victim, 0)
            self.preempt(victim, was_granted=refund > 0, is_dropped=self._drops_output)
            batch.preempted.append(victim)
            if victim is sequence:
                return None
            if refund:
                refunds += refund + self._num_slots
        return refunds

    # Sequences that leave

    @abstractmethod
    def preempt(self, sequence: Sequence, *, was_granted: bool, is_dropped: bool) -> None:
        """Return a running sequence to the waiting queue; it keeps its tokens, but not its blocks.

        With `is_dropped`, it does not keep a token that is in flight.
        """

    @abstractmethod
    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that is over, wherever it is; it still has its blocks."""

    @abstractmethod
    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether an iteration that has not ended computes tokens of a sequence; only with a fence."""

    @abstractmethod
    def fence(self) -> int:
        """Return the number that `Retention.pass_fences` must exceed before blocks that leave now are free."""

    # Counts

    @abstractmethod
    def tokenless(self, batch: Batch) -> list[Sequence]:
        """Return the running sequences that have no tokens in a batch that is not closed yet."""

    @abstractmethod
    def prefilling(self) -> list[Sequence]:
        """Return the sequences whose prompts are not computed yet."""

    @abstractmethod
    def num_offered(self, batch: Batch, sequence: Sequence) -> int:
        """Count the tokens of a decode whose KV host memory may have after this batch; 0 if it has no token in it."""

    @abstractmethod
    def num_new_tokens(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence of the batch closed last with its tokens, in vLLM's order."""

    @abstractmethod
    def num_tokens(self, sequence: Sequence, num_starved: int) -> int:
        """Count a sequence's tokens that are known: see `Core.num_tokens`."""

    @abstractmethod
    def has_prefilled(self, sequence: Sequence) -> bool:
        """Return whether the prompt of a running sequence is computed."""

    @abstractmethod
    def is_ending(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits only for its last token, which is in flight."""

    def is_draining(self, sequence: Sequence) -> bool:
        """Return whether a preempted sequence must wait until its tokens in flight are known."""
        return False

    def _num_blocks(self, num_tokens: int) -> int:
        return num_blocks_of(num_tokens, self._size)

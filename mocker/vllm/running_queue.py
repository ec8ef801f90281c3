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
from mocker.vllm.config import EngineConfig
from mocker.vllm.memory import Memory
from mocker.vllm.prefill_interval import PrefillInterval
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
        self._goes_on = config.rules.goes_on_after_victim
        self.interval = PrefillInterval(config.prefill_schedule_interval)
        self._drops_output = False  # of sequences that are preempted: their KV is gone

    # An iteration

    @abstractmethod
    def schedule(self, batch: Batch) -> int:
        """Give each running sequence its next tokens, preempting when blocks run out; return the rest of the budget."""

    @abstractmethod
    def grant(self, sequence: Sequence, computed: int, needed: int, *, num_cacheable: int) -> None:
        """Give a running sequence the blocks for its tokens up to `computed`, and cache those whose tokens are known."""

    @abstractmethod
    def start(self, batch: Batch, sequence: Sequence, count: int, num_padding: int) -> None:
        """Let a sequence run, with a first chunk of `count` tokens, of which the last `num_padding` only pad it."""

    @abstractmethod
    def expect_load(self, sequence: Sequence) -> None:
        """Note that the KV of a waiting sequence is being loaded."""

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
        """Preempt until this many blocks are free, or the sequence itself is; return the tokens taken back.

        None if nobody can be preempted now.
        """
        refunds = 0
        while self._blocks.num_free < needed:
            victim = max(self.sequences, key=priority) if self._by_priority else self.sequences[-1]
            if self._has_fence and self.is_in_flight(victim):
                return None  # its blocks would not be free at once
            refund = granted.pop(victim, 0)
            self.interval.took_prefill |= refund > 0 and not self.has_prefilled(victim)
            self.preempt(victim, was_granted=refund > 0, is_dropped=self._drops_output)
            batch.preempted.append(victim)
            if refund:
                refunds += refund + self._num_slots
            if victim is sequence:
                break
        return refunds

    @property
    def has_batch_in_flight(self) -> bool:
        """Whether a batch was closed whose result is not known."""
        return self.num_ended < self.iteration

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
        """Return the sequences whose prompts are being computed, or loaded, as vLLM counts them.

        It counts a load until the batch with the sequence's first tokens is closed.
        """

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

    @property
    def has_decodes(self) -> bool:
        """Whether some running sequence has computed its prompt."""
        return any(self.has_prefilled(sequence) for sequence in self.sequences)

    @abstractmethod
    def is_ending(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits only for its last token, which is in flight."""

    def is_draining(self, sequence: Sequence) -> bool:
        """Return whether a preempted sequence must wait until its tokens in flight are known."""
        return False

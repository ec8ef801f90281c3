"""The sequences that run, in closed form: who gets how many tokens, who is preempted, and who ends.

    waiting -- admitted --> a chunk of its prompt in each iteration -- all computed --> decoding -- its last token --> over
       ^                                 |                                                |    |
       +------------ preempted ----------+------------------------------------------------+    | asynchronously, until its last
                                                                                               v token is known: `ending`

`schedule` is vLLM's rule, one sequence after another. The fast paths (`fast_paths.py`, `leaps.py`) give its result where
nobody can be preempted or starved.
"""

from collections.abc import Iterator

from mocker.batch import NOBODY, Batch
from mocker.position import NEVER
from mocker.sequence import OVER, RUNNING, WAITING, Sequence
from mocker.vllm.block_pool import num_blocks_of
from mocker.vllm.config import EngineConfig
from mocker.vllm.decoding import Decoding, OneTableDecoding
from mocker.vllm.memory import Memory
from mocker.vllm.queues import Queues
from mocker.vllm.running_queue import RunningQueue


class Running(RunningQueue):
    """The running sequences and the count of iterations, from which the positions of those that decode follow."""

    def __init__(self, config: EngineConfig, memory: Memory, queues: Queues) -> None:
        super().__init__(config, memory, queues)
        self.lag = int(config.is_async)  # iterations from computing a token to knowing it
        self.decoding = self._decoding(config, memory)
        self.ending: list[Sequence] = []  # no longer decoding, but their last token is not known yet
        self.starved = NOBODY  # in the last iteration
        self.steady: Batch | None = None  # the last batch, if it continues unless something happens
        self._drops_output = config.is_async and config.is_kv_producer

    def _decoding(self, config: EngineConfig, memory: Memory) -> Decoding:
        """Return what follows for those that decode; called once, at the start."""
        self._pool = memory.runs
        return OneTableDecoding(self.sequences, memory.runs, block_size=config.block_size, lag=self.lag)

    # The rule

    def schedule(self, batch: Batch) -> int:
        """See `RunningQueue`."""
        if self.decoding.next_finish < self.iteration:
            self.retire()
        budget = self._config.max_num_batched_tokens
        batch.preempted, batch.starved, batch.delayed = [], [], []
        granted: dict[Sequence, int] = {}  # of `sequences`, those before the one whose turn it is
        is_holding = self.interval.is_holding
        while len(granted) < len(self.sequences) and budget > 0:
            sequence = self.sequences[len(granted)]
            if sequence in self.ending or (is_holding and not sequence.decoding):
                granted[sequence] = 0
                continue
            computed = sequence.computed(self.iteration)
            count = 1 if sequence.decoding else self.chunk_size(sequence, budget)
            if not count:
                granted[sequence] = 0
                continue
            self.leave_behind(sequence)
            needed = self.num_needed(sequence, computed, count)
            refund = self._make_room(batch, sequence, needed, granted) if self._blocks.num_free < needed else 0
            if refund is None:
                break
            budget += refund
            if sequence.state == WAITING:  # it was its own victim; by arrival, that is the last one
                if self._goes_on:
                    continue
                break
            num_cacheable = computed + count if self.knows_last(sequence) else computed
            self.grant(sequence, computed + count, needed, num_cacheable=num_cacheable)
            granted[sequence] = count
            budget -= count
        self._describe(batch, granted)
        return budget

    def chunk_size(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a prefill to compute, with vLLM's cuts in vLLM's order."""
        return min(self.cut_to_threshold(sequence.num_known - sequence.num_computed), budget)

    def leave_behind(self, sequence: Sequence) -> None:
        """Free what the next tokens of a running sequence no longer see: nothing, if all layers keep everything."""

    def num_needed(self, sequence: Sequence, computed: int, count: int) -> int:
        """Count the blocks that a running sequence takes for its next tokens."""
        size = self._size
        num_blocks = num_blocks_of(computed, size) if sequence.decoding else sequence.num_blocks
        return max(num_blocks_of(computed + count, size) - num_blocks, 0)

    def knows_last(self, sequence: Sequence) -> bool:
        """Return whether the token that a sequence computes next is known, and not still in flight."""
        return not sequence.decoding or not self.lag or sequence in self.starved

    def grant(self, sequence: Sequence, computed: int, needed: int, *, num_cacheable: int) -> None:
        """See `RunningQueue`."""
        self._pool.allocate(needed)
        if not sequence.decoding:
            sequence.num_computed = computed
            sequence.num_blocks += needed
        self._pool.store(sequence, num_cacheable // self._size)

    def start(self, batch: Batch, sequence: Sequence, count: int, num_padding: int) -> None:
        """See `RunningQueue`."""
        self.sequences.append(sequence)

    def expect_load(self, sequence: Sequence) -> None:
        """See `RunningQueue`: it is found in its queue."""

    def _describe(self, batch: Batch, granted: dict[Sequence, int]) -> None:
        """Record the still running sequences in the batch; a decode without a token is now an iteration later."""
        batch.decodes = []
        for sequence in self.sequences:
            if not sequence.decoding:
                if granted.get(sequence):
                    batch.chunks.append((sequence, granted[sequence]))
            elif sequence not in granted:
                batch.starved.append(sequence)
            else:
                batch.decodes.append(sequence)
                if sequence in self.starved:
                    batch.delayed.append(sequence)
        if batch.starved:
            self.decoding.delay(batch.starved, self.iteration)

    def close(self, batch: Batch, *, is_disturbed: bool) -> Batch:
        """See `RunningQueue`."""
        iteration = self.iteration = self.iteration + 1
        starved = self.starved = batch.starved
        if is_disturbed or batch.chunks or batch.preempted or starved or batch.delayed:
            self.steady = None
        elif self.steady is not None:
            return self.steady
        else:
            batch.is_undisturbed = True
            self.steady = batch
        if self._has_fence:
            self._retention.close(batch)
        batch.num_kv_tokens = self.decoding.context.computed(iteration)
        for sequence in starved:
            batch.num_kv_tokens -= sequence.computed(iteration)
        if batch.chunks:
            batch.sampled = [sequence for sequence, _ in batch.chunks if sequence.num_computed == sequence.num_known]
            for sequence in batch.sampled:  # it decodes from here on
                self.decoding.start(sequence, iteration)
        return batch

    # Preemption

    def preempt(self, sequence: Sequence, *, was_granted: bool, is_dropped: bool) -> None:
        """See `RunningQueue`."""
        self.sequences.remove(sequence)
        sequence.state = WAITING
        self._stop_computing(sequence, was_granted=was_granted, is_dropped=is_dropped)
        self._blocks.release(sequence)
        self._offload.preempt(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self._queues.put_back(sequence)

    def _stop_computing(self, sequence: Sequence, *, was_granted: bool, is_dropped: bool) -> None:
        """Stop the decoding of a preempted sequence; a token in flight is delivered unless it is dropped."""
        is_dropped &= (sequence.decoding or sequence in self.ending) and sequence not in self.starved
        if sequence.decoding:
            sequence.num_known = sequence.known(self.iteration) - int(is_dropped)
            if sequence.last_iteration < self.iteration and not is_dropped:
                self.ending.append(sequence)
            else:
                sequence.last_iteration = NEVER
            self.decoding.stop([sequence], self.iteration, was_granted=was_granted)
            self.steady = None
        elif is_dropped:
            sequence.num_known -= 1
            sequence.last_iteration = NEVER
            self.ending.remove(sequence)
        if is_dropped:
            self.dropped.append(sequence)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        return self._retention.is_in_flight(sequence, self.iteration, self.num_ended)

    def fence(self) -> int:
        """See `RunningQueue`."""
        return self._retention.last_computed(self.iteration)

    # Ends

    def retire(self) -> None:
        """Stop computing sequences whose last token, by length, is in flight."""
        iteration = self.iteration
        ending = [
            s for s in self.sequences if s.last_iteration < iteration and s.decoding and s.num_total == s.num_limit
        ]
        if ending:
            for sequence in ending:
                sequence.num_known = sequence.num_total
            self.decoding.stop(ending, iteration)
            self.ending += ending
            self.steady = None

    def end(self, batch: Batch, num_iterations: int) -> tuple[list[Sequence], list[Sequence]]:
        """See `RunningQueue`."""
        ended = self.num_ended = self.num_ended + num_iterations
        if self._has_fence:
            self._retention.pass_fences(ended)
        finished, dropped, ending = NOBODY, self.dropped, self.ending
        if ending or self.decoding.next_finish < ended:
            finished = [s for s in self.sequences if s.last_iteration < ended]
        if self.lag and (finished or self.starved):
            self._cache_late(finished)
        sampled = [s for s in batch.sampled if s.state != OVER and s not in dropped] if batch.sampled else NOBODY
        if dropped:
            dropped.clear()
        if ending:
            finished = [*finished, *[s for s in ending if s.state == WAITING]]
        return sampled, finished

    def _cache_late(self, finished: list[Sequence]) -> None:
        """Cache the blocks of sequences that have not been scheduled since, which would have cached them."""
        for sequence in [s for s in self.sequences if s in finished or s in self.starved]:
            num_tokens = min(sequence.computed(self.iteration), sequence.num_total - 1)
            self._blocks.store(sequence, num_tokens)

    def leave(self, sequence: Sequence) -> None:
        """See `RunningQueue`."""
        if sequence.state == RUNNING:
            self.sequences.remove(sequence)
            if sequence.decoding:
                self.decoding.stop([sequence], self.iteration)
                self.steady = None
        if sequence in self.ending:
            self.ending.remove(sequence)

    # Counts

    def tokenless(self, batch: Batch) -> list[Sequence]:
        """See `RunningQueue`."""
        chunks = {sequence for sequence, _ in batch.chunks}
        return [s for s in self.sequences if s not in chunks and (not s.decoding or s in batch.starved)]

    def prefilling(self) -> list[Sequence]:
        """See `RunningQueue`."""
        queues = self._queues
        running = [s for s in self.sequences if not (s.decoding or s in self.ending)]
        return [*running, *queues.holding, *queues.given_up]

    def num_offered(self, batch: Batch, sequence: Sequence) -> int:
        """See `RunningQueue`."""
        if not sequence.decoding or sequence in batch.starved:
            return 0
        return sequence.computed(self.iteration) + int(self.knows_last(sequence))

    def num_new_tokens(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        """See `RunningQueue`."""
        chunks = dict(batch.chunks)
        for sequence in self.sequences:
            if sequence in chunks:
                yield sequence, chunks[sequence]
            elif sequence.decoding and sequence not in batch.starved:
                yield sequence, 1

    def num_tokens(self, sequence: Sequence, num_starved: int) -> int:
        """See `RunningQueue`."""
        if sequence in self.ending:
            return sequence.num_total - 1
        if not sequence.decoding:
            return sequence.num_known
        return max(sequence.known(self.num_ended) + num_starved, sequence.num_known)

    def has_prefilled(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        return sequence.decoding or sequence in self.ending

    def is_ending(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        return sequence in self.ending

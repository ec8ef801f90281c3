"""The sequences that run, counted: where a decode may get several tokens in an iteration, or none for a while.

Three things are counted for each sequence; `num_known` and `num_computed` move with every batch, and `decoding` stays False:

    num_known        tokens that are known                                      + 1 + accepted drafts, when a batch ends
    num_computed     tokens computed by all batches that are scheduled          + own token + drafts, when scheduled
                                                                                - rejected drafts, when the batch ends
    placeholders     asynchronous: tokens that batches in flight may bring      + 1 + drafts, when scheduled
                                                                                - all these, when the batch ends

    what a sequence needs in an iteration = num_known + placeholders + drafts that are there - num_computed

That is the rest of its prompt while it is prefilled; 1 + drafts when it decodes; and 0 where its next token follows from
one that a batch in flight still computes.
"""

from collections import deque
from collections.abc import Iterator

from mocker.batch import Batch
from mocker.position import NEVER
from mocker.sequence import OVER, RUNNING, WAITING, Sequence
from mocker.speculation.drafter import Drafter
from mocker.vllm.config import EngineConfig
from mocker.vllm.encoder import Encoder
from mocker.vllm.memory import Memory
from mocker.vllm.queues import Queues
from mocker.vllm.running_queue import RunningQueue
from mocker.vllm.speculation import Speculation


class Counts:
    """What is counted of a sequence beside its known and computed tokens."""

    __slots__ = (
        "eligible_from",
        "is_dropped",
        "is_partial",
        "is_starved",
        "last_step",
        "num_drafts",
        "num_in_flight",
        "num_placeholders",
        "num_stale",
    )

    def __init__(self) -> None:
        self.is_partial = True
        """Whether its last batch left a part of its prompt to compute."""
        self.num_drafts = 0
        """Drafts for its next batch."""
        self.num_placeholders = 0
        """Tokens that batches in flight may bring."""
        self.num_in_flight = 0
        """Tokens that batches in flight compute."""
        self.num_stale = 0
        """Those of them that were scheduled before it was preempted: they change no counts, but bring tokens."""
        self.is_dropped = False
        """Whether the stale ones do not even bring tokens."""
        self.is_starved = False
        """Whether the last batch had no budget for its next token."""
        self.eligible_from = 0
        """The call of `schedule` from which on its next token may be computed."""
        self.last_step = 0
        """The number of the last batch with tokens of it, among those that compute something."""


class Flight:
    """A batch in flight: the tokens of each sequence in vLLM's order, and whose prompts it leaves unfinished."""

    __slots__ = ("partial", "tokens")

    def __init__(self, tokens: dict[Sequence, int]) -> None:
        self.tokens = tokens
        self.partial: set[Sequence] = set()


class CountedRunning(RunningQueue):
    """The running sequences, each with its counts."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        queues: Queues,
        drafter: Drafter | None,
        encoder: Encoder | None,
        *,
        num_stages: int,
    ) -> None:
        """Start with nobody; `drafter` answers for drafts, and `encoder` is there if prompts may have media.

        Raises:
            ValueError: there is speculation, and no drafter.
        """
        super().__init__(config, memory, queues)
        self._speculation = speculation = Speculation(config)
        if speculation.num_drafts and drafter is None:
            raise ValueError(
                f"num_speculative_tokens is {speculation.num_drafts}; expected a drafter to answer for them"
            )
        self.drains = True
        self._drafter = drafter if speculation.num_drafts else None
        self._encoder = encoder
        self._is_async = config.is_async
        self._caches_accepted = config.rules.caches_accepted
        self._named_ahead = memory.num_named_ahead
        self._drops_output = config.is_kv_producer
        self._limit = NEVER if config.max_model_len is None else config.max_model_len
        self._stagger = num_stages  # calls from a token of a sequence to its next, if asynchronous
        self._counts: dict[Sequence, Counts] = {}
        self._partial: dict[Sequence, None] = {}  # prompts that are loaded, or computed
        self._flights: deque[Flight] = deque()
        self._tokens: dict[Sequence, int] = {}  # of the batch that is being scheduled
        self._has_partial = False  # in it: a running sequence whose batch before left a part of its prompt
        self._has_tokens = False  # in it: a running sequence with tokens
        self._num_calls = 0
        self._num_steps = self._num_known_steps = 0  # batches that compute something: scheduled, and known

    # The rule

    def schedule(self, batch: Batch) -> int:
        """See `RunningQueue`."""
        self._num_calls += 1
        self._has_partial = False
        batch.preempted, batch.starved, batch.delayed, batch.drafts = [], [], [], {}
        budget = self._config.max_num_batched_tokens - self._num_slots
        granted: dict[Sequence, int] = {}  # of `sequences`, those before the one whose turn it is
        is_holding = self.interval.is_holding
        sequences, encoder = self.sequences, self._encoder
        if encoder is not None:
            encoder.begin_step()
        while len(granted) < len(sequences) and budget > 0:
            sequence = sequences[len(granted)]
            counts = self._counts[sequence]
            count = 0 if is_holding and counts.is_partial else self._num_next(sequence, counts, budget)
            if encoder is not None and count and sequence.media:
                count = encoder.cut(sequence, sequence.num_computed, count)
            if not count:
                granted[sequence] = 0
                continue
            computed = sequence.num_computed + count
            self._blocks.skip(sequence, sequence.num_computed - counts.num_in_flight + counts.num_stale)
            needed = self._blocks.num_needed(sequence, sequence.num_computed, count)
            if needed > 0 and self._blocks.num_free < needed:
                refund = self._make_room(batch, sequence, needed, granted)
                if refund is None:
                    break
                budget += refund
                if sequence.state == WAITING:  # it was its own victim; by arrival, that is the last one
                    if self._goes_on:
                        continue
                    break
            self._has_partial |= counts.is_partial
            num_drafts = computed - sequence.num_known - counts.num_placeholders
            if num_drafts > 0:
                batch.drafts[sequence] = num_drafts
            counts.num_drafts = 0
            self.grant(sequence, computed, needed, num_cacheable=min(computed, sequence.num_known))
            if encoder is not None and sequence.media:
                encoder.take(sequence)
            granted[sequence] = count
            budget -= count + self._num_slots
        for victim in batch.preempted:
            batch.drafts.pop(victim, None)
        self._describe(batch, granted)
        self._has_tokens = bool(self._tokens)
        return budget

    def _num_next(self, sequence: Sequence, counts: Counts, budget: int) -> int:
        """Count the tokens of a sequence in this iteration, with vLLM's cuts in vLLM's order."""
        placeholders, computed = counts.num_placeholders, sequence.num_computed
        if self._num_calls < counts.eligible_from or (placeholders and self._has_last_in_flight(sequence, counts)):
            return 0
        count = sequence.num_known + counts.num_drafts + placeholders - computed
        if count > 1:
            count = self.cut_to_threshold(count)
        return self._blocks.cut(sequence, computed, min(count, budget, self._limit - computed - 1))

    def _has_last_in_flight(self, sequence: Sequence, counts: Counts) -> bool:
        """Return whether a batch in flight brings the last token by length, even if all drafts in flight are rejected."""
        placeholders = counts.num_placeholders
        least = sequence.num_computed + 2 - placeholders
        return placeholders > 0 and least >= sequence.num_prompt + sequence.max_tokens

    def grant(self, sequence: Sequence, computed: int, needed: int, *, num_cacheable: int) -> None:
        """See `RunningQueue`."""
        self._blocks.grow(sequence, computed, needed)
        sequence.num_computed = computed
        self._cache(sequence, num_cacheable)

    def _cache(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the blocks of this many tokens, as far as they can be named."""
        self._blocks.store(sequence, min(num_tokens, sequence.num_known - self._named_ahead))

    def num_padding(self, batch: Batch, num_computed: int) -> int:
        """See `RunningQueue`."""
        num_drafts = self._speculation.num_drafts
        has_company = num_computed > 0 or self._has_tokens
        fits = num_computed + num_drafts + 2 <= self._limit
        return num_drafts if has_company and fits and not self._has_partial else 0

    def start(self, batch: Batch, sequence: Sequence, count: int, num_padding: int) -> None:
        """See `RunningQueue`."""
        self.sequences.append(sequence)
        self._counts.setdefault(sequence, Counts()).is_partial = True
        self._tokens[sequence] = count
        if num_padding:
            batch.drafts[sequence] = num_padding
        if sequence.num_computed < sequence.num_known:
            self._partial[sequence] = None

    def expect_load(self, sequence: Sequence) -> None:
        """See `RunningQueue`."""
        self._partial[sequence] = None

    def _describe(self, batch: Batch, granted: dict[Sequence, int]) -> None:
        """Record the still running sequences in the batch."""
        batch.decodes = []
        self._tokens = {}
        for sequence in self.sequences:
            counts, count = self._counts[sequence], granted.get(sequence, 0)
            if count:
                self._tokens[sequence] = count
                if counts.is_partial:
                    batch.chunks.append((sequence, count))
                    continue
                batch.decodes.append(sequence)
                if counts.is_starved:
                    batch.delayed.append(sequence)
            elif sequence not in granted and not counts.is_partial and self._num_next(sequence, counts, NEVER):
                batch.starved.append(sequence)

    def close(self, batch: Batch, *, is_disturbed: bool) -> Batch:
        """See `RunningQueue`."""
        self.iteration += 1
        flight, self._tokens = Flight(self._tokens), {}
        self._flights.append(flight)
        if flight.tokens:
            self._num_steps += 1
        batch.num_kv_tokens = sum([sequence.num_computed for sequence in batch.decodes])
        batch.num_encoder_tokens = 0 if self._encoder is None else self._encoder.end_step()
        for sequence in batch.delayed:
            self._counts[sequence].is_starved = False
        for sequence in batch.starved:
            self._counts[sequence].is_starved = True
        for sequence, count in flight.tokens.items():
            counts = self._counts[sequence]
            counts.num_in_flight += count
            counts.last_step = self._num_steps
            if sequence.num_computed < sequence.num_known + counts.num_placeholders:
                flight.partial.add(sequence)
            else:
                self._await_token(sequence, counts, batch.drafts.get(sequence, 0))
        if batch.chunks:
            batch.sampled = [sequence for sequence, _ in batch.chunks if sequence not in flight.partial]
        return batch

    def _await_token(self, sequence: Sequence, counts: Counts, num_drafts: int) -> None:
        """Count what a batch that was scheduled may bring a sequence whose prompt it, or one before it, completes."""
        if counts.is_partial:
            counts.is_partial = False
            self._partial.pop(sequence, None)
        if self._is_async:
            counts.num_placeholders += 1 + num_drafts
            counts.num_drafts = self._speculation.num_drafts
            counts.eligible_from = self._num_calls + self._stagger

    # Preemption

    def preempt(self, sequence: Sequence, *, was_granted: bool, is_dropped: bool) -> None:
        """See `RunningQueue`."""
        self.sequences.remove(sequence)
        sequence.state = WAITING
        self._blocks.release(sequence)
        self._offload.preempt(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self._partial.pop(sequence, None)
        if self._encoder is not None:
            self._encoder.take_back(sequence)
        counts = self._counts[sequence]
        counts.is_dropped = is_dropped or (counts.is_dropped and counts.num_stale > 0)
        counts.num_stale = counts.num_in_flight
        counts.num_placeholders = counts.num_drafts = 0
        counts.is_starved = False
        if counts.is_dropped and counts.num_stale and sequence not in self.dropped:
            self.dropped.append(sequence)
        self._queues.put_back(sequence)

    def is_draining(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        counts = self._counts.get(sequence)
        return counts is not None and counts.num_stale > 0 and not counts.is_dropped

    def is_in_flight(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        counts = self._counts.get(sequence)
        return counts is not None and counts.last_step > self._num_known_steps

    def fence(self) -> int:
        """See `RunningQueue`."""
        return self._num_steps - 1

    # Ends

    def end(self, batch: Batch, num_iterations: int) -> tuple[list[Sequence], list[Sequence]]:
        """See `RunningQueue`."""
        assert num_iterations == 1, "each iteration has to be scheduled"
        self.num_ended += 1
        flight = self._flights.popleft()
        if flight.tokens:
            self._num_known_steps += 1
        if self._has_fence:
            self._retention.pass_fences(self._num_known_steps)
        padded = {sequence for sequence, _ in batch.chunks}
        sampled, finished = [], []
        batch.emitted = []
        for sequence, count in flight.tokens.items():
            if sequence.state == OVER:
                continue
            counts = self._counts[sequence]
            counts.num_in_flight -= count
            is_stale = counts.num_stale > 0
            if is_stale:
                self._drain(sequence, counts, count)
            if is_stale and counts.is_dropped:
                continue
            is_partial = sequence in flight.partial
            num_drafts = 0 if is_partial else batch.drafts.get(sequence, 0)
            num_accepted = self._num_accepted(sequence, num_drafts) if num_drafts and sequence not in padded else 0
            if self._encoder is not None and sequence.media:
                # Rejected drafts of an asynchronous step are among the placeholders.
                num_rejected = 0 if is_stale or self._is_async else num_drafts - num_accepted
                self._encoder.pass_by(sequence, sequence.num_computed - counts.num_placeholders - num_rejected)
            if is_partial:
                continue
            num_emitted = min(1 + num_accepted, sequence.num_total - sequence.num_known)
            sequence.num_known += num_emitted
            if not is_stale:
                num_lost = num_drafts - num_accepted
                if self._caches_accepted:  # what comes after a stop does not count as computed, either
                    num_lost = num_drafts + 1 - num_emitted
                self._settle(sequence, counts, num_lost, num_emitted)
            if sequence in padded:
                sampled.append(sequence)
            else:
                batch.emitted.append((sequence, num_emitted))
            if sequence.num_known == sequence.num_total:
                finished.append(sequence)
                if self._encoder is not None:
                    self._encoder.release(sequence)
        return sampled, finished

    def _drain(self, sequence: Sequence, counts: Counts, count: int) -> None:
        """Take tokens out of flight that were scheduled before the sequence was preempted."""
        counts.num_stale -= count
        if not counts.num_stale and sequence in self.dropped:
            self.dropped.remove(sequence)

    def _num_accepted(self, sequence: Sequence, num_drafts: int) -> int:
        assert self._drafter is not None
        return self._drafter.accepted(sequence, num_drafts)

    def _settle(self, sequence: Sequence, counts: Counts, num_lost: int, num_emitted: int) -> None:
        """Count what a batch brought a sequence, and lost, and ask for its next drafts."""
        sequence.num_computed -= num_lost
        if self._is_async:
            counts.num_placeholders -= num_lost + num_emitted
        if self._caches_accepted and (self._is_async or self._drafter is not None):
            self._cache(sequence, sequence.num_computed - counts.num_in_flight)
        elif self._is_async:
            self._cache(sequence, sequence.num_computed - counts.num_placeholders)
        if self._is_async:
            return
        if self._drafter is not None and sequence.num_known < sequence.num_total:
            counts.num_drafts = self._drafter.proposed(sequence)

    def leave(self, sequence: Sequence) -> None:
        """See `RunningQueue`."""
        if sequence.state == RUNNING:
            self.sequences.remove(sequence)
        if sequence in self.dropped:
            self.dropped.remove(sequence)
        self._partial.pop(sequence, None)
        self._counts.pop(sequence, None)
        if self._encoder is not None:
            self._encoder.release(sequence)

    # Counts

    def tokenless(self, batch: Batch) -> list[Sequence]:
        """See `RunningQueue`."""
        return [sequence for sequence in self.sequences if sequence not in self._tokens]

    def prefilling(self) -> list[Sequence]:
        """See `RunningQueue`."""
        return list(self._partial)

    def num_offered(self, batch: Batch, sequence: Sequence) -> int:
        """See `RunningQueue`."""
        return min(sequence.num_computed, sequence.num_known) if sequence in self._tokens else 0

    def num_new_tokens(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        """See `RunningQueue`."""
        yield from self._flights[-1].tokens.items()

    def num_tokens(self, sequence: Sequence, num_starved: int) -> int:
        """See `RunningQueue`."""
        return sequence.num_known

    def has_prefilled(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        counts = self._counts.get(sequence)
        return sequence.state == RUNNING and counts is not None and not counts.is_partial

    def is_ending(self, sequence: Sequence) -> bool:
        """See `RunningQueue`."""
        counts = self._counts.get(sequence)
        return counts is not None and self._has_last_in_flight(sequence, counts)

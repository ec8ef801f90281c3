"""The log of gaps between tokens, and which sequences wait for their next token.

A sequence that decodes has a token in each iteration, so the iterations of a batch are the gaps of all its decodes. One
that is left out waits, and has a gap of its own when its next token comes:

    decodes in each iteration                        `add`: a row for many gaps
    preempted, starved, paused, or its token drops   `begin_waits` ... `end_wait`: a row for each end, or for one gap
    moved from another engine                        the same, and it began to wait there
"""

from array import array
from collections.abc import Iterable

from mocker.batch import Batch
from mocker.core import Core
from mocker.sequence import Sequence
from mocker.step import Step
from mocker.timing.model import Ramp


class GapLog:
    """Durations of the gaps between tokens, kept as one row for each run of a batch's iterations, not for each token.

    A row is (first, slope, curve, number of iterations, tokens in each): gap j lasts `first + slope*j + curve*j*j` s.
    """

    def __init__(self, core: Core) -> None:
        self.rows = array("d")
        self.starts_s = array("d")
        """When the first gap of each row began."""
        self.is_first_after_pause = False
        """Whether the step in flight is the first one after a pause."""
        self.has_sudden_end = False
        """Whether a sequence that is still in the step in flight, or in the batch ahead, has ended: no token comes."""
        self._core = core
        self._ramp: Ramp | None = None  # of the last row, if the next step may continue it

    def begin_batch(self, batch: Batch, closed_s: float, last_end_s: float) -> None:
        """Record when sequences were admitted, and since when preempted and starved ones wait: the end of the last step."""
        for sequence in batch.admitted:
            sequence.first_scheduled_s = closed_s
            if sequence.is_token_shipped:
                if sequence.first_token_s < 0:
                    sequence.first_token_s = closed_s
                else:  # it continues an answer that another engine started
                    self.end_wait(sequence, closed_s)
                sequence.waited_since_s = closed_s
        if batch.preempted or batch.starved:
            self.begin_waits((*batch.preempted, *batch.starved), last_end_s)

    def end_pause(self, batch: Batch, last_end_s: float) -> None:
        """Record that the decodes of the first batch after a pause have waited since the last step."""
        self.is_first_after_pause = True
        self.begin_waits(batch.decodes, last_end_s)

    def add(self, step: Step, num_iterations: int) -> None:
        """Log the tokens of the decodes in the first iterations of a step."""
        batch, core = step.batch, self._core
        num_tokens = len(batch.decodes)
        if self.has_sudden_end or core.dropped:
            num_tokens = sum([core.is_delivered(sequence) for sequence in batch.decodes])
        if late := batch.decodes if self.is_first_after_pause else batch.delayed:
            delivered = [sequence for sequence in late if core.is_delivered(sequence)]
            num_tokens -= len(delivered)
            self._end_waits(delivered, step.end)
        if not num_tokens:
            return
        if step.ramp is self._ramp and self.rows[-1] == num_tokens:
            self.rows[-2] += num_iterations  # the same batch continues
        else:
            self.rows.extend(step.row(num_iterations, num_tokens))
            self.starts_s.append(step.start)
            self._ramp = step.ramp

    def end_step(self, end: float, sampled: list[Sequence], finished: list[Sequence]) -> None:
        """Record the tokens of sequences that ended their prefill, and which sequences ended without warning."""
        for sequence in sampled:
            if sequence.first_token_s < 0:
                sequence.first_token_s = end
            elif sequence.waited_since_s >= 0:
                self.end_wait(sequence, end)
        for sequence in finished:
            if sequence.stop_after is not None:
                self.has_sudden_end = True

    def begin_waits(self, sequences: Iterable[Sequence], since_s: float) -> None:
        """Record that these sequences had their last token then, unless they had none or wait already."""
        for sequence in sequences:
            if sequence.first_token_s >= 0 and sequence.waited_since_s < 0:
                sequence.waited_since_s = since_s

    def end_wait(self, sequence: Sequence, now: float) -> None:
        """Log the gap of a sequence that has its next token."""
        self.add_gap(sequence.waited_since_s, now)
        sequence.waited_since_s = -1.0

    def _end_waits(self, sequences: list[Sequence], now: float) -> None:
        """Log the gaps of sequences that have their next token together: a row for those that began together, too."""
        counts: dict[float, int] = {}
        for sequence in sequences:
            since_s = sequence.waited_since_s
            counts[since_s] = counts.get(since_s, 0) + 1
            sequence.waited_since_s = -1.0
        for since_s, count in counts.items():
            self._add_gaps(since_s, now, count)

    def add_gap(self, since_s: float, until_s: float) -> None:
        """Log one gap by itself: it spans preemption, starvation, a pause or a move to another engine."""
        self._add_gaps(since_s, until_s, 1)

    def _add_gaps(self, since_s: float, until_s: float, count: int) -> None:
        self.split()
        self.rows.extend((until_s - since_s, 0.0, 0.0, 1, count))
        self.starts_s.append(since_s)

    def split(self) -> None:
        """Begin a new row with the next step."""
        self._ramp = None

    def take(self) -> "array[float]":
        """Return the rows so far, and begin a new log."""
        self.split()
        rows, self.rows, self.starts_s = self.rows, array("d"), array("d")
        return rows


class CountedGapLog(GapLog):
    """The log of an engine whose steps may bring a sequence several tokens: each waits for its next ones all the time."""

    def add(self, step: Step, num_iterations: int) -> None:
        """Nothing yet: what a step brings is known when it ends."""

    def end_step(self, end: float, sampled: list[Sequence], finished: list[Sequence]) -> None:
        """Record the first tokens of sequences, and the gaps of those that had been preempted."""
        for sequence in sampled:
            if sequence.first_token_s < 0:
                sequence.first_token_s = end
            else:
                self.add_gap(sequence.waited_since_s, end)
            sequence.waited_since_s = end

    def add_emitted(self, end: float, emitted: list[tuple[Sequence, int]]) -> None:
        """Log the tokens of decodes: a gap before k tokens counts as k gaps of gap / k."""
        counts: dict[tuple[float, int], int] = {}
        for sequence, num_tokens in emitted:
            key = (sequence.waited_since_s, num_tokens)
            counts[key] = counts.get(key, 0) + 1
            sequence.waited_since_s = end
        for (since_s, num_tokens), count in counts.items():
            self.rows.extend(((end - since_s) / num_tokens, 0.0, 0.0, 1, num_tokens * count))
            self.starts_s.append(since_s)

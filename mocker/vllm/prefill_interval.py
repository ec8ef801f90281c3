"""A distance between steps that compute prompts, so that those that decode get tokens in quick steps between them.

    step        P   d   d   P   d   d   P ...        `prefill_schedule_interval` 3: between two P, steps hold prompts back
    held back   their chunks, and who waits with more than one token left; loads from elsewhere start as usual

No step holds if nobody decodes, or if room was short in the last one that did not: somebody was left waiting who has never
been passed over for another reason (`is_bound`), such as a load, a copy or an adapter without a seat.
"""

from mocker.batch import Batch
from mocker.sequence import Sequence
from mocker.vllm.queues import Queues


class PrefillInterval:
    """Decides which steps hold prefills. Without a distance, none does."""

    def __init__(self, num_steps: int) -> None:
        self.is_on = num_steps > 1
        self.is_holding = False
        """Whether the step that is being scheduled holds."""
        self.is_bound = False
        """Whether somebody was left waiting, though nothing was held."""
        self.took_prefill = False
        """Whether a chunk of this step was taken back, because its sequence was preempted."""
        self._num_steps = num_steps
        self._passed_over: set[Sequence] = set()
        self._last = -num_steps  # steps up to the last that carried a prefill, that one included
        self._num_empty = 0

    def begin(self, iteration: int, *, has_decodes: bool) -> None:
        """Decide about a step; `has_decodes` says if some running sequence has computed its prompt."""
        num_executed = iteration - self._num_empty
        self.took_prefill = False
        self.is_holding = has_decodes and not self.is_bound and num_executed + 1 - self._last < self._num_steps

    def pass_over(self, sequence: Sequence) -> None:
        """Note a waiting sequence whose turn came, and that could not start though there was room; or its load did."""
        self._passed_over.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence does not wait any more."""
        self._passed_over.discard(sequence)

    def end_step(self, batch: Batch, queues: Queues, *, is_closed: bool) -> None:
        """Note who was left waiting, if those that wait had their turns, and what the step carries, if it will be closed."""
        if not (self.is_holding or batch.preempted):
            everybody = (*queues.waiting, *queues.fetching, *queues.holding)
            self.is_bound = any(sequence not in self._passed_over for sequence in everybody)

        if is_closed:
            self._note(batch)

    def _note(self, batch: Batch) -> None:
        if batch.is_empty:
            self._num_empty += 1
        elif self.took_prefill or any(self._is_prefill(batch, place) for place in range(len(batch.chunks))):
            self._last = batch.iteration - self._num_empty + 1

    def _is_prefill(self, batch: Batch, place: int) -> bool:
        """Return whether a chunk is of a running sequence, or had more than one token to go when it was admitted."""
        sequence, count = batch.chunks[place]
        is_new = sequence in batch.admitted or sequence in batch.resumed
        return not is_new or sequence.num_computed - count < sequence.num_known - 1

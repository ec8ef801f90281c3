"""A distance between steps that compute prompts, so that those that decode get tokens in quick steps between them.

    step        P   d   d   P   d   d   P ...        `prefill_schedule_interval` 3: between two P, steps hold prompts back
    held back   their chunks, and who waits with more than one token left; loads from elsewhere start as usual

No step holds if nobody decodes, or if room was short in the last one that did not: somebody was left waiting (`is_bound`).
"""

from mocker.batch import Batch
from mocker.sequence import LOADED, LOADING
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
        self._last = -num_steps  # steps up to the last that carried a prefill, that one included
        self._num_empty = 0

    def begin(self, iteration: int, *, has_decodes: bool) -> None:
        """Decide about a step; `has_decodes` says if some running sequence has computed its prompt."""
        num_executed = iteration - self._num_empty
        self.took_prefill = False
        self.is_holding = has_decodes and not self.is_bound and num_executed + 1 - self._last < self._num_steps

    def end_scan(self, queues: Queues) -> None:
        """Note who was left waiting; call it only if those that wait had their turns."""
        if not self.is_holding:
            self.is_bound = bool(
                queues.waiting or queues.fetching or any(s.state not in (LOADING, LOADED) for s in queues.holding)
            )

    def end(self, batch: Batch) -> None:
        """Note what a step carries, before it is closed."""
        if batch.is_empty:
            self._num_empty += 1
        elif self.took_prefill or any(self._is_prefill(batch, place) for place in range(len(batch.chunks))):
            self._last = batch.iteration - self._num_empty + 1

    def _is_prefill(self, batch: Batch, place: int) -> bool:
        """Return whether a chunk is of a running sequence, or had more than one token to go when it was admitted."""
        sequence, count = batch.chunks[place]
        is_new = sequence in batch.admitted or sequence in batch.resumed
        return not is_new or sequence.num_computed - count < sequence.num_known - 1

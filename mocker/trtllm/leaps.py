"""Iterations of a batch in which each request generates, repeated without asking the rule, one or many at once.

A step is steady if it computes no prompt, pauses nobody, those in it are all that have started and all that passed the
capacity scheduler, and with overlap no prompt of the step before is still to be stored. Then the rule gives the same step
again until one of its requests ends, blocks run out, or something comes from outside. Who waits goes on waiting:

    for blocks    what is free beside what the others may need (GUARANTEED_NO_EVICT) stays, or less is free each time
                  (MAX_UTILIZATION). What a prompt needs never falls, since blocks are stored only when a request leaves or
                  completes its prompt, and cached ones may be evicted.
    for a seat    nobody leaves
"""

from mocker.position import num_within
from mocker.trtllm.rank import RankStep
from mocker.trtllm.request import GENERATING, Request
from mocker.trtllm.scheduler import Scheduler


class Leaps:
    """Decides whether and how often a step may be repeated, and does it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.ranks[0].pool
        self._size = scheduler.settings.tokens_per_block
        self._has_overlap = scheduler.settings.has_overlap
        self._requests: list[Request] = []

    def begin(self, step: RankStep, num_started: int) -> bool:
        """Return whether a step is steady, when so many requests have started."""
        settled = self._scheduler.settled_step(0)
        if step.passed.inits:  # once their KV is on its way, they no longer count
            return False
        if step.chunks or step.is_held or step.passed.paused or (settled is not None and settled.chunks):
            return False
        self._requests = step.batch.generating
        return num_started == len(self._requests) == len(step.passed.requests)

    def is_steady(self) -> bool:
        """Return whether the step goes on: none of its requests has ended, or has its last token in flight."""
        return sum([request.state == GENERATING for request in self._requests]) == len(self._requests)

    def may_repeat(self) -> bool:
        """Return whether the blocks suffice for one more iteration."""
        free = self._pool.num_free
        return len(self._requests) <= free or self._num_taken(1) <= free

    def num_iterations(self, limit: int) -> int:
        """Return how many iterations the step in flight may span."""
        count = min(limit, self._num_until_end())
        if count <= 1:
            return 1
        free = self._pool.num_free
        if len(self._requests) * ((count - 1) // self._size + 1) <= free:
            return count
        return 1 + num_within(self._num_taken, free, count - 1)

    def _num_until_end(self) -> int:
        """Count the iterations, from the one in flight on, of which none but the last can end a request.

        With overlap, one that ends by length is left out of the iteration after its last, which is scheduled before.
        """
        requests = self._requests
        return min(
            min([request.num_left - request.num_outputs for request in requests]) - self._has_overlap,
            min([request.last_output - request.num_outputs for request in requests]),
        )

    def _num_taken(self, num_iterations: int) -> int:
        """Count the blocks that the next iterations take."""
        size = self._size
        return sum([(r.slots + num_iterations - 1) // size - (r.slots - 1) // size for r in self._requests])

    def may_evict(self, num_iterations: int) -> bool:
        """Return whether the next iterations might evict a cached block."""
        count = self._num_taken(num_iterations)
        return count > 0 and self._pool.may_evict(count)

    def end(self, num_iterations: int) -> None:
        """Record that iterations have brought a token for each request."""
        for request in self._requests:
            request.num_outputs += num_iterations

"""Many iterations of a batch in which each request decodes, taken as one.

iteration    first ................. stop         nothing but tokens and pages in between, since
               |                       |
               nobody can be admitted  the next request ends, or pages run out, or a limit of the driver

Nobody can be admitted while nobody waits, or while the running batch is full: only a request that leaves opens it again.
"""

from mocker.sglang.request import Request
from mocker.sglang.scheduler import Scheduler


class Leaps:
    """Decides how far a leap may go, and takes it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lag = int(scheduler.config.is_async)

    def num_iterations(self, limit: int) -> int:
        """Return how many iterations the batch in flight, which was the last to be scheduled, may span."""
        scheduler = self._scheduler
        requests = scheduler.running.requests
        if limit <= 1 or not requests or not scheduler.is_closed:
            return 1
        if scheduler.inbox.requests:
            limit = min(limit, scheduler.inbox.num_until_open)
        count = min(limit, min([self._num_until_end(request) for request in requests]))
        return 1 + scheduler.pool.num_decodes(requests, count - 1) if count > 1 else 1

    def _num_until_end(self, request: Request) -> int:
        """Return how many iterations a request goes on; one that ends by length is left out of the batch after its last."""
        num_left = request.max_new - self._lag
        if request.stop_after is not None and not request.ignores_eos:
            num_left = min(num_left, request.stop_after)
        return num_left - request.generated

    def may_evict(self, num_iterations: int) -> bool:
        """Return whether this many more iterations might evict something cached."""
        pool, num_requests = self._scheduler.pool, len(self._scheduler.running.requests)
        most = num_requests * (num_iterations // pool.page_size + 2)
        return pool.tree.num_evictable > 0 and most > pool.num_free

    def take(self, num_iterations: int) -> None:
        """Schedule the last batch for this many more iterations."""
        self._scheduler.decode_again(num_iterations)

"""Attention DP: which rank takes which request, as SGLang's data-parallel controller decides.

The controller counts what it sends. Now and then, each rank reports what it has, and that takes the place of the count.

Source: SGLang 0.5.23, `srt/managers/data_parallel_controller.py` (`DPBudget`, `DataParallelController`) and
`Scheduler.publish_load_snapshot`. Nothing of it is recorded.
"""

from typing import Final

from mocker.sglang.config import LoadBalanceMethod
from mocker.sglang.scheduler import Scheduler

PUBLISH_INTERVAL: Final = 15
"""Steps without prompts of its own after which a rank reports its load (`load_snapshot_publish_interval`)."""


class Controller:
    """Deals requests out to ranks."""

    def __init__(self, method: LoadBalanceMethod, schedulers: list[Scheduler]) -> None:
        self._method = method
        self._schedulers = schedulers
        self._next = 0
        self._num_requests = [0 for _ in schedulers]
        self._num_tokens = [0 for _ in schedulers]
        self._num_steps = [0 for _ in schedulers]  # since each rank reported its load

    def pick(self, num_prompt: int) -> int:
        """Return the rank for a request, and count it there."""
        ranks = range(len(self._schedulers))
        if self._method == "total_requests":
            rank = min(ranks, key=self._num_requests.__getitem__)
        elif self._method == "total_tokens":
            rank = min([(self._num_tokens[each], self._num_requests[each], each) for each in ranks])[2]
            self._num_tokens[rank] += num_prompt
        else:
            rank = self._next
            self._next = (rank + 1) % len(self._schedulers)
        self._num_requests[rank] += 1
        return rank

    def end_step(self, rank: int, *, has_prompts: bool) -> None:
        """Let a rank report its load, if it does so at the end of this step of its own."""
        self._num_steps[rank] += 1
        if has_prompts or self._num_steps[rank] >= PUBLISH_INTERVAL:
            self.report_load(rank)

    def report_load(self, rank: int) -> None:
        """Let a rank report its load: what runs and waits, the KV in use and the prompts that wait."""
        scheduler = self._schedulers[rank]
        pool, waiting = scheduler.pool, scheduler.waiting
        self._num_steps[rank] = 0
        self._num_requests[rank] = len(scheduler.running.requests) + len(waiting)
        self._num_tokens[rank] = pool.num_tokens - pool.available + sum([request.known for request in waiting])

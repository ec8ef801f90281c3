"""When requests arrive, and when they reach the router."""

import math
from collections.abc import Callable
from functools import partial

from dynabench.deployment.overhead import Overhead
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.counter import Counter
from reports.record.records import RequestLog
from workloads import Workload
from workloads.pacer import Pacer
from workloads.pacing import LoadConfig


class Arrivals:
    """The clients of a workload, and the way from them to the router."""

    def __init__(
        self,
        workload: Workload,
        load: LoadConfig,
        overhead: Overhead,
        clock: Clock,
        log: RequestLog,
    ) -> None:
        self.begin: Callable[[int], object] | None = None
        """Called with the number of each request that reaches the router."""
        self.counter: Counter | None = None
        """Counts requests for a planner, if there is one."""
        self.delays_s = 0.0
        """Total delay of all requests between their clients and the router."""
        self.waits_for_answers = load.is_closed or load.max_concurrency is not None or workload.has_dependencies
        """Whether the end of a request may let others arrive."""
        self._notes_sent = load.max_concurrency is not None  # otherwise requests are sent when they are meant to be
        self._columns = workload.columns
        self._pacer = Pacer(workload, load)  # decides who arrives when
        self._overhead = overhead
        self._has_way = any((overhead.request_s, overhead.prompt_token_s, overhead.spacing_s))
        self._clock = clock
        self._log = log
        self._turn_s = -math.inf  # when the frontend handled the last request
        self._awaited_s = -1.0  # time of the scheduled arrival event

    def await_next(self) -> None:
        """Schedule the next possible arrival, unless one is already scheduled."""
        next_s = self._pacer.next_s()
        if next_s is not None and not self._clock.now <= self._awaited_s <= next_s:
            self._awaited_s = next_s = max(next_s, self._clock.now)
            self._clock.at(next_s, ARRIVAL, self._arrive)

    def on_end(self, number: int, delay_s: float) -> None:
        """Note that a request has ended, before `await_next`; its client learns of that after a delay."""
        if delay_s and self.waits_for_answers:
            self._clock.at(self._clock.now + delay_s, ARRIVAL, partial(self._learn_of_end, number))
        else:
            self._pacer.on_end(number, self._clock.now)

    def _learn_of_end(self, number: int) -> None:
        self._pacer.on_end(number, self._clock.now)
        self.await_next()

    def _arrive(self) -> None:
        now, begin = self._clock.now, self.begin
        assert begin is not None
        self._awaited_s = -1.0
        for number, intended in self._pacer.due(now):
            self._log.intended_s[number] = intended
            if self._notes_sent:
                self._log.sent_s[number] = now
            if self.counter is not None:
                self.counter.on_arrival(self._columns.lengths(number)[0])
            passed = self._passed_on(number, now) if self._has_way else now
            if passed > now:
                self.delays_s += passed - now
                self._clock.at(passed, ARRIVAL, partial(begin, number))
            else:
                begin(number)
        self.await_next()

    def _passed_on(self, number: int, now: float) -> float:
        """Return when a request that arrives now reaches the router (s)."""
        overhead = self._overhead
        turn = self._turn_s = max(now, self._turn_s + overhead.spacing_s)
        return turn + overhead.before(self._columns.lengths(number)[0])

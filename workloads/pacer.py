"""When each request may be sent: the schedule, the answers it waits for, and limits on requests in flight.

A plain state machine for both clocks: `due` returns what may be sent now, and `on_end` reports what ended.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from workloads.pacing import LoadConfig
from workloads.workload import Workload


class Pacer:
    """Hands out requests at their times."""

    def __init__(self, workload: Workload, config: LoadConfig) -> None:
        self._columns = workload.columns
        self._limit = config.concurrency or config.max_concurrency
        self._is_closed = config.is_closed
        # A stream is a request in flight, or a session in progress.
        self._apart_s = config.ramp_s / (config.concurrency or config.session_concurrency or 1)  # between their starts
        self._num_begun = 1 if config.ramp_s else len(workload) + 1  # more than there can be: all of them
        self._session_limit = config.session_concurrency
        self._free_at = 0.0  # when the last slot became free
        self._parents: dict[int, int] = {}  # number -> requests it still waits for
        self._children: dict[int, list[int]] = {}
        self._left: dict[str, int] = {}  # session -> requests that have not ended, if sessions are limited
        self._open_sessions: set[str] = set()
        self._roots: Sequence[int] = range(len(workload))  # requests that wait for no other
        self._num_roots_sent = 0
        self._ready: list[tuple[float, int]] = []
        self._num_flying = 0
        self.num_ended = 0
        self._num_wanted = len(workload)
        if workload.has_dependencies:
            self._note_waits(self._columns.values("after"))
        for number in range(len(workload)) if self._session_limit is not None else ():
            key = self._key(number)
            self._left[key] = self._left.get(key, 0) + 1

    def _note_waits(self, waits: list[tuple[int, ...]]) -> None:
        """Note which requests each one waits for."""
        for number, after in enumerate(waits):
            if after:
                self._parents[number] = len(after)
            for parent in after:
                self._children.setdefault(parent, []).append(number)
        self._roots = [number for number, after in enumerate(waits) if not after]

    @property
    def is_over(self) -> bool:
        """Whether every request has ended."""
        return self.num_ended == self._num_wanted

    def cut(self) -> None:
        """Hand out nothing more: it is over once what is in flight has ended."""
        self._roots, self._num_roots_sent, self._ready, self._children = (), 0, [], {}
        self._num_wanted = self.num_ended + self._num_flying

    def next_s(self) -> float | None:
        """Return the time from which `due` will return something, or None if that depends on a request ending."""
        if self._limit is not None and self._num_flying >= self._limit:
            return None
        time = self._ready[0][0] if self._ready else None
        if self._num_roots_sent < len(self._roots):
            root = self._roots[self._num_roots_sent]
            if self._session_limit is None or self._may_open(root):  # asked here: it saves most workloads a call
                opens_s: float
                if self._is_closed:
                    is_begun = self._num_streams < self._num_begun
                    opens_s = self._free_at if is_begun else self._apart_s * self._num_begun
                else:
                    opens_s = self._columns.arrival_s.item(root)
                if time is None or opens_s < time:
                    time = opens_s
        return time

    def due(self, now: float) -> list[tuple[int, float]]:
        """Take the requests that are due, each with the time at which it was meant to be sent."""
        taken: list[tuple[int, float]] = []
        while (time := self.next_s()) is not None and time <= now:
            if self._ready and self._ready[0][0] == time:
                intended, number = heappop(self._ready)
            else:
                number, intended = self._roots[self._num_roots_sent], time
                self._num_roots_sent += 1
                if self._session_limit is not None:
                    self._open_sessions.add(self._key(number))
            if self._is_closed:  # nothing was meant to be sent before there was a slot for it
                intended = max(intended, self._free_at)
            taken.append((number, intended))
            self._num_flying += 1
            self._num_begun = max(self._num_begun, self._num_streams)
        return taken

    def on_end(self, number: int, now: float, *, is_failed: bool = False) -> list[int]:
        """Note that a request has ended; return those that will never be sent because it failed."""
        self._end(number, now)
        self._num_flying -= 1
        lost: list[int] = []
        stack = list(self._children.pop(number, ()))
        while stack:
            child = stack.pop()
            if not is_failed:
                self._parents[child] -= 1
                if not self._parents[child]:
                    heappush(self._ready, (now + self._delay_s(child), child))
            elif self._parents.pop(child, 0):
                lost.append(child)
                self._end(child, now)
                stack += self._children.pop(child, ())
        return lost

    @property
    def _num_streams(self) -> int:
        return self._num_flying if self._session_limit is None else len(self._open_sessions)

    def _delay_s(self, number: int) -> float:
        delays_s = self._columns.more.get("delay_s")
        return delays_s[number] if delays_s else 0.0

    def _may_open(self, root: int) -> bool:
        assert self._session_limit is not None
        if len(self._open_sessions) < self._session_limit:
            return True
        return self._key(root) in self._open_sessions

    def _key(self, number: int) -> str:
        sessions = self._columns.more.get("session")
        return (sessions and sessions[number]) or f"#{number}"

    def _end(self, number: int, now: float) -> None:
        self.num_ended += 1
        self._free_at = now
        if self._session_limit is None:
            return
        key = self._key(number)
        self._left[key] -= 1
        if not self._left[key]:
            self._open_sessions.discard(key)

"""When each request may be sent: the schedule, the answers it waits for, and limits on requests in flight.

A plain state machine for both clocks: `due` returns what may be sent now, and `on_end` reports what ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from foundation.settings import Count, NotNegative, Positive, check_settings
from workloads.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from workloads.columns import Floats

    Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How the workload is sent."""

    concurrency: Count | None = None
    """Closed loop: keep this many requests in flight and ignore arrival times (think times stay)."""

    max_concurrency: Count | None = None
    """Open loop with a limit: a request that is due waits while this many are in flight, and its times include the
    wait."""

    session_concurrency: Count | None = None
    """Closed loop over sessions: keep this many in progress; a session's turns run one after another."""

    fail_on_too_long: bool = False
    """Refuse a workload with a request that is longer than the engine's max_model_len. Otherwise such a request fails or is
    cut, as a server would do it, and is counted."""

    warmup_s: NotNegative = 0.0
    """Exclude requests that arrive before this time from all figures (s)."""

    measure_s: Positive | None = None
    """Exclude requests that arrive later than this after the warm-up from all figures (s)."""

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_settings(self)
        given = [name for name in ("concurrency", "max_concurrency", "session_concurrency") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be combined")

    @property
    def is_closed(self) -> bool:
        """Whether arrivals depend on answers, so that no request can be late."""
        return self.concurrency is not None or self.session_concurrency is not None

    @property
    def kept(self) -> str:
        """What a closed loop keeps in flight; nothing for an open loop."""
        for count, noun in ((self.concurrency, "request"), (self.session_concurrency, "session")):
            if count is not None:
                return f"{count:,} {noun}{'s' * (count != 1)}"
        return ""

    @property
    def burst(self) -> str:
        """How a closed loop begins, if that is in its figures."""
        if self.warmup_s or max(self.concurrency or 0, self.session_concurrency or 0) < 2:
            return ""
        return f"The first {self.kept} start at once, and the figures include this burst; --warmup-s leaves it out."

    def of(self, workload: Workload) -> str:
        """Say how many requests are sent, and in what time or how many at a time."""
        pace = f"requests, {self.kept} at a time" if self.is_closed else f"requests in {workload.duration_s:,.0f} s"
        return f"{len(workload):,} {pace}"

    @property
    def has_window(self) -> bool:
        """Whether only requests of some time count."""
        return self.warmup_s > 0 or self.measure_s is not None

    def waits_for_answers(self, workload: Workload) -> bool:
        """Return whether arrivals depend on answers, so that their times are not known in advance."""
        return self.is_closed or workload.has_dependencies

    def may_count(self, workload: Workload) -> "Flags":
        """Return of each request whether it may count, as far as is known in advance."""
        is_unknown = self.waits_for_answers(workload)
        return self.are_measured(workload.columns.arrival_s) | is_unknown

    def is_measured(self, intended_s: float) -> bool:
        """Return whether a request counts."""
        return self.warmup_s <= intended_s <= self._end_s

    def are_measured(self, intended_s: "Floats") -> "Flags":
        """Return which requests count."""
        return (self.warmup_s <= intended_s) & (intended_s <= self._end_s)

    @property
    def _end_s(self) -> float:
        return float("inf") if self.measure_s is None else self.warmup_s + self.measure_s


class Pacer:
    """Hands out requests at their times."""

    def __init__(self, workload: Workload, config: LoadConfig) -> None:
        self._columns = workload.columns
        self._limit = config.concurrency or config.max_concurrency
        self._is_closed = config.is_closed
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
        return self.num_ended == len(self._columns)

    def next_s(self) -> float | None:
        """Return the time from which `due` will return something, or None if that depends on a request ending."""
        if self._limit is not None and self._num_flying >= self._limit:
            return None
        times = []
        if self._ready:
            times.append(self._ready[0][0])
        if self._num_roots_sent < len(self._roots):
            root = self._roots[self._num_roots_sent]
            if self._may_open(root):
                times.append(self._free_at if self._is_closed else self._columns.arrival_s.item(root))
        return min(times, default=None)

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
            # In a closed loop, nothing was meant to be sent before there was a slot for it.
            taken.append((number, max(intended, self._free_at) if self._is_closed else intended))
            self._num_flying += 1
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

    def _delay_s(self, number: int) -> float:
        delays_s = self._columns.more.get("delay_s")
        return delays_s[number] if delays_s else 0.0

    def _may_open(self, root: int) -> bool:
        if self._session_limit is None or len(self._open_sessions) < self._session_limit:
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

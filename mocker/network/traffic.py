"""Transfers on a clock, virtual or real, with callbacks when they end."""

from collections.abc import Callable
from typing import Any, Protocol

from mocker.network.links import Key, Links

COMPLETION = 0
"""Priority of what ends, among events at the same instant: lowest first."""


class Clock(Protocol):
    """Where transfers are awaited."""

    @property
    def now(self) -> float:
        """The time (s)."""
        ...

    def at(self, time: float, priority: int, callback: Callable[[], object]) -> None:
        """Call back at a time, or as soon as possible after it."""
        ...


class Traffic:
    """The transfers in progress on the links of a cluster."""

    def __init__(self, links: Links, clock: Clock) -> None:
        self.links = links
        self._clock = clock
        self._on_end: dict[Key, Callable[[], object]] = {}
        self._awaited_s = -1.0  # time of the scheduled event

    def start(self, key: Key, on_end: Callable[[], object], **what: Any) -> None:
        """Begin a transfer (see `Links.start`), and call back when it has ended."""
        self._on_end[key] = on_end
        self.links.start(key, self._clock.now, **what)
        self._await()

    def extend(self, key: Key, **more: Any) -> None:
        """Add to a transfer in progress (see `Links.extend`)."""
        self.links.extend(key, self._clock.now, **more)
        self._await()

    def drop(self, key: Key) -> float:
        """End a transfer early, and return the bytes that were left to send."""
        del self._on_end[key]
        left = self.links.drop(key, self._clock.now)
        self._await()
        return left

    def _await(self) -> None:
        """Schedule the next event on the links."""
        next_s = self.links.next_s()
        if next_s is not None and (next_s := max(next_s, self._clock.now)) != self._awaited_s:
            self._awaited_s = next_s
            self._clock.at(next_s, COMPLETION, self._advance)

    def _advance(self) -> None:
        now = self._clock.now
        if self._awaited_s < 0 or now < self._awaited_s:
            return  # the event was rescheduled
        self._awaited_s = -1.0
        for key in self.links.advance(now):
            self._on_end.pop(key)()
        self._await()

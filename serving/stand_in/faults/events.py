"""Between a publisher of KV events and its socket: messages are lost, come late or in another order."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from serving.stand_in.faults.state import Faults
from serving.stand_in.faults.values import drawn

Message = TypeVar("Message")

MAX_WAITING = 10_000
"""Messages that may be late at once; those after them are lost. vLLM keeps as many to be asked for again."""


class FaultyWire(Generic[Message]):
    """See the module. What is lost has its number nevertheless: subscribers see a gap, and can ask for it again."""

    def __init__(self, put: Callable[[Message], object], faults: Faults, rank: int) -> None:
        """Stand before a socket.

        Args:
            put: sends a message; it must not wait.
            faults: what goes wrong.
            rank: the rank whose messages these are.
        """
        self._put = put
        self._faults = faults
        self._rank = rank
        self._num_messages = 0
        self._held: Message | None = None  # until the next one has gone
        self._waiting: deque[tuple[float, Message]] = deque()  # and when each is due
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, message: Message) -> None:
        """Send a message, or do not."""
        config = self._faults.config
        self._num_messages += 1
        key = f"{self._rank} {self._num_messages}"
        if drawn(config.seed, "kv_events_drop", key) < config.kv_events_drop:
            self._faults.count("kv_events_drop")
            return
        if self._held is None and drawn(config.seed, "kv_events_swap", key) < config.kv_events_swap:
            self._faults.count("kv_events_swap")
            self._held = message
            return
        delay_s = 0.0 if config.kv_events_delay is None else config.kv_events_delay.time_s(config.seed, "events", key)
        self._send(message, delay_s)
        if self._held is not None:
            held, self._held = self._held, None
            self._send(held, 0.0)

    def close(self) -> None:
        """Send nothing more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, message: Message, delay_s: float) -> None:
        """Send a message so much later, and after those before it."""
        if len(self._waiting) >= MAX_WAITING:
            self._faults.count("kv_events_drop")
            return
        if delay_s:
            self._faults.count("kv_events_delay")
        elif not self._waiting:
            self._put(message)
            return
        loop = asyncio.get_running_loop()
        last_s = self._waiting[-1][0] if self._waiting else 0.0
        self._waiting.append((max(loop.time() + delay_s, last_s), message))
        if self._timer is None:
            self._wait(loop)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(self._waiting[0][0], self._put_due, loop) if self._waiting else None

    def _put_due(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = self._waiting[0][0]
        while self._waiting and self._waiting[0][0] <= due_s:
            self._put(self._waiting.popleft()[1])
        self._wait(loop)

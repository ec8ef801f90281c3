"""Between a publisher of KV events and its socket: messages are lost, come late or in another order."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from serving.stand_in.faults.state import Faults
from serving.stand_in.faults.values import drawn

Message = TypeVar("Message")


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
        self._last_s = 0.0
        self._timers: set[asyncio.TimerHandle] = set()

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
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _send(self, message: Message, delay_s: float) -> None:
        """Send a message so much later, and after those before it."""
        if delay_s:
            self._faults.count("kv_events_delay")
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._last_s = max(now + delay_s, self._last_s)
        if self._last_s <= now:
            self._put(message)
            return

        def put() -> None:
            self._timers.discard(timer)
            self._put(message)

        timer = loop.call_at(self._last_s, put)
        self._timers.add(timer)

"""What goes wrong in a running stand-in now, how often each thing did, and what is still to come.

exit, kill, engine_death, metrics_freeze     come once, after so many answers or so long after they were set
startup, unready                             count from the start, or from when they were set
all others                                   are chosen for each request, scrape or message: see `choice`
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from serving.stand_in.faults.choice import Fault, fault_of, num_good_blocks
from serving.stand_in.faults.config import FaultConfig
from serving.stand_in.faults.values import Moment, drawn

log = logging.getLogger(__name__)

ONCE = ("exit", "kill", "engine_death", "metrics_freeze")

ENGINE_DEATH = "EngineDeadError: the engine died, on purpose"

WATCHDOG_S = 5.0
"""How often a server of vLLM looks whether its engine is dead (s)."""


class FaultyServer(Protocol):
    """What a fault may do to the whole server."""

    def slow_down(self, factor: float) -> None:
        """Make each step of the engine take this many times as long."""
        ...

    def spoil_loads(self, spoil: Callable[[int], int | None]) -> None:
        """Ask for each prompt whose KV another instance computed how many of its blocks can be read."""
        ...

    def kill_engine(self, why: str) -> None:
        """End all requests in progress: the engine is dead."""
        ...

    def stop(self) -> None:
        """End the server because its engine is dead, as soon as that was said."""
        ...

    def end(self, how: str) -> None:
        """End the process by `exit` or `kill`."""
        ...


class Faults:
    """See the module; made in a running loop."""

    def __init__(self, config: FaultConfig, *, publishes_events: bool = True) -> None:
        self._publishes_events = publishes_events
        self.config = FaultConfig(by=config.by, seed=config.seed)
        self.counts: Counter[str] = Counter()
        """How often each fault befell something."""
        self.num_requests = 0
        self.num_answers = 0
        self.num_scrapes = 0
        self.is_engine_dead = False
        self.is_metrics_frozen = False
        self.ending = asyncio.Event()
        """Set when the server is to end."""
        self.started = asyncio.Event()
        """Set once the port may be opened."""
        self._server: FaultyServer | None = None
        self._num_loads = 0
        self._loop = asyncio.get_running_loop()
        self._ready_at: float | None = None  # None until the server has come up
        self._is_forced = False  # to be ready
        self._due: dict[str, int] = {}  # after how many answers, in all, what comes once comes
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.change(config)
        self._open_in(config.startup)

    def connect(self, server: FaultyServer) -> None:
        """Let faults do something to a server."""
        self._server = server
        server.spoil_loads(self.next_load)
        self._ready_at = self._loop.time() + self.config.unready
        if self.config.slow != 1:
            server.slow_down(self.config.slow)

    def change(self, config: FaultConfig) -> None:
        """Let other things go wrong from now on; what comes once and is the same as before keeps its time."""
        before, self.config = self.config, config
        for name in ONCE:
            if getattr(config, name) != getattr(before, name):
                self._schedule(name, getattr(config, name))
        if config.metrics_freeze is None:
            self.is_metrics_frozen = False
        if config.unready != before.unready and self._ready_at is not None:
            self._ready_at, self._is_forced = self._loop.time() + config.unready, False
        if config.slow != before.slow:
            self._slow_down()

    def close(self) -> None:
        """Let nothing more come."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    @property
    def to_come(self) -> set[str]:
        """The faults that are still to come, after so many answers or so long."""
        return self._due.keys() | self._timers.keys()

    @property
    def is_ready(self) -> bool:
        """Whether the server has come up, as far as /health is concerned."""
        return self._ready_at is not None and (self._is_forced or self._loop.time() >= self._ready_at)

    def make_ready(self) -> None:
        """Come up now."""
        self._is_forced = True
        self._open()

    @property
    def health(self) -> int | None:
        """The status that /health answers; None if the server itself answers it."""
        if self.config.health != "honest":
            return 200 if self.config.health == "up" else 503
        return None if self.is_ready and not self.is_engine_dead else 503

    @property
    def without_effect(self) -> list[str]:
        """The faults that are set and cannot come: no KV events are published."""
        return [] if self._publishes_events else self.config.of_kv_events

    def next_fault(self, headers: Iterable[tuple[bytes, bytes]]) -> Fault:
        """Return what befalls the next request."""
        self.num_requests += 1
        key: str | int = self.num_requests
        if self.config.by == "id" and (id := dict(headers).get(b"x-request-id", b"")):
            key = id.decode("latin-1")
        return fault_of(self.config, key)

    def fails_scrape(self) -> bool:
        """Return whether the scrape that came last fails, and count that."""
        config = self.config
        is_failing = drawn(config.seed, "metrics_fail", self.num_scrapes) < config.metrics_fail
        if is_failing:
            self.count("metrics_fail")
        return is_failing

    def scrape_delay_s(self) -> float:
        """Return how much later the next scrape is answered (s), and count that."""
        self.num_scrapes += 1
        config = self.config
        if config.metrics_delay is None:
            return 0.0
        delay_s = config.metrics_delay.time_s(config.seed, "metrics_delay", self.num_scrapes)
        if delay_s:
            self.count("metrics_delay")
        return delay_s

    def answered(self) -> None:
        """Note that a request is over, well or not."""
        self.num_answers += 1
        for name, num_answers in list(self._due.items()):
            if self.num_answers >= num_answers:
                del self._due[name]
                self._loop.call_soon(self.come, name)  # the answer's last bytes are on their way then

    def miss_engine(self) -> None:
        """Note that a request failed because the engine is dead: vLLM's server ends then."""
        if self._server is not None:
            self._loop.call_soon(self._server.stop)

    def next_load(self, num_blocks: int) -> int | None:
        """Return how many blocks of a prompt's KV can be read before one cannot; None if all can."""
        self._num_loads += 1
        found = num_good_blocks(self.config, self._num_loads, num_blocks)
        if found is not None:
            self.count("kv_load")
        return found

    def count(self, kind: str) -> None:
        """Count a fault, and log it: the first of its kind where everybody reads it."""
        self.counts[kind] += 1
        level = logging.INFO if self.counts[kind] == 1 else logging.DEBUG
        log.log(level, "a fault on purpose: %s (number %d)", kind, self.counts[kind])

    def come(self, name: str) -> None:
        """Let what comes once come now."""
        self._timers.pop(name, None)
        if name == "engine_death" and self.is_engine_dead:
            return
        self.count(name)
        server = self._server
        if name == "metrics_freeze":
            self.is_metrics_frozen = True
        elif name == "engine_death":
            self.is_engine_dead = True
            if server is not None:
                server.kill_engine(ENGINE_DEATH)
                self._later(name, WATCHDOG_S, server.stop)
        elif server is not None:
            server.end(name)

    def _schedule(self, name: str, moment: Moment | None) -> None:
        self._due.pop(name, None)
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        if moment is None:
            return
        if moment.num_answers is not None:
            self._due[name] = self.num_answers + moment.num_answers
        if moment.after_s is not None:
            self._later(name, moment.after_s, lambda: self.come(name))

    def _later(self, name: str, delay_s: float, act: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_later(delay_s, act)

    def _open_in(self, startup_s: float) -> None:
        if startup_s:
            self.count("startup")
            self._later("startup", startup_s, self._open)
        else:
            self.started.set()

    def _open(self) -> None:
        if (timer := self._timers.pop("startup", None)) is not None:
            timer.cancel()
        self.started.set()

    def _slow_down(self) -> None:
        if self.config.slow != 1:
            self.count("slow")
        if self._server is not None:
            self._server.slow_down(self.config.slow)

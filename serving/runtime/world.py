"""The world that serving code runs in: its clocks, its randomness, and whether anything runs beside the event loop.

    world()  ->  World         this machine: the default
             ->  SeededWorld   a simulated node: the running loop's time, and randomness from a seed

A task inherits its node's world from the task that creates it, as it inherits the running loop, so many simulated nodes
fit into one process. Waiting needs no world: `asyncio.sleep` and timeouts are the running loop's.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from serving.runtime.step_timer import StepTimer

EPOCH_NS = 1_700_000_000 * 10**9
"""What the wall clock of a simulated node shows when its loop's clock is at 0."""


HASTY_S = 0.002
"""The longest wait that ends too early (s): about as long as a message and its answer take on a simulated network."""


class World:
    """This machine."""

    is_virtual = False
    """Whether time stands still while code runs. Threads and child processes do not fit into such a time: what they would
    do is done in the event loop."""

    def __init__(self, entropy: random.Random | None = None) -> None:
        self.entropy = entropy or random.SystemRandom()
        """Where all that is random comes from: identities, secrets, pauses that must differ between processes."""

    now = staticmethod(time.monotonic)
    """Returns the time (s) on the clock that never jumps: the event loop's, to more than its milliseconds. Whoever keeps it
    reads the clock itself, with no call in between."""

    def wall_ns(self) -> int:
        """Return the time of day (ns since 1970), which may jump."""
        return time.time_ns()

    def wall_s(self) -> float:
        """Return the time of day (s since 1970), which may jump."""
        return self.wall_ns() / 1e9

    def token_hex(self, num_bytes: int) -> str:
        """Return random bytes as hexadecimal digits, two for each."""
        return self.entropy.randbytes(num_bytes).hex()

    def uuid(self) -> UUID:
        """Return a random UUID (version 4)."""
        return UUID(bytes=self.entropy.randbytes(16), version=4)

    def patience(self, wait_s: float) -> float:
        """Return how long to wait for what the caller can do without (s): just as long, unless faults are simulated."""
        return wait_s

    def step_timer(self) -> StepTimer:
        """Return a timer that is as precise as `now`, for the running loop."""
        return StepTimer(self.now, is_virtual=self.is_virtual)

    async def settled(self) -> None:
        """In virtual time, return once nothing else is left to do at this instant; otherwise immediately.

        Code takes no time there, so whoever begins something that does, such as a step of an engine, first lets
        everything arrive that comes at the same instant.
        """


class SeededWorld(World):
    """A simulated node: the same seed and name give the same randomness, and time is the running loop's."""

    is_virtual = True

    def __init__(self, seed: int, name: str) -> None:
        """Describe a node: the seed is the whole simulation's, and the name unlike any other's."""
        super().__init__(random.Random(f"{seed} {name}"))
        self.haste = 0.0
        """The share of waits for what callers can do without that end too early."""
        self._ahead_ns = 0
        """How far its wall clock is ahead when the loop's clock is at 0 (ns)."""
        self._drift = 0.0

    def now(self) -> float:
        """See `World`. It does not drift between nodes: their timers are all the running loop's.

        Raises:
            RuntimeError: no loop is running.
        """
        return asyncio.get_running_loop().time()

    def wall_ns(self) -> int:
        """See `World`.

        Raises:
            RuntimeError: no loop is running.
        """
        now = self.now()
        return EPOCH_NS + self._ahead_ns + round(now * 1e9) + round(now * self._drift * 1e9)

    def patience(self, wait_s: float) -> float:
        """See `World`."""
        is_short = self.haste > 0 and self.entropy.random() < self.haste
        return self.entropy.uniform(0.0, min(HASTY_S, wait_s)) if is_short else wait_s

    async def settled(self) -> None:
        """See `World`."""
        loop: Any = asyncio.get_running_loop()
        is_settled = loop.create_future()
        loop.call_last(_set, is_settled)
        await is_settled

    def gain(self, drift: float) -> None:
        """Let the wall clock gain so many seconds in each second of the loop from now on."""
        now = self.now()
        self._ahead_ns += round(now * self._drift * 1e9) - round(now * drift * 1e9)
        self._drift = drift

    def jump(self, by_s: float) -> None:
        """Set the wall clock forwards (s), or back if negative, as an operator or a time server does."""
        self._ahead_ns += round(by_s * 1e9)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


_WORLD: ContextVar[World] = ContextVar("world", default=World())  # noqa: B039 (what changes in it is its owner's)


def world() -> World:
    """Return the world of the task, callback or thread that asks."""
    return _WORLD.get()


@contextlib.contextmanager
def within(node: World) -> Iterator[None]:
    """Run code, and the tasks and callbacks that it creates, in another world."""
    token = _WORLD.set(node)
    try:
        yield
    finally:
        _WORLD.reset(token)

"""The clock of the process, as what models of links and disks ask of a clock."""

import asyncio
from collections.abc import Callable

from serving.runtime.world import world

SHORTEST_S = 0.001
"""The loop counts milliseconds: a timer may be that early."""


class WallClock:
    """Calls back at times of `World.now`: in virtual time exactly, otherwise up to two milliseconds late."""

    @property
    def now(self) -> float:
        """The time (s)."""
        return world().now()

    def at(self, time: float, priority: int, callback: Callable[[], object]) -> None:
        """Call back as soon as possible after a time."""
        loop = asyncio.get_running_loop()
        if (left_s := time - world().now()) <= 0:
            loop.call_soon(callback)
        elif world().is_virtual:
            loop.call_at(time, callback)
        else:
            loop.call_later(max(left_s, SHORTEST_S), self.at, time, priority, callback)

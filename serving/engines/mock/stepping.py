"""Steps in real time: ranks of the mocker in a loop that sleeps for the duration of each step.

A rank steps alone, or together with those that share its experts: then each waits for the slowest.
"""

import asyncio
import contextlib
import math
from collections.abc import Sequence as Several
from typing import Protocol

from mocker import Engine, Step
from serving.runtime.step_timer import StepTimer
from serving.runtime.world import world


class SteppingRank(Protocol):
    """A rank that steps."""

    engine: Engine
    bell: asyncio.Event

    def begin(self, now: float) -> Step | None:
        """Begin a step, if there is anything to do."""
        ...

    def finish(self) -> None:
        """End the step in flight."""
        ...

    def close(self) -> None:
        """Take no more requests."""
        ...


async def step_together(ranks: Several[SteppingRank]) -> None:
    """Step forever; all ranks have the same bell, which rings when there may be something to do.

    They close at the end.
    """
    timer = world().step_timer()
    try:
        await _step(ranks, ranks[0].bell, timer)
    finally:
        timer.close()
        for rank in ranks:
            rank.close()


async def _step(ranks: Several[SteppingRank], bell: asyncio.Event, timer: StepTimer) -> None:
    clock, settled = world().now, world().settled  # uvloop's own clock only counts milliseconds
    now = clock()
    while True:
        await settled()
        bell.clear()  # a ring from here on may be too late for this step
        ends = [step.end for rank in ranks if (step := rank.begin(now)) is not None]
        if not ends:
            await _wait(min(rank.engine.wake_s for rank in ranks), bell)
            now = clock()
            continue
        end = max(ends)
        if len(ends) > 1:
            for rank in ranks:
                rank.engine.stretch(end)
        # Deadlines are absolute: a late timer delays one step, not all later ones.
        await timer.until(end)
        for rank in ranks:
            if rank.engine.step is not None:
                rank.finish()
        now = end


async def _wait(wake_s: float, bell: asyncio.Event) -> None:
    """Wait until something arrives, or a copy between GPU and host ends."""
    if wake_s == math.inf:
        await bell.wait()
        return
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(bell.wait(), max(wake_s - world().now(), 0.0))

"""What moves over modelled links: waiting for it, how far it has come, and how long all of it took."""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mocker.network.traffic import Traffic
from serving.runtime.world import world


async def move(
    traffic: Traffic, key: Hashable, *, on_cut: Callable[[float], object] | None = None, **what: Any
) -> None:
    """Wait for a transfer (see `Links.start`); if that is cancelled, end it, and report the bytes that were left."""
    done, has_ended = asyncio.get_running_loop().create_future(), False

    def on_end() -> None:
        nonlocal has_ended
        has_ended = True
        if not done.done():  # it may have been cancelled in this turn of the loop
            done.set_result(None)

    traffic.start(key, on_end, **what)
    try:
        await done
    except asyncio.CancelledError:
        left = 0.0 if has_ended else traffic.drop(key)
        if on_cut is not None:
            on_cut(left)
        raise


@dataclass(slots=True)
class Progress:
    """How many chunks of a read have come, also of one that is cut short."""

    num_chunks: int = 0


@dataclass(slots=True)
class Moved:
    """Reads or writes of a tier, and their total time."""

    count: int = 0
    seconds: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count and time the work inside."""
        start_s = world().now()
        try:
            yield
        finally:
            self.count += 1
            self.seconds += world().now() - start_s

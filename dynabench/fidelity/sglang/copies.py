"""Copies between device and host memory for SGLang's HiCache without a GPU: nothing is copied, and each ends when told to."""

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import patch

Direction = Literal["store", "load"]
"""To host memory, or back."""


class Ended:
    """Stands for an event of a stream."""

    def __init__(self, *, is_over: bool = True) -> None:
        self.is_over = is_over

    def query(self) -> bool:
        """Return whether the copy has ended."""
        return self.is_over

    def synchronize(self) -> None:
        """Wait for the copy, as SGLang does when it evicts with `write_back`: it has ended then."""
        self.is_over = True


class CopiesByHand:
    """Stands where SGLang submits copies (`L2TransferEngine`)."""

    def __init__(self, *_: Any) -> None:
        self.in_flight: dict[Direction, deque[Ended]] = {"store": deque(), "load": deque()}

    def submit_device_to_host(self, *_: Any, **__: Any) -> Any:
        """Begin a copy to host memory."""
        return self._begin("store")

    def submit_host_to_device(self, *_: Any, **__: Any) -> Any:
        """Begin a copy from host memory."""
        return self._begin("load")

    def _begin(self, direction: Direction) -> Any:
        from sglang.srt.mem_cache.l2_transfer import TransferCompletion

        end = Ended(is_over=False)
        self.in_flight[direction].append(end)
        return TransferCompletion(Ended(), end, False)

    def end_oldest(self, direction: Direction) -> None:
        """Let the oldest copy of a direction end, if there is any."""
        copies = self.in_flight[direction]
        while copies and copies[0].is_over:
            copies.popleft()
        if copies:
            copies.popleft().is_over = True


@contextlib.contextmanager
def by_hand() -> Iterator[None]:
    """Let HiCache be made without a GPU, with copies that end when told to."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.pool_host import common

    with (
        patch.object(common, "_cuda_host_register", lambda *_, **__: None),
        patch.object(cache_controller, "L2TransferEngine", CopiesByHand),
    ):
        yield


def copies_of(scheduler: Any) -> CopiesByHand | None:
    """Return the copies of a scheduler that was made so; None if it has no HiCache."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    if controller is None:
        return None
    for event in controller.layer_done_counter.events:  # what a forward pass would wait for, layer by layer
        event.load_events = [Ended()]
        event.start_event = _Marked()
    controller.load_fence_stream = controller.write_fence_stream = None
    copies: CopiesByHand = controller.l2_transfer_engine
    return copies


class _Marked(Ended):
    def record(self) -> None:
        """Be passed by a stream."""

"""What a process sees of the keys below a prefix in etcd, and when a key that etcd no longer has counts as gone.

its process removed it (it puts `(removed)` there first)   at once
its lease ended, and its process does not answer us        at once; if etcd itself was away, after a lease's time,
                                                           as its process needs that long to register again
its lease ended, and its process answers us                once it does not: etcd may have lost all leases, or that
                                                           process may be cut off from etcd, and not from us
"""

import asyncio
from collections.abc import Callable
from typing import Any

from serving.runtime.ports import OnChange, guarded

LOOK_S = 0.5
"""How often we look whether the process of a key without a lease still answers."""

REMOVED = b"(removed)"
"""The last value of a key that its process removes."""

IsAnswering = Callable[[str], bool]
"""Returns whether the process of a key answers us now."""


class EtcdWatch:
    """Keys below a prefix, and the stream of what changes there."""

    def __init__(self, prefix: str, on_change: OnChange, is_answering: IsAnswering) -> None:
        self.prefix = prefix
        self.known: dict[str, bytes] = {}
        """What the store has, as far as we know."""
        self.revision = 0
        """The store's revision up to which `known` is complete; 0 if it is not."""
        self.stream: Any = None
        """The response that reports changes."""
        self._tell = guarded(on_change, "a key in discovery")
        self._is_answering = is_answering
        self._lost: dict[str, asyncio.TimerHandle] = {}  # not in the store, and not reported as gone

    def cut(self) -> None:
        """End the stream, so that the watch restarts."""
        self.revision = 0
        if self.stream is not None:
            self.stream.close()

    def stop(self) -> None:
        """Report nothing any more."""
        for timer in self._lost.values():
            timer.cancel()
        self._lost.clear()

    def list(self, found: dict[str, bytes], grace_s: float) -> None:
        """Report how all keys of the store differ from those that are known; what it lost may return in this time."""
        for key, value in found.items():
            if self.known.get(key) != value:
                self.put(key, value)
        for key in [key for key in self.known if key not in found]:
            self.lose(key, grace_s)

    def put(self, key: str, value: bytes) -> None:
        """Report a key that was put."""
        is_reported = self.known.get(key, REMOVED) != REMOVED or key in self._lost
        if key in self._lost:
            self._lost.pop(key).cancel()
        self.known[key] = value
        if value != REMOVED:
            self._tell(key, value)
        elif is_reported:
            self._tell(key, None)

    def lose(self, key: str, grace_s: float = 0.0) -> None:
        """Report that the store has no such key any more, now or later."""
        if self.known.pop(key, REMOVED) == REMOVED:
            return
        if grace_s:
            self._look_again(key, grace_s)
        else:
            self._look(key)

    def _look(self, key: str) -> None:
        self._lost.pop(key, None)
        if self._is_answering(key):
            self._look_again(key, LOOK_S)
        else:
            self._tell(key, None)

    def _look_again(self, key: str, after_s: float) -> None:
        self._lost[key] = asyncio.get_running_loop().call_later(after_s, self._look, key)

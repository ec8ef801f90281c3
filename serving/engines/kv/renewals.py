"""Renews the leases on KV that a decode worker will still read, with one notice for all requests of a prefill worker."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from serving.engines.kv.leases import RENEWALS
from serving.engines.kv.notices import MAX_RENEWED, Notice

MIN_PAUSE_S = 0.01
"""Shortest pause between renewals, however short an owner's leases are."""

Name = TypeVar("Name")
_Key = tuple[bytes, float | None]


@dataclass(slots=True)
class _Owner(Generic[Name]):
    agent: dict[str, Any]
    pause_s: float
    names: dict[Name, None] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Renewals(Generic[Name]):
    """Renews leases, six times within their duration."""

    def __init__(
        self, tell: Callable[[dict[str, Any], Notice], object], notice: Callable[[list[Name]], Notice]
    ) -> None:
        """Send owners a notice with the names of what will still be read."""
        self._tell = tell
        self._notice = notice
        self._owners: dict[_Key, _Owner[Name]] = {}

    def begin(self, agent: dict[str, Any], name: Name, duration_s: float | None) -> None:
        """Start to renew this one, if it can be renewed."""
        if duration_s is None:
            return
        key = _key(agent, duration_s)
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = _Owner(agent, max(duration_s / RENEWALS, MIN_PAUSE_S))
            self._wait(owner)
        owner.names[name] = None

    def end(self, agent: dict[str, Any], name: Name, duration_s: float | None) -> None:
        """Stop renewing this one."""
        key = _key(agent, duration_s)
        owner = self._owners.get(key)
        if owner is None:
            return
        owner.names.pop(name, None)
        if not owner.names:
            self._stop(owner)
            del self._owners[key]

    def close(self) -> None:
        """Stop all renewals."""
        for owner in self._owners.values():
            self._stop(owner)
        self._owners.clear()

    def _wait(self, owner: _Owner[Name]) -> None:
        owner.timer = asyncio.get_running_loop().call_later(owner.pause_s, self._renew, owner)

    def _stop(self, owner: _Owner[Name]) -> None:
        if owner.timer is not None:
            owner.timer.cancel()

    def _renew(self, owner: _Owner[Name]) -> None:
        names = list(owner.names)
        for first in range(0, len(names), MAX_RENEWED):
            self._tell(owner.agent, self._notice(names[first : first + MAX_RENEWED]))
        self._wait(owner)


def _key(agent: dict[str, Any], duration_s: float | None) -> _Key:
    """Return what is renewed together: leases of one owner with one duration."""
    return msgspec.json.encode(agent), duration_s

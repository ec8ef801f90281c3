"""The decode worker's side of leases: it renews those of all that it will still read, owner by owner."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serving.engines.kv_leases import RENEWALS
from serving.engines.kv_notices import MAX_RENEWED, Notice, Renew
from serving.engines.kv_params import RemoteKv

MIN_PAUSE_S = 0.01
"""Whatever an owner says of its leases."""


_Key = tuple[str, bytes, float | None]


def _key(kv: RemoteKv) -> _Key:
    """Return what leases that are renewed together have in common: nobody else's word counts for an owner's."""
    return kv.remote_engine_id, msgspec.json.encode(kv.remote_agent), kv.remote_lease_s


@dataclass(slots=True)
class _Owner:
    agent: dict[str, Any]
    pause_s: float
    requests: dict[str, None] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Renewals:
    """Renews each lease every sixth of its duration."""

    def __init__(self, tell: Callable[[dict[str, Any], Notice], object]) -> None:
        self._tell = tell
        self._owners: dict[_Key, _Owner] = {}

    def begin(self, kv: RemoteKv) -> None:
        """Renew this one's from now on, if it can be."""
        if kv.remote_lease_s is None:
            return
        owner = self._owners.get(_key(kv))
        if owner is None:
            pause_s = max(kv.remote_lease_s / RENEWALS, MIN_PAUSE_S)
            owner = self._owners[_key(kv)] = _Owner(kv.remote_agent, pause_s)
            self._wait(owner)
        owner.requests[kv.remote_request_id] = None

    def end(self, kv: RemoteKv) -> None:
        """Renew this one's no more."""
        owner = self._owners.get(_key(kv))
        if owner is None:
            return
        owner.requests.pop(kv.remote_request_id, None)
        if not owner.requests:
            self._stop(owner)
            del self._owners[_key(kv)]

    def close(self) -> None:
        """Renew nothing any more."""
        for owner in self._owners.values():
            self._stop(owner)
        self._owners.clear()

    def _wait(self, owner: _Owner) -> None:
        owner.timer = asyncio.get_running_loop().call_later(owner.pause_s, self._renew, owner)

    def _stop(self, owner: _Owner) -> None:
        if owner.timer is not None:
            owner.timer.cancel()

    def _renew(self, owner: _Owner) -> None:
        requests = list(owner.requests)
        for first in range(0, len(requests), MAX_RENEWED):
            self._tell(owner.agent, Renew(requests[first : first + MAX_RENEWED]))
        self._wait(owner)

"""The server for discovery: keys with leases, as etcd keeps them.

A lease that was not renewed for its time to live ends, and its keys with it. While the server is away, no lease ends;
when it is back, all begin again, and watches must be set again.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.runtime.etcd_watch import REMOVED, EtcdWatch
from serving.runtime.memory.node import Link, Node
from serving.runtime.memory.server import RefusedError, Server


class Entry(NamedTuple):
    """What the store has under a key."""

    value: bytes
    lease: int
    """0: it outlives who put it."""
    created: int
    """The revision of the store that created the key."""


@dataclass(slots=True)
class Lease:
    """A node's word that it is there."""

    ttl_s: float
    ends_s: float
    keys: dict[str, None] = field(default_factory=dict)


class Watcher(NamedTuple):
    """A watch, and how it hears of changes."""

    watch: EtcdWatch
    link: Link


class Store(Server):
    """See the module. Nodes ask its methods over a `Line`."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.keys: dict[str, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self._watchers: dict[Watcher, None] = {}
        self._revision = 0
        self._num_leases = 0

    def go_away(self) -> None:
        """Stop serving; all watches end."""
        super().go_away()
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers:
            watcher.link.send(watcher.watch.cut)

    def come_back(self) -> None:
        """Serve again."""
        super().come_back()
        now = asyncio.get_running_loop().time()
        for lease in self.leases.values():
            lease.ends_s = now + lease.ttl_s

    def wipe(self) -> None:
        """Lose all keys and leases. Revisions go on, so that terms of claims keep growing."""
        self.leases.clear()
        for key in list(self.keys):
            self._delete(key)

    def ping(self) -> None:
        """Do nothing."""

    def grant(self, ttl_s: float) -> int:
        """Return a new lease."""
        self._num_leases += 1
        self.leases[self._num_leases] = Lease(ttl_s, asyncio.get_running_loop().time() + ttl_s)
        self._look_at(self._num_leases, ttl_s)
        return self._num_leases

    def renew(self, id: int) -> bool:
        """Begin a lease again; return whether it was still there."""
        if (lease := self.leases.get(id)) is None:
            return False
        lease.ends_s = asyncio.get_running_loop().time() + lease.ttl_s
        return True

    def revoke(self, id: int) -> None:
        """End a lease, and remove its keys."""
        if (lease := self.leases.pop(id, None)) is not None:
            for key in lease.keys:
                self._delete(key)

    def put(self, key: str, value: bytes, id: int) -> None:
        """Put a key under a lease.

        Raises:
            RefusedError: the lease has ended.
        """
        if id not in self.leases:
            raise RefusedError("the lease has ended")
        self._put(key, value, id)

    def create(self, key: str, value: bytes) -> bytes:
        """Put a key that outlives who put it, unless it exists; return its value after that."""
        if key not in self.keys:
            self._put(key, value, 0)
        return self.keys[key].value

    def claim(self, key: str, id: int) -> int | None:
        """Put a key under a lease unless it exists; return the revision that created it, None if the lease is another.

        Raises:
            RefusedError: the lease has ended.
        """
        if key not in self.keys:
            self.put(key, b"", id)
        entry = self.keys[key]
        return entry.created if entry.lease == id else None

    def remove(self, key: str) -> None:
        """Remove a key for its process, as its watchers can see."""
        if key in self.keys:
            self._tell(key, lambda watch: watch.put(key, REMOVED))
            self._delete(key)

    def watch(self, watcher: Watcher) -> None:
        """Report all keys below a prefix, and then each change."""
        prefix = watcher.watch.prefix
        found = {key: entry.value for key, entry in sorted(self.keys.items()) if key.startswith(prefix)}
        self._watchers[watcher] = None
        grace_s = max((lease.ttl_s for lease in self.leases.values()), default=0.0)
        watcher.link.send(watcher.watch.list, found, grace_s)

    def unwatch(self, watcher: Watcher) -> None:
        """Report nothing more."""
        self._watchers.pop(watcher, None)

    def _put(self, key: str, value: bytes, id: int) -> None:
        self._revision += 1
        old = self.keys.get(key)
        if old is not None and old.lease in self.leases:
            self.leases[old.lease].keys.pop(key, None)
        self.keys[key] = Entry(value, id, self._revision if old is None else old.created)
        if id:
            self.leases[id].keys[key] = None
        self._tell(key, lambda watch: watch.put(key, value))

    def _delete(self, key: str) -> None:
        self._revision += 1
        entry = self.keys.pop(key)
        if entry.lease in self.leases:
            del self.leases[entry.lease].keys[key]
        self._tell(key, lambda watch: watch.lose(key))

    def _tell(self, key: str, change: Callable[[EtcdWatch], None]) -> None:
        for watcher in list(self._watchers):
            if watcher.link.is_dead:
                del self._watchers[watcher]
            elif key.startswith(watcher.watch.prefix):
                watcher.link.send(change, watcher.watch)

    def _look_at(self, id: int, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._look, id, context=Context())

    def _look(self, id: int) -> None:
        """End a lease that has run out, else look again later."""
        if (lease := self.leases.get(id)) is None:
            return
        left_s = lease.ends_s - asyncio.get_running_loop().time()
        if self.is_away or self.node.is_paused:
            self._look_at(id, lease.ttl_s)
        elif left_s > 0:
            self._look_at(id, left_s)
        else:
            self.revoke(id)

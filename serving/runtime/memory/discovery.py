"""Discovery on a memory network. What a node does when its server is away or loses everything is as with etcd."""

import asyncio
import contextlib

from serving.runtime.etcd_watch import EtcdWatch, IsAnswering
from serving.runtime.memory.node import Node
from serving.runtime.memory.server import UNREACHABLE, Line, reason
from serving.runtime.memory.store import Watcher
from serving.runtime.outages import ANSWER_S, Outages
from serving.runtime.ports import OnChange, RuntimeUnavailableError, Stop
from serving.runtime.stopping import cancel_all

RETRY_S = 0.3


class MemoryDiscovery:
    """See the module."""

    def __init__(self, node: Node, *, lease_ttl_s: float) -> None:
        """Prepare to connect; what the server reports is received in the current context."""
        self.node = node
        self.outages = Outages(
            "discovery", "the server for discovery", consequence="what is known of other processes stays in use"
        )
        self.is_answering: IsAnswering = lambda _: False
        """Whether the process of a key answers us; set by whoever has connections to it."""
        self._store = node.network.discovery
        self._line = Line(node, self._store)
        self._ttl_s = lease_ttl_s
        self._lease = 0
        self._keys: dict[str, bytes] = {}
        self._unsent: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[Watcher, asyncio.Task[None]] = {}

    async def connect(self) -> None:
        """Take a lease and keep it.

        Raises:
            RuntimeUnavailableError: the server is away.
        """
        try:
            await self._grant()
        except UNREACHABLE as error:
            raise RuntimeUnavailableError(f"the server for discovery does not answer ({reason(error)})") from error
        following = self.outages.follow(self._ask, UNREACHABLE, reason)
        self._tasks += [asyncio.create_task(self._keep_alive()), asyncio.create_task(following)]

    async def put(self, key: str, value: bytes) -> None:
        """Register a key under our lease, once the server is there."""
        self._keys[key] = value
        try:
            await self._line.ask(self._store.put, key, value, self._lease)
        except UNREACHABLE:
            self._unsent.add(key)

    async def create(self, key: str, value: bytes) -> bytes:
        """Put a key that outlives us unless it exists; return its value after that.

        Raises:
            RuntimeUnavailableError: the server does not answer.
        """
        try:
            return await self._line.ask(self._store.create, key, value)
        except UNREACHABLE as error:
            raise RuntimeUnavailableError(f"the key {key} cannot be put: {reason(error)}") from error

    def place(self, key: str) -> tuple[str, str]:
        """Return where a key that outlives us is stored, and what removes it."""
        return f"{key} in the memory network", "Network.discovery.wipe()"

    async def claim(self, name: str) -> int | None:
        """See `Discovery`; the term is the store's revision at which the name was taken."""
        try:
            return await self._line.ask(self._store.claim, f"v1/claims/{name}", self._lease)
        except UNREACHABLE as error:
            raise RuntimeUnavailableError(f"it cannot be found out who holds {name}: {reason(error)}") from error

    async def delete(self, key: str) -> None:
        """Remove one of our keys."""
        self._unsent.discard(key)
        if self._keys.pop(key, None) is not None:
            async with asyncio.timeout(self._patience_s):
                await self._line.ask(self._store.remove, key)

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Report the keys below a prefix, now and as they change."""
        ended = asyncio.Event()
        watch = EtcdWatch(prefix, on_change, lambda key: self.is_answering(key))
        watch.stream = _Stream(ended)
        watcher = Watcher(watch, self._line.back)
        with contextlib.suppress(*UNREACHABLE):
            await self._set(watcher)
        self._watches[watcher] = asyncio.create_task(self._follow(watcher, ended))

        def stop() -> None:
            if (task := self._watches.pop(watcher, None)) is not None:
                task.cancel()
                watch.stop()
                self._line.report(self._store.unwatch, watcher)

        return stop

    async def close(self) -> None:
        """Revoke the lease, which removes all our keys at once."""
        await cancel_all(*self._tasks, *self._watches.values())
        for watcher in self._watches:
            watcher.watch.stop()
            self._line.report(self._store.unwatch, watcher)
        with contextlib.suppress(*UNREACHABLE):  # without an answer, the lease will run out
            async with asyncio.timeout(self._patience_s):
                await self._line.ask(self._store.revoke, self._lease)

    @property
    def _patience_s(self) -> float | None:
        return ANSWER_S if self.outages.is_away else None

    async def _ask(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            await self._line.ask(self._store.ping)

    async def _grant(self) -> None:
        self._lease = await self._line.ask(self._store.grant, self._ttl_s)
        for key in list(self._keys):
            await self._send(key)

    async def _send(self, key: str) -> None:
        if (value := self._keys.get(key)) is not None:  # not removed meanwhile
            await self._line.ask(self._store.put, key, value, self._lease)
        self._unsent.discard(key)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            try:
                if not await self._line.ask(self._store.renew, self._lease):
                    await self._grant()  # the server forgot us: register again
                for key in sorted(self._unsent):
                    await self._send(key)
            except UNREACHABLE:
                await asyncio.sleep(RETRY_S)

    async def _set(self, watcher: Watcher) -> None:
        """Let the server report all keys, and then the changes."""
        watcher.watch.revision = 0
        await self._line.ask(self._store.watch, watcher)
        watcher.watch.revision = 1

    async def _follow(self, watcher: Watcher, ended: asyncio.Event) -> None:
        while True:
            if watcher.watch.revision:
                await ended.wait()
            ended.clear()
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(*UNREACHABLE):
                await self._set(watcher)


class _Stream:
    """Over which a watch hears of changes."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    def close(self) -> None:
        """End it, so that the watch restarts."""
        self._ended.set()

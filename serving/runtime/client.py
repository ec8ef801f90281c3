"""The clients of an endpoint: they know its instances, and keep a connection to each."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, Self

from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.connection import Connection, ReplyStream
from serving.runtime.messages import CallError
from serving.runtime.ports import Discovery, RequestPlane, Stop, guarded
from serving.runtime.world import world

log = logging.getLogger(__name__)

REDIAL_S = 0.5


class Client:
    """Calls the instances of one endpoint; connects to each instance as soon as it is known."""

    def __init__(
        self,
        address: EndpointAddress,
        discovery: Discovery,
        plane: RequestPlane,
        on_join: Callable[[Instance], None] | None = None,
        on_leave: Callable[[int], None] | None = None,
    ) -> None:
        self.address = address
        self._target = ".".join(address)
        self._discovery = discovery
        self._plane = plane
        self._on_join = on_join and guarded(on_join, "a new instance")
        self._on_leave = on_leave and guarded(on_leave, "the removal of an instance")
        self._known: dict[str, Instance] = {}
        self._connections: dict[int, Connection] = {}
        self._dialing: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._turn = itertools.count()
        self._news = asyncio.Condition()
        self._stop: Stop | None = None

    async def start(self) -> Self:
        """Watch for instances."""
        self._stop = await self._discovery.watch(self.address.prefix, self._on_change)
        return self

    def instance_ids(self) -> list[int]:
        """Return the instances that can be called now."""
        return sorted(self._connections)

    def is_answering(self, instance_id: str) -> bool:
        """Return whether an instance, given by its id in hexadecimal, answers us."""
        return any(f"{id:x}" == instance_id and found.is_answering for id, found in self._connections.items())

    async def wait_for_instances(self, count: int = 1) -> list[int]:
        """Wait until this many instances can be called."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._connections) >= count)
        return self.instance_ids()

    def direct(self, request: Any, instance_id: int) -> ReplyStream:
        """Call one instance.

        Raises:
            CallError: it is not known, or gone.
        """
        return self._connection(instance_id).call(self._target, request)

    def round_robin(self, request: Any) -> ReplyStream:
        """Call the instances in rotation."""
        ids = self._some()
        return self.direct(request, ids[next(self._turn) % len(ids)])

    generate = round_robin

    def random(self, request: Any) -> ReplyStream:
        """Call any instance."""
        return self.direct(request, world().entropy.choice(self._some()))

    def side_call(self, instance_id: int, address: EndpointAddress, request: Any) -> ReplyStream:
        """Call another endpoint of an instance's process.

        Raises:
            CallError: it is gone.
        """
        return self._connection(instance_id).call(".".join(address), request)

    async def close(self) -> None:
        """Hang up on all instances."""
        if self._stop is not None:
            self._stop()
        dialing = list(self._dialing.values())
        for task in dialing:
            task.cancel()
        await asyncio.gather(*dialing, return_exceptions=True)
        self._known.clear()
        for connection in list(self._connections.values()):
            connection.close()

    def _connection(self, instance_id: int) -> Connection:
        if (connection := self._connections.get(instance_id)) is None:
            raise CallError(f"{self.address} has no instance {instance_id:x}", "lost")
        return connection

    def _some(self) -> list[int]:
        ids = self.instance_ids()
        if not ids:
            raise CallError(f"no instance of {self.address} is known", "lost")
        return ids

    def _on_change(self, key: str, value: bytes | None) -> None:
        if value is None:
            if (gone := self._known.pop(key, None)) is not None:
                self._leave(key, gone)
            return
        try:
            instance = Instance.parse(key, value)
        except ValueError as error:
            log.warning("%s in discovery is not a valid instance and is ignored: %s", key, error)
            return
        old = self._known.get(key)
        if old == instance:
            return
        if old is not None:
            self._leave(key, old)
        self._known[key] = instance
        self._dial(key, instance)

    def _dial(self, key: str, instance: Instance, *, after_s: float = 0.0) -> None:
        self._dialing[key] = task = asyncio.create_task(self._dial_until_there(key, instance, after_s))
        task.add_done_callback(lambda _: self._dialing.get(key) is task and self._dialing.pop(key))

    async def _dial_until_there(self, key: str, instance: Instance, after_s: float) -> None:
        def lost(connection: Connection) -> None:
            self._lost(key, instance, connection)

        await asyncio.sleep(after_s)
        while True:
            try:
                connection = await Connection.open(self._plane, instance.transport, lost)
            except OSError as error:
                log.debug("instance %x does not answer: %s", instance.instance_id, error)
                await asyncio.sleep(REDIAL_S)
                continue
            log.debug("instance %x of %s has joined, at %s", instance.instance_id, self.address, instance.transport)
            self._connections[instance.instance_id] = connection
            if self._on_join is not None:
                self._on_join(instance)
            async with self._news:
                self._news.notify_all()
            return

    def _lost(self, key: str, instance: Instance, connection: Connection) -> None:
        """The connection broke: act before discovery reports it, and redial while the instance is listed."""
        if self._connections.get(instance.instance_id) is not connection:
            return
        log.debug("the connection to instance %x of %s is lost", instance.instance_id, self.address)
        del self._connections[instance.instance_id]
        if self._on_leave is not None:
            self._on_leave(instance.instance_id)
        if self._known.get(key) == instance:
            self._dial(key, instance, after_s=REDIAL_S)

    def _leave(self, key: str, instance: Instance) -> None:
        """Discovery reports it gone: send no new calls; those in progress may still finish."""
        log.debug("instance %x of %s has left", instance.instance_id, self.address)
        if (dialing := self._dialing.pop(key, None)) is not None:
            dialing.cancel()
        connection = self._connections.pop(instance.instance_id, None)
        if connection is None:
            return
        if self._on_leave is not None:
            self._on_leave(instance.instance_id)
        task = asyncio.ensure_future(_close_when_idle(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _close_when_idle(connection: Connection) -> None:
    while connection.num_streams and not connection.is_closed:
        await asyncio.sleep(0.1)
    connection.close()

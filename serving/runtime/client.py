"""The calling side: connections to processes, streams of their answers, and clients of an endpoint."""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import msgspec

from foundation.log_levels import TRACE
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.messages import Call, CallError, Cancel, End, Frame, FrameError, Frames, Pause, Ping, Resume, frame
from serving.runtime.ports import Channel, Discovery, RequestPlane, Stop, guarded

log = logging.getLogger(__name__)

PAUSE_AT_ITEMS = 1000
"""Unread items at which a stream's producer is asked to pause."""

PING_S = 1.0
SILENT_S = 10.0
"""A process that has not answered pings for this long hangs, and counts as gone."""

REDIAL_S = 0.5


class ReplyStream:
    """The answer to one call: read it with `take`, or iterate."""

    __slots__ = ("_connection", "_is_paused", "_waiter", "end", "id", "items")

    def __init__(self, connection: "Connection", id: int) -> None:
        self.id = id
        self.items: list[Any] = []
        self.end: End | None = None
        self._connection = connection
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Any]:
        """Wait for news and return the items that arrived; at the end there may be none (see `end`)."""
        if not self.items and self.end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self.items = self.items, []
        if self._is_paused:
            self._is_paused = False
            self._connection.resume(self.id)
        return items

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield the items.

        Raises:
            CallError: the call failed.
        """
        try:
            while self.end is None or self.items:
                for item in await self.take():
                    yield item
            if self.end.kind:
                raise CallError(self.end.error, self.end.kind)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Report to the process that nobody is waiting any more; after the end, do nothing."""
        self._connection.forget(self.id, cancel=self.end is None)

    def abort(self, error: str, kind: str) -> None:
        """Cancel the call, and show its reader this end."""
        self.cancel()
        if self.end is None:
            self.end = End(self.id, error, kind)
            self.wake()

    def wake(self) -> None:
        """Let the reader continue."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif len(self.items) > PAUSE_AT_ITEMS and not self._is_paused:
            self._is_paused = True
            self._connection.pause(self.id)


class Connection:
    """A channel to a process, with any number of calls on it."""

    def __init__(self, channel: Channel, on_closed: Callable[["Connection"], None]) -> None:
        self.is_closed = False
        self._channel = channel
        self._on_closed = on_closed
        self._frames = Frames(Frame)
        self._streams: dict[int, ReplyStream] = {}
        self._ids = itertools.count()
        self._answered = asyncio.get_running_loop().create_future()
        self._heard = True
        self._silent_s = 0.0
        self._pinging = asyncio.create_task(self._ping())

    @staticmethod
    async def open(plane: RequestPlane, address: str, on_closed: Callable[["Connection"], None]) -> "Connection":
        """Connect, and wait for an answer: the kernel accepts connections even for a process that hangs.

        Raises:
            OSError: nobody answers.
        """
        made: list[Connection] = []

        def accept(channel: Channel) -> Connection:
            made.append(Connection(channel, on_closed))
            return made[0]

        try:
            await plane.dial(address, accept)
            connection = made[0]
            connection._send(Ping())
            if not await connection._answered or connection.is_closed:
                raise ConnectionRefusedError("it accepted the connection but does not answer")
        except BaseException:
            for connection in made:
                connection.close()
            raise
        return connection

    @property
    def num_streams(self) -> int:
        """Calls in progress."""
        return len(self._streams)

    def call(self, target: str, request: Any) -> ReplyStream:
        """Send a request to an endpoint of the process."""
        id = next(self._ids)
        stream = ReplyStream(self, id)
        if self.is_closed:
            stream.end = End(id, "the connection is closed", "lost")
            return stream
        self._streams[id] = stream
        self._send(Call(id, target, msgspec.Raw(msgspec.msgpack.encode(request))))
        return stream

    def pause(self, id: int) -> None:
        """Ask to pause a call."""
        self._send(Pause(id))

    def resume(self, id: int) -> None:
        """Let a call continue."""
        self._send(Resume(id))

    def forget(self, id: int, *, cancel: bool) -> None:
        """Stop waiting for a call."""
        if self._streams.pop(id, None) is not None and cancel:
            self._send(Cancel(id))

    def received(self, data: bytes) -> None:
        """Hand items to their streams."""
        self._heard = True
        self._settle(has_answered=True)
        streams = self._streams
        try:
            frames = self._frames.feed(data)
        except FrameError as error:
            log.warning("closed the connection to a process: %s", error)
            self.close()
            return
        for step in frames:
            log.log(TRACE, "received a frame: %d items, %d ends", len(step.items), len(step.ends))
            for id, item in zip(step.ids, step.items, strict=True):
                stream = streams.get(id)
                if stream is not None:
                    stream.items.append(item)
            for end in step.ends:
                stream = streams.pop(end.id, None)
                if stream is not None:
                    stream.end = end
                    stream.wake()
            for id in step.ids:
                stream = streams.get(id)
                if stream is not None:
                    stream.wake()

    def writable(self) -> None:
        """Do nothing: requests are small and are sent anyway."""

    def closed(self) -> None:
        """End all calls: the process is gone."""
        if self.is_closed:
            return
        self.is_closed = True
        self._settle(has_answered=False)
        self._pinging.cancel()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end = End(stream.id, "the process that served this is gone", "lost")
            stream.wake()
        self._on_closed(self)

    def close(self) -> None:
        """Hang up."""
        self.closed()
        self._channel.close()

    def _settle(self, *, has_answered: bool) -> None:
        if not self._answered.done():
            self._answered.set_result(has_answered)

    def _send(self, command: Any) -> None:
        if not self.is_closed:
            data = frame(command)
            log.log(TRACE, "sent %d bytes: %s", len(data), type(command).__name__)
            self._channel.write(data)

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(PING_S)
            now = loop.time()
            # The other side is not blamed for time in which we hung ourselves, or the way was cut.
            is_excused = self._heard or self._channel.is_cut
            self._silent_s = 0.0 if is_excused else self._silent_s + min(now - last, 2 * PING_S)
            last = now
            if self._silent_s > SILENT_S:
                if self._answered.done():
                    log.warning("a process has not answered for %.0f s and counts as gone", self._silent_s)
                self.close()
                return
            self._heard = False
            self._send(Ping())


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
        connection = self._connections.get(instance_id)
        if connection is None:
            raise CallError(f"{self.address} has no instance {instance_id:x}", "lost")
        return connection.call(self._target, request)

    def round_robin(self, request: Any) -> ReplyStream:
        """Call the instances in rotation."""
        ids = self._some()
        return self.direct(request, ids[next(self._turn) % len(ids)])

    generate = round_robin

    def random(self, request: Any) -> ReplyStream:
        """Call any instance."""
        return self.direct(request, random.choice(self._some()))

    def side_call(self, instance_id: int, address: EndpointAddress, request: Any) -> ReplyStream:
        """Call another endpoint of an instance's process.

        Raises:
            CallError: it is gone.
        """
        connection = self._connections.get(instance_id)
        if connection is None:
            raise CallError(f"{self.address} has no instance {instance_id:x}", "lost")
        return connection.call(".".join(address), request)

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

"""A connection to a process, with any number of calls on it, and the streams of their answers."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from foundation.log_levels import TRACE
from serving.runtime.messages import Call, CallError, Cancel, End, Frame, FrameError, Frames, Pause, Ping, Resume, frame
from serving.runtime.ports import Channel, RequestPlane

log = logging.getLogger(__name__)

PAUSE_AT_ITEMS = 1000
"""Unread items at which a stream's producer is asked to pause."""

PING_S = 1.0
SILENT_S = 10.0
"""A process that has not answered pings for this long hangs, and counts as gone."""

ANSWERING_S = 3.0
"""A process that has not answered pings for this long no longer counts as one that answers, whatever discovery lost."""


class Caller(Protocol):
    """What the answers of calls ask of what made the calls."""

    def pause(self, id: int) -> None:
        """Ask to pause a call."""
        ...

    def resume(self, id: int) -> None:
        """Let a call continue."""
        ...

    def forget(self, id: int, *, cancel: bool) -> None:
        """Stop waiting for a call."""
        ...


class ReplyStream:
    """The answer to one call: read it with `take`, or iterate."""

    __slots__ = ("_caller", "_is_paused", "_num_taken", "_waiter", "end", "has_stopped", "id", "items")

    def __init__(self, caller: Caller, id: int) -> None:
        self.id = id
        self.items: list[Any] = []
        self.end: End | None = None
        self.has_stopped = False
        """Whether its reader has all it wants: what it cancels is finished to it."""
        self._caller = caller
        self._is_paused = False
        self._num_taken = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any item has arrived."""
        return bool(self._num_taken or self.items)

    async def take(self) -> list[Any]:
        """Wait for news and return the items that arrived; at the end there may be none (see `end`)."""
        if not self.items and self.end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        items, self.items = self.items, []
        self._num_taken += len(items)
        if self._is_paused:
            self._is_paused = False
            self._caller.resume(self.id)
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
        self._caller.forget(self.id, cancel=self.end is None)

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
            self._caller.pause(self.id)


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

    @property
    def is_answering(self) -> bool:
        """Whether the process answers pings, as far as the way to it allows."""
        return not self.is_closed and self._silent_s < ANSWERING_S

    def call(self, target: str, request: Any) -> ReplyStream:
        """Send a request to an endpoint of the process."""
        id = next(self._ids)
        stream = ReplyStream(self, id)
        if self.is_closed:
            stream.end = End(id, "the connection is closed", "lost")
            return stream
        if outage := self._channel.outage:
            self._channel.count_given_up()
            stream.end = End(id, outage, "unavailable")
            return stream
        self._streams[id] = stream
        self._send(Call(id, target, msgspec.Raw(msgspec.msgpack.encode(request))))
        return stream

    def pause(self, id: int) -> None:
        """See `Caller`."""
        self._send(Pause(id))

    def resume(self, id: int) -> None:
        """See `Caller`."""
        self._send(Resume(id))

    def forget(self, id: int, *, cancel: bool) -> None:
        """See `Caller`."""
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
        is_traced = log.isEnabledFor(TRACE)  # asked once a read: a frame comes with every token
        for step in frames:
            if is_traced:
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
            if outage := self._channel.outage:
                self._give_up(outage)
            else:
                self._send(Ping())

    def _give_up(self, outage: str) -> None:
        """End the calls whose answers have not begun: those that have go on once the way is restored."""
        for stream in [stream for stream in self._streams.values() if not stream.has_begun]:
            self._channel.count_given_up()
            stream.abort(outage, "unavailable")

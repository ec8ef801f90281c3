"""The serving side of a process: sessions with its clients, and the streams that answer calls."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from foundation.log_levels import TRACE
from foundation.ordered_set import OrderedSet
from serving.runtime.messages import (
    Call,
    CallError,
    Cancel,
    Command,
    End,
    Frame,
    FrameError,
    Frames,
    Pause,
    Ping,
    Resume,
    as_list,
    frame,
)
from serving.runtime.ports import Channel, guarded
from serving.runtime.world import world

log = logging.getLogger(__name__)

FRAME_GAP_S = 0.001
"""A frame costs about the same whatever it contains. It is sent at once if the last was this long ago, else waits."""

UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Raised by encoding for types and integers that msgpack does not have, odd texts, and deep nesting."""

MAX_CALLS = 65_536
"""The most calls that one process may have open for one client."""


class Audience(Protocol):
    """Those who hear the answers to calls."""

    @property
    def is_full(self) -> bool:
        """Whether they accept nothing more for now."""
        ...

    def push(self, id: int, item: Any) -> None:
        """Pass on an item of a call."""
        ...

    def finish(self, id: int, end: End) -> None:
        """Pass on the end of a call."""
        ...


class AnswerStream:
    """The answer to one call: items, then one end. Nothing here waits; look at `is_blocked` to be fair to slow readers."""

    __slots__ = ("_audience", "_is_paused", "has_stopped", "id", "is_over", "on_cancel", "on_unblocked")

    def __init__(self, audience: Audience, id: int) -> None:
        self.id = id
        self.is_over = False
        """Whether it has ended, or nobody is waiting for it any more."""
        self.has_stopped = False
        """Whether a reader in this process had all it wanted when it cancelled."""
        self.on_cancel: Callable[[], object] | None = None
        self.on_unblocked: Callable[[], object] | None = None
        self._audience = audience
        self._is_paused = False

    @property
    def is_blocked(self) -> bool:
        """Whether its reader, or the whole client, accepts nothing more for now; `on_unblocked` is called later."""
        return self._is_paused or self._audience.is_full

    def send(self, item: Any) -> None:
        """Send an item with this turn's frame."""
        self._audience.push(self.id, item)

    def end(self, error: str = "", kind: str = "") -> None:
        """End the stream; a second end changes nothing."""
        if not self.is_over:
            self.is_over = True
            self._finish(error, kind)

    def fail(self, error: Exception) -> None:
        """End the stream, whose engine raised an error; others share the connection, so it must not go further."""
        log.error("an engine failed on call %d", self.id, exc_info=error)
        if not self.is_over:
            self.cancel()
            self._finish(f"the engine failed on this request: {type(error).__name__}: {error}", "engine")

    def _finish(self, error: str, kind: str) -> None:
        error = error.encode(errors="replace").decode()  # text that is not valid Unicode could not be sent
        self._audience.finish(self.id, End(self.id, error, kind))

    def cancel(self) -> None:
        """Nobody is waiting any more."""
        if not self.is_over:
            self.is_over = True
            if self.on_cancel is not None:
                guarded(self.on_cancel, "a cancelled call")()

    def pause(self) -> None:
        """The reader is slow."""
        self._is_paused = True

    def resume(self) -> None:
        """The reader continues."""
        self._is_paused = False
        self.unblock()

    def unblock(self) -> None:
        """Notify the producer if it may continue."""
        if self.is_blocked or self.on_unblocked is None or self.is_over:
            return
        try:
            self.on_unblocked()
        except Exception as error:
            self.fail(error)


Service = Callable[[Any, AnswerStream], None]
"""Handles a request: sends items to the stream, now or later, and ends it. If it raises, only this call fails."""


class ClientSession:
    """One client process, whose calls are multiplexed on one channel."""

    def __init__(self, channel: Channel, services: dict[str, Service], sessions: OrderedSet["ClientSession"]) -> None:
        self._channel = channel
        self._services = services
        self._sessions = sessions
        self._frames = Frames(Command)
        self._streams: dict[int, AnswerStream] = {}
        self._ids: list[int] = []
        self._items: list[Any] = []
        self._ends: list[End] = []
        self._will_flush = False
        self._now = world().now
        self._flushed = 0.0
        sessions.add(self)

    @property
    def is_full(self) -> bool:
        """See `Audience`."""
        return self._channel.is_full

    @property
    def num_streams(self) -> int:
        """Calls in progress."""
        return len(self._streams)

    def push(self, id: int, item: Any) -> None:
        """See `Audience`: it goes into this turn's frame."""
        self._ids.append(id)
        self._items.append(item)
        if not self._will_flush:
            self._flush_soon()

    def finish(self, id: int, end: End) -> None:
        """See `Audience`: it goes into this turn's frame."""
        log.debug("call %d has %s", id, f"failed ({end.kind}): {end.error}" if end.kind else "ended")
        self._streams.pop(id, None)
        self._ends.append(end)
        if not self._will_flush:
            self._flush_soon()

    def flush(self) -> None:
        """Send this turn's frame."""
        self._will_flush = False
        self._flushed = self._now()
        if self._ids or self._ends:
            turn = Frame(self._ids, self._items, self._ends)
            self._ids, self._items, self._ends = [], [], []
            try:
                data = frame(turn)
            except UNENCODABLE:
                data = frame(self._without_unencodable(turn))
            if log.isEnabledFor(TRACE):
                log.log(TRACE, "sent a frame of %d bytes: %d items, %d ends", len(data), len(turn.ids), len(turn.ends))
            self._channel.write(data)

    def _without_unencodable(self, turn: Frame) -> Frame:
        """End the streams whose items cannot be sent, so that the other streams of this turn do not suffer."""
        errors: dict[int, End] = {}
        for id, item in zip(turn.ids, turn.items, strict=True):
            try:
                msgspec.msgpack.encode(item)
            except UNENCODABLE as error:
                errors.setdefault(id, End(id, f"the engine returned an item that cannot be sent: {error}", "engine"))
        for id in errors:
            if (stream := self._streams.pop(id, None)) is not None:
                stream.cancel()
        kept = [(id, item) for id, item in zip(turn.ids, turn.items, strict=True) if id not in errors]
        ends = [end for end in turn.ends if end.id not in errors]
        return Frame([id for id, _ in kept], [item for _, item in kept], [*ends, *errors.values()])

    def _flush_soon(self) -> None:
        self._will_flush = True
        loop = asyncio.get_running_loop()
        if self._now() - self._flushed < FRAME_GAP_S:
            loop.call_later(FRAME_GAP_S, self.flush)
        else:
            loop.call_soon(self.flush)

    def received(self, data: bytes) -> None:
        """Process commands."""
        try:
            commands = self._frames.feed(data)
        except FrameError as error:
            log.warning("closed a client's connection: %s", error)
            self._channel.close()
            return
        if log.isEnabledFor(TRACE):
            names = [f"{type(command).__name__} {getattr(command, 'id', '')}".strip() for command in commands]
            log.log(TRACE, "received %d bytes: %s", len(data), ", ".join(names) or "not yet a whole frame")
        for command in commands:
            if isinstance(command, Call):
                self._start(command)
            elif isinstance(command, Ping):
                self._channel.write(frame(Frame([], [], [])))
            elif (stream := self._streams.get(command.id)) is not None:
                if isinstance(command, Cancel):
                    log.debug("call %d was cancelled", command.id)
                    del self._streams[command.id]
                    stream.cancel()
                elif isinstance(command, Pause):
                    stream.pause()
                elif isinstance(command, Resume):
                    stream.resume()

    def writable(self) -> None:
        """Let the producers continue."""
        for stream in list(self._streams.values()):
            stream.unblock()

    def closed(self) -> None:
        """Cancel everything: the client is gone."""
        self._sessions.discard(self)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cancel()

    def end_all(self, error: str, kind: str) -> None:
        """End every call with an error."""
        for stream in list(self._streams.values()):
            stream.cancel()
            self.finish(stream.id, End(stream.id, error, kind))
        self.flush()

    def hang_up(self) -> None:
        """Close the channel, which ends every call: nobody here will answer them."""
        self.flush()
        self._channel.close()

    def _start(self, call: Call) -> None:
        log.debug("call %d of %s, with a request of %d bytes", call.id, call.target, len(memoryview(call.request)))
        stream = AnswerStream(self, call.id)
        service = self._services.get(call.target)
        self._streams[call.id] = stream
        if service is None:
            stream.end(f"this process does not serve {call.target} (any more)", "unknown")
        elif len(self._streams) > MAX_CALLS:
            stream.end(f"more than {MAX_CALLS} calls are open", "overloaded")
        else:
            try:
                service(call.request, stream)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                stream.end(f"not a request for {call.target}: {error}", "invalid")
            except Exception as error:
                stream.fail(error)


class RequestDialect(NamedTuple):
    """How a handler's requests and items differ from those that travel."""

    request: Callable[[Any], Any]
    """Raises `msgspec.ValidationError` for what cannot be a request."""
    item: Callable[[Any], Any]


class GeneratorService:
    """Serves an async generator function: `handler(request)` or `handler(request, context)`."""

    def __init__(
        self, handler: Callable[..., AsyncIterator[Any]], dialect: Callable[[], RequestDialect | None] = lambda: None
    ) -> None:
        """Serve a handler.

        Args:
            handler: the function.
            dialect: returns the handler's, for each call (None: it takes what travels).
        """
        self._handler = handler
        self._dialect = dialect
        parameters = [
            parameter
            for parameter in inspect.signature(handler).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._wants_context = len(parameters) > 1
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests in progress."""
        return len(self._tasks)

    def __call__(self, request: msgspec.Raw, stream: AnswerStream) -> None:
        """Run the handler for a request."""
        decoded, dialect = msgspec.msgpack.decode(request, ext_hook=as_list), self._dialect()
        asked = decoded if dialect is None else dialect.request(decoded)
        task = asyncio.create_task(self._run(asked, stream, None if dialect is None else dialect.item))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        stream.on_cancel = task.cancel

    async def _run(self, request: Any, stream: AnswerStream, travelling: Callable[[Any], Any] | None) -> None:
        gate = asyncio.Event()
        stream.on_unblocked = gate.set
        items = self._handler(request, Context(stream)) if self._wants_context else self._handler(request)
        try:
            async for item in items:
                if stream.is_over:
                    break
                stream.send(item if travelling is None else travelling(item))
                while stream.is_blocked:
                    gate.clear()
                    await gate.wait()
        except CallError as error:
            stream.end(str(error), error.kind)
        except Exception as error:
            log.exception("an engine's handler failed")
            stream.end(f"the engine failed on this request: {type(error).__name__}: {error}", "engine")
        else:
            stream.end()
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()


class Context:
    """What a handler can find out about its request."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    def id(self) -> str:
        """Return the call's number."""
        return str(self._stream.id)

    def is_stopped(self) -> bool:
        """Return whether nobody is waiting for the answer any more."""
        return self._stream.is_over

    is_killed = is_stopped

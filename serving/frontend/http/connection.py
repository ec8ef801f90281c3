"""One client's connection: everything that the client sends is bounded in bytes and in seconds.

    idle ---first byte---> head ---blank line---> body ---its end---> idle
     |                      |                      |
     closed after 75 s      408 after 10 s         read by the handler within its own limits; the rest is discarded
     (10 s if new)          414, 431 above         for 5 s and 64 MiB, then the connection is closed
                            their limits           400 above the limit for bytes that are not body

    The parser cannot be stopped midway, so it is fed small pieces. Between two pieces we wait while the queue of
    pipelined requests is full. A rejected request is answered in its turn; then the rest of the input is discarded for
    a moment: closing at once would reset the connection, and the client might lose the answer.

uvicorn handles HTTP; docs/decisions/0013-bounded-connections.md says which of its internals this file relies on.
"""

import asyncio
import logging
from collections.abc import Iterable
from enum import Enum
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import body_at
from serving.frontend.http.limits import MAX_HEAD_BYTES, Limits, body_excess, check_head, head_excess
from serving.frontend.http.transport import PausableFlow, Transport
from serving.runtime.turn import TurnTransport

log = logging.getLogger(__name__)

PIECE_BYTES = 2048
"""How much the parser is fed at once, unless it is known to be body: at most 113 of the shortest requests."""

PIECES_A_TURN = 16
"""After this many pieces, other connections get a turn: a piece of one-byte chunks takes 0.3 ms."""


HANG_UP = "dynabench.hang_up"
"""In a request's scope: closes its connection, after what was sent."""


class Phase(Enum):
    """What the next byte belongs to."""

    IDLE = 0
    HEAD = 1
    BODY = 2


IDLE, HEAD, BODY = Phase  # in Python 3.11, reading a class's attributes is slower


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._phase = IDLE
        self._since = 0.0
        """When it started to wait: for a request's head, for its end, or for the next one."""
        self._num_fed = 0
        self._num_body = 0
        """Bytes that the parser was fed of the head, or after it; and how many of them were body."""
        self._num_expected = 0
        """Bytes of the body still to come, 0 if the request does not say."""
        self._num_thrown = 0
        self._unparsed: memoryview | None = None
        """Bytes that wait for their turn or for room in the queue."""
        self._is_scheduled = False
        self._is_deaf = False
        """Whether all further input is discarded."""
        self._refusal: ApiError | None = None
        """The last answer, to be sent after those before it."""
        self._answering: RequestResponseCycle | None = None
        """The request whose turn it is; `cycle` is the last one parsed."""
        self._is_lingering = False
        self._unread_since = 0.0
        self._closed_since = 0.0
        self._wire: TurnTransport
        self.flow: PausableFlow
        self.url = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over a new connection."""
        super().connection_made(transport)
        self._wire = TurnTransport(transport)
        self._since = self.loop.time()
        self.flow = PausableFlow(transport)
        wire = Transport(transport, write=self._wire.write_answer, close=self.hang_up, is_closing=self.is_hung_up)
        self.transport = cast(asyncio.Transport, wire)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request in progress; uvicorn would not disconnect a request that has others queued behind it."""
        self._phase = IDLE
        self._is_deaf, self._unparsed = True, None
        self.pipeline.clear()
        if (current := self._answering) is not None and not current.response_complete:
            current.disconnected = True
            current.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note since when the client has left its answer unread."""
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client is reading again."""
        self._unread_since = 0.0
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sends, in pieces."""
        if self._is_deaf:
            self._throw_away(len(data))
        elif self._unparsed is not None:  # read before the pause took effect
            self._unparsed = memoryview(b"".join((self._unparsed, data)))
        elif not self.pipeline and len(data) <= max(PIECE_BYTES, self._num_expected):
            self._feed(data)
        else:
            self._unparsed = memoryview(data)
            self._go_on()

    def on_message_begin(self) -> None:
        """Note that a request's head has started."""
        super().on_message_begin()
        self._phase = HEAD
        self._since = self.loop.time()

    def on_headers_complete(self) -> None:
        """Check the head; an error raised here stops the parser, and `_feed` answers it."""
        self._num_expected = self._check_head()
        if self.parser.should_upgrade():
            return  # `_ignore_offer` sends the head through the parser once more
        super().on_headers_complete()
        self._phase = BODY
        self._num_fed = self._num_body = self._num_thrown = 0
        self.headers = []  # trailers come here, not into the request's headers

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of body, unless its request is already answered."""
        self._num_body += len(body)
        self._num_expected -= len(body)
        if self.cycle.response_complete:
            self._throw_away(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request, if there may be one."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._phase = IDLE
        self._num_fed = self._num_body = self._num_thrown = self._num_expected = 0
        if not self.cycle.keep_alive:
            self._be_deaf()
        elif self.cycle.response_complete:
            self._since = self.loop.time()

    def on_response_complete(self) -> None:
        """Start the next request, or wait for one. uvicorn's own version arms a timer for each request; see `sweep`."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._since = self.loop.time()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._answer_refusal(self._refusal)
            return
        elif self._phase is BODY and self.expect_100_continue:
            self._linger()  # we never asked for the body: the next bytes may be another request
            return
        self.flow.resume_reading()
        if self._unparsed is not None:
            self._schedule()

    def check_time(self, now: float) -> None:
        """Close the connection, or answer 408, if its client has taken too long."""
        limits, waited = self._limits, now - self._since
        if self._wire.is_closing():
            self._closed_since = self._closed_since or now
            if now - self._closed_since > limits.unread_timeout_s:
                self._wire.abort()
        elif self._unread_since and now - self._unread_since > limits.unread_timeout_s:
            log.info("closed the connection of a client that left its answer unread for %g s", limits.unread_timeout_s)
            self._wire.abort()
        elif self._is_lingering:
            if waited > limits.linger_s:
                self._wire.close()
        elif self._is_answering():
            return
        elif self._phase is HEAD:
            if waited > limits.head_timeout_s:
                self._refuse(ApiError(408, f"the headers did not arrive within {limits.head_timeout_s:g} s"))
        elif waited > self._patience_s():
            self._wire.close()

    def hang_up(self) -> None:
        """Close the connection once the output is sent; uvicorn calls this as its transport's `close`."""
        if self._phase is BODY and not self._is_lingering:
            self._linger()
        else:
            self._wire.close()

    def is_hung_up(self) -> bool:
        """Return whether nothing more can be sent."""
        return self._is_lingering or self._wire.is_closing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cast(dict[str, Any], cycle.scope)[HANG_UP] = self._wire.close
        super()._start_asgi_task(cycle, _until_closed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def _is_answering(self) -> bool:
        current = self._answering
        return current is not None and not (current.response_complete or current.disconnected)

    def _patience_s(self) -> float:
        if self._phase is BODY:
            return self._limits.linger_s
        return self._limits.head_timeout_s if self.cycle is None else self._limits.idle_timeout_s

    def _go_on(self) -> None:
        """Parse what has arrived, until the queue is full or others get a turn."""
        self._is_scheduled = False
        if self._wire.is_closing():
            return
        for _ in range(PIECES_A_TURN):
            if self._unparsed is None:
                break
            if len(self.pipeline) >= self._limits.max_pipelined:
                self.flow.hold()  # `on_response_complete` continues
                return
            size = max(PIECE_BYTES, self._num_expected)
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:] or None
            self._feed(piece)
        if self._unparsed is not None:
            self.flow.hold()
            self._schedule()
        elif not self._is_deaf:
            self.flow.release()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._go_on)

    def _feed(self, piece: bytes | memoryview) -> None:
        self._num_fed += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            rest = bytes(piece[offer.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, f"this is not HTTP/1.1: {error}"))
            return
        else:
            if self._num_fed > MAX_HEAD_BYTES and (excess := self._excess()) is not None:
                self._refuse(excess)
            return
        self._ignore_offer(rest)  # not while the offer is handled: it would be the context of every error in the rest

    def _ignore_offer(self, rest: bytes) -> None:
        """Parse a request that offers another protocol as one that does not (RFC 9110, 7.8).

        The parser takes what follows such a head for the other protocol: a new one gets the head without the offer.
        """
        version = self.parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        headers = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"http2-settings")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._num_fed = 0
        self._feed(line + _lines(headers) + b"\r\n" + rest)

    def _check_head(self) -> int:
        """Return the body's length, 0 if it is not given.

        Raises:
            ApiError: the head is over a limit, or asks for something other than HTTP/1.1.
        """
        if self._is_deaf:
            raise ApiError(400, "a request after the last one")
        length = check_head(self.url, self.headers)
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ApiError(400, f"HTTP/{version} is not supported, only HTTP/1.1")
        if self.parser.should_upgrade() and self.parser.get_method() == b"CONNECT":
            raise ApiError(405, "this server is not a proxy", headers={"allow": "GET, POST"})
        return length

    def _excess(self) -> ApiError | None:
        """Return the error if too many bytes are not body."""
        return body_excess(self._num_fed, self._num_body) if self._phase is BODY else head_excess(self.url)

    def _refuse(self, error: ApiError) -> None:
        """Stop reading; answer with an error once the requests before it are answered."""
        if self._is_deaf:
            return
        log.debug("refused: %s", error)
        self._be_deaf()
        if self._phase is BODY and not self._withdraw():
            return
        self._refusal = error
        if self._is_answering():
            self.flow.hold()
        else:
            self._answer_refusal(error)

    def _withdraw(self) -> bool:
        """Withdraw the request whose body is at fault; return whether it must still be answered."""
        culprit = self.cycle
        if culprit is not self._answering:
            self.pipeline.popleft()  # the last one parsed
            return True
        if culprit.response_complete:
            self._linger()
            return False
        if culprit.response_started:
            self._wire.close()  # an answer cannot be written into another
            return False
        culprit.disconnected = True
        culprit.message_event.set()
        return True

    def _answer_refusal(self, error: ApiError) -> None:
        path = b"" if self._phase is IDLE else self.url.partition(b"?")[0].rstrip(b"/")
        body = body_at(path.decode("latin-1"), error)
        given = error.headers | {"content-type": "application/json", "connection": "close"}
        headers = [(name.encode(), value.encode()) for name, value in given.items()]
        headers += [*self.server_state.default_headers, (b"content-length", b"%d" % len(body))]
        self._wire.write(STATUS_LINE[error.status] + _lines(headers) + b"\r\n" + body)
        self._linger()

    def _linger(self) -> None:
        """Signal that we are done, and discard further input for a short while, until the client hangs up."""
        if self.is_hung_up():
            return
        self._is_lingering = True
        self._since = self.loop.time()
        self._be_deaf()
        self.flow.resume_reading()
        self._wire.write_eof()

    def _be_deaf(self) -> None:
        self._is_deaf = True
        self._unparsed = None
        self.flow.release()

    def _throw_away(self, num_bytes: int) -> None:
        self._num_thrown += num_bytes
        if self._num_thrown > self._limits.linger_bytes:
            self._wire.abort()


async def sweep_connections(connections: Iterable[Any], limits: Limits) -> None:
    """Forever: close the connections whose clients take too long.

    Checking all of them every second costs less than a timer for each, armed and cancelled with every request.
    """
    shortest = min(limits.head_timeout_s, limits.idle_timeout_s, limits.linger_s, limits.unread_timeout_s)
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(shortest / 4, 1))
        now = loop.time()
        for connection in list(connections):
            try:
                connection.check_time(now)
            except Exception:  # in one connection: the others keep their deadlines
                log.exception("a connection could not be checked")


def _until_closed(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Answer with a body that ends with the connection: HTTP/1.0 knows no chunks."""
    cycle.chunked_encoding = False

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_counted(message: Any) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_counted)

    return answer


def _lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)

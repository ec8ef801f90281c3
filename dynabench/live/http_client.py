"""A small HTTP/1.1 client for streamed answers: no tasks, no objects per chunk, and one clock reading per read."""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httptools

from dynabench.live.tunnel import open_tunnel
from dynabench.proxy import Proxy
from serving.runtime.world import world


def clock() -> float:
    """Return the time (s) on the clock of all times of this client."""
    return world().now()


IDLE_LIMIT = 1 << 16
"""Most idle connections that are kept."""
HEAD_LIMIT = 1 << 16
"""Most bytes of an answer's head."""
NO_CONNECTION = "no connection: the client has as many open as it may"
"""Why a request fails for which no further connection may be opened."""


class Exchange(Protocol):
    """One request and its answer; the connection calls these methods."""

    def on_status(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        """The answer's head has arrived."""

    def on_data(self, data: bytes, now: float) -> None:
        """Part of the body has arrived: everything from one read."""

    def on_end(self, now: float) -> None:
        """The answer is complete."""

    def on_failure(self, reason: str, now: float) -> None:
        """There will be no (more) answer."""


class Message(NamedTuple):
    """A request to send."""

    data: bytes
    exchange: Exchange
    on_sent: Callable[[float], None]


class HttpPool:
    """Connections to one server, as many as there are exchanges, up to a limit beyond which exchanges fail.

    A server may close a connection that it has kept just when the next request arrives. That request is sent again, on
    a new connection:

        new --answered--> kept --sent--> busy --closed before any byte--> sent again on a new one
                                              --closed later-----------> failed
        new --sent--> busy --closed-----------------------------------> failed
    """

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, proxy: Proxy | None = None, *, most: int | None = None
    ) -> None:
        """Open nothing yet; at most `most` connections are open at once (None: as many as are needed)."""
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2]
        self._tls = tls
        self._proxy = proxy
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._dialling: dict[Exchange, asyncio.Task[_Connection]] = {}
        self._most = most
        self.num_retried = 0
        """Requests that were sent again."""

    def head(self, path: str, headers: dict[str, str]) -> bytes:
        """Return the part of a POST's head that is the same for every body."""
        place = f"{self.path}{path}"
        if self._proxy is not None and self._tls is None:  # it reads the request, and there is no tunnel
            place, headers = f"http://{self.authority}{place}", self._proxy.headers | headers
        lines = [f"POST {place} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in ({"host": self.authority} | headers).items()]
        return "\r\n".join([*lines, "content-length: "]).encode()

    def send(self, head: bytes, body: bytes, exchange: Exchange, on_sent: Callable[[float], None]) -> None:
        """Send a request, immediately if there is an idle connection, otherwise once one is open."""
        message = Message(b"%b%d\r\n\r\n%b" % (head, len(body), body), exchange, on_sent)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                connection.begin(message)
                return
        if self._most is not None and len(self._all) + len(self._dialling) >= self._most:
            asyncio.get_running_loop().call_soon(self._fail, message, NO_CONNECTION)  # later: it may send the next one
            return
        self._dial(message)

    def abort(self, exchange: Exchange) -> None:
        """End an exchange by closing its connection, or by not opening one."""
        if (dialling := self._dialling.pop(exchange, None)) is not None:
            dialling.cancel()
            return
        for connection in self._all:
            if connection.exchange is exchange:
                connection.abort()
                return

    async def close(self) -> None:
        """Close every connection."""
        dialling = list(self._dialling.values())
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        for connection in list(self._all):
            connection.abort()
        await asyncio.sleep(0)

    def _dial(self, message: Message) -> None:
        """Open a connection and send a request.

        Exchanges are not called by the task: the loop hears at once of what a callback raises, and of a task's when
        nobody refers to it any more.
        """
        self._dialling[message.exchange] = task = asyncio.ensure_future(self._open())
        task.add_done_callback(partial(self._on_dialled, message))

    def _on_dialled(self, message: Message, task: "asyncio.Task[_Connection]") -> None:
        if task.cancelled():
            return
        is_wanted = self._dialling.pop(message.exchange, None) is not None
        try:
            connection = task.result()
        except (OSError, UnicodeError) as error:  # UnicodeError: the host's name is invalid
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            if is_wanted:
                self._fail(message, f"cannot connect to {self.authority}: {reason}")
            return
        if is_wanted:
            connection.begin(message)
        else:  # it was given up just now
            self._on_free(connection)

    def _fail(self, message: Message, reason: str) -> None:
        now = clock()
        message.on_sent(now)
        message.exchange.on_failure(reason, now)

    async def _open(self) -> "_Connection":
        """Open a connection to the server, through the proxy if there is one."""
        loop, proxy = asyncio.get_running_loop(), self._proxy
        if proxy is None or self._tls is None:
            place = (self.host, self.port) if proxy is None else (proxy.host, proxy.port)
            _, connection = await loop.create_connection(lambda: _Connection(self), *place, ssl=self._tls)
            return connection
        tunnel, connection = await open_tunnel(proxy, self.host, self.port), _Connection(self)
        encrypted = await loop.start_tls(tunnel, connection, self._tls, server_hostname=self.host)
        connection.connection_made(encrypted)
        return connection

    def _again(self, message: Message) -> None:
        """Send a request again on a new connection; it counts as sent when it first was."""
        self.num_retried += 1
        self._dial(message._replace(on_sent=_is_sent))

    def _on_made(self, connection: "_Connection") -> None:
        self._all.add(connection)

    def _on_free(self, connection: "_Connection") -> None:
        if len(self._idle) < IDLE_LIMIT:
            self._idle.append(connection)
        else:
            connection.abort()

    def _on_lost(self, connection: "_Connection") -> None:
        self._all.discard(connection)


def _is_sent(now: float) -> None:
    """Leave the time of the first sending as it is."""


class _Connection(asyncio.Protocol):
    """One connection and its exchange; httptools calls the `on_` methods by name."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._is_kept = False
        """Whether it has served a request before this one."""
        self._unanswered: Message | None = None
        """The request, until the first byte of its answer."""
        self.exchange: Exchange | None = None
        self.is_open = False
        self._parser: Any = None
        self._parts: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._head_size = 0
        self._has_head = False
        self._has_ended = False
        self._keeps_alive = True
        self._now = 0.0

    def begin(self, message: Message) -> None:
        """Send a request."""
        self.exchange = message.exchange
        self._unanswered = message
        self._headers = {}
        self._head_size, self._has_head = 0, False
        self._parser = httptools.HttpResponseParser(self)
        message.on_sent(clock())
        self._transport.write(message.data)

    def abort(self) -> None:
        """Close the connection immediately."""
        self.is_open = False
        self.exchange = None
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True
        self._pool._on_made(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.abort()  # the server sends data before it was asked
            return
        self._now = now = clock()
        self._unanswered = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort()
            exchange.on_failure(f"the answer is not valid HTTP/1.1: {error}", now)
            return
        if not self._has_head:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self.abort()
                exchange.on_failure(f"the headers of the answer are longer than {HEAD_LIMIT:,} bytes", now)
            return
        parts = self._parts
        if parts:
            exchange.on_data(parts[0] if len(parts) == 1 else b"".join(parts), now)
            self._parts = []
        if self._has_ended and self.exchange is exchange:  # it may have been given up
            self._finish(exchange, now)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._pool._on_lost(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        if self._is_kept and self._unanswered is not None:
            self._pool._again(self._unanswered)
            return
        now = clock()
        if self._has_head and b"content-length" not in self._headers and b"transfer-encoding" not in self._headers:
            exchange.on_end(now)  # the body lasts until the connection ends
        else:
            exchange.on_failure("the server closed the connection", now)

    def _finish(self, exchange: Exchange, now: float) -> None:
        self._has_ended = False
        self.exchange = None
        self._is_kept = True
        if self._keeps_alive and self.is_open:
            self._pool._on_free(self)
        else:
            self.abort()
        exchange.on_end(now)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; trailers count towards the limit, but are not used."""
        if not self._has_head:
            self._headers[name.lower()] = value
            return
        self._head_size += len(name) + len(value)
        if self._head_size > HEAD_LIMIT:
            raise ValueError(f"the trailers of the answer are longer than {HEAD_LIMIT:,} bytes")

    def on_headers_complete(self) -> None:
        """Report the head to the exchange."""
        assert self.exchange is not None
        self._has_head = True
        if self._parser.get_status_code() < 200:
            return
        self.exchange.on_status(self._parser.get_status_code(), self._headers, self._now)

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body until the read is over."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer; interim answers (100, 103) do not count."""
        if self._parser.get_status_code() < 200:
            self._has_head, self._headers = False, {}
            return
        self._has_ended = True
        self._keeps_alive = self._parser.should_keep_alive()

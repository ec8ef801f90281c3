"""The application behind its faults: some requests do not reach it, and some of its answers do not arrive whole."""

import asyncio
import re
from collections.abc import Callable, Collection, Iterator

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.frontend.answers.sending import BEGUN, until_gone
from serving.frontend.api.errors import ApiError
from serving.frontend.dialect import Dialect
from serving.frontend.http.connection import HANG_UP
from serving.runtime.stopping import cancel_all
from serving.stand_in.faults.choice import Fault
from serving.stand_in.faults.state import ENGINE_DEATH, Faults

HEALTH = ("/health", "/ping")

Refuse = Callable[[str, ApiError], Response]

EVENT = re.compile(rb".*?\n\n", re.DOTALL)


def faulty(app: ASGIApp, faults: Faults, dialect: Dialect, answers: Collection[str]) -> "FaultyApp":
    """Return an application behind its faults, whose errors have the form that clients of the dialect expect."""
    return FaultyApp(app, faults, dialect.error_response, answers)


class FaultyApp:
    """See the module."""

    def __init__(self, app: ASGIApp, faults: Faults, refuse: Refuse, answers: Collection[str]) -> None:
        """Stand in front of an application.

        Args:
            app: the application.
            faults: what goes wrong.
            refuse: returns an error as an answer, in the form that a path's errors have.
            answers: paths whose POST requests are for the engine.
        """
        self._app = app
        self._faults = faults
        self._refuse = refuse
        self._answers = answers
        self._scraped: list[Message] = []  # the last answer of /metrics, if it is to freeze

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or fail to."""
        path, method = scope["path"].rstrip("/"), scope.get("method")
        if path in self._answers and method == "POST":
            await self._answer(path, scope, receive, send)
        elif path == "/metrics":
            await self._scrape(path, scope, receive, send)
        elif path in HEALTH and self._faults.health is not None:
            self._faults.count("health")
            await Response(status_code=self._faults.health)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        faults = self._faults
        fault = faults.next_fault(scope["headers"])
        try:
            if faults.is_engine_dead:
                await self._refuse(path, ApiError(500, ENGINE_DEATH))(scope, receive, send)
            elif fault.kind == "disconnect":
                faults.count("disconnect")
                scope[HANG_UP]()
                await until_gone(receive)
            elif fault.kind or fault.first_byte_s or faults.config.token is not None:
                sending = _Sending(fault, faults, scope, receive, send)
                await (self._error(path, fault) or self._app)(scope, receive, sending)
                if sending.is_cut:
                    await until_gone(receive)
            else:
                await self._app(scope, receive, send)
        finally:
            faults.answered()
            if faults.is_engine_dead and BEGUN not in scope:
                faults.miss_engine()

    def _error(self, path: str, fault: Fault) -> Response | None:
        if not fault.status:
            return None
        self._faults.count(fault.kind)
        return self._refuse(path, ApiError(fault.status, f"a {fault.status} on purpose"))

    async def _scrape(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        faults = self._faults
        await _pause(faults.scrape_delay_s(), receive)
        if faults.fails_scrape():
            await self._refuse(path, ApiError(500, "a 500 on purpose"))(scope, receive, send)
        elif faults.config.metrics_freeze is None:
            self._scraped.clear()
            await self._app(scope, receive, send)
        elif faults.is_metrics_frozen and self._scraped:
            for message in self._scraped:
                await send(message)
        else:
            self._scraped.clear()

            async def keep(message: Message) -> None:
                self._scraped.append(message)
                await send(message)

            await self._app(scope, receive, keep)


class _Sending:
    """Sends an answer late, stops in it, or does not finish it."""

    def __init__(self, fault: Fault, faults: Faults, scope: Scope, receive: Receive, send: Send) -> None:
        self.is_cut = False
        self._fault = fault
        self._faults = faults
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_stream = False
        self._is_over = False  # what happens in its middle has happened
        self._num_sent = 0

    async def __call__(self, message: Message) -> None:
        """See ASGI."""
        if self.is_cut:
            return
        if message["type"] == "http.response.body":
            await self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
            return
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            if self._fault.first_byte_s:
                self._faults.count("first_byte")
                await _pause(self._fault.first_byte_s, self._receive)
        await self._send(message)

    async def _send_body(self, body: bytes, *, is_last: bool) -> None:
        parts = list(_events(body) if self._is_stream else _halves(body))
        for part in parts:
            is_end = is_last and part is parts[-1]
            if self._is_due(is_end=is_end):
                await self._break()
                if self.is_cut:
                    return
            await self._wait_for_token()
            await self._send({"type": "http.response.body", "body": part, "more_body": not is_end})
            self._num_sent += 1

    def _is_due(self, *, is_end: bool) -> bool:
        """Whether the answer breaks now; at the latest before its end."""
        if self._is_over or self._fault.kind not in ("cut", "stall"):
            return False
        return is_end or (self._is_stream and self._num_sent >= self._fault.place)

    async def _break(self) -> None:
        self._is_over = True
        self._faults.count(self._fault.kind)
        if self._fault.kind == "stall":
            await _pause(self._fault.stall_s, self._receive)
        else:
            self.is_cut = True
            self._scope[HANG_UP]()

    async def _wait_for_token(self) -> None:
        config = self._faults.config
        if config.token is None or not self._is_stream:
            return
        delay_s = config.token.time_s(config.seed, "token", self._fault.key, self._num_sent)
        if delay_s:
            self._faults.count("token")
            await asyncio.sleep(delay_s)


def _events(body: bytes) -> Iterator[bytes]:
    """Take a piece of a stream apart; what follows its last event is a part, too."""
    end = 0
    for found in EVENT.finditer(body):
        end = found.end()
        yield found[0]
    if end < len(body) or not body:
        yield body[end:]


def _halves(body: bytes) -> Iterator[bytes]:
    half = len(body) // 2
    if half:
        yield body[:half]
    yield body[half:]


async def _pause(delay_s: float, receive: Receive) -> None:
    """Wait, but not for longer than the client does."""
    if not delay_s:
        return
    leaving = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait([leaving], timeout=delay_s)
    finally:
        await cancel_all(leaving)

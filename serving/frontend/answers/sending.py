"""From an accepted request to its end: a full answer or one clear error, whatever happens on the way."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foundation.ordered_set import OrderedSet
from serving.frontend import nvext
from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import Answer, Collected
from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import TokenLogprob
from serving.frontend.metrics import TokenTimer
from serving.runtime.world import world

Result = TypeVar("Result")

BEGUN = "dynabench.begun"
"""Set in a request's scope once part of its answer has been sent."""

SLICE = 64
"""Choices that begin to be read at once."""


class CompletionResponse(Response):
    """Answers one request; when the client hangs up, its task and the engines' work are cancelled."""

    def __init__(
        self,
        accepted: AcceptedRequest,
        answer: Answer,
        responses: OrderedSet["CompletionResponse"],
        headers: dict[str, str],
        *,
        begins_at_once: bool = False,
    ) -> None:
        """Prepare to answer.

        Args:
            accepted: the request.
            answer: writes the answer.
            responses: has the response while it is in progress.
            headers: those of the answer.
            begins_at_once: whether a stream begins before there is a token, so that failures are part of it.
        """
        super().__init__()
        self._accepted = accepted
        self._answer = answer
        self._responses = responses
        self._own_headers = headers
        self._begins_at_once = begins_at_once
        self._task: asyncio.Task[Any] | None = None
        self._failure: ApiError | None = None
        self._status = "success"
        self._is_ending = False
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        task = self._task = asyncio.current_task()
        assert task is not None
        self._scope = scope
        self._responses.add(self)
        self._accepted.metrics.inflight += 1
        watching = asyncio.ensure_future(self._watch(receive))
        try:
            await (self._stream(send) if self._accepted.is_streamed else self._whole(scope, receive, send))
        except asyncio.CancelledError:
            if self._failure is not None:
                task.uncancel()
                await self._end_with(self._failure, send)
                return
            self._status = "cancelled"
            if not watching.done():
                raise  # we are the ones asked to end
            task.uncancel()
        except BaseException:
            self._status = "error"
            raise
        finally:
            watching.cancel()
            self._responses.discard(self)
            for choice in self._accepted.choices:
                choice.close()
            self._count()

    def fail(self, error: ApiError) -> None:
        """End it with an error, in the stream if that has started."""
        if self._task is not None:
            self._failure = error
            self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Cancel the task when the client is gone; the end of the answer looks the same, but does not count."""
        await until_gone(receive)
        if not self._is_ending and self._task is not None:
            self._task.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = self._accepted
        choices = await together([self._collect(index) for index in range(len(accepted.choices))])
        body = self._answer.whole(choices)
        self._is_ending = True
        response = Response(body, headers=self._own_headers, media_type="application/json")
        await response(scope, receive, send)

    async def _collect(self, index: int) -> Collected:
        """Wait for a whole choice."""
        accepted, choice = self._accepted, self._accepted.choices[index]
        timer = TokenTimer(accepted.metrics, accepted.started)
        pieces: list[bytes] = []
        logprobs: list[TokenLogprob] = []
        tokens: list[int] = []
        while not choice.finish_reason:
            new = await choice.pieces()
            timer.count(len(new))
            pieces += new
            logprobs += choice.logprobs
            tokens += choice.tokens
        choice.close()
        return Collected(pieces, logprobs, tokens)

    async def _stream(self, send: Send) -> None:
        accepted = self._accepted
        first = None
        if not self._begins_at_once:
            first = await accepted.choices[
                0
            ].pieces()  # failures up to here get an HTTP status, not an event in the stream
        await self._begin_stream(send)
        start = nvext.annotations(accepted.prepared, accepted.id)
        try:
            if first is None:
                first = await accepted.choices[0].pieces()
            if len(accepted.choices) == 1:
                end = await self._stream_choice(send, 0, start, first)
            else:
                await self._write(send, start)
                others = [self._stream_whole_choice(send, index) for index in range(1, len(accepted.choices))]
                await together([self._stream_whole_choice(send, 0, first), *others])
                end = b""
        except ApiError as error:
            await self._end_with(error, send)
            return
        await self._write(send, end + self._answer.end(), more=False)

    async def _stream_whole_choice(self, send: Send, index: int, pieces: list[bytes] | None = None) -> None:
        """Send a choice's events, one of several."""
        await self._write(send, await self._stream_choice(send, index, b"", pieces))

    async def _stream_choice(
        self, send: Send, index: int, body: bytes = b"", pieces: list[bytes] | None = None
    ) -> bytes:
        """Send a choice's events after `body`, and return the last ones; its first pieces may have been read."""
        accepted, choice = self._accepted, self._accepted.choices[index]
        timer = TokenTimer(accepted.metrics, accepted.started)
        events = self._answer.events(index)
        body += events.first()
        while True:
            if pieces is None:
                pieces = await choice.pieces()
            timer.count(len(pieces))
            body += events.tokens(pieces)
            if choice.finish_reason:
                break
            if body:
                await self._write(send, body)
            body, pieces = b"", None
        choice.close()
        return body + events.last()

    async def _begin_stream(self, send: Send) -> None:
        headers = self._own_headers | {"content-type": "text/event-stream; charset=utf-8"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._scope[BEGUN] = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _end_with(self, error: ApiError, send: Send) -> None:
        """Send the error in the stream, or raise it if the stream has not started."""
        if BEGUN not in self._scope:
            self._status = "error"
            raise error
        self._status = "error_in_stream"
        await self._write(send, self._answer.failed(error), more=False)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._is_ending = not more
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _count(self) -> None:
        accepted, metrics = self._accepted, self._accepted.metrics
        labels = accepted.prepared.endpoint, "stream" if accepted.is_streamed else "unary"
        metrics.inflight -= 1
        metrics.count("requests", *labels, self._status)
        if self._status == "cancelled":
            metrics.count("model_cancellation", *labels)
        metrics.observe("request_duration_seconds", world().now() - accepted.started)
        for choice in accepted.choices:
            metrics.count_choice(choice, accepted.started)


async def together(parts: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run several coroutines; the first failure cancels the others and is raised."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks: list[asyncio.Task[Result]] = []
    try:
        for part in parts:
            tasks.append(asyncio.create_task(part))
            if not len(tasks) % SLICE:
                await asyncio.sleep(0)  # other requests have their turn
        return list(await asyncio.gather(*tasks))
    finally:
        for part in parts[len(tasks) :]:
            part.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    """Wait until the client has hung up, or the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass

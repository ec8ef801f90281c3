"""From an accepted request to its end: a full answer or one clear error, whatever happens on the way."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.frontend import nvext
from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import LogprobsFormat, TokenLogprob
from serving.frontend.api.openai import StreamOptions
from serving.frontend.api.sse import DONE, ChoiceFormat, CompletionFormat, error_event, escape, unescape, usage
from serving.frontend.generation.choice import Choice
from serving.frontend.metrics import ModelMetrics, TokenTimer
from serving.frontend.preprocess import Prepared

BEGUN = "dynabench.begun"
"""Set in a request's scope once part of its answer has been sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """A request whose choices are in progress, and what is needed to answer it."""

    prepared: Prepared
    id: str
    choices: list[Choice]
    metrics: ModelMetrics
    started: float

    @property
    def is_streamed(self) -> bool:
        """Whether its client reads the answer as it arrives."""
        return bool(self.prepared.options.stream)

    @property
    def stream_options(self) -> StreamOptions:
        """The options of the stream."""
        return self.prepared.options.stream_options or StreamOptions()

    def echo(self, index: int) -> str:
        """Return the text that comes before a choice."""
        return self.prepared.echoes[index // (self.prepared.options.n or 1)]

    def usage(self) -> dict[str, Any]:
        """Return the usage: each prompt counts once, however many choices it has."""
        prompts = self.choices[:: self.prepared.options.n or 1]
        num_prompt = sum(choice.num_prompt for choice in prompts)
        num_cached = sum(choice.num_cached for choice in prompts)
        return usage(num_prompt, sum(choice.num_completion for choice in self.choices), num_cached)

    def extras(self, choice: Choice) -> dict[str, dict[str, Any] | None]:
        """Return what the end of an answer may contain besides text and usage."""
        return {
            "nvext": nvext.extra_fields(self.prepared.extension, choice, self.started),
            "kv_transfer_params": choice.kv_transfer_params,
        }

    def headers(self) -> dict[str, str]:
        """Return the headers that say where the request went."""
        placement = self.choices[0].attempts.placement
        return {
            "x-request-id": self.id,
            "x-worker-id": f"{placement.rank.instance_id:x}",
            "x-worker-slot": str(placement.slot),
            "x-overlap-tokens": str(self.choices[0].num_overlap_tokens),
        }


class CompletionResponse(Response):
    """Answers one request; when the client hangs up, its task and the engines' work are cancelled."""

    def __init__(self, accepted: AcceptedRequest, responses: set["CompletionResponse"]) -> None:
        """Prepare to answer; `responses` has the response while it is in progress."""
        super().__init__()
        self._accepted = accepted
        self._responses = responses
        self._format = CompletionFormat(accepted.id, accepted.prepared.options.model, is_chat=accepted.prepared.is_chat)
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
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_ending and self._task is not None:
            self._task.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = self._accepted
        choices = await _together([self._collect(index) for index in range(len(accepted.choices))])
        body = self._format.whole(choices, accepted.usage(), **accepted.extras(accepted.choices[0]))
        self._is_ending = True
        response = Response(body, headers=accepted.headers(), media_type="application/json")
        await response(scope, receive, send)

    async def _collect(self, index: int) -> dict[str, Any]:
        """Wait for a whole choice."""
        accepted, choice = self._accepted, self._accepted.choices[index]
        timer = TokenTimer(accepted.metrics, accepted.started)
        pieces: list[bytes] = []
        logprobs: list[TokenLogprob] = []
        while not choice.finish_reason:
            new = await choice.pieces()
            timer.count(len(new))
            pieces += new
            logprobs += choice.logprobs
        choice.close()
        logprobs = [*(choice.prompt_logprobs or ()), *logprobs]
        value = LogprobsFormat(is_chat=accepted.prepared.is_chat).value(logprobs) if logprobs else None
        text = accepted.echo(index) + unescape(b"".join(pieces))
        return self._format.choice(index, text, choice.finish_reason, value)

    async def _stream(self, send: Send) -> None:
        accepted = self._accepted
        first = await accepted.choices[0].pieces()  # failures up to here get an HTTP status, not an event in the stream
        await self._begin_stream(send)
        start = nvext.annotations(accepted.prepared, accepted.id)
        try:
            if len(accepted.choices) == 1:
                await self._stream_choice(send, 0, start, first)
            else:
                await self._write(send, start)
                others = [self._stream_choice(send, index) for index in range(1, len(accepted.choices))]
                await _together([self._stream_choice(send, 0, b"", first), *others])
        except ApiError as error:
            await self._end_with(error, send)
            return
        end = self._format.usage(accepted.usage()) if accepted.stream_options.include_usage else b""
        await self._write(send, end + DONE, more=False)

    async def _stream_choice(
        self, send: Send, index: int, body: bytes = b"", pieces: list[bytes] | None = None
    ) -> None:
        """Send a choice's events after `body`; its first pieces may have been read."""
        accepted, choice = self._accepted, self._accepted.choices[index]
        timer = TokenTimer(accepted.metrics, accepted.started)
        events = _ChoiceEvents(accepted, ChoiceFormat(self._format, index), index)
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
        await self._write(send, body + events.last())

    async def _begin_stream(self, send: Send) -> None:
        headers = self._accepted.headers()
        headers |= {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._scope[BEGUN] = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _end_with(self, error: ApiError, send: Send) -> None:
        """Send the error in the stream, or raise it if the stream has not started."""
        if BEGUN not in self._scope:
            self._status = "error"
            raise error
        self._status = "error_in_stream"
        await self._write(send, error_event(error), more=False)

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
        metrics.observe("request_duration_seconds", time.perf_counter() - accepted.started)
        for choice in accepted.choices:
            metrics.count_choice(choice, accepted.started)


class _ChoiceEvents:
    """The events of a streamed choice, with what was requested besides its text."""

    def __init__(self, accepted: AcceptedRequest, format: ChoiceFormat, index: int) -> None:
        options = accepted.stream_options
        self._accepted = accepted
        self._format = format
        self._choice = accepted.choices[index]
        self._echo = accepted.echo(index)
        self._logprobs = LogprobsFormat(is_chat=accepted.prepared.is_chat)
        self._has_usage = bool(options.include_usage and options.continuous_usage_stats)
        self._is_plain = not self._has_usage and accepted.prepared.num_logprobs is None

    def first(self) -> bytes:
        """Return what comes before the first token: a chat's role."""
        return self._format.first(self._usage(0))

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return an event for each piece, after the prompt if it is to be echoed."""
        body = self._prompt() if self._echo else b""
        if not pieces:
            return body
        if self._is_plain:
            return body + self._format.tokens(pieces)
        logprobs: list[Any] = [self._logprobs.value([token]) for token in self._choice.logprobs]
        logprobs += [None] * (len(pieces) - len(logprobs))
        usages = [self._usage(self._choice.num_before + count) for count in range(1, len(pieces) + 1)]
        return body + b"".join(map(self._format.token, pieces, logprobs, usages))

    def last(self) -> bytes:
        """Return the event with the finish reason."""
        choice = self._choice
        extras = self._accepted.extras(choice)
        return self._format.last(choice.finish_reason, usage=self._usage(choice.num_completion), **extras)

    def _prompt(self) -> bytes:
        """Return the event that echoes the prompt, before the first pieces."""
        text, self._echo = escape(self._echo), ""
        logprobs = self._choice.prompt_logprobs
        value = self._logprobs.value(logprobs) if logprobs else None
        return self._format.token(text, value, self._usage(self._choice.num_before))

    def _usage(self, num_output: int) -> dict[str, Any] | None:
        if not self._has_usage:
            return None
        return usage(self._choice.num_prompt, num_output, self._choice.num_cached)


async def _together(parts: list[Any]) -> list[Any]:
    """Run several coroutines; the first failure cancels the others and is raised."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""From an accepted request to its one end: a full answer or one clear error, whatever happens on the way."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.frontend.answer import DONE, AnswerFormat, ChoiceFormat, annotation
from serving.frontend.generation import Generation
from serving.frontend.metrics import ModelMetrics
from serving.frontend.openai import ApiError, usage
from serving.frontend.preprocess import Prepared

BEGUN = "dynabench.begun"
"""Set in a request's scope once part of its answer was sent."""


class Asked:
    """An accepted request: what is needed to answer it."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        id: str,
        generations: list[Generation],
        annotations: dict[str, Any],
        metrics: ModelMetrics,
        started: float,
    ) -> None:
        self.prepared = prepared
        self.request = prepared.options
        self.id = id
        self.is_chat = prepared.is_chat
        self.generations = generations
        self.annotations = annotations
        self.metrics = metrics
        self.started = started

    @property
    def counts_on(self) -> bool:
        """Whether each event is to hold the usage so far."""
        options = self.request.stream_options
        return bool(options is not None and options.include_usage and options.continuous_usage_stats)

    def echo(self, index: int) -> str:
        """Return the text that precedes a choice."""
        return self.prepared.echoes[index // (self.request.n or 1)]

    def usage(self) -> dict[str, Any]:
        """Return the usage: each prompt counts once, however many choices it has."""
        n = self.request.n or 1
        prompts = self.generations[::n]
        num_prompt = sum(generation.num_prompt for generation in prompts)
        num_cached = sum(generation.num_cached for generation in prompts)
        return usage(num_prompt, sum(generation.num_completion for generation in self.generations), num_cached)

    def nvext(self, generation: Generation) -> dict[str, Any] | None:
        """Return the extra fields that were asked for."""
        extension = self.request.nvext
        if extension is None or not extension.extra_fields:
            return None
        fields: dict[str, Any] = {}
        placement = generation.placement
        if "worker_id" in extension.extra_fields:
            worker = placement.worker
            fields["worker_id"] = {"decode_worker_id": worker.instance_id, "decode_dp_rank": worker.rank}
        if "timing" in extension.extra_fields:
            fields["timing"] = {
                "total_time_ms": (time.perf_counter() - self.started) * 1000,
                "kv_hit_rate": generation.num_cached / generation.num_prompt,
                "router_queue_depth": placement.queue_depth,
            }
        if "routing" in extension.extra_fields:
            size = generation.block_size
            fields["routing"] = {
                "worker_slot": placement.slot,
                "queue_depth": placement.queue_depth,
                "predicted_tokens": placement.overlap_blocks * size,
                "best_tokens": max(placement.decision.overlaps) * size if placement.decision.overlaps else -1,
                "cached_tokens": generation.num_cached,
            }
        return fields


class Answering(Response):
    """Answers one request; its task is cancelled, and the engines told, when the client hangs up."""

    def __init__(self, asked: Asked, answers: set["Answering"]) -> None:
        """Prepare to answer; `answers` holds the answer while it is under way."""
        super().__init__()
        self._answers = answers
        self._asked = asked
        self._endpoint = "chat_completions" if asked.is_chat else "completions"
        self._format = AnswerFormat(asked.id, asked.request.model, is_chat=asked.is_chat)
        self._task: asyncio.Task[Any] | None = None
        self._failure: ApiError | None = None
        self._status = "success"
        self._is_ending = False
        self._scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        asked, metrics = self._asked, self._asked.metrics
        kind = "stream" if asked.request.stream else "unary"
        task = self._task = asyncio.current_task()
        assert task is not None
        self._answers.add(self)
        watching = asyncio.ensure_future(self._watch(receive))
        metrics.inflight += 1
        self._scope = scope
        try:
            await (self._stream(send) if asked.request.stream else self._whole(scope, receive, send))
        except asyncio.CancelledError:
            if self._failure is not None:
                task.uncancel()
                await self._fail(self._failure, send)
                return
            self._status = "cancelled"
            metrics.count("model_cancellation", self._endpoint, kind)
            if not watching.done():
                raise  # it is we who are asked to end
            task.uncancel()
        except BaseException:
            self._status = "error"
            raise
        finally:
            watching.cancel()
            self._answers.discard(self)
            for generation in asked.generations:
                generation.close()
            self._count(kind, self._status)

    def fail(self, error: ApiError) -> None:
        """End it with an error, in the stream if it has begun."""
        if self._task is not None:
            self._failure = error
            self._task.cancel()

    async def _fail(self, error: ApiError, send: Send) -> None:
        if BEGUN not in self._scope:
            self._status = "error"
            raise error
        self._status = "error_in_stream"
        await self._write(send, b"data: " + error.body() + b"\n\n", more=False)

    async def _watch(self, receive: Receive) -> None:
        """Cancel the task when the client is gone; the end of the answer looks the same and is not that."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_ending and self._task is not None:
            self._task.cancel()

    def _count(self, kind: str, status: str) -> None:
        asked, metrics = self._asked, self._asked.metrics
        metrics.inflight -= 1
        metrics.count("requests", self._endpoint, kind, status)
        metrics.observe("request_duration_seconds", time.perf_counter() - asked.started)
        for generation in asked.generations:
            metrics.observe("output_sequence_tokens", generation.num_completion)
            if generation.num_cached:
                metrics.count("cached_tokens", by=generation.num_cached)
            if generation.num_migrations:
                metrics.count("model_migration", "ongoing_request", by=generation.num_migrations)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, format = self._asked, self._format

        async def collect(index: int, generation: Generation) -> dict[str, Any]:
            pieces: list[bytes] = []
            logprobs = _Logprobs(asked)
            meter = _Meter(asked)
            while not generation.finish_reason:
                new = await generation.pieces()
                meter.count(len(new))
                pieces += new
                logprobs.add(new, generation)
            generation.close()
            text = asked.echo(index) + _unescape(b"".join(pieces))
            return format.choice(index, text, generation.finish_reason, logprobs.value())

        choices = await _together([collect(*entry) for entry in enumerate(asked.generations)])
        body = format.whole(choices, asked.usage(), asked.nvext(asked.generations[0]))
        self._is_ending = True
        await Response(body, headers=self._facts(), media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        asked, generations = self._asked, self._asked.generations
        is_single = len(generations) == 1
        first = await generations[0].pieces()  # what fails until here is answered by a status, not in the stream
        headers = self._facts() | {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._scope[BEGUN] = True
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        start = b"".join(annotation(name, value) for name, value in asked.annotations.items())
        try:
            if is_single:
                await self._stream_choice(send, 0, start, first)
            else:
                await self._write(send, start)
                choices = [self._stream_choice(send, 0, b"", first)]
                choices += [self._stream_choice(send, place, b"", None) for place in range(1, len(generations))]
                await _together(choices)
        except ApiError as error:
            await self._fail(error, send)
            return
        options = asked.request.stream_options
        end = self._format.usage(asked.usage()) if options is not None and options.include_usage else b""
        await self._write(send, end + DONE, more=False)

    async def _stream_choice(self, send: Send, index: int, start: bytes, pieces: list[bytes] | None) -> None:
        asked, generation = self._asked, self._asked.generations[index]
        format = ChoiceFormat(self._format, index)
        meter = _Meter(asked)
        logprobs = _Logprobs(asked)
        body = start + format.first()
        echo = asked.echo(index)
        while True:
            if pieces is None:
                pieces = await generation.pieces()
            if echo:
                body += format.token(_escape(echo), logprobs.of_prompt(generation))
                echo = ""
            if pieces:
                meter.count(len(pieces))
                body += logprobs.events(format, pieces, generation)
            if generation.finish_reason:
                generation.close()
                body += format.last(generation.finish_reason, asked.nvext(generation))
                await self._write(send, body)
                return
            if body:
                await self._write(send, body)
                body = b""
            pieces = None

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        self._is_ending = not more
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _facts(self) -> dict[str, str]:
        generation = self._asked.generations[0]
        placement = generation.placement
        overlap = placement.overlap_blocks * generation.block_size
        return {
            "x-request-id": self._asked.id,
            "x-worker-id": f"{placement.worker.instance_id:x}",
            "x-worker-slot": str(placement.slot),
            "x-overlap-tokens": str(overlap),
        }


class _Meter:
    """Times the tokens of one choice."""

    __slots__ = ("_last", "_metrics")

    def __init__(self, asked: Asked) -> None:
        self._metrics = asked.metrics
        self._last = -asked.started

    def count(self, num_tokens: int) -> None:
        """Some tokens have come just now."""
        if not num_tokens:
            return
        now = time.perf_counter()
        if self._last < 0:
            self._metrics.observe("time_to_first_token_seconds", now + self._last)
        else:
            self._metrics.observe("inter_token_latency_seconds", (now - self._last) / num_tokens, num_tokens)
        self._metrics.count("output_tokens", by=num_tokens)
        self._last = now


class _Logprobs:
    """Log-probabilities in OpenAI's two forms, where they were asked for and the engine gives them."""

    def __init__(self, asked: Asked) -> None:
        self._is_wanted = asked.prepared.num_logprobs is not None
        self._counts_on = asked.counts_on
        self._is_chat = asked.is_chat
        self._all: list[tuple[str, float | None, Any]] = []
        self._offset = 0

    def events(self, format: ChoiceFormat, pieces: list[bytes], generation: Generation) -> bytes:
        """Return the events of some tokens."""
        if not (self._is_wanted or self._counts_on):
            return format.tokens(pieces)
        entries = self._entries(pieces, generation) if self._is_wanted else []
        logprobs: list[dict[str, Any] | None] = [self._one([entry]) for entry in entries]
        logprobs += [None] * (len(pieces) - len(entries))
        before = generation.num_completion - len(pieces)
        usages = [
            usage(generation.num_prompt, before + count, generation.num_cached) if self._counts_on else None
            for count in range(1, len(pieces) + 1)
        ]
        return b"".join(map(format.token, pieces, logprobs, usages))

    def of_prompt(self, generation: Generation) -> dict[str, Any] | None:
        """Return those of the prompt."""
        return self._one(generation.prompt_logprobs) if generation.prompt_logprobs else None

    def add(self, pieces: list[bytes], generation: Generation) -> None:
        """Keep those of some tokens for the whole answer."""
        if not self._all and generation.prompt_logprobs:
            self._all += generation.prompt_logprobs
        if self._is_wanted:
            self._all += self._entries(pieces, generation)

    def value(self) -> dict[str, Any] | None:
        """Return those of the whole answer."""
        return self._one(self._all) if self._all else None

    def _entries(self, pieces: list[bytes], generation: Generation) -> list[tuple[str, float, Any]]:
        pairs = generation.logprobs or ()
        return [(_unescape(piece), *pair) for piece, pair in zip(pieces, pairs, strict=False)]

    def _one(self, entries: Sequence[tuple[str, float | None, Any]]) -> dict[str, Any]:
        if self._is_chat:
            return {
                "content": [
                    {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": top or []}
                    for text, value, top in entries
                ]
            }
        offsets = []
        for text, _, _ in entries:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [text for text, _, _ in entries],
            "token_logprobs": [value for _, value, _ in entries],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in top} if top else None for _, _, top in entries
            ],
            "text_offset": offsets,
        }


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


def _escape(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _unescape(text: bytes) -> str:
    value: str = msgspec.json.decode(b'"' + text + b'"')
    return value

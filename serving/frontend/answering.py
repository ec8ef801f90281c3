"""From an accepted request to its one end: a full answer or one clear error, whatever happens on the way."""

import asyncio
import time
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.frontend.answer import DONE, AnswerFormat, ChoiceFormat, annotation
from serving.frontend.generation import Generation
from serving.frontend.metrics import ModelMetrics
from serving.frontend.openai import ApiError, Request, usage

BEGUN = "dynabench.begun"
"""Set in a request's scope once part of its answer was sent."""


class Asked:
    """An accepted request: what is needed to answer it."""

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        is_chat: bool,
        generations: list[Generation],
        echoes: list[str],
        annotations: dict[str, Any],
        metrics: ModelMetrics,
        started: float,
    ) -> None:
        self.request = request
        self.id = id
        self.is_chat = is_chat
        self.generations = generations
        self.echoes = echoes
        """Text that precedes each choice."""
        self.annotations = annotations
        self.metrics = metrics
        self.started = started

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
        self.is_writing_since = 0.0
        """When a write began that the client has not taken yet, 0 if there is none."""
        self._task: asyncio.Task[Any] | None = None
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
        status = "success"
        try:
            await (self._stream(send) if asked.request.stream else self._whole(scope, receive, send))
        except asyncio.CancelledError:
            status = "cancelled"
            metrics.count("model_cancellation", self._endpoint, kind)
            if not watching.done() and not self.is_writing_since:
                raise  # it is we who are asked to end
            task.uncancel()
        except BaseException:
            status = "error"
            raise
        finally:
            watching.cancel()
            self._answers.discard(self)
            for generation in asked.generations:
                generation.close()
            self._count(kind, status)

    def hang_up(self) -> None:
        """End it: its client does not read."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Cancel the task when the client is gone; the end of the answer looks the same and is not that."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._is_ending:
            self.hang_up()

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
            text = asked.echoes[index] + _unescape(b"".join(pieces))
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
            await self._write(send, b"data: " + error.body() + b"\n\n", more=False)
            self._asked.metrics.count("requests", self._endpoint, "stream", "error_in_stream")
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
        if asked.echoes[index]:
            body += format.tokens([_escape(asked.echoes[index])])
        while True:
            if pieces is None:
                pieces = await generation.pieces()
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
        self.is_writing_since = time.perf_counter()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.is_writing_since = 0.0

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
        self._is_wanted = asked.request.num_logprobs is not None
        self._is_chat = asked.is_chat
        self._all: list[tuple[str, float, Any]] = []
        self._offset = 0

    def events(self, format: ChoiceFormat, pieces: list[bytes], generation: Generation) -> bytes:
        """Return the events of some tokens."""
        if not self._is_wanted or generation.logprobs is None:
            return format.tokens(pieces)
        return b"".join(
            format.token(piece, self._one([entry]))
            for piece, entry in zip(pieces, self._entries(pieces, generation), strict=False)
        )

    def add(self, pieces: list[bytes], generation: Generation) -> None:
        """Keep those of some tokens for the whole answer."""
        if self._is_wanted and generation.logprobs is not None:
            self._all += self._entries(pieces, generation)

    def value(self) -> dict[str, Any] | None:
        """Return those of the whole answer."""
        return self._one(self._all) if self._all else None

    def _entries(self, pieces: list[bytes], generation: Generation) -> list[tuple[str, float, Any]]:
        assert generation.logprobs is not None
        return [(_unescape(piece), *pair) for piece, pair in zip(pieces, generation.logprobs, strict=False)]

    def _one(self, entries: list[tuple[str, float, Any]]) -> dict[str, Any]:
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

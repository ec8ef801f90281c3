"""The routes: completions and chat completions, models, health."""

import asyncio
import itertools
from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from serving.frontend.links import TokenStream, WorkerPool
from serving.frontend.openai import (
    MAX_TOKENS_LIMIT,
    Answer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    usage,
)
from serving.router.hashing import block_hashes, sequence_hashes
from serving.router.router import NoWorkersError

MAX_BODY_BYTES = 45 * 1024 * 1024


class Frontend:
    """Turns HTTP requests into token streams of one model, whose tokens are bytes of UTF-8."""

    def __init__(self, pool: WorkerPool, *, model: str, block_size: int) -> None:
        self.pool = pool
        self.model = model
        self._block_size = block_size
        self._ids = itertools.count()
        self._texts = [msgspec.json.encode(chr(code))[1:-1] if code < 128 else b"?" for code in range(256)]

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = await _decode(request, CompletionRequest)
        prompt = asked.prompt
        tokens = _tokens(prompt) if isinstance(prompt, list) else np.frombuffer(prompt.encode(), np.uint8).astype("<u4")
        return await self._answer(
            request, asked.model, tokens, asked.max_tokens, asked.stream, asked.stream_options, "prompt"
        )

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = await _decode(request, ChatRequest)
        if not asked.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        text = "".join(f"<|{message.role}|>{message.content}\n" for message in asked.messages) + "<|assistant|>"
        tokens = np.frombuffer(text.encode(), np.uint8).astype("<u4")
        limit = asked.max_completion_tokens or asked.max_tokens or 16
        return await self._answer(request, asked.model, tokens, limit, asked.stream, asked.stream_options, "messages")

    async def _answer(
        self,
        request: Request,
        model: str,
        tokens: Any,
        max_tokens: int,
        is_stream: bool,
        options: StreamOptions | None,
        param: str,
    ) -> Response:
        if model != self.model:
            raise ApiError(
                404, f"model {model!r} is not served here; {self.model!r} is", code="model_not_found", param="model"
            )
        if not len(tokens):
            raise ApiError(400, f"{param} must not be empty", param=param)
        if not 1 <= max_tokens <= MAX_TOKENS_LIMIT:
            raise ApiError(
                400, f"max_tokens must be from 1 to {MAX_TOKENS_LIMIT}, not {max_tokens}", param="max_tokens"
            )
        id = next(self._ids)
        hashes = sequence_hashes(block_hashes(tokens, self._block_size))
        try:
            worker, overlap, stream = self.pool.submit(id, tokens.tobytes(), hashes, max_tokens)
        except NoWorkersError as error:
            raise ApiError(503, str(error)) from error
        headers = {"x-worker-id": str(worker), "x-overlap-tokens": str(overlap * self._block_size)}
        answer = Answer(id, model, is_chat=param == "messages")
        wants_usage = options is not None and options.include_usage
        flow = TokenFlow(self, id, answer, stream, len(tokens), headers)
        if is_stream:
            flow.wants_usage = wants_usage
            return flow
        return await flow.whole()

    def texts(self, tokens: list[int]) -> list[bytes]:
        """Return each token's text, escaped for JSON."""
        texts = self._texts
        return [texts[token] for token in tokens]


class TokenFlow(Response):
    """A streamed answer: as many events as tokens have come, written at once; it ends exactly once."""

    def __init__(
        self, frontend: Frontend, id: int, answer: Answer, stream: TokenStream, num_prompt: int, headers: dict[str, str]
    ) -> None:
        super().__init__(headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self.wants_usage = False
        self._frontend = frontend
        self._id = id
        self._answer = answer
        self._stream = stream
        self._num_prompt = num_prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, or until the client hangs up."""
        frontend, stream, answer = self._frontend, self._stream, self._answer
        watch = asyncio.ensure_future(_hung_up(receive, stream))
        num_output = 0
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            start = answer.first()
            while True:
                tokens = await stream.take()
                if stream.is_abandoned:
                    return
                body = start
                if tokens:
                    num_output += len(tokens)
                    body += answer.tokens(frontend.texts(tokens))
                    start = b""
                finished = stream.finished
                if finished is not None and not stream.tokens:
                    body += self._end(num_output)
                    await send({"type": "http.response.body", "body": body})
                    return
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            watch.cancel()
            frontend.pool.release(self._id)

    async def whole(self) -> Response:
        """Wait for the whole answer."""
        tokens: list[int] = []
        try:
            while self._stream.finished is None or self._stream.tokens:
                tokens += await self._stream.take()
        finally:
            self._frontend.pool.release(self._id)
        finished = self._stream.finished
        if finished.error:
            raise ApiError(
                400 if "KV blocks" in finished.error or "max_model_len" in finished.error else 502, finished.error
            )
        counts = usage(self._num_prompt, len(tokens), finished.num_cached_tokens)
        text = bytes(tokens).decode()
        headers = {name: self.headers[name] for name in ("x-worker-id", "x-overlap-tokens")}
        return Response(
            self._answer.whole(text, finished.reason, counts), media_type="application/json", headers=headers
        )

    def _end(self, num_output: int) -> bytes:
        finished = self._stream.finished
        assert finished is not None
        if finished.error:
            return b"data: " + ApiError(502, finished.error).body() + b"\n\n"
        counts = usage(self._num_prompt, num_output, finished.num_cached_tokens) if self.wants_usage else None
        return self._answer.last(finished.reason, counts)


def make_app(frontend: Frontend) -> FastAPI:
    """Build the application."""
    app = FastAPI(title="dynabench frontend", docs_url=None, redoc_url=None)

    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": frontend.model, "object": "model", "created": 0, "owned_by": "dynabench"}],
        }

    async def health() -> dict[str, str]:
        return {"status": "ok"}

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return Response(error.body(), error.status, media_type="application/json")

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return Response(
            ApiError(error.status_code, error.detail).body(), error.status_code, media_type="application/json"
        )

    async def on_defect(_: Request, error: Exception) -> Response:
        body = ApiError(500, "the frontend failed on this request; its log says why").body()
        return Response(body, 500, media_type="application/json")

    app.add_api_route("/v1/completions", frontend.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", frontend.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_defect)
    return app


async def _decode(request: Request, kind: Any) -> Any:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not a valid request: {error}") from error


def _tokens(prompt: list[int]) -> Any:
    try:
        return np.array(prompt, "<u4")
    except (OverflowError, ValueError) as error:
        raise ApiError(400, "prompt holds a number that is no token id", param="prompt") from error


async def _hung_up(receive: Receive, stream: TokenStream) -> None:
    """End a stream when its client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.is_abandoned = True
    stream.wake()

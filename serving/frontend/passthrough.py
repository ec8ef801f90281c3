"""Hand requests through to engines that take whole OpenAI requests (`ModelType.Chat`, `ModelType.Completion`)."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foundation.ordered_set import OrderedSet
from serving.frontend.answers.sending import BEGUN, until_gone
from serving.frontend.api.errors import failed_call, no_worker
from serving.frontend.api.sse import DONE, error_event, event
from serving.frontend.metrics import ModelMetrics
from serving.frontend.prepared import HandedThrough
from serving.frontend.served_model import ServedModel
from serving.router.decision import AllBusyError, AllFullError, NoWorkersError
from serving.routing.placement import WantedRank
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import CallError, End
from serving.runtime.world import world

GONE = "gone"
"""The end of a call whose client hung up."""


def hand_through(
    model: ServedModel,
    request: HandedThrough,
    streams: OrderedSet[ReplyStream],
    *,
    endpoint: str,
    metrics: ModelMetrics,
) -> Response:
    """Answer a request with the engine's output, chunk by chunk or folded into one; meanwhile `streams` has its stream.

    Raises:
        ApiError: there is no worker to send it to.
    """
    workers, started = model.workers, world().now()
    labels = endpoint, "stream" if request.stream else "unary"
    try:
        placement = workers.pick(WantedRank(1, []))
    except (NoWorkersError, AllBusyError, AllFullError) as error:
        metrics.count("requests", *labels, "error")
        metrics.count("model_rejection", endpoint)
        raise no_worker(error) from error
    try:
        stream = workers.send(placement, request.request)
    except CallError as error:
        workers.on_finish(placement)
        raise failed_call(str(error), error.kind) from error
    metrics.inflight += 1
    streams.add(stream)

    def release(status: str) -> None:
        stream.cancel()
        streams.discard(stream)
        workers.on_finish(placement)
        metrics.inflight -= 1
        metrics.count("requests", *labels, status)
        metrics.observe("request_duration_seconds", world().now() - started)

    return _Passing(stream, release, is_streamed=request.stream)


class _Passing(Response):
    """Passes on an engine's output; ends its work when the client hangs up."""

    def __init__(self, stream: ReplyStream, release: Callable[[str], None], *, is_streamed: bool) -> None:
        super().__init__()
        self._stream = stream
        self._release = release
        self._is_streamed = is_streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ApiError: the engine failed before its first chunk, or before the end of a whole answer.
        """
        watching = asyncio.ensure_future(self._watch(receive))
        status = "error"
        try:
            first = await self._stream.take()
            if self._stream.end is not None and not first:
                _raise_failure(self._stream.end)
            status = await (self._pass_on(first, scope, send) if self._is_streamed else self._fold(first, send))
        except CallError as error:
            if error.kind == GONE:
                status = "cancelled"
                return
            raise failed_call(str(error), error.kind) from error
        finally:
            watching.cancel()
            self._release(status)

    async def _fold(self, items: list[Any], send: Send) -> str:
        chunks = list(items)
        async for item in self._stream:
            chunks.append(item)  # noqa: PERF401 (if the call fails, what has arrived must not be lost)
        answer = Response(msgspec.json.encode(fold(chunks)), media_type="application/json")
        await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body})
        return "success"

    async def _pass_on(self, items: list[Any], scope: Scope, send: Send) -> str:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        scope[BEGUN] = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            body = b"".join(map(event, items))
            if self._stream.end is not None and not self._stream.items:
                break
            await send({"type": "http.response.body", "body": body, "more_body": True})
            items = await self._stream.take()
        end = self._stream.end
        if end.kind == GONE:
            return "cancelled"
        last = error_event(failed_call(end.error, end.kind)) if end.kind else DONE
        await send({"type": "http.response.body", "body": body + last})
        return "error_in_stream" if end.kind else "success"

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._stream.abort("the client hung up", GONE)


def _raise_failure(end: End) -> None:
    if end.kind:
        raise CallError(end.error, end.kind)


def fold(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine an engine's chunks into one answer; a single whole answer is returned as it is."""
    if not chunks:
        raise CallError("the engine gave no answer", "engine")
    first = chunks[0]
    if len(chunks) == 1 and not str(first.get("object", "")).endswith(".chunk"):
        return first
    is_chat = "delta" in (first.get("choices") or [{}])[0]
    name = "chat.completion" if is_chat else "text_completion"
    answer = {"id": first.get("id"), "object": name, "created": int(world().wall_s()), "model": first.get("model")}
    answer["choices"] = _fold_choices([choice for chunk in chunks for choice in chunk.get("choices", [])], is_chat)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return answer | ({"usage": usages[-1]} if usages else {})


def _fold_choices(pieces: list[dict[str, Any]], is_chat: bool) -> list[dict[str, Any]]:
    """Join the pieces of each choice."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for piece in pieces:
        index = piece.get("index", 0)
        text = piece.get("delta", {}).get("content") if "delta" in piece else piece.get("text")
        texts[index] = texts.get(index, "") + (text or "")
        reasons[index] = piece.get("finish_reason") or reasons.get(index)
    choices: list[dict[str, Any]] = []
    for index, text in sorted(texts.items()):
        content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": reasons[index]})
    return choices

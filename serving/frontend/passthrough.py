"""Models whose engines take whole OpenAI requests (`ModelType.Chat`, `ModelType.Completion`): they are handed through."""

import time
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from serving.frontend.answer import DONE, event
from serving.frontend.generation import STATUS, refusal
from serving.frontend.metrics import ModelMetrics
from serving.frontend.models import ServedModel
from serving.frontend.openai import ApiError
from serving.frontend.preprocess import HandedThrough
from serving.router.router import AllBusyError, AllFullError, NoWorkersError
from serving.runtime.client import ReplyStream
from serving.runtime.messages import CallError


async def hand_through(
    model: ServedModel, request: HandedThrough, streams: set[ReplyStream], *, endpoint: str, metrics: ModelMetrics
) -> Response:
    """Answer a request by what the engine says, chunk by chunk or folded into one; `streams` holds its stream meanwhile.

    Raises:
        ApiError: there is nobody to ask, or the engine failed before its first chunk.
    """
    routing, started = model.routing, time.perf_counter()
    try:
        placement = routing.pick(1, [])
    except (NoWorkersError, AllBusyError, AllFullError) as error:
        metrics.count("requests", endpoint, "stream" if request.stream else "unary", "error")
        metrics.count("model_rejection", endpoint)
        raise refusal(error) from error
    metrics.inflight += 1

    stream: ReplyStream | None = None

    def release(status: str) -> None:
        if stream is not None:
            stream.cancel()
            streams.discard(stream)
        routing.on_finish(placement)
        metrics.inflight -= 1
        metrics.count("requests", endpoint, "stream" if request.stream else "unary", status)
        metrics.observe("request_duration_seconds", time.perf_counter() - started)

    try:
        stream = routing.send(placement, request.request)
        streams.add(stream)
        first = await stream.take()
        _check(stream, first)
        if request.stream:
            return StreamingResponse(_events(stream, first, release), media_type="text/event-stream")
        chunks = list(first)
        while stream.end is None or stream.items:
            chunks += await stream.take()
        _check(stream, [])
    except BaseException as error:
        release("error")
        if isinstance(error, CallError):
            raise ApiError(STATUS.get(error.kind, 500), str(error)) from error
        raise
    release("success")
    return Response(msgspec.json.encode(fold(chunks)), media_type="application/json")


async def _events(stream: ReplyStream, items: list[Any], release: Any) -> Any:
    status = "cancelled"
    try:
        while True:
            if items:
                yield b"".join(event(item) for item in items)
            if stream.end is not None and not stream.items:
                break
            items = await stream.take()
        if stream.end.kind:
            status = "error"
            yield b"data: " + ApiError(STATUS.get(stream.end.kind, 500), stream.end.error).body() + b"\n\n"
        else:
            status = "success"
            yield DONE
    finally:
        release(status)


def _check(stream: ReplyStream, items: list[Any]) -> None:
    if stream.end is not None and stream.end.kind and not items:
        raise CallError(stream.end.error, stream.end.kind)


def fold(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one answer of an engine's chunks; a single whole answer is returned as it is."""
    if not chunks:
        raise CallError("the engine gave no answer", "engine")
    first = chunks[0]
    if len(chunks) == 1 and not str(first.get("object", "")).endswith(".chunk"):
        return first
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            index = choice.get("index", 0)
            piece = choice.get("delta", {}).get("content") if "delta" in choice else choice.get("text")
            texts[index] = texts.get(index, "") + (piece or "")
            reasons[index] = choice.get("finish_reason") or reasons.get(index)
    is_chat = "delta" in (first.get("choices") or [{}])[0]
    choices = []
    for index in sorted(texts):
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": texts[index]}} if is_chat else {"text": texts[index]}
        )
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": reasons[index]})
    kind = "chat.completion" if is_chat else "text_completion"
    answer = {"id": first.get("id"), "object": kind, "created": int(time.time()), "model": first.get("model")}
    return answer | {"choices": choices} | ({"usage": usage} if usage else {})

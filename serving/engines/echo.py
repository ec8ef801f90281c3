"""Echo engines answer with the prompt itself, to try out everything around an engine."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal

from serving.model.card import ModelType
from serving.model.files import ModelFiles
from serving.runtime.server import GeneratorService
from serving.worker.engine import EngineCall, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher

DELAY_VARIABLE = "DYN_TOKEN_ECHO_DELAY_MS"


async def echo_core(request: dict[str, Any], *, delay_s: float) -> AsyncIterator[dict[str, Any]]:
    """Answer a request in token ids with its own prompt, including the template, one token at a time."""
    done, tokens = request["num_generated"], request["token_ids"]
    prompt = tokens[: len(tokens) - done]
    limit = request["stop_conditions"]["max_tokens"]
    echoed = prompt[done:] if limit is None else prompt[done : done + limit]
    for token in echoed:
        await asyncio.sleep(delay_s)
        yield {"token_ids": [token]}
    yield {"token_ids": [], "finish_reason": "stop" if done + len(echoed) == len(prompt) else "length"}


async def echo_full(request: dict[str, Any], *, delay_s: float) -> AsyncIterator[dict[str, Any]]:
    """Answer a chat request with its last user message, character by character, as OpenAI chunks."""
    texts = [message.get("content") for message in request.get("messages", []) if message.get("role") == "user"]
    text = texts[-1] if texts and isinstance(texts[-1], str) else ""
    head = {"object": "chat.completion.chunk", "created": 0, "model": request["model"]}
    number = 0
    for number, character in enumerate(text, 1):
        await asyncio.sleep(delay_s)
        delta = {"role": "assistant", "content": character}
        yield head | {"id": str(number), "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield head | {"id": str(number + 1), "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


class Echo:
    """An echo engine (see `serving.worker.engine.Engine`): `core` answers in token ids, `full` takes whole chat requests.

    Raises:
        ValueError: `DYN_TOKEN_ECHO_DELAY_MS` is not a time.
    """

    def __init__(self, kind: Literal["core", "full"]) -> None:
        delay_s = _delay_s()
        self.calls = (EngineCall(f"echo_{kind}", {"delay_s": delay_s}),)
        self.traits = EngineTraits(model_type=ModelType.Backend if kind == "core" else ModelType.Chat)
        self.service = GeneratorService(partial(echo_core if kind == "core" else echo_full, delay_s=delay_s))

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`."""

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        return EngineLoad(num_running=self.service.num_running)

    async def failed(self) -> None:
        """See `Engine`."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """See `Engine`."""


def _delay_s() -> float:
    text = os.environ.get(DELAY_VARIABLE, "10")
    try:
        delay_ms = float(text)
    except ValueError:
        delay_ms = math.nan
    if not 0 <= delay_ms < math.inf:
        raise ValueError(f"{DELAY_VARIABLE} is {text!r}; expected a number of milliseconds, at least 0")
    return delay_ms / 1000

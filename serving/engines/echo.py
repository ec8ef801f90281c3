"""Echo engines, for trying out everything around an engine: they answer with what they were asked."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

DELAY_VARIABLE = "DYN_TOKEN_ECHO_DELAY_MS"


def _delay_s() -> float:
    try:
        return int(os.environ.get(DELAY_VARIABLE, "10")) / 1000
    except ValueError:
        return 0.01


async def echo_core(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Answer a request in token ids with its own prompt, template included, one token each `DYN_TOKEN_ECHO_DELAY_MS`."""
    delay_s = _delay_s()
    done, tokens = request["num_generated"], request["token_ids"]
    prompt = tokens[: len(tokens) - done]
    limit = request["stop_conditions"]["max_tokens"]
    echoed = prompt[done:] if limit is None else prompt[done : done + limit]
    for token in echoed:
        await asyncio.sleep(delay_s)
        yield {"token_ids": [token]}
    yield {"token_ids": [], "finish_reason": "stop" if done + len(echoed) == len(prompt) else "length"}


async def echo_full(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Answer a chat request with its last user message, character by character, as OpenAI chunks."""
    delay_s = _delay_s()
    texts = [message.get("content") for message in request.get("messages", []) if message.get("role") == "user"]
    text = texts[-1] if texts and isinstance(texts[-1], str) else ""
    head = {"object": "chat.completion.chunk", "created": 0, "model": request["model"]}
    number = 0
    for number, character in enumerate(text, 1):
        await asyncio.sleep(delay_s)
        delta = {"role": "assistant", "content": character}
        yield head | {"id": str(number), "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield head | {"id": str(number + 1), "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}

"""A small OpenAI client, for the ways in that ask questions: the terminal chat, standard input and the batch."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from serving.runtime.world import world

POLL_S = 0.1
MAX_LINE = 1 << 24


class AskError(Exception):
    """A request was not answered; the message says why."""


@dataclass(slots=True)
class ChatAnswer:
    """What has arrived so far."""

    text: str = ""
    finish_reason: str = ""
    num_prompt: int | None = None
    num_tokens: int | None = None
    """Tokens of the answer, if the engine counts them."""
    started: float = field(default_factory=lambda: world().now())
    first: float | None = None
    last: float | None = None

    def take(self, chunk: dict[str, Any]) -> str:
        """Add a chunk; return its text."""
        usage = chunk.get("usage") or {}
        self.num_prompt = usage.get("prompt_tokens", self.num_prompt)
        self.num_tokens = usage.get("completion_tokens", self.num_tokens)
        text = ""
        for choice in chunk.get("choices", []):
            text += choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.last = world().now()
            self.first = self.first or self.last
            self.text += text
        return text


class ChatClient:
    """A client of one frontend."""

    def __init__(self, url: str, *, socket_path: str | None = None, api_key: str = "") -> None:
        """Prepare to ask. The caller closes the client.

        Args:
            url: The URL of the frontend.
            socket_path: A Unix socket to connect to instead of the URL's host.
            api_key: Sent as a bearer token, if there is one.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connector = aiohttp.UnixConnector(socket_path, limit=0) if socket_path else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            url, connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=MAX_LINE
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def model(self, wanted: str = "") -> str:
        """Wait until the wanted model is served (any, if none is wanted); return its name."""
        while True:
            try:
                async with self._session.get("/v1/models") as response:
                    names = [entry["id"] for entry in (await response.json()).get("data", [])]
            except aiohttp.ClientError:
                names = []
            if names and (not wanted or wanted in names):
                return wanted or names[0]
            await asyncio.sleep(POLL_S)

    async def ask(self, answer: ChatAnswer, messages: list[dict[str, str]], **options: Any) -> AsyncIterator[str]:
        """Ask, and yield the answer's text piece by piece; leaving early ends the request.

        Args:
            answer: Collects what arrives.
            messages: The conversation.
            options: Other fields of the request; those that are None are left out.

        Raises:
            AskError: the request failed.
        """
        given = {name: value for name, value in options.items() if value is not None}
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **given}
        try:
            async with self._session.post("/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise AskError(_reason(await response.read(), response.status))
                async for line in response.content:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    chunk = msgspec.json.decode(line[6:])
                    if "error" in chunk:
                        raise AskError(_reason(line[6:], 500))
                    if text := answer.take(chunk):
                        yield text
        except (aiohttp.ClientError, ValueError) as error:
            raise AskError(f"the connection broke: {error}") from error


def _reason(body: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200].decode(errors='replace')}"

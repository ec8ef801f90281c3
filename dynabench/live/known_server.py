"""A server with known delays, to test load generators.

    python -m dynabench.live.known_server --ttft-ms 50 --itl-ms 10

It implements enough of OpenAI's API for ours and other load generators. It streams the requested number of tokens, each
chunk at its time on an absolute schedule, and reports when it actually wrote the first and the last. HTTP is written by
hand, so that there is only the kernel between a chunk's time and its bytes: a framework's delay would count as the
client's.
"""

import argparse
import asyncio
import socket
import sys
from array import array
from heapq import heappop, heappush
from time import monotonic
from typing import Any

import httptools
import msgspec
import uvloop

from foundation.open_files import room_for
from serving.runtime.world import world

MODEL = "known"
WORD = "a "


class Delays(msgspec.Struct, frozen=True):
    """The server's delays and limits."""

    ttft_s: float
    itl_s: float
    tokens_per_chunk: int = 1


class KnownStream:
    """One answer in progress."""

    __slots__ = (
        "begun_s",
        "chunk",
        "connection",
        "first_s",
        "is_chat",
        "left",
        "next_s",
        "prompt_tokens",
        "total",
        "wants_usage",
    )

    def __init__(
        self, connection: "KnownConnection", body: dict[str, Any], is_chat: bool, begun_s: float, delays: Delays
    ) -> None:
        self.connection = connection
        self.is_chat = is_chat
        self.begun_s = begun_s
        self.next_s = begun_s + delays.ttft_s
        self.total = self.left = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self.first_s = 0.0
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        prompt = body.get("prompt") or body.get("messages") or ""
        self.prompt_tokens = (
            len(prompt) if isinstance(prompt, list) and is_chat is False else max(len(str(prompt)) // 4, 1)
        )
        self.chunk = CHUNKS[is_chat]


class KnownConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: "KnownServer") -> None:
        self._server = server
        self._transport: Any = None
        self._parser: Any = None
        self._url = b""
        self._body = bytearray()

    def connection_made(self, transport: Any) -> None:
        """Start reading requests."""
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the client is gone."""
        self._transport = None

    def write(self, data: bytes) -> None:
        """Send, unless the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    @property
    def is_open(self) -> bool:
        """Whether the client is still connected."""
        return self._transport is not None

    def on_url(self, url: bytes) -> None:
        """Store a part of the address."""
        self._url = url

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer the request."""
        now = monotonic()
        url, body = self._url.split(b"?")[0], bytes(self._body)
        self._body.clear()
        if url in (b"/v1/completions", b"/v1/chat/completions") and body:
            self._server.answer(self, msgspec.json.decode(body), url.endswith(b"chat/completions"), now)
        elif url == b"/v1/models":
            models = {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "owned_by": "dynabench", "max_model_len": 1 << 20}],
            }
            self.write(_whole(models))
        elif url == b"/stats":
            self.write(_whole(self._server.stats))
        elif url == b"/stamps":
            self.write(_whole({"ttft_s": list(self._server.ttfts_s), "itl_s": list(self._server.itls_s)}))
        elif url in (b"/health", b"/ping", b"/version", b"/"):
            self.write(_whole({"status": "ok", "version": "0"}))
        else:
            self.write(_whole({"error": {"message": "not found", "code": 404}}, b"404 Not Found"))


class KnownServer:
    """Writes every chunk at its time."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._due: list[tuple[float, int, KnownStream]] = []
        self._number = 0
        self._news = asyncio.Event()
        self.stats = {"requests": 0, "tokens": 0, "first_s": 0.0, "last_s": 0.0}
        """Number of answers and written tokens, and the times of the first request and the last token."""
        self.ttfts_s = array("d")
        """Of each stream, in the order in which they ended: first write - request."""
        self.itls_s = array("d")
        """The same of its mean time between tokens; 0 for one token."""

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: KnownConnection(self), sock=listener, backlog=4096)
        timer = world().step_timer()
        try:
            while True:
                self._write_due()
                if self._due:
                    # A stream may begin during the wait, but its first chunk is due at least a TTFT later.
                    await timer.until(min(self._due[0][0], monotonic() + max(self._delays.ttft_s / 2, 0.0005)))
                else:
                    self._news.clear()
                    await self._news.wait()
        finally:
            server.close()
            timer.close()

    def answer(self, connection: KnownConnection, body: dict[str, Any], is_chat: bool, now: float) -> None:
        """Start an answer."""
        stream = KnownStream(connection, body, is_chat, now, self._delays)
        self.stats["requests"] += 1
        self.stats["first_s"] = self.stats["first_s"] or now
        if not body.get("stream"):
            asyncio.get_running_loop().call_at(
                stream.next_s + self._delays.itl_s * (stream.total - 1), self._answer_whole, stream
            )
            return
        connection.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if self._delays.ttft_s == 0 == self._delays.itl_s:
            chunks = stream.chunk * (stream.total - 1)
            stream.first_s, stream.left = monotonic(), 1
            connection.write(chunks + self._last(stream))
            return
        self._number += 1
        heappush(self._due, (stream.next_s, self._number, stream))
        self._news.set()

    def _answer_whole(self, stream: KnownStream) -> None:
        stream.connection.write(_whole(_completion(stream)))
        self.stats["tokens"] += stream.total
        self.stats["last_s"] = monotonic()

    def _write_due(self) -> None:
        due, delays = self._due, self._delays
        size = delays.tokens_per_chunk
        now = monotonic()
        while due and due[0][0] <= now:
            when, number, stream = heappop(due)
            if not stream.connection.is_open:
                continue
            if not stream.first_s:
                stream.first_s = monotonic()
            if stream.left <= size:
                stream.connection.write(self._last(stream))
            else:
                stream.connection.write(
                    stream.chunk if size == 1 else _chunk(_event(stream.is_chat, WORD, None) * size)
                )
                stream.left -= size
                heappush(due, (when + delays.itl_s, number, stream))

    def _last(self, stream: KnownStream) -> bytes:
        """Return the last tokens, the usage, and the actual times of writing."""
        now = monotonic()
        self.stats["tokens"] += stream.total
        self.stats["last_s"] = now
        self.ttfts_s.append(stream.first_s - stream.begun_s)
        self.itls_s.append((now - stream.first_s) / max(stream.total - 1, 1))
        events = _event(stream.is_chat, WORD, None) * stream.left
        facts = {"begun_s": stream.begun_s, "first_s": stream.first_s, "last_s": now}
        events += _event(stream.is_chat, "", "length", {"selftest": facts})
        if stream.wants_usage:
            events += (
                b"data: "
                + msgspec.json.encode(_head(stream.is_chat) | {"choices": [], "usage": _usage(stream)})
                + b"\n\n"
            )
        return _chunk(events + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _head(is_chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "known-1", "object": kind, "created": 0, "model": MODEL}


def _event(is_chat: bool, text: str, reason: str | None, nvext: Any = None) -> bytes:
    content: dict[str, Any] = {"delta": {"content": text} if text else {}} if is_chat else {"text": text}
    value = _head(is_chat) | {"choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason}]}
    return b"data: " + msgspec.json.encode(value | {"nvext": nvext} if nvext else value) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _usage(stream: KnownStream) -> dict[str, int]:
    prompt = stream.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": stream.total, "total_tokens": prompt + stream.total}


def _completion(stream: KnownStream) -> dict[str, Any]:
    text = WORD * stream.total
    content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if stream.is_chat else {"text": text}
    return _head(stream.is_chat) | {
        "choices": [{"index": 0, **content, "finish_reason": "length"}],
        "usage": _usage(stream),
    }


def _whole(value: Any, status: bytes = b"200 OK") -> bytes:
    body = msgspec.json.encode(value)
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


CHUNKS = {is_chat: _chunk(_event(is_chat, WORD, None)) for is_chat in (False, True)}


def main() -> None:
    """Serve on a port of 127.0.0.1 until the input or the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--with-parent", action="store_true", help="exit when standard input closes")
    options = parser.parse_args()
    room_for(1 << 16)
    listener = socket.create_server(("127.0.0.1", options.port), backlog=4096)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    async def run() -> None:
        delays = Delays(options.ttft_ms / 1000, options.itl_ms / 1000, options.tokens_per_chunk)
        serving = asyncio.create_task(KnownServer(delays).run(listener))
        if options.with_parent:
            asyncio.get_running_loop().add_reader(sys.stdin, serving.cancel)
        await asyncio.gather(serving, return_exceptions=True)

    try:
        uvloop.run(run())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

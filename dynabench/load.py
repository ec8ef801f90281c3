"""The load generator: an HTTP client like any other, open loop on the workload's times."""

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Literal, NamedTuple

import aiohttp
import msgspec
import numpy as np

from workloads import Request, Workload
from workloads.tokens import TOKENS, as_words, prompt_tokens

READ_BUFFER = 1 << 20
TOKEN, SPACED_TOKEN, EVENT_END = b'"finish_reason":null', b'"finish_reason": null', b"\n\n"


class Target(NamedTuple):
    """What is measured."""

    url: str
    model: str
    prompts: Literal["tokens", "text"] = "tokens"
    api_key: str = ""
    is_ours: bool = False
    """Whether every token comes in an event of its own, so that events can be checked against the usage."""
    tokens: range = TOKENS
    """What prompts are made of."""

    @property
    def headers(self) -> dict[str, str]:
        """Request headers."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json"} | key


class Timeline:
    """What became of each request, in seconds from the start of the run; -1 for what did not happen."""

    def __init__(self, count: int) -> None:
        self.sent_s = array("d", [-1.0]) * count
        self.first_byte_s = array("d", [-1.0]) * count
        self.first_token_s = array("d", [-1.0]) * count
        self.last_token_s = array("d", [-1.0]) * count
        self.done_s = array("d", [-1.0]) * count
        self.num_tokens = array("i", [0]) * count
        self.first_chunk_tokens = array("i", [0]) * count
        self.worker = array("i", [-1]) * count
        self.cached_tokens = array("i", [0]) * count
        self.predicted_tokens = array("i", [0]) * count
        self.errors = [""] * count
        self.gaps = array("d")  # rows as in ArmResult: gap per token, 0, 0, 1, tokens


async def replay(
    workload: Workload,
    *,
    target: Target,
    salt: str,
    timeout_s: float,
    stop: asyncio.Event,
    on_progress: Callable[[int], None] | None = None,
) -> Timeline:
    """Send each request at its time, never waiting for earlier answers; end early once `stop` is set."""
    timeline = Timeline(len(workload))
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    done = 0

    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=READ_BUFFER) as session:
        tasks: set[asyncio.Task[None]] = set()

        def on_done(task: asyncio.Task[None]) -> None:
            nonlocal done
            tasks.discard(task)
            done += 1
            if on_progress is not None:
                on_progress(done)

        start = time.perf_counter() + 0.05
        for number, request in enumerate(workload):
            body = _body(request, workload.block_size, target, salt)
            delay = start + request.arrival_s - time.perf_counter()
            if delay > 0 and await _wait(stop, delay):
                break
            if stop.is_set():
                break
            task = asyncio.create_task(_send(session, target, body, number, timeline, start))
            tasks.add(task)
            task.add_done_callback(on_done)
            if delay <= 0:
                await asyncio.sleep(0)
        stopping = asyncio.create_task(stop.wait())
        while tasks and not stop.is_set():
            await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return timeline


async def _wait(stop: asyncio.Event, delay_s: float) -> bool:
    """Sleep, or return True as soon as `stop` is set."""
    try:
        await asyncio.wait_for(stop.wait(), delay_s)
    except TimeoutError:
        return False
    return True


def _body(request: Request, block_size: int, target: Target, salt: str) -> bytes:
    tokens = prompt_tokens(request, block_size, salt=salt, among=target.tokens)
    return msgspec.json.encode(
        {
            "model": target.model,
            "prompt": tokens.tolist() if target.prompts == "tokens" else as_words(tokens),
            "ignore_eos": True,
            "max_tokens": request.output_length,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _send(
    session: aiohttp.ClientSession, target: Target, body: bytes, number: int, timeline: Timeline, start: float
) -> None:
    clock = time.perf_counter
    timeline.sent_s[number] = clock() - start
    try:
        async with session.post(f"{target.url}/v1/completions", data=body, headers=target.headers) as response:
            timeline.first_byte_s[number] = clock() - start
            if response.status != 200:
                timeline.errors[number] = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            timeline.worker[number] = int(response.headers.get("x-worker-slot", -1))
            timeline.predicted_tokens[number] = int(response.headers.get("x-overlap-tokens", 0))
            await _read(response, target, number, timeline, start)
        timeline.done_s[number] = clock() - start
    except TimeoutError:
        timeline.errors[number] = "timeout"
    except aiohttp.ClientError as error:
        timeline.errors[number] = f"{type(error).__name__}: {error}"


async def _read(
    response: aiohttp.ClientResponse, target: Target, number: int, timeline: Timeline, start: float
) -> None:
    """Stamp the tokens as they arrive; JSON is parsed only at the end of the stream."""
    clock, total, last, rest = time.perf_counter, 0, 0.0, b""
    mark = TOKEN if target.is_ours else None
    end = b""
    async for data in response.content.iter_any():
        now = clock() - start
        data = rest + data
        cut = data.rfind(EVENT_END) + len(EVENT_END)
        if cut < len(EVENT_END):
            rest = data
            continue
        events, rest = data[:cut], data[cut:]
        count = events.count(mark) if mark else events.count(TOKEN) + events.count(SPACED_TOKEN)
        if count:
            if total:
                timeline.gaps.extend(((now - last) / count, 0.0, 0.0, 1.0, count))
            else:
                timeline.first_token_s[number] = now
                timeline.first_chunk_tokens[number] = count
            total += count
            last = now
        if b"[DONE]" in events or b'"usage":{' in events or b'"usage": {' in events or b'"error"' in events or end:
            end += events
    timeline.num_tokens[number] = total
    timeline.last_token_s[number] = last
    timeline.errors[number] = _finish(end, target, number, timeline)


def _finish(end: bytes, target: Target, number: int, timeline: Timeline) -> str:
    """Read usage from the end of a stream; return what was wrong with it, if anything."""
    if b"data: [DONE]" not in end:
        return f"the stream ended without [DONE]: {end[-200:].decode(errors='replace')}"
    for line in end.split(EVENT_END):
        if b'"usage"' in line:
            usage = msgspec.json.decode(line.removeprefix(b"data: ")).get("usage")
            if not usage:
                continue
            timeline.cached_tokens[number] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if target.is_ours and usage["completion_tokens"] != timeline.num_tokens[number]:
                return f"{timeline.num_tokens[number]} tokens arrived of {usage['completion_tokens']}"
            timeline.num_tokens[number] = usage["completion_tokens"]
    return ""


def as_columns(timeline: Timeline, workload: Workload) -> dict[str, np.ndarray]:
    """Return the columns of requests.parquet, for the requests that were answered or failed."""
    requests = workload.requests
    first = np.array(timeline.first_token_s)
    columns = {
        "request": np.arange(len(requests), dtype=np.int32),
        "worker": np.array(timeline.worker),
        "intended_s": np.array([request.arrival_s for request in requests]),
        "sent_s": np.array(timeline.sent_s),
        "admitted_s": np.array(timeline.first_byte_s),
        "first_byte_s": np.array(timeline.first_byte_s),
        "first_token_s": first,
        "last_token_s": np.array(timeline.last_token_s),
        "done_s": np.array(timeline.done_s),
        "isl": np.array([request.input_length for request in requests], np.int32),
        "osl": np.array(timeline.num_tokens),
        "first_chunk_tokens": np.array(timeline.first_chunk_tokens),
        "cached_tokens": np.array(timeline.cached_tokens),
        "predicted_tokens": np.array(timeline.predicted_tokens),
        "preemptions": np.full(len(requests), -1, np.int32),  # not told over HTTP
        "error": np.array(timeline.errors, dtype=object),
    }
    ended = (columns["done_s"] >= 0) | (columns["error"] != "")
    return {name: column[ended] for name, column in columns.items()}

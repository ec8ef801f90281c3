"""The load generator: an HTTP client like any other, which sends each request when the workload says so."""

import asyncio
import math
import resource
from collections import deque
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dynabench.live.events import EVENT_LIMIT, AnswerError, AnswerReader, Usage
from dynabench.live.http_client import HttpPool, clock
from dynabench.live.timeline import Stats, Timeline
from foundation.text import one_line
from serving.engines.timer import StepTimer
from workloads import Request, Workload
from workloads.pacing import LoadConfig, Pacer
from workloads.tokens import TOKENS, as_words, prompt_tokens

AHEAD = 64
"""Bodies prepared before their time has come."""
EXTRA_FIELDS = {"extra_fields": ["routing"]}


class Target(NamedTuple):
    """What is measured."""

    url: str
    model: str
    prompts: Literal["tokens", "text", "chat"] = "tokens"
    api_key: str = ""
    is_ours: bool = False
    """Whether every token comes in an event of its own, so that events can be checked against the usage."""
    tokens: range = TOKENS
    """What prompts are made of."""
    has_nvext: bool = False
    """Whether answers tell where they were routed, and why."""

    @property
    def headers(self) -> dict[str, str]:
        """Request headers."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json", "accept": "text/event-stream"} | key


class LoadGenerator:
    """Sends a workload to a target, in one process."""

    def __init__(
        self,
        workload: Workload,
        *,
        target: Target,
        load: LoadConfig,
        salt: str,
        timeout_s: float,
        start: float | None = None,
    ) -> None:
        """Prepare to send.

        Args:
            workload: what to send.
            target: where.
            load: how.
            salt: changes every token of every prompt, so that nothing is cached from other runs.
            timeout_s: time after which a request has failed (s).
            start: when time 0 of the workload is, on the clock of `time.perf_counter` (none: as soon as `run` is called).
        """
        self.timeline = Timeline(len(workload))
        self._workload = workload
        self._target = target
        self._load = load
        self._salt = salt
        self._timeout_s = timeout_s
        self._start = start
        self._pacer = Pacer(workload, load)
        self._bodies: dict[int, bytes] = {}
        self._next_body = 0
        self._open: dict[int, _Call] = {}
        self._deadlines: deque[tuple[float, _Call]] = deque()
        self._heads: dict[bool, bytes] = {}
        self._awaited_s = 0.0
        self._wake = asyncio.Event()
        self._pool: HttpPool
        self._timer: StepTimer
        self.cpu_share = 0.0

    async def run(self, stop: asyncio.Event) -> Timeline:
        """Send everything, never waiting for answers but where the workload does; end early once `stop` is set."""
        self._pool = HttpPool(self._target.url)
        self._heads = {
            is_chat: self._pool.head(path, self._target.headers)
            for is_chat, path in ((False, "/v1/completions"), (True, "/v1/chat/completions"))
        }
        self._timer = StepTimer()
        self._start = self._start if self._start is not None else clock() + 0.05
        cpu, started = _cpu_s(), clock()
        pacing = asyncio.create_task(self._pace())
        stopping = asyncio.create_task(stop.wait())
        reaping = asyncio.create_task(self._reap())
        try:
            await asyncio.wait({pacing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if pacing.done():
                pacing.result()
        finally:
            for task in (pacing, stopping, reaping):
                task.cancel()
            await asyncio.gather(pacing, stopping, reaping, return_exceptions=True)
            self.cpu_share = (_cpu_s() - cpu) / max(clock() - started, 1e-9)
            self._open.clear()
            await self._pool.close()
            self._timer.close()
        return self.timeline

    @property
    def num_open(self) -> int:
        """Requests in flight."""
        return len(self._open)

    @property
    def now(self) -> float:
        """Seconds since time 0 of the workload."""
        return clock() - (self._start or clock())

    def stats(self) -> Stats:
        """Tell how it is going."""
        return self.timeline.stats(max(self.now, 0.0))

    async def _pace(self) -> None:
        pacer, start = self._pacer, self._start
        assert start is not None
        while not pacer.is_over:
            self._send_due()
            self._prepare(1)
            next_s = pacer.next_s()
            if next_s is None:
                self._awaited_s = float("inf")
                self._wake.clear()
                if not pacer.is_over:
                    await self._wake.wait()
                continue
            self._awaited_s = next_s
            while (slack := start + next_s - clock()) > 0.002 and self._prepare(1):
                await asyncio.sleep(0)
                next_s = pacer.next_s() or next_s
            if slack > 0:
                await self._timer.until(start + next_s)
            else:
                await asyncio.sleep(0)

    def _send_due(self) -> None:
        timeline = self.timeline
        for number, intended in self._pacer.due(self.now):
            timeline.intended_s[number] = intended
            timeline.num_sent += 1
            request = self._workload.requests[number]
            body = self._bodies.pop(number, None) or self._body(request)
            call = _Call(self, number)
            self._open[number] = call
            self._deadlines.append((clock() + self._timeout_s, call))
            self._pool.send(self._heads[self._is_chat(request)], body, call, call.on_sent)

    def _prepare(self, count: int) -> bool:
        """Make bodies ahead of their time; tell whether there was any to make."""
        requests = self._workload.requests
        while count and self._next_body < len(requests) and len(self._bodies) < AHEAD:
            number = self._next_body
            self._next_body += 1
            if math.isnan(self.timeline.intended_s[number]):
                self._bodies[number] = self._body(requests[number])
                count -= 1
        return not count

    def _is_chat(self, request: Request) -> bool:
        prompts = self._target.prompts
        return prompts == "chat" or (prompts == "text" and isinstance(request.content, list))

    def _body(self, request: Request) -> bytes:
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "ignore_eos": True,
            "max_tokens": request.output_length,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._is_chat(request):
            body["messages"] = self._messages(request)
        else:
            body["prompt"] = self._tokens(request).tolist() if target.prompts == "tokens" else self._text(request)
        if target.has_nvext:
            body["nvext"] = EXTRA_FIELDS | ({"session_id": request.session} if request.session else {})
        return msgspec.json.encode(body)

    def _messages(self, request: Request) -> list[dict[str, Any]]:
        if isinstance(request.content, list):
            return _salted_chat(request.content, self._salt)
        return [{"role": "user", "content": self._text(request)}]

    def _text(self, request: Request) -> str:
        """Return the workload's text, or as many words as the prompt has tokens."""
        return (
            _salted(request.content, self._salt)
            if isinstance(request.content, str)
            else as_words(self._tokens(request))
        )

    def _tokens(self, request: Request) -> np.ndarray:
        return prompt_tokens(request, self._workload.block_size, salt=self._salt, among=self._target.tokens)

    async def _reap(self) -> None:
        """Give up requests that took too long."""
        while True:
            await asyncio.sleep(min(0.5, self._timeout_s / 4))
            now = clock()
            while self._deadlines and self._deadlines[0][0] <= now:
                _, call = self._deadlines.popleft()
                if self._open.get(call.number) is call:
                    self._pool.abort(call)
                    call.on_failure("timeout", now)

    def _on_end(self, call: "_Call", now: float) -> None:
        """A request is over."""
        number, timeline = call.number, self.timeline
        if self._open.pop(number, None) is None:
            return  # the run is over
        is_failed = bool(timeline.error[number])
        timeline.num_ended += 1
        timeline.num_failed += is_failed
        timeline.last_numbers.append(number)
        at = now - (self._start or 0.0)
        for lost in self._pacer.on_end(number, at, is_failed=is_failed):
            timeline.error[lost] = f"not sent: request {number}, which it waits for, failed"
            timeline.intended_s[lost] = timeline.sent_s[lost] = at
            timeline.num_ended += 1
            timeline.num_failed += 1
        next_s = self._pacer.next_s()
        if next_s is not None and next_s <= at:
            self._send_due()
        elif next_s is not None and next_s < self._awaited_s:
            self._awaited_s = next_s
            asyncio.get_running_loop().call_later(next_s - at, self._send_due)
        if self._pacer.is_over or next_s is not None:
            self._wake.set()


class _Call:
    """One request: stamps its tokens as they arrive."""

    __slots__ = ("_body", "_chunks", "_count", "_last", "_owner", "_reader", "_start", "_status", "number")

    def __init__(self, owner: LoadGenerator, number: int) -> None:
        self._owner = owner
        self.number = number
        self._start = owner._start or 0.0
        self._status = 0
        self._body = b""  # of an error
        target, request = owner._target, owner._workload.requests[number]
        self._reader = AnswerReader(request.output_length, counts_all=target.is_ours, has_nvext=target.has_nvext)
        self._count = 0
        self._last = 0.0
        self._chunks: list[float] = []  # gap, tokens, gap, tokens, ...

    def on_sent(self, now: float) -> None:
        """Its bytes are being written."""
        self._owner.timeline.sent_s[self.number] = now - self._start

    def on_status(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        """The answer's head has come."""
        self._status = status
        timeline, number = self._owner.timeline, self.number
        timeline.first_byte_s[number] = now - self._start
        for column, header in ((timeline.worker, b"x-worker-slot"), (timeline.predicted_tokens, b"x-overlap-tokens")):
            if (value := _number(headers.get(header))) is not None:
                column[number] = value

    def on_data(self, data: bytes, now: float) -> None:
        """Count the tokens of a read."""
        if self._status != 200:
            self._body += data
            if len(self._body) > EVENT_LIMIT:
                self._give_up(f"{self._refusal()} (and more than {EVENT_LIMIT:,} bytes)", now)
            return
        try:
            self._stamp(self._reader.take(data), now)
        except AnswerError as error:
            self._give_up(str(error), now)

    def on_end(self, now: float) -> None:
        """The answer is whole: read its usage."""
        self._owner.timeline.done_s[self.number] = now - self._start
        if self._status != 200:
            self.on_failure(self._refusal(), now)
            return
        reader = self._reader
        try:
            reader.end()
            self._stamp(reader.num_tokens - self._count, now)
            self._settle(reader.usage)
        except AnswerError as error:
            self.on_failure(str(error), now)
            return
        self._owner.timeline.last_token_s[self.number] = self._last
        self._owner._on_end(self, now)

    def on_failure(self, reason: str, now: float) -> None:
        """There is no (more) answer."""
        timeline = self._owner.timeline
        timeline.osl[self.number] = self._count
        timeline.error[self.number] = reason
        self._owner._on_end(self, now)

    def _give_up(self, reason: str, now: float) -> None:
        """End the request, whatever else the server has to say."""
        self._owner._pool.abort(self)
        self.on_failure(reason, now)

    def _refusal(self) -> str:
        return f"HTTP {self._status}: {one_line(self._body, 200) or 'no reason was given'}"

    def _stamp(self, count: int, now: float) -> None:
        """Note that tokens came in one read."""
        if not count:
            return
        at, timeline = now - self._start, self._owner.timeline
        if self._count:
            self._chunks += (at - self._last, count)
        else:
            timeline.first_token_s[self.number] = at
            timeline.first_chunk_tokens[self.number] = count
        self._count += count
        self._last = at
        timeline.total_tokens += count
        if count > 1:
            timeline.num_together += count

    def _settle(self, usage: Usage | None) -> None:
        """Take lengths from the usage, and hand over the gaps between tokens.

        Raises:
            AnswerError: our own stack lost a token.
        """
        owner, timeline, number, reader = self._owner, self._owner.timeline, self.number, self._reader
        timeline.osl[number] = self._count
        if usage is not None:
            if usage.prompt_tokens:
                timeline.isl[number] = usage.prompt_tokens
            if details := usage.prompt_tokens_details:
                timeline.cached_tokens[number] = details.cached_tokens or 0
        if reader.routing is not None:
            if reader.routing.best_tokens >= 0:
                timeline.best_tokens[number] = reader.routing.best_tokens
            timeline.queue_depth[number] = reader.routing.queue_depth
        stated = usage.completion_tokens if usage is not None else None
        if not stated:
            timeline.num_unstated += 1
        elif stated != self._count:
            if owner._target.is_ours:
                raise AnswerError(f"{self._count} tokens arrived of {stated}")
            self._scale(stated)
        if owner._load.is_measured(timeline.intended_s[number]):
            chunks = iter(self._chunks)
            for gap, count in zip(chunks, chunks, strict=True):
                timeline.gaps.extend((gap / count, 0.0, 0.0, 1.0, count))

    def _scale(self, stated: int) -> None:
        """Spread the stated tokens over the events, where some held several or none."""
        timeline, number = self._owner.timeline, self.number
        timeline.osl[number] = stated
        timeline.total_tokens += stated - self._count
        # Which events held the tokens that are too many is not known; each of those came with at least one other.
        more = max(stated - self._count, 0)
        timeline.num_together += more + min(more, self._count)
        first = timeline.first_chunk_tokens[number]
        behind = self._count - first
        timeline.first_chunk_tokens[number] = max(round(first * stated / self._count), 1) if behind else stated
        if behind:
            each = max(stated - timeline.first_chunk_tokens[number], 0) / behind
            self._chunks[1::2] = [count * each for count in self._chunks[1::2]] if each else self._chunks[1::2]


def facts_of(generator: LoadGenerator) -> dict[str, float]:
    """Return what tells whether the client itself spoiled the run."""
    timeline = generator.timeline
    return {
        "cpu_share": round(generator.cpu_share, 4),
        "tokens": float(timeline.total_tokens),
        "tokens_together": float(min(timeline.num_together, timeline.total_tokens)),
        "without_usage": float(timeline.num_unstated),
    }


def _number(header: bytes | None) -> int | None:
    """Return a count that our own frontend sent; another server may send anything under this name."""
    return int(header) if header is not None and header.isdigit() and len(header) < 6 else None


def _salted(text: str, salt: str) -> str:
    """Begin a text with the salt, so that nothing behind it is cached from another run."""
    return f"{salt} {text}" if salt else text


def _salted_chat(messages: list[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Put the salt before the first message's text."""
    if not salt or not messages or not isinstance(messages[0].get("content"), str):
        return [{"role": "system", "content": salt}, *messages] if salt else messages
    return [messages[0] | {"content": _salted(messages[0]["content"], salt)}, *messages[1:]]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

"""The load generator: an ordinary HTTP client that sends each request at its time in the workload."""

import asyncio
import dataclasses
import math
import resource
from collections import deque
from typing import Any

from dynabench.apis import PATHS, WHOLE, Api
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.broken_off import BrokenOff
from dynabench.live.call import ClientCall
from dynabench.live.conversations import Conversations, Repeated
from dynabench.live.enough import CHECK_S, GRACE_S, TOO_LATE, Enough, lasting_s
from dynabench.live.events import AnswerReader
from dynabench.live.grammars import GRAMMARS
from dynabench.live.http_client import HttpPool, clock
from dynabench.live.timeline import Stats, Timeline
from dynabench.live.whole_answers import WholeReader
from serving.runtime.step_timer import StepTimer
from serving.runtime.stopping import cancel_all, until_stopped
from serving.runtime.world import world
from workloads import Request, Workload
from workloads.pacer import Pacer
from workloads.pacing import LoadConfig

MOMENT_S = 1e-3
"""The shortest time in which requests count (s)."""
AHEAD = 64
"""The number of bodies that are prepared in advance."""
TOGETHER = 64
"""Most requests that are sent without a look at anything else, if more are due."""

ROUNDING_S = 1e-7
"""What a sum of times may lack of what it stands for, on a clock that began long ago."""


class LoadGenerator:
    """Sends a workload to a target, in one process."""

    def __init__(
        self,
        workload: Workload,
        *,
        target: MeasuredServer,
        load: LoadConfig,
        salt: str,
        timeout_s: float,
        start: float | None = None,
        enough: Enough | None = None,
        most_connections: int | None = None,
    ) -> None:
        """Prepare to send.

        Args:
            workload: the requests.
            target: the server.
            load: how the requests are sent.
            salt: changes every token of every prompt, so that nothing is cached from other runs.
            timeout_s: time after which a request has failed (s).
            start: time 0 of the workload, on the clock of `time.perf_counter` (None: when `run` is called).
            enough: when to send nothing more, and await what is in flight (None: when all is sent).
            most_connections: how many may be open at once; what would need another fails (None: no limit).
        """
        self.timeline = Timeline(len(workload))
        self._workload = workload
        self._target = target
        self._load = load
        self._timeout_s = timeout_s
        self._start = start
        self._enough = enough
        self._most_connections = most_connections
        self._broken: asyncio.Future[None]
        self._pacer = Pacer(workload, load)
        self._bodies = Bodies(target, workload.block_size, salt)
        self._conversations = Conversations(workload.requests, self._bodies.tokens) if target.repeats_answers else None
        self.broken_off = BrokenOff()
        self._ahead: dict[int, bytes] = {}
        self._next_body = 0
        self._open: dict[int, ClientCall] = {}
        self._deadlines: deque[tuple[float, ClientCall]] = deque()
        self._heads: dict[Api, bytes] = {}
        self._paced_s = self._awaited_s = 0.0
        self._is_over = False
        self._due: deque[tuple[int, float]] = deque()
        self._wake = asyncio.Event()
        self._pool: HttpPool
        self._timer: StepTimer
        self.cpu_share = 0.0

    @property
    def num_retried(self) -> int:
        """Requests that were sent again, because the server closed the connection that it had kept."""
        return self._pool.num_retried

    @property
    def repeated(self) -> Repeated:
        """Whose answers later turns repeated."""
        return self._conversations.repeated if self._conversations is not None else Repeated()

    async def run(self, stop: asyncio.Event) -> Timeline:
        """Send everything, and wait for answers only if the workload requires it; end early once `stop` is set.

        An error in any callback of the loop ends it, and is raised here.
        """
        target = self._target
        self._pool = HttpPool(target.url, target.tls, target.through, most=self._most_connections)
        self._heads = {api: self._pool.head(path, self._target.headers_of(api)) for api, path in PATHS.items()}
        self._timer = world().step_timer()
        self._start = self._start if self._start is not None else clock() + 0.05
        cpu, started = _cpu_s(), clock()
        loop = asyncio.get_running_loop()
        self._broken, handler = loop.create_future(), loop.get_exception_handler()
        loop.set_exception_handler(self._on_loop_error)
        beside: asyncio.Future[Any] = asyncio.gather(self._reap(), self._judge(), self._broken)  # ends by an error only
        pacing: asyncio.Future[Any] = asyncio.create_task(until_stopped(stop, self._pace()))
        try:
            await asyncio.wait([pacing, beside], return_when=asyncio.FIRST_COMPLETED)
            await (pacing if pacing.done() else beside)
        finally:
            await cancel_all(pacing, beside)
            loop.set_exception_handler(handler)
            self.cpu_share = (_cpu_s() - cpu) / max(clock() - started, 1e-9)
            self._open.clear()
            self._due.clear()
            await self._pool.close()
            self._timer.close()
        return self.timeline

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run by what a callback raised; a connection's own errors are its request's."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif not self._broken.done():
            self._broken.set_exception(error)

    @property
    def load(self) -> LoadConfig:
        """How requests are sent, and which of them count, once that is decided."""
        return self._load

    @property
    def now(self) -> float:
        """Seconds since time 0 of the workload."""
        return clock() - (self._start or clock())

    def stats(self) -> Stats:
        """Return the progress."""
        return self.timeline.stats(max(self.now, 0.0))

    async def _pace(self) -> None:
        pacer, start = self._pacer, self._start
        assert start is not None
        while not (pacer.is_over or self._is_over):
            self._send_due()
            self._prepare(1)
            next_s = pacer.next_s()
            if next_s is None:
                self._paced_s = self._awaited_s = math.inf
                self._wake.clear()
                if not (pacer.is_over or self._is_over):
                    await self._wake.wait()
                continue
            self._paced_s = self._awaited_s = next_s
            while (slack := start + next_s - clock()) > 0.002 and self._prepare(1):
                await asyncio.sleep(0)
                next_s = pacer.next_s() or next_s
            if slack > 0:
                await self._timer.until(min(start + next_s, clock() + CHECK_S))  # it may be over before
            else:
                await asyncio.sleep(0)

    def _send_due(self) -> None:
        """Send what is due, up to some; the rest follows once the loop has looked at everything else."""
        if self._due or self._is_over:
            return
        self._due.extend(self._pacer.due(self.now + ROUNDING_S))
        self._send_some()

    def _send_some(self) -> None:
        timeline, due = self.timeline, self._due
        if len(due) > TOGETHER:
            asyncio.get_running_loop().call_soon(self._send_some)
        for _ in range(min(len(due), TOGETHER)):
            number, intended = due.popleft()
            timeline.intended_s[number] = intended
            timeline.num_sent += 1
            request = self._request(number)
            body = self._ahead.pop(number, None) or self._bodies.of(request)
            api, has_token_events = self._bodies.api_of(request), self._bodies.has_token_events(request)
            call = ClientCall(
                number,
                self._reader(request, api, has_token_events),
                timeline=timeline,
                target=self._target,
                load=self._load,
                start=self._start or 0.0,
                abort=self._pool.abort,
                on_end=self._on_end,
                has_token_events=has_token_events,
            )
            self._open[number] = call
            self._deadlines.append((clock() + self._timeout_s, call))
            self._pool.send(self._heads[api], body, call, call.on_sent)

    def _reader(self, request: Request, api: Api, has_token_events: bool) -> AnswerReader | WholeReader:
        """Return what reads a request's answer."""
        if api in WHOLE or not self._target.is_streamed:
            return WholeReader(api)
        return AnswerReader(
            request.output_length,
            grammar=GRAMMARS[api],
            counts_all=has_token_events,
            has_nvext=self._target.is_ours,
            keeps_message=self._conversations is not None and bool(request.session),
        )

    def _request(self, number: int) -> Request:
        """Return a request as it is sent now."""
        if self._conversations is not None and self._workload.requests[number].session:
            return self._conversations.request(number)
        return self._workload.requests[number]

    def _prepare(self, count: int) -> bool:
        """Prepare up to `count` bodies in advance; return whether that many were prepared."""
        requests = self._workload.requests
        while count and self._next_body < len(requests) and len(self._ahead) < AHEAD:
            number = self._next_body
            self._next_body += 1
            if self._conversations is not None and requests[number].session:
                continue  # its prompt has answers that are not there yet
            if math.isnan(self.timeline.intended_s[number]):
                self._ahead[number] = self._bodies.of(requests[number])
                count -= 1
        return not count

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

    async def _judge(self) -> None:
        """Let nothing more count once there are enough results or the time is over, and end once all that counts is answered.

        Until then the load stays: if nothing more was sent, the last answers would be faster than the others.
        """
        enough = self._enough
        if enough is None:
            return
        while clock() < enough.ends_at and not enough.is_reached(self.timeline, self._load, self.now):
            await asyncio.sleep(min(CHECK_S, max(enough.ends_at - clock(), 0.0)))
        self._load = dataclasses.replace(self._load, measure_s=max(self.now - self._load.warmup_s, MOMENT_S))
        while (left := self._counted()) and clock() < enough.ends_at + GRACE_S:
            await asyncio.sleep(CHECK_S)
        self._is_over = True
        self._due.clear()
        too_long_s, now = lasting_s(self.timeline), clock()
        for call in left:
            if self.now - self.timeline.intended_s[call.number] > too_long_s:
                call.on_failure(TOO_LATE, now)
        self._wake.set()

    def _counted(self) -> list[ClientCall]:
        """Return what counts and is in flight."""
        intended_s = self.timeline.intended_s
        return [call for number, call in self._open.items() if self._load.is_measured(intended_s[number])]

    def _on_end(self, call: ClientCall, now: float) -> None:
        """Record the end of a request, and send those that waited for it."""
        number, timeline = call.number, self.timeline
        if self._open.pop(number, None) is None:
            return  # the run is over
        is_failed = bool(timeline.error[number])
        if self._conversations is not None and not is_failed:
            self._conversations.on_answer(number, call.answer)
        timeline.num_ended += 1
        timeline.num_failed += is_failed
        timeline.last_numbers.append(number)
        at = now - (self._start or 0.0)
        unsent = self._pacer.on_end(number, at, is_failed=is_failed)
        why = self.broken_off.note(timeline.error[number], len(unsent)) if unsent else ""
        for lost in unsent:
            timeline.error[lost] = why
            timeline.intended_s[lost] = timeline.sent_s[lost] = at
            timeline.num_ended += 1
            timeline.num_failed += 1
        next_s = self._pacer.next_s()
        if next_s is not None and next_s <= at:
            self._send_due()
        self._send_sooner(at)
        if self._pacer.is_over or next_s is not None:
            self._wake.set()

    def _send_sooner(self, at: float) -> None:
        """Send what is due before anything that is awaited, at its time."""
        next_s = self._pacer.next_s()
        if next_s is not None and next_s < self._awaited_s:
            self._awaited_s = next_s
            asyncio.get_running_loop().call_later(max(next_s - at, 0.0), self._send_awaited)

    def _send_awaited(self) -> None:
        """Send what was awaited; from now on only what is paced is, and what may be due before it."""
        self._awaited_s = self._paced_s
        self._send_due()
        self._send_sooner(self.now)


def client_facts(generator: LoadGenerator) -> dict[str, float]:
    """Return facts that show whether the client itself distorted the run."""
    timeline = generator.timeline
    return {
        "cpu_share": round(generator.cpu_share, 4),
        "tokens": float(timeline.total_tokens),
        "tokens_together": float(min(timeline.num_together, timeline.total_tokens)),
        "without_usage": float(timeline.num_unstated),
        "wrong_usage": float(timeline.num_wrong),
        "without_done": float(timeline.num_without_last),
        "reasoning_tokens": float(timeline.num_reasoning),
        "hidden_reasoning": float(timeline.num_hidden),
        "without_tokens": float(timeline.num_without_tokens),
        "as_whole": float(timeline.num_as_whole),
        "uncounted": float(timeline.num_uncounted),
        "repeated_answers": float(generator.repeated.num_answers),
        "planned_answers": float(generator.repeated.num_planned),
        "unmatched_results": float(generator.repeated.num_unmatched),
        "broken_conversations": float(generator.broken_off.num_failed),
        "too_long_conversations": float(generator.broken_off.num_too_long),
        "unsent_turns": float(generator.broken_off.num_unsent),
        "retried": float(generator.num_retried),
    }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

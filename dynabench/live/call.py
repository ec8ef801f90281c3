"""One request in progress: its answer's tokens are timestamped, counted and checked."""

import math
from collections.abc import Callable

from dynabench.live.answer_message import Message
from dynabench.live.bodies import MeasuredServer
from dynabench.live.event_types import EventUsage
from dynabench.live.events import EVENT_LIMIT, AnswerError, AnswerReader, Timing
from dynabench.live.timeline import Timeline
from dynabench.live.whole_answers import WholeReader
from foundation.text import one_line
from workloads.pacing import LoadConfig

STAGES = (
    "admitted",
    *(
        "prefill_queued",
        "prefill_end",
        "decode_queued",
        "decode_blocks",
        "transfer_start",
        "transfer_end",
        "decode_start",
    ),
)
"""The stages of a request that our own frontend times; each has a column of `Requests`."""


class ClientCall:
    """One request, whose tokens are timestamped as they arrive."""

    __slots__ = (
        "_abort", "_body", "_chunks", "_count", "_has_token_events", "_last", "_load", "_on_end", "_reader", "_start",
        "_status", "_target", "_timeline", "number",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        reader: AnswerReader | WholeReader,
        *,
        timeline: Timeline,
        target: MeasuredServer,
        load: LoadConfig,
        start: float,
        abort: Callable[["ClientCall"], None],
        on_end: Callable[["ClientCall", float], None],
        has_token_events: bool = False,
    ) -> None:
        """Prepare to follow a request.

        Args:
            number: its index in the workload.
            reader: reads its answer.
            timeline: records what happens.
            target: the server that answers it.
            load: defines which requests are measured.
            start: time 0 of the workload, on the client's clock.
            abort: gives the request up.
            on_end: called when the request is over, with the time.
            has_token_events: whether it is known how many tokens each event has, so that none can get lost.
        """
        self.number = number
        self._timeline = timeline
        self._target = target
        self._load = load
        self._start = start
        self._abort = abort
        self._on_end = on_end
        self._status = 0
        self._body = b""  # the body of an error
        self._has_token_events = has_token_events
        self._reader = reader
        self._count = 0
        self._last = 0.0
        self._chunks: list[float] = []  # gap, tokens, gap, tokens, ...

    @property
    def answer(self) -> Message | None:
        """The answer as a message, if its reader keeps it and it can be repeated."""
        return self._reader.message

    def on_sent(self, now: float) -> None:
        """Record the time when the request's bytes are written."""
        self._timeline.sent_s[self.number] = now - self._start

    def on_status(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        """Record the time and headers of the answer's head."""
        self._status = status
        timeline, number = self._timeline, self.number
        timeline.first_byte_s[number] = now - self._start
        if (slot := _number(headers.get(b"x-worker-slot"))) is not None:
            timeline.worker[number] = slot + self._target.num_prefill_workers
        if (overlap := _number(headers.get(b"x-overlap-tokens"))) is not None:
            timeline.predicted_tokens[number] = overlap

    def on_data(self, data: bytes, now: float) -> None:
        """Count the tokens of one read."""
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
        """Finish the whole answer: read its usage."""
        self._timeline.done_s[self.number] = now - self._start
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
        self._timeline.last_token_s[self.number] = self._last if reader.has_tokens else now - self._start
        self._on_end(self, now)

    def on_failure(self, reason: str, now: float) -> None:
        """Record that the request failed, before or during its answer."""
        timeline = self._timeline
        timeline.osl[self.number] = self._count
        timeline.error[self.number] = self._target.masked(reason)
        self._on_end(self, now)

    def _give_up(self, reason: str, now: float) -> None:
        """End the request, whatever else the server sends."""
        self._abort(self)
        self.on_failure(reason, now)

    def _refusal(self) -> str:
        said = self._target.masked(self._body.decode(errors="replace"))
        return f"HTTP {self._status}: {one_line(said, 200) or 'no reason given'}"

    def _stamp(self, count: int, now: float) -> None:
        """Record the time of tokens that arrived in one read."""
        if not count:
            return
        at, timeline = now - self._start, self._timeline
        if self._count:
            self._chunks += (at - self._last, count)
        else:
            timeline.first_token_s[self.number] = at
            timeline.first_chunk_tokens[self.number] = count
        if self._count < 2 <= self._count + count:
            timeline.second_token_s[self.number] = at
        self._count += count
        self._last = at
        timeline.total_tokens += count
        if count > 1:
            timeline.num_together += count

    def _settle(self, usage: EventUsage | None) -> None:
        """Take lengths from the usage, and record the gaps between tokens.

        Raises:
            AnswerError: our own stack lost a token.
        """
        timeline, number, reader = self._timeline, self.number, self._reader
        timeline.osl[number] = self._count
        timeline.finish_reason[number] = reader.finish_reason
        if usage is not None:
            if usage.prompt_tokens:
                timeline.isl[number] = usage.prompt_tokens
            if details := usage.prompt_tokens_details:
                timeline.cached_tokens[number] = details.cached_tokens or 0
        if reader.routing is not None:
            if reader.routing.best_tokens >= 0:
                timeline.best_tokens[number] = reader.routing.best_tokens
            timeline.queue_depth[number] = reader.routing.queue_depth
            if reader.routing.worker_slot is not None:
                timeline.worker[number] = reader.routing.worker_slot + self._target.num_prefill_workers
            for name in ("host_tokens", "disk_tokens", "store_tokens"):
                if (count := getattr(reader.routing, name)) is not None:
                    getattr(timeline, name)[number] = count
            if reader.routing.prefill_slot is not None:
                timeline.prefill_worker[number] = reader.routing.prefill_slot
        self._note_stages(reader.timing)
        stated = usage.completion_tokens if usage is not None else None
        is_wrong = usage is not None and usage.is_wrong
        timeline.num_wrong += is_wrong
        if not reader.has_tokens:
            if reader.is_generated:
                timeline.num_as_whole += 1
                timeline.num_uncounted += not stated
                timeline.osl[number] = stated or 0  # not known: said as `num_uncounted`
            else:
                timeline.num_without_tokens += 1
                timeline.num_unstated += usage is None
            return
        if not stated:
            timeline.num_unstated += not is_wrong
        elif stated != self._count:
            if self._has_token_events:
                raise AnswerError(f"{self._count} tokens arrived of {stated}")
            self._scale(stated, self._num_hidden(usage, stated))
        self._note_reasoning(usage)
        timeline.num_without_last += reader.lacks_last
        if self._load.is_measured(timeline.intended_s[number]):
            chunks = iter(self._chunks)
            for gap, count in zip(chunks, chunks, strict=True):
                timeline.gaps.extend((gap / count, 0.0, 0.0, 1.0, count))

    def _note_stages(self, timing: Timing | None) -> None:
        """Record the times of the stages, if our own frontend reports them.

        The frontend counts from when it received the request. The time between client and frontend, both ways, is
        counted as part of the queue, so the last stage ends when the first token arrived here.
        """
        timeline, number = self._timeline, self.number
        if timing is None or timing.ttft_s is None:
            return
        # Parts of an answer may wait for later tokens, but its head is sent as soon as there is a token.
        first_s = timeline.first_token_s if self._has_token_events else timeline.first_byte_s
        start = max(first_s[number] - timing.ttft_s, timeline.sent_s[number])
        for stage in STAGES:
            if (at := timing.seconds(stage)) is not None:
                getattr(timeline, f"{stage}_s")[number] = start + at

    def _num_hidden(self, usage: EventUsage | None, stated: int) -> int:
        """Return how many of the stated tokens are reasoning that the server did not send: no event had any."""
        thought = usage.reasoning_tokens if usage is not None else None
        if not thought or self._reader.num_reasoning:
            return 0
        return min(thought, max(stated - self._count, 0))

    def _note_reasoning(self, usage: EventUsage | None) -> None:
        """Count reasoning: as the server states it, else by the events."""
        thought = usage.reasoning_tokens if usage is not None else None
        if thought is None:
            sent = self._reader.num_reasoning
            thought = round(sent * self._timeline.osl[self.number] / self._count) if sent else 0
        self._timeline.num_reasoning += thought

    def _scale(self, stated: int, hidden: int) -> None:
        """Distribute the reported tokens over the events, some of which carried several or none.

        Hidden ones were generated before the first event, and count as having arrived with it.
        """
        timeline, number = self._timeline, self.number
        timeline.osl[number] = stated
        timeline.num_hidden += bool(hidden)
        timeline.second_token_s[number] = math.nan
        timeline.total_tokens += stated - self._count
        # It is unknown which events carried the additional tokens; each of these came with at least one other.
        more = max(stated - self._count, 0)
        timeline.num_together += more + min(more, self._count)
        first, shown = timeline.first_chunk_tokens[number], stated - hidden
        behind = self._count - first
        first = max(round(first * shown / self._count), 1) if behind else shown
        timeline.first_chunk_tokens[number] = first + hidden
        if behind:
            each = max(shown - first, 0) / behind
            self._chunks[1::2] = [count * each for count in self._chunks[1::2]] if each else self._chunks[1::2]


def _number(header: bytes | None) -> int | None:
    """Return a count that our own frontend sent; another server may send anything in this header."""
    return int(header) if header is not None and header.isdigit() and len(header) < 6 else None

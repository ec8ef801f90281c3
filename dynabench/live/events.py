"""Parse the events of a streamed answer as they arrive: count their tokens, and read the final ones.

An event has one token, unless it says otherwise: by the usage so far, or in our own frontend's extra data, for a step that
made several. Parsing takes a microsecond per event. So an event that differs from an earlier one only in its text is counted
without parsing.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dynabench.live.answer_message import AnswerMessage, Message
from dynabench.live.event_types import Count, Event, EventChoice, EventUsage
from dynabench.live.grammars import CHAT, Grammar
from foundation.text import one_line
from reports.record.records import MAX_S, MAX_WORKERS

EVENT_LIMIT = 1 << 20
"""Most bytes of one event, and of an error's body."""
EVENT_END = b"\n\n"
BOM = b"\xef\xbb\xbf"
FIELD = re.compile(rb":|[A-Za-z][\w-]*(?::|\Z)")
"""The beginning of a line of an event: a comment, or a field with or without a value; unknown fields mean nothing."""
NOT_ENDS = ("error", "abort", "cancelled")
"""Finish reasons of incomplete answers."""
MOST_PATTERNS = 4
PLAIN = re.compile(rb"(?:event:[^\n]*\n)?data:[^\n]*\Z")
"""An event whose data is in one line."""
TEXT = re.compile(
    rb'"(?:text|content|reasoning_content|reasoning|refusal|arguments|thinking|partial_json|delta)": ?"((?:[^"\\]|\\.)+)"'
)
NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
"""What differs in each event of a response."""
TOOL_NAME = re.compile(rb'"name": ?"')
"""In the first event of a tool call. Its name is generated too, so it carries a token even if its arguments are empty."""


class AnswerError(Exception):
    """An invalid answer; the message says what is wrong with it."""


class EventRouting(msgspec.Struct):
    """Our own frontend's report of its decision."""

    best_tokens: int
    queue_depth: int
    worker_slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)] | None = None
    """Slot of the worker that answered; the headers name one that may not have been the last."""
    host_tokens: Count | None = None
    disk_tokens: Count | None = None
    store_tokens: Count | None = None
    """Cached tokens by the tier from which they came, if the engine has tiers and reports them."""
    prefill_slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)] | None = None
    """Slot of the worker that computed the prompt, if another worker answered."""


class Timing(msgspec.Struct):
    """Times of a request, in milliseconds since our own frontend received it."""

    ttft_ms: Any = None
    stages: dict[str, Any] = {}
    """Mostly reported by workers, so values may have any type."""

    def seconds(self, stage: str) -> float | None:
        """Return when a stage was reached, None if that is unknown."""
        return _seconds(self.stages.get(stage))

    @property
    def ttft_s(self) -> float | None:
        """When the first token was ready."""
        return _seconds(self.ttft_ms)


def _seconds(said: Any) -> float | None:
    return said / 1000 if isinstance(said, int | float) and 0 <= said <= MAX_S else None


class Extra(msgspec.Struct):
    """The extra data of our own frontend."""

    routing: EventRouting | None = None
    timing: Timing | None = None
    num_tokens: Count | None = None
    """Tokens of this event, if it has several."""


class AnswerReader:
    """Reads the events of one answer."""

    has_tokens = is_generated = True

    __slots__ = (
        "_counts_all",
        "_follows_cr",
        "_grammar",
        "_has_nvext",
        "_has_usages",
        "_last",
        "_max_events",
        "_max_tokens",
        "_message",
        "_num_events",
        "_num_patterns",
        "_pattern",
        "_rest",
        "finish_reason",
        "is_done",
        "num_reasoning",
        "num_tokens",
        "routing",
        "timing",
        "usage",
    )

    def __init__(
        self,
        max_tokens: int,
        *,
        grammar: Grammar = CHAT,
        counts_all: bool = False,
        has_nvext: bool = False,
        keeps_message: bool = False,
    ) -> None:
        """Start reading.

        Args:
            max_tokens: the requested limit.
            grammar: what the API's events say.
            counts_all: whether events without text are tokens, too: our frontend sends an event for each step.
            has_nvext: whether to read our frontend's report of routing and times.
            keeps_message: whether the answer is wanted as a message; then each event is parsed.
        """
        self._max_tokens = max_tokens
        self._max_events = 16 * max_tokens + 1024  # some servers send an event for each character
        self._num_events = 0
        self._grammar = grammar
        self._counts_all = counts_all
        self._has_nvext = has_nvext
        self._has_usages = True  # until an event with a token has none
        self._follows_cr = False
        self._message = AnswerMessage() if keeps_message else None
        self._rest = bytearray()
        self._last = b""
        # The bytes before and after the text of a token's event, and whether it is reasoning.
        self._pattern: tuple[bytes, bytes, bool] | None = None
        self._num_patterns = 0
        self.num_tokens = 0
        """The number of tokens of the events."""
        self.num_reasoning = 0
        """Those of them that are reasoning."""
        self.usage: EventUsage | None = None
        self.routing: EventRouting | None = None
        self.timing: Timing | None = None
        self.finish_reason = ""
        self.is_done = False

    @property
    def message(self) -> Message | None:
        """The answer so far as a message, if it is kept and can be repeated."""
        return self._message.whole() if self._message is not None else None

    def take(self, data: bytes) -> int:
        """Process the bytes of a read; return how many tokens its events carry.

        Raises:
            AnswerError: an event is malformed or too long.
        """
        if b"\r" in data or self._follows_cr:
            data = self._with_newlines(data)
        if self._rest:
            searched = max(len(self._rest) - 1, 0)
            self._rest += data
            cut = self._rest.rfind(EVENT_END, searched) + 2
            if cut < 2:
                self._check_size()
                return 0
            data, rest = bytes(self._rest[:cut]), self._rest[cut:]
            self._rest = rest
        elif not data.endswith(EVENT_END):
            cut = data.rfind(EVENT_END) + 2 if EVENT_END in data else 0
            self._rest += data[cut:]
            self._check_size()
            data = data[:cut]
        before = self.num_tokens
        self._count(data)
        if self._num_events > self._max_events:
            raise AnswerError(f"the answer does not end: {self._num_events} events arrived")
        return self.num_tokens - before

    def end(self) -> None:
        """Check that the answer is complete, after its body has ended.

        Raises:
            AnswerError: it is not.
        """
        if rest := bytes(self._rest).strip():
            self._read(rest)
        if self.lacks_last and (self._has_nvext or not self.finish_reason):
            raise AnswerError(f"the stream ended without {self._grammar.last}: {one_line(self._last[-200:])}")
        if not self.num_tokens:
            raise AnswerError("the answer contains no tokens")
        if not self.finish_reason:
            raise AnswerError(f"the answer ended without a finish_reason: {one_line(self._last[-200:])}")
        if self.usage is not None and self._is_too_much(self.usage):
            self.usage = msgspec.structs.replace(self.usage, completion_tokens=None, is_wrong=True)

    def _is_too_much(self, usage: EventUsage) -> bool:
        """Return whether a usage has more tokens than were asked for, and events do not show that the server sent more.

        Some servers count the end as a token, and some let reasoning have tokens beyond the limit.
        """
        stated = (usage.completion_tokens or 0) - (usage.reasoning_tokens or 0)
        return stated > self._max_tokens + 1 >= self.num_tokens

    @property
    def lacks_last(self) -> bool:
        """Whether the event that ends a stream of its API has not arrived. Some servers of others never send it."""
        return bool(self._grammar.last) and not self.is_done

    def _with_newlines(self, data: bytes) -> bytes:
        """Return bytes whose lines may end with CR, LF or both with LF only."""
        if self._follows_cr and data.startswith(b"\n"):
            data = data[1:]
        self._follows_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _check_size(self) -> None:
        if len(self._rest) > EVENT_LIMIT:
            raise AnswerError(f"an event is longer than {EVENT_LIMIT:,} bytes: {one_line(bytes(self._rest[:100]))}")

    def _count(self, events: bytes) -> None:
        """Count the tokens of events; those of a known pattern, each with one token, all at once."""
        if self._pattern is not None:
            before, after, is_reasoning = self._pattern
            count = events.count(EVENT_END)
            if events.count(before) == count == events.count(after):
                self._num_events += count
                added = count if self._counts_all else count - events.count(before + after)
                self.num_tokens += added
                if is_reasoning:
                    self.num_reasoning += added
                return
        if not self._num_events and events.startswith(BOM):
            events = events[len(BOM) :]
        found = [event for event in events.split(EVENT_END) if event]
        self._num_events += len(found)
        for event in found:
            if not self._is_known(event):
                self._read(event)

    def _is_known(self, event: bytes) -> bool:
        """Count an event of the known pattern among others, such as the last ones of a stream."""
        if self._pattern is None:
            return False
        before, after, is_reasoning = self._pattern
        if after.endswith(EVENT_END):
            num_others = len(before) + len(after) - len(EVENT_END)
            if len(event) < num_others or not event.startswith(before) or not event.endswith(after[: -len(EVENT_END)]):
                return False
            has_text = len(event) > num_others
        else:
            if before not in event or after not in event:
                return False
            has_text = before + after not in event
        if has_text or self._counts_all:
            self.num_tokens += 1
            self.num_reasoning += is_reasoning
        return True

    def _read(self, event: bytes) -> None:
        """Parse one event, and count its tokens."""
        data = self._data(event)
        if not data or (found := self._parsed(data)) is None:
            return
        said, extra = found
        if extra is not None:
            self.routing = extra.routing or self.routing
            self.timing = extra.timing or self.timing
        self._note_usage(said, data)
        choices = said.choices or []
        is_end = self._note_end(choices)
        if self._message is not None and choices:
            self._message.add(choices[0])
        count = extra.num_tokens if extra is not None else None
        self._count_parsed(event, choices, said.usage, count, is_end=is_end)

    def _parsed(self, data: bytes) -> tuple[Event, Extra | None] | None:
        """Return what an event says, with our own frontend's extra data; None: it was the last event.

        Raises:
            AnswerError: it is malformed, or says that there was an error.
        """
        try:
            said = self._grammar.read(data)
            if said is None:
                self.is_done = True
                return None
            self._last = data
            extra = msgspec.json.decode(said.nvext, type=Extra | None) if self._has_nvext else None
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise AnswerError(f"an event is malformed ({error}): {one_line(data, 200)}") from error
        if said.error is not None:
            raise AnswerError(f"error in the stream: {one_line(str(said.error))}")
        return said, extra

    def _note_usage(self, said: Event, data: bytes) -> None:
        """Keep an event's usage; an event without one has choices."""
        if said.usage is not None:
            self.usage = said.usage.after(self.usage)
        elif said.choices is msgspec.UNSET:
            raise AnswerError(f"an event is malformed (no choices): {one_line(data, 200)}")

    def _note_end(self, choices: Sequence[EventChoice]) -> bool:
        """Keep the reason for the end; return whether an event has one."""
        reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
        for reason in reasons:
            if reason in NOT_ENDS:
                raise AnswerError(f"the answer broke off: finish_reason {reason}")
            self.finish_reason = one_line(reason, 40)
        return bool(reasons)

    def _count_parsed(
        self, event: bytes, choices: Sequence[EventChoice], usage: EventUsage | None, count: int | None, *, is_end: bool
    ) -> None:
        """Count an event's tokens: as its usage so far says, else `count` of our own frontend, else one if it has any."""
        is_reasoning = bool(choices) and choices[0].is_reasoning
        before = self.num_tokens
        is_token = any(choice.is_token if self._counts_all else choice.has_text for choice in choices)
        if is_token and usage is None and count is None and not is_end:
            self._learn(event, is_reasoning=is_reasoning)
        if choices and (so_far := self._so_far(usage, is_end=is_end)) is not None:
            self.num_tokens = so_far
        elif is_token:
            self._has_usages = False
            self.num_tokens += 1 if count is None else count
        if is_reasoning:
            self.num_reasoning += self.num_tokens - before

    def _so_far(self, usage: EventUsage | None, *, is_end: bool) -> int | None:
        """Return the tokens up to an event by its usage, if all events before it had one, too.

        A server may send its only usage with the finish reason: then it does not say how many tokens that event has.
        """
        if usage is None or usage.completion_tokens is None or not self._has_usages or (is_end and not self.num_tokens):
            return None
        so_far: int = max(usage.completion_tokens, self.num_tokens)
        return so_far if so_far <= self._max_events else None

    def _data(self, event: bytes) -> bytes:
        """Return the data of an event; comments have none."""
        parts = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:") or line == b"data":
                parts.append(line[5:])
            elif line.startswith(b"event:") and line[6:].strip() == b"error":
                raise AnswerError(f"error in the stream: {one_line(event)}")
            elif line and FIELD.match(line) is None:
                raise AnswerError(f"an event is malformed (not a field): {one_line(line, 200)}")
        return b"\n".join(parts)

    def _learn(self, event: bytes, *, is_reasoning: bool) -> None:
        """Remember the bytes around the text, unless this server's events differ in other parts, too."""
        if (
            self._message is not None
            or self._num_patterns == MOST_PATTERNS
            or PLAIN.match(event) is None
            or TOOL_NAME.search(event)
        ):
            return
        found = list(TEXT.finditer(event))
        if len(found) != 1:
            return
        before, after = event[: found[0].start(1)], event[found[0].end(1) :] + EVENT_END
        if number := NUMBER.search(before):
            before = before[number.end() :]
        if number := NUMBER.search(after):
            after = after[: number.start(1)]
        self._num_patterns += 1
        self._pattern = before, after, is_reasoning

"""The events of a streamed answer, taken in as they arrive: how many carry a token, and what the last ones say.

Parsing takes a microsecond an event. So an event that differs from an earlier one in nothing but its text is only counted.
"""

import re
from typing import Annotated, Any

import msgspec

from foundation.text import one_line
from reports.records import MAX_S, MAX_WORKERS

EVENT_LIMIT = 1 << 20
"""Bytes of one event, and of an error's body."""
EVENT_END = b"\n\n"
NOT_ENDS = ("error", "abort", "cancelled")
"""Finish reasons of answers that broke off."""
MOST_PATTERNS = 4
TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning)": ?"((?:[^"\\]|\\.)+)"')

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class AnswerError(Exception):
    """An answer that is not what was asked for; the message says what is wrong with it."""


class Delta(msgspec.Struct):
    """What an event adds to a message."""

    role: str | None = None
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """What an event adds to an answer."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether it adds any."""
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))

    @property
    def is_token(self) -> bool:
        """Whether our own frontend sent it for a token, of which some are no text: it opens a chat with the role alone."""
        return self.has_text or not (self.finish_reason or (self.delta and self.delta.role))


class PromptDetails(msgspec.Struct):
    """Of a prompt's tokens."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct):
    """How many tokens the server counted."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None


class Routing(msgspec.Struct):
    """What our own frontend says about its decision."""

    best_tokens: int
    queue_depth: int
    host_tokens: Count | None = None
    disk_tokens: Count | None = None
    store_tokens: Count | None = None
    """Cached tokens by the tier from which they came, if the engine has any and says so."""
    prefill_slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)] | None = None
    """Of the worker that computed the prompt, if another than the one that answered."""


class Timing(msgspec.Struct):
    """When what happened, in milliseconds since our own frontend had the request."""

    ttft_ms: Any = None
    stages: dict[str, Any] = {}
    """Workers say most of it, of whatever kind."""

    def seconds(self, stage: str) -> float | None:
        """Return when a stage was reached, None where nobody can know."""
        return _seconds(self.stages.get(stage))

    @property
    def ttft_s(self) -> float | None:
        """When the first token was there."""
        return _seconds(self.ttft_ms)


def _seconds(said: Any) -> float | None:
    return said / 1000 if isinstance(said, int | float) and 0 <= said <= MAX_S else None


class Extra(msgspec.Struct):
    """What our own frontend adds."""

    routing: Routing | None = None
    timing: Timing | None = None


class Event(msgspec.Struct):
    """One event's data."""

    choices: list[Choice] | msgspec.UnsetType | None = msgspec.UNSET
    usage: Usage | None = None
    error: Any = None
    nvext: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(Event)


class AnswerReader:
    """Reads the events of one answer."""

    __slots__ = (
        "_counts_all",
        "_has_nvext",
        "_last",
        "_max_events",
        "_num_events",
        "_num_patterns",
        "_pattern",
        "_rest",
        "finish_reason",
        "is_done",
        "num_tokens",
        "routing",
        "timing",
        "usage",
    )

    def __init__(self, max_tokens: int, *, counts_all: bool = False, has_nvext: bool = False) -> None:
        """Begin to read.

        Args:
            max_tokens: what was asked for.
            counts_all: whether an event without text is a token, too: our frontend sends one for each.
            has_nvext: whether to read what our frontend says about routing and times.
        """
        self._max_events = 16 * max_tokens + 1024  # some servers send an event for each character
        self._num_events = 0
        self._counts_all = counts_all
        self._has_nvext = has_nvext
        self._rest = bytearray()
        self._last = b""
        self._pattern: tuple[bytes, bytes] | None = None  # what stands before and after the text of a token's event
        self._num_patterns = 0
        self.num_tokens = 0
        """Events that carried a token."""
        self.usage: Usage | None = None
        self.routing: Routing | None = None
        self.timing: Timing | None = None
        self.finish_reason = ""
        self.is_done = False

    def take(self, data: bytes) -> int:
        """Take in what a read brought; return how many of its events carry a token.

        Raises:
            AnswerError: an event is malformed, or there is no end of it.
        """
        if self._rest:
            searched = max(len(self._rest) - 3, 0)
            self._rest += data
            cut = _end_of_events(self._rest, searched)
            if not cut:
                self._check_size()
                return 0
            data, rest = bytes(self._rest[:cut]), self._rest[cut:]
            self._rest = rest
        else:
            cut = _end_of_events(data, 0)
            if cut < len(data):
                self._rest += data[cut:]
                self._check_size()
                data = data[:cut]
        count = self._count(data.replace(b"\r\n", b"\n") if b"\r" in data else data)
        self.num_tokens += count
        if self._num_events > self._max_events:
            raise AnswerError(f"the answer does not end: {self._num_events} events arrived")
        return count

    def end(self) -> None:
        """The body is over: check that the answer is.

        Raises:
            AnswerError: it is not.
        """
        if rest := bytes(self._rest).strip():
            self.num_tokens += self._read(rest.replace(b"\r\n", b"\n"))
        if not self.is_done:
            raise AnswerError(f"the stream ended without [DONE]: {one_line(self._last[-200:])}")
        if not self.num_tokens:
            raise AnswerError("the answer contains no tokens")
        if not self.finish_reason:
            raise AnswerError(f"the answer ended without a finish_reason: {one_line(self._last[-200:])}")

    def _check_size(self) -> None:
        if len(self._rest) > EVENT_LIMIT:
            raise AnswerError(f"an event is longer than {EVENT_LIMIT:,} bytes: {one_line(bytes(self._rest[:100]))}")

    def _count(self, events: bytes) -> int:
        """Count the events with a token; those of the known pattern all at once."""
        if self._pattern is not None:
            before, after = self._pattern
            count = events.count(EVENT_END)
            if events.count(before) == count == events.count(after):
                self._num_events += count
                return count if self._counts_all else count - events.count(before + after)
        found = [event for event in events.split(EVENT_END) if event]
        self._num_events += len(found)
        return sum(map(self._read, found))

    def _read(self, event: bytes) -> bool:
        """Read one event; return whether it carries a token."""
        data = self._data(event)
        if not data:
            return False
        if data.strip() == b"[DONE]":
            self.is_done = True
            return False
        self._last = data
        try:
            found = _decoder.decode(data)
            if self._has_nvext and (extra := msgspec.json.decode(found.nvext, type=Extra | None)):
                self.routing = extra.routing or self.routing
                self.timing = extra.timing or self.timing
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise AnswerError(f"an event is malformed ({error}): {one_line(data, 200)}") from error
        if found.error is not None:
            raise AnswerError(f"error in the stream: {one_line(str(found.error))}")
        if found.usage is not None:
            if (found.usage.completion_tokens or 0) > self._max_events:
                raise AnswerError(f"the usage is wrong: {found.usage.completion_tokens} completion tokens")
            self.usage = found.usage
        elif found.choices is msgspec.UNSET:
            raise AnswerError(f"an event is malformed (no choices): {one_line(data, 200)}")
        choices = found.choices or []
        for choice in choices:
            if choice.finish_reason in NOT_ENDS:
                raise AnswerError(f"the answer broke off: finish_reason {choice.finish_reason}")
            if choice.finish_reason:
                self.finish_reason = one_line(choice.finish_reason, 40)
        ends = [bool(choice.finish_reason) for choice in choices]
        is_token = any(choice.is_token if self._counts_all else choice.has_text for choice in choices)
        if is_token and found.usage is None and not any(ends):
            self._learn(event)
        return is_token

    def _data(self, event: bytes) -> bytes:
        """Return the data of an event; comments have none."""
        parts = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                parts.append(line[5:])
            elif line.startswith(b"event:") and line[6:].strip() == b"error":
                raise AnswerError(f"error in the stream: {one_line(event)}")
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise AnswerError(f"an event is malformed (not a field): {one_line(line, 200)}")
        return b"\n".join(parts)

    def _learn(self, event: bytes) -> None:
        """Remember what stands around the text, unless this server's events differ in more than that."""
        if self._num_patterns == MOST_PATTERNS or not event.startswith(b"data:") or b"\n" in event:
            return
        found = list(TEXT.finditer(event))
        if len(found) == 1:
            self._num_patterns += 1
            self._pattern = event[: found[0].start(1)], event[found[0].end(1) :] + EVENT_END


def _end_of_events(data: bytes | bytearray, start: int) -> int:
    """Return where the last whole event ends (0: there is none)."""
    ends = ((data.rfind(mark, start), len(mark)) for mark in (EVENT_END, b"\r\n\r\n"))
    return max(place + size if place >= 0 else 0 for place, size in ends)

"""Answers that come as a whole: embeddings and documents in order, which have no tokens, and others that are not streamed.

API                    what it has     why it ended                usage
embeddings, rerank     data, results                               prompt_tokens, or total_tokens
completions, chat      choices         finish_reason of the first  usage
responses              output          status                      usage, in its words
messages               content         stop_reason                 usage, in its words
"""

from typing import Any

import msgspec

from dynabench.apis import WHOLE, Api
from dynabench.live.answer_message import Message
from dynabench.live.event_types import EventUsage, Stated
from dynabench.live.events import AnswerError, EventRouting, Timing
from dynabench.live.grammars import STOP_REASONS, IncompleteDetails, MessageUsage, ResponseUsage, response_end
from foundation.text import one_line

MOST_BYTES = 1 << 26
"""Most bytes of an answer; an embedding of 4,096 numbers takes about 90,000."""
CONTENT: dict[Api, str] = {
    "completions": "choices",
    "chat": "choices",
    "responses": "output",
    "messages": "content",
    "embeddings": "data",
    "rerank": "results",
}
"""What an answer cannot lack."""


class WholeUsage(msgspec.Struct):
    """The tokens that the server counted; some count those of answers without any in total only."""

    prompt_tokens: Stated = None
    total_tokens: Stated = None

    @property
    def as_chat(self) -> EventUsage:
        """The same in a chat's words."""
        return EventUsage(self.prompt_tokens if self.prompt_tokens is not None else self.total_tokens)


class WholeChoice(msgspec.Struct):
    """One of a completion's answers."""

    finish_reason: str | None = None


class Whole(msgspec.Struct):
    """An answer, without its numbers and texts."""

    data: list[msgspec.Raw] | None = None
    results: list[msgspec.Raw] | None = None
    choices: list[WholeChoice] | None = None
    output: list[msgspec.Raw] | None = None
    content: list[msgspec.Raw] | None = None
    status: str | None = None
    incomplete_details: IncompleteDetails | None = None
    stop_reason: str | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None

    @property
    def end(self) -> str:
        """Why it ended, in OpenAI's words; empty if it does not say."""
        if self.choices:
            return self.choices[0].finish_reason or ""
        if self.status is not None:
            return response_end(self.status, self.incomplete_details)
        return STOP_REASONS.get(self.stop_reason, self.stop_reason) if self.stop_reason else ""


class WholeReader:
    """Reads one answer; what it says of tokens is what a reader of events says of an answer without any."""

    num_tokens = num_reasoning = 0
    lacks_last = False
    has_tokens = False
    message: Message | None = None
    routing: EventRouting | None = None
    timing: Timing | None = None

    def __init__(self, api: Api) -> None:
        self._api = api
        self.is_generated = api not in WHOLE
        """Whether the answer has tokens, though none of them has a time."""
        self._body = bytearray()
        self.finish_reason = ""
        self.usage: EventUsage | None = None

    def take(self, data: bytes) -> int:
        """Keep the bytes of a read.

        Raises:
            AnswerError: there are too many.
        """
        self._body += data
        if len(self._body) > MOST_BYTES:
            raise AnswerError(f"the answer is longer than {MOST_BYTES:,} bytes")
        return 0

    def end(self) -> None:
        """Check that the answer is one, after its body has ended.

        Raises:
            AnswerError: it is not.
        """
        body, content = bytes(self._body), CONTENT[self._api]
        try:
            found = _decoder.decode(body)
            usage = _usage_of(self._api, bytes(found.usage))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise AnswerError(f"the answer is malformed ({error}): {one_line(body, 200)}") from error
        if found.error is not None:
            raise AnswerError(f"error in the answer: {one_line(str(found.error))}")
        if not getattr(found, content):
            raise AnswerError(f"the answer has no {content}: {one_line(body, 200)}")
        self.finish_reason, self.usage = found.end, usage


def _usage_of(api: Api, said: bytes) -> EventUsage | None:
    match api:
        case "completions" | "chat":
            return msgspec.json.decode(said, type=EventUsage | None)
        case "responses":
            found: ResponseUsage | MessageUsage | WholeUsage | None = msgspec.json.decode(
                said, type=ResponseUsage | None
            )
        case "messages":
            found = msgspec.json.decode(said, type=MessageUsage | None)
        case _:
            found = msgspec.json.decode(said, type=WholeUsage | None)
    return None if found is None else found.as_chat


_decoder = msgspec.json.Decoder(Whole)

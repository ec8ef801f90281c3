"""Answers that come as a whole and have no tokens: embeddings, and documents in order."""

from typing import Any

import msgspec

from dynabench.apis import Api
from dynabench.live.answer_message import Message
from dynabench.live.event_types import Count, EventUsage
from dynabench.live.events import AnswerError, EventRouting, Timing
from foundation.text import one_line

MOST_BYTES = 1 << 26
"""Most bytes of an answer; an embedding of 4,096 numbers takes about 90,000."""


class WholeUsage(msgspec.Struct):
    """The tokens that the server counted; some count them in total only."""

    prompt_tokens: Count | None = None
    total_tokens: Count | None = None


class Whole(msgspec.Struct):
    """An answer, without its numbers."""

    data: list[msgspec.Raw] | None = None
    results: list[msgspec.Raw] | None = None
    usage: WholeUsage | None = None
    error: Any = None


class WholeReader:
    """Reads one answer; what it says of tokens is what a reader of events says of an answer without any."""

    num_tokens = num_reasoning = 0
    finish_reason = ""
    lacks_last = False
    has_tokens = False
    message: Message | None = None
    routing: EventRouting | None = None
    timing: Timing | None = None

    def __init__(self, api: Api) -> None:
        self._name = "data" if api == "embeddings" else "results"
        self._body = bytearray()
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
        body = bytes(self._body)
        try:
            found = _decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise AnswerError(f"the answer is malformed ({error}): {one_line(body, 200)}") from error
        if found.error is not None:
            raise AnswerError(f"error in the answer: {one_line(str(found.error))}")
        if not getattr(found, self._name):
            raise AnswerError(f"the answer has no {self._name}: {one_line(body, 200)}")
        if (said := found.usage) is not None:
            self.usage = EventUsage(said.prompt_tokens if said.prompt_tokens is not None else said.total_tokens)


_decoder = msgspec.json.Decoder(Whole)

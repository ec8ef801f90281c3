"""Sessions whose later turns repeat what the server answered, not what the workload says that a model did."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from workloads import Request
from workloads.tokens import as_words

Message = dict[str, Any]


class Conversations:
    """What was sent and answered so far, by request.

    turn 1   sent: A           answered: B
    turn 2   sent: A B C       C: what the workload adds behind its own answer; tools' results, too
    """

    def __init__(self, requests: Sequence[Request], tokens_of: Callable[[Request], np.ndarray]) -> None:
        """Prepare to follow the sessions of a workload.

        Args:
            requests: its requests.
            tokens_of: a prompt's tokens, if it has no text.
        """
        self._requests = requests
        self._tokens_of = tokens_of
        self._sent: dict[int, list[Message]] = {}
        self._answers: dict[int, str | None] = {}
        self.num_answers = 0
        """Answers of the server that later turns repeated."""
        self.num_planned = 0
        """Answers of the workload that they repeated, because there was no text to repeat or a tool's result follows."""

    def request(self, number: int) -> Request:
        """Return a request as it is sent now: as messages."""
        request = self._requests[number]
        messages = self._sent[number] = self._messages(request)
        return msgspec.structs.replace(request, content=messages)

    def on_answer(self, number: int, text: str | None) -> None:
        """Take note of a whole answer's text, None if it calls tools."""
        self._answers[number] = text

    def _messages(self, request: Request) -> list[Message]:
        before = self._before(request)
        content = request.content
        if isinstance(content, str):
            return [_user(content)]
        if content is None:
            return self._words(request, before)
        return content if before is None else self._continued(content, before)

    def _before(self, request: Request) -> int | None:
        """Return the number of the turn before a request."""
        return next((n for n in reversed(request.after) if n in self._sent and self._is_turn_of(n, request)), None)

    def _is_turn_of(self, number: int, request: Request) -> bool:
        return bool(request.session) and self._requests[number].session == request.session

    def _words(self, request: Request, before: int | None) -> list[Message]:
        """Return words for the tokens that a turn adds to those of the one before and its answer."""
        tokens = self._tokens_of(request)
        if before is None:
            return [_user(as_words(tokens))]
        earlier = self._requests[before]
        added = tokens[min(earlier.input_length + earlier.output_length, len(tokens) - 1) :]
        self.num_answers += 1
        answer = {"role": "assistant", "content": self._answers.get(before) or ""}
        return [*self._sent[before], answer, _user(as_words(added))]

    def _continued(self, content: list[Message], before: int) -> list[Message]:
        """Return a chat with what was sent and answered in place of its beginning, if it continues the turn before."""
        earlier = self._requests[before].content
        place = len(earlier) if isinstance(earlier, list) else 0
        if not place or content[:place] != earlier or content[place : place + 1] == []:
            return content
        planned, answer = content[place], self._answers.get(before)
        if planned.get("role") != "assistant":
            return content
        if planned.get("tool_calls") or not answer:
            self.num_planned += 1
            return [*self._sent[before], *content[place:]]
        self.num_answers += 1
        return [*self._sent[before], {"role": "assistant", "content": answer}, *content[place + 1 :]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}

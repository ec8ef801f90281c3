"""Sessions whose later turns repeat what the server answered, not what the workload says that a model did."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from dynabench.live.answer_message import Message, calls_of
from workloads import Request
from workloads.tokens import as_words


@dataclass(slots=True)
class Repeated:
    """Whose answers later turns repeated."""

    num_answers: int = 0
    """Answers of the server."""
    num_planned: int = 0
    """Answers of the workload, because that of the server could not stand there."""
    num_unmatched: int = 0
    """Those of them that call tools: the workload has results, and the server made another number of calls, such as none."""


class Conversations:
    """What was sent and answered so far, by request.

    turn 1   sent: A           answered: B
    turn 2   sent: A B C       C: what the workload adds behind its own answer; tools' results, with the ids of B's calls
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
        self._answers: dict[int, Message | None] = {}
        self.repeated = Repeated()

    def request(self, number: int) -> Request:
        """Return a request as it is sent now: as messages."""
        request = self._requests[number]
        messages = self._sent[number] = self._messages(request)
        return msgspec.structs.replace(request, content=messages)

    def on_answer(self, number: int, message: Message | None) -> None:
        """Take note of a whole answer, None if it cannot be repeated."""
        self._answers[number] = message

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
        self.repeated.num_answers += 1
        answer = self._answers.get(before) or {}
        said = {"role": "assistant", "content": answer.get("content") or ""}  # its calls would have no results
        return [*self._sent[before], said, _user(as_words(added))]

    def _continued(self, content: list[Message], before: int) -> list[Message]:
        """Return a chat with what was sent and answered in place of its beginning, if it continues the turn before."""
        earlier = self._requests[before].content
        place = len(earlier) if isinstance(earlier, list) else 0
        if not place or content[:place] != earlier or content[place : place + 1] == []:
            return content
        planned, answer, added = content[place], self._answers.get(before), content[place + 1 :]
        if planned.get("role") != "assistant":
            return content
        num_calls, num_planned = len(calls_of(answer or {})), len(calls_of(planned))
        if answer is None or num_calls != num_planned:
            self.repeated.num_planned += 1
            self.repeated.num_unmatched += num_planned > 0
            return [*self._sent[before], planned, *added]
        self.repeated.num_answers += 1
        return [*self._sent[before], answer, *_results_of(added, planned, answer)]


def _results_of(added: list[Message], planned: Message, answer: Message) -> list[Message]:
    """Return what follows an answer with the results of its calls: by the workload's ids, else in their order."""
    ids = [call["id"] for call in calls_of(answer)]
    places = {call.get("id"): place for place, call in enumerate(calls_of(planned))}
    results = list(itertools.takewhile(lambda message: message.get("role") == "tool", added))
    named = [
        {**result, "tool_call_id": ids[place]} if place < len(ids) else result
        for order, result in enumerate(results)
        for place in [places.get(result.get("tool_call_id"), order)]
    ]
    return [*named, *added[len(results) :]]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}

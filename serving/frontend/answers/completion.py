"""Answers in OpenAI's form for completions and chats: an event for each step of the engine, of one token or several."""

from dataclasses import dataclass
from typing import Any

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import ChoiceEvents, Collected
from serving.frontend.answers.splitting import AnswerParts
from serving.frontend.api.answer_format import CallIds
from serving.frontend.api.deltas import Deltas, as_one, message
from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import LogprobsFormat, TokenLogprob
from serving.frontend.api.sse import DONE, ChoiceFormat, CompletionFormat, error_event, escape, unescape, usage
from serving.frontend.generation.choice import Choice
from serving.frontend.shape import AnswerShape


class CompletionAnswer:
    """See `Answer`."""

    def __init__(self, accepted: AcceptedRequest) -> None:
        prepared = accepted.prepared
        self._accepted = accepted
        self._format = CompletionFormat(accepted.id, prepared.options.model, is_chat=prepared.is_chat)
        self._parts: list[AnswerParts] = []

    def events(self, index: int) -> ChoiceEvents:
        """See `Answer`."""
        shape = self._accepted.prepared.shape
        stream = _ChoiceStream(self._accepted, ChoiceFormat(self._format, index), index)
        return _TokenEvents(stream) if shape is None else _PartEvents(stream, self._split(shape))

    def end(self) -> bytes:
        """See `Answer`."""
        has_usage = self._accepted.stream_options.include_usage
        return (self._format.usage(self._usage()) if has_usage else b"") + DONE

    def whole(self, choices: list[Collected]) -> bytes:
        """See `Answer`."""
        values = [self._choice(index, collected) for index, collected in enumerate(choices)]
        return self._format.whole(values, self._usage(), **self._accepted.extras(self._accepted.choices[0]))

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return error_event(error)

    def _usage(self) -> dict[str, Any]:
        shape = self._accepted.prepared.shape
        has_reasoning = shape is not None and bool(shape.reasoning)
        return self._accepted.usage(sum(parts.num_reasoning for parts in self._parts) if has_reasoning else None)

    def _split(self, shape: AnswerShape) -> AnswerParts:
        self._parts.append(AnswerParts(shape))
        return self._parts[-1]

    def _choice(self, index: int, collected: Collected) -> dict[str, Any]:
        choice, shape = self._accepted.choices[index], self._accepted.prepared.shape
        logprobs = [*(choice.prompt_logprobs or ()), *collected.logprobs]
        value = LogprobsFormat(is_chat=self._format.is_chat).value(logprobs) if logprobs else None
        if shape is None:
            text = self._accepted.echo(index) + unescape(b"".join(collected.pieces))
            return self._format.choice(index, text, choice.finish_reason, value)
        split = self._split(shape)
        parts = [part for piece in collected.pieces for part in split.push(piece)] + split.end()
        return self._format.turn(
            index, message(parts, CallIds(f"call_{choice.fingerprint}")), split.reason(choice.finish_reason), value
        )


@dataclass(frozen=True, slots=True)
class _ChoiceStream:
    """What the events of a choice are written from, whatever they contain."""

    accepted: AcceptedRequest
    format: ChoiceFormat
    index: int

    @property
    def choice(self) -> Choice:
        """The choice."""
        return self.accepted.choices[self.index]

    @property
    def has_usage(self) -> bool:
        """Whether each event has the usage so far."""
        options = self.accepted.stream_options
        return bool(options.include_usage and options.continuous_usage_stats)

    @property
    def is_counted(self) -> bool:
        """Whether events say how many tokens they have, if several."""
        return "num_tokens" in (self.accepted.prepared.extension.extra_fields or ())

    def usage(self, num_output: int) -> dict[str, Any] | None:
        """Return the usage after so many tokens, if each event has it."""
        return usage(self.choice.num_prompt, num_output, self.choice.num_cached) if self.has_usage else None

    def extras(self, start: int, end: int) -> dict[str, dict[str, Any] | None]:
        """Return what the event of the last tokens from a place to another has besides them."""
        count, usage = end - start, self.usage(self.choice.num_before + end)
        return {"usage": usage, "nvext": {"num_tokens": count} if count > 1 and self.is_counted else None}

    def first(self) -> bytes:
        """Return what comes before the first token: a chat's role."""
        return self.format.first(self.usage(0))

    def last(self, reason: str, logprobs: dict[str, Any] | None = None) -> bytes:
        """Return the event with the finish reason."""
        extras = self.accepted.extras(self.choice)
        return self.format.last(reason, logprobs, usage=self.usage(self.choice.num_completion), **extras)


class _TokenEvents:
    """The events of a choice that is one text, with what was requested besides it."""

    def __init__(self, stream: _ChoiceStream) -> None:
        prepared = stream.accepted.prepared
        self._stream = stream
        self._choice = stream.choice
        self._echo = stream.accepted.echo(stream.index)
        self._logprobs = LogprobsFormat(is_chat=prepared.is_chat)
        self._is_counted = stream.is_counted
        self._is_plain = not stream.has_usage and prepared.num_logprobs is None

    def first(self) -> bytes:
        """See `ChoiceEvents`."""
        return self._stream.first()

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return an event for each step, after the prompt if it is to be echoed."""
        body, stream, choice = self._prompt() if self._echo else b"", self._stream, self._choice
        if not pieces:
            return body
        if self._is_plain and not choice.steps:
            return body + stream.format.tokens(pieces)
        events = choice.events(len(pieces))
        if self._is_plain and not self._is_counted:
            return body + stream.format.tokens([b"".join(pieces[start:end]) for start, end in events])
        for start, end in events:
            scored = choice.logprobs[start:end]
            logprobs = self._logprobs.value(scored) if scored else None
            body += stream.format.token(b"".join(pieces[start:end]), logprobs, **stream.extras(start, end))
        return body

    def last(self) -> bytes:
        """See `ChoiceEvents`."""
        return self._stream.last(self._choice.finish_reason)

    def _prompt(self) -> bytes:
        """Return the event that echoes the prompt, before the first pieces."""
        text, self._echo = escape(self._echo), ""
        logprobs = self._choice.prompt_logprobs
        value = self._logprobs.value(logprobs) if logprobs else None
        return self._stream.format.token(text, value, usage=self._stream.usage(self._choice.num_before))


class _PartEvents:
    """The events of a choice whose text is split; log-probabilities come with the next event after their token."""

    def __init__(self, stream: _ChoiceStream, parts: AnswerParts) -> None:
        self._stream = stream
        self._choice = stream.choice
        self._parts = parts
        self._deltas = Deltas(CallIds(f"call_{stream.choice.fingerprint}"))
        self._logprobs = LogprobsFormat(is_chat=True)
        self._waiting: list[TokenLogprob] = []

    def first(self) -> bytes:
        """See `ChoiceEvents`."""
        return self._stream.first()

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return an event for each part that a token settles, and one for all that the tokens of a step settle."""
        choice, body = self._choice, b""
        for start, end in choice.events(len(pieces)):
            self._waiting += choice.logprobs[start:end]
            deltas = list(self._deltas.of([part for piece in pieces[start:end] for part in self._parts.push(piece)]))
            for delta in as_one(deltas) if end - start > 1 else deltas:
                body += self._event(delta, choice.num_before + end)
        return body

    def last(self) -> bytes:
        """Return the rest, and the event with the finish reason."""
        count = self._choice.num_completion
        body = b"".join(self._event(delta, count) for delta in self._deltas.of(self._parts.end()))
        return body + self._stream.last(self._parts.reason(self._choice.finish_reason), self._take_logprobs())

    def _event(self, delta: dict[str, Any], num_output: int) -> bytes:
        return self._stream.format.delta(delta, self._take_logprobs(), self._stream.usage(num_output))

    def _take_logprobs(self) -> dict[str, Any] | None:
        waiting, self._waiting = self._waiting, []
        return self._logprobs.value(waiting) if waiting else None

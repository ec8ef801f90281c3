"""Answers of APIs that have one choice, part by part: see `AnswerFormat`."""

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import ChoiceEvents, Collected
from serving.frontend.answers.splitting import AnswerParts
from serving.frontend.api.answer_format import AnswerFormat, Usage, joined
from serving.frontend.api.errors import ApiError
from serving.frontend.api.sse import unescape
from serving.model.parts import Content, Part


class FormattedAnswer:
    """See `Answer`; it is also the only choice's `ChoiceEvents`."""

    def __init__(self, accepted: AcceptedRequest, format: AnswerFormat) -> None:
        """Prepare to answer."""
        shape = accepted.prepared.shape
        self._choice = accepted.choices[0]
        self._split = None if shape is None else AnswerParts(shape)
        self._format = format

    def events(self, index: int) -> ChoiceEvents:
        """See `Answer`."""
        return self

    def end(self) -> bytes:
        """See `Answer`."""
        return b""

    def whole(self, choices: list[Collected]) -> bytes:
        """See `Answer`."""
        parts = self._parts(choices[0].pieces) + self._rest()
        return self._format.whole(parts, self._reason, self._usage(), stop=self._choice.stop)

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return self._format.failed(error)

    def first(self) -> bytes:
        """See `ChoiceEvents`."""
        return self._format.first(self._usage()._replace(num_completion=0))

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return the events of the parts that the pieces settle; tokens of a step that add to one part share its event."""
        events = self._choice.events(len(pieces))
        return b"".join(self._format.parts(joined(self._parts(pieces[start:end]))) for start, end in events)

    def last(self) -> bytes:
        """See `ChoiceEvents`."""
        events = self._format.parts(self._rest())
        return events + self._format.last(self._reason, self._usage(), stop=self._choice.stop)

    def _parts(self, pieces: list[bytes]) -> list[Part]:
        if self._split is None:
            return [Content(unescape(piece)) for piece in pieces]
        return [part for piece in pieces for part in self._split.push(piece)]

    def _rest(self) -> list[Part]:
        return [] if self._split is None else self._split.end()

    @property
    def _reason(self) -> str:
        reason = self._choice.finish_reason
        return reason if self._split is None else self._split.reason(reason)

    def _usage(self) -> Usage:
        choice, num_reasoning = self._choice, 0 if self._split is None else self._split.num_reasoning
        return Usage(choice.num_prompt, choice.num_completion, choice.num_cached, num_reasoning)

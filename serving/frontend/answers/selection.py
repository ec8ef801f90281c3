"""Which API's form an answer has."""

import msgspec

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import Answer
from serving.frontend.answers.completion import CompletionAnswer
from serving.frontend.answers.formatted import FormattedAnswer
from serving.frontend.api.messages.format import MessagesFormat
from serving.frontend.api.responses.format import ResponsesFormat
from serving.frontend.kept_responses import ResponseTurn
from serving.runtime.world import world


def answer_of(accepted: AcceptedRequest, turn: ResponseTurn | None) -> Answer:
    """Return what writes an accepted request's answer; a response is kept for the turns after it, if that is wanted."""
    prepared = accepted.prepared
    if prepared.kind not in ("message", "response"):
        return CompletionAnswer(accepted)
    seed, fingerprint = world().token_hex(16), accepted.choices[0].fingerprint
    if prepared.kind == "message":
        return FormattedAnswer(accepted, MessagesFormat(prepared.options.model, seed=seed, fingerprint=fingerprint))
    assert prepared.response is not None and turn is not None
    options = msgspec.structs.replace(prepared.response, echo=prepared.response.echo | {"store": turn.is_kept})
    keep = turn.keep if turn.is_kept else None
    format = ResponsesFormat(options, seed=seed, fingerprint=fingerprint, created_at=int(world().wall_s()), keep=keep)
    return FormattedAnswer(accepted, format)

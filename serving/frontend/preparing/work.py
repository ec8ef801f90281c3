"""What a preparer does: it loads a model, and prepares requests to it."""

import logging

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import OpenAiRequest
from serving.frontend.prepared import Prepared
from serving.frontend.preparing.messages import Body, Elsewhere, Outcome, PreparerModel, PreparingJob, Refusal
from serving.frontend.preprocess import preprocess
from serving.frontend.text_model import TextModel
from serving.model.errors import ModelError
from serving.model.files import ModelFiles

log = logging.getLogger(__name__)

FAILED = Refusal(500, "the frontend failed on this request; its log says why")


def load(message: PreparerModel) -> TextModel:
    """Load the model; its template may run here.

    Raises:
        ModelError: its tokenizer or template cannot be used.
    """
    try:
        return TextModel(
            message.card,
            ModelFiles(message.files),
            is_preparer=True,
            is_strict=message.is_strict,
            reading=None if message.reading is None else message.reading.make(),
        )
    except ModelError:
        raise
    except Exception as error:  # a template is compiled here, and may use all memory
        raise ModelError(f"its tokenizer or chat template cannot be loaded: {type(error).__name__}") from error


def outcome_of(job: PreparingJob, body: Body, model: TextModel) -> Outcome:
    """Prepare a request, or say why it cannot be."""
    try:
        request = model.reading.parse(body, job.kind)
        if request.model not in (model.card.name, job.name or model.card.name) and not (
            request.model is None and job.is_only
        ):
            return Elsewhere(request.model)
        outcome = preprocess(request, body, model)
    except ApiError as error:
        return Refusal(error.status, error.message, error.code, error.param)
    except MemoryError:
        return Refusal(413, "the request is too large to be prepared")
    except BaseException:  # tokenizers panic with a type that is not an `Exception`
        log.exception("a request could not be prepared")
        return FAILED
    if isinstance(outcome, Prepared):  # leave out what is now tokens, or has no effect and may be large
        options = msgspec.convert(outcome.options, OpenAiRequest, from_attributes=True)
        outcome.options = msgspec.structs.replace(options, metadata=None, prediction=None)
    return outcome

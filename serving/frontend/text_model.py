"""The text side of a model: its tokenizer and template, and texts and token ids that fit it."""

from array import array
from collections.abc import Sequence

import numpy as np

from serving.frontend.api.errors import ApiError
from serving.frontend.reading import OwnReading, Reading
from serving.model.card import ModelCard
from serving.model.files import ModelFiles
from serving.model.template import PLAIN, ChatTemplate, source
from serving.model.tokenizer import Ids, load_tokenizer


class TextModel:
    """Turns requests for a model into token ids."""

    def __init__(
        self,
        card: ModelCard,
        files: ModelFiles,
        *,
        is_preparer: bool = False,
        is_strict: bool = False,
        reading: Reading | None = None,
    ) -> None:
        """Load the tokenizer and the template.

        Args:
            card: the card that the model's workers registered.
            files: the model's files.
            is_preparer: whether the model's own template may run in this process.
            is_strict: whether unknown fields are refused even if their value asks for nothing.
            reading: how its requests are read (none: as ours).

        Raises:
            ModelError: one of them cannot be used.
        """
        self.card = card
        self.files = files
        self.is_strict = is_strict
        self.reading = reading or OwnReading(is_strict=is_strict)
        self.tokenizer = load_tokenizer(files, encodes=True)
        self.template = ChatTemplate(files) if is_preparer or source(files) == PLAIN else None
        self.vocab_size = files.vocab_size
        """How many tokens the model has, if its files say so: other tokens may crash engines."""


def given(tokens: list[int], model: TextModel, param: str) -> Ids:
    """Return tokens that came as such, if the model has them."""
    found = np.frombuffer(array("I", tokens), np.uint32)  # three times as fast as np.array
    check_tokens(found, model, param)
    return found


def encode_text(text: str, model: TextModel, param: str, *, special: bool) -> Ids:
    """Return a text's tokens, unless it is too long to fit: a text of megabytes need not be encoded to know that."""
    longest, context = model.tokenizer.longest_token, model.card.context_length
    if longest is not None and len(text) > longest * context:
        raise ApiError(
            400,
            f"this model's maximum context length is {context} tokens, of at most {longest} characters each; "
            f"the prompt has {len(text)} characters",
            code="context_length_exceeded",
            param=param,
        )
    return model.tokenizer.encode(text, special=special)


def check_tokens(tokens: Sequence[int] | Ids, model: TextModel, param: str) -> None:
    """Reject tokens that the model does not have: an engine may fail on them for everyone."""
    size = model.vocab_size
    if size is not None and (largest := np.max(tokens, initial=0)) >= size:
        raise ApiError(400, f"there is no token {largest}; the model has {size} tokens", param=param)

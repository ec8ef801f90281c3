"""Which tokens a mocker's answer may have, and what ends it because it repeats itself: `sampling_options` of vLLM's kind."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.model.tokenizer import Tokenizer

Tokens = npt.NDArray[np.uint32]


def allowed_words(options: dict[str, Any], vocabulary: Tokens) -> Tokens:
    """Return the vocabulary of an answer."""
    allowed = options.get("allowed_token_ids")
    return vocabulary if allowed is None else np.array(sorted(set(allowed)), np.uint32)


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token sequences that spell these words, at the start of a text and within one."""
    spelled = [f"{space}{word.lstrip()}" for word in words for space in ("", " ")]
    return [tuple(tokenizer.encode(text, special=False).tolist()) for text in spelled if text.strip()]


def without(output: list[int], banned: list[tuple[int, ...]], vocabulary: Tokens) -> list[int]:
    """Return an answer in which no banned sequence is complete: instead of its last token comes another word.

    Raises:
        ValueError: there is no other.
    """
    words = np.unique(vocabulary).tolist()
    kept: list[int] = []
    for token in output:
        place = words.index(token) if token in words else 0
        choices = [token, *words[place + 1 :], *words[:place]]
        allowed = (each for each in choices if not any(_completes(kept, each, sequence) for sequence in banned))
        chosen = next(allowed, None)
        if chosen is None:
            raise ValueError("bad_words leave no token that the answer may have")
        kept.append(chosen)
    return kept


def repetition_place(output: list[int], pattern: Sequence[int]) -> int | None:
    """Return the position, from 1, at which an answer has repeated a pattern; None if it does not.

    Args:
        output: the answer.
        pattern: its shortest and longest length, and how often it must come in a row.
    """
    shortest, longest, count = max(pattern[0], 1), pattern[1], pattern[2]
    if longest < 1 or count < 2:
        return None
    found = [place for size in range(shortest, longest + 1) if (place := _repeated(output, size, count)) is not None]
    return min(found, default=None)


def _repeated(output: list[int], size: int, count: int) -> int | None:
    """Return where a pattern of this size has come so often in a row."""
    run = 0
    for place in range(size, len(output)):
        run = run + 1 if output[place] == output[place - size] else 0
        if run == size * (count - 1):
            return place + 1
    return None


def _completes(before: list[int], token: int, sequence: tuple[int, ...]) -> bool:
    size = len(sequence) - 1
    return sequence[-1] == token and (size == 0 or tuple(before[-size:]) == sequence[:-1])

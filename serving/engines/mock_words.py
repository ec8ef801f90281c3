"""Which tokens a mocker's answer may have, and what ends it because it repeats itself: `sampling_options` of vLLM's kind."""

from bisect import bisect
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


def without(output: list[int], banned: list[tuple[int, ...]], words: Sequence[int]) -> list[int]:
    """Return an answer in which no banned sequence is complete: instead of its last token comes the next word.

    Args:
        output: the answer.
        banned: what it may not have.
        words: the words that it may have, in order.

    Raises:
        ValueError: there is no other.
    """
    suspects = {sequence[-1] for sequence in banned}
    kept: list[int] = []
    for token in output:
        kept.append(_allowed(token, kept, banned, words) if token in suspects else token)
    return kept


def _allowed(token: int, before: list[int], banned: list[tuple[int, ...]], words: Sequence[int]) -> int:
    """Return a token, or if it would complete a banned sequence, the next word after it that does not."""
    ends = {sequence[-1] for sequence in banned if _comes_next(before, sequence)}
    return _other(token, ends, words) if token in ends else token


def _comes_next(before: list[int], sequence: tuple[int, ...]) -> bool:
    """Return whether only the last token of a sequence is missing."""
    size = len(sequence) - 1
    return size == 0 or tuple(before[-size:]) == sequence[:-1]


def _other(token: int, ends: set[int], words: Sequence[int]) -> int:
    """Return the first word after a token, and around, that is not one of these."""
    place = bisect(words, token)
    # Whatever the size of the vocabulary, one of so many words is allowed if any is.
    for step in range(min(len(words), len(ends) + 1)):
        word = words[(place + step) % len(words)]
        if word not in ends:
            return word
    raise ValueError("bad_words leave no token that the answer may have")


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

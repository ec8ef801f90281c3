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
    ends_after = _ends_after(banned)
    kept: list[int] = []
    for token in output:
        kept.append(_allowed(token, kept, ends_after, words) if token in suspects else token)
    return kept


_EndsAfter = dict[int, dict[tuple[int, ...], set[int]]]
"""The last tokens of banned sequences, by what comes before them and its length."""


def _ends_after(banned: list[tuple[int, ...]]) -> _EndsAfter:
    found: _EndsAfter = {}
    for sequence in banned:
        found.setdefault(len(sequence) - 1, {}).setdefault(sequence[:-1], set()).add(sequence[-1])
    return found


def _allowed(token: int, before: list[int], ends_after: _EndsAfter, words: Sequence[int]) -> int:
    """Return a token, or if it would complete a banned sequence, the next word after it that does not."""
    starts = ((tuple(before[len(before) - size :]), found) for size, found in ends_after.items() if size <= len(before))
    ends = [found[start] for start, found in starts if start in found]
    return _other(token, ends, words) if any(token in each for each in ends) else token


def _other(token: int, ends: list[set[int]], words: Sequence[int]) -> int:
    """Return the first word after a token, and around, that is in none of these."""
    place = bisect(words, token)
    # Whatever the size of the vocabulary, one of so many words is allowed if any is.
    for step in range(min(len(words), sum(map(len, ends)) + 1)):
        word = words[(place + step) % len(words)]
        if not any(word in each for each in ends):
            return word
    raise ValueError("bad_words leave no token that the answer may have")


def repetition_place(output: Sequence[int], pattern: Sequence[int]) -> int | None:
    """Return the position, from 1, at which an answer has repeated a pattern; None if it does not.

    Args:
        output: the answer.
        pattern: its shortest and longest length, and how often it must come in a row.
    """
    shortest, longest, count = max(pattern[0], 1), pattern[1], pattern[2]
    if longest < 1 or count < 2:
        return None
    tokens, place = np.array(output, np.uint32), None
    for size in range(shortest, longest + 1):
        if size * count > len(tokens):
            break
        if (found := _repeated(tokens, size, count)) is not None:
            tokens, place = tokens[: found - 1], found  # only an earlier place is of interest now
    return place


def _repeated(tokens: Tokens, size: int, count: int) -> int | None:
    """Return where a pattern of this size has come so often in a row.

        tokens   . . . . A B A B A B .      size 2, count 3: four tokens in a row equal those two further on
        probes         ^       ^            one of every four: each such run has one

    So of all sizes together only about `n log n` tokens are compared, and more only around equal ones.
    """
    run = size * (count - 1)
    ahead, here = tokens[size:], tokens[: len(tokens) - size]
    for probe in np.flatnonzero(here[run - 1 :: run] == ahead[run - 1 :: run]).tolist():
        place = run - 1 + probe * run
        start = _run_start(here[place + 1 - run : place], ahead[place + 1 - run : place]) + place + 1 - run
        end = start + run
        if end <= len(here) and np.array_equal(here[place:end], ahead[place:end]):
            return end + size
    return None


def _run_start(here: Tokens, ahead: Tokens) -> int:
    """Return from where on all tokens are equal up to the end."""
    differing = np.flatnonzero(here != ahead)
    return int(differing[-1]) + 1 if len(differing) else 0

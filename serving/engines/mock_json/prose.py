"""Free text inside a value: words of the model's vocabulary, whose number is settled last."""

import math
from random import Random

import numpy as np
import numpy.typing as npt


class Words:
    """Tokens that read as words, with their texts inside an answer; only letters and spaces."""

    def __init__(self, ids: npt.NDArray[np.uint32], texts: list[str]) -> None:
        self.ids: list[int] = ids.tolist()
        self.texts = texts
        self.by_id = dict(zip(self.ids, texts, strict=True))
        self._firsts = [place for place, text in enumerate(texts) if text.strip()]

        self.longest = max(map(len, texts), default=1)

    def length(self, ids: list[int]) -> int:
        """Return how many characters some tokens have."""
        return sum(map(len, map(self.by_id.__getitem__, ids)))

    def first(self, rng: Random) -> int:
        """Return a token that is not only a space."""
        return self.ids[self._firsts[int(rng.random() * len(self._firsts))]]

    def fitting(self, rng: Random, room: float) -> int | None:
        """Return a token of at most so many characters, None if a few draws find none."""
        for _ in range(8):
            place = int(rng.random() * len(self.ids))
            if len(self.texts[place]) <= room:
                return self.ids[place]
        return None


class Prose:
    """A free text of `low` to `high` characters."""

    __slots__ = ("high", "ids", "low", "num_chars", "words")

    def __init__(self, words: Words, ids: list[int], low: int, high: float) -> None:
        self.words = words
        self.ids = ids
        self.low = low
        self.high = high
        self.num_chars = words.length(ids)

    @property
    def text(self) -> str:
        """The text."""
        by_id = self.words.by_id
        return "".join([by_id[token] for token in self.ids])

    def grow(self, rng: Random, count: int) -> int:
        """Add up to `count` tokens; return how many were added."""
        if self.high == math.inf:
            self.ids = self.ids + rng.choices(self.words.ids, k=count)
            return count
        added = 0
        while added < count:
            token = self.words.fitting(rng, self.high - self.num_chars)
            if token is None:
                break
            self.ids.append(token)
            self.num_chars += len(self.words.by_id[token])
            added += 1
        return added


def prose_of(words: Words, rng: Random, low: int, high: float, count: int, enough: float) -> Prose | str:
    """Return a text of about `count` tokens, or a finished one if its length leaves no choice.

    After `enough` tokens it ends, however long it must be: nobody reads on.
    """
    ids: list[int] = []
    num_chars = 0
    # Most of a long text is drawn in a few goes.
    while (block := int(min((low - num_chars) // words.longest, enough - len(ids)))) > 8:
        more = [words.first(rng), *rng.choices(words.ids, k=block - 1)]
        ids += more
        num_chars += words.length(more)
    while (num_chars < low or len(ids) < count) and len(ids) < enough:
        token = words.fitting(rng, high - num_chars) if ids else words.first(rng)
        if token is None or num_chars + len(words.by_id[token]) > high:
            break
        ids.append(token)
        num_chars += len(words.by_id[token])
    if ids and (num_chars >= low or len(ids) >= enough):
        return Prose(words, ids, low, high)
    # No word is as short as what is missing.
    missing = max(low - num_chars, 0 if ids else min(high, 1))
    return "".join(words.by_id[token] for token in ids) + "a" * int(missing)

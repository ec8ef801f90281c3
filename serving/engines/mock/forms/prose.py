"""Free text inside a value: words of the model's vocabulary, whose number is settled last."""

import math
from random import Random

import numpy as np
import numpy.typing as npt


class Words:
    """Tokens that read as words, with their texts inside an answer; only letters and spaces."""

    def __init__(self, ids: npt.NDArray[np.uint32], texts: list[str], starts: dict[int, str]) -> None:
        """Sort them.

        Args:
            ids: the tokens.
            texts: what they read as.
            starts: others with which a text may start, and what they read as.
        """
        self.ids: list[int] = ids.tolist()
        self.texts = texts
        self.by_id: dict[int, str] = dict(zip(self.ids, texts, strict=True))
        self.by_id |= starts
        words = {token: text for token, text in self.by_id.items() if text.strip()}
        self._firsts = [token for token, text in words.items() if text == text.strip()] or list(words)
        self._opening = {token for token, text in self.by_id.items() if text[:1] == " "}
        self._closing = {token for token, text in self.by_id.items() if text[-1:] == " "}
        self._blank = next((token for token, text in self.by_id.items() if text == " "), None)
        self.longest = max(map(len, texts), default=1)

    def length(self, ids: list[int]) -> int:
        """Return how many characters some tokens have."""
        return sum(map(len, map(self.by_id.__getitem__, ids)))

    def first(self, rng: Random) -> int:
        """Return a token that is not only a space."""
        return int(self._firsts[int(rng.random() * len(self._firsts))])

    def short(self, rng: Random, num_words: int) -> list[int]:
        """Return a few words; where tokens are letters, each has some."""
        if self.longest > 1 or self._blank is None:
            return self.tidied([self.first(rng), *rng.choices(self.ids, k=num_words - 1)])
        words = [[self.first(rng) for _ in range(3 + int(rng.random() * 6))] for _ in range(num_words)]
        return [token for place, word in enumerate(words) for token in ([self._blank] * bool(place) + word)]

    def tidied(self, ids: list[int], before: list[int] | None = None, *, is_cut: bool = False) -> list[int]:
        """Return as many tokens without two blanks in a row, nor one at either end; no letter is drawn for that.

        Args:
            ids: the tokens.
            before: what is before them.
            is_cut: whether more may follow.
        """
        opening, closing = self._opening, self._closing
        was_blank = not before or before[-1] in self._closing
        tidy = list(ids)
        for place, token in enumerate(ids):  # without calls: texts may be very long
            if was_blank and token in opening:
                tidy[place] = self._instead(token, place)
            was_blank = tidy[place] in closing
        if was_blank and tidy and not is_cut:
            tidy[-1] = self._instead(tidy[-1], len(tidy))
        return tidy

    def _instead(self, token: int, place: int) -> int:
        """Return a token without blanks that is no longer, or the same if there is none nearby."""
        most = len(self.by_id[token])
        for step in range(64):
            other = self._firsts[(token + 7 * place + step) % len(self._firsts)]
            if len(self.by_id[other]) <= most:
                return int(other)
        return token

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
            more = rng.choices(self.words.ids, k=count)
            self.ids = self.ids + self.words.tidied(more, self.ids)
            return count
        added = 0
        while added < count:
            token = self.words.fitting(rng, self.high - self.num_chars)
            if token is None:
                break
            self.ids.append(token)
            self.num_chars += len(self.words.by_id[token])
            added += 1
        if added:
            self.ids[-added:] = self.words.tidied(self.ids[-added:], self.ids[:-added])
            self.num_chars = self.words.length(self.ids)
        return added


def prose_of(
    words: Words, rng: Random, low: int, high: float, num_words: int, spare: float, enough: float
) -> Prose | str:
    """Return a text of a few words, or a finished one if its length leaves no choice.

    After `enough` tokens it ends, however long it must be: nobody reads on.
    """
    ids: list[int] = []
    num_chars = 0
    # Most of a long text is drawn in a few goes.
    while (block := int(min((low - num_chars) // words.longest, enough - len(ids)))) > 8:
        more = [words.first(rng), *rng.choices(words.ids, k=block - 1)]
        more = words.tidied(more, ids, is_cut=True)
        ids += more
        num_chars += words.length(more)
    first = words.short(rng, num_words) if spare >= 1 else [words.first(rng)]
    room = min(high, max(low, 4) + spare)
    for word in first if not ids else ():
        if num_chars + len(words.by_id[word]) > room or len(ids) >= enough:
            break
        ids.append(word)
        num_chars += len(words.by_id[word])
    while (num_chars < low or not ids) and len(ids) < enough:
        token = words.fitting(rng, high - num_chars) if ids else words.first(rng)
        if token is None or num_chars + len(words.by_id[token]) > high:
            break
        ids.append(token)
        num_chars += len(words.by_id[token])
    ids = words.tidied(ids, is_cut=len(ids) >= enough)
    num_chars = words.length(ids)
    if ids and (num_chars >= low or len(ids) >= enough):
        return Prose(words, ids, low, high)
    # No word is as short as what is missing.
    missing = max(low - num_chars, 0 if ids else min(high, 1))
    return "".join(words.by_id[token] for token in ids) + "a" * int(missing)

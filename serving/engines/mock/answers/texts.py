"""What the mocker's answers say where they are free: random words, the prompt again, or what a file has.

Whatever it is, token `i` of an answer is a pure function of (prompt, seed, i), with the same file everywhere.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from serving.engines.mock.answers.made_up import answer_tokens
from serving.model.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint32]

MASK = 0xFFFF_FFFF_FFFF_FFFF
PAIRS = ".jsonl"


class SaidTokens(NamedTuple):
    """What is said to a prompt."""

    tokens: Callable[[int, int], list[int]]
    """Returns so many tokens from one on; there is no end."""
    length: int | None = None
    """After how many tokens all is said; None if it can end anywhere."""


class TextSource(Protocol):
    """Says something to every prompt."""

    is_quick: bool
    """Whether an event loop can wait for it."""

    def say(self, prompt: Ids, seed: int) -> SaidTokens:
        """Return what is said to a prompt."""
        ...


class RandomWords:
    """Words that mean nothing."""

    is_quick = True

    def __init__(self, vocabulary: Ids) -> None:
        self._vocabulary = vocabulary

    def say(self, prompt: Ids, seed: int) -> SaidTokens:
        """See `TextSource`."""
        return SaidTokens(partial(answer_tokens, prompt, seed, vocabulary=self._vocabulary))


class EchoedPrompt:
    """The prompt's own tokens, the template's included; then again."""

    is_quick = True

    def say(self, prompt: Ids, seed: int) -> SaidTokens:
        """See `TextSource`."""
        return SaidTokens(partial(_around, prompt), len(prompt))


class FileLines:
    """The lines of a file one after the other, from one that the prompt and the seed choose."""

    is_quick = True

    def __init__(self, lines: list[Ids]) -> None:
        self._text = np.concatenate(lines)
        self._starts = np.cumsum([0, *map(len, lines[:-1])]).tolist()

    def say(self, prompt: Ids, seed: int) -> SaidTokens:
        """See `TextSource`."""
        first = self._starts[xxh3_64_intdigest(prompt.tobytes(), (seed + 4) & MASK) % len(self._starts)]
        return SaidTokens(lambda start, count: _around(self._text, first + start, count))


class RecordedAnswers:
    """The answers that a file has for its prompts; to other prompts, the answer to one of those."""

    is_quick = False  # a prompt becomes text again

    def __init__(self, pairs: list[tuple[str, Ids]], tokenizer: Tokenizer) -> None:
        self._pairs = pairs
        self._exact = {prompt: place for place, (prompt, _) in enumerate(pairs)}
        self._tokenizer = tokenizer

    def say(self, prompt: Ids, seed: int) -> SaidTokens:
        """See `TextSource`."""
        answer = self._answer(prompt, seed)
        return SaidTokens(partial(_around, answer), len(answer))

    def _answer(self, prompt: Ids, seed: int) -> Ids:
        """Return the answer to the whole prompt; else to what comes last in it (the longest if two end there)."""
        text = self._tokenizer.decode(prompt.tolist())
        place = self._exact.get(text)
        if place is None:
            ends = [(at + len(asked), len(asked), -number) for number, (asked, _) in enumerate(self._pairs)
                    if (at := text.rfind(asked)) >= 0]  # fmt: skip
            drawn = xxh3_64_intdigest(prompt.tobytes(), (seed + 4) & MASK) % len(self._pairs)
            place = -max(ends)[2] if ends else drawn
        return self._pairs[place][1]


def source_of(answers: str, tokenizer: Tokenizer, vocabulary: Ids) -> TextSource:
    """Return what answers say.

    Raises:
        ValueError: the file cannot be used.
    """
    match answers:
        case "random":
            return RandomWords(vocabulary)
        case "echo":
            return EchoedPrompt()
    try:
        text = Path(answers).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"answers is {answers}; expected random, echo or a file that can be read: {why}") from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"answers is {answers}, which is empty; expected at least one line")
    if answers.endswith(PAIRS):
        return RecordedAnswers([_pair(answers, number, line, tokenizer) for number, line in lines], tokenizer)
    return FileLines([tokenizer.encode(f"{line} ", special=False) for _, line in lines])


class _Pair(NamedTuple):
    prompt: str
    answer: str


def _pair(path: str, number: int, line: str, tokenizer: Tokenizer) -> tuple[str, Ids]:
    try:
        found: Any = msgspec.json.decode(line)
        pair = _Pair(found["prompt"], found["answer"])
    except (msgspec.DecodeError, KeyError, TypeError):
        pair = _Pair("", "")
    if not all(isinstance(part, str) and part for part in pair):
        raise ValueError(f'{path}:{number}: expected {{"prompt": TEXT, "answer": TEXT}}, neither of them empty')
    return pair.prompt, tokenizer.encode(pair.answer, special=False)


def _around(whole: Ids, start: int, count: int) -> list[int]:
    """Return tokens `start` to `start + count` of a text that comes again and again."""
    if not len(whole):
        raise ValueError("the prompt is empty, and its echo would be, too; expected at least one token")
    found: list[int] = np.take(whole, np.arange(start, start + count), mode="wrap").tolist()
    return found

"""The mocker's made-up answers and log-probabilities.

Token `i` of an answer is a pure function of (prompt, seed, i), so that an answer can be checked token by token even after
it moved from one worker to another.
"""

from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from serving.worker.protocol import PreprocessedRequest


def answer_tokens(
    prompt: npt.NDArray[np.uint32], seed: int, start: int, count: int, vocabulary: npt.NDArray[np.uint32]
) -> list[int]:
    """Return tokens `start` to `start + count` of the mocker's answer to a prompt; a pure function."""
    base = np.uint64(xxh3_64_intdigest(prompt.tobytes(), seed & 0xFFFF_FFFF_FFFF_FFFF))
    with np.errstate(over="ignore"):  # splitmix64
        x = base + np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    places = (x ^ (x >> np.uint64(31))) % np.uint64(len(vocabulary))
    tokens: list[int] = vocabulary[places].tolist()
    return tokens


def answer_length(prompt: npt.NDArray[np.uint32], seed: int) -> int:
    """Return the length of the mocker's answer if the request does not limit it: 16 to 271 tokens."""
    return 16 + xxh3_64_intdigest(prompt.tobytes(), (seed + 1) & 0xFFFF_FFFF_FFFF_FFFF) % 256


def drawn_length(prompt: npt.NDArray[np.uint32], seed: int, mean: float, deviation: float) -> int:
    """Return a length from a normal distribution, at least 1, that depends on prompt and seed alone."""
    number = xxh3_64_intdigest(prompt.tobytes(), (seed + 1) & 0xFFFF_FFFF_FFFF_FFFF) / 2.0**64
    drawn = NormalDist(mean, deviation).inv_cdf(max(number, 2.0**-64)) if deviation else mean
    return max(round(drawn), 1)


def eos_place(request: PreprocessedRequest, length: int, *, is_all: bool) -> int | None:
    """Return the position of EOS in the answer, from 1, if the request asks for EOS or sets no limit, or all is said.

    Args:
        request: the request.
        length: how long the answer is if nobody asks for another length, what was generated elsewhere included.
        is_all: whether there is nothing more to say after that.
    """
    conditions = request.stop_conditions
    if conditions.ignore_eos:
        return None
    if conditions.stop_after is not None:
        return max(conditions.stop_after, conditions.min_tokens)
    if conditions.is_default_limit or is_all:
        return max(length - request.num_generated, conditions.min_tokens, 1)
    return None


def stop_place(request: PreprocessedRequest, output: list[int]) -> int | None:
    """Return the position, from 1, of the first stop token in the answer that is not within `min_tokens`."""
    conditions = request.stop_conditions
    stops = {*conditions.stop_token_ids, *(() if conditions.ignore_eos else request.eos_token_ids)}
    if stops.isdisjoint(output):
        return None
    places = (place for place, token in enumerate(output, 1) if token in stops and place > conditions.min_tokens)
    return next(places, None)


def log_probability(token: int) -> float:
    """Return the mocker's log-probability of a token, -0.6 to -4.6: a function of the token alone."""
    return -0.6 - (token * 2_654_435_761 >> 8) % 4001 / 1000


class LogProbabilities:
    """Made-up log-probabilities, in the form in which engines return real ones."""

    def __init__(self, words: list[int], sampling: dict[str, Any]) -> None:
        self._words = words
        self.num_output: int | None = sampling.get("logprobs")
        self.num_prompt: int | None = sampling.get("prompt_logprobs")

    @classmethod
    def wanted(cls, words: list[int], sampling: dict[str, Any]) -> "LogProbabilities | None":
        """Return what a request asks for, None if it asks for no log-probabilities."""
        return cls(words, sampling) if "logprobs" in sampling or "prompt_logprobs" in sampling else None

    def of_output(self, tokens: list[int]) -> dict[str, Any]:
        """Return the log-probabilities of generated tokens."""
        if self.num_output is None:
            return {}
        tops = [self._top(token, self.num_output) for token in tokens]
        return {"log_probs": [log_probability(token) for token in tokens], "top_logprobs": tops}

    def of_prompt(self, tokens: list[int]) -> dict[str, Any]:
        """Return the log-probabilities of the prompt's tokens; the first follows nothing and has none."""
        if self.num_prompt is None:
            return {}
        tops = [self._top(token, self.num_prompt) for token in tokens[1:]]
        found = [log_probability(token) for token in tokens[1:]]
        return {"prompt_log_probs": [None, *found], "prompt_top_logprobs": [None, *tops]}

    def _top(self, token: int, count: int) -> list[tuple[int, float]]:
        """Return a token and others, in order of falling likelihood."""
        words = self._words
        count = len(words) if count < 0 else count
        near = [words[(token + place) % len(words)] for place in range(min(count, len(words)))]
        others = [other for other in near if other != token]
        own = log_probability(token)
        return [(other, own - place) for place, other in enumerate([token, *others][:count])]

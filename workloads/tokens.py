"""Token ids from hash ids: equal ids become equal tokens, so that live text and simulated hashes agree on sharing."""

import hashlib

import numpy as np
import numpy.typing as npt

from workloads.request import Request

TOKENS = range(1000, 31000)
"""Clear of special tokens, and inside every common vocabulary."""


def tokens_of(vocab_size: int) -> range:
    """Return the tokens to use for a model: `TOKENS`, or the upper part of a smaller vocabulary."""
    return TOKENS if vocab_size >= TOKENS.stop else range(min(TOKENS.start, vocab_size // 4), vocab_size)


def prompt_tokens(
    request: Request, block_size: int, *, salt: str = "", among: range = TOKENS
) -> npt.NDArray[np.uint32]:
    """Return the token ids of a request's prompt, shape (input_length,).

    A salt changes every token, so that two runs share nothing.
    """
    blocks = [_block(hash_id, block_size, salt, among) for hash_id in request.hash_ids]
    return np.concatenate(blocks)[: request.input_length] if blocks else np.empty(0, np.uint32)


def _block(hash_id: int, size: int, salt: str, among: range) -> npt.NDArray[np.uint32]:
    stream = hashlib.shake_128(f"{salt}:{hash_id}".encode()).digest(size * 4)
    return np.frombuffer(stream, "<u4") % len(among) + np.uint32(among.start)


WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "that",
    "with",
    "as",
    "it",
    "by",
    "at",
    "from",
    "his",
    "an",
    "be",
    "this",
    "which",
    "or",
    "not",
    "are",
    "had",
    "he",
    "have",
    "but",
    "also",
    "one",
    "were",
    "first",
    "their",
    "its",
    "new",
    "after",
    "who",
    "they",
    "two",
    "her",
    "she",
    "been",
    "other",
    "when",
    "time",
    "during",
    "there",
    "into",
    "all",
    "more",
    "some",
    "most",
    "can",
]


def as_words(tokens: npt.NDArray[np.uint32]) -> str:
    """Write token ids as common words, each one token in most tokenizers; equal ids become equal words."""
    words = np.array(WORDS)[tokens % np.uint32(len(WORDS))]
    return " ".join(words.tolist())

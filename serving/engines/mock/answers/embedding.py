"""The mocker's embeddings: prompts that share tokens are similar, and others are not."""

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

DEFAULT_SIZE = 384
"""The length of a vector if the model's config.json has no hidden size."""

PLACES = 8
"""At how many places of the vector a token counts."""

GRAM_BYTES = 4
"""Bytes are too few to tell texts apart, so where tokens are bytes, this many consecutive ones count together."""


def embedding_of(prompt: npt.NDArray[np.uint32], size: int, *, is_bytes: bool) -> list[float]:
    """Return a vector of length 1, a function of the prompt's tokens.

    Each token adds 1 or -1 at a few places that depend on it alone (a random projection of the counts), so the product of
    two vectors is about the similarity of the counts.
    """
    tokens = _grams(prompt) if is_bytes else prompt.astype(np.uint64)
    found, counts = np.unique(tokens, return_counts=True)
    weights = np.sqrt(counts)
    vector = np.zeros(size)
    for place in range(PLACES):
        mixed = _mixed(found * np.uint64(PLACES) + np.uint64(place))
        signs = np.where(mixed >> np.uint64(63), 1.0, -1.0)
        np.add.at(vector, (mixed % np.uint64(size)).astype(np.int64), signs * weights)
    norm = float(np.linalg.norm(vector))
    if not norm:
        vector[xxh3_64_intdigest(prompt.tobytes()) % size] = norm = 1.0
    result: list[float] = (vector / norm).tolist()
    return result


def _grams(prompt: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return each run of bytes as a number; a shorter prompt is one run."""
    length = min(GRAM_BYTES, max(len(prompt), 1))
    padded = prompt.astype(np.uint64) if len(prompt) else np.zeros(1, np.uint64)
    runs = np.zeros(len(padded) - length + 1, np.uint64)
    for place in range(length):
        runs = (runs << np.uint64(9)) | padded[place : place + len(runs)]
    return runs


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # splitmix64
        x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

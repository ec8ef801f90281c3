"""Ranges of the chunks of one chain."""

from collections.abc import Sequence

Range = tuple[int, int]
"""Chunks, from the first to before the second."""


def count(ranges: Sequence[Range]) -> int:
    """Count the chunks of ranges."""
    return sum([stop - start for start, stop in ranges])


def overlap(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Return the parts of ranges that are between two chunks."""
    return [(max(low, start), min(high, stop)) for low, high in ranges if max(low, start) < min(high, stop)]


def split(ranges: Sequence[Range], num_chunks: int) -> tuple[list[Range], list[Range]]:
    """Split ranges into this many first chunks and the rest."""
    first: list[Range] = []
    rest: list[Range] = []
    for start, stop in ranges:
        middle = min(start + num_chunks, stop)
        num_chunks -= middle - start
        if start < middle:
            first.append((start, middle))
        if middle < stop:
            rest.append((middle, stop))
    return first, rest


def joined(ranges: list[Range]) -> list[Range]:
    """Merge adjacent ranges."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined

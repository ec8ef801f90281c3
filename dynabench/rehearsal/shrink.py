"""A rehearsal that fails, made smaller: fewer faults, then fewer requests, as long as the same invariant does not hold."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs

from dynabench.rehearsal.run import Rehearsal

Part = TypeVar("Part")
Fails = Callable[[Rehearsal], bool]
MOST_TRIES = 60
"""Rehearsals that are tried at most."""


def shrunk(rehearsal: Rehearsal, fails: Fails) -> Rehearsal:
    """Return a smaller rehearsal that fails in the same way.

    Args:
        rehearsal: one that fails.
        fails: carries a rehearsal out, and returns whether it does.
    """
    left = MOST_TRIES

    def try_(smaller: Rehearsal) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(smaller)

    least = structs.replace(rehearsal, faults=[], questions=rehearsal.questions[:1])
    if least != rehearsal and try_(least):  # whatever is asked fails
        return least
    rehearsal = structs.replace(
        rehearsal, faults=_fewest(rehearsal.faults, lambda faults: try_(structs.replace(rehearsal, faults=faults)))
    )
    questions = _fewest(
        rehearsal.questions, lambda some: bool(some) and try_(structs.replace(rehearsal, questions=some))
    )
    return structs.replace(rehearsal, questions=questions)


def _fewest(parts: Sequence[Part], fails: Callable[[list[Part]], bool]) -> list[Part]:
    """Leave out parts as long as it fails: halves first, then smaller pieces (delta debugging, Zeller 1999)."""
    kept, size = list(parts), max(len(parts) // 2, 1)
    while kept:
        for first in range(0, len(kept), size):
            fewer = kept[:first] + kept[first + size :]
            if fails(fewer):
                kept = fewer
                break
        else:
            if size == 1:
                break
            size = max(size // 2, 1)
    return kept

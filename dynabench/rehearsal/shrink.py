"""A rehearsal that fails, made smaller: fewer faults, then fewer requests, as long as the same invariant does not hold."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs

from dynabench.rehearsal.run import Rehearsal

Part = TypeVar("Part")
Fails = Callable[[Rehearsal], bool]
MOST_TRIES = 60
"""Rehearsals that are tried at most."""


def shrunk(
    rehearsal: Rehearsal, fails: Fails, on_try: Callable[[Rehearsal, int], object] = lambda *_: None
) -> Rehearsal:
    """Return a smaller rehearsal that fails in the same way.

    Args:
        rehearsal: one that fails.
        fails: carries a rehearsal out, and returns whether it does.
        on_try: is told before each try the least that fails so far, and the number of the try.
    """
    number, least = 0, rehearsal

    def try_(smaller: Rehearsal) -> bool:
        nonlocal number, least
        if number == MOST_TRIES:
            return False
        number += 1
        on_try(least, number)
        does_fail = fails(smaller)
        least = smaller if does_fail else least
        return does_fail

    alone = structs.replace(rehearsal, faults=[], questions=rehearsal.questions[:1])
    if alone != rehearsal and try_(alone):  # whatever is asked fails
        return alone
    rehearsal = structs.replace(
        rehearsal, faults=_fewest(rehearsal.faults, lambda faults: try_(structs.replace(rehearsal, faults=faults)))
    )
    questions = _fewest(
        rehearsal.questions, lambda some: bool(some) and try_(structs.replace(rehearsal, questions=some))
    )
    return structs.replace(rehearsal, questions=questions)


def size(rehearsal: Rehearsal) -> str:
    """Say how large a rehearsal is."""
    num_faults, num_requests = len(rehearsal.faults), len(rehearsal.questions)
    return f"{num_faults} fault{'s' * (num_faults != 1)} and {num_requests} request{'s' * (num_requests != 1)}"


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

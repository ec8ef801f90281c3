"""Numbers of workers that fit a GPU budget."""

import math
from collections.abc import Sequence


def gpus_of(replicas: Sequence[int], gpus: Sequence[int]) -> int:
    """Return how many GPUs the workers of all pools need."""
    return sum(number * each for number, each in zip(replicas, gpus, strict=True))


def clamp(replicas: Sequence[int], gpus: Sequence[int], minima: Sequence[int], *, most: int) -> tuple[int, ...]:
    """Shrink pools in proportion until they fit a budget; the last pool gets the remainder. No pool grows.

    NVIDIA Dynamo 1.6 shrinks prefill and decode workers in this way; here the number of pools is arbitrary. The minima
    must fit.

    Args:
        replicas: workers of each pool, at least the minima.
        gpus: GPUs of one worker of each pool.
        minima: fewest workers of each pool.
        most: GPUs of all pools together.
    """
    assert gpus_of(minima, gpus) <= most
    total = gpus_of(replicas, gpus)
    if total <= most:
        return tuple(replicas)
    left, kept = most, gpus_of(minima, gpus)
    fitted: list[int] = []
    for place, (number, each, least) in enumerate(zip(replicas, gpus, minima, strict=True)):
        kept -= least * each
        room = (left - kept) // each
        share = room if place == len(replicas) - 1 else math.floor(number * most / total)
        fitted.append(min(number, max(least, min(room, share))))
        left -= fitted[-1] * each
    return tuple(fitted)


def grow(replicas: Sequence[int], gpus: Sequence[int], wanted: Sequence[int], *, room: int) -> tuple[int, ...]:
    """Add workers one by one to the pool that has the smallest share of what it wants, while GPUs are left.

    Args:
        replicas: workers of each pool.
        gpus: GPUs of one worker of each pool.
        wanted: workers that each should have; a pool that has more stays as it is.
        room: GPUs that are free.
    """
    grown = list(replicas)
    while True:
        short = [place for place, number in enumerate(grown) if number < wanted[place] and gpus[place] <= room]
        if not short:
            return tuple(grown)
        neediest = min(short, key=lambda place: grown[place] / wanted[place])
        grown[neediest] += 1
        room -= gpus[neediest]


def keep(replicas: Sequence[int], gpus: Sequence[int], before: Sequence[int], *, least: int) -> tuple[int, ...]:
    """Undo reductions, the largest first, until the pools have `least` GPUs or are as before."""
    kept = list(replicas)
    while gpus_of(kept, gpus) < least:
        place = max(range(len(kept)), key=lambda place: before[place] - kept[place])
        if kept[place] >= before[place]:
            break
        kept[place] += 1
    return tuple(kept)


def raised(replicas: Sequence[int], gpus: Sequence[int], *, least: int) -> tuple[int, ...]:
    """Return how many workers of each pool, in proportion to the present ones, have at least `least` GPUs."""
    total = gpus_of(replicas, gpus)
    if total >= least:
        return tuple(replicas)
    return tuple(math.ceil(number * least / total) for number in replicas)

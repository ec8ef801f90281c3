"""Galloping along a chain of ids, of which the held ones are always its start."""

from collections.abc import Container, Hashable, Sequence


def num_held(held: Container[Hashable], ids: Sequence[Hashable], num_ids: int, guess: int = 0) -> int:
    """Return how many of the first `num_ids` ids are held, at the cost of a few questions however long the chain.

    A guess that is right saves most of them.
    """
    if guess and guess <= num_ids and ids[guess - 1] in held and (guess == num_ids or ids[guess] not in held):
        return guess
    if not num_ids or ids[0] not in held:
        return 0
    low, high, stride = 0, num_ids, 1  # ids[low] is held: double the stride, then halve it
    while low + stride < high:
        if ids[low + stride] not in held:
            high = low + stride
            break
        low += stride
        stride *= 2
    while low + 1 < high:
        middle = (low + high) // 2
        if ids[middle] in held:
            low = middle
        else:
            high = middle
    return low + 1

"""The blocks of a prompt, and galloping look-ups of how much of them each of many holders has.

Ids are chained, so what a holder has of a prompt is always its start. Doubling the stride and then halving it finds the
ends of these parts in a few dict reads, however long the prompt (for one holder: `foundation/galloping.py`).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

Ids = Sequence[Hashable]


class PromptBlocks(NamedTuple):
    """The full blocks of a prompt by their chained ids; an id may name several (as in a trace of 512-token ids)."""

    ids: Ids
    num_blocks: int
    blocks_per_id: int = 1

    @classmethod
    def of(cls, ids: Ids) -> "PromptBlocks":
        """Name one block by each id."""
        return cls(ids, len(ids))


def block_of(id: Hashable, offset: int) -> Hashable:
    """Name a block of an id: the first is named by the id itself."""
    return (id, offset) if offset else id


def depths(masks: Mapping[Hashable, int], ids: Ids, num_ids: int) -> Iterator[tuple[int, int]]:
    """Yield how much is held, by whom: (number of leading ids, mask of those who hold exactly that many).

    The bits in `masks` are the holders of an id; holders of none are left out.
    """
    if not num_ids or not (mask := masks.get(ids[0], 0)):
        return
    place, stride = 0, 1
    while place + 1 < num_ids:
        probe = min(place + stride, num_ids - 1)
        there = mask & masks.get(ids[probe], 0)
        if there != mask:
            yield from _between(masks, ids, place, mask, probe, there)
            if not there:
                return
            mask = there
        place = probe
        stride *= 2
    yield num_ids, mask


def _between(
    masks: Mapping[Hashable, int], ids: Ids, low: int, low_mask: int, high: int, high_mask: int
) -> Iterator[tuple[int, int]]:
    """Yield the ends of those who hold `ids[low]` but not `ids[high]`."""
    if high - low == 1:
        yield high, low_mask & ~high_mask
        return
    middle = (low + high) // 2
    mask = low_mask & masks.get(ids[middle], 0) | high_mask
    if mask != low_mask:
        yield from _between(masks, ids, low, low_mask, middle, mask)
    if mask != high_mask:
        yield from _between(masks, ids, middle, mask, high, high_mask)


def slots_of(mask: int) -> list[int]:
    """Return the holders in a mask."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots

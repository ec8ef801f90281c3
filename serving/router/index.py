"""Which ranks have which prefix: dicts from sequence hash to a bitmask of ranks, looked up by galloping.

Ids are chained, and a rank that has an id has all ids before it. So along a prompt, a rank's bits are set up to some
depth and clear after it. A look-up costs a few dict reads per rank, however long the prompt. One id may cover several
blocks (a trace with ids of 512 tokens on an engine with smaller blocks); then a rank may have part of it:

    blocks of an id   0 1 2 3 4 5 6 7     what the index stores for a rank
    whole             # # # # # # # #     its bit in `_masks[id]`
    a part            # # # . . . . .     its bit, and `_partial[id, slot]` = 3
    twice             2 2 # # # # # #     its bit, and 1 in `_copies` for each of the first two
"""

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from serving.router.blocks import Ids, PromptBlocks, depths
from serving.router.tiers import KnownTiers


class Index(Protocol):
    """The interface of an index. The slot of a rank is its bit in a mask."""

    def overlaps(self, blocks: PromptBlocks, now: float) -> dict[int, int]:
        """Return, for each rank that has any, how many leading blocks of a prompt it has."""
        ...

    def routed(self, slot: int, blocks: PromptBlocks, now: float) -> None:
        """Record that a prompt was sent to a rank."""
        ...

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        ...


class PrefixIndex:
    """The exact index, fed by the ranks' KV events."""

    def __init__(self, *, closed_events: bool = False) -> None:
        """Build an empty index.

        Args:
            closed_events: events always remove blocks leaf first, as those of the mocker do. Then the index needs no
                links from block to block, which repair a removal out of order.
        """
        self.resync: set[int] = set()
        """Ranks that stored a block whose parent is unknown: their events have a gap."""
        self.tiers = KnownTiers()
        """The blocks of ranks beyond the GPU; everything else here is about the GPU."""
        self._masks: dict[Hashable, int] = {}
        self._partial: dict[tuple[Hashable, int], int] = {}  # (id, slot) -> blocks, if not all of the id's
        self._copies: dict[tuple[Hashable, int], int] = {}  # (block, slot) -> copies beyond the first
        self._children: dict[Hashable, dict[Hashable, None]] | None = None if closed_events else {}
        self._parents: dict[Hashable, Hashable] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def overlaps(self, blocks: PromptBlocks, now: float = 0.0) -> dict[int, int]:
        """Return, for each rank that has any, how many leading blocks of a prompt it has."""
        ids, num_blocks, per_id = blocks
        found: dict[int, int] = {}
        for depth, mask in depths(self._masks, ids, -(-num_blocks // per_id)):
            while mask:
                low = mask & -mask
                slot = low.bit_length() - 1
                mask ^= low
                held = depth * per_id
                if self._partial and (part := self._partial.get((ids[depth - 1], slot))) is not None:
                    held += part - per_id
                found[slot] = held if held < num_blocks else num_blocks
        return found

    def routed(self, slot: int, blocks: PromptBlocks, now: float) -> None:
        """Do nothing: the rank's events report what it stores."""

    def store(self, slot: int, ids: Ids, parent: Hashable | None = None) -> bool:
        """Enter a chain of ids of one block each, after a parent (none: from the start).

        If the rank does not have the parent, events were lost: marks it for a snapshot and returns False.
        """
        if parent is not None and not self.holds(parent, slot):
            self.resync.add(slot)
            return False
        self._store_whole(slot, ids, parent, 1)
        return True

    def store_blocks(self, slot: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> bool:
        """Enter blocks `start` to `stop` of a chain whose ids cover several blocks each.

        With four blocks per id, blocks 6 to 17 are the end of one id, whole ids, and the start of another:

            ids       |  0  |  1  |  2  |  3  |  4  |
            blocks     ....  ..##  ####  ####  #...
                               ^ `_grow`  ^ `_store_whole`  ^ `_store_part`

        If the rank does not have block `start - 1`, events were lost: marks it for a snapshot and returns False.
        """
        place, offset = divmod(start, blocks_per_id)
        last = place if offset else place - 1
        if start and self._held(ids[last], slot, blocks_per_id) < (offset or blocks_per_id):
            self.resync.add(slot)
            return False
        if offset:
            self._grow(ids[place], slot, offset, min(stop - place * blocks_per_id, blocks_per_id), blocks_per_id)
            place += 1
        full, rest = divmod(stop, blocks_per_id)
        before = ids[place - 1] if place else None
        self._store_whole(slot, ids[place:full], before, blocks_per_id)
        if rest and full >= place:
            self._store_part(slot, ids[full], ids[full - 1] if full else None, rest, blocks_per_id)
        return True

    def _store_whole(self, slot: int, ids: Ids, before: Hashable | None, blocks_per_id: int) -> None:
        """Enter all blocks of ids that follow one that the rank has."""
        bit, masks = 1 << slot, self._masks
        for id in ids:
            mask = masks.get(id, 0)
            if mask & bit:
                self._grow(id, slot, 0, blocks_per_id, blocks_per_id)
            else:
                masks[id] = mask | bit
                if not mask and self._children is not None:
                    self._link(before, id)
            before = id

    def _store_part(self, slot: int, id: Hashable, before: Hashable | None, stop: int, blocks_per_id: int) -> None:
        """Enter the first blocks of an id that follows one that the rank has."""
        mask = self._masks.get(id, 0)
        if mask >> slot & 1:
            self._grow(id, slot, 0, stop, blocks_per_id)
            return
        self._masks[id] = mask | 1 << slot
        self._partial[id, slot] = stop
        if not mask:
            self._link(before, id)

    def remove(self, slot: int, ids: Ids) -> None:
        """Remove a chain of ids of one block each, last first; ignore unknown ones."""
        self.remove_blocks(slot, ids, 0, len(ids), 1)

    def remove_blocks(self, slot: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Remove blocks `start` to `stop` of a chain, last first; ignore unknown ones."""
        if self._children is None and not self._copies:
            place = -(-start // blocks_per_id)
            self._remove_whole(1 << slot, ids, place, -(-stop // blocks_per_id))
            stop = place * blocks_per_id
        for place in range((stop - 1) // blocks_per_id, start // blocks_per_id - 1, -1):
            id, first = ids[place], place * blocks_per_id
            low, high = max(start - first, 0), min(stop - first, blocks_per_id)
            if not self.holds(id, slot):
                continue
            if self._copies:
                self._remove_copies(slot, id, low, high, blocks_per_id)
            else:
                self._shrink(id, slot, low, blocks_per_id)

    def _remove_copies(self, slot: int, id: Hashable, low: int, high: int, blocks_per_id: int) -> None:
        """Remove one copy of blocks `low` to `high` of an id, last first: a block that was stored twice stays."""
        for offset in range(high - 1, low - 1, -1):
            block = (id, offset) if offset else id
            extra = self._copies.get((block, slot), 0)
            if extra > 1:
                self._copies[block, slot] = extra - 1
            elif extra:
                del self._copies[block, slot]
            else:
                self._shrink(id, slot, offset, blocks_per_id)

    def _remove_whole(self, bit: int, ids: Ids, first: int, stop: int) -> None:
        """Remove ids of which no block remains, if there are no links to repair."""
        masks, partial = self._masks, self._partial
        for id in ids[first:stop]:
            mask = masks.get(id, 0)
            if mask == bit:
                del masks[id]
            elif mask & bit:
                masks[id] = mask ^ bit
        if partial and stop > first:
            partial.pop((ids[stop - 1], bit.bit_length() - 1), None)

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self.clear(slot)
        self.tiers.drop(slot)

    def clear(self, slot: int) -> None:
        """Forget what a rank has on its GPU."""
        bit = 1 << slot
        for id in [id for id, mask in self._masks.items() if mask & bit]:
            self._unset(id, slot)
        self._copies = {key: extra for key, extra in self._copies.items() if key[1] != slot}
        self.resync.discard(slot)

    def holds(self, id: Hashable, slot: int) -> bool:
        """Return whether a rank has the first block of an id."""
        return bool(self._masks.get(id, 0) >> slot & 1)

    def _held(self, id: Hashable, slot: int, blocks_per_id: int) -> int:
        if not self.holds(id, slot):
            return 0
        return self._partial.get((id, slot), blocks_per_id)

    def _grow(self, id: Hashable, slot: int, start: int, stop: int, blocks_per_id: int) -> None:
        """Enter blocks of an id of which the rank has some: count a copy of those, add the others."""
        held = self._held(id, slot, blocks_per_id)
        for offset in range(start, min(stop, held)):
            block = (id, offset) if offset else id
            self._copies[block, slot] = self._copies.get((block, slot), 0) + 1
        if stop > held:
            if stop == blocks_per_id:
                self._partial.pop((id, slot), None)
            else:
                self._partial[id, slot] = stop

    def _shrink(self, id: Hashable, slot: int, held: int, blocks_per_id: int) -> None:
        """Leave a rank only the first `held` blocks of an id, and nothing after them."""
        if held == 0:
            self._clear(id, slot)
        elif held < self._held(id, slot, blocks_per_id):
            self._partial[id, slot] = held
            self._cut(id, slot)

    def _clear(self, id: Hashable, slot: int) -> None:
        if self.holds(id, slot):
            self._cut(id, slot)
            self._unset(id, slot)

    def _cut(self, id: Hashable, slot: int) -> None:
        """Forget what a rank has after an id: it cannot be used without its prefix."""
        if self._children is None:
            return
        behind = [child for child in self._children.get(id, ()) if self.holds(child, slot)]
        while behind:
            child = behind.pop()
            behind += [next_ for next_ in self._children.get(child, ()) if self.holds(next_, slot)]
            self._unset(child, slot)

    def _unset(self, id: Hashable, slot: int) -> None:
        mask = self._masks[id] & ~(1 << slot)
        if self._partial:
            self._partial.pop((id, slot), None)
        if mask:
            self._masks[id] = mask
            return
        del self._masks[id]
        if self._children is not None and (parent := self._parents.pop(id, None)) is not None:
            siblings = self._children[parent]
            del siblings[id]
            if not siblings:
                del self._children[parent]

    def _link(self, parent: Hashable | None, id: Hashable) -> None:
        if self._children is not None and parent is not None:
            self._parents[id] = parent
            self._children.setdefault(parent, {})[id] = None


class PredictedIndex:
    """The approximate index, for ranks without KV events: a prompt stays for `ttl_s` on the rank it was routed to."""

    def __init__(self, ttl_s: float = 120.0) -> None:
        self._ttl_s = ttl_s
        self._masks: dict[Hashable, int] = {}
        self._touched: dict[tuple[Hashable, int], float] = {}
        self._expiry: deque[tuple[float, int, Ids]] = deque()

    def __len__(self) -> int:
        return len(self._masks)

    def overlaps(self, blocks: PromptBlocks, now: float) -> dict[int, int]:
        """Return, for each rank that has any, how many leading blocks of a prompt it should have."""
        self._expire(now)
        ids, num_blocks, per_id = blocks
        found: dict[int, int] = {}
        for depth, mask in depths(self._masks, ids, -(-num_blocks // per_id)):
            for slot in range(mask.bit_length()):
                if mask >> slot & 1:
                    found[slot] = min(depth * per_id, num_blocks)
        return found

    def routed(self, slot: int, blocks: PromptBlocks, now: float) -> None:
        """Assume that a rank will cache a prompt sent to it."""
        ids, num_blocks, per_id = blocks
        prompt = ids[: -(-num_blocks // per_id)]
        bit = 1 << slot
        for id in prompt:
            self._masks[id] = self._masks.get(id, 0) | bit
            self._touched[id, slot] = now
        self._expiry.append((now, slot, prompt))

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        for id, number in [key for key in self._touched if key[1] == slot]:
            self._unset(id, number)

    def _expire(self, now: float) -> None:
        while self._expiry and self._expiry[0][0] + self._ttl_s <= now:
            routed, slot, ids = self._expiry.popleft()
            for id in ids:
                if self._touched.get((id, slot)) == routed:
                    self._unset(id, slot)

    def _unset(self, id: Hashable, slot: int) -> None:
        del self._touched[id, slot]
        mask = self._masks[id] & ~(1 << slot)
        if mask:
            self._masks[id] = mask
        else:
            del self._masks[id]

"""What can be fetched beyond the GPU: which rank has which blocks in host memory, on its disks, or in a shared store.

Blocks there may be missing in the middle of a prompt, so a look-up goes along it, for all ranks at once. A run starts
where a rank's blocks on the GPU end, and continues as long as any tier has the next block. A block counts in the
nearest tier that has it:

    blocks of a prompt     0 1 2 3 4 5 6 7 8
    on the GPU             # # # . . . . . .     3, from the prefix index
    in host memory         # # # # # . . . .     2
    on disk                # # # # # # . # #     1; blocks 7 and 8 cannot be used without block 6
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from serving.router.blocks import Ids, PromptBlocks, slots_of
from serving.router.events import Medium

EVERYONE = -1
"""The mask of all ranks there are or will be."""


class PerTier(NamedTuple):
    """A number for each tier beyond the GPU, nearest first: a weight, or the time to fetch a token's KV (s)."""

    host: float
    disk: float
    shared: float


class BeyondGpu(NamedTuple):
    """The blocks of a prompt that a rank can fetch, after those on its GPU, each in its nearest tier.

    Numbers, or columns of them (`board.py`).
    """

    host: Any
    disk: Any
    shared: Any

    def times(self, each: PerTier) -> Any:
        """Return the sum over the tiers of blocks times a number."""
        return self.host * each.host + self.disk * each.disk + self.shared * each.shared


NOTHING: Final = BeyondGpu(0, 0, 0)
EVERYTHING = PerTier(1.0, 1.0, 1.0)


class KnownTiers:
    """Blocks by tier, from the ranks' KV events. A block is in a tier or is not: storing it twice changes nothing."""

    def __init__(self) -> None:
        self._tiers: dict[Medium, KnownTier] = {"CPU": KnownTier(), "STORAGE": KnownTier(), "SHARED": KnownTier()}

    @property
    def is_empty(self) -> bool:
        """Whether all tiers are empty."""
        return not any(tier.whole or tier.parts for tier in self._tiers.values())

    def store(self, slot: int, medium: Medium, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Enter blocks `start` to `stop` of a chain whose ids name several blocks each."""
        self._tiers[medium].store(_mask(slot, medium), ids, start, stop, blocks_per_id)

    def remove(self, slot: int, medium: Medium, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Remove blocks `start` to `stop` of a chain; unknown ones are ignored."""
        self._tiers[medium].remove(_mask(slot, medium), ids, start, stop, blocks_per_id)

    def drop(self, slot: int, medium: Medium | None = None) -> None:
        """Forget a rank's blocks in a tier, or in all; blocks that it wrote to the shared store stay."""
        for name, tier in self._tiers.items():
            if name != "SHARED" and medium in (None, name):
                tier.drop(1 << slot)

    def runs(self, blocks: PromptBlocks, on_gpu: Mapping[int, int], slots: Sequence[int]) -> dict[int, BeyondGpu]:
        """Return, for each of the ranks that has any, the blocks that follow its leading blocks on the GPU."""
        num_blocks, per_id = blocks.num_blocks, blocks.blocks_per_id
        starts: dict[int, list[int]] = {}  # index of an id -> the ranks whose run starts in it
        for slot in slots:
            if (start := on_gpu.get(slot, 0)) < num_blocks:
                starts.setdefault(start // per_id, []).append(slot)
        if not starts:
            return {}
        walk, places = Walk(list(self._tiers.values()), per_id), sorted(starts)
        for place, next_place in pairwise((*places, -(-num_blocks // per_id))):
            for slot in starts[place]:
                walk.begin(slot, on_gpu.get(slot, 0) - place * per_id)
            walk.go(blocks, place, next_place)
        return walk.end()


class Walk:
    """A walk along a prompt, id by id: the ranks whose run continues, and the blocks found so far."""

    __slots__ = ("_counts", "_num_passed", "_offsets", "_per_id", "_split", "_tiers", "going")

    def __init__(self, tiers: list["KnownTier"], blocks_per_id: int) -> None:
        self.going = 0
        """Mask of the ranks whose run continues."""
        self._tiers = tiers
        self._per_id = blocks_per_id
        self._offsets: dict[int, int] = {}  # of the ranks whose run starts inside the next id
        self._counts: dict[int, list[int]] = {}
        self._split = [0] * len(tiers)  # who had the last id, whole, in which tier
        self._num_passed = 0  # ids

    def begin(self, slot: int, offset: int) -> None:
        """Start a rank's run at a block of the next id."""
        self.going |= 1 << slot
        if offset:
            self._offsets[slot] = offset

    def go(self, blocks: PromptBlocks, place: int, stop: int) -> None:
        """Pass the ids of a prompt between two indices, as long as any run continues."""
        ids, num_blocks, per_id = blocks
        num_whole = min(stop, num_blocks // per_id)
        while place < stop and self.going:
            count = 0 if self._offsets else self._num_alike(ids, place, num_whole)
            if count:
                self._num_passed += count
                place += count
            else:
                self.step(ids[place], min(num_blocks - place * per_id, per_id))
                place += 1

    def _num_alike(self, ids: Ids, place: int, stop: int) -> int:
        """Count the next ids that every continuing rank has whole, in the same tiers as the last."""
        tiers, split, first = self._tiers, self._split, place
        while place < stop:
            id, left = ids[place], self.going
            for number in range(len(tiers)):
                tier, held = tiers[number], split[number]
                if left & tier.whole.get(id, 0) != held or (tier.parts and id in tier.parts):
                    return place - first
                left ^= held
                if not left:
                    break
            if left:
                break
            place += 1
        return place - first

    def step(self, id: Hashable, num_blocks: int) -> None:
        """Pass an id of which this many blocks count; handle ranks with all of it in one tier, or none, at once."""
        split: list[int] = []
        left, by_block = self.going, 0
        if num_blocks == self._per_id:
            for slot in self._offsets:
                by_block |= 1 << slot
            left ^= by_block
            for tier in self._tiers:
                whole = left & tier.whole.get(id, 0)
                split.append(whole)
                left ^= whole
                for holder in tier.parts.get(id, ()) if tier.parts else ():
                    by_block |= left & holder  # nearer parts count before farther whole ids
                    left &= ~holder
        else:
            split = [0] * len(self._tiers)
            left, by_block = 0, left
        if split != self._split:
            self._turn(split)
        self._num_passed += 1
        self.going ^= left
        if by_block:
            for slot in slots_of(by_block):
                if not self._step_by_block(slot, id, range(self._offsets.get(slot, 0), num_blocks)):
                    self.going ^= 1 << slot
            self._offsets.clear()

    def end(self) -> dict[int, BeyondGpu]:
        """Return the blocks of each rank."""
        self._turn([0] * len(self._tiers))
        return {slot: BeyondGpu(*count) for slot, count in self._counts.items() if any(count)}

    def _step_by_block(self, slot: int, id: Hashable, blocks: range) -> bool:
        """Count blocks of an id up to the first that the rank has in no tier; return whether it has all."""
        counts = self._counts.setdefault(slot, [0] * len(self._tiers))
        for block in blocks:
            for place, tier in enumerate(self._tiers):
                if tier.has(id, slot, block):
                    counts[place] += 1
                    break
            else:
                return False
        return True

    def _turn(self, split: list[int]) -> None:
        """Record that other ranks have the next id than the last; a run that ends gets the blocks since its start."""
        num_blocks = self._num_passed * self._per_id
        for place, (before, after) in enumerate(zip(self._split, split, strict=True)):
            for slot in slots_of(before ^ after):
                counts = self._counts.setdefault(slot, [0] * len(self._tiers))
                counts[place] += num_blocks if before >> slot & 1 else -num_blocks
        self._split = split


class KnownTier:
    """Who has which blocks in one tier. The names of blocks are ids, and each may name several."""

    __slots__ = ("parts", "whole")

    def __init__(self) -> None:
        self.whole: dict[Hashable, int] = {}
        """id -> mask of those that have all its blocks."""
        self.parts: dict[Hashable, dict[int, int]] = {}
        """id -> mask of a holder of some of its blocks -> these blocks, as bits."""

    def store(self, holder: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Enter blocks of a chain for a holder, given by its mask."""
        whole, before, after = self.whole, 0, holder
        for id in _whole_ids(ids, start, stop, blocks_per_id):
            mask = whole.get(id, 0)
            if mask != before:  # else ids with the same holders share one mask
                before, after = mask, mask | holder
            whole[id] = after
            if self.parts:
                self._forget_part(id, holder)
        if start % blocks_per_id or stop % blocks_per_id:
            for id, bits, every in _pieces(ids, start, stop, blocks_per_id):
                self._set(id, holder, self._held(id, holder, every) | bits, every)

    def remove(self, holder: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Remove them."""
        whole = self.whole
        for id in _whole_ids(ids, start, stop, blocks_per_id):
            mask = whole.get(id, 0)
            if mask == holder:
                del whole[id]
            elif mask & holder:
                whole[id] = mask & ~holder
            if self.parts:
                self._forget_part(id, holder)
        if start % blocks_per_id or stop % blocks_per_id:
            for id, bits, every in _pieces(ids, start, stop, blocks_per_id):
                self._set(id, holder, self._held(id, holder, every) & ~bits, every)

    def drop(self, holder: int) -> None:
        """Forget a holder in one sweep."""
        for id in [id for id, mask in self.whole.items() if mask & holder]:
            self._set(id, holder, 0, 1)
        for id in [id for id, holders in self.parts.items() if holder in holders]:
            self._set(id, holder, 0, 1)

    def has(self, id: Hashable, slot: int, block: int) -> bool:
        """Return whether a rank can fetch a block of an id."""
        if self.whole.get(id, 0) >> slot & 1:
            return True
        parts = self.parts.get(id)
        return parts is not None and bool((parts.get(1 << slot, 0) | parts.get(EVERYONE, 0)) >> block & 1)

    def _held(self, id: Hashable, holder: int, every: int) -> int:
        if self.whole.get(id, 0) & holder:
            return every
        parts = self.parts.get(id)
        return 0 if parts is None else parts.get(holder, 0)

    def _set(self, id: Hashable, holder: int, bits: int, every: int) -> None:
        mask = self.whole.get(id, 0) & ~holder
        if bits == every:
            mask |= holder
        if mask:
            self.whole[id] = mask
        else:
            self.whole.pop(id, None)
        if bits and bits != every:
            self.parts.setdefault(id, {})[holder] = bits
        else:
            self._forget_part(id, holder)

    def _forget_part(self, id: Hashable, holder: int) -> None:
        parts = self.parts.get(id)
        if parts is not None:
            parts.pop(holder, None)
            if not parts:
                del self.parts[id]


def _mask(slot: int, medium: Medium) -> int:
    return EVERYONE if medium == "SHARED" else 1 << slot


def _whole_ids(ids: Ids, start: int, stop: int, blocks_per_id: int) -> Ids:
    """Return the ids all of whose blocks are in a range."""
    return ids[-(-start // blocks_per_id) : stop // blocks_per_id]


def _pieces(ids: Ids, start: int, stop: int, blocks_per_id: int) -> list[tuple[Hashable, int, int]]:
    """Return the ids some of whose blocks are in a range, each with the bits of those and of all its blocks."""
    pieces, every = [], (1 << blocks_per_id) - 1
    for place in {start // blocks_per_id, stop // blocks_per_id}:
        low, high = max(start - place * blocks_per_id, 0), min(stop - place * blocks_per_id, blocks_per_id)
        if 0 < high - low < blocks_per_id:
            pieces.append((ids[place], (1 << high) - (1 << low), every))
    return pieces

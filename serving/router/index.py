"""Which ranks have which prefix: a tree of prompts, found by the id of a block.

Ids are chained, and a rank that has an id has all ids before it. So the tree needs no node per block, and no entry per
block and rank: a node is a run of ids between two branches, and keeps one number per rank, how far it has come.

    blocks of a prompt   0 1 2 3 4 5 6 7 8 9
    runs                 [ A     ] [ B     ]      and [ C ] after A, which another prompt continues with
    rank 0               # # # # # # # . . .      A: 5, B: 7
    rank 1               # # # # # . . . . .      A: 5, C: 7 if it also has the first two blocks of C
    rank 2               # # . . . . . . . .      A: 2

A look-up costs a few dict reads per run of the prompt and copies the numbers of the ranks, however long the prompt. One
id may cover several blocks (a trace with ids of 512 tokens on an engine with smaller blocks); numbers count blocks.
"""

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from serving.router.blocks import Ids, PromptBlocks, block_of, depths, slots_of
from serving.router.layer_groups import KnownLayerGroups
from serving.router.runs import Run
from serving.router.tiers import KnownTiers


class Index(Protocol):
    """The interface of an index. Ranks are known by their slots."""

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
            closed_events: events always remove blocks leaf first, as those of the mocker do. Then no removal cuts off
                what a rank has further along.
        """
        self.resync: set[int] = set()
        """Ranks that stored a block whose parent is unknown: their events have a gap."""
        self.tiers = KnownTiers()
        """The blocks of ranks beyond the GPU; everything else here is about the GPU."""
        self.layer_groups = KnownLayerGroups()
        """What they hold for layers that keep only a part of a prompt; everything else is what others keep."""
        self._runs: dict[Hashable, Run] = {}
        self._roots: dict[int, set[Run]] = {}  # slot -> the first runs of prompts of which it has any
        self._copies: dict[int, dict[Hashable, int]] = {}  # slot -> block -> copies beyond the first
        self._is_closed = closed_events

    def __len__(self) -> int:
        return len(self._runs)

    def overlaps(self, blocks: PromptBlocks, now: float = 0.0) -> dict[int, int]:
        """Return, for each rank that has any, how many leading blocks of a prompt it has."""
        ids, num_blocks, per_id = blocks
        found: dict[int, int] = {}
        above: dict[int, int] = {}
        before: Run | None = None
        runs, place, num_ids = self._runs, 0, -(-num_blocks // per_id)
        while place < num_ids and (run := runs.get(ids[place])) is not None and run.parent is before:
            held = run.depths
            if len(above) > len(held):  # otherwise the same ranks go on
                found.update(above)
            end = place + len(run.ids)
            if end * per_id > num_blocks or run.ids[-1] != ids[end - 1]:
                limit = min(num_blocks, (place + run.num_alike(0, ids, place, num_ids)) * per_id)
                for slot, depth in held.items():
                    found[slot] = depth if depth < limit else limit
                return found
            above, before, place = held, run, end
        if not found:
            return above.copy()
        found.update(above)
        return found

    def starts(self, blocks: PromptBlocks) -> dict[int, int]:
        """Return, for each rank that has any, with how many leading blocks of a prompt all its layers can start."""
        found, groups = self.overlaps(blocks), self.layer_groups
        for slot in groups.slots:
            # A rank that never stored a block of layers that keep everything has none.
            most = found.pop(slot, 0) if slot in self._roots else blocks.num_blocks
            if most and (longest := groups.longest(slot, blocks, most)):
                found[slot] = longest
        return found

    def routed(self, slot: int, blocks: PromptBlocks, now: float) -> None:
        """Do nothing: the rank's events report what it stores."""

    def store(self, slot: int, ids: Ids, parent: Hashable | None = None) -> bool:
        """Enter a chain of ids of one block each, after a parent (none: from the start).

        If the rank does not have the parent, events were lost: marks it for a snapshot and returns False.
        """
        if parent is None:
            self._enter(slot, None, ids, 0, 0, len(ids), 1)
            return True
        run = self._runs.get(parent)
        start = 0 if run is None else run.blocks_before(parent, slot) + 1
        if run is None or run.depths.get(slot, 0) < start:
            self.resync.add(slot)
            return False
        self._enter(slot, run, ids, 0, start, start + len(ids), 1)
        return True

    def store_blocks(self, slot: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> bool:
        """Enter blocks `start` to `stop` of a chain whose ids cover several blocks each.

        If the rank does not have block `start - 1`, events were lost: marks it for a snapshot and returns False.
        """
        before: Run | None = None
        if start:
            before = self._runs.get(ids[(start - 1) // blocks_per_id])
            if before is None or before.depths.get(slot, 0) < start:
                self.resync.add(slot)
                return False
        self._enter(slot, before, ids, start // blocks_per_id, start, stop, blocks_per_id)
        return True

    def _enter(
        self, slot: int, before: Run | None, ids: Ids, place: int, start: int, stop: int, blocks_per_id: int
    ) -> None:
        """Enter blocks of a prompt, the first of them in `ids[place]`, behind those that the rank has of `before`.

        An id that is known in another place is not chained: it is ignored, with what follows it.
        """
        end = place - start // blocks_per_id - -stop // blocks_per_id
        while start < stop:
            run = self._runs.get(ids[place])
            if run is None:
                self._append(slot, before, list(ids[place:end]), start, stop, blocks_per_id)
                return
            at = (start - run.start) // blocks_per_id
            alike = run.num_alike(at, ids, place, end)
            if not alike or (run is not before and run.parent is not before):
                return
            upto = min(stop, run.start + (at + alike) * blocks_per_id)
            held = run.depths.get(slot, run.start)
            if start < held:
                self._count_copies(slot, ids, place, start, min(upto, held), blocks_per_id)
            if upto > held:
                self._reach(run, slot, upto)
            before, place, start = run, place + alike, upto

    def _append(
        self, slot: int, before: Run | None, ids: list[Hashable], start: int, stop: int, blocks_per_id: int
    ) -> None:
        """Enter ids that no rank has, behind block `start`."""
        if before is not None and before.end > start:
            self._split(before, (start - before.start) // blocks_per_id)
        if before is None or before.children:
            run = Run(start, before, ids, blocks_per_id)
        else:
            run = before
            run.ids += ids
        self._runs.update(dict.fromkeys(ids, run))
        self._reach(run, slot, stop)

    def _split(self, run: Run, num_ids: int) -> None:
        """Leave a run only its first ids, and move the others into a child."""
        behind, run.children = run.children, None
        tail = Run(run.start + num_ids * run.blocks_per_id, run, run.ids[num_ids:], run.blocks_per_id)
        tail.children = behind
        for child in behind or ():
            child.parent = tail
        del run.ids[num_ids:]
        for slot, depth in run.depths.items():
            if depth > tail.start:
                tail.depths[slot] = depth
        for slot in tail.depths:
            run.depths[slot] = tail.start
        self._runs.update(dict.fromkeys(tail.ids, tail))

    def _reach(self, run: Run, slot: int, depth: int) -> None:
        """Note how far a rank has come in a run."""
        if run.parent is None and slot not in run.depths:
            self._roots.setdefault(slot, set()).add(run)
        run.depths[slot] = depth

    def _count_copies(self, slot: int, ids: Ids, place: int, start: int, stop: int, blocks_per_id: int) -> None:
        """Count another copy of blocks that a rank has, the first of them in `ids[place]`."""
        copies = self._copies.setdefault(slot, {})
        first = place - start // blocks_per_id
        for number in range(start, stop):
            block = block_of(ids[first + number // blocks_per_id], number % blocks_per_id)
            copies[block] = copies.get(block, 0) + 1

    def remove(self, slot: int, ids: Ids) -> None:
        """Remove a chain of ids of one block each, last first; ignore unknown ones."""
        self.evict(slot, ids[::-1])

    def evict(self, slot: int, ids: Ids) -> None:
        """Remove ids of one block each in this order, most often the last of a prompt first; ignore unknown ones."""
        place, copies = 0, self._copies.get(slot)
        while place < len(ids):
            id = ids[place]
            place += 1
            run = self._runs.get(id)
            if run is None or slot not in run.depths:
                continue
            if copies and self._remove_copy(slot, id):
                continue
            block = run.blocks_before(id, slot)
            while (
                not copies and block > run.start and place < len(ids) and run.ids[block - run.start - 1] == ids[place]
            ):
                block -= 1
                place += 1
            self._shorten(run, slot, block)

    def remove_blocks(self, slot: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Remove blocks `start` to `stop` of a chain, last first; ignore unknown ones."""
        if self._copies.get(slot):
            self._remove_each(slot, ids, start, stop, blocks_per_id)
            return
        path: list[Run] = []
        place, end = start // blocks_per_id, -(-stop // blocks_per_id)
        while place < end and (run := self._runs.get(ids[place])) is not None and slot in run.depths:
            path.append(run)
            place = run.end // blocks_per_id
        while path:
            run = path.pop()
            self._shorten(run, slot, max(start, run.start))

    def _remove_each(self, slot: int, ids: Ids, start: int, stop: int, blocks_per_id: int) -> None:
        """Remove one copy of each block, last first: a block that was stored twice stays."""
        for number in range(stop - 1, start - 1, -1):
            id = ids[number // blocks_per_id]
            if self.holds(id, slot) and not self._remove_copy(slot, block_of(id, number % blocks_per_id)):
                self._shorten(self._runs[id], slot, number)

    def _remove_copy(self, slot: int, block: Hashable) -> bool:
        """Count a copy less of a block; return whether there was one beyond the first."""
        copies = self._copies.get(slot)
        if copies is None or block not in copies:
            return False
        copies[block] -= 1
        if not copies[block]:
            del copies[block]
        if not copies:
            del self._copies[slot]
        return True

    def _shorten(self, run: Run, slot: int, depth: int) -> None:
        """Leave a rank only the first blocks of a prompt: what is behind them cannot be used without its prefix."""
        held = run.depths.get(slot, run.start)
        if held <= depth:
            return
        if held == run.end and run.children and not self._is_closed:
            self._cut(run, slot)
        if depth > run.start:
            run.depths[slot] = depth
        else:
            del run.depths[slot]
            if run.parent is None:
                self._roots[slot].discard(run)
        if held > run.end - run.blocks_per_id:
            self._trim(run)

    def _cut(self, run: Run, slot: int) -> None:
        """Forget what a rank has behind a run."""
        behind = [child for child in run.children or () if slot in child.depths]
        for each in behind:  # grows while it is read: parents come before their children
            behind += [child for child in each.children or () if slot in child.depths]
        while behind:
            each = behind.pop()
            del each.depths[slot]
            self._trim(each)

    def _trim(self, run: Run) -> None:
        """Delete the ids at the end of a run that nobody has any more, and the run if none remain."""
        if run.end in run.depths.values():
            return
        deepest = max(run.depths.values(), default=run.start)
        num_ids = -(-(deepest - run.start) // run.blocks_per_id)
        for id in run.ids[num_ids:]:
            if id in self._runs:  # unless it was reported with another prefix, too
                del self._runs[id]
        del run.ids[num_ids:]
        if not num_ids:
            run.leave()

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self.clear(slot)
        self.layer_groups.drop(slot)
        self.tiers.drop(slot)

    def clear(self, slot: int) -> None:
        """Forget what a rank has on its GPU."""
        for run in self._roots.pop(slot, ()):
            self._cut(run, slot)
            del run.depths[slot]
            self._trim(run)
        self._copies.pop(slot, None)
        self.layer_groups.clear(slot)
        self.resync.discard(slot)

    def holds(self, id: Hashable, slot: int) -> bool:
        """Return whether a rank has the first block of an id."""
        run = self._runs.get(id)
        return run is not None and slot in run.depths and run.depths[slot] > run.blocks_before(id, slot)


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
            found |= dict.fromkeys(slots_of(mask), min(depth * per_id, num_blocks))
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

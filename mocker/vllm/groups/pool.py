"""The pool from which all groups of layers take blocks: who is free, what is cached, which is evicted next.

Blocks are numbers, as in vLLM, because a table can lose any of them: those outside a window, states that were copied on.

    0                 the null block: an entry of a table that holds nothing
    free queue        0 <-> next to be taken <-> ... <-> taken last <-> 0       a circle through the null block
                          ^ blocks without content       ^ blocks with content join here: least recently used first

    take     from the front; what the block had cached is evicted
    share    a cached block has one more holder, and is not free
    name     a block that is held has content now, which look-ups in its group find
    free     one holder less; without any, it joins the queue

The same content may be in several blocks of a group; look-ups find the oldest. A block at the end of a prompt can have two
names: see `GroupedCache`.
"""

from array import array
from collections.abc import Hashable
from typing import Final

from mocker.chain import BlockChain
from mocker.events import AllBlocksCleared, BlockGroup, GroupRemoved
from mocker.vllm.pool import Pool

NULL: Final = 0


class Content:
    """What the blocks of a group have cached of one sequence: each `size` tokens of its chain."""

    __slots__ = ("_names", "chain", "group", "size")

    def __init__(self, group: BlockGroup, chain: BlockChain, size: int, names: list[Hashable]) -> None:
        """Describe it; `names` are those of its first blocks, filled as they are needed, for all groups with blocks of this size."""
        self.group = group
        self.chain = chain
        self.size = size
        self._names = names

    def name(self, stop: int) -> Hashable:
        """Name the block whose tokens end at `stop`."""
        names, place, size = self._names, stop // self.size - 1, self.size
        while len(names) <= place:
            names.append(self.group.name(self.chain, (len(names) + 1) * size))
        return names[place]


class GroupPool(Pool):
    """Blocks by number, with one free queue and an index of cached content for each group."""

    def __init__(self, num_blocks: int, groups: list[BlockGroup]) -> None:
        """Start with all blocks free; one of them is the null block."""
        self.groups = groups
        super().__init__(num_blocks - 1)
        self._num_free = self._num_blank = num_blocks - 1
        self.cached: list[dict[Hashable, int]] = [{} for _ in groups]
        """The block that a look-up finds, by group and name."""
        self._copies: dict[tuple[int, Hashable], list[int]] = {}  # other blocks of that content, oldest first
        self._contents: list[Content | None] = [None] * num_blocks
        self._stops = array("i", [0]) * num_blocks  # the tokens of its chain up to the end of a block's content
        self._ends: dict[int, tuple[Content, int]] = {}  # a block's second content, and where that ends
        self._num_holders = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_free(self) -> int:
        """See `Pool`."""
        return self._num_free

    @property
    def num_blank(self) -> int:
        """See `Pool`."""
        return self._num_blank

    def queue(self) -> list[Hashable]:
        """See `Pool`."""
        found: list[Hashable] = []
        block = self._next[NULL]
        while block != NULL:
            found.append(block)
            block = self._next[block]
        return found

    def take(self, count: int) -> list[int]:
        """Take blocks from the front of the free queue, and evict what they have cached; the caller checks `num_free`."""
        following, contents, holders = self._next, self._contents, self._num_holders
        block, taken = following[NULL], list[int]()
        for _ in range(count):
            taken.append(block)
            holders[block] = 1
            if contents[block] is None:
                self._num_blank -= 1
            block = following[block]
        following[NULL] = block
        self._previous[block] = NULL
        self._num_free -= count
        self._evict(taken)
        return taken

    def clear(self, block: int) -> bool:
        """Forget what a block has cached; return whether it had any."""
        has_content = self._contents[block] is not None
        if has_content:
            self._evict([block])
        return has_content

    def share(self, block: int) -> None:
        """Let one more sequence hold a cached block."""
        if not self._num_holders[block]:
            before, after = self._previous[block], self._next[block]
            self._next[before], self._previous[after] = after, before
            self._num_free -= 1
        self._num_holders[block] += 1

    def free(self, blocks: list[int]) -> None:
        """Let go of blocks in this order: those with content to the back of the queue, the others to its front."""
        contents, holders = self._contents, self._num_holders
        blank = [block for block in blocks if contents[block] is None]
        if len(blank) < len(blocks):
            for block in blocks:
                if contents[block] is not None:
                    holders[block] -= 1
                    if not holders[block]:
                        self._join_back(block)
        if not blank:
            return
        following, previous = self._next, self._previous
        place, first = NULL, following[NULL]
        for block in blank:  # one sequence held it
            holders[block] = 0
            following[place] = block
            previous[block] = place
            place = block
        following[place], previous[first] = first, place
        self._num_blank += len(blank)
        self._num_free += len(blank)

    def _join_back(self, block: int) -> None:
        last = self._previous[NULL]
        self._next[last] = self._previous[NULL] = block
        self._previous[block], self._next[block] = last, NULL
        self._num_free += 1

    def name(self, blocks: list[int], content: Content, stops: list[int]) -> None:
        """Let look-ups find blocks by their content, each by the last of a chain's tokens before its stop."""
        contents, places = self._contents, self._stops
        for block, stop in zip(blocks, stops, strict=True):
            contents[block], places[block] = content, stop
            self._enter(block, content, stop)

    def name_end(self, block: int, content: Content, stop: int) -> None:
        """Let look-ups find a block by the end of a prompt inside it, beside what else it has cached."""
        if self._contents[block] is None:
            self._contents[block], self._stops[block] = content, stop
        else:
            self._ends[block] = content, stop
        self._enter(block, content, stop)

    def _enter(self, block: int, content: Content, stop: int) -> None:
        """Let look-ups find a block by one of its contents, after the copies that have it already."""
        number, name = content.group.number, content.name(stop)
        cached = self.cached[number]
        if name in cached:
            self._copies.setdefault((number, name), []).append(block)
        else:
            cached[name] = block

    def is_free(self, block: int) -> bool:
        """Whether nobody holds a block."""
        return not self._num_holders[block]

    def names(self, block: int) -> list[Hashable]:
        """Return the names of what a block has cached."""
        return [content.name(stop) for content, stop in self._cached_in(block)]

    def stops(self, block: int) -> list[int]:
        """Return where what a block has cached ends, in tokens of its sequence."""
        return [stop for _, stop in self._cached_in(block)]

    def reset(self) -> bool:
        """See `Pool`."""
        if self._num_free != self.num_blocks:
            return False
        for cached in self.cached:
            cached.clear()
        self._copies.clear()
        self._ends.clear()
        self._contents = [None] * (self.num_blocks + 1)
        self._num_blank = self.num_blocks
        if self.has_listener:
            self.events.append(AllBlocksCleared())
        return True

    def _cached_in(self, block: int) -> list[tuple[Content, int]]:
        content = self._contents[block]
        if content is None:
            return []
        found = [(content, self._stops[block])]
        if block in self._ends:
            found.append(self._ends[block])
        return found

    def _evict(self, blocks: list[int]) -> None:
        """Forget what blocks have cached, one after the other; neighbours in a chain, the last first, leave in one event."""
        contents, stops = self._contents, self._stops
        leaving: Content | None = None  # of an event that may go on with the next block
        start = end = 0
        for block in blocks:
            content = contents[block]
            if content is None:
                continue
            stop = stops[block]
            if leaving is not None and (content is not leaving or stop != start):
                self._removed(leaving, start, end)
                leaving = None
            if leaving is None:
                leaving, end = content, stop
            start = stop - content.size
            self._forget(block, content, stop)
            contents[block] = None
            if self._ends and block in self._ends:
                self._removed(content, start, end)
                leaving = None
                second, stop = self._ends.pop(block)
                self._forget(block, second, stop)
                self._removed(second, stop - second.size, stop)
        if leaving is not None:
            self._removed(leaving, start, end)

    def _removed(self, content: Content, start: int, stop: int) -> None:
        if self.has_listener:
            self.events.append(GroupRemoved(content.chain, content.group, content.size, start, stop))

    def _forget(self, block: int, content: Content, stop: int) -> None:
        """Let look-ups no longer find a block by one of its contents; if they did, they find the next copy now."""
        number, name = content.group.number, content.name(stop)
        cached = self.cached[number]
        copies = self._copies.get((number, name)) if self._copies else None
        if copies is None:
            del cached[name]
            return
        if cached[name] == block:
            cached[name] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[number, name]

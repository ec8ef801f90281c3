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

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

from mocker.chain import BlockChain
from mocker.events import AllBlocksCleared, BlockGroup, GroupRemoved
from mocker.vllm.pool import Pool

NULL: Final = 0


class Content(NamedTuple):
    """What a block has cached: the last `size` of a chain's tokens before `stop`, for layers of a group."""

    group: BlockGroup
    chain: BlockChain
    size: int
    stop: int

    @property
    def name(self) -> Hashable:
        """The name under which it is found."""
        return self.group.name(self.chain, self.stop)


NOTHING: Final[tuple[Content, ...]] = ()


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
        self._contents: list[tuple[Content, ...]] = [NOTHING] * num_blocks
        self._num_holders = [0] * num_blocks
        self._next: list[int] = [*range(1, num_blocks), NULL]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]

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

    def take(self) -> int:
        """Take the block at the front of the free queue, and evict what it has cached; the caller checks `num_free`."""
        block = self._next[NULL]
        self._leave_queue(block)
        if not self.clear(block):
            self._num_blank -= 1
        self._num_holders[block] = 1
        return block

    def clear(self, block: int) -> bool:
        """Forget what a block has cached; return whether it had any."""
        contents = self._contents[block]
        for content in contents:
            self._forget(block, content)
        self._contents[block] = NOTHING
        return bool(contents)

    def share(self, block: int) -> None:
        """Let one more sequence hold a cached block."""
        if not self._num_holders[block]:
            self._leave_queue(block)
        self._num_holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Let go of blocks in this order: those with content to the back of the queue, the others to its front."""
        place = NULL  # the last block that joined at the front
        for block in blocks:
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if self._contents[block]:
                self._join_queue(block, self._previous[NULL])
            else:
                self._num_blank += 1
                self._join_queue(block, place)
                place = block

    def name(self, block: int, content: Content) -> None:
        """Let look-ups find a block by its content."""
        self._contents[block] += (content,)
        group, name = content.group, content.name
        cached = self.cached[group.number]
        if name in cached:
            self._copies.setdefault((group.number, name), []).append(block)
        else:
            cached[name] = block

    def is_free(self, block: int) -> bool:
        """Whether nobody holds a block."""
        return not self._num_holders[block]

    def contents(self, block: int) -> tuple[Content, ...]:
        """Return what a block has cached."""
        return self._contents[block]

    def reset(self) -> bool:
        """See `Pool`."""
        if self._num_free != self.num_blocks:
            return False
        for cached in self.cached:
            cached.clear()
        self._copies.clear()
        self._contents = [NOTHING] * (self.num_blocks + 1)
        self._num_blank = self.num_blocks
        if self.has_listener:
            self.events.append(AllBlocksCleared())
        return True

    def _forget(self, block: int, content: Content) -> None:
        """Evict one content of a block; if look-ups found it here, they find the next copy now."""
        group, name = content.group, content.name
        cached = self.cached[group.number]
        if self.has_listener:
            start = content.stop - content.size
            self.events.append(GroupRemoved(content.chain, group, content.size, start, content.stop))
        copies = self._copies.get((group.number, name))
        if copies is None:
            del cached[name]
            return
        if cached[name] == block:
            cached[name] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[group.number, name]

    def _leave_queue(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._num_free -= 1

    def _join_queue(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._num_free += 1

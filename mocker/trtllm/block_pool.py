"""The KV blocks of one engine: the tree of what is cached, and the list of free blocks.

    take     from the head of the list; what was cached in it, and all that continues it, is forgotten
    store    a held block can be found from now on, by its content and all before it, unless another can already
    claim    a cached block, free or held, gets one more holder
    release  from a request's last block to its first; one without holders goes to the tail of the list, still cached
    give_back  a block that was taken for rejected guesses goes to the head

These are our stand-ins for TensorRT-LLM's KV cache manager, read from its C++ (`kvCacheManager.cpp`, `evictionPolicy.cpp`
of late 2025) or assumed. Whole blocks only: the engine can also reuse the matching head of a block, and has retention
priorities.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice

from mocker.chain import BlockChain
from mocker.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored


class OutOfBlocksError(RuntimeError):
    """More blocks are needed than are free, although the capacity scheduler saw room for them.

    Its count and the cache may differ: it counts blocks of a whole prompt as found of which the last is computed again, and
    blocks in use whose only holder it then pauses.
    """

    def __init__(self, count: int, num_free: int) -> None:
        super().__init__(
            f"{count} KV blocks are needed and {num_free} are free, although TensorRT-LLM's capacity scheduler counted with "
            "them: what it expected in the cache was not there; use more blocks or disable enable_block_reuse"
        )


class BlockPool:
    """Allocates blocks, and finds those that are cached."""

    def __init__(self, num_blocks: int, *, enable_block_reuse: bool) -> None:
        self.num_blocks = num_blocks
        self.enable_block_reuse = enable_block_reuse
        self.has_listener = False
        """Whether `events` is filled."""
        self.events: list[BlockEvent] = []
        self.num_evicted = 0
        """Blocks that have been forgotten so far."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_holders = [0] * num_blocks
        self._found: dict[Hashable, int] = {}  # content -> block
        self._places: dict[int, tuple[BlockChain, int]] = {}  # cached block -> its content, as a block of a chain
        self._parents: dict[int, int] = {}
        self._children: dict[int, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._found)

    def num_cached(self, chain: BlockChain, limit: int) -> int:
        """Count the leading blocks of a chain that are cached, at most `limit`."""
        count, found = 0, self._found
        while count < limit and chain.key(count) in found:
            count += 1
        return count

    def num_in_use(self, chain: BlockChain, count: int) -> int:
        """Count those of the first `count` blocks of a chain, all cached, that somebody holds."""
        found, num_holders = self._found, self._num_holders
        return sum([num_holders[found[chain.key(index)]] > 0 for index in range(count)])

    def num_held_alone(self, blocks: list[int]) -> int:
        """Count those of a request's blocks that nobody else holds."""
        num_holders = self._num_holders
        return sum([num_holders[block] == 1 for block in blocks])

    def claim(self, chain: BlockChain, count: int) -> list[int]:
        """Return the first `count` blocks of a chain, all cached, held once more."""
        blocks = [self._found[chain.key(index)] for index in range(count)]
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free[block]
            self._num_holders[block] += 1
        return blocks

    def take(self, count: int) -> list[int]:
        """Return new blocks.

        Raises:
            OutOfBlocksError: too few are free.
        """
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._places:
                self._leave(block)
                self._forget(block)
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def may_evict(self, count: int) -> bool:
        """Return whether one of the next so many blocks that are taken is cached."""
        return any(block in self._places for block in islice(self._free, count))

    def store(self, chain: BlockChain, blocks: list[int], num_full: int) -> None:
        """Make the first `num_full` blocks of a request findable; one whose content can be found already stays private."""
        if not self.enable_block_reuse:
            return
        parent, start = -1, num_full  # from `start` on, all are new so far
        for index in range(num_full):
            block = self._found.get(chain.key(index), -1)
            if block < 0:
                start = min(start, index)
                block = blocks[index]
                self._enter(block, chain, index, parent)
            elif start < index:
                self._report_stored(chain, start, index)
                start = num_full
            parent = block
        self._report_stored(chain, start, num_full)

    def _report_stored(self, chain: BlockChain, start: int, stop: int) -> None:
        if start < stop and self.has_listener:
            self.events.append(BlockStored(chain, start, stop))

    def release(self, blocks: list[int]) -> None:
        """Give up a request's blocks."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None

    def give_back(self, block: int) -> None:
        """Give up a block that nothing was kept in."""
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all cached blocks, or return False if any block is in use."""
        if len(self._free) != self.num_blocks:
            return False
        for index in (self._found, self._places, self._parents, self._children):
            index.clear()
        if self.has_listener:
            self.events.append(AllBlocksCleared())
        return True

    # The tree

    def _enter(self, block: int, chain: BlockChain, index: int, parent: int) -> None:
        self._found[chain.key(index)] = block
        self._places[block] = (chain, index)
        if parent >= 0:
            self._parents[block] = parent
            self._children.setdefault(parent, {})[block] = None

    def _leave(self, block: int) -> None:
        """Take a block off the list of its parent's children."""
        parent = self._parents.pop(block, -1)
        if parent >= 0:
            del self._children[parent][block]

    def _forget(self, block: int) -> None:
        """Forget what is cached in a block and in all that continue it, however many."""
        rest, places = [block], []
        while rest:
            gone = rest.pop()
            chain, index = self._places.pop(gone)
            places.append((chain, index))
            del self._found[chain.key(index)]
            self._parents.pop(gone, None)
            rest += self._children.pop(gone, {})
        self.num_evicted += len(places)
        if self.has_listener:
            self.events += [BlockRemoved(chain, index, index + 1) for chain, index in reversed(places)]

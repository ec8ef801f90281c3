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

from mocker.chain import BlockChain


class BlockPool:
    """Allocates blocks, and finds those that are cached."""

    def __init__(self, num_blocks: int, *, enable_block_reuse: bool) -> None:
        self.num_blocks = num_blocks
        self.enable_block_reuse = enable_block_reuse
        self.num_evicted = 0
        """Blocks that have been forgotten so far."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_holders = [0] * num_blocks
        self._found: dict[Hashable, int] = {}  # content -> block
        self._keys: dict[int, Hashable] = {}  # block -> content, if it is cached
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
        """Return new blocks; the caller checks `num_free`."""
        assert count <= len(self._free), f"{count} blocks are asked for, and {len(self._free)} are free"
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._keys:
                self._leave(block)
                self._forget(block)
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def store(self, chain: BlockChain, blocks: list[int], num_full: int) -> None:
        """Make the first `num_full` blocks of a request findable; one whose content can be found already stays private."""
        if not self.enable_block_reuse:
            return
        parent = -1
        for index in range(num_full):
            key = chain.key(index)
            known = self._found.get(key, -1)
            if known < 0:
                known = blocks[index]
                self._enter(known, key, parent)
            parent = known

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

    # The tree

    def _enter(self, block: int, key: Hashable, parent: int) -> None:
        self._found[key] = block
        self._keys[block] = key
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
        rest = [block]
        while rest:
            gone = rest.pop()
            del self._found[self._keys.pop(gone)]
            self._parents.pop(gone, None)
            self.num_evicted += 1
            rest += self._children.pop(gone, {})

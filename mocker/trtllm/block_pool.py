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

from foundation.galloping import num_held
from mocker.chain import BlockChain
from mocker.contract import EngineStoppedError
from mocker.events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored


class OutOfBlocksError(EngineStoppedError):
    """More blocks are needed than are free, although the capacity scheduler saw room for them.

    Its count and the cache may differ: it counts blocks of a whole prompt as found of which the last is computed again, and
    blocks in use whose only holder it then pauses. It does not count what requests whose KV is on its way will need.
    """

    def __init__(self, count: int, num_free: int) -> None:
        super().__init__(
            f"{count} KV blocks are needed and {num_free} are free, although TensorRT-LLM's capacity scheduler counted with "
            "them: what it expected in the cache was not there; use more blocks or disable enable_block_reuse"
        )


class Block:
    """A KV block, and its place in the tree if it is cached."""

    __slots__ = ("chain", "child", "index", "key", "num_holders", "others", "parent")

    def __init__(self) -> None:
        self.num_holders = 0
        self.chain: BlockChain | None = None  # it has the content of block `index` of this chain; None: not cached
        self.index = 0
        self.key: Hashable = None
        self.parent: Block | None = None  # whose content precedes its own
        self.child: Block | None = None  # one that continues it
        self.others: dict[Block, None] | None = None  # and the others


class BlockPool:
    """Allocates blocks, and finds those that are cached. What a cached block continues is cached, too."""

    def __init__(self, num_blocks: int, *, enable_block_reuse: bool) -> None:
        self.num_blocks = num_blocks
        self.enable_block_reuse = enable_block_reuse
        self.has_listener = False
        """Whether `events` is filled."""
        self.events: list[BlockEvent] = []
        self.num_evicted = 0
        """Blocks that have been forgotten so far."""
        self._free: OrderedDict[Block, None] = OrderedDict.fromkeys([Block() for _ in range(num_blocks)])
        self._found: dict[Hashable, Block] = {}  # content -> block
        self._gone: BlockChain | None = None  # of which these blocks are evicted, and that is not reported yet
        self._gone_start = self._gone_stop = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._found)

    # What requests find, get and give up

    def num_cached(self, chain: BlockChain, limit: int) -> int:
        """Count the leading blocks of a chain that are cached, at most `limit`."""
        found, ids = self._found, chain.ids
        num_ids = num_held(found, ids, chain.index_of(limit - 1) + 1) if limit > 0 else 0
        if num_ids == 0:
            return 0
        low = chain.first_block(num_ids - 1)  # is cached
        high = min(chain.first_block(num_ids), limit) if num_ids < len(ids) else limit
        while low + 1 < high:
            middle = (low + high) // 2
            if chain.key(middle) in found:
                low = middle
            else:
                high = middle
        return low + 1

    def _cached(self, chain: BlockChain, count: int) -> list[Block]:
        """Return the first `count` blocks of a chain, all cached, the last one first."""
        blocks = []
        block = self._found[chain.key(count - 1)] if count else None
        while block is not None:
            blocks.append(block)
            block = block.parent
        return blocks

    def num_in_use(self, chain: BlockChain, count: int) -> int:
        """Count those of the first `count` blocks of a chain, all cached, that somebody holds."""
        return sum([block.num_holders > 0 for block in self._cached(chain, count)])

    def num_held_alone(self, blocks: list[Block]) -> int:
        """Count those of a request's blocks that nobody else holds."""
        return sum([block.num_holders == 1 for block in blocks])

    def claim(self, chain: BlockChain, count: int) -> list[Block]:
        """Return the first `count` blocks of a chain, all cached, held once more."""
        blocks = self._cached(chain, count)
        blocks.reverse()
        for block in blocks:
            if block.num_holders == 0:
                del self._free[block]
            block.num_holders += 1
        return blocks

    def take(self, count: int) -> list[Block]:
        """Return new blocks.

        Raises:
            OutOfBlocksError: too few are free.
        """
        free = self._free
        if count > len(free):
            raise OutOfBlocksError(count, len(free))
        blocks = []
        for _ in range(count):
            block = free.popitem(last=False)[0]
            if block.chain is not None:
                if block.child is not None or block.others:
                    self._forget_descendants(block)
                self._forget(block)
            block.num_holders = 1
            blocks.append(block)
        self._report_gone()
        return blocks

    def may_evict(self, count: int) -> bool:
        """Return whether one of the next so many blocks that are taken is cached."""
        return any(block.chain is not None for block in islice(self._free, count))

    def store(self, chain: BlockChain, blocks: list[Block], num_full: int) -> None:
        """Make the first `num_full` blocks of a request findable; one whose content can be found already stays private."""
        if not self.enable_block_reuse:
            return
        index = num_full  # those before it can be found, up to the last of its own that is cached
        while index > 0 and blocks[index - 1].chain is None:
            index -= 1
        parent = blocks[index - 1] if index > 0 else None
        start = num_full  # from here on, all are new so far
        for place in range(index, num_full):
            key = chain.key(place)
            block = self._found.get(key)
            if block is None:
                if place < start:
                    start = place
                block = blocks[place]
                self._found[key] = block
                self._enter(block, chain, place, key, parent)
            elif start < place:
                self._report_stored(chain, start, place)
                start = num_full
            parent = block
        self._report_stored(chain, start, num_full)

    def release(self, blocks: list[Block]) -> None:
        """Give up a request's blocks."""
        free = self._free
        for block in reversed(blocks):
            block.num_holders -= 1
            if block.num_holders == 0:
                free[block] = None

    def give_back(self, block: Block) -> None:
        """Give up a block that nothing was kept in."""
        block.num_holders -= 1
        if block.num_holders == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all cached blocks, or return False if any block is in use."""
        if len(self._free) != self.num_blocks:
            return False
        for block in self._found.values():
            block.chain = block.parent = block.child = block.others = None
        self._found.clear()
        if self.has_listener:
            self.events.append(AllBlocksCleared())
        return True

    # The tree

    def _enter(self, block: Block, chain: BlockChain, index: int, key: Hashable, parent: Block | None) -> None:
        block.chain, block.index, block.key, block.parent = chain, index, key, parent
        if parent is None:
            return
        if parent.child is None:
            parent.child = block
        elif parent.others is None:
            parent.others = {block: None}
        else:
            parent.others[block] = None

    def _forget_descendants(self, block: Block) -> None:
        """Forget what is cached in all blocks that continue one, the ends of branches first."""
        branch, rest = [], [block]
        while rest:
            gone = rest.pop()
            branch.append(gone)
            if gone.child is not None:
                rest.append(gone.child)
            if gone.others:
                rest += gone.others
        for gone in reversed(branch[1:]):
            self._forget(gone)

    def _forget(self, block: Block) -> None:
        """Forget what is cached in one block, which no other continues."""
        chain, index, parent = block.chain, block.index, block.parent
        assert chain is not None, "only what is cached can be forgotten"
        if parent is not None:
            if parent.child is block:
                parent.child = None
            elif parent.others is not None:
                del parent.others[block]
        del self._found[block.key]
        self.num_evicted += 1
        block.chain = block.parent = None
        if self.has_listener:
            if self._gone is chain and self._gone_start == index + 1:
                self._gone_start = index
            else:
                self._report_gone()
                self._gone, self._gone_start, self._gone_stop = chain, index, index + 1

    # Events. In which order TensorRT-LLM reports a branch was not read; here its ends come first.

    def _report_stored(self, chain: BlockChain, start: int, stop: int) -> None:
        if start < stop and self.has_listener:
            self.events.append(BlockStored(chain, start, stop))

    def _report_gone(self) -> None:
        if self._gone is not None:
            self.events.append(BlockRemoved(self._gone, self._gone_start, self._gone_stop))
            self._gone = None

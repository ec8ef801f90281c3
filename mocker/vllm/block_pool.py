"""The KV block pool: which blocks are free, which are cached, which is evicted next.

Every block is in one of four regions. Only runs are objects; the rest are counts, because block ids never matter:

    |------------ free: allocated from the left -----------|---------- held by sequences ----------|
    | blank          | queued: runs without a holder, the  | shared: runs with     | private: not   |
    |                | least recently used first           | holders               | cached yet     |
    | `num_blank`    | `_queue`, `num_evictable` blocks    | `BlockRun.holders`         | the rest       |

    allocate     blank, then queued (a run from its tail: evicted) -> private
    store        private -> shared: the sequence's last run grows, or a new one starts
    share        queued or shared -> shared: a cached prefix is used
    release      shared -> the back of the queue, the last run first; private -> blank
    give_back    private -> blank

This is vLLM's one free queue: blocks without a hash only ever join it at the front, hashed ones at the back. A sequence
frees its blocks tail first and a run is evicted from its tail, so a cached block's prefix is always cached too.

The same content may be cached in several runs. The oldest is primary: look-ups find it, by its ids in `_index`. The
others are copies, listed in `_copies`; if a primary run loses blocks, the oldest copy of them becomes primary
(`_promote`).
"""

from collections import OrderedDict
from collections.abc import Hashable

from foundation.galloping import num_held
from mocker.chain import BlockChain
from mocker.events import AllBlocksCleared, BlockRemoved, BlockStored
from mocker.sequence import Sequence
from mocker.vllm.block_runs import UNHELD, BlockRun, BlockWatch, LeftBlocks
from mocker.vllm.pool import Pool


class BlockPool(Pool):
    """Allocates blocks, finds cached prefixes and evicts, at a cost per run rather than per block."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool) -> None:
        super().__init__(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._num_blank = num_blocks
        self.num_evictable = 0
        self.touched: list[BlockWatch] = []
        """Watches whose blocks were reused, until a caller empties the list."""
        self._index: dict[Hashable, BlockRun] = {}  # id (or (id, offset) where a run starts inside one) -> primary run
        self._copies: dict[Hashable, list[BlockRun]] = {}  # id -> other runs with blocks of that id, oldest first
        self._queue: OrderedDict[BlockRun, None] = OrderedDict()
        self._watched: dict[Sequence, BlockWatch] = {}  # without prefix caching, of sequences that are about to leave
        self._left: list[LeftBlocks] = []  # what is on top of the blank blocks, since a watch was among it
        self._runs: dict[Sequence, list[BlockRun]] = {}  # of those that hold any, first to last

    @property
    def num_free(self) -> int:
        """See `Pool`."""
        return self._num_blank + self.num_evictable

    @property
    def num_blank(self) -> int:
        """See `Pool`."""
        return self._num_blank

    def queue(self) -> list[Hashable]:
        """See `Pool`."""
        found: list[Hashable] = [None] * self._num_blank
        for run in self._queue:
            found += [run.chain.key(block) for block in range(run.stop - 1, run.start - 1, -1)]
        return found

    # What the scheduler asks

    def num_cached(self, chain: BlockChain, limit: int) -> int:
        """Count the leading blocks of a chain that are cached, at most `limit`."""
        index, ids = self._index, chain.ids
        num_ids = num_held(index, ids, chain.index_of(limit - 1) + 1) if limit > 0 else 0
        if not num_ids:
            return 0
        end = chain.first_block(num_ids) if num_ids < len(ids) else limit
        run = index[ids[num_ids - 1]]
        while (stop := _common_stop(run, chain)) < end and (following := index.get(chain.key(stop))) is not None:
            run = following
        return min(stop, end, limit)

    def num_unheld(self, chain: BlockChain, num_blocks: int) -> int:
        """Count how many of the first `num_blocks` cached blocks are in the free queue."""
        count = block = 0
        while block < num_blocks:
            run = self._index[chain.key(block)]
            stop = min(run.stop, num_blocks)
            if not run.holders:
                count += stop - block
            block = stop
        return count

    def share(self, sequence: Sequence, num_blocks: int) -> None:
        """Let a sequence share the first `num_blocks` cached blocks of its chain."""
        chain, block = sequence.chain, 0
        runs = self._runs.setdefault(sequence, [])
        while block < num_blocks:
            run = self._index[chain.key(block)]
            if run.stop > num_blocks:
                run = self._split(run, num_blocks)
            if run.holders:
                run.holders[sequence] = None
            else:
                run.holders = {sequence: None}
                self._queue.pop(run, None)
                self.num_evictable -= run.stop - run.start
            run.sealed = True
            runs.append(run)
            if run.watches:
                self._report_taken(run, run.start)
            block = run.stop
        sequence.num_blocks = sequence.num_cached_blocks = num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Allocate blocks from the front of the free queue, and evict their content. The caller checks `num_free`."""
        blank = num_blocks if num_blocks < self._num_blank else self._num_blank
        self._num_blank -= blank
        if self._left:
            self._take_left(blank)
        remaining = num_blocks - blank
        while remaining:
            run = next(iter(self._queue))
            count = run.stop - run.start
            if count <= remaining:
                del self._queue[run]
            else:
                count = remaining
            self.num_evictable -= count
            remaining -= count
            self._forget(run, run.stop - count)

    def give_back(self, num_blocks: int) -> None:
        """Free blocks that were allocated and never filled."""
        self._num_blank += num_blocks
        if self._left:
            self._left.append(LeftBlocks(None, num_blocks))

    def store(self, sequence: Sequence, num_full: int) -> None:
        """Cache a sequence's blocks up to `num_full`, whose tokens are scheduled.

        Blocks from `start` to `present` are already cached in another sequence's run: ours are copies. Later blocks are
        new, and findable only if the run found before them ends there (`_part`).
        """
        chain, start = sequence.chain, sequence.num_cached_blocks
        if num_full <= start or not self.enable_prefix_caching:
            return
        if self.has_listener:
            self.events.append(BlockStored(chain, start, num_full))
        sequence.num_cached_blocks = num_full
        runs = self._runs.setdefault(sequence, [])
        tail = runs[-1] if runs else None
        if chain.key(start) not in self._index and (tail is None or tail.primary):
            present = start
        else:
            present = min(max(self.num_cached(chain, num_full), start), num_full)
        if present > start:
            self._append(sequence, runs, start, present, primary=False)
        if num_full > present:
            if present and not runs[-1].primary:
                self._part(chain, present)
            self._append(sequence, runs, present, num_full, primary=True)

    def release(self, sequence: Sequence, num_blocks: int) -> None:
        """Free the `num_blocks` blocks of a sequence, tail first."""
        for run in reversed(self._runs.pop(sequence, ())):
            if len(run.holders) > 1:
                del run.holders[sequence]
            else:
                run.holders = UNHELD
                self._queue[run] = None
                self.num_evictable += run.stop - run.start
        self._num_blank += num_blocks - sequence.num_cached_blocks
        watch = self._watched.pop(sequence, None) if self._watched else None
        if watch is not None or self._left:
            self._left.append(LeftBlocks(watch, num_blocks))
        sequence.num_blocks = sequence.num_cached_blocks = 0

    def watch(self, sequence: Sequence, watch: BlockWatch) -> None:
        """Let a watch know when blocks that a sequence holds, and leaves next, are reused, until it is off."""
        if not self.enable_prefix_caching:
            self._watched[sequence] = watch
            return
        for run in self._runs.get(sequence, ()):
            run.watches = [*[other for other in run.watches if other.is_on], watch]

    def reset(self) -> bool:
        """See `Pool`."""
        if self.num_free != self.num_blocks:
            return False
        self._index.clear()
        self._copies.clear()
        self._queue.clear()
        self._num_blank, self.num_evictable = self.num_blocks, 0
        if self.has_listener:
            self.events.append(AllBlocksCleared())
        return True

    # Runs

    def _append(self, sequence: Sequence, runs: list[BlockRun], start: int, stop: int, *, primary: bool) -> None:
        """Add blocks to the end of a sequence's runs, growing its last run unless that is sealed."""
        run = runs[-1] if runs else None
        if run is not None and not run.sealed and run.primary is primary:
            run.stop = stop
        else:
            run = BlockRun(sequence.chain, start, stop, primary=primary)
            run.holders = {sequence: None}
            runs.append(run)
        if primary:
            self._enter(run, start, stop)
        else:
            self._enter_copy(run, start, stop)

    def _enter(self, run: BlockRun, start: int, stop: int) -> None:
        """Make blocks of a primary run findable: by the ids that start in them, and by the start of the run."""
        chain = run.chain
        first, end, begins = chain.span(start, stop)
        if start == run.start and not begins:
            self._index[chain.key(start)] = run
        if first + 1 == end:
            self._index[chain.ids[first]] = run
        elif first < end:
            self._index.update(dict.fromkeys(chain.ids[first:end], run))

    def _enter_copy(self, run: BlockRun, start: int, stop: int) -> None:
        chain = run.chain
        for index in range(chain.index_of(start), chain.index_of(stop - 1) + 1):
            copies = self._copies.setdefault(chain.ids[index], [])
            if run not in copies:
                copies.append(run)

    def _leave_copy(self, run: BlockRun, start: int, stop: int) -> None:
        """Remove a copy that lost `start` to `stop` from the lists of ids in which it has no blocks left."""
        chain = run.chain
        for index in range(chain.index_of(start), chain.index_of(stop - 1) + 1):
            is_last = index + 1 == len(chain.ids)
            reaches = chain.first_block(index) < run.stop and (is_last or run.start < chain.first_block(index + 1))
            if reaches and run.start < run.stop:
                continue
            copies = self._copies[chain.ids[index]]
            copies.remove(run)
            if not copies:
                del self._copies[chain.ids[index]]

    def _split(self, run: BlockRun, block: int) -> BlockRun:
        """Cut a run in two at a block and return the front part; the run, and its place in the queue, is the rest.

        If nobody holds the front part, it is in no queue yet: the caller must hold it or queue it.
        """
        front = BlockRun(run.chain, run.start, block, primary=run.primary)
        front.holders = dict(run.holders) if run.holders else UNHELD
        front.sealed = True
        front.watches = run.watches
        run.start = block
        for holder in front.holders:
            runs = self._runs[holder]
            runs.insert(runs.index(run), front)
        if run.primary:
            self._enter(front, front.start, block)
            if run.chain.first_block(run.chain.index_of(block)) != block:
                self._index[run.chain.key(block)] = run
        else:
            self._relist(run, front)
        return front

    def _part(self, chain: BlockChain, block: int) -> None:
        """Make the primary run before a block end there, so that a look-up continues in this chain."""
        run = self._index[chain.key(0)]
        while run.stop < block:
            run = self._index[chain.key(run.stop)]
        run.sealed = True
        if run.stop > block:
            self._split_in_place(run, block)

    def _relist(self, run: BlockRun, front: BlockRun) -> None:
        """List the front part of a copy just before the rest, in every id it has blocks of."""
        chain = run.chain
        for index in range(chain.index_of(front.start), chain.index_of(front.stop - 1) + 1):
            copies = self._copies[chain.ids[index]]
            copies.insert(copies.index(run), front)
        self._leave_copy(run, front.start, front.stop)

    def _forget(self, run: BlockRun, start: int) -> None:
        """Evict the blocks of a run from `start` on."""
        chain, stop = run.chain, run.stop
        if self.has_listener:
            self.events.append(BlockRemoved(chain, start, stop))
        if run.watches:
            self._report_taken(run, start)
        run.stop = start
        if not run.primary:
            self._leave_copy(run, start, stop)
            return
        index = self._index
        first, end, begins = chain.span(start, stop)
        if start == run.start and not begins:
            del index[chain.key(start)]
        for id in chain.ids[first:end]:
            del index[id]
        if self._copies:
            self._promote(chain, start, stop)

    def _report_taken(self, run: BlockRun, start: int) -> None:
        """Report to the watches of a run that its blocks from `start` on are reused."""
        for watch in run.watches:
            self._report(watch, start, run.stop)

    def _report(self, watch: BlockWatch, start: int, stop: int) -> None:
        if watch.is_on:
            if not watch.taken:
                self.touched.append(watch)
            watch.taken.append((start, stop))

    def _take_left(self, num_blocks: int) -> None:
        """Take blank blocks: those that were left last, from the tail; below them are blocks that nobody watches."""
        while num_blocks and self._left:
            left = self._left[-1]
            count = min(num_blocks, left.num_blocks)
            if left.watch is not None:
                self._report(left.watch, left.num_blocks - count, left.num_blocks)
            num_blocks -= count
            left.num_blocks -= count
            if not left.num_blocks:
                self._left.pop()

    def _promote(self, chain: BlockChain, start: int, stop: int) -> None:
        """Make the oldest remaining copies of blocks `start` to `stop` primary, replacing the evicted ones."""
        block = start
        while block < stop:
            run = self._oldest_copy(chain, block)
            if run is None:
                return  # nothing is cached here, so nothing is cached after it
            if run.start < block:
                self._split_in_place(run, block)
            if (shared := self._oldest_until(run, chain, block, stop)) < run.stop:
                run = self._split_in_place(run, shared)
            copy_start, copy_stop = run.start, run.stop
            for index in range(chain.index_of(copy_start), chain.index_of(copy_stop - 1) + 1):
                listed = self._copies[chain.ids[index]]
                listed.remove(run)
                if not listed:
                    del self._copies[chain.ids[index]]
            run.primary = run.sealed = True
            self._enter(run, copy_start, copy_stop)
            block = copy_stop

    def _oldest_copy(self, chain: BlockChain, block: int) -> BlockRun | None:
        """Return the oldest copy of a block that is not primary."""
        for copy in self._copies.get(chain.ids[chain.index_of(block)], ()):
            if copy.start <= block < _common_stop(copy, chain):
                return copy
        return None

    def _oldest_until(self, run: BlockRun, chain: BlockChain, block: int, stop: int) -> int:
        """Return the block before `stop` up to which a run has the oldest copies: of later blocks another may have them."""
        stop = min(stop, _common_stop(run, chain))
        while block < stop:
            index = chain.index_of(block)
            block = chain.first_block(index + 1) if index + 1 < len(chain.ids) else stop
            if block < stop and self._oldest_copy(chain, block) is not run:
                return block
        return stop

    def _split_in_place(self, run: BlockRun, block: int) -> BlockRun:
        """Split a run; if it is free, both parts keep its place in the queue, and the tail is evicted first."""
        front = self._split(run, block)
        if not front.holders:
            place = list(self._queue)
            place.insert(place.index(run) + 1, front)
            self._queue = OrderedDict.fromkeys(place)
        return front


def _common_stop(run: BlockRun, chain: BlockChain) -> int:
    """Return the block up to which a run that shares an id with a chain has the chain's content: outputs differ."""
    return run.stop if run.chain is chain else min(run.stop, run.chain.num_named)


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Count the blocks that hold this many tokens."""
    return -(-num_tokens // block_size)

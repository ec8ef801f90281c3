"""What layers keep, and what follows for their blocks: one class for each kind, with vLLM's rule for each question.

                    keeps                          a hit of n tokens needs            frees
    `Full`          all tokens                     every block before n               nothing
    `Window`        the last w - 1 and the next    those of the last w - 1 tokens     what is outside the window
    `Chunked`       those since a multiple of c    those since that multiple          the chunks before
    `State`         one state, of all tokens       the state at n                     the states before

Groups of layers that keep the same are one kind: a block counts as cached if each of them has it.
"""

from math import ceil
from typing import Final

from mocker.chain import BlockChain
from mocker.vllm.groups.pool import NULL, GroupPool
from mocker.vllm.groups.tables import Table

NO_LIMIT: Final = 1 << 62


class Units:
    """In what the groups of one engine count tokens."""

    def __init__(self, named: int, hashed: int, alignment: int) -> None:
        self.named = named
        """Tokens in a block of a chain: those that have a name. Blocks of groups have at least as many."""
        self.hashed = hashed
        """Tokens that vLLM hashes at once: the greatest common divisor of all groups' blocks."""
        self.alignment = alignment
        """Hits are multiples of this: the least common multiple of all groups' blocks."""


class Kind:
    """Groups of layers that all keep the same, here everything."""

    def __init__(self, groups: list[int], block_size: int, units: Units, *, drops_last: bool = False) -> None:
        """Describe them.

        Args:
            groups: their numbers.
            block_size: tokens in a block of theirs.
            units: those of the engine.
            drops_last: the last block of a hit is computed again, for the hidden states that drafts need.
        """
        self.groups = groups
        self.block_size = block_size
        self.drops_last = drops_last
        self.stores_next = drops_last
        """Whether a block beyond those that a hit can have is cached, because a look-up asks for one more."""
        self.most_blocks = NO_LIMIT
        """More than these are never reserved for a sequence that is to be admitted."""
        self._units = units

    # What is kept

    @property
    def skips(self) -> list[tuple[int, int]]:
        """At which numbers of computed tokens another block is skipped: modulo the first of each pair, the second."""
        return []

    def num_skipped(self, num_tokens: int) -> int:
        """Return how many leading tokens no longer matter once this many are computed."""
        return 0

    def kept(self, start: int, stop: int, marks: list[int]) -> list[int]:
        """Return which of the blocks from `start` to `stop` are cached; `marks` are lengths that later hits may have."""
        return list(range(start, stop))

    # What is found

    def find(self, pool: GroupPool, chain: BlockChain, limit: int, *, drops: bool) -> list[list[int]]:
        """Return the cached blocks with which a sequence can start, for each group, within `limit` tokens."""
        found: list[list[int]] = []
        while len(found) < limit // self.block_size:
            blocks = self._at(pool, chain, len(found))
            if blocks is None:
                break
            found.append(blocks)
        return self._columns(self._aligned(found[:-1] if drops else found))

    def _at(self, pool: GroupPool, chain: BlockChain, place: int) -> list[int] | None:
        """Return the cached blocks at a place of a chain, one for each group; None unless all groups have it."""
        name, blocks = pool.groups[self.groups[0]].name(chain, (place + 1) * self.block_size), []
        for group in self.groups:
            block = pool.cached[group].get(name)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _is_aligned(self, num_blocks: int) -> bool:
        return num_blocks * self.block_size % self._units.alignment == 0

    def _aligned(self, found: list[list[int]]) -> list[list[int]]:
        count = len(found)
        while not self._is_aligned(count):
            count -= 1
        return found[:count]

    def _columns(self, found: list[list[int]]) -> list[list[int]]:
        return [[blocks[column] for blocks in found] for column in range(len(self.groups))]

    # What is needed and taken

    def num_wanted(self, num_tokens: int) -> int:
        """Return how many entries a table has for this many tokens."""
        return ceil(num_tokens / self.block_size)

    def most_held(self, num_wanted: int) -> int:
        """Return the most blocks that a table holds at once while it grows to this many entries."""
        return min(num_wanted, self.most_blocks)

    def num_needed(self, pool: GroupPool, table: Table, hit: list[int], num_wanted: int, done: int) -> int:
        """Return how many free blocks a table takes to grow to `num_wanted` entries.

        Args:
            pool: the blocks.
            table: what the sequence has.
            hit: cached blocks that it is given before.
            num_wanted: see `num_wanted`.
            done: tokens that are computed, the hit included.
        """
        count = len(table.blocks)
        if table.is_settled:
            return max(num_wanted - count, 0)
        skipped = self.num_skipped(done) // self.block_size
        shared = [block for block in hit[max(skipped - count, 0) :] if block != NULL and pool.is_free(block)]
        return max(num_wanted - max(skipped, count + len(hit)), 0) + len(shared)

    def skip(self, pool: GroupPool, table: Table, num_tokens: int) -> None:
        """Free what no longer matters once this many tokens are computed."""
        skipped = self.num_skipped(num_tokens) // self.block_size
        if skipped:
            table.drop(pool, skipped)

    def grow(self, pool: GroupPool, table: Table, num_wanted: int) -> None:
        """Take blocks until a table has this many entries."""
        missing = num_wanted - len(table.blocks)
        if missing > 0:
            table.blocks += pool.take(missing)


class Window(Kind):
    """Groups of layers with a sliding window."""

    def __init__(
        self,
        groups: list[int],
        block_size: int,
        units: Units,
        *,
        window: int,
        retention: int | None,
        most_tokens: int,
        drops_last: bool = False,
    ) -> None:
        """Describe them; see `Kind`.

        Args:
            groups: their numbers.
            block_size: tokens in a block of theirs.
            units: those of the engine.
            window: tokens that a token sees, itself included.
            retention: tokens between the places at which later hits may end; 0: only the marks; None: everywhere.
            most_tokens: of a sequence that are held at once.
            drops_last: see `Kind`.
        """
        super().__init__(groups, block_size, units, drops_last=drops_last)
        self._window = window
        self._retention = retention
        self._run = ceil((window - 1) / block_size)  # blocks in a row that a hit needs
        self.most_blocks = ceil(most_tokens / block_size) + 1  # a window need not begin where a block does

    @property
    def skips(self) -> list[tuple[int, int]]:
        """See `Kind`."""
        return [(self.block_size, (self._window - 1) % self.block_size)]

    def num_skipped(self, num_tokens: int) -> int:
        """See `Kind`."""
        return max(num_tokens - self._window + 1, 0)

    def kept(self, start: int, stop: int, marks: list[int]) -> list[int]:
        """See `Kind`: the blocks that a hit needs, before each place at which one may end."""
        interval = self._units.alignment if self._retention is None else self._retention
        later, places = int(self.drops_last), set[int]()
        if interval and (self._run + later) * self.block_size >= interval:
            return list(range(start, stop))
        ends = range(interval, (stop + self._run) * self.block_size + interval, interval) if interval else ()
        for end in (*ends, *(() if self._retention is None else map(self._round, marks))):
            last = end // self.block_size + later
            places.update(range(max(last - self._run - later, start), min(last, stop)))
        return sorted(places)

    def _round(self, num_tokens: int) -> int:
        return num_tokens // self._units.alignment * self._units.alignment

    def find(self, pool: GroupPool, chain: BlockChain, limit: int, *, drops: bool) -> list[list[int]]:
        """See `Kind`: the last run of blocks that is long enough, else what begins at the first block."""
        run, needed = 0, self._run + int(drops)
        found: list[list[int]] = []  # of the run, the last block first
        place = limit // self.block_size
        while place:
            place -= 1
            blocks = self._at(pool, chain, place)
            if blocks is None:
                run, found = 0, []
                continue
            if not run and not self._is_aligned(place + 1 - int(drops)):
                continue
            run += 1
            found.append(blocks)
            if run >= needed:
                break
        else:
            place, found = 0, self._aligned(found[::-1])[::-1]
        found = [[NULL] * len(self.groups)] * place + found[::-1]
        if drops:
            found = found[:-1]
        return self._columns(self._aligned(found))


class Chunked(Kind):
    """Groups of layers that see their own chunk of the tokens only."""

    def __init__(self, groups: list[int], block_size: int, units: Units, *, chunk: int, most_tokens: int) -> None:
        """Describe them: `chunk` tokens form one, and `most_tokens` of a sequence are held at once; see `Kind`."""
        super().__init__(groups, block_size, units)
        self._chunk = chunk
        self.most_blocks = ceil(most_tokens / block_size)

    @property
    def skips(self) -> list[tuple[int, int]]:
        """See `Kind`."""
        return [(self._chunk, 0)]

    def num_skipped(self, num_tokens: int) -> int:
        """See `Kind`."""
        return num_tokens // self._chunk * self._chunk

    def find(self, pool: GroupPool, chain: BlockChain, limit: int, *, drops: bool) -> list[list[int]]:
        """See `Kind`: what is cached of the chunk in which the limit is; an empty one is a hit for nothing."""
        found = [[NULL] * len(self.groups)] * (self.num_skipped(limit) // self.block_size)
        while len(found) < limit // self.block_size:
            blocks = self._at(pool, chain, len(found))
            if blocks is None:
                break
            found.append(blocks)
        return self._columns(self._aligned(found))


class State(Kind):
    """Groups of layers with a state, of which each block holds one (vLLM's `mamba_cache_mode` align).

    A table has an entry for every block of tokens, but real ones only for the running state and, with drafts, for that
    after each draft:

        0  0  0  s  d1 d2   ->   0  0  0  s  0  0  s' d1 d2      s is freed once s' was computed from it
    """

    def __init__(
        self,
        groups: list[int],
        block_size: int,
        units: Units,
        *,
        num_drafts: int,
        retention: int | None,
        drops_last: bool,
        stores_next: bool,
    ) -> None:
        """Describe them; see `Kind` and `Window`."""
        super().__init__(groups, block_size, units)
        self.num_drafts = num_drafts
        self._retention = retention
        self.stores_next = stores_next  # although no look-up of states asks for one more
        self._before_end = drops_last  # of any kind: prompts are hit a block earlier
        self.in_this_step: set[object] = set()
        """The names of those that a sequence computes in this step, so that no other can start from them yet."""

    @property
    def skips(self) -> list[tuple[int, int]]:
        """See `Kind`."""
        return [(self.block_size, 1)]

    def num_skipped(self, num_tokens: int) -> int:
        """See `Kind`: the running state stays."""
        return max(num_tokens - 1, 0)

    def kept(self, start: int, stop: int, marks: list[int]) -> list[int]:
        """See `Kind`: the states at which a hit may end."""
        if self._retention is None:
            return list(range(start, stop))
        alignment, size = self._units.alignment, self.block_size
        ends = {mark // alignment * alignment for mark in marks}
        return [
            place
            for place in range(start, stop)
            if (place + 1) * size in ends or (self._retention and (place + 1) * size % self._retention == 0)
        ]

    def last_boundary(self, num_prompt: int) -> int:
        """Return the last place at which a prompt's state is cached."""
        if self._before_end:
            return max(num_prompt // self.block_size - 1, 0) * self.block_size
        return (num_prompt - 1) // self.block_size * self.block_size

    def find(self, pool: GroupPool, chain: BlockChain, limit: int, *, drops: bool) -> list[list[int]]:
        """See `Kind`: the last state."""
        for place in range(limit // self.block_size - 1, -1, -1):
            blocks = self._at(pool, chain, place) if self._is_aligned(place + 1) else None
            if blocks is not None:
                return [[NULL] * place + [block] for block in blocks]
        return [[] for _ in self.groups]

    def num_wanted(self, num_tokens: int) -> int:
        """See `Kind`."""
        return super().num_wanted(num_tokens) + self.num_drafts

    def most_held(self, num_wanted: int) -> int:
        """See `Kind`: the running state, that which it is computed from, and those of drafts."""
        return min(num_wanted, 2 + self.num_drafts)

    def num_needed(self, pool: GroupPool, table: Table, hit: list[int], num_wanted: int, done: int) -> int:
        """See `Kind`: below 0, the table has more entries than it will use, which vLLM counts as if they were free."""
        if self.in_this_step and any(name in self.in_this_step for block in hit for name in pool.names(block)):
            return NO_LIMIT
        needed = num_wanted - len(hit) - len(table.blocks)
        if needed > 0:
            needed = min(needed, 1 if table.takes_one else 1 + self.num_drafts)
        return needed + sum([block != NULL and pool.is_free(block) for block in hit])

    def grow(self, pool: GroupPool, table: Table, num_wanted: int) -> None:
        """See `Kind`: null entries up to the running state, whose drafts' blocks move along."""
        blocks, count, drafts = table.blocks, len(table.blocks), self.num_drafts
        if num_wanted <= count:
            return
        running = num_wanted - drafts - 1
        blocks += [NULL] * (running - count)
        if table.takes_one:
            for place in range(count - drafts, min(count, running)):
                blocks.append(blocks[place])
                blocks[place] = NULL
        super().grow(pool, table, num_wanted)
        table.takes_one = True


class WholeState(Kind):
    """Groups of layers with a state that is not cached: its blocks are for the whole sequence (`mamba_cache_mode` none)."""

    def __init__(self, groups: list[int], block_size: int, units: Units, *, num_drafts: int) -> None:
        """Describe them; see `Kind` and `State`."""
        super().__init__(groups, block_size, units)
        self._num_drafts = num_drafts

    def num_wanted(self, num_tokens: int) -> int:
        """See `Kind`."""
        return super().num_wanted(num_tokens) + self._num_drafts

"""The KV cache of an engine whose layers form groups: what a sequence can start from, what it takes, what it leaves.

find         the longest start of its tokens that all groups have
start        it shares those blocks; entries that no layer reads any more are null
skip, grow   what its next tokens do not see is freed, and blocks for them are taken
store        blocks whose tokens are known get names, so that later prompts find them
release      everything is given back, group by group, the tail first
"""

from math import gcd, lcm
from typing import Final

from mocker.chain import BlockChain
from mocker.events import GroupStored
from mocker.sequence import Sequence
from mocker.vllm.groups.alignment import aligned_chunk
from mocker.vllm.groups.kinds import Kind, State, Units
from mocker.vllm.groups.make import described, kinds_of
from mocker.vllm.groups.pool import NULL, GroupPool
from mocker.vllm.groups.settings import GroupSettings
from mocker.vllm.groups.tables import Table, Tables

NO_BLOCKS: Final[list[int]] = []


class Hit:
    """What is cached of a prompt's start."""

    __slots__ = ("blocks", "junction", "length")

    def __init__(self, length: int, blocks: list[list[int]], junction: int) -> None:
        self.length = length
        """Tokens."""
        self.blocks = blocks
        """Of each group, by position; the null block where none is needed. Without any: nothing at all."""
        self.junction = junction
        """Tokens that some groups have, if that is more; else 0."""


NO_HIT: Final = Hit(0, [], 0)
NO_TABLE: Final = Table()  # shared, never changed


class GroupedCache:
    """The blocks of all groups, and who holds which."""

    def __init__(self, settings: GroupSettings, num_blocks: int) -> None:
        """Start empty; one of the blocks is the null block."""
        groups = settings.groups
        sizes = [group.block_size for group in groups]
        self.units = Units(settings.unit, gcd(*sizes), lcm(*sizes))
        self.pool = GroupPool(num_blocks, described(settings, self.units))
        self._settings = settings
        self._kinds = kinds_of(settings, self.units)
        self._kind_of: list[Kind] = [self._kinds[0]] * len(groups)
        for kind in self._kinds:
            for group in kind.groups:
                self._kind_of[group] = kind
        self._states = [kind for kind in self._kinds if isinstance(kind, State)]
        self._drops_last = any(kind.drops_last for kind in self._kinds)
        self._held: dict[Sequence, Tables] = {}

    def begin_step(self) -> None:
        """Forget which states were computed in the step before: now they can be used."""
        for kind in self._states:
            kind.in_this_step.clear()

    # What is cached

    def find(self, sequence: Sequence) -> Hit:
        """Return the longest start of a sequence's tokens that all groups have; at least one token is left to compute."""
        settings = self._settings
        if not settings.enable_prefix_caching:
            return NO_HIT
        chain, pool, limit = sequence.chain, self.pool, sequence.num_known - 1
        most = sequence.num_known // self.units.hashed * self.units.hashed
        found: list[list[int]] = [NO_BLOCKS] * len(self._kind_of)
        reported: dict[Kind, int] = {}
        dropped: set[Kind] = set()  # kinds that the drafter reads, and whose hit was shortened, if they do that
        longest, length, has_several = 0, limit, len(self._kind_of) > 1
        while True:
            before = length
            for kind in self._kinds:
                if type(kind) is Kind and kind in reported:
                    length = min(length, reported[kind])
                    continue
                drops = kind.stores_next and kind not in dropped
                reach = min(length + kind.block_size, most) if drops and kind.drops_last and has_several else length
                columns = kind.find(pool, chain, reach, drops=drops)
                if drops:
                    dropped.add(kind)
                elif len(columns[0]) * kind.block_size < length:
                    dropped.clear()  # a shorter hit lacks the block after it again
                length = reported[kind] = len(columns[0]) * kind.block_size
                longest = max(longest, length)
                for group, blocks in zip(kind.groups, columns, strict=True):
                    found[group] = blocks
            if length >= before or self._is_simple:
                break
        for kind in self._kinds:
            for group in kind.groups:
                found[group] = found[group][: length // kind.block_size]
        junction = longest if longest > length and len(found) > 1 else 0
        return Hit(length, found, junction) if length or junction else NO_HIT

    @property
    def _is_simple(self) -> bool:
        """Whether one look-up of each kind is enough: each is limited by the one before, and the first is trimmed."""
        return len(self._kinds) == 1 or (len(self._kinds) == 2 and type(self._kinds[0]) is Kind)

    # What is taken

    def start(self, sequence: Sequence, hit: Hit) -> None:
        """Give a sequence the cached blocks that it needs; entries outside a window stay null."""
        held = self._held[sequence] = Tables(sequence.chain, sequence.num_prompt, self.pool.groups, self.units.hashed)
        held.junction = hit.junction
        if not any(hit.blocks):
            return
        for kind, table, blocks in zip(self._kind_of, held.tables, hit.blocks, strict=True):
            skipped = kind.num_skipped(hit.length) // kind.block_size
            for place, block in enumerate(blocks):
                if block != NULL and place >= skipped:
                    self.pool.share(block)
                    table.blocks.append(block)
                else:
                    table.blocks.append(NULL)
            table.num_passed = len(table.blocks)
            table.is_settled = True

    def skip(self, sequence: Sequence, num_tokens: int) -> None:
        """Free what no longer matters of a sequence's first tokens, which are computed, and whose steps have ended."""
        for kind, table in zip(self._kind_of, self._held[sequence].tables, strict=True):
            kind.skip(self.pool, table, num_tokens)

    def num_needed_by_all(self, sequence: Sequence, hit: Hit, num_tokens: int) -> int:
        """Count the free blocks that a sequence takes until this many tokens are computed; windows move on meanwhile."""
        needed = 0
        for group, kind in enumerate(self._kind_of):
            wanted = min(kind.num_wanted(num_tokens), kind.most_blocks)
            needed += self._num_needed_of(sequence, group, kind, hit, wanted, hit.length)
        return needed

    def num_needed(self, sequence: Sequence, hit: Hit, computed: int, count: int) -> int:
        """Count the free blocks that a sequence takes for this many tokens after the computed ones, a hit included."""
        needed, tokens = 0, computed + count
        for group, kind in enumerate(self._kind_of):
            needed += self._num_needed_of(sequence, group, kind, hit, self._num_wanted(kind, tokens), computed)
        return needed

    def _num_needed_of(self, sequence: Sequence, group: int, kind: Kind, hit: Hit, wanted: int, computed: int) -> int:
        held = self._held.get(sequence)
        table = NO_TABLE if held is None else held.tables[group]
        return kind.num_needed(self.pool, table, hit.blocks[group] if hit.blocks else NO_BLOCKS, wanted, computed)

    def _num_wanted(self, kind: Kind, num_tokens: int) -> int:
        """Return the entries of a table for this many tokens; attention has slots for a drafter's look-ahead, too."""
        if isinstance(kind, State):
            return kind.num_wanted(num_tokens)
        return kind.num_wanted(min(num_tokens + self._settings.num_lookahead, self._settings.max_model_len))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the blocks that a sequence needs for its first tokens."""
        for kind, table in zip(self._kind_of, self._held[sequence].tables, strict=True):
            kind.grow(self.pool, table, self._num_wanted(kind, num_tokens))

    def most_needed(self, num_tokens: int) -> int:
        """Count the blocks that a sequence of this many tokens holds at most at once."""
        return sum([kind.most_held(self._num_wanted(kind, num_tokens)) for kind in self._kind_of])

    def aligned(self, sequence: Sequence, computed: int, count: int, junction: int) -> int:
        """Return how many of `count` tokens to compute so that states are complete where blocks end."""
        return aligned_chunk(
            computed,
            count,
            prompt=sequence.num_prompt,
            known=sequence.num_known,
            end_of_known=self._end_of_known(sequence),
            junction=junction,
            block_size=self._states[0].block_size,
            most=self._settings.most_at_once,
            drops_last=self._settings.drops_last,
        )

    # What is left for others

    def store(self, sequence: Sequence, num_tokens: int) -> None:
        """Cache the blocks of a sequence's first tokens, which are known, as far as later prompts may start from them."""
        if not self._settings.enable_prefix_caching:
            return
        held = self._held[sequence]
        aligned = num_tokens // self.units.alignment * self.units.alignment
        if not aligned:
            return
        marks = self._marks(held)
        for group, kind in enumerate(self._kind_of):
            reach = self._reach(kind, num_tokens, aligned)
            self._pass(held, group, kind, reach // kind.block_size, marks)
            if isinstance(kind, State):
                self._store_last_state(held, group, kind, reach)
            else:
                self._store_end(held, group, kind, reach)

    def _reach(self, kind: Kind, num_tokens: int, aligned: int) -> int:
        """Return up to where blocks are cached: a look-up that drops the last one asks for one more."""
        if len(self._kind_of) == 1:
            return num_tokens
        return min(num_tokens, aligned + kind.block_size) if kind.stores_next else aligned

    def _end_of_known(self, sequence: Sequence) -> int:
        if sequence.num_known == sequence.num_prompt and (
            coarse := self._last_whole_name(sequence.chain, sequence.num_prompt)
        ):
            return coarse
        return sequence.num_known - 1

    def _last_whole_name(self, chain: BlockChain, num_tokens: int) -> int:
        """Return where the last whole name ends if names are for several blocks, as in traces; else 0.

        A prompt that goes on from this one then shares that much of it, and no more can be told.
        """
        span = chain.blocks_per_id * self.units.named
        return num_tokens // span * span if chain.blocks_per_id > 1 else 0

    def _marks(self, held: Tables) -> list[int]:
        """Return the lengths of hits that are to be expected: a prompt that is sent again, and one that leaves at a junction."""
        prompt, alignment, junction = held.num_prompt, self.units.alignment, [held.junction] if held.junction else []
        if coarse := self._last_whole_name(held.chain, prompt):
            junction.append(coarse)
        if not self._drops_last:
            return [prompt - 1, *junction]
        return [*[max(tokens // alignment * alignment - alignment, 0) for tokens in (prompt - 1, prompt)], *junction]

    def _pass(self, held: Tables, group: int, kind: Kind, stop: int, marks: list[int]) -> None:
        """Cache a group's blocks up to `stop`, except those that nobody is expected to need."""
        table, pool = held.tables[group], self.pool
        start = table.num_passed
        if stop <= start:
            return
        size, content = kind.block_size, held.contents[group]
        kept = [place for place in kind.kept(start, stop, marks) if table.blocks[place] != NULL]
        blocks, ends = [table.blocks[place] for place in kept], [(place + 1) * size for place in kept]
        for block in blocks if table.has_end else ():
            if pool.clear(block):
                table.has_end = False
        pool.name(blocks, content, ends)
        if isinstance(kind, State):
            kind.in_this_step.update([content.name(end) for end in ends])
        table.num_passed = stop
        table.is_settled = True
        if pool.has_listener:
            pool.events.append(GroupStored(held.chain, content.group, size, start * size, stop * size, tuple(ends)))

    def _store_end(self, held: Tables, group: int, kind: Kind, num_tokens: int) -> None:
        """Cache the end of a prompt inside a block, if blocks are larger than those of chains. Look-ups never ask for it."""
        unit, table, pool = self.units.hashed, held.tables[group], self.pool
        if type(kind) is not Kind or kind.block_size == unit or table.has_end:
            return
        end = (held.num_prompt - 1 + int(kind.drops_last)) // unit * unit
        if end % kind.block_size == 0 or end > num_tokens:
            return
        table.has_end = True
        block, content = table.blocks[end // kind.block_size], held.ends[group]
        if end in pool.stops(block):  # after a preemption, a hit beyond the prompt
            return
        pool.name_end(block, content, end)
        if pool.has_listener:
            pool.events.append(GroupStored(held.chain, pool.groups[group], unit, end - unit, end, (end,)))

    def _store_last_state(self, held: Tables, group: int, kind: State, num_tokens: int) -> None:
        """Cache the state at the last block boundary in a prompt while it is the last one, even if no hit is expected there.

        vLLM 0.32 also counts it among the states of this step again.
        """
        if not num_tokens or num_tokens != kind.last_boundary(held.num_prompt):
            return
        size, pool, content = kind.block_size, self.pool, held.contents[group]
        block = held.tables[group].blocks[num_tokens // size - 1]
        if block == NULL:
            return
        is_new = num_tokens not in pool.stops(block)
        if is_new:
            pool.name([block], content, [num_tokens])
            if pool.has_listener:
                pool.events.append(
                    GroupStored(held.chain, content.group, size, num_tokens - size, num_tokens, (num_tokens,))
                )
        if is_new or self._settings.counts_last_state_again:
            kind.in_this_step.add(content.name(num_tokens))

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks of a sequence, each group's last one first."""
        held = self._held.pop(sequence, None)
        if held is None:
            return
        for table in held.tables:
            self.pool.free([block for block in reversed(table.blocks) if block != NULL])

    # Views

    def tables(self, sequence: Sequence) -> list[list[int]]:
        """Return a sequence's tables."""
        held = self._held.get(sequence)
        return [] if held is None else [table.blocks for table in held.tables]

    @property
    def block_sizes(self) -> list[int]:
        """The tokens in a block of each group."""
        return [kind.block_size for kind in self._kind_of]

    def changes(self, lag: int) -> list[tuple[int, int]]:
        """Return at which positions the blocks of a decode change: modulo the first of each pair, the second.

        Steps end, and tokens are known, `lag` iterations later.
        """
        alignment = self.units.alignment
        found = {(alignment, (lag - 1) % alignment)}
        for kind in self._kinds:
            found.add((kind.block_size, 0))
            found.update([(size, (place + lag) % size) for size, place in kind.skips])
        return sorted(found)

    @property
    def has_states(self) -> bool:
        """Whether states are cached."""
        return bool(self._states)

    def num_entries(self, sequence: Sequence) -> int:
        """Count the entries of a sequence's first table."""
        return len(self._held[sequence].tables[0].blocks)

    def junction(self, sequence: Sequence) -> int:
        """Return where a sequence's prompt leaves one that others have shared: see `Tables`."""
        held = self._held.get(sequence)
        return 0 if held is None else held.junction

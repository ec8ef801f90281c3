"""The KV cache of an engine whose layers form groups: what a sequence can start from, what it takes, what it leaves.

find        the longest start of a prompt that all groups have
admits      the gate: a whole sequence fits, one day
allocate    free what is skipped, share the hit, take blocks for the next tokens     -- or not: too few are free
store       name the blocks whose tokens are known, so that later prompts find them
release     give everything back, group by group, the tail first
"""

from math import gcd, lcm
from typing import Final

from mocker.events import BlockGroup, GroupStored
from mocker.sequence import Sequence
from mocker.vllm.groups.kinds import Chunked, Kind, State, Units, WholeState, Window
from mocker.vllm.groups.pool import NULL, Content, GroupPool
from mocker.vllm.groups.settings import GroupSettings
from mocker.vllm.groups.tables import Table, Tables


class Hit:
    """What is cached of a prompt's start."""

    __slots__ = ("blocks", "junction", "length")

    def __init__(self, length: int, blocks: list[list[int]], junction: int) -> None:
        self.length = length
        """Tokens."""
        self.blocks = blocks
        """Of each group, by position; the null block where none is needed."""
        self.junction = junction
        """Tokens that some groups have, if that is more; else 0."""


NO_BLOCKS: Final[list[int]] = []


class GroupedCache:
    """The blocks of all groups, and who holds which."""

    def __init__(self, settings: GroupSettings, num_blocks: int) -> None:
        """Start empty; one of the blocks is the null block."""
        groups = settings.groups
        sizes = [group.block_size for group in groups]
        self.units = Units(settings.block_size, gcd(*sizes), lcm(*sizes))
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
            return Hit(0, [NO_BLOCKS] * len(self._kind_of), 0)
        chain, pool, limit = sequence.chain, self.pool, sequence.num_known - 1
        most = sequence.num_known // self.units.hashed * self.units.hashed
        found: list[list[int]] = [NO_BLOCKS] * len(self._kind_of)
        reported: dict[Kind, int] = {}
        longest, length = 0, limit
        while True:
            before = length
            for kind in self._kinds:
                if type(kind) is Kind and kind in reported:
                    length = min(length, reported[kind])
                    continue
                drops = kind.drops_last and reported.get(kind) != length
                reach = min(length + kind.block_size, most) if drops else length
                columns = kind.find(pool, chain, reach, drops=drops)
                length = reported[kind] = len(columns[0]) * kind.block_size
                longest = max(longest, length)
                for group, blocks in zip(kind.groups, columns, strict=True):
                    found[group] = blocks
            if length >= before or self._is_simple:
                break
        for kind in self._kinds:
            for group in kind.groups:
                found[group] = found[group][: length // kind.block_size]
        return Hit(length, found, longest if longest > length and len(found) > 1 else 0)

    @property
    def _is_simple(self) -> bool:
        """Whether one look-up of each kind is enough: each is limited by the one before, and the first is trimmed."""
        return len(self._kinds) == 1 or (len(self._kinds) == 2 and type(self._kinds[0]) is Kind)

    # What is taken

    def admits(self, sequence: Sequence, hit: Hit, num_tokens: int, reserve: int) -> bool:
        """Return whether a sequence of this many tokens fits beside a reserve, if nobody else took anything."""
        return self._num_needed(sequence, hit, num_tokens, num_tokens, is_gate=True) + reserve <= self.pool.num_free

    def allocate(
        self,
        sequence: Sequence,
        hit: Hit | None,
        done: int,
        count: int,
        *,
        num_in_flight: int,
        reserve: int = 0,
    ) -> bool:
        """Give a sequence the blocks for its next tokens; False, with nothing but skipped blocks freed, if too few are free.

        Args:
            sequence: whose they are.
            hit: what it starts from, if it starts.
            done: tokens that are computed, the hit included.
            count: tokens that come next.
            num_in_flight: computed tokens whose step has not ended, so that it still reads.
            reserve: blocks that must stay free.
        """
        settings, pool = self._settings, self.pool
        held = self._held.get(sequence)
        if held is not None:
            for kind, table in zip(self._kind_of, held.tables, strict=True):
                kind.skip(pool, table, done - num_in_flight)
        start = hit or Hit(0, [NO_BLOCKS] * len(self._kind_of), 0)
        tokens = done + count
        slots = min(tokens + settings.num_lookahead, settings.max_model_len)
        if self._num_needed(sequence, start, tokens, slots, done=done) + reserve > pool.num_free:
            return False
        if held is None:
            held = self._held[sequence] = Tables(sequence.chain, sequence.num_prompt, len(self._kind_of))
        if hit is not None:
            held.junction = hit.junction
            self._share(held, hit, done)
        for kind, table in zip(self._kind_of, held.tables, strict=True):
            kind.grow(pool, table, self._num_wanted(kind, tokens, slots))
        return True

    @staticmethod
    def _num_wanted(kind: Kind, tokens: int, slots: int) -> int:
        return kind.num_wanted(tokens if isinstance(kind, State) else slots)

    def _num_needed(
        self, sequence: Sequence, hit: Hit, tokens: int, slots: int, *, done: int | None = None, is_gate: bool = False
    ) -> int:
        held, needed = self._held.get(sequence), 0
        for group, kind in enumerate(self._kind_of):
            table = Table() if held is None else held.tables[group]
            wanted = self._num_wanted(kind, tokens, slots)
            if is_gate:
                wanted = min(wanted, kind.most_blocks)
            needed += kind.num_needed(self.pool, table, hit.blocks[group], wanted, hit.length if done is None else done)
        return needed

    def _share(self, held: Tables, hit: Hit, done: int) -> None:
        """Give a sequence the cached blocks that it needs; entries outside a window stay null."""
        if not any(hit.blocks):
            return
        for group, kind in enumerate(self._kind_of):
            table, blocks = held.tables[group], hit.blocks[group]
            skipped = kind.num_skipped(done) // kind.block_size
            for place, block in enumerate(blocks):
                if block != NULL and place >= skipped:
                    self.pool.share(block)
                    table.blocks.append(block)
                else:
                    table.blocks.append(NULL)
            table.num_passed = len(table.blocks)
            table.is_settled = True

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
            reach = min(num_tokens, aligned + kind.block_size) if kind.drops_last else aligned
            self._pass(held, group, kind, reach // kind.block_size, marks)
            self._store_end(held, group, kind, reach)
        if self._settings.counts_last_state_again:
            for kind in self._states:
                self._count_again(held, kind, aligned)

    def _marks(self, held: Tables) -> list[int]:
        """Return the lengths of hits that are to be expected: a prompt that is sent again, and one that leaves at a junction."""
        prompt, alignment, junction = held.num_prompt, self.units.alignment, [held.junction] if held.junction else []
        if not self._drops_last:
            return [prompt - 1, *junction]
        return [*[max(tokens // alignment * alignment - alignment, 0) for tokens in (prompt - 1, prompt)], *junction]

    def _pass(self, held: Tables, group: int, kind: Kind, stop: int, marks: list[int]) -> None:
        """Cache a group's blocks up to `stop`, except those that nobody is expected to need."""
        table, pool = held.tables[group], self.pool
        start = table.num_passed
        if stop <= start:
            return
        size, described = kind.block_size, pool.groups[group]
        kept = [place for place in kind.kept(start, stop, marks) if table.blocks[place] != NULL]
        for place in kept:
            if pool.clear(table.blocks[place]):
                table.has_end = False
            content = Content(described, held.chain, size, (place + 1) * size)
            pool.name(table.blocks[place], content)
            if isinstance(kind, State):
                kind.in_this_step.add(content.name)
        table.num_passed = stop
        table.is_settled = True
        if pool.has_listener:
            ends = tuple([(place + 1) * size for place in kept])
            pool.events.append(GroupStored(held.chain, described, size, start * size, stop * size, ends))

    def _store_end(self, held: Tables, group: int, kind: Kind, num_tokens: int) -> None:
        """Cache the end of a prompt inside a block, if blocks are larger than those of chains. Look-ups never ask for it."""
        unit, table, pool = self.units.hashed, held.tables[group], self.pool
        if type(kind) is not Kind or kind.block_size == unit or table.has_end:
            return
        end = (held.num_prompt - 1 + int(kind.drops_last)) // unit * unit
        if end % kind.block_size == 0 or end > num_tokens:
            return
        table.has_end = True
        described = pool.groups[group]
        pool.name(table.blocks[end // kind.block_size], Content(described, held.chain, unit, end))
        if pool.has_listener:
            pool.events.append(GroupStored(held.chain, described, unit, end - unit, end, (end,)))

    def _count_again(self, held: Tables, kind: State, num_tokens: int) -> None:
        """Count the state at the last block boundary in a prompt among those of this step while it is the last stored one."""
        size = kind.block_size
        end = kind.last_boundary(held.num_prompt)
        if num_tokens != end or not end:
            return
        for group in kind.groups:
            blocks = held.tables[group].blocks
            if blocks[end // size - 1] != NULL:
                kind.in_this_step.add(self.pool.groups[group].name(held.chain, end))

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

    def junction(self, sequence: Sequence) -> int:
        """Return where a sequence's prompt leaves one that others have shared: see `Tables`."""
        held = self._held.get(sequence)
        return 0 if held is None else held.junction


def described(settings: GroupSettings, units: Units) -> list[BlockGroup]:
    """Return the groups as events describe them."""
    routed = next((number for number, group in enumerate(settings.groups) if group.layer.is_full), None)
    return [
        BlockGroup(
            number,
            group.layer.kind,
            0 if group.layer.is_chunked else group.layer.window,
            group.block_size,
            units.named,
            number == routed,
        )
        for number, group in enumerate(settings.groups)
    ]


def kinds_of(settings: GroupSettings, units: Units) -> list[Kind]:
    """Return the kinds of a model's groups in the order of look-ups: those that keep everything first."""
    alike: dict[object, list[int]] = {}
    for number, group in enumerate(settings.groups):
        alike.setdefault((group.layer, group.block_size), []).append(number)
    kinds = [_kind(settings, units, numbers) for numbers in alike.values()]
    return sorted(kinds, key=lambda kind: type(kind) is not Kind)


def _kind(settings: GroupSettings, units: Units, numbers: list[int]) -> Kind:
    group = settings.groups[numbers[0]]
    layer, size = group.layer, group.block_size
    drops = settings.drops_last and any(settings.groups[number].drops_last for number in numbers)
    if layer.is_full:
        return Kind(numbers, size, units, drops_last=drops)
    if not layer.token and settings.enable_prefix_caching:
        return State(
            numbers,
            size,
            units,
            num_drafts=settings.num_drafts,
            retention=settings.retention_interval,
            drops_last=settings.drops_last,
        )
    if not layer.token:
        return WholeState(numbers, size, units, num_drafts=settings.num_drafts)
    most = min(layer.window - int(not layer.is_chunked) + settings.num_in_flight, settings.max_model_len)
    if layer.is_chunked:
        return Chunked(numbers, size, units, chunk=layer.window, most_tokens=most)
    return Window(
        numbers,
        size,
        units,
        window=layer.window,
        retention=settings.retention_interval,
        most_tokens=most,
        drops_last=drops,
    )


def aligned_chunk(
    start: int, count: int, *, prompt: int, known: int, junction: int, block_size: int, most: int, drops_last: bool
) -> int:
    """Return how many of `count` tokens to compute so that states are computed where blocks end.

    Args:
        start: tokens that are computed.
        count: tokens that the budget allows.
        prompt: tokens of the prompt.
        known: tokens that are known.
        junction: where the prompt leaves another one's; 0: nowhere.
        block_size: tokens in a block.
        most: tokens that one step may compute of a sequence.
        drops_last: whether the last block of a hit is computed again.
    """
    stop, end = max(prompt, known - 1), start + count
    if start >= stop:
        return count
    cut = end // block_size * block_size
    if end < stop and (cut > start or block_size <= most):
        end = cut
    last = known // block_size * block_size - block_size if drops_last else (known - 1) // block_size * block_size
    ends = [last]
    if start % block_size:
        ends.append(-(-start // block_size) * block_size)
    if start < junction < end:
        ends.append(start + (junction - start) // block_size * block_size)
    return min([end, *[each for each in ends if start < each < end]]) - start

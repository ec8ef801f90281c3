"""What ranks hold for layers that keep only a part of a prompt: how much less than its cached start can be used.

Layers with full attention need every block before a hit's end; those blocks are in the prefix index. Others keep less, and
a rank that lacks what they need starts earlier (see `mocker/vllm/groups` for what engines keep):

    blocks of a prompt     0 1 2 3 4 5 6 7
    full attention         # # # # # # # .      7, from the prefix index
    window of two blocks   . . # # # . # .      a hit needs the two blocks before its end: 5
    state                  . . # . . # . .      and the state at its end: 3

Layers of one kind can be several groups, each with blocks of its own: all of them must have a block.
"""

from collections.abc import Hashable, Iterable
from math import lcm

from serving.router.blocks import PromptBlocks, block_of
from serving.router.events import LayerGroup


class _Kind:
    """The groups of a rank that keep the same."""

    __slots__ = ("everyone", "group", "holders")

    def __init__(self, group: LayerGroup) -> None:
        self.group = group
        self.everyone = 0  # the mask of all these groups
        self.holders: dict[Hashable, int] = {}  # block -> the groups that have it

    def longest(self, blocks: PromptBlocks, num_tokens: int, alignment: int) -> int:
        """Return with how many leading tokens of a prompt these layers can start, at most the given number."""
        unit, size = self.group.unit, self.group.block_size
        ids, per_id, everyone, holders = blocks.ids, blocks.blocks_per_id, self.everyone, self.holders
        while num_tokens > 0:
            end, first = num_tokens, self.group.first_needed(num_tokens)
            while end > first:
                block = -(-end // unit) - 1
                if holders.get(block_of(ids[block // per_id], block % per_id)) != everyone:
                    break
                end -= size
            if end <= first:
                return num_tokens
            num_tokens = (end - size) // alignment * alignment
        return 0


class _Rank:
    """What a rank has, kind by kind."""

    __slots__ = ("copies", "groups", "kinds")

    def __init__(self) -> None:
        self.groups: dict[int, LayerGroup] = {}  # by number; without one, it describes a kind
        self.kinds: dict[LayerGroup, _Kind] = {}
        self.copies: dict[tuple[int, Hashable], int] = {}  # of a group's block, beyond the first

    def describe(self, number: int, described: LayerGroup) -> None:
        """Take a group to be as described; what was said of it before, or of groups in other units, does not hold."""
        for other, before in list(self.groups.items()):
            if other == number or before.unit != described.unit:
                self._forget(other, before)
        self.groups[number] = described
        self.kinds.setdefault(described, _Kind(described)).everyone |= 1 << number

    def _forget(self, number: int, described: LayerGroup) -> None:
        kind = self.kinds[described]
        kind.everyone &= ~(1 << number)
        kind.holders = {name: left for name, held in kind.holders.items() if (left := held & kind.everyone)}
        self.copies = {key: count for key, count in self.copies.items() if key[0] != number}
        del self.groups[number]
        if not kind.everyone:
            del self.kinds[described]


class KnownLayerGroups:
    """The blocks of such layers, from the ranks' KV events. Full attention's are in the prefix index."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    @property
    def slots(self) -> Iterable[int]:
        """The ranks with such layers."""
        return self._ranks

    def store(self, slot: int, group: LayerGroup, names: Iterable[Hashable]) -> None:
        """Enter blocks of a rank, each named by that of the router's blocks in which it ends."""
        rank, number, described = self._ranks.setdefault(slot, _Rank()), group.number, group._replace(number=0)
        if rank.groups.get(number) != described:
            rank.describe(number, described)
        bit, holders, copies = 1 << number, rank.kinds[described].holders, rank.copies
        for name in names:
            held = holders.get(name, 0)
            if held & bit:
                copies[number, name] = copies.get((number, name), 0) + 1
            else:
                holders[name] = held | bit

    def remove(self, slot: int, number: int, names: Iterable[Hashable]) -> None:
        """Remove blocks of a rank's group; unknown ones are ignored."""
        rank = self._ranks.get(slot)
        if rank is None or number not in rank.groups:
            return
        bit, holders, copies = 1 << number, rank.kinds[rank.groups[number]].holders, rank.copies
        for name in names:
            if copies and (more := copies.pop((number, name), 0)):
                if more > 1:
                    copies[number, name] = more - 1
                continue
            left = holders.get(name, 0) & ~bit
            if left:
                holders[name] = left
            else:
                holders.pop(name, None)

    def clear(self, slot: int) -> None:
        """Forget what a rank has, but not which layers."""
        rank = self._ranks.get(slot)
        if rank is not None:
            rank.copies.clear()
            for kind in rank.kinds.values():
                kind.holders.clear()

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self._ranks.pop(slot, None)

    def longest(self, slot: int, blocks: PromptBlocks, num_blocks: int) -> int:
        """Return with how many of a prompt's leading blocks a rank can start, of those that full attention has there."""
        kinds = list(self._ranks[slot].kinds.values())
        alignment, unit = lcm(*[kind.group.block_size for kind in kinds]), kinds[0].group.unit
        most = min((num_blocks + 1) * unit - 1, blocks.num_blocks * unit)  # a hit may end inside a block
        longest = most // alignment * alignment
        while longest:
            before = longest
            for kind in kinds:
                longest = kind.longest(blocks, longest, alignment)
            if longest == before:
                break
        return longest // unit

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


class KnownLayerGroups:
    """The blocks of such layers, from the ranks' KV events. Full attention's are in the prefix index."""

    def __init__(self) -> None:
        self._kinds: dict[int, dict[LayerGroup, _Kind]] = {}  # slot -> what describes a kind -> that kind
        self._copies: dict[int, dict[tuple[int, Hashable], int]] = {}  # slot -> group and block -> beyond the first

    @property
    def slots(self) -> Iterable[int]:
        """The ranks with such layers."""
        return self._kinds

    def store(self, slot: int, group: LayerGroup, names: Iterable[Hashable]) -> None:
        """Enter blocks of a rank, each named by that of the router's blocks in which it ends."""
        kinds, described = self._kinds.setdefault(slot, {}), group._replace(number=0)
        kind = kinds.get(described)
        if kind is None:
            kind = kinds[described] = _Kind(described)
        bit, holders = 1 << group.number, kind.holders
        kind.everyone |= bit
        for name in names:
            held = holders.get(name, 0)
            if held & bit:
                copies = self._copies.setdefault(slot, {})
                copies[group.number, name] = copies.get((group.number, name), 0) + 1
            else:
                holders[name] = held | bit

    def remove(self, slot: int, number: int, names: Iterable[Hashable]) -> None:
        """Remove blocks of a rank's group; unknown ones are ignored."""
        bit, copies = 1 << number, self._copies.get(slot)
        kind = next((kind for kind in self._kinds.get(slot, {}).values() if kind.everyone & bit), None)
        if kind is None:
            return
        for name in names:
            if copies and (more := copies.pop((number, name), 0)):
                if more > 1:
                    copies[number, name] = more - 1
                continue
            left = kind.holders.get(name, 0) & ~bit
            if left:
                kind.holders[name] = left
            else:
                kind.holders.pop(name, None)

    def clear(self, slot: int) -> None:
        """Forget what a rank has, but not which layers."""
        self._copies.pop(slot, None)
        for kind in self._kinds.get(slot, {}).values():
            kind.holders.clear()

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self._copies.pop(slot, None)
        self._kinds.pop(slot, None)

    def longest(self, slot: int, blocks: PromptBlocks, num_blocks: int) -> int:
        """Return with how many of a prompt's leading blocks a rank can start, of those that full attention has there."""
        kinds = list(self._kinds[slot].values())
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

"""A run: consecutive ids of prompts between two branches, with how much of it each rank has."""

from collections.abc import Hashable

from serving.router.blocks import Ids


class Run:
    """A node of the tree of prompts. A rank that has a block has all blocks before it, so one number says what it has."""

    __slots__ = ("blocks_per_id", "children", "depths", "ids", "parent", "start")

    def __init__(self, start: int, parent: "Run | None", ids: list[Hashable], blocks_per_id: int) -> None:
        self.start = start
        """Blocks of a prompt before the run."""
        self.parent = parent
        self.ids = ids
        self.blocks_per_id = blocks_per_id
        self.depths: dict[int, int] = {}
        """Slot of a rank -> leading blocks of a prompt that it has, if any of them are in the run."""
        self.children: dict[Run, None] | None = None
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[self] = None

    @property
    def end(self) -> int:
        """Blocks of a prompt up to the end of the run."""
        return self.start + len(self.ids) * self.blocks_per_id

    def leave(self) -> None:
        """Leave the tree."""
        if self.parent is not None and self.parent.children is not None:
            del self.parent.children[self]

    def num_alike(self, at: int, ids: Ids, place: int, stop: int) -> int:
        """Count the ids from index `at` on that a prompt has, too, from `place` on; a common id means a common start."""
        own = self.ids
        most = min(len(own) - at, stop - place)
        if most <= 0 or at < 0 or own[at] != ids[place]:
            return 0
        if own[at + most - 1] == ids[place + most - 1]:
            return most
        low, high = 1, most - 1  # at least `low` are alike, and at most `high`
        while low < high:
            middle = (low + high + 1) // 2
            if own[at + middle - 1] == ids[place + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def blocks_before(self, id: Hashable, slot: int) -> int:
        """Count the blocks of a prompt before an id of the run, which is most often the last that the rank has."""
        last = (self.depths.get(slot, self.start) - self.start - 1) // self.blocks_per_id
        place = last if last >= 0 and self.ids[last] == id else self.ids.index(id)
        return self.start + place * self.blocks_per_id

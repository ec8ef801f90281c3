"""The names of a sequence's blocks, in order, without a name for each one."""

from collections.abc import Hashable
from collections.abc import Sequence as Sequence_


class BlockChain:
    """The content of every full block a sequence may ever hold.

    `ids[i]` names blocks `i * blocks_per_id` up to `(i + 1) * blocks_per_id`, cut at `num_named`. Ids are
    chained: equal ids at one index mean equal content there and everywhere before. Blocks from
    `num_named` on are private to this sequence (output that nobody can request again) and have one private id.
    """

    __slots__ = ("blocks_per_id", "ids", "num_named", "payload")

    def __init__(self, ids: Sequence_[Hashable], num_named: int | None = None, *, blocks_per_id: int = 1) -> None:
        """Name `num_named` blocks (default: all that the ids cover) by `ids`.

        Raises:
            ValueError: the ids cover fewer blocks than `num_named`.
        """
        if num_named is None:
            num_named = len(ids) * blocks_per_id
        needed = -(-num_named // blocks_per_id)
        if needed > len(ids):
            raise ValueError(f"{len(ids)} ids of {blocks_per_id} blocks cannot name {num_named} blocks")
        self.ids: tuple[Hashable, ...] = (*ids[:needed], object())
        self.num_named = num_named
        self.payload: object = None
        """For the caller's use, as long as any of the blocks is held or cached."""
        self.blocks_per_id = blocks_per_id

    def index_of(self, block: int) -> int:
        """Return the position in `ids` of the id that covers a block."""
        return block // self.blocks_per_id if block < self.num_named else len(self.ids) - 1

    def first_block(self, index: int) -> int:
        """Return the first block that `ids[index]` covers."""
        return index * self.blocks_per_id if index < len(self.ids) - 1 else self.num_named

    def span(self, start: int, stop: int) -> tuple[int, int, bool]:
        """Return which ids begin in blocks `start` to `stop`.

        Returns:
            The index of the first such id, the index after the last one, and whether an id begins at `start`.
        """
        per_id, num_named, private = self.blocks_per_id, self.num_named, len(self.ids) - 1
        if start < num_named:
            first, inside = divmod(start, per_id)
            is_begun = inside > 0
        else:
            first, is_begun = private, start > num_named
        end = (stop - 1) // per_id if stop <= num_named else private
        return first + is_begun, end + 1, not is_begun

    def key(self, block: int) -> Hashable:
        """Return a name for one block: its id, with an offset unless it is the first of that id."""
        if block < self.num_named:
            index, offset = divmod(block, self.blocks_per_id)
        else:
            index, offset = len(self.ids) - 1, block - self.num_named
        return (self.ids[index], offset) if offset else self.ids[index]

"""What a sequence holds: a table of blocks for each group of layers."""

from collections.abc import Hashable

from mocker.chain import BlockChain
from mocker.events import BlockGroup
from mocker.vllm.groups.pool import NULL, Content, GroupPool


class Table:
    """A sequence's blocks of one group, by position; the null block where nothing is kept."""

    __slots__ = ("_num_dropped", "blocks", "has_end", "is_settled", "num_passed", "takes_one")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_passed = 0
        """Blocks from the start that were cached, or left out for good."""
        self.is_settled = False
        """Whether it was given cached blocks, or has cached some: from then on only its length counts."""
        self.has_end = False
        """Whether the end of the prompt, which is inside a block, was cached."""
        self.takes_one = False
        """Of states: whether it has its blocks for drafts, so that at most one more is taken."""
        self._num_dropped = 0

    def drop(self, pool: GroupPool, num_skipped: int) -> None:
        """Free the blocks before a place, the last one first."""
        stop = min(num_skipped, len(self.blocks))
        if stop <= self._num_dropped:
            return
        gone = [block for block in reversed(self.blocks[self._num_dropped : stop]) if block != NULL]
        self.blocks[self._num_dropped : stop] = [NULL] * (stop - self._num_dropped)
        self._num_dropped = stop
        pool.free(gone)


class Tables:
    """A sequence's tables, and where its prompt leaves one that others have shared."""

    __slots__ = ("chain", "contents", "ends", "junction", "num_prompt", "tables")

    def __init__(self, chain: BlockChain, num_prompt: int, groups: list[BlockGroup], unit: int) -> None:
        """Start empty; `unit` is the tokens of a block that is cached for the end of a prompt inside a larger one."""
        names = {size: list[Hashable]() for size in (unit, *[group.block_size for group in groups])}
        self.chain = chain
        self.num_prompt = num_prompt
        self.junction = 0
        """Tokens that some groups had cached, but not all of them; 0: none beyond the hit."""
        self.contents = [Content(group, chain, group.block_size, names[group.block_size]) for group in groups]
        """What the blocks of each group have cached once they are."""
        self.ends = [Content(group, chain, unit, names[unit]) for group in groups]
        """The same for ends inside blocks."""
        self.tables = [Table() for _ in groups]

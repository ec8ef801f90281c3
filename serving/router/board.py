"""The books of many ranks side by side: what is a number in `RankBooks` is an array here, so that a mode scores all at once.

    slot    books                            `Columns`
    0       n  Q  A ...
    3       n  Q  A ...               ->     num_requests [n, n, n]    prefill_tokens [Q, Q, Q]    ...
    4       n  Q  A ...

Only ranks that share something with a prompt are asked one by one for how much.
"""

from array import array
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from serving.router.blocks import PromptBlocks
from serving.router.books import RankBooks
from serving.router.order import Order, StandingOf

MANY_RANKS = 32 if __file__.endswith(".py") else 128
"""From this many ranks on, arrays are faster than one rank after another, which compiled code does faster."""

FEW_RANKS = 8 if __file__.endswith(".py") else 24
"""From this many ranks on, an order is faster than one rank after another, if the mode has one."""

Column = Any
"""An array with a number for each rank; 0 stands for an array of zeros."""


class Board:
    """The books of all ranks of a router that has many. The router reports each change."""

    def __init__(self, books: Mapping[int, RankBooks], standing: StandingOf | None = None, block_size: int = 1) -> None:
        """Copy the books; with a mode's standing, keep the ranks in order, too."""
        self.slots = sorted(books)
        self.books = [books[slot] for slot in self.slots]
        self.places = {slot: place for place, slot in enumerate(self.slots)}
        self.order = None if standing is None else Order(standing, block_size, self.books)
        self._numbers = [array("q", bytes(8 * len(books))) for _ in range(6)]
        self._holders: dict[Hashable, dict[int, int]] = {}  # first block of prompts -> slot -> requests in flight there
        self._whole = Columns(self, [_array(numbers) for numbers in self._numbers])
        self._changed = set(range(len(self.books)))  # places whose books are to be copied

    def note(self, slot: int) -> None:
        """Note that the books of a rank have changed."""
        place = self.places[slot]
        self._changed.add(place)
        if self.order is not None:
            self.order.note(place, self.books[place])

    def refresh(self) -> None:
        """Copy the books that have changed since the last time into the arrays."""
        requests, prefill, prompt, blocks, decoding, context = self._numbers
        for place in self._changed:
            book = self.books[place]
            requests[place], prefill[place], prompt[place] = book.num_requests, book.prefill_tokens, book.prompt_tokens
            blocks[place], decoding[place], context[place] = book.decode_blocks, book.num_decoding, book.context_tokens
        self._changed.clear()

    def add(self, slot: int, blocks: PromptBlocks) -> None:
        """Note a request that was booked."""
        if blocks.num_blocks:
            holders = self._holders.setdefault(blocks.ids[0], {})
            holders[slot] = holders.get(slot, 0) + 1
        self.note(slot)

    def remove(self, slot: int, blocks: PromptBlocks) -> None:
        """Note a request that was released."""
        if blocks.num_blocks:
            holders = self._holders[first := blocks.ids[0]]
            holders[slot] -= 1
            if not holders[slot]:
                del holders[slot]
                if not holders:
                    del self._holders[first]
        self.note(slot)

    def columns(self, slots: list[int]) -> "Columns":
        """Return the books of some ranks, in order of slot; they are not `refresh`ed yet if these are all."""
        if len(slots) == len(self.slots):
            return self._whole
        self.refresh()
        return self._whole.at([self.places[slot] for slot in slots])

    def holders(self, blocks: PromptBlocks) -> Collection[int]:
        """Return the ranks where requests in flight have the first block of a prompt."""
        return self._holders.get(blocks.ids[0], ()) if blocks.num_blocks else ()

    def active_blocks(self, blocks: PromptBlocks) -> dict[int, int]:
        """Return how many leading blocks of a prompt requests in flight hold, for each rank where any do."""
        found, books, places, last = dict[int, int](), self.books, self.places, 0
        for slot in self.holders(blocks):  # most hold the same common beginning
            found[slot] = last = books[places[slot]].num_active_blocks(blocks, last)
        return found

    def equal_requests(self, blocks: PromptBlocks, prompt_tokens: int) -> dict[int, int]:
        """Return how many requests in flight have the same prompt, for each rank where any might."""
        return {slot: self.books[self.places[slot]].num_equal(blocks, prompt_tokens) for slot in self.holders(blocks)}

    def spread(self, values: Mapping[int, int]) -> Column:
        """Return a column with these values, by slot, and zeros."""
        if not values:
            return 0
        numbers = array("q", bytes(8 * len(self.slots)))
        places = self.places
        for slot, value in values.items():
            if slot in places:
                numbers[places[slot]] = value
        return _array(numbers)


class Columns:
    """The books of ranks, as far as formulas read them. The arrays change with the books."""

    __slots__ = (
        "_rows",
        "board",
        "books",
        "context_tokens",
        "decode_blocks",
        "num_decoding",
        "num_requests",
        "prefill_tokens",
        "prompt_tokens",
    )

    def __init__(self, board: Board, columns: list[Column], rows: list[int] | None = None) -> None:
        self.books = board.books if rows is None else [board.books[row] for row in rows]
        self.board = board
        self._rows = rows
        self.num_requests: Column
        self.prefill_tokens: Column
        self.prompt_tokens: Column
        self.decode_blocks: Column
        self.num_decoding: Column
        self.context_tokens: Column
        self.num_requests, self.prefill_tokens, self.prompt_tokens = columns[:3]
        self.decode_blocks, self.num_decoding, self.context_tokens = columns[3:]

    @property
    def is_whole(self) -> bool:
        """Whether no rank is left out."""
        return self._rows is None

    def at(self, rows: list[int]) -> "Columns":
        """Return the books of the ranks in some rows."""
        columns = (
            self.num_requests, self.prefill_tokens, self.prompt_tokens,
            self.decode_blocks, self.num_decoding, self.context_tokens,
        )  # fmt: skip
        return Columns(self.board, [column[rows] for column in columns], rows)

    def spread(self, values: Mapping[int, int]) -> Column:
        """Return a column with these values, by slot, and zeros."""
        column = self.board.spread(values)
        return column if self._rows is None or not values else column[self._rows]

    def num_active_blocks(self, blocks: PromptBlocks) -> Column:
        """Count the leading blocks of a prompt that requests in flight hold."""
        return self.spread(self.board.active_blocks(blocks))

    def num_equal(self, blocks: PromptBlocks, prompt_tokens: int) -> Column:
        """Count the requests in flight that have the same prompt."""
        return self.spread(self.board.equal_requests(blocks, prompt_tokens))


def _array(numbers: "array[Any]") -> Column:
    """Return an array with the same memory."""
    import numpy as np

    return np.frombuffer(numbers, dtype=numbers.typecode)

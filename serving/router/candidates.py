"""What a policy sees when it scores: the request, and each rank's books, prefix overlap and state."""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from serving.router.blocks import PromptBlocks
from serving.router.board import Columns
from serving.router.books import RankBooks
from serving.router.tiers import EVERYTHING, NOTHING, BeyondGpu, PerTier


class Prompt(NamedTuple):
    """What routing needs of a request: its length, its full blocks, and its session and LoRA adapter if it has one."""

    num_tokens: int
    blocks: PromptBlocks
    session: Hashable | None = None
    adapter: str = ""

    def has_tail(self, block_size: int) -> bool:
        """Return whether tokens are left after its full blocks."""
        return self.num_tokens > self.blocks.num_blocks * block_size

    def savable_blocks(self, block_size: int) -> PromptBlocks:
        """Return the blocks that a cache can save: an engine always computes the last token, and so its block."""
        ids, num_blocks, per_id = self.blocks
        return PromptBlocks(ids, min(num_blocks, max(self.num_tokens - 1, 0) // block_size), per_id)


class RankState(NamedTuple):
    """What a rank itself reports, as opposed to what the router remembers."""

    kv_usage: float = 0.0
    """Share of its KV blocks in use."""
    num_waiting: int = 0
    """Requests in its queue."""


NO_STATE = RankState()


class Cached(NamedTuple):
    """The leading blocks of a prompt that a rank need not compute: numbers, or columns of them."""

    on_gpu: Any
    matched: Any
    """m"""
    beyond_gpu: BeyondGpu | None = None
    """Those that it can fetch after the ones on its GPU; None if no rank can fetch any."""


Books = RankBooks | Columns
"""What a formula reads: the books of one rank, or of many at once."""

Cost = Any
"""A number, or a column of them."""

UNCACHED = Cached(0, 0)

MOST_NEAR: Final = 24
"""More ranks that have something of a prompt are better scored with all others, in arrays."""


class Candidates:
    """The ranks to choose from, in order of slot, and the prompt. Each list has an entry for each rank.

    In the formulas of the policies, per rank: L prompt tokens, B block size, R = ceil(L / B), m matched blocks (blocks
    beyond the GPU have the weight of their tier), miss = L - m B, Q prefill tokens sent there and not computed yet, A
    blocks of requests in flight, a those of them that this prompt shares, n requests in flight, d requests decoding, q
    requests waiting, u KV usage, C context tokens of the decoding requests, K prompt tokens of all in flight. For modes
    that share in flight, m counts the blocks that requests in flight share too, and never the prompt's last token.
    """

    __slots__ = (
        "_beyond",
        "_books",
        "_columns",
        "_on_gpu",
        "_states",
        "_weights",
        "block_size",
        "now",
        "num_held_blocks",
        "prompt",
        "slots",
    )

    def __init__(
        self,
        slots: list[int],
        books: list[RankBooks] | Columns,
        on_gpu: Mapping[int, int],
        prompt: Prompt,
        block_size: int,
        *,
        now: float = 0.0,
        states: Mapping[int, RankState] | None = None,
        beyond_gpu: Mapping[int, BeyondGpu] | None = None,
        weights: PerTier = EVERYTHING,
    ) -> None:
        """Gather what is known; what is given by slot may lack those with nothing to say.

        Args:
            slots: the ranks.
            books: their books, in the same order.
            on_gpu: leading blocks of the prompt on the GPU of each.
            prompt: the request's.
            block_size: tokens in a block.
            now: the time (s).
            states: what each reports.
            beyond_gpu: the blocks that each can fetch after those on its GPU; None if none can fetch any.
            weights: what such a block counts for in m.
        """
        self.slots = slots
        self.prompt = prompt
        self.block_size = block_size
        self.num_held_blocks = prompt.blocks.num_blocks + prompt.has_tail(block_size)
        """R, as the request holds them: its full blocks, and one for what is left."""
        self.now = now
        self._columns = books if isinstance(books, Columns) else None
        self._books = books.books if isinstance(books, Columns) else books
        self._on_gpu = on_gpu
        self._beyond = beyond_gpu
        self._states = states or {}
        self._weights = weights

    def __len__(self) -> int:
        return len(self.slots)

    def each(self, cost: "Callable[[Candidates, Books, Cached], Cost]") -> Sequence[float]:
        """Return the cost of each rank, by a formula that needs to know nothing of the others."""
        if self._columns is not None:
            self._columns.board.refresh()
            costs = cost(self, self._columns, self._cached_columns(self._columns))
            if isinstance(costs, (int, float)):  # the same for all
                return [costs] * len(self)
            column: Sequence[float] = costs if costs.base is None else costs.copy()  # the books themselves change
            return column
        if not (self._on_gpu or self._beyond):
            return [cost(self, book, UNCACHED) for book in self._books]
        cached = self.cached
        return [cost(self, book, cached(slot)) for slot, book in zip(self.slots, self._books, strict=True)]

    def cheapest(self, cost: "Callable[[Candidates, Books, Cached], Cost]", rng: random.Random) -> int | None:
        """Return the index of the cheapest rank, if a look at few is enough: the mode has a standing, and few ranks are near.

        Near are those that have something of the prompt, cached or in flight.
        """
        columns = self._columns
        if columns is None or not columns.is_whole or (order := columns.board.order) is None:
            return None
        board, on_gpu, beyond = columns.board, self._on_gpu, self._beyond or {}
        holders = board.holders(self.prompt.blocks)
        if len(on_gpu) + len(beyond) + len(holders) > MOST_NEAR:
            return None
        places, books = board.places, self._books
        near = {
            places[slot]: cost(self, books[places[slot]], self.cached(slot))
            for slot in {*on_gpu, *beyond, *holders}
            if slot in places
        }
        return order.cheapest(near, lambda place: cost(self, books[place], self.cached(self.slots[place])), rng)

    def cached(self, slot: int) -> Cached:
        """Return what a rank has of the prompt."""
        on_gpu = self._on_gpu.get(slot, 0)
        if self._beyond is None:
            return Cached(on_gpu, on_gpu) if on_gpu else UNCACHED
        beyond = self._beyond.get(slot, NOTHING)
        return Cached(on_gpu, on_gpu + beyond.times(self._weights), beyond)

    def _cached_columns(self, columns: Columns) -> Cached:
        on_gpu = columns.spread(self._on_gpu)
        if self._beyond is None:
            return Cached(on_gpu, on_gpu)
        tiers = zip(*self._beyond.values(), strict=True)
        beyond = BeyondGpu(*[columns.spread(dict(zip(self._beyond, blocks, strict=True))) for blocks in tiers])
        return Cached(on_gpu, on_gpu + beyond.times(self._weights), beyond)

    def num_found(self, slot: int) -> int:
        """Count the leading blocks of the prompt that a rank need not compute, in whichever tier they are."""
        found = self._on_gpu.get(slot, 0)
        return found if self._beyond is None else found + sum(self._beyond.get(slot, NOTHING))

    @property
    def books(self) -> list[RankBooks]:
        """The router's own record of each."""
        return self._books

    @property
    def gpu_blocks(self) -> list[int]:
        """The leading blocks of the prompt on the GPU."""
        return [self._on_gpu.get(slot, 0) for slot in self.slots]

    @property
    def found_blocks(self) -> list[int]:
        """These and the blocks that each can fetch after them."""
        return self.gpu_blocks if self._beyond is None else [self.num_found(slot) for slot in self.slots]

    @property
    def best_blocks(self) -> int:
        """The most of them that any rank has."""
        if not (self._on_gpu or self._beyond):
            return 0
        if self._columns is not None and self._columns.is_whole:
            return max([self.num_found(slot) for slot in {**self._on_gpu, **(self._beyond or {})}])
        return max(self.found_blocks)

    @property
    def are_many(self) -> bool:
        """Whether they are scored all at once."""
        return self._columns is not None

    @property
    def overlap_blocks(self) -> Sequence[float]:
        """m: matched blocks."""
        return self.gpu_blocks if self._beyond is None else [self.cached(slot).matched for slot in self.slots]

    @property
    def beyond_gpu(self) -> list[BeyondGpu] | None:
        """The blocks that each can fetch after those on its GPU, None if none can fetch any."""
        return None if self._beyond is None else [self._beyond.get(slot, NOTHING) for slot in self.slots]

    @property
    def num_prompt_blocks(self) -> int:
        """R: blocks of the prompt."""
        return -(-self.prompt.num_tokens // self.block_size)

    @property
    def missing_tokens(self) -> list[float]:
        """miss: prompt tokens that the rank has not cached."""
        tokens, size = self.prompt.num_tokens, self.block_size
        return [tokens - blocks * size for blocks in self.overlap_blocks]

    @property
    def prefill_tokens(self) -> list[float]:
        """Q + miss: the tokens to compute before this request's first token."""
        tokens, size = self.prompt.num_tokens, self.block_size
        return [
            book.prefill_tokens + tokens - blocks * size
            for book, blocks in zip(self._books, self.overlap_blocks, strict=True)
        ]

    def fetch_s(self, token_s: PerTier) -> list[float]:
        """Return how long each takes to fetch its blocks beyond the GPU (s), given the time per token in each tier."""
        if self._beyond is None:
            return [0.0] * len(self.slots)
        return [self.block_size * self._beyond.get(slot, NOTHING).times(token_s) for slot in self.slots]

    @property
    def decode_blocks(self) -> list[int]:
        """A + R - a: blocks of requests in flight, this one's included."""
        blocks, held = self.prompt.blocks, self.num_held_blocks
        return [book.decode_blocks + held - book.num_active_blocks(blocks) for book in self._books]

    @property
    def num_requests(self) -> list[int]:
        """n: requests in flight."""
        if self._columns is not None:
            self._columns.board.refresh()
            listed: list[int] = self._columns.num_requests.tolist()
            return listed
        return [book.num_requests for book in self._books]

    @property
    def hit_shares(self) -> list[float]:
        """Share m / R of the prompt's blocks that is cached."""
        total = max(self.num_prompt_blocks, 1)
        return [blocks / total for blocks in self.overlap_blocks]

    @property
    def kv_usages(self) -> list[float]:
        """u, as the ranks report it."""
        return [self._states.get(slot, NO_STATE).kv_usage for slot in self.slots]

    @property
    def num_waiting(self) -> list[int]:
        """q, as the ranks report it."""
        return [self._states.get(slot, NO_STATE).num_waiting for slot in self.slots]

    def key(self, num_tokens: int) -> Hashable:
        """Name the prompt's first blocks up to about this many tokens; all blocks if the prompt is shorter."""
        ids, num_blocks, per_id = self.prompt.blocks
        if not num_blocks:
            return self.prompt.num_tokens
        place = max(num_tokens // (self.block_size * per_id), 1)
        last = -(-num_blocks // per_id)
        return ids[min(place, last) - 1]  # chained, so it also names all before it

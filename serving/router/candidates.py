"""What a policy sees when it scores: the request, and each rank's books, prefix overlap and state."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from serving.router.blocks import PromptBlocks
from serving.router.books import RankBooks
from serving.router.tiers import EVERYTHING, BeyondGpu, PerTier


class Prompt(NamedTuple):
    """What routing needs of a request: its length, its full blocks, and its session if it has one."""

    num_tokens: int
    blocks: PromptBlocks
    session: Hashable | None = None

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


class Candidates:
    """Parallel lists, one entry a rank, in order of slot; each is computed when a policy asks for it.

    In the formulas of the policies, per rank: L prompt tokens, B block size, R = ceil(L / B), m matched blocks (blocks
    beyond the GPU have the weight of their tier), miss = L - m B, Q prefill tokens sent there and not computed yet, A
    blocks of requests in flight, a those of them that this prompt shares, n requests in flight, d requests decoding, q
    requests waiting, u KV usage, C context tokens of the decoding requests, K prompt tokens of all in flight. For modes
    that share in flight, m counts the blocks that requests in flight share too, and never the prompt's last token.
    """

    __slots__ = (
        "beyond_gpu",
        "block_size",
        "books",
        "found_blocks",
        "gpu_blocks",
        "now",
        "overlap_blocks",
        "prompt",
        "slots",
        "states",
    )

    def __init__(
        self,
        slots: list[int],
        books: list[RankBooks],
        gpu_blocks: list[int],
        prompt: Prompt,
        block_size: int,
        *,
        now: float = 0.0,
        states: list[RankState] | None = None,
        beyond_gpu: list[BeyondGpu] | None = None,
        weights: PerTier = EVERYTHING,
    ) -> None:
        self.slots = slots
        self.books = books
        self.gpu_blocks = gpu_blocks
        self.beyond_gpu = beyond_gpu
        """The blocks that each can fetch after these, None if none can fetch any."""
        self.found_blocks = gpu_blocks
        """Both together: the blocks that need not be computed there."""
        self.overlap_blocks: Sequence[float] = gpu_blocks
        """m"""
        if beyond_gpu is not None:
            pairs = list(zip(gpu_blocks, beyond_gpu, strict=True))
            self.found_blocks = [blocks + sum(beyond) for blocks, beyond in pairs]
            self.overlap_blocks = [blocks + beyond.times(weights) for blocks, beyond in pairs]
        self.prompt = prompt
        self.block_size = block_size
        self.now = now
        self.states = states

    def __len__(self) -> int:
        return len(self.slots)

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
            for book, blocks in zip(self.books, self.overlap_blocks, strict=True)
        ]

    def fetch_s(self, token_s: PerTier) -> list[float]:
        """Return how long each takes to fetch its blocks beyond the GPU (s), given the time per token in each tier."""
        if self.beyond_gpu is None:
            return [0.0] * len(self.slots)
        return [self.block_size * beyond.times(token_s) for beyond in self.beyond_gpu]

    @property
    def decode_blocks(self) -> list[int]:
        """A + R - a: blocks of requests in flight, this one's included."""
        blocks = self.prompt.blocks
        total = blocks.num_blocks + self.prompt.has_tail(self.block_size)
        return [book.decode_blocks + total - book.num_active_blocks(blocks) for book in self.books]

    @property
    def num_requests(self) -> list[int]:
        """n: requests in flight."""
        return [book.num_requests for book in self.books]

    @property
    def hit_shares(self) -> list[float]:
        """Share m / R of the prompt's blocks that is cached."""
        total = max(self.num_prompt_blocks, 1)
        return [blocks / total for blocks in self.overlap_blocks]

    @property
    def kv_usages(self) -> list[float]:
        """u, as the ranks report it."""
        return [state.kv_usage for state in self.states or [NO_STATE] * len(self.books)]

    @property
    def num_waiting(self) -> list[int]:
        """q, as the ranks report it."""
        return [state.num_waiting for state in self.states or [NO_STATE] * len(self.books)]

    def key(self, num_tokens: int) -> Hashable:
        """Name the prompt's first blocks up to about this many tokens; all blocks if the prompt is shorter."""
        ids, num_blocks, per_id = self.prompt.blocks
        if not num_blocks:
            return self.prompt.num_tokens
        place = max(num_tokens // (self.block_size * per_id), 1)
        last = -(-num_blocks // per_id)
        return ids[min(place, last) - 1]  # chained, so it also names all before it

"""What a scheduler asks of host memory, and the answers without any."""

from collections.abc import Iterable

from mocker.sequence import Sequence
from mocker.tiers.chunk_cache import ChunkCache
from mocker.tiers.copies import NO_WORK, Work
from mocker.tiers.work import Found, LookUp, Read, Write


class Offload:
    """The scheduler's side of offloading. Without host memory nothing is found there, and nothing starts or ends."""

    def __init__(self, host: ChunkCache | None = None) -> None:
        """Start with empty host memory, or without any."""
        if host is None:
            host = ChunkCache(0, blocks_per_chunk=1, eviction_policy="lru", store_threshold=0)
        self.host = host
        self.ended: list[tuple[Sequence, int]] = []
        """Sequences that are over since the last `end_schedule`, with the tokens whose KV they leave."""
        self.refused: dict[Sequence, None] = {}
        """Running sequences whose chunks found no room; they are offered again in each step."""
        self.num_refused = 0
        """How often a sequence became one of these."""
        self.is_prompt_only = False
        """Whether only prompts are offered."""
        self.prefetches = False
        """Whether new prompts are fetched from tiers before it is their turn."""
        self.writes_stores = False
        """Whether a store that has ended is also written to a tier."""
        self.loads_within_step = False
        """Whether some loads end before the step computes that asks for them."""

    @property
    def is_quiet(self) -> bool:
        """Whether a step can change nothing except by what it computes."""
        return True

    @property
    def is_copying(self) -> bool:
        """Whether any copy has not ended, or a sequence waits for a tier."""
        return False

    def ask(self, sequence: Sequence, num_computed: int) -> int | None:
        """Return how many tokens after those computed here can be loaded, None if the caller must ask again."""
        return 0

    def is_fetching(self, sequence: Sequence) -> bool:
        """Return whether it is useless to `ask` for a sequence until tiers behind host memory have done their work."""
        return False

    def may_look_up(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may still look up its chunks in tiers."""
        return False

    def begin_step(self) -> None:
        """Begin a step in which nothing is reserved yet for loads within it."""

    def reserve(self, num_tokens: int, num_needed: int) -> bool:
        """Return whether tokens that were found, of the `num_needed` that are to be computed, are loaded within this step.

        What was reserved stays so, even if the load does not start.
        """
        return False

    def load(self, sequence: Sequence, num_computed: int, num_tokens: int, *, is_within_step: bool = False) -> None:
        """Start to load this many tokens after those computed."""
        raise NotImplementedError

    def prefetch(self, sequence: Sequence, num_computed: int) -> None:
        """Start to fetch the part of a new prompt that host memory lacks."""
        raise NotImplementedError

    def preempt(self, sequence: Sequence) -> None:
        """Flush the copies of a sequence that loses its blocks."""

    def end(self, sequence: Sequence, num_computed: int) -> None:
        """Record that a sequence is over that still has its blocks and leaves this many tokens' KV; watch these."""

    def end_schedule(self, offers: Iterable[tuple[Sequence, int]]) -> bool:
        """Offer the tokens that sequences have computed after the step just scheduled, and those of ended sequences.

        Returns:
            whether copies start or are flushed.
        """
        return False

    def take_work(self) -> Work:
        """Return the copies of the last `schedule`, once."""
        return NO_WORK

    def end_copy(self, number: int) -> None:
        """Record that a copy is done."""
        raise NotImplementedError

    def end_look_up(self, look_up: LookUp, found: list[Found]) -> None:
        """Record which of the looked-up chunks tiers have, from the first on; make room for them, and read them."""
        raise NotImplementedError

    def end_read(self, read: Read, num_chunks: int) -> None:
        """Record that this many first chunks of a read have arrived; the others could not be read."""
        raise NotImplementedError

    def end_write(self, write: Write) -> None:
        """Record that a write has ended, whatever its result."""
        raise NotImplementedError

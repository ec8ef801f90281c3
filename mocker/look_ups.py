"""How much of the prompts was found in caches, counted as in vLLM's statistics."""


class LookUps:
    """Prompt tokens of the sequences that were given blocks, and how many of them were found where.

    A sequence that waits for blocks is looked up again and again, and counted once, when it gets them. One that comes back
    after a preemption is not counted.
    """

    __slots__ = ("num_disk", "num_elsewhere", "num_hits", "num_host", "num_prompts", "num_tokens", "num_unasked")

    def __init__(self) -> None:
        self.num_prompts = 0
        self.num_tokens = 0
        self.num_unasked = 0
        """Tokens of prompts that were not looked up, because their sequences do not read the cache; not in `num_tokens`."""
        self.num_hits = 0
        """Found in blocks of this engine."""
        self.num_host = 0
        """Found in host memory."""
        self.num_disk = 0
        """Found on the engine's own disks, or in a store."""
        self.num_elsewhere = 0
        """Computed by another engine."""

    @property
    def num_external(self) -> int:
        """Tokens that were found, but not in blocks of this engine."""
        return self.num_host + self.num_disk + self.num_elsewhere

    def count(self, num_tokens: int, num_hits: int, *, reads_cache: bool) -> None:
        """Count a prompt, of which so many tokens were found in blocks of this engine."""
        if not reads_cache:
            self.num_unasked += num_tokens
            return
        self.num_prompts += 1
        self.num_tokens += num_tokens
        self.num_hits += num_hits

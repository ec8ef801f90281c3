"""How much of the prompts was found in caches, counted as in vLLM's statistics."""

from mocker.sequence import Sequence


class PrefixCacheStats:
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

    def count(self, sequence: Sequence, num_hits: int) -> None:
        """Count the prompt of a sequence that was given blocks, of which so many tokens were found in this engine's."""
        if sequence.num_preemptions:
            return
        sequence.cached_tokens = num_hits
        if sequence.reads_cache:
            self.num_prompts += 1
            self.num_tokens += sequence.num_prompt
            self.num_hits += num_hits
        else:
            self.num_unasked += sequence.num_prompt

    def count_load(self, sequence: Sequence, num_elsewhere: int) -> None:
        """Count what a sequence loads beside: so many tokens from another engine, or those from host memory, which it knows."""
        if sequence.num_preemptions:
            return
        num_disk = sequence.disk_tokens + sequence.store_tokens
        sequence.cached_tokens += sequence.host_tokens + num_disk
        self.num_host += sequence.host_tokens
        self.num_disk += num_disk
        self.num_elsewhere += num_elsewhere

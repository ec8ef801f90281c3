"""The router's books of what it sent to each rank: added at dispatch, released whichever way a request ends."""

from collections.abc import Hashable

from foundation.galloping import num_held
from serving.router.blocks import PromptBlocks


class RankBooks:
    """The load of one rank, as far as the router knows it."""

    __slots__ = (
        "_active",
        "_equal",
        "_sizes",
        "context_tokens",
        "decode_blocks",
        "num_decoding",
        "num_requests",
        "prefill_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.num_requests = 0
        self.prefill_tokens = 0
        """Prompt tokens sent there and not computed yet."""
        self.prompt_tokens = 0
        """Prompt tokens of the requests in flight there, cached or not."""
        self.decode_blocks = 0
        """Distinct prompt blocks of the requests in flight there."""
        self.num_decoding = 0
        """Requests there that have had their first token."""
        self.context_tokens = 0
        """Prompt tokens of these."""
        self._equal: dict[tuple[Hashable, int], int] = {}  # last id and length -> requests in flight that have both
        self._active: dict[Hashable, int] = {}  # id -> requests in flight that have it
        self._sizes: dict[Hashable, int] = {}  # id -> its blocks in use, if not all of them

    def num_active_blocks(self, blocks: PromptBlocks, guess: int = 0) -> int:
        """Count the leading blocks of a prompt that requests in flight hold already.

        Args:
            blocks: The prompt.
            guess: The count of another rank, if there is one. Where it is right here, too, few ids are looked up.
        """
        ids, num_blocks, per_id = blocks
        num_ids = num_held(self._active, ids, -(-num_blocks // per_id), guess and -(-guess // per_id))
        if not num_ids:
            return 0
        held = num_ids * per_id
        if self._sizes and (size := self._sizes.get(ids[num_ids - 1])) is not None:
            held += size - per_id
        return min(held, num_blocks)

    def num_equal(self, blocks: PromptBlocks, prompt_tokens: int) -> int:
        """Count the requests in flight that have the same prompt, as far as its length and its full blocks show."""
        ids, num_blocks, per_id = blocks
        return self._equal.get((ids[-(-num_blocks // per_id) - 1], prompt_tokens), 0) if num_blocks else 0

    def add(self, blocks: PromptBlocks, *, has_tail: bool, prompt_tokens: int, prefill_tokens: int) -> None:
        """Book a request; with a tail, the tokens after its full blocks use another block."""
        self.num_requests += 1
        self.prompt_tokens += prompt_tokens
        self.prefill_tokens += prefill_tokens
        active = self._active
        ids, num_blocks, per_id = blocks
        num_full, rest = divmod(num_blocks, per_id)
        full, before = ids[:num_full], len(active)
        for id in full:
            active[id] = active.get(id, 0) + 1
        added = has_tail + (len(active) - before) * per_id
        if self._sizes:
            for id in full:
                if id in self._sizes:
                    added += per_id - self._sizes.pop(id)
        if rest:
            id = ids[num_full]
            count = active.get(id, 0)
            active[id] = count + 1
            size = self._sizes.get(id, per_id) if count else 0
            if rest > size:
                added += rest - size
                self._sizes[id] = rest
        self.decode_blocks += added
        if num_blocks:
            equal = (ids[-(-num_blocks // per_id) - 1], prompt_tokens)
            self._equal[equal] = self._equal.get(equal, 0) + 1

    def remove(self, blocks: PromptBlocks, *, has_tail: bool, prompt_tokens: int) -> None:
        """Release a request's prompt and its blocks."""
        ids, num_blocks, per_id = blocks
        self.num_requests -= 1
        self.prompt_tokens -= prompt_tokens
        active = self._active
        removed = int(has_tail)
        for id in ids[: -(-num_blocks // per_id)]:
            count = active[id] - 1
            if count:
                active[id] = count
            else:
                del active[id]
                removed += self._sizes.pop(id, per_id) if self._sizes else per_id
        self.decode_blocks -= removed
        if num_blocks:
            equal = (ids[-(-num_blocks // per_id) - 1], prompt_tokens)
            self._equal[equal] -= 1
            if not self._equal[equal]:
                del self._equal[equal]

    def snapshot(self) -> "RankBooks":
        """Return the counters as they are now, without the blocks."""
        copy = RankBooks()
        copy.num_requests, copy.prefill_tokens, copy.decode_blocks = (
            self.num_requests,
            self.prefill_tokens,
            self.decode_blocks,
        )
        copy.num_decoding, copy.context_tokens = self.num_decoding, self.context_tokens
        copy.prompt_tokens = self.prompt_tokens
        return copy

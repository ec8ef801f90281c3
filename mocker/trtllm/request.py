"""A request as TensorRT-LLM's scheduler sees it, and its states.

    CONTEXT ------- its whole prompt is computed -------> GENERATING -- its last token is in flight --> COMPLETING
       ^                                                   ^   |  (overlap only)                          |
       |                                     TRANSFERRING -+   |                                          |
       |                                           ^           +------------- its last token -------------+--> ENDED
       +-- paused, from any of CONTEXT,            |
           GENERATING and COMPLETING             INIT: its prompt's KV comes from elsewhere

A pause makes the outputs so far part of the prompt. So the prompt grows, what is left shrinks, and their sum stays.
"""

from typing import Final

from mocker.chain import BlockChain
from mocker.sequence import Sequence
from mocker.trtllm.block_pool import Block

CONTEXT: Final = 0
INIT: Final = 1
TRANSFERRING: Final = 2
GENERATING: Final = 3
COMPLETING: Final = 4
ENDED: Final = 5
"""The states in order: from `GENERATING` on, a request that is active generates, a last step in flight included."""


class Request:
    """A request and its progress. Counts are tokens unless they say otherwise."""

    __slots__ = (
        "adapter",
        "blocks",
        "chain",
        "chunk",
        "credit",
        "has_strict_rank",
        "id",
        "is_cancelled",
        "is_context_only",
        "is_dummy",
        "last_output",
        "num_before",
        "num_left",
        "num_outputs",
        "num_prompt",
        "position",
        "rank",
        "sequence",
        "slots",
        "state",
        "stop_after",
    )

    def __init__(
        self,
        id: str | int,
        *,
        num_prompt: int,
        max_tokens: int,
        chain: BlockChain,
        stop_after: int | None = None,
        adapter: int | None = None,
        is_generation_only: bool = False,
        rank: int | None = None,
        has_strict_rank: bool = False,
    ) -> None:
        """Describe a request.

        Args:
            id: its name.
            num_prompt: tokens of the prompt.
            max_tokens: tokens of output at which the answer is cut off.
            chain: the content of its blocks, prompt and output.
            stop_after: tokens of output, of which the last ends the answer; the scheduler does not know this.
            adapter: the LoRA adapter that it runs with.
            is_generation_only: the KV of its prompt comes from elsewhere (disaggregation).
            rank: the rank that it wishes (attention DP).
            has_strict_rank: it waits until that rank has room.
        """
        self.id = id
        self.num_prompt = num_prompt  # with the outputs before the last pause
        self.num_left = max_tokens  # outputs at which it ends, counted since the last pause
        self.num_outputs = 0  # known, since the last pause
        self.num_before = 0  # known at the last pause
        self.stop_after = stop_after
        self.last_output = 0  # at which it ends, counted likewise; only a simulation knows
        self._find_last_output()
        self.chain = chain
        self.adapter = adapter
        self.rank = rank
        self.has_strict_rank = has_strict_rank
        self.is_dummy = False
        """Whether it only keeps an empty rank busy (attention DP)."""
        self.is_context_only = False
        """Whether its KV stays when it has ended, for another engine (disaggregation)."""
        self.is_cancelled = False
        self.state = INIT if is_generation_only else CONTEXT
        self.position = 0  # of the prompt, computed or in flight
        self.chunk = 0  # of the prompt, in the batch that is being made
        self.credit = 0  # of the prompt: expected in the cache by the micro-batch scheduler
        self.blocks: list[Block] = []
        self.slots = 0  # places for KV that it has taken in its blocks
        self.sequence: Sequence  # what an engine knows it as, if it belongs to one

    @property
    def num_tokens(self) -> int:
        """Count its tokens, prompt and output, that are known."""
        return self.num_prompt + self.num_outputs

    @property
    def num_original_prompt(self) -> int:
        """Count the tokens of the prompt with which it came."""
        return self.num_prompt - self.num_before

    @property
    def is_first_chunk(self) -> bool:
        """Whether none of its prompt is computed yet."""
        return self.state == CONTEXT and self.position == 0

    @property
    def is_started(self) -> bool:
        """Whether it may be paused: it generates, or is beyond the first chunk of its prompt."""
        return self.state == GENERATING or self.state == COMPLETING or (self.state == CONTEXT and self.position > 0)

    @property
    def is_generating(self) -> bool:
        """Whether it generates, a last step in flight included."""
        return self.state == GENERATING or self.state == COMPLETING

    @property
    def num_to_compute(self) -> int:
        """Count the tokens of its prompt that no batch has computed."""
        return self.num_prompt - self.position

    def cost(self, count: int) -> int:
        """Count what a chunk costs of the token budget.

        What is found in the cache shifts a chunk in the middle of the prompt, and shortens only a last one.
        """
        credit, left = self.credit, self.num_prompt - self.position
        return count if credit == 0 or credit + count < left else max(0, left - credit)

    def add_outputs(self, count: int) -> None:
        """Record sampled tokens; end if one of them is the last."""
        before = self.num_outputs
        self.num_outputs = before + count
        if self.num_outputs >= self.last_output:
            self.num_outputs = max(self.last_output, before + 1)  # one too many after a pause: `Settings.pauses_ended`
            self.state = ENDED

    def _find_last_output(self) -> None:
        self.last_output = self.num_left
        if self.stop_after is not None:
            self.last_output = min(self.last_output, self.stop_after - self.num_before)

    @property
    def has_stopped(self) -> bool:
        """Whether its last known output ends it."""
        return self.stop_after is not None and self.num_before + self.num_outputs >= self.stop_after

    def pause(self) -> None:
        """Start again, with the outputs as part of the prompt; the caller has freed its blocks."""
        self.num_prompt += self.num_outputs
        self.num_left -= self.num_outputs
        self.num_before += self.num_outputs
        self.num_outputs = self.position = self.slots = 0
        self.state = CONTEXT
        self._find_last_output()

    def __repr__(self) -> str:
        return f"Request({self.id!r}, prompt={self.num_prompt}, left={self.num_left})"

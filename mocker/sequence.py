"""A request inside the engine."""

from mocker.chain import BlockChain
from mocker.runs import Run


class Sequence:
    """A request and how far it has come.

    While it decodes, its place follows from the engine's iteration count: at iteration i it computes the
    token at position `i - origin`. Nothing is counted per token.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "chain",
        "decoding",
        "first_scheduled_s",
        "first_token_s",
        "id",
        "last_iteration",
        "max_tokens",
        "num_blocks",
        "num_cached_blocks",
        "num_computed",
        "num_known",
        "num_preemptions",
        "num_prompt",
        "num_total",
        "origin",
        "payload",
        "priority",
        "runs",
        "waited_since_s",
    )

    def __init__(
        self,
        id: str | int,
        *,
        num_prompt: int,
        max_tokens: int,
        chain: BlockChain,
        priority: int = 0,
        arrival: float = 0.0,
        payload: object = None,
    ) -> None:
        self.id = id
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.chain = chain
        self.priority = priority
        self.arrival = arrival
        self.payload = payload
        self.num_total = num_prompt + max_tokens
        self.num_known = num_prompt  # prompt and output tokens; kept only while not decoding
        self.num_computed = 0  # likewise
        self.decoding = False
        self.origin = 0
        self.last_iteration = 0
        self.num_blocks = 0  # allocated; behind while a leap is under way
        self.num_cached_blocks = 0
        self.runs: list[Run] = []
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_s = -1.0
        self.first_token_s = -1.0
        self.waited_since_s = -1.0

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, prompt={self.num_prompt}, max_tokens={self.max_tokens})"

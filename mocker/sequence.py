"""A request inside the engine, and the runs of cached blocks that it and others hold."""

from __future__ import annotations

from mocker.chain import BlockChain


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
        "stop_after",
        "waited_since_s",
    )

    def __init__(
        self,
        id: str | int,
        *,
        num_prompt: int,
        max_tokens: int,
        stop_after: int | None = None,
        chain: BlockChain,
        priority: int = 0,
        arrival: float = 0.0,
        payload: object = None,
    ) -> None:
        self.id = id
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.stop_after = stop_after
        self.chain = chain
        self.priority = priority
        self.arrival = arrival
        self.payload = payload
        self.num_total = num_prompt + min(max_tokens, stop_after or max_tokens)
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


class Run:
    """Physical blocks that hold blocks `start` to `stop` of a chain and share one fate.

    `holders` are the sequences that use them, in order of arrival (a dict for its order; an unheld run
    waits in the free queue). Of several copies of one content the oldest is `primary`: the one found.
    A `sealed` run does not grow, as blocks of other sequences may follow its end.
    """

    __slots__ = ("chain", "holders", "primary", "sealed", "start", "stop")

    def __init__(self, chain: BlockChain, start: int, stop: int, *, primary: bool = True) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.holders: dict[Sequence, None] = {}
        self.primary = primary
        self.sealed = False

    def __repr__(self) -> str:
        return f"Run({self.start}:{self.stop}, holders={len(self.holders)}, primary={self.primary})"

"""A request inside the engine."""

from typing import Final

from mocker.chain import BlockChain
from mocker.media import MediaItem
from mocker.position import Position

WAITING: Final = 0
LOADING: Final = 1
LOADED: Final = 2
RUNNING: Final = 3
OVER: Final = 4
"""The state of a sequence. With KV from elsewhere: it waits for blocks, LOADING, LOADED, it waits for a seat."""


class Sequence(Position):
    """A request and its progress. Where it is while it decodes follows from the iteration: see `Position`."""

    __slots__ = (
        "adapter",
        "arrival",
        "cached_tokens",
        "chain",
        "disk_tokens",
        "failure",
        "first_scheduled_s",
        "first_token_s",
        "host_tokens",
        "id",
        "ignores_eos",
        "is_failed",
        "is_remote_decode",
        "is_remote_prefill",
        "is_token_shipped",
        "max_tokens",
        "media",
        "next_touch",
        "num_blocks",
        "num_cached_blocks",
        "num_limit",
        "num_preemptions",
        "num_prompt",
        "order",
        "payload",
        "priority",
        "reads_cache",
        "state",
        "stop_after",
        "store_tokens",
        "waited_since_s",
    )

    def __init__(
        self,
        id: str | int,
        *,
        num_prompt: int,
        max_tokens: int,
        chain: BlockChain,
        stop_after: int | None = None,
        is_remote_prefill: bool = False,
        is_remote_decode: bool = False,
        priority: int = 0,
        arrival: float = 0.0,
        adapter: str = "",
        media: tuple[MediaItem, ...] = (),
    ) -> None:
        """Describe a request.

        Args:
            id: its name.
            num_prompt: tokens of the prompt.
            max_tokens: tokens of output at which the answer is cut off; the scheduler knows this in advance.
            chain: the names of its blocks.
            stop_after: number of the output token (the first is 1) that is EOS or a stop token; the scheduler learns it
                only when that is computed (None: there is none).
            is_remote_prefill: another engine has computed the prompt; its KV is loaded from there.
            is_remote_decode: another engine will decode; it reads the prompt's KV here, and then reports that.
            priority: smaller goes first.
            arrival: breaks ties of priority (s).
            adapter: the LoRA adapter that it runs with ("": none).
            media: images and other items in its prompt, in order.
        """
        num_limit = num_prompt + max_tokens
        super().__init__(num_prompt, num_limit if stop_after is None else min(num_prompt + stop_after, num_limit))
        self.id = id
        self.num_prompt = num_prompt
        self.max_tokens = max_tokens
        self.chain = chain
        self.priority = priority
        self.arrival = arrival
        self.adapter = adapter
        self.media = media
        self.payload: object = None  # for the caller's use
        self.stop_after = stop_after
        self.ignores_eos = stop_after is None  # as load generators ask, and SGLang is told
        self.is_remote_prefill = is_remote_prefill  # until its KV is requested, which happens once
        self.is_token_shipped = False
        """Whether the first token of the answer comes with that KV (SGLang, TensorRT-LLM); else the last token of the
        prompt is computed here again, which produces it (vLLM)."""
        self.is_remote_decode = is_remote_decode
        self.reads_cache = True  # False: its whole prompt is computed, because log-probabilities of it are wanted
        self.is_failed = False
        self.failure = ""  # why, unless its KV could not be loaded
        self.num_limit = num_limit  # tokens at which it ends by length
        self.state = WAITING
        self.order = 0  # its place among waiting ones, by priority only if priorities and arrivals are equal
        self.next_touch = 0  # computed tokens at which its blocks change next while it decodes, with groups of layers
        self.num_blocks = 0  # allocated; while it decodes, those when it began: its position says how many it has now
        self.num_cached_blocks = 0
        self.cached_tokens = 0  # of its prompt, when it was first admitted
        self.host_tokens = self.disk_tokens = self.store_tokens = 0  # those of them that came from beyond the GPU
        self.num_preemptions = 0
        self.first_scheduled_s = -1.0
        self.first_token_s = -1.0
        self.waited_since_s = -1.0

    def cut_at(self, num_tokens: int) -> None:
        """Let it end at this many tokens, prompt and output together, if it would be longer.

        Raises:
            ValueError: its prompt alone has so many.
        """
        if self.num_prompt >= num_tokens:
            raise ValueError(f"prompt of {self.num_prompt} tokens reaches max_model_len ({num_tokens})")
        self.num_limit = min(self.num_limit, num_tokens)
        self.num_total = min(self.num_total, num_tokens)

    @property
    def is_over(self) -> bool:
        """Whether it has ended; a batch that was closed ahead may still contain it."""
        return self.state == OVER

    @property
    def finish_reason(self) -> str:
        """Why the answer ended: `stop`, `length` or `error`."""
        if self.is_failed:
            return "error"
        return (
            "stop" if self.stop_after is not None and self.num_total == self.num_prompt + self.stop_after else "length"
        )

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, prompt={self.num_prompt}, max_tokens={self.max_tokens})"

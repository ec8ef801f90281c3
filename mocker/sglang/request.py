"""A request as SGLang's scheduler sees it.

    tokens  0 .... protected .......... prefix ........ end     known
            in the tree, | its own,     | computed in | of its  |
            locked       | page by page | this pass   | chunk   | prompt and output

`committed` tokens have pages: those before `end` while its prompt is computed, and one more with each decode.
"""

from collections.abc import Hashable
from typing import Literal

from mocker.chain import BlockChain
from mocker.sglang.node import Node

Ending = Literal["", "stop", "length", "abort"]


class Request:
    """One request: how far it is, and what it holds."""

    __slots__ = (
        "chain",
        "chunks_in_flight",
        "committed",
        "end",
        "ending",
        "entry",
        "generated",
        "head",
        "holds_kv",
        "host_node",
        "id",
        "ignores_eos",
        "inserted",
        "is_marked",
        "is_retracted",
        "looked_up",
        "matched",
        "max_new",
        "node",
        "num_loaded",
        "num_on_host",
        "num_prompt",
        "num_retractions",
        "payload",
        "prefix",
        "priority",
        "processed_at_entry",
        "protected",
        "reads_cache",
        "stop_after",
    )

    def __init__(
        self,
        id: str | int,
        chain: BlockChain,
        *,
        num_prompt: int,
        max_new: int,
        stop_after: int | None = None,
        ignores_eos: bool = False,
        priority: int | None = None,
        head: Hashable = None,
    ) -> None:
        """Describe a request.

        Args:
            id: its name.
            chain: the names of its pages, prompt and output; a salt, if it has one, is part of the names.
            num_prompt: tokens of the prompt.
            max_new: tokens of output at which it is cut off.
            stop_after: number of the output token (the first is 1) that is EOS (None: there is none).
            ignores_eos: whether it is known to go on to `max_new`.
            priority: its priority (None: the least urgent).
            head: the name of its first 32 tokens, if pages are longer.
        """
        self.id = id
        self.chain = chain
        self.num_prompt = num_prompt
        self.max_new = max_new
        self.stop_after = stop_after
        self.ignores_eos = ignores_eos
        self.priority = priority
        self.head = head
        self.reads_cache = True  # False: its whole prompt is computed, because log-probabilities of it are wanted
        self.payload: object = None  # for the caller's use
        self.entry = 0  # when it began to wait, counted in entries
        self.processed_at_entry = 0  # tokens of prompts that had been computed then
        self.generated = 0  # output tokens that are known
        self.ending: Ending = ""
        self.is_marked = False  # to end as aborted when its next token is known
        self.is_retracted = False  # it lost its KV and waits again; a result in flight does not count
        self.num_retractions = 0
        self.chunks_in_flight = 0  # unfinished prefills whose results are not processed
        self.looked_up = 0  # tokens known when it was last looked up
        self.matched = 0  # of those, the cached ones
        self.prefix = 0
        self.end = 0
        self.committed = 0
        self.protected = 0
        self.inserted = 0  # tokens that it has put into the tree itself
        self.node: Node | None = None  # where its cached prefix ends
        self.host_node: Node | None = None  # where what is cached on the host ends
        self.num_on_host = 0  # tokens between both, when it was last looked up
        self.num_loaded = 0  # those of them that were loaded when it was admitted
        self.holds_kv = False

    @property
    def known(self) -> int:
        """Tokens of prompt and output that are known."""
        return self.num_prompt + self.generated

    @property
    def most_matched(self) -> int:
        """Tokens that may be found in the cache: one is left to compute."""
        return max(self.known - 1, 0) if self.reads_cache else 0

    def forget_kv(self) -> None:
        """Begin again: its KV is gone, its tokens stay."""
        self.is_retracted = True
        self.num_retractions += 1
        self.node = self.host_node = None
        self.num_on_host = self.num_loaded = 0
        self.matched = self.prefix = self.end = self.committed = self.protected = self.inserted = 0
        self.chunks_in_flight = 0

    def __repr__(self) -> str:
        return f"Request({self.id!r}, prompt={self.num_prompt}, max_new={self.max_new})"

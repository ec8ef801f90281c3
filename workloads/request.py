"""A request as a workload describes it."""

from typing import Any, Literal

import msgspec

from foundation.errors import UserError

Ends = Literal["length", "stop"]
"""How an answer ends: `length`, at a forced limit, or `stop`, when the model emits EOS."""


LIMIT = "max_completion_tokens"
"""The newer name of `max_tokens`, which some servers require."""


class WorkloadError(UserError):
    """A workload that cannot be used; the message names the file and line, or the setting."""


class Media(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """An image, or another item of a prompt that the model's encoder turns into tokens."""

    offset: int
    """Which token of the prompt is its first, counted from 0."""
    tokens: int
    """How many tokens of the prompt it takes."""
    id: str
    """What it is: equal ids are equal items."""


class Request(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """One request: when it arrives, how long it is, and what its prompt shares with others.

    `hash_ids` name the prompt's blocks of `Workload.block_size` tokens; the last may be partial. They are
    chained: an id identifies its block and all blocks before it.
    """

    arrival_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str = ""
    """The conversation it belongs to, if any."""
    after: tuple[int, ...] = ()
    """Numbers of the requests it waits for: it arrives `delay_s` after the last of them has ended, not at `arrival_s`."""
    delay_s: float = 0.0
    """Think time or tool time (s)."""
    content: Any = None
    """The prompt's content, if the workload has text: a string, or a list of chat messages."""
    ends: Ends = "length"
    """How its answer reaches `output_length`: load generators force it; for users the model's EOS is the last token."""
    priority: int = 0
    """Which requests go first if the engine schedules by priority: those with the smallest, as in vLLM."""
    adapter: str = ""
    """The LoRA adapter that it asks for, by name; empty for the model itself. KV of one is of no use to another."""
    media: tuple[Media, ...] = ()
    """Images and other items in its prompt, in order. `hash_ids` name blocks with what they show."""
    extra_body: dict[str, Any] | None = None
    """Further fields of its body, such as tools or temperature, which clients send together with `content`."""

    @property
    def limit_field(self) -> str:
        """The field of its body that limits its answer, by the name that its file uses."""
        return LIMIT if LIMIT in (self.extra_body or {}) else "max_tokens"

    def max_tokens(self, context: int | None = None) -> int:
        """Return the limit that its client sends to a model with a context of this many tokens (None: not known).

        It is the forced length. If the answer ends by EOS, it is up to twice that, so that an engine does not
        know the end in advance and a longer answer is not cut at once. At most half of what the context leaves
        is added, because a prompt of text is only about as long as planned.
        """
        length = self.output_length
        if self.ends == "length":
            return length
        if context is None:
            return 2 * length
        return length + min(length, max(context - self.input_length - length, 0) // 2)

"""What is asked of the scheduler of an installed engine, which is somewhere else.

Requests are numbers here. Nothing but numbers and names goes to and fro, so whoever carries it decides how.
"""

from typing import Any, NamedTuple, Protocol


class Asked(NamedTuple):
    """A request."""

    number: int
    num_prompt: int
    max_tokens: int
    stop_after: int | None
    """The output token that ends it, from 1 on, if that is before `max_tokens`; the scheduler learns it when it comes."""
    priority: int
    arrival: float
    adapter: int
    """The number of its adapter; 0: it has none."""
    names: list[int]
    """The names of its blocks: equal ones mean equal content, there and everywhere before."""
    num_named: int
    """The blocks that they name; those after them are its own."""
    per_name: int
    """The blocks that each name covers."""
    ignores_eos: bool
    """Whether it is known to go on to `max_tokens`."""


class Scheduled(NamedTuple):
    """A batch that was closed."""

    tokens: list[tuple[int, int, bool]]
    """Each request with tokens, in the order of the scheduler; how many; and whether more of its prompt is left."""
    started: list[tuple[int, int]]
    """The requests that begin or come back in it, and how many of their tokens were found in the cache."""
    preempted: list[int]
    drafts: list[tuple[int, int]]
    """Requests with drafts to verify, and how many; those of a request that begins only pad it."""
    num_free: int
    """Blocks that could be allocated now."""
    is_closed: bool
    """Whether there is a batch. If so, `update` is due for it."""
    ended: tuple[int, ...] = ()
    """Aborted requests that have ended without another token."""


class Updated(NamedTuple):
    """What the oldest batch brought."""

    tokens: list[tuple[int, int]]
    """Requests with new tokens, and how many."""
    finished: list[int]
    events: list[tuple[str, list[tuple[int, int]]]]
    """KV events: `stored`, `removed` or `cleared`, and the blocks, each by its name and the place among those so named."""
    num_free: int


class InstalledScheduler(Protocol):
    """One engine's scheduler."""

    def add(self, asked: Asked) -> int:
        """Queue a request; return the most output tokens that it is allowed."""

    def abort(self, number: int) -> int:
        """Remove a request, or let it end with its next token (SGLang); return how many blocks are free."""

    def schedule(self) -> Scheduled:
        """Close a batch."""

    def update(self, accepted: list[tuple[int, int]]) -> Updated:
        """End the oldest batch; of the drafts of these requests, so many are accepted."""

    def reset(self) -> bool:
        """Forget all cached blocks, or return False if any is in use."""


class NewScheduler(Protocol):
    """Makes the scheduler of an engine."""

    def __call__(self, settings: dict[str, Any]) -> InstalledScheduler:
        """Return an idle one with these settings (`installed_settings`)."""

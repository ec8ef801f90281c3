"""Images and other media in prompts, as an engine that encodes them sees them."""

from typing import NamedTuple


class MediaItem(NamedTuple):
    """An image, or another item, that takes the place of some tokens of a prompt."""

    offset: int
    """The first of these tokens, counted from 0."""
    num_tokens: int
    """How many they are. The encoder makes as many."""
    id: str
    """What it is: items of one id are the same, whoever sends them."""

    @property
    def end(self) -> int:
        """The token after its last."""
        return self.offset + self.num_tokens


class EncoderCounts:
    """What an encoder did so far."""

    __slots__ = ("computed", "computed_tokens", "found", "found_tokens")

    def __init__(self) -> None:
        self.computed = 0
        """Items that it computed."""
        self.computed_tokens = 0
        self.found = 0
        """Items of requests that were in its cache when they were needed."""
        self.found_tokens = 0

"""Answered conversations that later requests continue, within bounds: the oldest make room for new ones."""

from typing import NamedTuple


class Conversation(NamedTuple):
    """A response and all that led to it, as JSON."""

    items: bytes
    """A list of input items: those of the request, of the responses before it, and of the response itself."""
    response: bytes
    """The response object."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return len(self.items) + len(self.response)


class Conversations:
    """Conversations by the id of their last response."""

    def __init__(self, *, max_number: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._kept: dict[str, Conversation] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, conversation: Conversation) -> bool:
        """Keep a conversation, and drop the oldest beyond the bounds; return False if it alone is beyond them."""
        if conversation.num_bytes > self._max_bytes or not self._max_number:
            return False
        self.drop(id)
        self._kept[id] = conversation
        self.num_bytes += conversation.num_bytes
        while len(self._kept) > self._max_number or self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))
        return True

    def get(self, id: str) -> Conversation | None:
        """Return a conversation, if it is kept."""
        return self._kept.get(id)

    def drop(self, id: str) -> bool:
        """Forget a conversation; return whether it was kept."""
        conversation = self._kept.pop(id, None)
        if conversation is None:
            return False
        self.num_bytes -= conversation.num_bytes
        return True

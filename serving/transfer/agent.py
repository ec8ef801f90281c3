"""What an agent is: it owns memory, which other agents may read, and reads theirs.

    reader                                     owner
    read(owner's address, pieces)   ------->   its memory, as long as it is not closed
    notify(owner's address, data)   ------->   on_notice(data)

What lies where in that memory, and for how long, its users agree on among themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

MAX_NOTICE_BYTES = 4096
"""Of one notice."""

AgentAddress = Mapping[str, Any]
"""How an agent is reached: plain values that JSON can hold. `transport` says which kind of agent it is."""


class Piece(NamedTuple):
    """A stretch of an owner's memory, and where it goes in the reader's."""

    source: int
    target: int
    num_bytes: int


class TransferError(Exception):
    """A transfer or notice that did not take place; `kind` says why."""

    def __init__(self, message: str, kind: Literal["lost", "refused", "late"]) -> None:
        """Describe it.

        Args:
            message: what happened.
            kind: the owner is gone or broke off; it refuses (or the address is none of ours); it took too long.
        """
        super().__init__(message)
        self.kind = kind


class Agent(Protocol):
    """One end of transfers, as NIXL calls it: the memory of a worker, and its way to that of others; in a running event loop."""

    @property
    def address(self) -> AgentAddress:
        """How others reach it, once started."""
        ...

    @property
    def memory(self) -> memoryview:
        """Its own, writable: others read from it, and what it reads is written into it."""
        ...

    async def start(self) -> None:
        """Take memory and begin to serve it.

        Raises:
            TransferError: that cannot be done here; the message says what is missing.
        """
        ...

    async def read(self, owner: AgentAddress, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """Read pieces of another agent's memory into our own; the loop runs on meanwhile.

        Nothing is written there any more once this has returned or raised.

        Raises:
            TransferError: not all was read.
        """
        ...

    async def notify(self, owner: AgentAddress, notice: bytes, *, timeout_s: float) -> None:
        """Tell another agent something of at most `MAX_NOTICE_BYTES`; it may come twice, or late.

        Raises:
            TransferError: it did not get there.
        """
        ...

    async def close(self) -> None:
        """End what is under way, and give everything back."""
        ...

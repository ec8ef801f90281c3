"""An agent: it owns memory, which other agents may read, and reads theirs.

    reader                                     owner
    read(owner's address, pieces)   ------->   its memory, as long as it is not closed
    notify(owner's address, data)   ------->   on_notice(data)

The users of that memory agree among themselves on its layout, and on how long its contents last.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

MAX_NOTICE_BYTES = 4096
"""The largest notice."""

AgentAddress = Mapping[str, Any]
"""How an agent is reached: plain values that JSON can hold. `transport` is the kind of agent."""


class Piece(NamedTuple):
    """A range of an owner's memory, and where it goes in the reader's."""

    source: int
    target: int
    num_bytes: int


class TransferError(Exception):
    """A transfer or notice failed; `kind` is the reason."""

    def __init__(self, message: str, kind: Literal["lost", "refused", "late"]) -> None:
        """Describe it.

        Args:
            message: what happened.
            kind: the owner is gone or hung up; it refuses (or the address is not one of ours); it took too long.
        """
        super().__init__(message)
        self.kind = kind


class Agent(Protocol):
    """One end of transfers, as in NIXL: a worker's memory and its way to that of others. Needs an event loop."""

    @property
    def address(self) -> AgentAddress:
        """How others reach it, once started."""
        ...

    @property
    def memory(self) -> memoryview:
        """Its own memory, writable: others read from it, and its own reads are written into it."""
        ...

    async def start(self) -> None:
        """Allocate memory and start to serve it.

        Raises:
            TransferError: this is not possible here; the message says what is missing.
        """
        ...

    async def read(self, owner: AgentAddress, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """Read pieces of another agent's memory into our own; the loop keeps running meanwhile.

        Nothing more is written there once this has returned or raised.

        Raises:
            TransferError: not all was read.
        """
        ...

    async def notify(self, owner: AgentAddress, notice: bytes, *, timeout_s: float) -> None:
        """Send another agent a notice of at most `MAX_NOTICE_BYTES`; it may arrive twice, or late.

        Raises:
            TransferError: it did not arrive.
        """
        ...

    async def close(self) -> None:
        """End pending transfers, and release everything."""
        ...

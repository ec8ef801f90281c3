"""A way: how others reach an agent's memory and leave it notices, and how it does so with theirs."""

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec

from serving.transfer.agent import Piece
from serving.transfer.memory import Memory

OnNotice = Callable[[bytes], object]

OnTurn = Callable[[], object]
"""Is called when others before it, to the same owner, are done."""


class OwnerAddress(msgspec.Struct, frozen=True, tag_field="transport"):
    """Where an owner is reached by one way."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """Which start of which agent it is: who comes after it in the same place has another."""
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]


Address = TypeVar("Address", bound=OwnerAddress)


class Way(Protocol[Address]):
    """Its failures are those of the system (OSError), and TransferError; it is not asked when it is too late."""

    address_kind: type[Address]

    async def open(self, memory: Memory, on_notice: OnNotice, *, id: str) -> Address:
        """Begin to serve memory; return how others reach it.

        Raises:
            TransferError: that cannot be done here.
        """
        ...

    def reaches(self, owner: Address) -> bool:
        """Return whether that owner seems to be within reach."""
        ...

    async def read(self, owner: Address, pieces: Sequence[Piece], on_turn: OnTurn) -> None:
        """Read pieces, which lie within both memories, into ours."""
        ...

    async def notify(self, owner: Address, notice: bytes, on_turn: OnTurn) -> None:
        """Leave a notice."""
        ...

    async def close(self) -> None:
        """Give everything back; nothing is under way, and it may never have been opened."""
        ...

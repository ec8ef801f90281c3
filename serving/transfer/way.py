"""A way: how others reach an agent's memory and leave it notices, and how it does so with theirs."""

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

import msgspec

from serving.transfer.agent import Piece
from serving.transfer.memory import Memory

OnNotice = Callable[[bytes], object]

OnTurn = Callable[[], object]
"""Called once earlier operations with the same owner are done."""


class OwnerAddress(msgspec.Struct, frozen=True, tag_field="transport"):
    """The address at which one way reaches an owner."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """Identifies this start of this agent: a successor at the same address has another."""
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]


Address = TypeVar("Address", bound=OwnerAddress)


class Way(Protocol[Address]):
    """Raises system errors (OSError) and TransferError; the caller enforces deadlines."""

    address_kind: type[Address]
    needs_handle: bool
    """Whether others read the memory through a handle of it."""

    async def open(self, memory: Memory, on_notice: OnNotice, *, id: str) -> Address:
        """Start to serve memory; return how others reach it.

        Raises:
            TransferError: this is not possible here.
        """
        ...

    def reaches(self, owner: Address) -> bool:
        """Return whether that owner seems to be within reach."""
        ...

    async def read(self, owner: Address, pieces: Sequence[Piece], on_turn: OnTurn) -> None:
        """Read pieces, which are within both memories, into ours."""
        ...

    async def notify(self, owner: Address, notice: bytes, on_turn: OnTurn) -> None:
        """Leave a notice."""
        ...

    async def close(self) -> None:
        """Release everything; nothing is in progress, and it may never have been opened."""
        ...

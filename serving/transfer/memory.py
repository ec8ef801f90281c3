"""The memory of an agent, and the pieces of it that others request."""

import contextlib
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from serving.transfer.agent import Piece, TransferError

if sys.platform == "linux":
    import fcntl

    F_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1; `fcntl` has it since Python 3.13
    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    """Its size is fixed, and only its owner can write it, whatever handle others have."""


class Memory:
    """Memory without a name. Processes on the same host may read it through a handle that its owner sends them."""

    def __init__(self, num_bytes: int, *, has_handle: bool = True) -> None:
        """Allocate it; pages that were never written cost nothing.

        Args:
            num_bytes: its size.
            has_handle: whether others may get a handle of it, if the system supports that.

        Raises:
            TransferError: there is not enough memory.
        """
        if num_bytes < 1:
            raise ValueError(f"an agent needs at least 1 byte of memory, not {num_bytes}")
        self.handle = -1
        try:
            is_sealed = has_handle and sys.platform == "linux"
            if is_sealed:
                self.handle = os.memfd_create("dynabench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.handle, num_bytes)
            self._map = mmap.mmap(self.handle, num_bytes)
            if is_sealed:
                fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, SEALS)
        except (OSError, OverflowError) as error:
            self._close_handle()
            raise TransferError(
                f"{num_bytes} bytes of memory for KV cannot be allocated: {error}", "refused"
            ) from error
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Release it; if views of a part of it still exist, it is released with the last of these."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        self._close_handle()

    def _close_handle(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def runs(pieces: Iterable[Piece], *, source_bytes: int, target_bytes: int) -> list[Piece]:
    """Join adjacent pieces; leave out empty ones.

    Raises:
        TransferError: a piece is outside the memories of these sizes.
    """
    found: list[Piece] = []
    for piece in pieces:
        source, target, num_bytes = piece
        if min(piece) < 0 or source + num_bytes > source_bytes or target + num_bytes > target_bytes:
            raise TransferError(
                f"{Piece(*piece)} is outside the owner's {source_bytes} or the reader's {target_bytes} bytes",
                "refused",
            )
        if not num_bytes:
            continue
        if found and found[-1].source + found[-1].num_bytes == source:
            last = found[-1]
            if last.target + last.num_bytes == target:
                found[-1] = Piece(last.source, last.target, last.num_bytes + num_bytes)
                continue
        found.append(Piece(*piece))
    return found


def portions(pieces: Sequence[Piece], num_bytes: int) -> Iterator[list[Piece]]:
    """Cut pieces, in order, into lots of at most this many bytes and 1,000 pieces."""
    lot: list[Piece] = []
    room = num_bytes
    for source, target, left in pieces:
        while left:
            part = min(left, room)
            lot.append(Piece(source, target, part))
            source, target, left, room = source + part, target + part, left - part, room - part
            if not room or len(lot) == 1000:
                yield lot
                lot, room = [], num_bytes
    if lot:
        yield lot

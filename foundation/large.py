"""Columns of numbers: in memory, or in a file without a name if they are large.

What is in a file looks the same to those who use it, because it is mapped into memory. The difference is that a process can
let go of it: the system keeps it on the disk then, and brings back what is used again.
"""

import mmap
import tempfile
from array import array
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from foundation.errors import UserError

Cells: TypeAlias = "array[Any] | memoryview[Any]"
"""A column that is written a value at a time."""
Numbers = npt.NDArray[Any]
LARGE_BYTES = 1 << 20
"""Larger columns are in files."""
ROWS = 1 << 16
"""Rows that are written to a file at a time."""


def filled(value: "array[Any]", count: int) -> Cells:
    """Return a column that holds one value in every row.

    Raises:
        UserError: there is no room for its file.
    """
    if count * value.itemsize <= LARGE_BYTES:
        return value * count
    file = _new_file()
    for start in range(0, count, ROWS):  # written, because a process that touches the map of a full disk is killed
        _write(file, value * min(ROWS, count - start))
    code: Any = value.typecode
    return memoryview(_mapped(file)).cast(code)


class Growing:
    """A column that grows at its end, of the smallest type that holds all of its parts."""

    def __init__(self) -> None:
        self._parts: list[Numbers] = []  # that are not yet in the file
        self._num_bytes = 0  # of those
        self._file: IO[bytes] | None = None
        self._dtype = np.dtype(np.int32)  # of the file

    def add(self, part: Numbers) -> None:
        """Add rows.

        Raises:
            UserError: there is no room for the file.
        """
        self._parts.append(part)
        self._num_bytes += part.nbytes
        if self._num_bytes > LARGE_BYTES:
            self._put_away()

    def whole(self) -> Numbers:
        """Return all rows; nothing may be added afterwards."""
        if self._file is not None:
            self._put_away()
        if self._file is not None:
            return np.frombuffer(_mapped(self._file), self._dtype)
        return np.concatenate(self._parts) if self._parts else np.empty(0, self._dtype)

    def _put_away(self) -> None:
        """Move the rows in memory to the file, unless they are objects, such as numbers of more than 64 bits."""
        rows = np.concatenate([np.empty(0, self._parts[0].dtype if self._file is None else self._dtype), *self._parts])
        if self._file is not None and rows.dtype != self._dtype:
            rows = np.concatenate([np.frombuffer(_mapped(self._file), self._dtype), rows])
            self._file = None
        self._parts, self._num_bytes = [rows], 0
        if rows.dtype.kind == "O":
            return
        if self._file is None:
            self._file, self._dtype = _new_file(), rows.dtype
        _write(self._file, rows)
        self._parts = []


def let_go(column: object) -> None:
    """Keep what is in a file only there, until it is used again."""
    while isinstance(column, np.ndarray | memoryview):
        column = column.base if isinstance(column, np.ndarray) else column.obj
    if isinstance(column, mmap.mmap):
        column.madvise(mmap.MADV_DONTNEED)


def _new_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except OSError as error:
        raise _no_room(error) from error


def _write(file: IO[bytes], rows: Any) -> None:
    try:
        file.write(memoryview(rows))
        file.flush()
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> UserError:
    return UserError(
        f"{tempfile.gettempdir()}: no room for a column of a large workload ({error.strerror}); expected about "
        "120 bytes for each request, or another folder for temporary files in TMPDIR"
    )


def _mapped(file: IO[bytes]) -> mmap.mmap:
    """Return a file's content as memory, and close the file."""
    with file:
        return mmap.mmap(file.fileno(), 0)

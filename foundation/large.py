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
ROWS_PER_WRITE = 1 << 16


def filled(value: "array[Any]", count: int) -> Cells:
    """Return a column that holds one value in every row.

    Args:
        value: an array of one element, the value.
        count: the number of rows.

    Raises:
        UserError: there is no room for its file.
    """
    assert len(value) == 1, value
    if count * value.itemsize <= LARGE_BYTES:
        return value * count
    file = _new_file()
    # Written, because a process that touches the map of a full disk is killed.
    for start in range(0, count, ROWS_PER_WRITE):
        _write(file, value * min(ROWS_PER_WRITE, count - start))
    code: Any = value.typecode
    return memoryview(_mapped(file)).cast(code)


class Growing:
    """A column that grows at its end, of the smallest type that holds all of its parts.

    Objects, such as numbers of more than 64 bits, stay in memory, and so does all that comes after them.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        """Begin with no rows, and with a type that may become wider."""
        self._dtype = np.dtype(dtype)
        self._parts: list[Numbers] = []  # that are not yet in the file
        self._num_bytes = 0  # of those
        self._file: IO[bytes] | None = None
        self._file_dtype = self._dtype
        self._is_whole = False

    def add(self, part: Numbers) -> None:
        """Add rows.

        Raises:
            UserError: there is no room for the file.
        """
        assert not self._is_whole
        self._dtype = np.result_type(self._dtype, part.dtype)
        self._parts.append(part)
        self._num_bytes += part.nbytes
        if self._num_bytes > LARGE_BYTES and not self._has_objects:
            self._put_away()

    def whole(self) -> Numbers:
        """Return all rows, once; nothing may be added afterwards."""
        assert not self._is_whole
        self._is_whole = True
        if self._file is not None and not self._has_objects:
            self._put_away()
        parts = self._parts
        if self._file is not None:
            filed = np.frombuffer(_mapped(self._file), self._file_dtype)
            if not parts:
                return filed
            parts = [filed, *parts]
        return np.concatenate([np.empty(0, self._dtype), *parts])

    @property
    def _has_objects(self) -> bool:
        return self._dtype.kind == "O"

    def _put_away(self) -> None:
        """Move the rows in memory to the file."""
        if self._file is None:
            self._file, self._file_dtype = _new_file(), self._dtype
        elif self._file_dtype != self._dtype:
            self._widen(np.frombuffer(_mapped(self._file), self._file_dtype))
        for part in self._parts:
            _write(self._file, np.ascontiguousarray(part, self._dtype))
        self._parts, self._num_bytes = [], 0

    def _widen(self, rows: Numbers) -> None:
        """Write the file again with the type that the column has now."""
        self._file, self._file_dtype = _new_file(), self._dtype
        for start in range(0, len(rows), ROWS_PER_WRITE):
            _write(self._file, rows[start : start + ROWS_PER_WRITE].astype(self._dtype))
            let_go(rows)


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

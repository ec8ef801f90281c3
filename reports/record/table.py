"""The table of requests.parquet: the run, its arm and repeat, then the columns, with nulls for unknown values."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from reports.record.arrow import arrow_of
from reports.record.records import COLUMNS, MAX_S, Column, Record, Requests

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1 << 15
"""Rows that are copied at a time on their way into a table."""
OFTEN_EQUAL = {
    "sent_s": "intended_s", "first_token_s": "first_byte_s", "done_s": "last_token_s", "planned_isl": "isl", "planned_osl": "osl",
}  # fmt: skip
"""Columns to which a simulation gives the same values as to one before them."""
MAX_ROWS = 20_000_000
"""Requests of all runs; they need about 3 GB of memory."""
TEXTS = [name for name, column in COLUMNS.items() if column.dtype is np.object_]
"""The columns that an older schema left out where no request had any text."""


def write_requests(path: Path, runs: Sequence[Record]) -> None:
    """Write the requests of runs, a part at a time."""
    from pyarrow import parquet

    found = _parts(runs)
    first = next(found)
    with parquet.ParquetWriter(path, first.schema) as file:
        for part in chain([first], found):
            file.write_table(part)


def read_requests(path: Path, num_runs: int, *, is_of_before: bool) -> list[Requests]:
    """Read the requests of this many runs.

    Raises:
        ValueError: there are too many, or a column is not as it should be.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names, num_rows = file.schema_arrow.names, file.metadata.num_rows
        if num_rows > MAX_ROWS:
            raise ValueError(f"requests.parquet has {num_rows:,} rows; at most {MAX_ROWS:,} are read")

        def read(name: str) -> "pa.ChunkedArray":
            if name not in names:
                return pa.chunked_array([pa.repeat(COLUMNS[name].default, num_rows)])
            pa.default_memory_pool().release_unused()  # of the column before
            column = file.read(columns=[name])[name]
            return _of_before(name, column) if is_of_before else column

        return from_columns({*names, *(TEXTS if is_of_before else ())}, read, num_runs)


def to_table(runs: Sequence[Record]) -> "pa.Table":
    """Return the requests of runs as one table."""
    import pyarrow as pa

    return pa.concat_tables(_parts(runs))


def _parts(runs: Sequence[Record]) -> "Iterator[pa.Table]":
    """Yield the table of the requests of runs in parts, so that it is never in memory as a whole."""
    for place, run in enumerate(runs):
        for start in range(0, max(len(run.requests), 1), ROWS):
            yield _part(place, run, run.requests[start : start + ROWS])


def _part(place: int, run: Record, requests: Requests) -> "pa.Table":
    import pyarrow as pa

    count = len(requests)
    columns = {
        "run": arrow_of(np.full(count, place)),
        "arm": arrow_of(np.full(count, run.arm, object)),
        "repeat": arrow_of(np.full(count, run.repeat)),
    }
    for name in COLUMNS:
        columns[name] = arrow_of(getattr(requests, name))
    return pa.table(columns)


def from_columns(names: Collection[str], read: "Callable[[str], pa.ChunkedArray]", num_runs: int) -> list[Requests]:
    """Read back the requests of this many runs, one column after the other; those that an older folder lacks are unknown.

    Args:
        names: the columns that there are.
        read: returns one of them.
        num_runs: the number of runs.

    Raises:
        ValueError: a column that must be known is missing, or one has a value that it cannot have.
    """
    needed = ("run", *(name for name, column in COLUMNS.items() if not column.may_be_unknown))
    if missing := [name for name in needed if name not in names]:
        raise ValueError(f"requests.parquet has no column {', '.join(missing)}")
    run_of = _read(Column("", name="run", dtype=np.int32), read("run"))
    columns: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        found = _read(column, read(name)) if name in names else column.array(None, len(run_of))
        columns[name] = _shared(found, columns.get(OFTEN_EQUAL.get(name, "")))
    whole = Requests(**columns)
    return [whole[_rows(run_of, place)] for place in range(num_runs)]


def _of_before(name: str, stored: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Use nulls where the previous version used -1."""
    import pyarrow as pa
    from pyarrow import compute

    is_number = pa.types.is_integer(stored.type) or pa.types.is_floating(stored.type)
    may_be_unknown = name in COLUMNS and COLUMNS[name].may_be_unknown
    return compute.if_else(compute.less(stored, 0), None, stored) if is_number and may_be_unknown else stored


def _shared(found: Any, other: Any) -> Any:
    """Return a column with the values of another one if they are equal, so that both take the memory of one."""
    if other is None or not np.array_equal(np.ma.getdata(found), np.ma.getdata(other)):
        return found
    return np.ma.MaskedArray(np.ma.getdata(other), found.mask)


def _rows(run_of: npt.NDArray[np.int32], place: int) -> "slice | npt.NDArray[np.bool_]":
    """Return the rows of a run: a slice, which is no copy, if they follow each other."""
    is_its = run_of == place
    count = int(is_its.sum())
    first = int(is_its.argmax()) if count else 0
    return slice(first, first + count) if is_its[first : first + count].all() else is_its


def _read(column: Column, stored: "pa.ChunkedArray") -> Any:
    """Return a column that was read.

    Raises:
        ValueError: it has another type, lacks a value that must be known, or has one that is out of range.
    """
    import pyarrow as pa

    kind = stored.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    fits, expected, fill = is_number, "a column of finite numbers", cast("Any", 0)
    if column.dtype is np.object_:
        fits, expected, fill = is_text, "text", ""
    elif column.dtype is np.bool_:
        fits, expected, fill = pa.types.is_boolean(kind), "true or false", False
    if not fits or (stored.null_count and not column.may_be_unknown):
        raise ValueError(f"{column.name} in requests.parquet is not {expected}")
    is_unknown = stored.is_null().to_numpy() if stored.null_count else np.ma.nomask
    values = _texts(stored) if is_text else stored.fill_null(fill).to_numpy()
    if is_number and not np.isfinite(values).all():
        raise ValueError(f"{column.name} in requests.parquet is not {expected}")
    if column.dtype is np.int32 and len(values) and (values != np.rint(values)).any():
        raise ValueError(f"{column.name} in requests.parquet is not a column of whole numbers")
    if column.dtype is np.int32 and len(values) and not column.least <= values.min() <= values.max() < column.limit:
        raise ValueError(f"{column.name} in requests.parquet ranges from {values.min()} to {values.max()}")
    if column.dtype is np.float64 and len(values) and max(-values.min(), values.max()) > MAX_S:
        raise ValueError(f"{column.name} in requests.parquet ranges from {values.min():g} to {values.max():g} s")
    return column.array(np.ma.MaskedArray(values, is_unknown) if column.may_be_unknown else values, len(values))


def _texts(stored: "pa.ChunkedArray") -> Any:
    """Return texts, each kept once."""
    found = stored.dictionary_encode().combine_chunks()
    return np.array([*found.dictionary.to_pylist(), ""], object)[found.indices.to_numpy()]

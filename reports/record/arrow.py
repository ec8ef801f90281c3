"""Columns of Arrow from numpy's, without loading pandas, as `pyarrow.array` and `pyarrow.scalar` do if it is installed."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Column = np.ndarray[Any, Any]


def arrow_of(values: Column) -> "pa.Array":
    """Return a column of numbers, truth values or texts; what is masked is null."""
    import pyarrow as pa

    data, mask = np.ma.getdata(values), np.ma.getmaskarray(values)
    known = pa.py_buffer(np.packbits(~mask, bitorder="little")) if mask.any() else None
    if data.dtype == np.object_:
        return pa.Array.from_buffers(pa.string(), len(data), [known, *map(pa.py_buffer, _texts(data, mask))])
    is_truth = data.dtype == np.bool_
    stored = np.packbits(data, bitorder="little") if is_truth else np.ascontiguousarray(data)
    kind = pa.bool_() if is_truth else pa.from_numpy_dtype(data.dtype)
    return pa.Array.from_buffers(kind, len(data), [known, pa.py_buffer(stored)])


def _texts(data: Column, mask: Column) -> tuple[Column, bytes]:
    """Return where each text begins and ends, and all texts; the place of an unknown one is empty."""
    parts = list(map(str.encode, np.where(mask, "", data) if mask.any() else data))
    return np.cumsum([0, *map(len, parts)], dtype=np.int32), b"".join(parts)

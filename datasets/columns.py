"""Arrow columns as numpy arrays and back, without pandas.

pyarrow's own ``to_numpy``, ``array`` and ``scalar`` import pandas where it is installed, which takes longer than
reading a store does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CODE = 2**62


def numbers(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Values of an int64, float64, bool or timestamp column [n]; timestamps as int64 microseconds.

    A missing value is NaN in a float column, else zero or False.
    """
    array = _one(column)
    start, stop, buffers = array.offset, array.offset + len(array), array.buffers()
    if str(array.type) == "bool":
        values = _bits(buffers[1], start, stop)
    else:
        dtype = np.float64 if str(array.type) == "double" else np.int64
        values = np.frombuffer(buffers[1] or b"", dtype=dtype)[start:stop]
    if not array.null_count:
        return values
    return np.where(_bits(buffers[0], start, stop), values, np.nan if values.dtype == np.float64 else 0)


def codes(column: pa.ChunkedArray | pa.Array) -> tuple[np.ndarray, list[str]]:
    """A text column as int64 codes [n] into its distinct values; a missing value is -1."""
    encoded = _one(column).dictionary_encode()
    indices = encoded.indices
    indices_of_rows = np.frombuffer(indices.buffers()[1] or b"", dtype=np.int32)
    values = indices_of_rows[indices.offset : indices.offset + len(indices)].astype(np.int64)
    if indices.null_count:
        values[~_bits(indices.buffers()[0], indices.offset, indices.offset + len(indices))] = -1
    return values, encoded.dictionary.to_pylist()


def values(column: pa.ChunkedArray) -> list[Any]:
    """A number or text column without missing values as a list, faster than ``to_pylist``."""
    if str(column.type) != "string":
        return numbers(column).tolist()
    places, texts = codes(column)
    return np.array([*texts, None], dtype=object)[places].tolist()


def matching(table: pa.Table, name: str, value: str) -> pa.Table:
    """The rows of a table whose text column has one value."""
    import pyarrow.compute as pc

    return table.filter(pc.equal(table[name], text_array([value])[0]))


def without(table: pa.Table, name: str, value: str) -> pa.Table:
    """The rows of a table whose text column has another value, or none."""
    import pyarrow.compute as pc

    equal = numbers(pc.equal(table[name], text_array([value])[0]))
    return table.take(number_array(np.flatnonzero(~equal))) if equal.any() else table


def text_array(texts: Iterable[str]) -> pa.Array:
    """An Arrow array of strings."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def number_array(numbers: np.ndarray) -> pa.Array:
    """An Arrow array of int64."""
    import pyarrow as pa

    contiguous = np.ascontiguousarray(numbers, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(contiguous), [None, pa.py_buffer(contiguous)])


def group_keys(table: pa.Table, names: Iterable[str]) -> np.ndarray:
    """One int64 a row [n], equal exactly where all the named columns are; what is missing is a value of its own."""
    key, size = np.zeros(len(table), dtype=np.int64), 1
    for name in names:
        column = table[name]
        code = codes(column)[0] if str(column.type) == "string" else numbers(column)
        if code.dtype.kind == "f":
            code = np.unique(np.nan_to_num(code, nan=-np.inf), return_inverse=True)[1].reshape(-1)
        low = int(code.min(initial=0))
        span = int(code.max(initial=0)) - low + 1
        if span > MAX_CODE // max(size, len(table)):
            code, low = np.unique(code, return_inverse=True)[1].reshape(-1), 0
            span = int(code.max(initial=0)) + 1
        if size * span > MAX_CODE:
            key = np.unique(key, return_inverse=True)[1].reshape(-1)
            size = int(key.max(initial=0)) + 1
        key, size = key * span + (code - low), size * span
    return key


def _one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One contiguous array, also of a column without chunks."""
    import pyarrow as pa

    if isinstance(column, pa.Array):
        return column
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.nulls(0, column.type)


def _bits(buffer: Any, start: int, stop: int) -> np.ndarray:
    """Bits ``start`` to ``stop`` of an Arrow bitmap as bool."""
    if buffer is None:
        return np.ones(stop - start, dtype=bool)
    return np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), bitorder="little")[start:stop].astype(bool)

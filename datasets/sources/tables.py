"""What a source hands over: columns of one kind, and what it refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..columns import number_array, text_array
from ..ops import Dim, kind
from ..schema import SchemaError, schema_for

LARGEST = 2.0**53  # float64 holds integers exactly up to here


class SourceError(ValueError):
    """A source, path or file that cannot be imported. The message says what and what to do."""


@dataclass(frozen=True)
class Rejected:
    """Rows kept out for one reason; 0 rows when a whole file could not be read. ``example`` shows the first."""

    reason: str
    rows: int
    example: str


@dataclass(frozen=True)
class RowBatch:
    """Some rows of one kind from one file.

    ``columns`` maps columns of the kind's schema to an array [n] (numpy numbers, Arrow numbers or text, or a list of
    str) or to one value for all rows; at least one is an array. Dims with choices take the index, or for all rows the
    choice's name. Floats serve as dims when they are whole numbers; what is no whole number is rejected here. Needed:
    the dims without default, ``dtype``, ``device_id``, ``latency_us``, ``backend`` and ``measured_at`` (a datetime).
    Filled in when missing: other dims with their default, ``out_dtype`` with ``dtype``, ``status`` ok, ``cache``
    warm, ``timer`` imported, ``source`` and ``source_ref`` (the file's name); the rest stays empty.
    """

    kind: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()

    def __len__(self) -> int:
        """Number of rows."""
        return next((len(c) for c in self.columns.values() if not _scalar(c)), 0)


def combined(batches: Iterable[RowBatch], source: str, file: Path) -> Iterator[tuple[str, pa.Table, list[Rejected]]]:
    """Per kind: its rows of one file in the store's schema without ``run_id``, and the rows that are no integers.

    SchemaError where a batch has a column that its kind lacks, or lacks one that it needs.
    """
    kinds: dict[str, list[RowBatch]] = {}
    for batch in batches:
        if len(batch):
            kinds.setdefault(batch.kind, []).append(batch)
    for kind_name, group in kinds.items():
        typed = [_typed(batch, source, file) for batch in group]
        yield kind_name, pa.concat_tables([table for table, _ in typed]), [r for _, rejected in typed for r in rejected]


def _typed(batch: RowBatch, source: str, file: Path) -> tuple[pa.Table, list[Rejected]]:
    definition, schema, rows = kind(batch.kind), schema_for(batch.kind), len(batch)
    schema = schema.remove(schema.get_field_index("run_id"))
    unknown = [name for name in batch.columns if name not in schema.names]
    if unknown:
        raise SchemaError(f"{batch.kind} has no column {unknown[0]!r}")
    columns = {**_defaults(batch, source, file), **batch.columns}
    good = np.ones(rows, dtype=bool)
    rejected, arrays = [], {}
    for dim in definition.dims:
        array, integral = _integers(dim, columns[dim.name], rows) if dim.name in columns else _missing(batch, dim.name)
        wrong = good & ~integral
        if wrong.any():
            value = columns[dim.name] if _scalar(columns[dim.name]) else columns[dim.name][int(np.argmax(wrong))]
            example = f"{dim.name}={value} in row {int(np.argmax(wrong))} of {file.name}"
            rejected.append(Rejected(f"{batch.kind}.{dim.name} is not an integer", int(wrong.sum()), example))
        good &= integral
        arrays[dim.name] = number_array(array)
    for name in schema.names[len(definition.dims) :]:
        if name not in columns and name in ("device_id", "measured_at", "backend", "dtype"):
            _missing(batch, name)
        arrays[name] = _column(columns.get(name), schema.field(name).type, rows)
    table = pa.table([arrays[name] for name in schema.names], schema=schema)
    return table if good.all() else table.filter(pa.array(good)), rejected


def _defaults(batch: RowBatch, source: str, file: Path) -> dict[str, Any]:
    dims = {dim.name: dim.default for dim in kind(batch.kind).dims if dim.default is not None}
    constants = {"status": "ok", "cache": "warm", "timer": "imported", "source": source, "source_ref": file.name}
    return {**dims, **constants, "out_dtype": batch.columns.get("dtype")}


def _missing(batch: RowBatch, name: str) -> Any:
    raise SchemaError(f"{batch.kind} rows lack the column {name!r}")


def _integers(dim: Dim, column: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A dim as int64 [n], and where it is a whole number."""
    if isinstance(column, str):
        column = dim.parse("dim", column)
    values = np.full(rows, column) if _scalar(column) else np.asarray(_numpy(column))
    if values.dtype.kind in "iub":
        return values.astype(np.int64), np.ones(rows, dtype=bool)
    values = values.astype(np.float64)
    integral = np.isfinite(values) & (np.abs(values) < LARGEST)
    integral[integral] = values[integral] == np.floor(values[integral])
    return np.where(integral, values, 0.0).astype(np.int64), integral


def _column(column: Any, kind: pa.DataType, rows: int) -> pa.Array | pa.ChunkedArray:
    """Any accepted form of a column as Arrow of the wanted type."""
    if column is None:
        return pa.nulls(rows, kind)
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        return column if column.type == kind else column.cast(kind)
    if pa.types.is_string(kind):
        if _scalar(column):
            return _repeated(str(column), rows)
        return text_array([str(text) for text in column])
    if isinstance(column, datetime):
        column = int(column.astimezone(UTC).timestamp()) * 1_000_000
    values = np.full(rows, column) if _scalar(column) else np.asarray(column)
    if pa.types.is_boolean(kind):
        return pa.array(values.astype(bool))
    if pa.types.is_floating(kind) and np.isnan(values := values.astype(np.float64)).any():
        return pa.array(values, mask=np.isnan(values))
    numpy_type = np.float64 if pa.types.is_floating(kind) else np.int64
    values = np.ascontiguousarray(values, dtype=numpy_type)
    array = pa.Array.from_buffers(
        pa.float64() if numpy_type is np.float64 else pa.int64(), rows, [None, pa.py_buffer(values)]
    )
    return array if array.type == kind else array.cast(kind)


def _repeated(text: str, rows: int) -> pa.Array:
    """One text for every row."""
    one = text.encode()
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(one))
    return pa.StringArray.from_buffers(rows, pa.py_buffer(ends), pa.py_buffer(one * rows))


def _numpy(column: Any) -> Any:
    if isinstance(column, (pa.Array, pa.ChunkedArray)):
        return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
    return column


def _scalar(column: Any) -> bool:
    return column is None or isinstance(column, (str, int, float, bool, np.generic, datetime))

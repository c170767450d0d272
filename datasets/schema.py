"""The row of the measurement store: one timed op, with its conditions and its provenance.

Every kind has its own typed Arrow schema: identity (the kind's dims as int64, then dtype, out_dtype, backend),
result, conditions, provenance. A dim with choices is stored as the index of the choice; the field's metadata lists
the names. The schema's metadata carries its version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .columns import number_array, numbers, text_array, values
from .dtypes import BITS
from .kernels import value_of
from .near import meant
from .ops import Dim, Op, kind

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "unsupported", "timeout", "error")
CACHES = ("cold", "warm")
CLOCKS = ("burst", "steady")
"""At which clocks calls were repeated: boost (for milliseconds), or those that the power limit leaves."""


class SchemaError(ValueError):
    """Rows that do not fit the schema of their kind. The message names the column or value."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed op on one device in one software environment.

    Latencies are microseconds for one execution; ``latency_us`` is the median. A failed op has a status other than
    ``ok``, its reason in ``error``, and no latency.
    """

    op: Op
    device_id: str
    run_id: str
    measured_at: datetime
    backend: str = "torch"
    status: str = "ok"
    error: str | None = None
    latency_us: float | None = None
    latency_p10_us: float | None = None
    latency_p90_us: float | None = None
    latency_min_us: float | None = None
    latency_mean_us: float | None = None
    latency_std_us: float | None = None
    iterations: int | None = None
    timer: str | None = None  # cuda_graph, cuda_event, cpu_clock, imported; eager: with the host's dispatch inside
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: bool | None = None
    clocks: str | None = None
    event_overhead_us: float | None = None  # what was taken off each sample for events and the launch of a graph
    kernel: str | None = None  # what the backend chose where it has a choice, or the package and version it comes from
    device_healthy: bool | None = None  # after a failure: whether the device then passed its check
    cache: str = "warm"
    device_name: str = ""
    node: str = ""
    opcast_version: str = ""
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    cudnn: str | None = None
    cublas: str | None = None
    triton: str | None = None
    gpu: str | None = None  # a hash of the GPU's UUID
    ecc: bool | None = None
    clock_limit_mhz: float | None = None  # what a user or administrator holds the SM clock to
    firmware: str | None = None  # the version of the GPU's VBIOS
    source: str = "harness"
    source_ref: str | None = None
    license: str | None = None


_TYPES = {"str": "string", "float": "float64", "int": "int64", "bool": "bool", "datetime": "timestamp"}
COLUMNS: dict[str, str] = {
    f.name: _TYPES[str(f.type).removesuffix(" | None")] for f in dataclasses.fields(Measurement) if f.name != "op"
}
"""Every column that is no dim or dtype, with its Arrow type."""
REQUIRED = ("device_id", "run_id", "measured_at", "backend", "status", "cache", "source")
ENVIRONMENT = ("torch", "cuda", "driver", "nccl", "source", "power_limit_w")
"""Columns that tell one software environment from another."""


@lru_cache
def schema_for(kind_name: str) -> pa.Schema:
    """The Arrow schema of a kind's rows. OpError for an unknown kind."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "float64": pa.float64(),
        "int64": pa.int64(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    fields = [
        pa.field(dim.name, pa.int64(), False, {"choices": ",".join(dim.choices)} if dim.choices else None)
        for dim in kind(kind_name).dims
    ]
    fields += [pa.field("dtype", pa.string(), False), pa.field("out_dtype", pa.string(), False)]
    fields += [pa.field(name, types[type_name], name not in REQUIRED) for name, type_name in COLUMNS.items()]
    return pa.schema(fields, {"opcast.schema_version": str(SCHEMA_VERSION), "opcast.kind": kind_name})


def table_from(kind_name: str, rows: Iterable[Measurement]) -> pa.Table:
    """A typed table of measurements of one kind. SchemaError names a row or value that does not fit its type."""
    import pyarrow as pa

    rows = list(rows)
    definition = kind(kind_name)
    columns: dict[str, list[Any]] = {name: [] for name in (*definition.names, "dtype", "out_dtype", *COLUMNS)}
    for row in rows:
        if row.op.kind != kind_name:
            raise SchemaError(f"{row.op} is no {kind_name}")
        for name, value in zip(definition.names, row.op.dims, strict=True):
            columns[name].append(value)
        columns["dtype"].append(row.op.dtype)
        columns["out_dtype"].append(row.op.out_dtype)
        for name in COLUMNS:
            columns[name].append(getattr(row, name))
    try:
        table = pa.table(columns, schema=schema_for(kind_name))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise SchemaError(f"{kind_name} rows do not fit the schema: {error}") from None
    return table


def conform(kind_name: str, table: pa.Table, columns: Iterable[str] | None = None) -> pa.Table:
    """A table in the kind's schema (or those ``columns`` of it), cast; values are not looked at.

    A missing nullable column becomes null, a missing dim its default, or what the row's backend runs of it. A dim whose
    field metadata lists other choices than today's is recoded by name. SchemaError for a missing or unknown column, or
    one that cannot be cast.
    """
    import pyarrow as pa

    schema = schema_for(kind_name)
    names = schema.names if columns is None else list(columns)
    unknown = sorted(set(names) - set(schema.names)) or sorted(set(table.column_names) - set(schema.names))
    if unknown:
        raise SchemaError(f"{kind_name} has no column {unknown[0]!r}{meant(unknown[0], schema.names)}")
    dims = {dim.name: dim for dim in kind(kind_name).dims}
    fields = [schema.field(name) for name in names]
    arrays = [_conformed(kind_name, field, table, dims.get(field.name)) for field in fields]
    return pa.table(arrays, schema=pa.schema(fields, schema.metadata))


def _conformed(kind_name: str, field: pa.Field, table: pa.Table, dim: Dim | None) -> pa.ChunkedArray | pa.Array:
    import pyarrow as pa

    if field.name not in table.column_names:
        if dim is not None and dim.of_backend and "backend" in table.column_names:
            return number_array(
                np.array([value_of(dim.name, backend) for backend in values(table["backend"])], dtype=np.int64)
            )
        if dim is not None and dim.default is not None:
            return number_array(np.full(len(table), dim.default))
        if field.nullable:
            return pa.nulls(len(table), field.type)
        raise SchemaError(f"{kind_name} rows lack the column {field.name!r}")
    column = table[field.name]
    if column.type != field.type:
        try:
            column = column.cast(field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise SchemaError(f"column {field.name!r} of {kind_name} is not {field.type}: {reason}") from None
    stored = (table.schema.field(field.name).metadata or {}).get(b"choices", b"").decode()
    if dim is None or not stored or tuple(stored.split(",")) == dim.choices[: stored.count(",") + 1]:
        return column
    return _recoded(kind_name, dim, tuple(stored.split(",")), column)


def _recoded(kind_name: str, dim: Dim, stored: tuple[str, ...], column: pa.ChunkedArray) -> pa.Array:
    """A column of choices, written when the list of choices was another, in today's numbers."""
    code = numbers(column)
    for number in np.unique(code):
        if not 0 <= number < len(stored) or stored[number] not in dim.choices:
            name = stored[number] if 0 <= number < len(stored) else number
            raise SchemaError(f"{kind_name}.{dim.name}={name} is none of {', '.join(dim.choices)}: convert the rows")
    today = np.array([dim.choices.index(name) if name in dim.choices else -1 for name in stored], dtype=np.int64)
    return number_array(today[code])


def check_values(kind_name: str, table: pa.Table) -> pa.Table:
    """The table itself. SchemaError for the first rule of :func:`impossible_values` that a row breaks."""
    for reason, rows in impossible_values(kind_name, table):
        raise SchemaError(f"{reason} (row {int(np.flatnonzero(rows)[0])} of {len(table)})")
    return table


def impossible_values(kind_name: str, table: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    """What no row may hold: a reason and the rows it is true of (bool [n]), for each rule that is broken.

    A dim out of range, an unknown dtype, status or cache, an ok row without a positive latency; but first of all a
    null where none may stand.
    """
    import pyarrow.compute as pc

    for field in table.schema:
        if not field.nullable and table[field.name].null_count:
            yield f"{kind_name}.{field.name} may not be empty", numbers(pc.is_null(table[field.name]))
            return
    for dim in kind(kind_name).dims:
        column = numbers(table[dim.name])
        wrong = (column < dim.low) | ((column >= len(dim.choices)) if dim.choices else False)
        if wrong.any():
            bounds = f"from {dim.low} to {len(dim.choices) - 1}" if dim.choices else f"at least {dim.low}"
            yield f"{kind_name}.{dim.name}={column[wrong][0]} must be {bounds}", wrong
    choices = {"dtype": BITS, "out_dtype": BITS, "status": STATUSES, "cache": CACHES, "clocks": CLOCKS}
    for name, allowed in choices.items():
        column = table[name] if name != "clocks" else pc.fill_null(table[name], CLOCKS[0])
        wrong = numbers(pc.invert(pc.is_in(column, text_array(allowed))))
        if wrong.any():
            value = table[name][int(np.flatnonzero(wrong)[0])].as_py()
            yield f"{name}={value!r} is not one of {', '.join(allowed)}", wrong
    latency = numbers(table["latency_us"])
    wrong = numbers(pc.equal(table["status"], text_array(["ok"])[0])) & ~(np.isfinite(latency) & (latency > 0))
    if wrong.any():
        yield f"an ok row of {kind_name} needs a positive, finite latency_us", wrong


def check_file_schema(schema: pa.Schema) -> str:
    """The kind of a stored file. SchemaError when it is not ours, or written by a newer version."""
    metadata = schema.metadata or {}
    version, kind_name = metadata.get(b"opcast.schema_version", b""), metadata.get(b"opcast.kind")
    if not version.isdigit() or kind_name is None:
        raise SchemaError("was not written by opcast: move it out of the store (`opcast import` takes other tables)")
    if int(version) > SCHEMA_VERSION:
        raise SchemaError(f"has schema version {int(version)}, this opcast reads {SCHEMA_VERSION}: update opcast")
    return kind_name.decode()


def stored_columns(kind_name: str, schema: pa.Schema, columns: Iterable[str] | None = None) -> list[str]:
    """The wanted columns that a file has. SchemaError when it tells ops apart by a dim that the kind has no more."""
    names = schema.names
    dims = names[: names.index("dtype")] if "dtype" in names else []
    gone = [name for name in dims if name not in kind(kind_name).names]
    if gone:
        raise SchemaError(f"has dim {gone[0]!r}, which {kind_name} has no more: convert its rows or move it away")
    chosen = set(schema_for(kind_name).names if columns is None else columns)
    chosen.update("backend" for dim in kind(kind_name).dims if dim.of_backend and dim.name in chosen.difference(names))
    return [name for name in names if name in chosen]


def row_ops(kind_name: str, table: pa.Table) -> list[Op]:
    """The op of every row, as stored: writing has checked it."""
    dims = zip(*(values(table[name]) for name in kind(kind_name).names), strict=True)
    dtypes = values(table["dtype"]), values(table["out_dtype"])
    return [Op(kind_name, *parts) for parts in zip(dims, *dtypes, strict=True)]

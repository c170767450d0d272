"""The row of the measurement store: one timed op, with its conditions and its provenance.

Every kind has its own typed Arrow schema: identity (the kind's dims as int64, then dtype, out_dtype, backend),
result, conditions, provenance. A dim with choices is stored as the index of the choice; the field's metadata lists
the names. The schema's metadata carries its version.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .ops import Op, OpError, kind, make_op

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
STATUSES = ("ok", "oom", "unsupported", "timeout", "error")
TIMERS = ("cuda_graph", "cuda_event", "cpu_clock", "imported")
CACHES = ("cold", "warm")


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
    timer: str | None = None
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: bool | None = None
    cache: str = "warm"
    device_name: str = ""
    node: str = ""
    opcast_version: str = ""
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    source: str = "harness"
    source_ref: str | None = None
    license: str | None = None


_TYPES = {"str": "string", "float": "float64", "int": "int64", "bool": "bool", "datetime": "timestamp"}
COLUMNS: dict[str, str] = {
    f.name: _TYPES[str(f.type).removesuffix(" | None")] for f in dataclasses.fields(Measurement) if f.name != "op"
}
"""Every column that is no dim or dtype, with its Arrow type."""
REQUIRED = ("device_id", "run_id", "measured_at", "backend", "status", "cache", "source")
ENVIRONMENT = ("torch", "cuda", "driver", "nccl", "source")
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
    """A typed table of measurements of one kind. SchemaError names a row that does not fit."""
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
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"{kind_name} rows do not fit the schema: {error}") from None
    return check_values(kind_name, table)


def conform(kind_name: str, table: pa.Table) -> pa.Table:
    """Any table with the identity columns as a table of the kind's schema: missing nullable columns become null.

    Raises SchemaError for a missing required column, an unknown one, or a value that does not fit its type.
    """
    import pyarrow as pa

    wanted = schema_for(kind_name)
    unknown = sorted(set(table.column_names) - set(wanted.names))
    if unknown:
        raise SchemaError(f"{kind_name} has no column {unknown[0]!r}")
    arrays = []
    for field in wanted:
        if field.name in table.column_names:
            try:
                arrays.append(table[field.name].cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise SchemaError(f"column {field.name!r} of {kind_name} is not {field.type}: {error}") from None
        elif field.nullable:
            arrays.append(pa.nulls(len(table), field.type))
        else:
            raise SchemaError(f"{kind_name} rows lack the column {field.name!r}")
    return check_values(kind_name, pa.table(arrays, schema=wanted))


def check_values(kind_name: str, table: pa.Table) -> pa.Table:
    """The table itself. SchemaError for a status, cache or latency that cannot be, or a null where none may stand."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for field in table.schema:
        if not field.nullable and table[field.name].null_count:
            raise SchemaError(f"{kind_name}.{field.name} may not be empty")
    for name, allowed in (("status", STATUSES), ("cache", CACHES)):
        wrong = pc.filter(table[name], pc.invert(pc.is_in(table[name], pa.array(allowed))))
        if len(wrong):
            raise SchemaError(f"{name}={wrong[0].as_py()!r} is not one of {', '.join(allowed)}")
    ok = pc.equal(table["status"], "ok")
    good = pc.fill_null(pc.and_(pc.greater(table["latency_us"], 0.0), pc.is_finite(table["latency_us"])), False)
    if pc.any(pc.and_(ok, pc.invert(good))).as_py():
        raise SchemaError(f"an ok row of {kind_name} needs a positive, finite latency_us")
    return table


def check_file_schema(schema: pa.Schema, where: str) -> str:
    """The kind of a stored file. SchemaError when it is not ours, or written by a newer version."""
    metadata = schema.metadata or {}
    version = metadata.get(b"opcast.schema_version")
    if version is None:
        raise SchemaError(f"{where} was not written by opcast: move it out of the store")
    if int(version) > SCHEMA_VERSION:
        raise SchemaError(
            f"{where} has schema version {int(version)}, this opcast reads {SCHEMA_VERSION}: update opcast"
        )
    return metadata[b"opcast.kind"].decode()


def row_ops(kind_name: str, table: pa.Table) -> list[Op]:
    """The op of every row. Rows that are no valid op any more raise OpError."""
    names = kind(kind_name).names
    columns = [table[name].to_pylist() for name in (*names, "dtype", "out_dtype")]
    ops = []
    for values in zip(*columns, strict=True):
        *dims, dtype, out_dtype = values
        if any(value is None for value in dims):
            raise OpError(f"a {kind_name} row lacks a dim: {json.dumps(dict(zip(names, dims, strict=True)))}")
        ops.append(make_op(kind_name, dtype, out_dtype, **dict(zip(names, dims, strict=True))))
    return ops

"""The row of the store: what a schema says, what it refuses, and what it makes of files from other versions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opcast.datasets.ops import KINDS, OpError, make_op
from opcast.datasets.schema import (
    COLUMNS,
    REQUIRED,
    SCHEMA_VERSION,
    Measurement,
    SchemaError,
    check_file_schema,
    check_values,
    conform,
    row_ops,
    schema_for,
    table_from,
)
from opcast.datasets.store import Store

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
GEMM = make_op("gemm", m=16, n=32, k=64, layout="tn", dtype="fp8", out_dtype="bf16")
# The contract's columns beside the dims: a column that goes missing breaks other people's scripts.
CONTRACT = [
    "dtype",
    "out_dtype",
    "backend",
    "status",
    "error",
    "latency_us",
    "latency_p10_us",
    "latency_p90_us",
    "latency_min_us",
    "latency_mean_us",
    "latency_std_us",
    "iterations",
    "timer",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "temperature_c",
    "power_w",
    "power_limit_w",
    "throttled",
    "clocks",
    "event_overhead_us",
    "cache",
    "device_id",
    "device_name",
    "node",
    "run_id",
    "measured_at",
    "opcast_version",
    "torch",
    "cuda",
    "driver",
    "nccl",
    "cudnn",
    "cublas",
    "triton",
    "gpu",
    "ecc",
    "clock_limit_mhz",
    "firmware",
    "kernel",
    "device_healthy",
    "source",
    "source_ref",
    "license",
]


def measurement(**changes: object) -> Measurement:
    values = {"op": GEMM, "device_id": "d", "run_id": "r", "measured_at": NOW, "latency_us": 3.5} | changes
    return Measurement(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind_name", sorted(KINDS))
def test_every_kind_has_a_typed_schema(kind_name: str) -> None:
    schema = schema_for(kind_name)
    assert set(schema.names) == {*KINDS[kind_name].names, *CONTRACT}
    for dim in KINDS[kind_name].dims:
        field = schema.field(dim.name)
        assert (field.type, field.nullable) == (pa.int64(), False)
        assert (field.metadata or {}).get(b"choices", b"").decode() == ",".join(dim.choices)
    assert schema.field("measured_at").type == pa.timestamp("us", tz="UTC")
    assert schema.field("throttled").type == pa.bool_()
    assert schema.field("latency_us").type == pa.float64()
    assert schema.field("iterations").type == pa.int64()
    assert schema.metadata[b"opcast.schema_version"] == str(SCHEMA_VERSION).encode()
    assert check_file_schema(schema) == kind_name
    assert not any(schema.field(name).nullable for name in REQUIRED)


def test_no_dim_is_named_like_a_column() -> None:
    for definition in KINDS.values():
        assert not set(definition.names) & {*COLUMNS, "dtype", "out_dtype"}


def test_rows_become_columns_and_ops_again() -> None:
    failed = measurement(op=GEMM.replace(m=1), status="oom", error="out of memory", latency_us=None, throttled=None)
    table = table_from("gemm", [measurement(), failed])
    assert table.schema.equals(schema_for("gemm"), check_metadata=True)
    assert row_ops("gemm", table) == [GEMM, GEMM.replace(m=1)]
    assert table["layout"].to_pylist() == [2, 2]
    assert table["latency_us"].to_pylist() == [3.5, None]
    assert table["measured_at"].to_pylist() == [NOW, NOW]
    assert len(table_from("gemm", [])) == 0


def test_a_row_of_another_kind_or_type_is_named() -> None:
    with pytest.raises(SchemaError, match=r"rms_norm\[rows=1 cols=2 bf16\] is no gemm"):
        table_from("gemm", [measurement(op=make_op("rms_norm", rows=1, cols=2))])
    with pytest.raises(SchemaError, match="gemm rows do not fit the schema"):
        table_from("gemm", [measurement(latency_us="fast")])
    with pytest.raises(OpError, match="unknown op 'gemn'"):
        schema_for("gemn")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("status", ["ok", "fine"], "status='fine' is not one of ok, oom"),
        ("cache", ["warm", "hot"], "cache='hot' is not one of cold, warm"),
        ("dtype", ["bf16", "bf17"], "dtype='bf17' is not one of"),
        ("m", [1, 0], "gemm.m=0 must be at least 1"),
        ("layout", [0, 3], "gemm.layout=3 must be from 0 to 2"),
        ("latency_us", [1.0, 0.0], "positive, finite latency_us"),
        ("latency_us", [1.0, -2.0], "positive, finite latency_us"),
        ("latency_us", [1.0, float("nan")], "positive, finite latency_us"),
        ("latency_us", [1.0, float("inf")], "positive, finite latency_us"),
        ("latency_us", [1.0, None], "positive, finite latency_us"),
        ("device_id", ["d", None], "gemm.device_id may not be empty"),
    ],
)
def test_values_that_cannot_be_are_refused(column: str, values: list[object], message: str) -> None:
    table = table_from("gemm", [measurement(), measurement()])
    field = table.schema.field(column)
    damaged = table.set_column(table.schema.get_field_index(column), field, pa.array(values, field.type))
    with pytest.raises(SchemaError, match=message) as caught:
        check_values("gemm", damaged)
    assert "\n" not in str(caught.value)
    assert check_values("gemm", table) is table


def test_conform_fills_what_may_be_missing_and_names_what_may_not() -> None:
    table = table_from("gemm", [measurement()])
    narrow = table.drop_columns(["power_w", "nccl", "batch"]).cast(
        pa.schema([f for f in table.schema if f.name not in ("power_w", "nccl", "batch")])
    )
    widened = conform("gemm", narrow)
    assert widened.schema.equals(schema_for("gemm"))
    assert widened["power_w"].to_pylist() == [None]
    assert widened["batch"].to_pylist() == [1]
    with pytest.raises(SchemaError, match="gemm rows lack the column 'm'"):
        conform("gemm", table.drop_columns(["m"]))
    with pytest.raises(SchemaError, match="gemm rows lack the column 'run_id'"):
        conform("gemm", table.drop_columns(["run_id"]))
    with pytest.raises(SchemaError, match=r"gemm has no column 'latency_ms'; did you mean latency_us\?"):
        conform("gemm", table.append_column("latency_ms", pa.array([1.0])))


def test_sums_of_before_have_the_norm_that_their_kernels_have(tmp_path: Path) -> None:
    """A store that was written before ``norm`` told all-reduces apart, read whole and by columns."""
    backends = ["nccl", "flashinfer:trtllm_all_reduce_norm", "flashinfer:trtllm_all_reduce"]
    op = make_op("all_reduce", size_bytes=1024, ranks=8)
    now = table_from("all_reduce", [measurement(op=op, backend=each) for each in backends])
    before = now.drop_columns(["norm"])
    assert conform("all_reduce", before)["norm"].to_pylist() == [0, 1, 0]
    store = Store(tmp_path)
    (path,) = store.write(("all_reduce", now), "r")
    pq.write_table(before, path)
    assert store.read("all_reduce", columns=["norm"])["norm"].to_pylist() == [0, 1, 0]
    found = store.lookup("all_reduce", "d", "warm")
    told = {key[4]: sorted(exact.backend for exact in each) for key, each in found.items()}
    assert told == {0: sorted(backends[::2]), 1: [backends[1]]}


def test_conform_casts_and_says_what_it_cannot_cast() -> None:
    table = table_from("gemm", [measurement()])
    position = table.schema.get_field_index("m")
    small = table.set_column(position, "m", pa.array([16], pa.int16()))
    assert conform("gemm", small).schema.field("m").type == pa.int64()
    text = table.set_column(position, "m", pa.array(["sixteen"]))
    with pytest.raises(SchemaError, match="column 'm' of gemm is not int64"):
        conform("gemm", text)


def test_choices_written_in_another_order_are_read_by_name() -> None:
    table = table_from("gemm", [measurement(), measurement(op=GEMM.replace(layout="nn"))])
    position = table.schema.get_field_index("layout")
    other = pa.field("layout", pa.int64(), False, {"choices": "tn,nn,nt"})
    stored = table.set_column(position, other, pa.array([0, 1]))
    assert row_ops("gemm", conform("gemm", stored)) == row_ops("gemm", table)
    gone = table.set_column(position, pa.field("layout", pa.int64(), False, {"choices": "tt,nn"}), pa.array([0, 1]))
    with pytest.raises(SchemaError, match="layout=tt is none of nn, nt, tn"):
        conform("gemm", gone)


def test_foreign_and_newer_files_are_told_apart() -> None:
    with pytest.raises(SchemaError, match="was not written by opcast"):
        check_file_schema(pa.schema([("m", pa.int64())]))
    newer = schema_for("gemm").with_metadata({"opcast.schema_version": "99", "opcast.kind": "gemm"})
    with pytest.raises(SchemaError, match="schema version 99, this opcast reads 1: update opcast"):
        check_file_schema(newer)

"""Quality of a store: each kind of damage is planted and found, with advice; a clean store has no findings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.link_limits import crossing_bytes, fabric_gbps
from opcast.datasets.ops import KINDS, Op, cost_columns, make_op
from opcast.datasets.quality import Finding, check, summary
from opcast.datasets.schema import Measurement, schema_for, table_from
from opcast.datasets.store import Store

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
H100 = load_device("h100_sxm")


def plausible_us(kind_name: str, columns: dict[str, np.ndarray], noise: np.ndarray, dtype: str = "bf16") -> np.ndarray:
    """60 % of peak rates plus a launch, and some noise."""
    cost = cost_columns(kind_name, columns, dtype)
    rate = H100.tensor_rate(dtype) if cost.unit == "tensor" else H100.vector_tflops
    bound = np.maximum(cost.flops / (rate * 1e6), cost.bytes / (H100.memory_gbps * 1e3))
    return (3.0 + bound / 0.6) * np.exp(noise)


def clean_rows(kind_name: str = "gemm", count: int = 300, seed: int = 0, **changes: object) -> list[Measurement]:
    rng = np.random.default_rng(seed)
    names = [dim.name for dim in KINDS[kind_name].dims if dim.default is None]
    columns = {dim.name: np.full(count, dim.default or 0) for dim in KINDS[kind_name].dims}
    columns |= {name: np.exp2(rng.uniform(3, 13, count)).astype(np.int64) for name in names}
    latency = plausible_us(kind_name, columns, rng.normal(0, 0.05, count))
    rows = []
    for i in range(count):
        op = make_op(kind_name, **{name: int(column[i]) for name, column in columns.items()})
        values = {"device_id": "h100_sxm", "run_id": "run", "throttled": False, "timer": "cuda_graph"} | changes
        rows.append(
            Measurement(op=op, measured_at=NOW + timedelta(seconds=i), latency_us=float(latency[i]), **values)  # type: ignore[arg-type]
        )
    return rows


def unique(rows: list[Measurement]) -> list[Measurement]:
    return list({(row.op, row.backend, row.cache): row for row in rows}.values())


@pytest.fixture
def clean(store: Store) -> Store:
    store.write(unique(clean_rows()), "run")
    store.write(unique(clean_rows("rms_norm", seed=1)), "run")
    store.write(unique(clean_rows("attention_prefill", 100, seed=2, cache="cold")), "run")
    return store


def findings(store: Store, words: str) -> list[Finding]:
    return [finding for finding in check(store) if words in finding.what]


def only(store: Store, words: str) -> Finding:
    """The one finding of a store, which must have these words and advice."""
    found = check(store)
    assert len(found) == 1, found
    assert words in found[0].what
    assert len(found[0].do) > 10
    assert "\n" not in found[0].what + found[0].do + found[0].where
    return found[0]


def test_a_clean_store_has_no_findings(clean: Store) -> None:
    assert check(clean) == []
    assert check(Store(clean.path / "nothing")) == []


def test_checking_changes_nothing(clean: Store) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in clean.path.rglob("*")}
    check(clean)
    summary(clean)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in clean.path.rglob("*")}


# --- summary -------------------------------------------------------------------------------------------


def test_the_summary_counts(clean: Store) -> None:
    failed = [replace(row, status="oom", latency_us=None, backend="flash3") for row in clean_rows(count=1, seed=9)]
    clean.write([*failed, *clean_rows(count=1, seed=8, backend="flash3")], "run")
    rows = {(row.kind, row.backend): row for row in summary(clean)}
    assert set(rows) == {("attention_prefill", "torch"), ("gemm", "torch"), ("gemm", "flash3"), ("rms_norm", "torch")}
    flash = rows["gemm", "flash3"]
    assert (flash.device, flash.rows, flash.ok, flash.failed_share, flash.dtypes) == ("h100_sxm", 2, 1, 0.5, "bf16")
    assert rows["gemm", "torch"].rows == rows["gemm", "torch"].ok == len(unique(clean_rows()))
    assert rows["gemm", "torch"].newest == clean_rows()[-1].measured_at.isoformat(timespec="seconds")
    assert summary(Store(clean.path / "nothing")) == []


def test_the_summary_gives_sizes(store: Store) -> None:
    ops = [make_op("copy", size_bytes=size) for size in (512, 1 << 29)]
    store.write([Measurement(op=op, device_id="d", run_id="r", measured_at=NOW, latency_us=9.0) for op in ops], "r")
    assert summary(store)[0].size == "1 KiB to 1 GiB"


# --- files ---------------------------------------------------------------------------------------------


def plant_truncated(store: Store) -> Path:
    path = store.write(clean_rows(count=50, seed=5, run_id="cut"), "cut")[0]
    path.write_bytes(path.read_bytes()[:-100])
    return path


def plant_foreign(store: Store) -> Path:
    path = store.path / "op=gemm" / "device=h100_sxm" / "mine.parquet"
    pq.write_table(pa.table({"m": [1], "latency": [3.0]}), path)
    return path


def plant_newer(store: Store) -> Path:
    path = store.path / "op=gemm" / "device=h100_sxm" / "newer.parquet"
    metadata = {"opcast.schema_version": "9", "opcast.kind": "gemm"}
    pq.write_table(table_from("gemm", clean_rows(count=1)).replace_schema_metadata(metadata), path)
    return path


def plant_other_kind(store: Store) -> Path:
    path = store.path / "op=gemm" / "device=h100_sxm" / "norm.parquet"
    pq.write_table(table_from("rms_norm", clean_rows("rms_norm", 1)), path)
    return path


@pytest.mark.parametrize(
    ("plant", "words", "advice"),
    [
        (plant_truncated, "is damaged", "move it out of the store and measure again"),
        (plant_foreign, "was not written by opcast", "move it out of the store"),
        (plant_newer, "has schema version 9", "update opcast"),
        (plant_other_kind, "holds rms_norm rows but lies under op=gemm", "move it to op=rms_norm"),
    ],
)
def test_unreadable_files_are_errors(clean: Store, plant: Callable[[Store], Path], words: str, advice: str) -> None:
    path = plant(clean)
    finding = only(clean, words)
    assert (finding.severity, finding.where) == ("error", str(path))
    assert advice in finding.do
    assert sum(row.rows for row in summary(clean)) > 500


def test_rows_under_the_wrong_device_are_found(clean: Store) -> None:
    path = clean.path / "op=gemm" / "device=l4" / "run-1.parquet"
    path.parent.mkdir()
    pq.write_table(table_from("gemm", clean_rows(count=3)), path)
    finding = only(clean, "3 rows of another device lie under device=l4")
    assert finding.severity == "error"


def test_parquet_where_no_reader_looks_is_found(clean: Store) -> None:
    pq.write_table(table_from("gemm", clean_rows(count=3)), clean.path / "extra.parquet")
    assert only(clean, "no reader looks here").where == str(clean.path / "extra.parquet")


def test_unknown_kinds_are_found(clean: Store) -> None:
    folder = clean.path / "op=warp_drive" / "device=h100_sxm"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1]}), folder / "a-1.parquet")
    assert only(clean, "unknown op kind 'warp_drive'").do == "update opcast"


def test_left_over_temporary_files_are_found_once_they_are_old(clean: Store) -> None:
    folder = clean.path / "op=gemm" / "device=h100_sxm"
    for name in (".run-1.parquet.12.tmp", ".run-2.parquet.12.tmp"):
        (folder / name).write_bytes(b"PAR1 half")
    assert check(clean) == []
    for path in folder.glob(".*.tmp"):
        os.utime(path, (time.time() - 3600,) * 2)
    assert only(clean, "2 temporary files of writers that were killed").severity == "note"


def test_files_of_an_older_schema_are_noted(clean: Store) -> None:
    path = clean.files("rms_norm")[0]
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.drop_columns(["power_w"]).replace_schema_metadata(table.schema.metadata), path)
    finding = only(clean, "lack the column power_w, which reads as empty")
    assert (finding.severity, finding.where) == ("note", str(path))


def test_damaged_device_figures_are_found(clean: Store) -> None:
    clean.save_device(replace(H100, id="cpu_x"))
    (clean.path / "devices" / "cpu_x.json").write_text("{")
    assert only(clean, "is damaged").severity == "error"
    clean.save_device(replace(H100, id="cpu_y"))
    os.replace(clean.path / "devices" / "cpu_y.json", clean.path / "devices" / "cpu_x.json")
    assert "rename it to cpu_y.json" in only(clean, "holds the figures of cpu_y").do


# --- rows ----------------------------------------------------------------------------------------------


def test_values_that_cannot_be_are_found_and_left_out(clean: Store) -> None:
    table = table_from("gemm", clean_rows(count=4, seed=6, run_id="evil"))
    for column, values in (("latency_us", [-1.0, 2.0, 3.0, 4.0]), ("dtype", ["bf16", "bf17", "bf16", "bf16"])):
        position = table.schema.get_field_index(column)
        table = table.set_column(position, table.schema.field(column), pa.array(values))
    pq.write_table(table, clean.path / "op=gemm" / "device=h100_sxm" / "evil-1.parquet")
    found = check(clean)
    assert [finding.severity for finding in found] == ["error", "error"]
    assert all("1 rows cannot be" in finding.what and "run evil" in finding.what for finding in found)
    assert len(summary(clean)) == 3


def test_duplicates_within_a_run_are_found(clean: Store) -> None:
    again = [replace(row, measured_at=row.measured_at + timedelta(hours=1)) for row in unique(clean_rows())[:7]]
    clean.write(again, "run")
    assert only(clean, "7 rows repeat an op of the same run").where == "gemm on h100_sxm"


def test_a_file_copied_is_found_as_duplicates(clean: Store) -> None:
    path = clean.files("rms_norm")[0]
    path.with_name("run-copy.parquet").write_bytes(path.read_bytes())
    assert f"{len(unique(clean_rows('rms_norm', seed=1)))} rows repeat" in only(clean, "repeat an op").what


def test_the_same_op_in_another_run_cache_or_backend_is_no_duplicate(clean: Store) -> None:
    for change in ({"run_id": "run2"}, {"cache": "cold"}, {"backend": "cublas"}, {"torch": "2.9"}):
        rows = unique(clean_rows(**change))
        clean.write(rows, rows[0].run_id)
    assert check(clean) == []


def test_throttled_rows_are_found(clean: Store) -> None:
    clean.write(unique(clean_rows(count=9, seed=4, throttled=True, run_id="hot")), "hot")
    finding = only(clean, "rows were measured at throttled clocks")
    assert finding.what.startswith("9 of ")
    assert "run hot" in finding.what
    assert finding.severity == "warning"


@pytest.mark.parametrize("factor", [8.0, 1 / 8.0])
def test_outliers_are_found_with_the_op_and_the_direction(clean: Store, factor: float) -> None:
    rows = [row for row in unique(clean_rows()) if row.latency_us and row.latency_us > 40]  # not bound by launch
    victim = next(row for row in rows if row.op.m > 500)
    clean.write([replace(victim, latency_us=victim.latency_us * factor, run_id="odd", cache="warm", torch=None)], "odd")
    found = findings(clean, "lie far off similar ones")
    assert len(found) == 1
    assert str(victim.op) in found[0].what
    assert ("slower" if factor > 1 else "faster") in found[0].what
    assert "measure these ops again" in found[0].do


def test_rows_faster_than_the_hardware_are_errors(clean: Store) -> None:
    op = make_op("gemm", m=8192, n=8192, k=8192)
    row = clean_rows(count=1)[0]
    clean.write([replace(row, op=op, latency_us=20.0, run_id="dream")], "dream")
    finding = findings(clean, "faster than the hardware can be")[0]
    assert finding.severity == "error"
    assert "gemm[m=8192 n=8192 k=8192 bf16], 20 us, run dream" in finding.what
    assert "1.11e+03 us" in finding.do


@pytest.mark.parametrize(
    ("op", "latency_us", "cache", "impossible"),
    [
        (make_op("copy", size_bytes=1 << 30), 100.0, "warm", True),  # 2 GiB in 100 us: 21 TB/s from memory
        (make_op("copy", size_bytes=1 << 30), 700.0, "warm", False),
        (make_op("copy", size_bytes=1 << 23), 4.0, "warm", False),  # 4 TB/s, but it fits into L2
        (make_op("elementwise", numel=1 << 22, inputs=4), 1.0, "cold", True),  # 34 MB read from memory in 1 us
        (make_op("gemm", m=4096, n=4096, k=4096, dtype="fp32"), 400.0, "warm", False),  # fp32 through TF32 units
        (make_op("all_reduce", size_bytes=1 << 30, ranks=8), 800.0, "warm", True),  # 2.3 TB/s over NVLink
        (make_op("all_reduce", size_bytes=1 << 30, ranks=8), 4000.0, "warm", False),
        (make_op("all_reduce", size_bytes=1 << 30, ranks=16, link="ib"), 800.0, "warm", True),  # 1.3 TB/s out of a node
        (make_op("all_reduce", size_bytes=1 << 30, ranks=16, link="ib"), 2700.0, "warm", False),  # 398 of 400 GB/s
        (make_op("host_overhead", calls=1), 0.001, "warm", False),
    ],
)
def test_what_counts_as_impossible(store: Store, op: Op, latency_us: float, cache: str, impossible: bool) -> None:
    row = Measurement(op=op, device_id="h100_sxm", run_id="r", measured_at=NOW, latency_us=latency_us, cache=cache)
    store.write([row], "r")
    assert [finding.severity for finding in check(store)] == ["error"] * impossible


def test_an_unknown_device_is_checked_for_all_but_its_rates(store: Store) -> None:
    store.write([replace(row, device_id="gpu_of_tomorrow", latency_us=0.001) for row in clean_rows(count=1)], "run")
    assert check(store) == []


def test_measured_figures_that_rows_outrun_are_one_finding(store: Store) -> None:
    figures = replace(H100, id="cpu_x_2t", vendor="cpu", vector_tflops=1e-4, memory_gbps=50.0, l2_gbps=100.0)
    store.save_device(figures)
    ops = [make_op("adamw", numel=1 << 24), make_op("rms_norm", rows=4096, cols=4096)]
    rows = [Measurement(op=op, device_id="cpu_x_2t", run_id="r", measured_at=NOW, latency_us=9e3) for op in ops]
    store.write(rows, "r")
    finding = only(store, "measured figures are too low: 2 rows (adamw, rms_norm)")
    assert finding.where.endswith("cpu_x_2t.json")
    assert "delete this file and profile again" in finding.do
    store.save_device(replace(figures, vector_tflops=0.1))
    assert check(store) == []


def test_repeats_that_disagree_are_found(clean: Store) -> None:
    rows = unique(clean_rows(run_id="two"))
    clean.write([replace(row, latency_us=row.latency_us * 1.02) for row in rows], "two")
    assert check(clean) == []
    clean.write([replace(rows[5], latency_us=rows[5].latency_us * 1.8, run_id="three")], "three")
    assert str(rows[5].op) in findings(clean, "repeats of one op disagree by")[0].what


def test_drifting_canaries_are_found(clean: Store) -> None:
    canary = clean_rows(count=1, seed=3)[0]
    for number, factor in enumerate((1.0, 1.02, 0.99, 1.03), 1):
        run_id = f"canary{number:03d}_full-ab12"
        clean.write([replace(canary, run_id=run_id, latency_us=canary.latency_us * factor)], run_id)
    assert check(clean) == []
    clean.write(
        [replace(canary, run_id="canary005_full-ab12", latency_us=canary.latency_us * 1.3)], "canary005_full-ab12"
    )
    finding = only(clean, "canaries of campaign full-ab12 drift by up to")
    assert "run canary005_full-ab12" in finding.what


def test_canaries_of_other_campaigns_may_differ(clean: Store) -> None:
    canary = clean_rows(count=1, seed=3)[0]
    for campaign, factor in (("a-1", 1.0), ("b-2", 1.3)):
        run_id = f"canary001_{campaign}"
        clean.write([replace(canary, run_id=run_id, latency_us=canary.latency_us * factor)], run_id)
    assert check(clean) == []


def test_failures_are_found_when_many(clean: Store) -> None:
    failed = [
        replace(row, status="error", latency_us=None, error="CUDA error: an illegal memory access", run_id="bad")
        for row in clean_rows(count=40, seed=7)
    ]
    clean.write(failed[:5], "bad")
    assert check(clean) == []
    clean.write([replace(row, op=row.op.replace(batch=2)) for row in failed], "bad")
    finding = only(clean, "rows are errors or timeouts, first: CUDA error: an illegal memory access")
    assert finding.where == "gemm on h100_sxm"


def test_a_kind_without_any_ok_row_is_noted(store: Store) -> None:
    rows = [replace(row, status="oom", error="out of memory", latency_us=None) for row in clean_rows(count=3)]
    store.write(rows, "run")
    assert only(store, "none of 3 rows is ok, first oom: out of memory").severity == "note"


def test_errors_come_first(clean: Store) -> None:
    clean.write(unique(clean_rows(count=9, seed=4, throttled=True, run_id="hot")), "hot")
    plant_truncated(clean)
    assert [finding.severity for finding in check(clean)] == ["error", "warning"]


# --- size ----------------------------------------------------------------------------------------------


def big_table(count: int) -> pa.Table:
    rng = np.random.default_rng(0)
    columns = {name: np.exp2(rng.uniform(3, 14, count)).astype(np.int64) for name in ("m", "n", "k")}
    columns |= {"batch": np.ones(count, np.int64), "layout": rng.integers(0, 3, count)}
    values: dict[str, object] = dict(columns)
    values["latency_us"] = plausible_us("gemm", columns, rng.normal(0, 0.05, count))
    values["measured_at"] = pa.array(np.arange(count) + 1_700_000_000_000_000, pa.timestamp("us", tz="UTC"))
    texts = {"dtype": "bf16", "out_dtype": "bf16", "device_id": "h100_sxm", "run_id": "run", "backend": "torch"}
    texts |= {"status": "ok", "cache": "cold", "source": "import"}
    values |= {name: pa.array([text]).take(pa.array(np.zeros(count, np.int64))) for name, text in texts.items()}
    order = [name for name in schema_for("gemm").names if name in values]
    return pa.table({name: values[name] for name in order})


def test_a_large_store_is_checked_whole(store: Store) -> None:
    store.write(("gemm", big_table(100_000)), "run")
    found = check(store)
    rows = summary(store)
    assert rows[0].rows == 100_000
    assert all("repeat an op" in finding.what for finding in found)


def test_rows_that_outrun_their_link_are_told(store: Store) -> None:
    """375 GB/s out of one V100, whose slot carries 16: two processes that knew nothing of each other."""
    for us, device_id in ((3.49e3, "v100_sxm_16gb"), (105e3, "v100_sxm_16gb"), (3.49e3, "b200_sxm")):
        op = make_op("all_reduce", size_bytes=1310720000, ranks=2, ranks_per_node=1, link="roce", dtype="fp32")
        row = Measurement(op=op, device_id=device_id, run_id=f"r{us:.0f}", measured_at=NOW, latency_us=us)
        store.write([row], row.run_id)
    beyond = {finding.where: finding.what for finding in check(store) if finding.severity == "error"}
    assert set(beyond) == {"all_reduce on v100_sxm_16gb", "all_reduce on b200_sxm"}
    assert "1 rows move bytes faster than their link" in beyond["all_reduce on v100_sxm_16gb"]
    assert "23.5 x" in beyond["all_reduce on v100_sxm_16gb"]
    assert "5.87 x" in beyond["all_reduce on b200_sxm"]


@pytest.mark.parametrize(
    ("kind", "dims", "crossing"),
    [  # of two nodes of eight: what node 0 must send to node 1
        ("all_reduce", {"size_bytes": 1600}, 1600),
        ("all_gather", {"size_bytes": 1600}, 800),
        ("all_to_all", {"size_bytes": 1600}, 8 * 800),
        ("send_recv", {"size_bytes": 1600}, 1600),
        ("ep_dispatch", {"tokens": 10, "hidden": 100, "topk": 8, "experts": 64, "mode": 1}, 8 * 10 * 100 * 2 * 8 * 0.5),
        ("ep_dispatch", {"tokens": 10, "hidden": 100, "topk": 1, "experts": 64}, 8 * 10 * 100 * 2 * 0.5),
        # a token of eight experts has one on the other node but for 1 in 256, and goes there once
        ("ep_dispatch", {"tokens": 10, "hidden": 100, "topk": 8, "experts": 64}, 8 * 10 * 100 * 2 * (1 - 0.5**8)),
    ],
)
def test_what_must_leave_a_node(kind: str, dims: dict[str, int], crossing: float) -> None:
    op = make_op(kind, **dims, ranks=16, ranks_per_node=8, link="ib", dtype="bf16")
    columns = {name: np.array([getattr(op, name)]) for name in KINDS[kind].names}
    sent = cost_columns(kind, columns, "bf16").read_bytes
    assert crossing_bytes(kind, sent, columns) == pytest.approx([crossing])
    alone = {**columns, "ranks": np.array([8])}
    assert crossing_bytes(kind, cost_columns(kind, alone, "bf16").read_bytes, alone) == pytest.approx([0.0])


@pytest.mark.parametrize(
    ("device_id", "ranks_per_node", "gbps"),
    [
        ("h100_sxm", 8, 400.0),  # eight NICs of 400 Gb/s
        ("h100_sxm", 1, 64.0),  # one slot of PCIe 5.0
        ("a100_sxm_40gb", 8, 200.0),  # DGX A100, though the only node with this device that ships has half of that
        ("v100_sxm", 16, 100.0),  # DGX-2: twice the GPUs and NICs of a DGX-1
        ("l40s", 4, 128.0),  # four slots of PCIe 4.0
    ],
)
def test_how_fast_a_node_sends_at_most(device_id: str, ranks_per_node: int, gbps: float) -> None:
    assert fabric_gbps(load_device(device_id), ranks_per_node) == pytest.approx(gbps)

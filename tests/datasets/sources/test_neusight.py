"""NeuSight's tables become fp32 ops on the devices they name; rows that are mostly host time are marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.store import Store

P100 = "Tesla P100-PCIE-16GB"


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    """A CSV of some rows; quotes around what holds commas."""
    names = list(rows[0])
    lines = [",".join(names)] + [",".join(f'"{row[name]}"' for name in names) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


def product(op: str = "linear", ms: float = 1.0, device: str = P100, **dims: int) -> dict[str, Any]:
    sizes = {"B": 1, "M": 512, "N": 1024, "K": 768} | dims
    return {
        "op": op,
        "latency_ms": ms,
        "device": device,
        "torch": "p2.1.0",
        "cuda": "cu121",
        **sizes,
        "file": "train/x",
    }


def vector(op: str, ms: float = 1.0, device: str = P100, rows: int = 1024, cols: int = 512) -> dict[str, Any]:
    return {"op": op, "latency_ms": ms, "device": device, "B": rows, "H": cols}


def node(target: str, shapes: str, out: str, ms: float = 1.0, dtype: str = "torch.float32") -> dict[str, Any]:
    return {
        "op": "call_function", "target": target, "input_shapes": shapes, "output_shape": out, "fw_latency_ms": ms,
        "dtype": dtype, "gpu": "Tesla_P100-PCIE-16GB", "model": "gpt2", "mode": "inf",
    }  # fmt: skip


def imported(store: Store, path: Path) -> ImportReport:
    return import_into(store, "neusight", path)


def rows(store: Store, kind: str) -> list[dict[str, Any]]:
    return store.read(kind).to_pylist()


def test_products(store: Store, tmp_path: Path) -> None:
    imported(store, write(tmp_path / "gemm.csv", [product(), product("bmm", B=24, M=128, N=64, K=32)]))
    found = {(r["batch"], r["m"], r["n"], r["k"], r["layout"]) for r in rows(store, "gemm")}
    assert found == {(1, 512, 1024, 768, 1), (24, 128, 64, 32, 0)}
    row = rows(store, "gemm")[0]
    assert (row["dtype"], row["device_id"], row["backend"]) == ("fp32", "p100_pcie", "torch-2.1.0:cublas")
    assert (row["torch"], row["cuda"], row["source_ref"], row["latency_us"]) == ("2.1.0", "12.1", "train/x", 1000.0)


def test_devices_go_by_the_name_of_their_driver(store: Store, tmp_path: Path) -> None:
    names = {
        "NVIDIA A100 80GB PCIe": "a100_pcie_80gb", "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb", "NVIDIA L4": "l4",
        "Tesla P4": "p4", "Tesla T4": "t4", "Tesla V100-PCIE-32GB": "v100_pcie", "AMD Instinct MI100": "mi100",
        "AMD Instinct MI210": "mi210",
    }  # fmt: skip
    imported(store, write(tmp_path / "gemm.csv", [product(device=name) for name in names]))
    assert store.devices() == sorted(names.values())
    backends = {r["device_id"]: r["backend"] for r in rows(store, "gemm")}
    assert backends["mi100"].endswith(":rocblas")


def test_row_and_element_operators(store: Store, tmp_path: Path) -> None:
    ops = ("add", "divu", "powu", "gelu", "ln", "softmax")
    imported(store, write(tmp_path / "vec.csv", [vector(op) for op in ops]))
    for kind in ("gelu", "layer_norm", "softmax"):
        assert [(r["rows"], r["cols"]) for r in rows(store, kind)] == [(1024, 512)]
    found = {(r["numel"], r["inputs"], r["fn"]) for r in rows(store, "elementwise")}
    assert found == {(524288, 2, 0), (524288, 1, 0), (524288, 1, 2)}


def test_rows_near_the_fastest_are_marked_as_host_time(store: Store, tmp_path: Path) -> None:
    times = {64: 0.026, 128: 0.027, 4096: 0.038, 65536: 0.2}
    imported(store, write(tmp_path / "gemm.csv", [product(ms=ms, M=m, N=64, K=64) for m, ms in times.items()]))
    timers = {r["m"]: r["timer"] for r in rows(store, "gemm")}
    assert timers == {64: "eager", 128: "eager", 4096: "eager", 65536: "cuda_event"}


def test_convolutions_are_counted_and_left(store: Store, tmp_path: Path) -> None:
    write(tmp_path / "conv.csv", [{"op": "conv", "latency_ms": 1.0, "device": P100, "B": 1, "in_channels": 3}] * 3)
    write(tmp_path / "gemm.csv", [product()])
    report = imported(store, tmp_path)
    assert [(r.rows, r.reason) for r in report.rejected] == [(3, "convolutions are no op kind")]


def test_nodes_of_models(store: Store, tmp_path: Path) -> None:
    address = "of type object at 0x7f"
    report = imported(store, write(tmp_path / "inmodel.csv", [
        node(f"<built-in method addmm {address}>", "[[3072], [512, 768], [768, 3072]]", "(512, 3072)"),
        node(f"<built-in method matmul {address}>", "[[2, 12, 512, 64], [2, 12, 64, 512]]", "(2, 12, 512, 512)"),
        node("model.layers.0.fc1", "[[2, 512, 768]]", "(2, 512, 3072)"),
        node("transformer.h.0.ln_1", "[[2, 512, 768]]", "(2, 512, 768)"),
        node("<function softmax at 0x7f>", "[[2, 12, 512, 512]]", "(2, 12, 512, 512)"),
        node("<built-in function add>", "[[2, 512, 768], [2, 512, 768]]", "(2, 512, 768)"),
        node("view", "[[2, 512, 768], [1]]", "(1024, 768)"),
        node("<built-in function add>", "[[1]]", "(1,)", dtype=""),
    ]))  # fmt: skip
    found = {(r["batch"], r["m"], r["n"], r["k"], r["layout"]) for r in rows(store, "gemm")}
    assert found == {(1, 512, 3072, 768, 0), (24, 512, 512, 64, 0), (1, 1024, 3072, 768, 1)}
    assert [(r["rows"], r["cols"]) for r in rows(store, "layer_norm")] == [(1024, 768)]
    assert [(r["rows"], r["cols"]) for r in rows(store, "softmax")] == [(12288, 512)]
    assert [(r["numel"], r["inputs"]) for r in rows(store, "elementwise")] == [(786432, 2)]
    assert sorted((r.rows, r.example) for r in report.rejected) == [
        (1, "add 1 in inmodel.csv"),
        (1, "view 1 in inmodel.csv"),
    ]


def test_impossible_rows_are_counted(store: Store, tmp_path: Path) -> None:
    bad = [product(ms=ms, M=64 + i) for i, ms in enumerate((float("nan"), -1.0, 0.0))]
    too_fast = product(ms=0.001, M=65536, N=65536)
    report = imported(store, write(tmp_path / "gemm.csv", [product(), *bad, too_fast]))
    assert report.rows_written == 1
    assert sum(r.rows for r in report.rejected) == 4


def test_an_unknown_device_is_named(store: Store, tmp_path: Path) -> None:
    report = imported(store, write(tmp_path / "gemm.csv", [product(), product(device="AMD Instinct MI50")]))
    assert any("mi50" in r.reason for r in report.rejected)


@pytest.mark.parametrize("gone", ["latency_ms", "K", "device"])
def test_a_missing_column_is_named(store: Store, tmp_path: Path, gone: str) -> None:
    row = {name: value for name, value in product().items() if name != gone}
    with pytest.raises(SourceError, match=gone):
        imported(store, write(tmp_path / "gemm.csv", [row]))


def test_a_truncated_parquet_costs_that_file_alone(store: Store, tmp_path: Path) -> None:
    import pyarrow.csv as arrow_csv
    import pyarrow.parquet as pq

    good = write(tmp_path / "a.csv", [product()])
    pq.write_table(arrow_csv.read_csv(good), tmp_path / "b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[: len(whole) // 2])
    report = imported(store, tmp_path)
    assert report.rows_written == 1
    assert "damaged" in report.rejected[0].reason


@pytest.mark.reference
def test_the_published_tables(store: Store, reference_data: Path) -> None:
    report = imported(store, reference_data / "data" / "neusight" / "neusight_gemm.parquet")
    assert report.rows_read == 132183
    assert sum(r.rows for r in report.rejected) < 20
    gemm = store.read("gemm", "v100_pcie").to_pandas()
    rate = 2.0 * gemm.batch * gemm.m * gemm.n * gemm.k / gemm.latency_us / 1e6
    assert 10 < np.percentile(rate, 90) < rate.max() < 1.1 * 14.1  # fp32 TFLOP/s of V100, which has no TF32

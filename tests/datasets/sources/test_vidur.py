"""Vidur's profiles become ops of one rank, in microseconds, with what is known to be wrong kept out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.columns import numbers
from opcast.datasets.sources import vidur
from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.store import Store

OPERATORS = (
    "emb input_layernorm attn_pre_proj attn_rope attn_post_proj post_attention_layernorm "
    "mlp_up_proj mlp_act mlp_down_proj add"
).split()
STATISTICS = ("min", "max", "mean", "median", "std")
MODEL = {"n_head": 64, "n_kv_head": 8, "n_embd": 8192, "n_expanded_embd": 28672, "vocab_size": 32768}


def mlp(folder: Path, gpu: str = "h100", rows: list[dict[str, Any]] | None = None, without: str = "") -> Path:
    """A profile of layers: every operator takes a millisecond but those that a row names."""
    base = {f"time_stats.{op}.{s}": 0.0 if s == "std" else 1.0 for op in OPERATORS for s in STATISTICS}
    base |= {**MODEL, "use_gated_mlp": True, "num_tokens": 4096, "num_tensor_parallel_workers": 8}
    table = [base | row for row in rows or [{}]]
    names = [name for name in base if name != without]
    file = folder / "compute" / gpu / "Llama" / "mlp.csv"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join([",".join(names), *(",".join(str(row[name]) for name in names) for row in table)]) + "\n")
    return file


def took(op: str, milliseconds: float, spread: float = 0.0) -> dict[str, float]:
    """The columns of an operator's statistics."""
    values = {"min": milliseconds - spread, "max": milliseconds + spread, "std": spread}
    return {f"time_stats.{op}.{s}": values.get(s, milliseconds) for s in STATISTICS}


def network(folder: Path, node: str, collective: str, rows: list[tuple[float, float, float, int, int, int]]) -> Path:
    """A profile of a collective: (median, min, max in ms, workers, bytes, devices a node) a row."""
    names = [f"time_stats.{collective}.{s}" for s in STATISTICS]
    lines = [",".join(["", *names, "rank", "num_workers", "size", "collective", "devices_per_node"])]
    for i, (median, low, high, workers, size, per_node) in enumerate(rows):
        lines.append(f"{i},{low},{high},{median},{median},0.0,0,{workers},{size},{collective},{per_node}")
    file = folder / "network" / node / f"{collective}.csv"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(lines) + "\n")
    return file


def imported(store: Store, path: Path, **options: str) -> ImportReport:
    return import_into(store, "vidur", path, ImportOptions(**options))


def only(store: Store, kind: str) -> dict[str, Any]:
    """The one row of a kind."""
    (row,) = store.read(kind).to_pylist()
    return row


def test_dims_are_those_of_one_rank(store: Store, tmp_path: Path) -> None:
    imported(store, mlp(tmp_path))
    shapes = {(row["m"], row["n"], row["k"]) for row in store.read("gemm").to_pylist()}
    assert shapes == {(4096, 1280, 8192), (4096, 8192, 1024), (4096, 7168, 8192), (4096, 8192, 3584)}
    rope, act, embedding = only(store, "rope"), only(store, "silu_mul"), only(store, "embedding")
    assert (rope["tokens"], rope["heads"], rope["head_dim"]) == (4096, 9, 128)
    assert (act["rows"], act["cols"]) == (4096, 3584)
    assert (embedding["vocab"], embedding["hidden"]) == (4096, 8192)
    assert only(store, "elementwise")["numel"] == 4096 * 8192
    assert {row["device_id"] for row in store.read("gemm").to_pylist()} == {"h100_sxm"}
    assert {row["layout"] for row in store.read("gemm").to_pylist()} == {1}


def test_milliseconds_become_microseconds_and_the_spread_is_kept(store: Store, tmp_path: Path) -> None:
    imported(store, mlp(tmp_path, rows=[took("mlp_act", 0.1, 0.01)]))
    row = only(store, "silu_mul")
    assert row["latency_us"] == pytest.approx(100)
    assert row["latency_min_us"] == pytest.approx(90)
    assert row["latency_p10_us"] == pytest.approx(89.5)  # one standard deviation more, but no less than was seen
    assert row["latency_std_us"] == pytest.approx(10)
    assert row["dtype"] == "fp16"
    assert row["source_ref"] == "compute/h100/Llama/mlp.csv"


def test_the_grid_widens_what_was_never_seen_to_vary(store: Store, tmp_path: Path) -> None:
    imported(store, mlp(tmp_path, rows=[took("mlp_act", 0.1)]))
    row = only(store, "silu_mul")
    assert (row["latency_p10_us"], row["latency_p90_us"]) == pytest.approx((99.5, 100.5))


def test_rows_near_the_grid_are_refused(store: Store, tmp_path: Path) -> None:
    small = {"num_tokens": 1, **took("add", 0.001)}
    report = imported(store, mlp(tmp_path, rows=[{}, small]))
    assert [(r.rows, r.reason) for r in report.rejected] == [(1, "below 2 us on a 1 us grid")]
    assert only(store, "elementwise")["numel"] == 4096 * 8192


def test_token_counts_profiled_twice_become_one_row(store: Store, tmp_path: Path) -> None:
    rows = [{"num_tokens": 1024, **took("mlp_act", 0.1)}, {"num_tokens": 1024, **took("mlp_act", 0.2)}]
    report = imported(store, mlp(tmp_path, rows=rows))
    row = only(store, "silu_mul")
    assert row["latency_us"] == pytest.approx(150)
    assert row["iterations"] == 2
    assert report.merged > 0


def test_a_model_without_gates_has_gelu(store: Store, tmp_path: Path) -> None:
    imported(store, mlp(tmp_path, rows=[{"use_gated_mlp": False}]))
    assert only(store, "gelu")["cols"] == 3584
    assert 3584 in {row["n"] for row in store.read("gemm").to_pylist()}


def test_nan_and_negative_latencies_are_counted(store: Store, tmp_path: Path) -> None:
    rows = [{}, {"num_tokens": 8, **took("mlp_act", float("nan"))}, {"num_tokens": 16, **took("mlp_act", -1.0)}]
    report = imported(store, mlp(tmp_path, rows=rows))
    assert sum(r.rows for r in report.rejected) == 2
    assert only(store, "silu_mul")["rows"] == 4096


@pytest.mark.parametrize("column", ["n_kv_head", "num_tokens", "time_stats.mlp_act.median"])
def test_a_missing_column_is_named(store: Store, tmp_path: Path, column: str) -> None:
    with pytest.raises(SourceError, match=column):
        imported(store, mlp(tmp_path, without=column))
    assert not store.kinds()


def test_the_folder_tells_the_device_or_it_is_asked_for(store: Store, tmp_path: Path) -> None:
    file = mlp(tmp_path, gpu="mystery")
    with pytest.raises(SourceError, match="say device="):
        imported(store, file)
    imported(store, file, device="a100_pcie_80gb")
    assert store.devices() == ["a100_pcie_80gb"]


def test_links_follow_from_node_and_group(store: Store, tmp_path: Path) -> None:
    size, rows = 1 << 26, []
    for workers, per_node in ((8, 8), (16, 8), (2, 1)):
        rows.append((20.0, 20.0, 20.0, workers, size, per_node))
    network(tmp_path, "a100_dgx", "all_reduce", rows)
    network(tmp_path, "a100_pairwise_nvlink", "all_reduce", [(20.0,) * 3 + (2, size, 2), (20.0,) * 3 + (4, size, 4)])
    imported(store, tmp_path)
    found = {(r["device_id"], r["ranks"], r["ranks_per_node"], r["link"]) for r in store.read("all_reduce").to_pylist()}
    dgx, pairs = "a100_sxm_80gb", "a100_pcie_80gb"
    assert found == {(dgx, 8, 8, 0), (dgx, 16, 8, 2), (dgx, 2, 1, 2), (pairs, 2, 2, 0), (pairs, 4, 4, 1)}
    assert set(numbers(store.read("all_reduce")["size_bytes"]).tolist()) == {size}


def test_transfers_over_sockets_are_refused(store: Store, tmp_path: Path) -> None:
    rows = [(20.0, 20.0, 20.0, 2, 1 << 25, 1), (1.0, 1.0, 1.0, 2, 1 << 25, 2)]
    network(tmp_path, "a100_pairwise_nvlink", "send_recv", rows)
    report = imported(store, tmp_path)
    assert "sockets" in report.rejected[0].reason
    assert only(store, "send_recv")["ranks_per_node"] == 2


def test_unsteady_collectives_are_refused(store: Store, tmp_path: Path) -> None:
    rows = [(0.05, 0.04, 0.09, 8, 2048, 8), (0.05, 0.04, 0.06, 8, 4096, 8)]
    network(tmp_path, "h100_dgx", "all_reduce", rows)
    report = imported(store, tmp_path)
    assert report.rejected[0].rows == 1
    row = only(store, "all_reduce")
    assert (row["size_bytes"], row["latency_p10_us"], row["latency_p90_us"]) == pytest.approx((4096, 40, 60))


def test_a_copy_of_another_nodes_file_is_refused(store: Store, tmp_path: Path) -> None:
    row = [(1.0, 1.0, 1.0, 2, 1 << 25, 2)]
    network(tmp_path, "a100_pairwise_nvlink", "send_recv", row)
    network(tmp_path, "h100_pairwise_nvlink", "send_recv", row)
    report = imported(store, tmp_path)
    assert "byte copy of network/a100_pairwise_nvlink/send_recv.csv" in report.rejected[0].reason
    assert store.devices() == ["a100_pcie_80gb"]


def test_attention_tables_are_counted_and_left(store: Store, tmp_path: Path) -> None:
    file = mlp(tmp_path)
    (file.parent / "attention.csv").write_text("batch_size,is_prefill\n1,True\n2,True\n")
    report = imported(store, tmp_path)
    assert [(r.rows, r.reason) for r in report.rejected] == [(2, "attention tables of Vidur are not read")]


def test_a_place_without_profiles_is_one_clear_error(store: Store, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SourceError, match="Vidur's profiling folder"):
            imported(store, path)


def test_importing_twice_adds_nothing(store: Store, tmp_path: Path) -> None:
    file = mlp(tmp_path)
    before = imported(store, file).rows_written
    again = imported(store, file)
    assert (again.rows_written, again.skipped) == (0, before)


@pytest.mark.reference
def test_the_published_profiles(store: Store, reference_data: Path) -> None:
    folder = reference_data / "data" / "vidur"
    report = imported(store, folder / "compute" / "h100" / "Llama-2-7b-hf")
    assert report.rows_written > 6000
    gemm = store.read("gemm").to_pandas()
    rate = 2.0 * gemm.m * gemm.n * gemm.k / gemm.latency_us / 1e6
    assert rate.max() < 990  # fp16 TFLOP/s of H100
    assert rate[gemm.m >= 2048].median() > 400
    norm = store.read("rms_norm").to_pandas()
    assert (norm.groupby(["rows", "cols"]).size() == 1).all()

    imported(store, folder / "network" / "a100_dgx")
    reduced = store.read("all_reduce").to_pandas()
    large = reduced[(reduced["ranks"] == 8) & (reduced.ranks_per_node == 8) & (reduced.size_bytes == 1 << 26)]
    busbw = 1.75 * large.size_bytes / large.latency_us / 1e3
    assert np.allclose(busbw, 174, rtol=0.1)


def test_options_are_declared() -> None:
    assert set(vidur.MEANING) <= set(vidur.OPTIONS)

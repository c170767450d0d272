"""NVIDIA's tables become ops: each table's units and conventions, where files are found, what the real tables hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.dtypes import itemsize
from opcast.datasets.ops import LINKS, Op, bus_factor, make_op
from opcast.datasets.schema import row_ops
from opcast.datasets.sources import aiconfigurator
from opcast.datasets.sources.aiconfigurator_sheet import readable
from opcast.datasets.sources.aiconfigurator_tables import TABLES, skew
from opcast.datasets.sources.importing import ImportReport, SourceError, import_into
from opcast.datasets.sources.options import ImportOptions
from opcast.datasets.store import Store

H100 = "NVIDIA H100 80GB HBM3"
WHO = {"framework": "VLLM", "version": "0.24.0", "device": H100, "kernel_source": "kernel"}
ATTENTION = {"batch_size": 2, "isl": 1024, "num_heads": 32, "head_dim": 128, "attn_dtype": "bfloat16"}
CACHED = {"num_key_value_heads": 8, "kv_cache_dtype": "fp8", "step": 0, "beam_width": 1, "window_size": 0}
MLA = {"batch_size": 4, "num_heads": 16, "tp_size": 8, "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
EXPERTS = {"num_tokens": 4096, "hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256}
MOE = {**EXPERTS, "moe_tp_size": 2, "moe_ep_size": 4, "moe_dtype": "fp8_block", "distribution": "power_law_1.01"}
DEEPEP = {"node_num": 1, "hidden_size": 7168, "num_token": 128, "num_topk": 8, "num_experts": 256}


def place(folder: Path, table: str, system: str = "h100_sxm", framework: str = "vllm", version: str = "0.24.0") -> Path:
    return folder / system / f"{system}__{table}__{framework}__{version}.parquet"


def imported(
    store: Store, folder: Path, table: str, row: dict[str, Any], system: str = "h100_sxm", framework: str = "vllm"
) -> list[tuple[Op, dict[str, Any]]]:
    """The ops that one row of a table becomes, with their rows."""
    path = place(folder, table, system, framework)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{**WHO, "framework": framework.upper(), **row}]), path)
    import_into(store, "aiconfigurator", path)
    tables = {kind: store.read(kind) for kind in store.kinds()}
    return [found for kind, rows in tables.items() for found in zip(row_ops(kind, rows), rows.to_pylist(), strict=True)]


GEMM = {"m": 64, "n": 1024, "k": 4096, "latency": 0.02}
CASES: list[tuple[str, dict[str, Any], Op, float]] = [
    ("gemm", {**GEMM, "gemm_dtype": "bfloat16"}, make_op("gemm", m=64, n=1024, k=4096), 20.0),
    ("gemm", {**GEMM, "gemm_dtype": "int4_wo"}, make_op("gemm", "w4a16", "bf16", m=64, n=1024, k=4096), 20.0),
    ("gemm", {**GEMM, "gemm_dtype": "sq"}, make_op("gemm", "int8", "bf16", m=64, n=1024, k=4096), 20.0),
    (
        "mla_bmm",
        {"num_tokens": 64, "num_heads": 128, "bmm_dtype": "fp8", "op_name": "mla_gen_pre", "latency": 0.02},
        make_op("gemm", "fp8", "bf16", batch=128, m=64, n=512, k=128, layout="nn"),
        20.0,
    ),
    (
        "mla_bmm",
        {"num_tokens": 64, "num_heads": 128, "bmm_dtype": "bfloat16", "op_name": "mla_gen_post", "latency": 0.02},
        make_op("gemm", batch=128, m=64, n=128, k=512, layout="nn"),
        20.0,
    ),
    (
        "context_attention",
        {**ATTENTION, **CACHED, "step": 512, "window_size": 128, "latency": 0.1},
        make_op(
            "attention_prefill",
            batch=2,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            v_head_dim=128,
            seq_q=1024,
            seq_kv=1536,
            window=128,
            kv_dtype="fp8",
        ),
        100.0,
    ),
    (
        "context_attention",
        {**ATTENTION, **CACHED, "attn_dtype": "fp8", "latency": 0.1},
        make_op(
            "attention_prefill",
            "fp8",
            "bf16",
            batch=2,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            v_head_dim=128,
            seq_q=1024,
            seq_kv=1024,
        ),
        100.0,
    ),
    (
        "encoder_attention",
        {**ATTENTION, "latency": 0.1},
        make_op(
            "attention_prefill",
            batch=2,
            heads_q=32,
            heads_kv=32,
            head_dim=128,
            v_head_dim=128,
            seq_q=1024,
            seq_kv=1024,
            causal="no",
        ),
        100.0,
    ),
    (
        "generation_attention",
        {**ATTENTION, **CACHED, "isl": 1, "step": 4095, "kv_cache_dtype": "bfloat16", "latency": 0.1},
        make_op(
            "attention_decode", batch=2, heads_q=32, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=1, seq_kv=4096
        ),
        100.0,
    ),
    (
        "context_mla",
        {**MLA, "isl": 512, "step": 0, "latency": 0.2},
        make_op("mla_prefill", batch=4, heads=16, seq_q=512, seq_kv=512),
        200.0,
    ),
    (
        "generation_mla",
        {**MLA, "isl": 1, "step": 511, "kv_cache_dtype": "fp8", "latency": 0.02},
        make_op("mla_decode", batch=4, heads=16, seq_q=1, seq_kv=512, kv_dtype="fp8"),
        20.0,
    ),
    (
        "moe",
        {**MOE, "latency": 5.0},
        make_op(
            "fused_moe",
            "fp8_block",
            "bf16",
            tokens=4096,
            hidden=7168,
            inter=2048,
            topk=8,
            experts=256,
            tp=2,
            ep=4,
            skew=101,
        ),
        5000.0,
    ),
    (
        "custom_allreduce",
        {"allreduce_dtype": "bfloat16", "num_gpus": 4, "message_size": 1024, "op_name": "all_reduce", "latency": 0.005},
        make_op("all_reduce", size_bytes=2048, ranks=4),
        5.0,
    ),
    (
        "nccl",
        {"nccl_dtype": "half", "num_gpus": 8, "message_size": 1024, "op_name": "alltoall", "latency": 0.02},
        make_op("all_to_all", "fp16", size_bytes=2048, ranks=8),
        20.0,
    ),
    (
        "nccl",
        {"nccl_dtype": "int8", "num_gpus": 8, "message_size": 1024, "op_name": "all_gather", "latency": 0.02},
        make_op("all_gather", "int8", size_bytes=1024, ranks=8),
        20.0,
    ),
    (
        "computescale",
        {"m": 64, "k": 4096, "quant_dtype": "fp8", "latency": 0.004},
        make_op("quantize", "bf16", "fp8", rows=64, cols=4096, part="scale"),
        4.0,
    ),
    (
        "scale_matrix",
        {"m": 64, "k": 4096, "quant_dtype": "fp8", "latency": 0.004},
        make_op("quantize", "bf16", "fp8", rows=64, cols=4096, part="apply"),
        4.0,
    ),
]


@pytest.mark.parametrize(("table", "row", "op", "latency_us"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_a_row_becomes_an_op(
    tmp_path: Path, store: Store, table: str, row: dict[str, Any], op: Op, latency_us: float
) -> None:
    ((found, measured),) = imported(store, tmp_path, table, row)
    assert found == op
    assert measured["latency_us"] == pytest.approx(latency_us)
    assert (measured["device_id"], measured["device_name"], measured["license"]) == ("h100_sxm", H100, "Apache-2.0")


def test_a_normal_exchange_is_two_ops_with_their_notification(tmp_path: Path, store: Store) -> None:
    times = {"dispatch_transmit_us": 40.0, "dispatch_notify_us": 2.0, "combine_transmit_us": 80.0}
    row = {**DEEPEP, **times, "combine_notify_us": 3.0, "dispatch_sms": 24, "combine_sms": 20}
    (combine, back), (dispatch, out) = imported(store, tmp_path, "wideep_deepep_normal", row)
    dims = {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 256, "ranks": 8}
    assert dispatch == make_op("ep_dispatch", "fp8_block", sms=24, **dims)
    assert combine == make_op("ep_combine", sms=20, **dims)
    assert (out["latency_us"], back["latency_us"]) == (42.0, 83.0)


def test_a_gb200_node_has_four_ranks(tmp_path: Path, store: Store) -> None:
    row = {**DEEPEP, "combine_avg_t_us": 60.0, "dispatch_avg_t_us": 30.0, "device": "NVIDIA GB200"}
    found = imported(store, tmp_path, "wideep_deepep_ll", row, "gb200")
    assert {(op.kind, op.ranks, op.ranks_per_node, op.mode) for op, _ in found} == {
        ("ep_combine", 4, 4, 1),
        ("ep_dispatch", 4, 4, 1),
    }


def test_preparing_an_exchange_is_refused_and_low_precision_told_apart(tmp_path: Path, store: Store) -> None:
    base = {
        **WHO,
        "framework": "TRTLLM",
        "num_tokens": 128,
        "hidden_size": 7168,
        "topk": 8,
        "num_experts": 256,
        "moe_ep_size": 16,
    }
    names = ("alltoall_prepare", "alltoall_dispatch", "alltoall_combine", "alltoall_combine_low_precision")
    rows = [
        {**base, "moe_dtype": "nvfp4", "device": "NVIDIA GB200", "op_name": name, "latency": 0.05} for name in names
    ]
    path = tmp_path / "gb200__trtllm_alltoall__trtllm__1.3.0.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    report = import_into(store, "aiconfigurator", path)
    assert (report.rows_read, report.rows_written, [r.rows for r in report.rejected]) == (4, 3, [1])
    assert sorted(store.read("ep_combine")["backend"].to_pylist()) == [
        "trtllm-0.24.0:kernel",
        "trtllm-0.24.0:kernel+low_precision",
    ]


@pytest.mark.parametrize(
    ("table", "row", "framework", "backend"),
    [
        ("gemm", {**GEMM, "gemm_dtype": "fp8"}, "trtllm", "trtllm-0.24.0:kernel+quantize"),
        ("gemm", {**GEMM, "gemm_dtype": "fp8"}, "vllm", "vllm-0.24.0:kernel"),
        ("gemm", {**GEMM, "gemm_dtype": "bfloat16", "version": "1 b"}, "vllm", "vllm-1_b:kernel"),
        ("moe", {**MOE, "latency": 5.0, "kernel_source": "x_nongated"}, "vllm", "vllm-0.24.0:x_nongated"),
        (
            "wideep_moe",
            {**MOE, "distribution": "power_law_1.01_eplb", "num_slots": 288, "latency": 5.0},
            "trtllm",
            "trtllm-0.24.0:kernel+eplb288",
        ),
        (
            "wideep_moe",
            {**MOE, "distribution": "power_law_1.01_eplb", "num_slots": 256, "latency": 5.0},
            "trtllm",
            "trtllm-0.24.0:kernel+eplb",
        ),
    ],
)
def test_the_backend_says_what_else_is_inside(
    tmp_path: Path, store: Store, table: str, row: dict[str, Any], framework: str, backend: str
) -> None:
    ((op, measured),) = imported(store, tmp_path, table, row, framework=framework)
    assert measured["backend"] == backend
    if table == "moe":
        assert op.gated == 0


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("fa3", "fa3"),
        ("NCCL", "nccl"),
        ("TRTLLM", "custom_allreduce"),
        ("", "default"),
        ("trt_flow_/smooth_quant_gemm_L96/PLUGIN_V2_SmoothQuantGemm_0", "trt_flow_SmoothQuantGemm"),
    ],
)
def test_kernel_sources_are_readable(kernel: str, name: str) -> None:
    assert readable(kernel) == name


@pytest.mark.parametrize(
    ("distribution", "hundredths"),
    [("balanced", 0), ("uniform", 0), ("power_law_1.2", 120), ("power_law_1.01_eplb", 101), ("zipf", -1)],
)
def test_loads_of_experts(distribution: str, hundredths: int) -> None:
    assert skew(distribution) == hundredths


def test_an_unknown_load_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(SourceError, match=r"fused_moe.skew=-1"):
        imported(store, tmp_path, "moe", {**MOE, "distribution": "zipf", "latency": 5.0})


def test_eager_and_replayed_all_reduces_are_told_apart(tmp_path: Path, store: Store) -> None:
    row = {"allreduce_dtype": "bfloat16", "num_gpus": 4, "message_size": 1024, "op_name": "all_reduce"}
    kernels = {"vLLM_custom_eager": 0.03, "vLLM_custom_graph": 0.005, "TRTLLM": 0.004}
    rows = [{**WHO, **row, "kernel_source": kernel, "latency": latency} for kernel, latency in kernels.items()]
    path = tmp_path / "h100_sxm__custom_allreduce__vllm__0.24.0.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    import_into(store, "aiconfigurator", path)
    table = store.read("all_reduce")
    assert dict(zip(table["backend"].to_pylist(), table["timer"].to_pylist(), strict=True)) == {
        "vllm-0.24.0:vLLM_custom_eager": "eager",
        "vllm-0.24.0:vLLM_custom_graph": "cuda_graph",
        "vllm-0.24.0:custom_allreduce": "imported",
    }


@pytest.mark.parametrize(
    ("name", "device"),
    [("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"), ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"), (None, "a100_sxm_80gb")],
)
def test_an_a100_is_known_by_its_memory(tmp_path: Path, store: Store, name: str | None, device: str) -> None:
    row = {**GEMM, "gemm_dtype": "bfloat16", "device": name}
    ((_, measured),) = imported(store, tmp_path, "gemm", row, "a100_sxm")
    assert measured["device_id"] == device


@pytest.mark.parametrize(("milliseconds", "told"), [(0.4, True), (0.3, False)])
def test_power_of_runs_as_long_as_the_counter_averages_is_kept(
    tmp_path: Path, store: Store, milliseconds: float, told: bool
) -> None:
    """3,000 calls of 0.3 ms are over before NVML's counter, a mean over a second, has seen nothing else."""
    row = {**GEMM, "gemm_dtype": "fp8_block", "latency": milliseconds, "power": 650.5, "power_limit": 700.0}
    ((_, measured),) = imported(store, tmp_path, "gemm", row)
    assert measured["power_limit_w"] == 700.0
    assert measured["power_w"] == 650.5 if told else measured["power_w"] is None
    assert measured["clocks"] == "steady"


@pytest.mark.parametrize(("dtype", "calls"), [("bfloat16", 6), ("fp8", 6), ("nvfp4", 1)])
def test_calls_of_a_replay_count(tmp_path: Path, store: Store, dtype: str, calls: int) -> None:
    row = {**GEMM, "gemm_dtype": dtype, "power": 650.5, "power_limit": 700.0}
    for milliseconds, told in ((0.34 / calls, True), (0.32 / calls, False)):
        found = imported(store, tmp_path / str(told), "gemm", {**row, "m": 100 + told, "latency": milliseconds})
        assert [measured["power_w"] is not None for op, measured in found if op.m == 100 + told] == [told]


@pytest.mark.parametrize(("watts", "clocks"), [({"power": 650.5}, "steady"), ({"power": 0.0}, "burst"), ({}, "burst")])
def test_rows_with_watts_were_timed_for_long(
    tmp_path: Path, store: Store, watts: dict[str, float], clocks: str
) -> None:
    ((_, measured),) = imported(store, tmp_path, "gemm", {**GEMM, "gemm_dtype": "bfloat16", **watts})
    assert measured["clocks"] == clocks


@settings(max_examples=30)
@given(st.floats(0.004, 1e3), st.sampled_from(["half", "int8", "bfloat16", "float"]), st.integers(1, 2**18))
def test_units_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, milliseconds: float, dtype: str, elements: int
) -> None:
    """At most 1 MiB in 4 us or more: what would be faster than the link is refused."""
    folder = tmp_path_factory.mktemp("units")
    row = {"nccl_dtype": dtype, "num_gpus": 2, "message_size": elements, "op_name": "all_reduce"}
    ((op, measured),) = imported(Store(folder / "store"), folder, "nccl", {**row, "latency": milliseconds})
    assert measured["latency_us"] / 1e3 == pytest.approx(milliseconds, rel=1e-12)
    assert op.size_bytes / itemsize(op.dtype) == elements


# --- where tables are found ------------------------------------------------------------------------------


def small(path: Path) -> Path:
    """A table of products at a path, whatever that path says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{**WHO, **GEMM, "gemm_dtype": "bfloat16"}]), path)
    return path


def test_tables_are_found_in_the_packages_layout_too(tmp_path: Path, store: Store) -> None:
    small(tmp_path / "data" / "h100_sxm" / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet")
    assert import_into(store, "aiconfigurator", tmp_path).rows_written == 1
    assert store.read("gemm")["backend"].to_pylist() == ["vllm-0.24.0:kernel"]


def test_the_manifest_says_where_rows_are_from_and_when(tmp_path: Path, store: Store) -> None:
    path = small(place(tmp_path, "gemm"))
    entry = {"file": path.relative_to(tmp_path).as_posix(), "source_path": "systems/gemm_perf.parquet"}
    manifest = {"commit": "0123456789abcdef", "commit_date": "2026-08-21", "files": [entry]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    import_into(store, "aiconfigurator", tmp_path)
    (row,) = store.read("gemm").to_pylist()
    assert row["source_ref"] == "systems/gemm_perf.parquet@0123456789ab"
    assert row["measured_at"].date().isoformat() == "2026-08-21"


def test_filters_choose_files(tmp_path: Path) -> None:
    places = [("gemm", "h100_sxm", "vllm"), ("gemm", "a100_sxm", "trtllm"), ("nccl", "h100_sxm", "nccl")]
    paths = [small(place(tmp_path, *one)) for one in places]
    found = {name: aiconfigurator.files(tmp_path, ImportOptions(**options)) for name, options in FILTERS.items()}
    assert found["none"] == sorted(paths)
    assert found["a100"] == [paths[1]]
    assert found["gemm of vllm"] == [paths[0]]


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a100": {"systems": ["a100_sxm_80gb"]},
    "gemm of vllm": {"tables": ["gemm"], "frameworks": ["vllm"]},
}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"systems": ["h101"]}, "no table for systems=h101; there are h100_sxm"),
        ({"tables": ["gem"]}, "no table for tables=gem; there are gemm, nccl"),
        ({"tables": ["gemm"], "frameworks": ["nccl"]}, "no table for these systems, tables and frameworks together"),
    ],
)
def test_a_filter_that_leaves_nothing_says_what_there_is(tmp_path: Path, options: Any, says: str) -> None:
    small(place(tmp_path, "gemm"))
    small(place(tmp_path, "nccl", framework="nccl"))
    with pytest.raises(SourceError, match=says):
        aiconfigurator.files(tmp_path, ImportOptions(**options))


def test_a_foreign_file_or_folder_is_refused_in_one_line(tmp_path: Path, store: Store) -> None:
    with pytest.raises(SourceError, match="holds no table of aiconfigurator"):
        aiconfigurator.files(tmp_path, ImportOptions())
    with pytest.raises(SourceError, match="does not say system, table and version"):
        import_into(store, "aiconfigurator", small(tmp_path / "timings.parquet"))


def test_tables_of_whole_blocks_are_refused_with_their_rows(tmp_path: Path, store: Store) -> None:
    small(place(tmp_path, "gemm"))
    small(place(tmp_path, "mla_context_module"))
    report = import_into(store, "aiconfigurator", tmp_path)
    assert [(one.rows, "whole block" in one.reason) for one in report.rejected] == [(1, True)]


def test_without_the_package_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator, "PACKAGE", "no_such_package")
    with pytest.raises(SourceError, match=r"-m pip install .*\[data\]"):
        aiconfigurator.files(None, ImportOptions())


def test_the_packages_tables_are_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    package = tmp_path / "aiconfigurator_core"
    small(package / "systems" / "data" / "h100_sxm" / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    import_into(store, "aiconfigurator")
    (reference,) = store.read("gemm")["source_ref"].to_pylist()
    assert reference.startswith("aiconfigurator_core/systems/data/h100_sxm/gemm")


# --- the real tables -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(reference_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, ImportReport]:
    """H100's small tables and its products, imported once."""
    store = Store(tmp_path_factory.mktemp("real") / "store")
    left_out = {"moe", "context_attention", "generation_attention", "encoder_attention"}
    options = ImportOptions(systems=("h100_sxm",), tables=tuple(sorted(set(TABLES) - left_out)))
    return store, import_into(store, "aiconfigurator", reference_data / "data" / "aiconfigurator", options)


@pytest.mark.reference
def test_real_rows_are_all_accounted_for(real: tuple[Store, ImportReport]) -> None:
    _, report = real
    refused = sum(one.rows for one in report.rejected)
    assert report.rows_read == report.rows_written + report.merged + refused
    assert report.rows_written > 330_000
    assert refused < 0.01 * report.rows_read


@pytest.mark.reference
def test_real_collectives_stay_below_the_link_and_come_close(real: tuple[Store, ImportReport]) -> None:
    store, _ = real
    for kind, least in (("all_reduce", 400.0), ("all_gather", 300.0), ("reduce_scatter", 300.0), ("all_to_all", 280.0)):
        table = store.read(kind, "h100_sxm")
        size, ranks = table["size_bytes"].to_numpy(), table["ranks"].to_numpy()
        busbw = size * bus_factor(kind, ranks) / table["latency_us"].to_numpy() / 1e3
        assert least < busbw[ranks == 8].max() < (480.0 if kind == "all_reduce" else 450.0)
        assert set(table["link"].to_pylist()) == {LINKS.index("nvlink")}


@pytest.mark.reference
def test_real_host_timed_tables_are_marked_and_no_others(real: tuple[Store, ImportReport]) -> None:
    store, _ = real
    eager = set()
    for kind in store.kinds():
        table = store.read(kind, newest=False, columns=["backend", "dtype", "timer"])
        rows = table.filter(pc.equal(table["timer"], "eager")).to_pandas().drop_duplicates()
        eager |= {(kind, row.backend.partition(":")[0], row.dtype) for row in rows.itertuples()}
    assert eager == {
        ("gemm", "vllm-0.24.0", "fp8_block"),
        ("mla_prefill", "vllm-0.14.0", "bf16"),
        ("mla_decode", "vllm-0.14.0", "bf16"),
        ("all_reduce", "vllm-0.24.0", "bf16"),
        ("all_reduce", "sglang-0.5.14", "bf16"),
        ("fused_moe", "sglang-0.5.10", "fp8_block"),
    }


@pytest.mark.reference
def test_real_doubled_rows_are_merged_and_their_spread_kept(real: tuple[Store, ImportReport]) -> None:
    store, _ = real
    table = store.read("mla_decode", "h100_sxm")
    doubled = table.filter(pc.starts_with(table["backend"], "sglang-0.5.14:")).to_pandas()
    assert (doubled["iterations"] == 2).all()
    spread = doubled["latency_p90_us"] / doubled["latency_p10_us"]
    assert 1.0 < spread.median() < 1.03


@pytest.mark.reference
def test_real_products_reach_what_the_device_can_and_no_more(real: tuple[Store, ImportReport]) -> None:
    store, _ = real
    rows: pd.DataFrame = store.read("gemm", "h100_sxm").to_pandas()
    for dtype, peak in (("bf16", 989.4), ("fp8", 1978.9)):
        part = rows[(rows["dtype"] == dtype) & (rows["timer"] != "eager")]
        tflops = 2e-6 * part["batch"] * part["m"] * part["n"] * part["k"] / part["latency_us"]
        assert 0.6 * peak < np.max(tflops) < 1.02 * peak

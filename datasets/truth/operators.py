"""Rows of operator and collective tables, as ops of opcast's vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ..collective_ops import bus_factor
from ..ops import Op, make_op
from .cells import Cells, precision_of
from .hardware import hardware_of
from .published import known
from .rows import OperatorRow, TruthError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def operator_row(cells: Cells, folder: Path) -> OperatorRow:
    """One op on one device, by the name and sizes of its row."""
    cells = known(cells, "operator")
    name = cells.text("op").lower()
    if name not in OPS:
        raise TruthError(f"the operator {cells.text('op')!r} has no kind")
    millis = cells.positive("latency_ms")
    if millis is None:
        raise TruthError("latency_ms is not published")
    dtype, _ = precision_of(cells.text("precision"))
    op = OPS[name](cells, dtype)
    devices = op.ranks if op.kind in COLLECTIVES else 1
    hardware = hardware_of(cells, devices)
    tags = {"op": name, "gpu": hardware.gpu, "precision": cells.text("precision")}
    empty_us = cells.number("empty_op_us") or 0.0
    if empty_us < 0.0:
        raise TruthError(f"empty_op_us={empty_us:g} must be 0 or more")
    return OperatorRow(
        id=cells.id, hardware=hardware, measured={"latency": millis}, tags=tags, op=op, empty_op_us=empty_us
    )


def _in_layer(cells: Cells) -> tuple[int, int, int, int]:
    """(tokens, hidden, heads of one rank, ranks) of an op that is given by the layer it stands in."""
    ranks = cells.count("tp")
    length = cells.needed("input_len_tokens") if cells.text("phase") == "prefill" else 1
    return cells.needed("batch_size") * length, cells.needed("d_model"), cells.needed("n_heads") // ranks, ranks


def _matmul(cells: Cells, dtype: str) -> Op:
    return make_op("gemm", m=cells.needed("M"), n=cells.needed("N"), k=cells.needed("K"), layout="nn", dtype=dtype)


def _softmax(cells: Cells, dtype: str) -> Op:
    return make_op("softmax", rows=cells.needed("M"), cols=cells.needed("N"), dtype=dtype)


def _layer_norm(cells: Cells, dtype: str) -> Op:
    return make_op("layer_norm", rows=cells.needed("M"), cols=cells.needed("N"), dtype=dtype)


def _gelu(cells: Cells, dtype: str) -> Op:
    elements = cells.needed("M") * cells.count("N")
    width = next(width for width in (4096, 1024, 256, 64, 1) if elements % width == 0)
    return make_op("gelu", rows=elements // width, cols=width, dtype=dtype)


def _norm_in_layer(cells: Cells, dtype: str) -> Op:
    tokens, hidden, _, _ = _in_layer(cells)
    return make_op("layer_norm", rows=tokens, cols=hidden, dtype=dtype)


def _gelu_in_layer(cells: Cells, dtype: str) -> Op:
    tokens, hidden, _, ranks = _in_layer(cells)
    return make_op("gelu", rows=tokens, cols=4 * hidden // ranks, dtype=dtype)


def _scores(cells: Cells, dtype: str) -> Op:
    _, hidden, heads, ranks = _in_layer(cells)
    length = cells.needed("input_len_tokens") if cells.text("phase") == "prefill" else 1
    batch, width = cells.needed("batch_size") * heads, hidden // (heads * ranks)
    return make_op("gemm", batch=batch, m=length, n=cells.needed("ctx_len"), k=width, dtype=dtype)


def _output_projection(cells: Cells, dtype: str) -> Op:
    tokens, hidden, _, ranks = _in_layer(cells)
    return make_op("gemm", m=tokens, n=hidden, k=hidden // ranks, layout="nn", dtype=dtype)


def _reduce_in_layer(cells: Cells, dtype: str) -> Op:
    tokens, hidden, _, ranks = _in_layer(cells)
    size = tokens * hidden * (4 if dtype == "fp32" else 2)
    return make_op("all_reduce", size_bytes=size, ranks=ranks, ranks_per_node=ranks, link="nvlink", dtype=dtype)


OPS: dict[str, Callable[[Cells, str], Op]] = {
    "matmul": _matmul,
    "softmax": _softmax,
    "layernorm": _layer_norm,
    "gelu": lambda cells, dtype: _gelu(cells, dtype) if cells.has("M") else _gelu_in_layer(cells, dtype),
    "q_mul_k": _scores,
    "wo_proj": _output_projection,
    "layernorm_mha": _norm_in_layer,
    "layernorm_ffn": _norm_in_layer,
    "allreduce_ffn": _reduce_in_layer,
    "allreduce_mha": _reduce_in_layer,
}


def profiled_gemm(cells: Cells, folder: Path) -> OperatorRow:
    """A GEMM under a profiler at a locked clock (``m n k latency_ms clock_Ghz``)."""
    cells = known(cells, "operator")
    millis, clock = cells.positive("latency_ms"), cells.positive("clock_Ghz")
    if millis is None:
        raise TruthError("latency_ms is not published")
    dtype = "fp16" if "fp16" in cells.text("dtype").lower() else "bf16"
    op = make_op("gemm", m=cells.needed("m"), n=cells.needed("n"), k=cells.needed("k"), layout="nn", dtype=dtype)
    named = Cells({**cells.values, "gpu": re.sub(r"\(.*", "", cells.text("gpu")).strip()}, cells.line)
    return OperatorRow(
        id=cells.id,
        hardware=hardware_of(named, 1),
        measured={"latency": millis},
        tags={"op": "gemm", "gpu": named.text("gpu")},
        op=op,
        clock_mhz=clock * 1e3 if clock else None,
    )


def collective_row(cells: Cells, folder: Path) -> OperatorRow:
    """A collective by payload and bus bandwidth or latency, in nccl-tests' conventions."""
    cells = known(cells, "collective")
    name = cells.text("collective")
    if name not in COLLECTIVES:
        raise TruthError(f"the collective {name!r} has no kind")
    payload, ranks = cells.positive("payload_bytes"), cells.needed("num_gpus")
    if payload is None:
        raise TruthError("the payload is not published")
    if cells.count("nodes") > 1 and ranks % cells.count("nodes"):
        raise TruthError(f"{ranks} ranks do not fill {cells.whole('nodes')} nodes evenly")
    hardware = hardware_of(cells, ranks)
    per_node = ranks // cells.count("nodes")
    figures = {**hardware.cluster_figures, "devices_per_node": per_node, "nodes": cells.count("nodes")}
    op = make_op(
        name,
        size_bytes=round(payload),
        ranks=ranks,
        ranks_per_node=per_node,
        link="nvlink" if cells.count("nodes") == 1 else "ib",
        dtype="bf16",
    )
    millis = cells.positive("latency_us")
    busbw = cells.positive("busbw_GBps")
    millis = millis * 1e-3 if millis else payload * float(bus_factor(name, ranks)) / busbw * 1e-6 if busbw else None
    if millis is None:
        raise TruthError("neither latency nor bandwidth is published")
    regime = "single node" if cells.count("nodes") == 1 else "multi-node"
    return OperatorRow(
        id=cells.id,
        hardware=type(hardware)(**{**vars(hardware), "cluster_figures": figures}),
        measured={"latency": millis},
        tags={"op": name, "gpu": hardware.gpu, "regime": regime, "size": size_class(payload)},
        op=op,
    )


def size_class(payload: float) -> str:
    """Three classes of payloads: bound by latency, in between, bound by bandwidth."""
    return "to 64 KiB" if payload <= 2**16 else "to 16 MiB" if payload <= 2**24 else "above 16 MiB"

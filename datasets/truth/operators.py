"""Rows of operator and collective tables, as ops of opcast's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..ops import KINDS, Op, OpKind, bus_factor, make_op
from .cells import Cells, precision_of
from .hardware import hardware_of
from .published import known
from .rows import OperatorRow, TruthError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
ALSO_CALLED = {"matmul": "gemm", "layernorm": "layer_norm"}
SHORT = {"m": "M", "n": "N", "k": "K", "rows": "M", "cols": "N"}  # columns of sizes, beside the sizes' own names
WIDTHS = (4096, 1024, 256, 64, 1)  # of rows that elements are cut into
USUAL = {"layout": "nn"}  # of products in tables of operators


def operator_row(cells: Cells, folder: Path) -> OperatorRow:
    """One op on one device (a collective: on its ranks), by its name, or ``op_kind``, and sizes."""
    typed, cells = cells, known(cells, "operator")
    name = cells.text("op").lower()
    kind = KINDS.get(cells.text("op_kind") or ALSO_CALLED.get(name, name))
    if kind is None:
        raise TruthError(f"the operator {cells.text('op')!r} has no kind")
    latency_ms, clock = cells.positive("latency_ms"), cells.positive("clock_ghz")
    if latency_ms is None:
        raise TruthError("latency_ms is not published")
    op = op_of(kind, cells, precision_of(cells.text("precision"))[0])
    hardware = hardware_of(cells, op.ranks if kind.name in COLLECTIVES else 1)
    tags = {"op": name, "gpu": hardware.gpu, "precision": typed.text("precision")}
    empty_us = cells.number("empty_op_us") or 0.0
    if empty_us < 0.0:
        raise TruthError(f"empty_op_us={empty_us:g} must be 0 or more")
    return OperatorRow(
        id=cells.id,
        hardware=hardware,
        measured={"latency": latency_ms},
        tags={tag: value for tag, value in tags.items() if value},
        op=op,
        clock_mhz=clock * 1e3 if clock else None,
        empty_op_us=empty_us,
    )


def op_of(kind: OpKind, cells: Cells, dtype: str) -> Op:
    """The op of a kind with a row's sizes, in columns of their names or of :data:`SHORT` ones."""
    if kind.name == "gelu" and not cells.has("rows"):
        elements = cells.needed("M") * cells.count("N")
        width = next(width for width in WIDTHS if elements % width == 0)
        return kind.op(dtype, rows=elements // width, cols=width)
    sizes: dict[str, Any] = {}
    for dim in kind.dims:
        column = dim.name if cells.has(dim.name) else SHORT.get(dim.name, dim.name)
        if cells.has(column):
            sizes[dim.name] = cells.text(column) if dim.choices else cells.needed(column)
        elif dim.name in USUAL:
            sizes[dim.name] = USUAL[dim.name]
        elif dim.default is None:
            raise TruthError(f"{column} is not published")
    return kind.op(dtype, **sizes)


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
    if cells.text("nvls") == "off":
        figures["nccl"] = {"nvls": False}
    op = make_op(
        name,
        size_bytes=round(payload),
        ranks=ranks,
        ranks_per_node=per_node,
        link="nvlink" if cells.count("nodes") == 1 else "ib",
        dtype="bf16",
    )
    latency_us, busbw_gbps = cells.positive("latency_us"), cells.positive("busbw_GBps")
    if latency_us:
        latency_ms = latency_us * 1e-3
    elif busbw_gbps:
        latency_ms = payload * float(bus_factor(name, ranks)) / busbw_gbps * 1e-6
    else:
        raise TruthError("neither latency nor bandwidth is published")
    regime = "single node" if cells.count("nodes") == 1 else "multi-node"
    return OperatorRow(
        id=cells.id,
        hardware=type(hardware)(**{**vars(hardware), "cluster_figures": figures}),
        measured={"latency": latency_ms},
        tags={"op": name, "gpu": hardware.gpu, "regime": regime, "size": size_class(payload)},
        op=op,
    )


def size_class(payload: float) -> str:
    """Three classes of payloads: bound by latency, in between, bound by bandwidth."""
    return "to 64 KiB" if payload <= 2**16 else "to 16 MiB" if payload <= 2**24 else "above 16 MiB"

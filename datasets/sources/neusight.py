"""NeuSight's timings (https://github.com/sitar-lab/NeuSight, ASPLOS 2025): fp32 operators on eleven GPUs, no TF32.

Parquet or CSV, recognised by columns: ``B M N K`` products, ``B H`` elementwise and row operators, ``target`` operators
inside models. Milliseconds per call, timed by events around an eager call, so that no row is faster than the host can
dispatch: rows near the fastest one of their operator and device are marked ``timer=eager``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..device_names import cuda_device_id
from .options import ImportOptions
from .tables import Rejected, RowBatch, SourceError
from .text_files import floats, listed, read_table, require, texts

VERSION = 1
OPTIONS: dict[str, str] = {}
PUBLISHED = datetime(2025, 3, 30, tzinfo=UTC)  # of the paper: the tables carry no date
EAGER = 1.5  # times the fastest row of an operator on a device: below, the host's dispatch is most of the latency

# Operator -> kind, elementwise inputs and function class. A trailing u means one tensor and a scalar.
VECTOR_OPS: dict[str, tuple[str, int, str]] = {
    "add": ("elementwise", 2, "arithmetic"),
    "addu": ("elementwise", 1, "arithmetic"),
    "mul": ("elementwise", 2, "arithmetic"),
    "mulu": ("elementwise", 1, "arithmetic"),
    "relu": ("elementwise", 1, "arithmetic"),
    "div": ("elementwise", 2, "division"),
    "divu": ("elementwise", 1, "arithmetic"),  # by a scalar: multiplies by its inverse
    "pow": ("elementwise", 2, "exponential"),
    "powu": ("elementwise", 1, "exponential"),
    "tanh": ("elementwise", 1, "exponential"),
    "gelu": ("gelu", 1, ""),
    "ln": ("layer_norm", 1, ""),
    "softmax": ("softmax", 1, ""),
}
# What a node of a traced model calls -> a name of VECTOR_OPS, or of a product.
FUNCTIONS = {"add": "add", "sub": "add", "mul": "mul", "truediv": "div", "tanh": "tanh", "gelu": "gelu",
             "softmax": "softmax", "addmm": "mm", "matmul": "bmm", "bmm": "bmm"}  # fmt: skip
MODULES = (
    (r"layer_?norm$|\bln_\w+$", "ln"),
    (r"(dense|decoder|lm_head|fc\d|\w_proj|wi|wo|SelfAttention\.[qkvo]|query|key|value|classifier|seq_relationship)$",
     "linear"),
)  # fmt: skip


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """Tables at or below ``path``, configurations and inventories left out."""
    tables = listed(path, ("*.parquet", "*.csv"), "NeuSight's tables")
    return [file for file in tables if not file.name.startswith("inventory")] if len(tables) > 1 else tables


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of one table. SourceError for a table that is none of NeuSight's."""
    table = read_table(file)
    names = set(table.column_names)
    if "in_channels" in names:
        yield RowBatch(rejected=(Rejected("convolutions are no op kind", len(table), file.name),))
    elif "target" in names:
        yield from _model_nodes(table, file)
    elif {"M", "N", "K"} & names:
        require(table, ("op", "latency_ms", "device", "B", "M", "N", "K"), file)
        yield from _products(table, file)
    else:
        require(table, ("op", "latency_ms", "device", "B", "H"), file)
        yield from _vector_ops(table, file)


# --- single operators ----------------------------------------------------------------------------------


def _products(table: pa.Table, file: Path) -> Iterator[RowBatch]:
    """``bmm``: B times [M,K]·[K,N]; ``linear``: [M,K] times a weight of [N,K], and a bias."""
    ops = texts(table, "op")
    dims = {name: floats(table, source) for name, source in (("batch", "B"), ("m", "M"), ("n", "N"), ("k", "K"))}
    shared = _shared(table, file)
    for op, layout in (("bmm", "nn"), ("linear", "nt")):
        rows = ops == op
        yield RowBatch("gemm", _at({**dims, **shared, "layout": layout}, rows))
    yield _unknown(ops, ("bmm", "linear"), file)


def _vector_ops(table: pa.Table, file: Path) -> Iterator[RowBatch]:
    """Operators on a [B, H] matrix."""
    ops, rows, cols = texts(table, "op"), floats(table, "B"), floats(table, "H")
    shared = _shared(table, file)
    for op, (kind_name, inputs, function) in VECTOR_OPS.items():
        dims = _row_dims(kind_name, rows, cols, inputs, function)
        yield RowBatch(kind_name, _at({**dims, **shared}, ops == op))
    yield _unknown(ops, VECTOR_OPS, file)


def _row_dims(kind_name: str, rows: Any, cols: Any, inputs: int, function: str) -> dict[str, Any]:
    if kind_name == "elementwise":
        return {"numel": rows * cols, "inputs": inputs, "fn": function}
    return {"rows": rows, "cols": cols}


def _shared(table: pa.Table, file: Path) -> dict[str, Any]:
    """Columns that operators of all kinds have: device, backend, latency and how it was timed."""
    ops, names, latency = texts(table, "op"), texts(table, "device"), 1e3 * floats(table, "latency_ms")
    torch = [text.removeprefix("p") for text in _optional(table, "torch")]
    cuda = [re.sub(r"cu(\d+)(\d)", r"\1.\2", text) for text in _optional(table, "cuda")]
    return {
        "device_id": _devices(names),
        "backend": [_backend(op, name, version) for op, name, version in zip(ops, names, torch, strict=True)],
        "latency_us": latency,
        "timer": _timers(ops + "/" + names, latency),
        "torch": torch,
        "cuda": cuda,
        **_about(),
        "source_ref": _optional(table, "file") if "file" in table.column_names else file.name,
    }


def _about() -> dict[str, Any]:
    return {"dtype": "fp32", "measured_at": PUBLISHED, "license": "MIT"}


def _timers(groups: np.ndarray, latency: np.ndarray) -> np.ndarray:
    """``eager`` for rows close to the fastest of their group, else ``cuda_event``."""
    _, group = np.unique(groups.astype(str), return_inverse=True)
    floor = np.full(group.max(initial=0) + 1, np.inf)
    np.minimum.at(floor, group, np.where(latency > 0, latency, np.inf))
    return np.where(latency < EAGER * floor[group], "eager", "cuda_event").astype(object)


def _backend(op: str, device_name: str, version: str) -> str:
    library = "rocblas" if device_name.startswith("AMD") else "cublas"
    return f"torch{'-' if version else ''}{version}:{library if op in ('bmm', 'linear', 'mm') else 'aten'}"


# --- operators inside models ---------------------------------------------------------------------------


def _model_nodes(table: pa.Table, file: Path) -> Iterator[RowBatch]:
    """Forward times of a traced model's nodes; what is no op of ours is counted by what it calls."""
    require(table, ("target", "input_shapes", "output_shape", "fw_latency_ms", "dtype", "gpu", "model", "mode"), file)
    names = ("target", "input_shapes", "output_shape", "dtype", "gpu", "model", "mode")
    columns = {name: texts(table, name) for name in names}
    latency = 1e3 * floats(table, "fw_latency_ms")
    gpus = np.array([name.replace("_", " ") for name in columns["gpu"]], dtype=object)
    called = [_called(target) for target in columns["target"]]
    timers = _timers(np.array([str(name) for name in called], dtype=object) + "/" + gpus, latency)
    by_kind: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    refused: dict[str, list[str]] = {}
    for row, what in enumerate(called):
        node = None
        if columns["dtype"][row] == "torch.float32" and what is not None:
            node = _node(what, columns["input_shapes"][row], columns["output_shape"][row])
        if node is None:
            reason, name = _refusal(columns["dtype"][row], columns["target"][row])
            refused.setdefault(reason, []).append(name)
        else:
            by_kind.setdefault(node[0], []).append((row, node[1]))
    for kind_name, nodes in by_kind.items():
        at = np.array([row for row, _ in nodes])
        dims = {dim: np.array([values[dim] for _, values in nodes]) for dim in nodes[0][1]}
        yield RowBatch(kind_name, {
            **dims, **_about(), "latency_us": latency[at], "timer": timers[at], "device_id": _devices(gpus[at]),
            "backend": [_backend(str(called[row]), gpus[row], "") for row in at],
            "source_ref": [f"{columns['model'][row]}/{columns['mode'][row]}" for row in at],
        })  # fmt: skip
    for reason, names_of in refused.items():
        counts = sorted(((names_of.count(name), name) for name in set(names_of)), reverse=True)
        most = ", ".join(f"{name} {count}" for count, name in counts[:6])
        yield RowBatch(rejected=(Rejected(reason, len(names_of), f"{most} in {file.name}"),))


def _called(target: str) -> str | None:
    """What a node calls, in the words of VECTOR_OPS and of products; None when that is no op of ours."""
    function = re.match(r"<(?:built-in )?(?:function|method) (\w+)", target)
    if function:
        return FUNCTIONS.get(function[1])
    return next((name for pattern, name in MODULES if re.search(pattern, target, re.IGNORECASE)), None)


def _node(name: str, input_shapes: str, output_shape: str) -> tuple[str, dict[str, Any]] | None:
    """Kind and dims of one node; None where its shapes are not those of the op it calls."""
    try:
        shapes, out = ast.literal_eval(input_shapes), ast.literal_eval(output_shape)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if name in ("mm", "linear"):
        x = shapes[1] if name == "mm" and len(shapes) == 3 else shapes[0]
        return "gemm", {"batch": 1, "m": math.prod(x[:-1]), "n": out[-1], "k": x[-1], "layout": int(name == "linear")}
    if name == "bmm":
        x = shapes[0]
        if len(shapes) != 2 or len(x) < 3 or list(x[:-2]) != list(shapes[1][:-2]):
            return None
        return "gemm", {"batch": math.prod(x[:-2]), "m": x[-2], "n": out[-1], "k": x[-1], "layout": 0}
    kind_name, inputs, function = VECTOR_OPS[name]
    if kind_name == "elementwise":
        full = sum(list(shape) == list(out) for shape in shapes)
        if not 1 <= full <= inputs:
            return None
        index = ("arithmetic", "division", "exponential").index(function if full == inputs else "arithmetic")
        return kind_name, {"numel": math.prod(out), "inputs": full, "fn": index}
    return kind_name, {"rows": math.prod(out[:-1]), "cols": out[-1]}


def _refusal(dtype: str, target: str) -> tuple[str, str]:
    """Why a node is no op of ours, and what it calls."""
    name = re.match(r"<[\w -]*?(?:function|method) (\w+)", target)
    called = name[1] if name else target.split(".")[-1]
    if dtype != "torch.float32":
        return "inside a model, no float32 result", called
    return "inside a model, no op kind for it or its shapes", called


# --- shared --------------------------------------------------------------------------------------------


def _devices(names: np.ndarray) -> list[str]:
    ids = {name: cuda_device_id(str(name)) for name in set(names.tolist())}
    return [ids[name] for name in names]


def _unknown(ops: np.ndarray, kinds: Any, file: Path) -> RowBatch:
    """The rows whose operator is none of those known."""
    others = [op for op in ops if op not in kinds]
    if len(others) == len(ops):
        raise SourceError(f"{file.name} holds no operator that is known ({', '.join(kinds)}), but {others[:1]}")
    return RowBatch(rejected=(Rejected("no op kind", len(others), f"{others[0]} in {file.name}"),) if others else ())


def _optional(table: pa.Table, name: str) -> list[str]:
    return texts(table, name).tolist() if name in table.column_names else [""] * len(table)


def _at(columns: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Some rows of columns; single values stay as they are."""
    places = np.flatnonzero(rows)
    picked: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray):
            picked[name] = column[places]
        else:
            picked[name] = [column[i] for i in places] if isinstance(column, list) else column
    return picked

"""Vidur's profiles (https://github.com/microsoft/vidur): layers of Llama-like models, and all-reduce and send/recv.

``compute/<gpu>/<model>/mlp.csv`` has one row per token count and tensor-parallel degree, in milliseconds of kernel
time; an operator's dims on one rank follow from the model's in the same row. ``network/<node>/<collective>.csv`` has
one row per buffer size (bytes) and group. All of it ran in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..devices import Device, known_devices
from .options import ImportOptions
from .tables import Rejected, RowBatch, SourceError
from .text_files import floats, listed, read_table, require, texts

VERSION = 1
OPTIONS = {"device": "device of all files, where their folders do not tell (compute/a100 → a100_sxm_80gb)"}
MEANING = ("device",)
PUBLISHED = datetime(2024, 5, 9, tzinfo=UTC)  # of the paper, arXiv 2405.05465: the tables carry no date
GRID_US = 1.0  # kernel times were kept as whole microseconds
FLOOR_US = 2.0  # below, half a step of the grid is more than a quarter of the latency
UNSTEADY = 2.0  # slowest over fastest of three runs
LAYER_COLUMNS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp")
COMPUTE = {"a100": "a100_sxm_80gb", "h100": "h100_sxm", "a40": "a40"}
NETWORK = {
    "a100_dgx": "a100_sxm_80gb",
    "h100_dgx": "h100_sxm",
    "a100_pairwise_nvlink": "a100_pcie_80gb",
    "h100_pairwise_nvlink": "h100_nvl",
    "a40_pairwise_nvlink": "a40",
}
COLLECTIVES = ("all_reduce", "send_recv")


def files(path: Path | None, options: ImportOptions) -> list[Path]:
    """Profiles of layers and collectives at or below ``path``."""
    patterns = ("mlp.csv", "attention.csv", *(f"{name}.csv" for name in COLLECTIVES))
    return listed(path, patterns, "Vidur's profiling folder")


def read(file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    """Rows of one profile. SourceError for a device that is not known or a column that is missing."""
    if copied := _original(file):
        raise SourceError(f"{_place(file)} is a byte copy of {copied}: one of them was not measured")
    table = read_table(file)
    if file.name.startswith("attention"):
        yield RowBatch(rejected=(Rejected("attention tables of Vidur are not read", len(table), _place(file)),))
    elif "collective" in table.column_names:
        yield from _collectives(table, file, options)
    else:
        yield from _layers(table, file, options)


# --- layers --------------------------------------------------------------------------------------------


def _layers(table: pa.Table, file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    require(table, ("num_tokens", "num_tensor_parallel_workers", *LAYER_COLUMNS), file)
    device_id = _device(file, "compute", COMPUTE, options)
    for operator, (kind_name, dims) in _operators(table).items():
        timed = _timed(table, operator, file)
        spread = np.maximum(GRID_US / 2, 1.2816 * timed["latency_std_us"])  # of a normal law's 10th and 90th percentile
        timed["latency_p10_us"] = np.maximum(timed["latency_us"] - spread, timed["latency_min_us"] - GRID_US / 2)
        timed["latency_p90_us"] = np.minimum(timed["latency_us"] + spread, timed["latency_max_us"] + GRID_US / 2)
        coarse = timed["latency_us"] < FLOOR_US
        columns = {**dims, **timed, "iterations": 20, **_shared(file, device_id, f"vidur:{kind_name}")}
        reason = f"below {FLOOR_US:g} us on a {GRID_US:g} us grid"
        yield _kept(kind_name, columns, ~coarse, reason, f"{operator} of {_place(file)}")


def _operators(table: pa.Table) -> dict[str, tuple[str, dict[str, Any]]]:
    """Operator of a layer: its kind, and its dims on one rank."""
    tokens, ranks = floats(table, "num_tokens"), floats(table, "num_tensor_parallel_workers")
    heads, kv_heads, hidden, inner, vocab, gated = (floats(table, name) for name in LAYER_COLUMNS)
    head_dim = hidden / heads
    act = {"rows": tokens, "cols": inner / ranks}
    norm = {"rows": tokens, "cols": hidden}

    def product(n: np.ndarray, k: np.ndarray) -> tuple[str, dict[str, Any]]:
        return "gemm", {"m": tokens, "n": n, "k": k, "layout": "nt"}

    return {
        "emb": ("embedding", {"tokens": tokens, "vocab": vocab / ranks, "hidden": hidden}),
        "input_layernorm": ("rms_norm", norm),
        "attn_pre_proj": product((heads + 2 * kv_heads) * head_dim / ranks, hidden),
        "attn_rope": ("rope", {"tokens": tokens, "heads": (heads + kv_heads) / ranks, "head_dim": head_dim}),
        "attn_post_proj": product(hidden, heads * head_dim / ranks),
        "post_attention_layernorm": ("rms_norm", norm),
        "mlp_up_proj": product((1 + gated) * inner / ranks, hidden),
        "mlp_act": ("silu_mul" if gated.all() else "gelu", act),
        "mlp_down_proj": product(hidden, inner / ranks),
        "add": ("elementwise", {"numel": tokens * hidden, "inputs": 2, "fn": "arithmetic"}),
    }


# --- collectives ---------------------------------------------------------------------------------------


def _collectives(table: pa.Table, file: Path, options: ImportOptions) -> Iterator[RowBatch]:
    require(table, ("num_workers", "size", "collective", "devices_per_node"), file)
    name = str(texts(table, "collective")[0])
    if name not in COLLECTIVES:
        raise SourceError(f"{_place(file)} holds {name!r}; known are {', '.join(COLLECTIVES)}")
    device_id = _device(file, "network", NETWORK, options)
    ranks, per_node = floats(table, "num_workers"), floats(table, "devices_per_node")
    link = _links(file.parent.name, options.figures(device_id), ranks, per_node)
    timed = _timed(table, name, file)
    timed["latency_p10_us"], timed["latency_p90_us"] = timed["latency_min_us"], timed["latency_max_us"]
    steady = timed["latency_max_us"] <= UNSTEADY * timed["latency_min_us"]
    dims = {"size_bytes": floats(table, "size"), "ranks": ranks, "ranks_per_node": np.minimum(per_node, ranks)}
    columns = {**dims, "link": np.maximum(link, 0), **timed, "iterations": 3}
    columns |= _shared(file, device_id, "vidur:nccl")
    linked = link >= 0
    yield _kept(name, _at(columns, linked), steady[linked], "the slowest of three runs took over twice the fastest",
                _place(file))  # fmt: skip
    if not linked.all():
        reason = "between nodes without InfiniBand: sent over sockets, which are no link of opcast's"
        yield RowBatch(rejected=(Rejected(reason, int((~linked).sum()), _place(file)),))


def _links(node: str, device: Device, ranks: np.ndarray, per_node: np.ndarray) -> np.ndarray:
    """The slowest link each group crosses, as index of nvlink, pcie, ib; -1 where it is none of them.

    Cards of a pairwise node have a bridge to one neighbour; the rates of A40 pairs (4 GB/s) are those of PCIe.
    """
    pairwise = "pairwise" in node
    bridged = device.link_gbps > 0 and device.id != "a40"
    inside = np.where((ranks > 2) & pairwise, 1, 0) if bridged else np.ones(len(ranks), dtype=np.int64)
    return np.where(ranks <= per_node, inside, -1 if pairwise else 2)


# --- shared --------------------------------------------------------------------------------------------


def _timed(table: pa.Table, operator: str, file: Path) -> dict[str, np.ndarray]:
    """Statistics of one operator in microseconds; ``latency_max_us`` is for the reader's own use."""
    names = {"latency_us": "median", "latency_min_us": "min", "latency_max_us": "max", "latency_mean_us": "mean",
             "latency_std_us": "std"}  # fmt: skip
    require(table, (f"time_stats.{operator}.{statistic}" for statistic in names.values()), file)
    return {name: 1e3 * floats(table, f"time_stats.{operator}.{statistic}") for name, statistic in names.items()}


def _kept(kind_name: str, columns: dict[str, Any], good: np.ndarray, reason: str, example: str) -> RowBatch:
    """The good rows of some columns; the others counted."""
    rows = _at(columns, good)
    rows.pop("latency_max_us")
    bad = int((~good).sum())
    return RowBatch(kind_name, rows, (Rejected(reason, bad, example),) if bad else ())


def _at(columns: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    return {name: column[rows] if isinstance(column, np.ndarray) else column for name, column in columns.items()}


def _shared(file: Path, device_id: str, backend: str) -> dict[str, Any]:
    about = {"device_id": device_id, "backend": backend, "measured_at": PUBLISHED, "dtype": "fp16"}
    return {**about, "source_ref": _place(file), "license": "MIT"}


def _device(file: Path, folder: str, ids: Mapping[str, str], options: ImportOptions) -> str:
    """The device that a file's place tells; SourceError when it does not."""
    if options.device_id:
        return options.device_id
    parts = file.resolve().parts[:-1]
    after = parts[len(parts) - parts[::-1].index(folder) :] if folder in parts else parts[-1:]
    name = after[0] if after else ""
    if name in ids:
        return ids[name]
    if name in known_devices():
        return name
    raise SourceError(f"{_place(file)} lies in no folder of a known GPU ({', '.join(ids)}): say device=…")


def _original(file: Path) -> str | None:
    """Another node's file of the same bytes, where one stands beside this one and comes before it."""
    others = sorted(file.resolve().parent.parent.glob(f"*/{file.name}"))
    for other in others[: others.index(file.resolve())] if file.name != "mlp.csv" and file.resolve() in others else []:
        if other.stat().st_size == file.stat().st_size and other.read_bytes() == file.read_bytes():
            return _place(other)
    return None


def _place(file: Path) -> str:
    """A file's name with the folders that tell what it holds."""
    return "/".join(file.resolve().parts[-4 if file.name in ("mlp.csv", "attention.csv") else -3 :])

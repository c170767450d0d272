"""What a learned model sees of an op: one float32 matrix per kind, derived from the op and the device alone.

:data:`REASONS` is the table of all features and why each is there. Sizes enter as log2, so that trees split scales
evenly; nothing depends on other rows, so a row's features never change with its company. Columns of the device
(``device_…``) are constant within one device's table and let one model serve several devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..datasets.devices import Device
from ..datasets.dtypes import BITS
from ..datasets.ops import attended_pairs
from ..datasets.vocabulary import KINDS, kind
from .analytical import terms
from .analytical.setting import Dims, Setting, Terms

FEATURES_VERSION = 1  # a predictor trained on other features is refused

# name, or the start of a name, and the reason. The longest match wins; a feature without one fails a test.
REASONS: dict[str, str] = {
    "size_": "log2 of a dimension: library heuristics switch kernels by size",
    "choice_": "code of a choice (layout, direction, causal, link): another kernel or path",
    "align_": "log2 of the largest power of two that divides it, up to 4096: vector loads, tiles, cache conflicts",
    "pad_": "share of a block of 16, 64, 128 or 256 that is used: the rest of the last tile is wasted work",
    "tail_": "share of compute units busy over all waves for a candidate tile: wave quantization",
    "waves_": "log2 of waves for a candidate tile: how much the last wave weighs",
    "hint_": "a figure of the analytical law: chosen tile, waves, tail, splits, rows a unit, hops, bytes a row",
    "flops": "log2 FLOPs: total arithmetic",
    "bytes": "log2 compulsory bytes: total traffic",
    "intensity": "log2 FLOPs a byte: which side of the ridge",
    "balance": "log2 compute over memory time here: the ridge, where both limit and overlap is imperfect",
    "roofline": "log2 of the roofline time: the scale on which efficiency changes",
    "analytical": "log2 of the analytical time: what is being corrected",
    "overhead": "share of launch and hops in the analytical time: how far latency rules",
    "cache_warm": "whether inputs may lie in the last-level cache",
    "cache_fill": "log2 of all bytes over the last-level cache: what warm can mean",
    "reach_": "log2 of one operand over the last-level cache: which operand is re-read from memory",
    "dtype": "code of the input format: other units and instructions",
    "out_dtype": "code of the output format: epilogue and conversions",
    "bits": "log2 of bits an element: orders the formats by rate",
    "skew": "log2 of rows over columns of a product: tall, square, wide kernels",
    "group": "log2 of query heads a KV head, or rows an expert: reuse of one load, packing of heads",
    "pairs": "share of query-key pairs inside the mask: skipped blocks",
    "kv_rows": "log2 of KV rows over all heads and sequences: parallelism and traffic of decoding",
    "blocks": "log2 of independent blocks of work over compute units: occupancy",
    "message": "log2 of bytes a rank sends: protocol switches (LL, LL128, simple)",
    "nodes": "log2 of nodes a group spans: links change at the border",
    "device_": "log2 of a device figure: lets one model serve several devices; constant within one",
}

HINTS = {
    "gemm": ("tile", "waves", "tail", "split_gain", "loads_share", "blocks_per_thread"),
    "attention": ("waves", "tail", "padding", "splits", "split_gain", "heads_per_thread", "groups_per_thread"),
    "collective": ("steps", "message_per_rank"),
    "host": (),
}
ROW_HINTS = ("rows_per_unit", "row_bytes")
DTYPES = {name: index for index, name in enumerate(BITS)}
CANDIDATE_TILES = ((256, 128), (128, 128), (64, 64))

Columns = dict[str, np.ndarray | float]


@dataclass(frozen=True)
class Frame:
    """Features of n ops, and the two times they were derived from."""

    matrix: np.ndarray  # float32 [n, f], columns as in feature_names(kind)
    analytical_us: np.ndarray  # float64 [n]
    roofline_us: np.ndarray  # float64 [n]


def features(
    kind_name: str,
    columns: Mapping[str, np.ndarray],
    dtype: str,
    out_dtype: str | None,
    device: Device,
    cache: str = "warm",
) -> np.ndarray:
    """float32 [n, f]: one row per op, columns as in :func:`feature_names`. Raises as ``analytical.latency_us``."""
    return frame(kind_name, columns, dtype, out_dtype, device, cache).matrix


def frame(
    kind_name: str,
    columns: Mapping[str, np.ndarray],
    dtype: str,
    out_dtype: str | None,
    device: Device,
    cache: str = "warm",
) -> Frame:
    """Features with the analytical and roofline time of the same ops."""
    names = kind(kind_name).names
    count = len(np.atleast_1d(columns[names[0]]))
    matrix = np.empty((count, len(feature_names(kind_name))), dtype=np.float32)
    latency, floor = np.empty(count), np.empty(count)
    start = 0
    for part_latency, part_floor, law, dims, setting in terms(
        kind_name, columns, dtype, out_dtype or dtype, device, cache
    ):
        stop = start + len(part_latency)
        latency[start:stop], floor[start:stop] = part_latency, part_floor
        block = matrix[start:stop]
        for index, values in enumerate(_columns(kind_name, part_latency, part_floor, law, dims, setting).values()):
            block[:, index] = values
        start = stop
    return Frame(matrix, latency, floor)


@lru_cache
def feature_names(kind_name: str) -> tuple[str, ...]:
    """The columns of :func:`features` for a kind, in order. OpError for an unknown kind."""
    one = {dim.name: np.array([float(max(dim.low, dim.default or 0))]) for dim in kind(kind_name).dims}
    latency, floor, law, dims, setting = next(terms(kind_name, one, "bf16", "bf16", _REFERENCE, "warm"))
    return tuple(_columns(kind_name, latency, floor, law, dims, setting))


def reason(feature: str) -> str:
    """Why a feature is there. KeyError for a name that is no feature."""
    return REASONS[max((start for start in REASONS if feature.startswith(start)), key=len)]


def smooth(feature: str) -> bool:
    """Whether latency varies smoothly along this feature, so that a kernel method may interpolate on it."""
    return not feature.startswith(("choice_", "align_", "pad_", "tail_", "dtype", "out_dtype", "cache_warm"))


def _columns(
    kind_name: str, latency: np.ndarray, floor: np.ndarray, law: Terms, dims: Dims, setting: Setting
) -> Columns:
    out = _sizes(kind_name, dims)
    out.update(_costs(latency, floor, law, setting))
    family = KINDS[kind_name].family
    for hint in HINTS.get(family, ROW_HINTS):
        out[f"hint_{hint}"] = np.log2(law.hints[hint]) if hint in law.hints else 0.0
    special = _SPECIAL.get(kind_name) or _FAMILY.get(family)
    if special:
        out.update(special(dims, setting))
    out.update(_device(setting.device, setting.dtype))
    return out


def _sizes(kind_name: str, dims: Dims) -> Columns:
    out: Columns = {}
    for dim in KINDS[kind_name].dims:
        values = getattr(dims, dim.name)
        if dim.choices:
            out[f"choice_{dim.name}"] = values
        else:
            out[f"size_{dim.name}"] = np.log2(np.maximum(values, 0.5))
    return out


def _costs(latency: np.ndarray, floor: np.ndarray, law: Terms, setting: Setting) -> Columns:
    flops, size = np.maximum(setting.cost.flops, 1.0), np.maximum(setting.cost.bytes, 1.0)
    log_flops, log_size = np.log2(flops), np.log2(size)
    ratio = np.maximum(law.compute, 1e-6) / np.maximum(law.memory, 1e-6)
    return {
        "flops": log_flops,
        "bytes": log_size,
        "intensity": log_flops - log_size,
        "balance": np.log2(ratio),
        "roofline": np.log2(np.maximum(floor, 1e-6)),
        "analytical": np.log2(np.maximum(latency, 1e-6)),
        "overhead": law.overhead / np.maximum(latency, 1e-6),
        "cache_warm": float(setting.warm),
        "cache_fill": log_size - np.log2(setting.l2_bytes),
        "dtype": float(DTYPES[setting.dtype]),
        "out_dtype": float(DTYPES[setting.out_dtype]),
        "bits": float(np.log2(BITS[setting.dtype])),
    }


def _product(dims: Dims, setting: Setting) -> Columns:
    batch = dims.batch if hasattr(dims, "batch") else np.minimum(dims.experts, dims.tokens)
    m = dims.m if hasattr(dims, "m") else dims.tokens / batch
    out: Columns = {"skew": np.log2(m / dims.n), "group": np.log2(m)}
    for name, values in (("m", m), ("n", dims.n), ("k", dims.k)):
        out[f"align_{name}"] = _alignment(values)
    for block in (64, 128, 256):
        out[f"pad_m{block}"] = _used(m, block)
        out[f"pad_n{block}"] = _used(dims.n, block)
    for rows, cols in CANDIDATE_TILES:
        waves = batch * np.ceil(m / rows) * np.ceil(dims.n / cols) / setting.units
        out[f"tail_{rows}x{cols}"] = waves / np.ceil(waves)
        out[f"waves_{rows}x{cols}"] = np.log2(waves)
    out["reach_a"] = np.log2(batch * m * dims.k * setting.itemsize / setting.l2_bytes)
    out["reach_b"] = np.log2(batch * dims.n * dims.k * setting.itemsize / setting.l2_bytes)
    return out


def _attention(dims: Dims, setting: Setting) -> Columns:
    latent = hasattr(dims, "heads")
    heads_q = dims.heads if latent else dims.heads_q
    heads_kv = dims.heads if latent else dims.heads_kv
    window = 0.0 if latent else dims.window
    width = dims.kv_lora_rank if latent else dims.head_dim
    waves = dims.batch * heads_q * np.ceil(dims.seq_q / 128.0) / setting.units
    pairs = attended_pairs(dims.seq_q, dims.seq_kv, dims.causal, window)
    return {
        "group": np.log2(heads_q / heads_kv * dims.seq_q),
        "pairs": pairs / (dims.seq_q * dims.seq_kv),
        "kv_rows": np.log2(dims.batch * heads_kv * dims.seq_kv),
        "blocks": np.log2(dims.batch * heads_kv / setting.units),
        "waves_128": np.log2(waves),
        "tail_128": waves / np.ceil(waves),
        "pad_seq_q128": _used(dims.seq_q, 128),
        "pad_seq_kv64": _used(dims.seq_kv, 64),
        "pad_head_dim64": _used(width, 64),
        "align_head_dim": _alignment(width),
        "align_seq_kv": _alignment(dims.seq_kv),
    }


def _rows(dims: Dims, setting: Setting) -> Columns:
    rows = dims.rows if hasattr(dims, "rows") else dims.tokens
    cols = next(
        getattr(dims, name) for name in ("cols", "hidden", "head_dim", "vocab", "experts") if hasattr(dims, name)
    )
    waves = rows / setting.units
    return {
        "align_cols": _alignment(cols),
        "pad_cols256": _used(cols, 256),
        "tail_rows": waves / np.ceil(waves),
        "blocks": np.log2(waves),
    }


def _flat(dims: Dims, setting: Setting) -> Columns:
    size = next(getattr(dims, name) for name in ("numel", "size_bytes", "length") if hasattr(dims, name))
    return {"align_size": _alignment(size), "blocks": np.log2(np.maximum(size, 0.5) / (1024.0 * setting.units))}


def _collective(dims: Dims, setting: Setting) -> Columns:
    return {
        "message": np.log2(np.maximum(setting.cost.read_bytes, 0.5)),
        "nodes": np.log2(np.ceil(dims.ranks / dims.ranks_per_node)),
        "align_size": _alignment(dims.size_bytes),
    }


_FAMILY: dict[str, Callable[[Dims, Setting], Columns]] = {
    "gemm": _product,
    "attention": _attention,
    "norm": _rows,
    "pointwise": _rows,
    "gather": _rows,
    "moe": _rows,
    "collective": _collective,
}
_SPECIAL: dict[str, Callable[[Dims, Setting], Columns]] = dict.fromkeys(
    ("elementwise", "reduce", "adamw", "copy"), _flat
)


def _device(device: Device, dtype: str) -> Columns:
    rate = device.tensor_rate(dtype) if device.supports(dtype) else device.vector_tflops
    figures = {
        "rate": rate,
        "vector": device.vector_tflops,
        "memory": device.memory_gbps,
        "cache_size": device.l2_mib,
        "cache_rate": device.l2_gbps,
        "units": device.compute_units,
        "clock": device.clock_mhz,
        "launch": device.launch_us,
        "dispatch": device.dispatch_us,
        "shared": device.shared_kib,
        "link": device.link_gbps,
        "pcie": device.pcie_gbps,
    }
    return {f"device_{name}": float(np.log2(max(value, 2.0**-10))) for name, value in figures.items()}


def _alignment(values: np.ndarray) -> np.ndarray:
    whole = np.maximum(values, 1.0).astype(np.int64)
    return np.log2(np.minimum(whole & -whole, 4096))


def _used(values: np.ndarray, block: int) -> np.ndarray:
    return values / (np.ceil(values / block) * block)


# Only its presence matters: it lets the list of columns be read off the code that fills them.
_REFERENCE = Device("reference", "reference", "none", "none", 1, 1.0, {"bf16": 1.0}, 1.0, 1.0, 1.0, 1.0, 1.0)

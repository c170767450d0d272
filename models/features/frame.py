"""What a learned model sees of an op: one float32 matrix per kind, derived from the op and the device alone.

:data:`.reasons.REASONS` is the table of all features and why each is there. Sizes enter as log2, so that trees split
scales evenly; nothing depends on other rows, so a row's features never change with its company. Columns of the device
(``device_…``) are constant within one device's table and let one model serve several devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...datasets.devices import Device
from ...datasets.dtypes import BITS, family_format
from ...datasets.vocabulary import KINDS, OpColumns, kind
from ..analytical import terms
from ..analytical.setting import Dims, Setting, Terms
from .device import device_figures
from .families import BY_LAW, FAMILIES
from .pieces import Columns, log2

FEATURES_VERSION = 3  # a predictor trained on other features is refused
DTYPES = {name: index for index, name in enumerate(BITS)}


@dataclass(frozen=True)
class Frame:
    """Features of n ops, and the two times they were derived from."""

    matrix: np.ndarray  # float32 [n, f], columns as in feature_names(kind), each contiguous
    analytical_us: np.ndarray  # float64 [n]
    roofline_us: np.ndarray  # float64 [n]


def features(ops: OpColumns, device: Device) -> np.ndarray:
    """float32 [n, f]: one row per op, columns as in :func:`feature_names`. Raises as ``analytical.latency_us``."""
    return frame(ops, device).matrix


def frame(ops: OpColumns, device: Device) -> Frame:
    """Features with the analytical and roofline time of the same ops."""
    count = len(np.atleast_1d(ops.columns[kind(ops.kind).names[0]]))
    matrix = np.empty((len(feature_names(ops.kind)), count), dtype=np.float32).T
    latency, floor = np.empty(count), np.empty(count)
    start = 0
    for part_latency, part_floor, law, dims, setting in terms(ops, device):
        stop = start + len(part_latency)
        latency[start:stop], floor[start:stop] = part_latency, part_floor
        block = matrix[start:stop]
        for index, values in enumerate(_columns(ops.kind, part_latency, part_floor, law, dims, setting).values()):
            block[:, index] = values
        start = stop
    return Frame(matrix, latency, floor)


@lru_cache
def feature_names(kind_name: str) -> tuple[str, ...]:
    """The columns of :func:`features` for a kind, in order. OpError for an unknown kind."""
    one = {dim.name: np.array([float(max(dim.low, dim.default or 0))]) for dim in kind(kind_name).dims}
    latency, floor, law, dims, setting = next(terms(OpColumns(kind_name, one, "bf16", "bf16", "warm"), _REFERENCE))
    return tuple(_columns(kind_name, latency, floor, law, dims, setting))


def alike(dtype: str) -> str:
    """The format whose code a format has on a GPU: bf16 and fp16 run on the same units at the same rate."""
    return "bf16" if dtype == "fp16" else family_format(dtype)


def _columns(
    kind_name: str, latency: np.ndarray, floor: np.ndarray, law: Terms, dims: Dims, setting: Setting
) -> Columns:
    out = _sizes(kind_name, dims)
    out.update(_costs(latency, floor, law, setting))
    family = BY_LAW.get(KINDS[kind_name].law) or FAMILIES[KINDS[kind_name].family]
    for hint in family.hints:
        out[f"hint_{hint}"] = log2(law.hints[hint]) if hint in law.hints else 0.0
    if family.special:
        out.update(family.special(dims, setting))
    out.update(device_figures(setting.device, setting.dtype))
    return out


def _sizes(kind_name: str, dims: Dims) -> Columns:
    out: Columns = {}
    for dim in KINDS[kind_name].dims:
        if dim.of_backend:
            continue
        values = getattr(dims, dim.name)
        if dim.choices:
            out[f"choice_{dim.name}"] = values
        else:
            out[f"size_{dim.name}"] = log2(np.maximum(values, 0.5))
    return out


def _code(setting: Setting, dtype: str) -> float:
    return float(DTYPES[family_format(dtype) if setting.cpu else alike(dtype)])


def _held(size: np.ndarray, setting: Setting) -> np.ndarray | float:
    """The share of an op's bytes that a warm cache may hold; of messages, whose bytes are the link's, 1 where it is
    warm."""
    of_cache = setting.warm and setting.cost.unit != "network"
    return np.minimum(setting.l2_bytes / size, 1.0) if of_cache else float(setting.warm)


def _costs(latency: np.ndarray, floor: np.ndarray, law: Terms, setting: Setting) -> Columns:
    flops, size = np.maximum(setting.cost.flops, 1.0), np.maximum(setting.cost.bytes, 1.0)
    log_flops, log_size = log2(flops), log2(size)
    ratio = np.maximum(law.compute, 1e-6) / np.maximum(law.memory, 1e-6)
    return {
        "flops": log_flops,
        "bytes": log_size,
        "intensity": log_flops - log_size,
        "balance": log2(ratio),
        "roofline": log2(np.maximum(floor, 1e-6)),
        "analytical": log2(np.maximum(latency, 1e-6)),
        "overhead": law.overhead / np.maximum(latency, 1e-6),
        "cache_warm": _held(size, setting),
        "cache_fill": log_size - np.log2(setting.l2_bytes),
        "dtype": _code(setting, setting.dtype),
        "out_dtype": _code(setting, setting.out_dtype),
        "bits": float(np.log2(BITS[setting.dtype])),
    }


# Only its presence matters: it lets the list of columns be read off the code that fills them.
_REFERENCE = Device("reference", "reference", "none", "none", 1, 1.0, {"bf16": 1.0}, 1.0, 1.0, 1.0, 1.0, 1.0)

"""Latency by physics: launch floor, compute or memory over a tile, wave and cache model, links, host.

Works for any device with nothing but its figures, answers a million ops a second, and is what learned models
correct: they learn measured over analytical time, so that beyond their data this remains.

Every law is at least the roofline (:func:`roofline_us`), and never slower on a device with more memory bandwidth,
FLOP/s, cache, or compute units of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np

from ...datasets.devices import Device
from ...datasets.vocabulary import KINDS, OpColumns, OpError, cost_columns, kind
from . import attention, matmul, mixers, moe, network, rows
from .setting import Dims, Setting, Terms

CHUNK = 8192  # ops computed together, so that temporaries stay in a core's cache
CACHES = ("cold", "warm")
BOUNDS = ("latency", "compute", "memory", "network", "host")  # what can hold an op back

# By the name that a kind's definition gives (``law``): general ones first, then those of one kind each.
LAWS: dict[str, Callable[[Dims, Setting], Terms]] = {
    "rows": rows.by_rows,
    "rows_and_weights": rows.by_rows_with_weight_gradient,
    "elements": rows.elements,
    "gemm": matmul.gemm,
    "grouped_gemm": matmul.grouped_gemm,
    "attention_prefill": attention.attention_prefill,
    "attention_decode": attention.attention_decode,
    "attention_backward": attention.attention_backward,
    "mla_prefill": attention.mla_prefill,
    "mla_decode": attention.mla_decode,
    "linear_attention_prefill": mixers.linear_attention_prefill,
    "linear_attention_backward": mixers.linear_attention_backward,
    "linear_attention_decode": mixers.linear_attention_decode,
    "causal_conv1d": mixers.causal_conv1d,
    "causal_conv1d_backward": mixers.causal_conv1d_backward,
    "sparse_attention_prefill": mixers.sparse_attention,
    "sparse_attention_decode": mixers.sparse_attention,
    "sparse_attention_backward": mixers.sparse_attention_backward,
    "sparse_index_prefill": mixers.sparse_index,
    "sparse_index_decode": mixers.sparse_index,
    "rope": rows.rope,
    "elementwise": rows.elementwise,
    "reduce": rows.reduce,
    "embedding": rows.embedding,
    "embedding_backward": rows.embedding_backward,
    "moe_route": rows.moe_route,
    "moe_permute": rows.moe_permute,
    "fused_moe": moe.fused_moe,
    "adamw": rows.adamw,
    "copy": rows.copy,
    "host_overhead": network.host_overhead,
    "host_pass": network.host_pass,
    "expert_exchange": network.expert_exchange,
    **{name: partial(network.collective, name) for name, each in KINDS.items() if each.family == "collective"},
}


def latency_us(ops: OpColumns, device: Device) -> np.ndarray:
    """Latency of ops in us [n].

    Raises OpError for an unknown kind, DeviceError when the device has no matrix units for the dtype.
    """
    parts = [_bounded(ops.kind, *chunk)[0] for chunk in _chunks(ops, device)]
    return np.concatenate(parts) if parts else np.zeros(0)


def roofline_us(ops: OpColumns, device: Device) -> np.ndarray:
    """The pure lower bound in us: FLOPs over peak, bytes over peak bandwidth (of the cache as far as warm), links."""
    parts = [_roofline(*chunk) for chunk in _chunks(ops, device)]
    return np.concatenate(parts) if parts else np.zeros(0)


def bound(ops: OpColumns, device: Device) -> np.ndarray:
    """What holds each op back, one of :data:`BOUNDS`; objects [n]."""
    return np.array(BOUNDS, dtype=object)[limits(ops, device)[1]]


def limits(ops: OpColumns, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """The roofline of ops in us (:func:`roofline_us`), and what holds them back as places in :data:`BOUNDS`, uint8."""
    parts = [(_roofline(*chunk), _bound(ops.kind, *chunk)) for chunk in _chunks(ops, device)]
    if not parts:
        return np.zeros(0), np.zeros(0, np.uint8)
    floor, bounds = zip(*parts, strict=True)
    return np.concatenate(floor), np.concatenate(bounds)


def terms(ops: OpColumns, device: Device) -> Iterator[tuple[np.ndarray, np.ndarray, Terms, Dims, Setting]]:
    """Latency, roofline, terms, dims and setting of each chunk of ops, in order: what features are made of."""
    for dims, setting in _chunks(ops, device):
        latency, floor, law = _bounded(ops.kind, dims, setting)
        yield latency, floor, law, dims, setting


def _chunks(ops: OpColumns, device: Device) -> Iterator[tuple[Dims, Setting]]:
    if ops.cache not in CACHES:
        raise ValueError(f"cache={ops.cache!r} is not one of {', '.join(CACHES)}")
    out_dtype = ops.out_dtype or ops.dtype
    arrays = {name: np.asarray(ops.columns[name]).reshape(-1) for name in kind(ops.kind).names}
    count = len(next(iter(arrays.values())))
    for start in range(0, count, CHUNK):
        chunk = {name: values[start : start + CHUNK].astype(np.float64) for name, values in arrays.items()}
        cost = cost_columns(ops.kind, chunk, ops.dtype, out_dtype)
        yield SimpleNamespace(**chunk), Setting(device, ops.dtype, out_dtype, ops.cache == "warm", cost)


def _law(kind_name: str) -> Callable[[Dims, Setting], Terms]:
    name = KINDS[kind_name].law
    if name not in LAWS:
        raise OpError(f"{kind_name} has the analytical law {name!r}, which is none of {', '.join(LAWS)}")
    return LAWS[name]


def _bounded(kind_name: str, dims: Dims, setting: Setting) -> tuple[np.ndarray, np.ndarray, Terms]:
    law = _law(kind_name)(dims, setting)
    floor = _roofline(dims, setting)
    return np.maximum(law.latency, floor), floor, law


def _roofline(dims: Dims, setting: Setting) -> np.ndarray:
    cost, device = setting.cost, setting.device
    size = cost.read_bytes + cost.write_bytes
    if cost.unit == "host":
        return np.asarray(0.0 * size)
    if cost.unit == "network":
        return np.asarray(cost.read_bytes / network.link_rates(setting)[dims.link.astype(np.int64)])
    peak = device.tensor_rate(setting.dtype) if cost.unit == "tensor" else device.vector_tflops
    memory = size / (device.memory_gbps * 1e3)
    if setting.warm:
        hit = setting.resident(size)
        memory = size * (hit / setting.l2_rate + (1.0 - hit) / (device.memory_gbps * 1e3))
    return np.maximum(cost.flops / (peak * 1e6), memory)


def _bound(kind_name: str, dims: Dims, setting: Setting) -> np.ndarray:
    law = _law(kind_name)(dims, setting)
    if setting.cost.unit == "host":
        return np.full(len(law.latency), BOUNDS.index("host"), np.uint8)
    parts = np.broadcast_arrays(law.overhead, law.compute, law.memory, law.network)
    return np.argmax(np.stack(parts), axis=0).astype(np.uint8)

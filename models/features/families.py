"""What each family of kinds adds to the features that all have: of products, experts, rows, messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..analytical.setting import Dims, Setting
from .attention import HINTS as ATTENTION
from .attention import attention
from .pieces import Columns, alignment, used

# Shapes that libraries choose from, beyond the law's own: each wastes its last wave at other sizes.
CANDIDATE_TILES = ((256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))
WAVE_TILES = ((256, 128), (128, 128), (64, 64))  # those whose number of waves is a feature: others follow from it
PRODUCT = ("tile", "waves", "tail", "split_gain", "loads_share", "blocks_per_thread")  # figures of analytical laws
EXPERTS = ("waves", "tail", "padding", "touched", "rows_per_expert", "busiest_rows", "rank_rows", "around")
STREAMED = ("rows_per_unit", "row_bytes")
MESSAGES = ("steps", "message_per_rank", "protocol")


def product(dims: Dims, setting: Setting) -> Columns:
    """Of a matrix product: tiles, waves, alignment, reach of each operand."""
    batch = dims.batch if hasattr(dims, "batch") else np.minimum(dims.experts, dims.tokens)
    m = dims.m if hasattr(dims, "m") else dims.tokens / batch
    out: Columns = {"skew": np.log2(m / dims.n), "group": np.log2(m)}
    for name, values in (("m", m), ("n", dims.n), ("k", dims.k)):
        out[f"align_{name}"] = alignment(values)
    out["pad_m128"] = used(m, 128)
    out["pad_n128"] = used(dims.n, 128)
    for rows, cols in CANDIDATE_TILES:
        waves = batch * np.ceil(m / rows) * np.ceil(dims.n / cols) / setting.units
        out[f"tail_{rows}x{cols}"] = waves / np.ceil(waves)
        if (rows, cols) in WAVE_TILES:
            out[f"waves_{rows}x{cols}"] = np.log2(waves)
    out["reach_a"] = np.log2(batch * m * dims.k * setting.itemsize / setting.l2_bytes)
    out["reach_b"] = np.log2(batch * dims.n * dims.k * setting.weight_itemsize / setting.l2_bytes)
    return out


def experts(dims: Dims, setting: Setting) -> Columns:
    """Of a fused mixture of experts: rows an expert, experts touched, padding of each expert's last tile."""
    local = np.maximum(dims.experts / dims.ep, 1.0)
    rows = dims.tokens * dims.topk / dims.experts
    width = dims.inter / dims.tp
    return {
        "group": np.log2(rows),
        "blocks": np.log2(local * np.ceil(width / 128.0) / setting.units),
        "size_local_experts": np.log2(local),
        "size_width": np.log2(width),
        "align_inter": alignment(width),
        "align_hidden": alignment(dims.hidden),
        "pad_rows64": used(np.maximum(rows, 1.0), 64),
        "pad_rows16": used(np.maximum(rows, 1.0), 16),
    }


def rows(dims: Dims, setting: Setting) -> Columns:
    """Of kernels that stream rows."""
    count = dims.rows if hasattr(dims, "rows") else dims.tokens
    cols = next(
        getattr(dims, name) for name in ("cols", "hidden", "head_dim", "vocab", "experts") if hasattr(dims, name)
    )
    waves = count / setting.units
    return {
        "align_cols": alignment(cols),
        "pad_cols256": used(cols, 256),
        "tail_rows": waves / np.ceil(waves),
        "blocks": np.log2(waves),
    }


def flat(dims: Dims, setting: Setting) -> Columns:
    """Of kernels that stream elements."""
    size = next(getattr(dims, name) for name in ("numel", "size_bytes", "length") if hasattr(dims, name))
    return {"align_size": alignment(size), "blocks": np.log2(np.maximum(size, 0.5) / (1024.0 * setting.units))}


def scan(dims: Dims, setting: Setting) -> Columns:
    """Of linear attention: heads that share a key, states over compute units, tokens of all sequences."""
    tokens = dims.batch * (dims.seq if hasattr(dims, "seq") else 1.0)
    waves = dims.batch * dims.heads / setting.units
    return {
        "group_heads": np.log2(dims.heads / dims.groups),
        "blocks": np.log2(waves),
        "tail_heads": waves / np.ceil(waves),
        "rows_tokens": np.log2(tokens),
        "pad_state64": used(dims.state_dim, 64),
        "pad_head_dim64": used(dims.head_dim, 64),
    }


def chosen(dims: Dims, setting: Setting) -> Columns:
    """Of attention to chosen tokens and of what chooses them: keys a query takes, queries over compute units."""
    heads = dims.heads if hasattr(dims, "heads") else dims.heads_q
    queries = dims.batch * dims.seq_q
    return {
        "keys": np.log2(np.minimum(dims.topk, dims.seq_kv)),
        "keys_cached": np.log2(dims.seq_kv),
        "rows_queries": np.log2(queries * heads),
        "blocks": np.log2(queries / setting.units),
        "pad_heads16": used(heads, 16),
        "pad_head_dim64": used(dims.head_dim, 64),
    }


def collective(dims: Dims, setting: Setting) -> Columns:
    return _messages(dims, setting) | {"align_size": alignment(dims.size_bytes)}


def expert_exchange(dims: Dims, setting: Setting) -> Columns:
    return _messages(dims, setting) | {"align_size": alignment(dims.hidden)}


def _messages(dims: Dims, setting: Setting) -> Columns:
    return {
        "message": np.log2(np.maximum(setting.cost.read_bytes, 0.5)),
        "nodes": np.log2(np.ceil(dims.ranks / dims.ranks_per_node)),
    }


@dataclass(frozen=True)
class FamilyFeatures:
    """What a family of kinds adds to sizes and costs: figures of its analytical law, and features of its own."""

    hints: tuple[str, ...]
    special: Callable[[Dims, Setting], Columns] | None = None


ROWS = FamilyFeatures(STREAMED, rows)
FLAT = FamilyFeatures(STREAMED, flat)
FAMILIES = {
    "gemm": FamilyFeatures(PRODUCT, product),
    "attention": FamilyFeatures(ATTENTION, attention),
    "linear_attention": FamilyFeatures(("waves", "shared", "last"), scan),
    "norm": ROWS,
    "pointwise": ROWS,
    "gather": ROWS,
    "moe": ROWS,
    "optimizer": FLAT,
    "copy": FLAT,
    "collective": FamilyFeatures(MESSAGES, collective),
    "expert_parallel": FamilyFeatures(MESSAGES, expert_exchange),
    "host": FamilyFeatures(()),
}
BY_LAW = {  # kinds whose analytical law is another than that of their family
    "fused_moe": FamilyFeatures(EXPERTS, experts),
    **dict.fromkeys(("elements", "elementwise", "reduce"), FLAT),
    **dict.fromkeys(
        ("sparse_attention_prefill", "sparse_attention_decode", "sparse_attention_backward"),
        FamilyFeatures(("splits", "waves", "tail", "filling", "padding"), chosen),
    ),
    **dict.fromkeys(("sparse_index_prefill", "sparse_index_decode"), FamilyFeatures(("waves",), chosen)),
}

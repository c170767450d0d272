"""Features of attention: masked blocks, groups of heads, rows of the KV cache."""

from __future__ import annotations

import numpy as np

from ...datasets.ops import attended_pairs
from ..analytical.attention import query_blocks
from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment, used

HINTS = (
    "shared",
    "last",
    "edge",
    "filling",
    "splits",
    "waves",
    "tail",
    "padding",
    "heads_per_thread",
    "groups_per_thread",
)


def attention(dims: Dims, setting: Setting) -> Columns:
    latent = hasattr(dims, "heads")
    heads_q = dims.heads if latent else dims.heads_q
    heads_kv = np.ones_like(dims.heads) if latent else dims.heads_kv
    window = 0.0 * dims.heads if latent else dims.window
    width = dims.kv_lora_rank if latent else dims.head_dim
    group = heads_q / heads_kv
    pairs = attended_pairs(dims.seq_q, dims.seq_kv, dims.causal, window)
    keys = np.where(window > 0, np.minimum(dims.seq_kv, window + dims.seq_q - 1.0), dims.seq_kv)
    caches = dims.batch * heads_kv
    out: Columns = {
        "group": np.log2(group * dims.seq_q),
        "group_heads": np.log2(group),
        "pairs": pairs / (dims.seq_q * dims.seq_kv),
        "keys": np.log2(pairs / dims.seq_q),
        "keys_cached": np.log2(keys),
        "kv_rows": np.log2(caches * dims.seq_kv),
        "rows_tokens": np.log2(dims.batch * dims.seq_q),
        "rows_appended": np.log2(caches * dims.seq_q),
        "rows_queries": np.log2(dims.batch * heads_q * dims.seq_q),
        "row_kv": np.log2(heads_kv * width),
        "row_queries": np.log2(heads_q * width),
        "pad_seq_q128": used(dims.seq_q, 128),
        "pad_group64": used(group * dims.seq_q, 64),
        "pad_keys64": used(keys, 64),
        "pad_head_dim64": used(width, 64),
        "align_group": alignment(group),
        "align_head_dim": np.minimum(alignment(width), 5.0),
        "align_seq_kv": alignment(dims.seq_kv),
        "room": np.log2(np.maximum(np.floor(setting.units / caches), 1.0)),
    }
    for name, rows, packed in (("heads", 128.0, False), ("packed", 128.0, True), ("small", 64.0, True)):
        blocks = query_blocks(dims, heads_q, heads_kv, window, rows, packed)
        waves = blocks.count / setting.units
        out[f"waves_{name}"] = np.log2(np.ceil(waves))
        out[f"tail_{name}"] = waves / np.ceil(waves)
    waves = caches / setting.units
    out["blocks"] = np.log2(waves)
    out["blocks_parts"] = np.log2(waves * np.maximum(np.floor(dims.seq_kv / 128.0), 1.0))
    out["waves_caches"] = np.log2(np.ceil(waves))
    out["tail_caches"] = waves / np.ceil(waves)
    return out

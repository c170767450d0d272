"""Features of attention: masked blocks, groups of heads, rows of the KV cache."""

from __future__ import annotations

import numpy as np

from ...datasets.ops import attended_pairs
from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment, used

HINTS = ("waves", "tail", "padding", "splits", "split_gain", "heads_per_thread", "groups_per_thread")


def attention(dims: Dims, setting: Setting) -> Columns:
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
        "pad_seq_q128": used(dims.seq_q, 128),
        "pad_seq_kv64": used(dims.seq_kv, 64),
        "pad_head_dim64": used(width, 64),
        "align_head_dim": alignment(width),
        "align_seq_kv": alignment(dims.seq_kv),
    }

"""Features of a fused mixture of experts: rows an expert, experts touched, padding of each expert's last tile."""

from __future__ import annotations

import numpy as np

from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment, used

HINTS = ("waves", "tail", "padding", "touched", "rows_per_expert", "busiest_rows", "rank_rows", "around")


def experts(dims: Dims, setting: Setting) -> Columns:
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

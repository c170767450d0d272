"""Features of collectives and of the exchange between experts: messages, nodes."""

from __future__ import annotations

import numpy as np

from ..analytical.setting import Dims, Setting
from .pieces import Columns, alignment

HINTS = ("steps", "message_per_rank", "protocol")


def collective(dims: Dims, setting: Setting) -> Columns:
    return {
        "message": np.log2(np.maximum(setting.cost.read_bytes, 0.5)),
        "nodes": np.log2(np.ceil(dims.ranks / dims.ranks_per_node)),
        "align_size": alignment(dims.size_bytes),
    }


def expert_exchange(dims: Dims, setting: Setting) -> Columns:
    return {
        "message": np.log2(np.maximum(setting.cost.read_bytes, 0.5)),
        "nodes": np.log2(np.ceil(dims.ranks / dims.ranks_per_node)),
        "align_size": alignment(dims.hidden),
    }

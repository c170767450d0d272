"""A rank's experts in one go: routing, two grouped products with the gate between them, and the weighted sum."""

from __future__ import annotations

import numpy as np

from .matmul import grouped_products
from .setting import Dims, Setting, Terms

KERNELS = 4.0  # sort and permute, first products, gate, second products with the sum


def fused_moe(d: Dims, s: Setting) -> Terms:
    """Two grouped products over the experts of a rank that are expected to have a token."""
    rows = d.tokens * d.topk / d.ep
    touched = np.maximum(d.experts / d.ep * (1.0 - (1.0 - 1.0 / d.experts) ** (d.tokens * d.topk)), 1.0)
    each = np.maximum(rows / touched, 1.0)
    width = d.inter / d.tp
    up = grouped_products(touched, each, (1.0 + d.gated) * width, d.hidden, s)
    down = grouped_products(touched, each, d.hidden, width, s)
    passes = rows * (d.hidden * 3.0 + width * (2.0 + d.gated)) * s.out_itemsize
    memory = s.traffic_us(s.cost.bytes) + s.traffic_us(passes)
    hints = {
        "waves": up.hints["waves"],
        "tail": up.hints["tail"],
        "touched": touched,
        "rows_per_expert": each,
    }
    compute = up.compute + down.compute
    return Terms(
        compute,
        memory,
        KERNELS * s.device.launch_us,
        hints={n: np.broadcast_to(v, compute.shape) for n, v in hints.items()},
    )

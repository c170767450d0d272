"""Constants of :mod:`.nccl_times` from NCCL measurements: the logarithms of times, matched by robust least squares.

Latencies and shares are few and physical, so that half of the (collective, ranks) groups fix them for the others;
``docs/network-model.md`` reports that split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .nccl import Array, GroupShapes, choose_algorithms
from .nccl_times import Tuning, choice_us

INTER_NODE_CONSTANTS = ("far_hop", "network", "far_exchange", "far_peer_us")
INTRA_NODE_CONSTANTS = tuple(
    field.name for field in dataclasses.fields(Tuning) if field.name not in INTER_NODE_CONSTANTS
)
SHARE_CONSTANTS = ("ring", "ll", "nvls", "exchange", "network", "far_exchange")
SHARE_FACTORS = (1.0, 0.6, 0.3)  # times the starting shares: one that is not the bottleneck at the start would not move
LIMITS = {"overlap": (0.7, 3.0), "crowd": (0.01, 3.0)}
PRIOR_WEIGHT = 0.02  # pull towards the starting constants: keeps what no row says anything about


def fit(
    rows: Mapping[str, tuple[Array, GroupShapes, Array]], start: Tuning, names: Sequence[str] = INTRA_NODE_CONSTANTS
) -> tuple[Tuning, float]:
    """Constants ``names`` of measured collectives, and the median relative error that is left.

    ``rows``: by kind, the sizes in bytes [n], what they ran over, and the measured us [n]. A constant that is zero in
    ``start`` (in-switch reduction where there is none) stays zero.
    """
    from scipy.optimize import least_squares

    names = [name for name in names if getattr(start, name) > 0.0]
    origin = np.log([getattr(start, name) for name in names])
    measured = np.log(np.concatenate([us for _, _, us in rows.values()]))

    choices = {kind: choose_algorithms(kind, size, groups) for kind, (size, groups, _) in rows.items()}

    def predict_log_us(tuning: Tuning) -> Array:
        times = [choice_us(*choices[kind], kind, size, groups, tuning) for kind, (size, groups, _) in rows.items()]
        return np.log(np.concatenate(times))

    def residuals(logs: Array) -> Array:
        return np.concatenate(
            [predict_log_us(_replace_constants(start, names, logs)) - measured, PRIOR_WEIGHT * (logs - origin)]
        )

    limits = np.log([LIMITS.get(name, (1e-6, 1e6)) for name in names]).T
    starts = [origin + np.log(factor) * np.isin(names, SHARE_CONSTANTS) for factor in SHARE_FACTORS]
    settings = {"loss": "soft_l1", "f_scale": 0.1, "diff_step": 1e-3, "bounds": tuple(limits)}
    runs = [least_squares(residuals, logs, **settings) for logs in starts]
    tuning = _replace_constants(start, names, min(runs, key=lambda run: float(run.cost)).x)
    return tuning, float(np.median(np.abs(np.expm1(predict_log_us(tuning) - measured))))


def _replace_constants(start: Tuning, names: Sequence[str], logs: Array) -> Tuning:
    return dataclasses.replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

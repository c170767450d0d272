"""Constants of :mod:`.law` from NCCL measurements: the logarithms of times, matched by robust least squares.

Latencies and shares are few and physical, so that half of the (collective, ranks) groups fix them for the others;
``docs/network.md`` reports that split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from .law import Tuning, taking
from .nccl import Array, GroupShapes, chosen

INSIDE = (
    "base",
    "hop",
    "line_hop",
    "bulk_us",
    "step_us",
    "overlap",
    "ring",
    "copy",
    "ll",
    "line",
    "channel_gbps",
    "gather",
    "nvls",
    "nvls_us",
    "nvls_wait_us",
    "exchange",
    "exchange_us",
    "fill",
    "peer_us",
    "beyond",
    "crowd",
)
ACROSS = ("far_hop", "network", "far_exchange", "far_peer_us")
SHARES = ("ring", "ll", "nvls", "exchange", "network", "far_exchange")
TRIED = (1.0, 0.6, 0.3)  # times the starting shares: one that is not the bottleneck at the start would not move
LIMITS = {"overlap": (0.7, 3.0), "crowd": (0.01, 3.0)}
HOLD = 0.02  # pull towards the starting constants: keeps what no row says anything about


def fit(
    rows: Mapping[str, tuple[Array, GroupShapes, Array]], start: Tuning, names: Sequence[str] = INSIDE
) -> tuple[Tuning, float]:
    """Constants ``names`` of measured collectives, and the median relative error that is left.

    ``rows``: by kind, the sizes in bytes [n], what they ran over, and the measured us [n]. A constant that is zero in
    ``start`` (in-switch reduction where there is none) stays zero.
    """
    from scipy.optimize import least_squares

    names = [name for name in names if getattr(start, name) > 0.0]
    origin = np.log([getattr(start, name) for name in names])
    measured = np.log(np.concatenate([us for _, _, us in rows.values()]))

    taken = {kind: chosen(kind, size, groups) for kind, (size, groups, _) in rows.items()}

    def predicted(tuning: Tuning) -> Array:
        times = [taking(*taken[kind], kind, size, groups, tuning) for kind, (size, groups, _) in rows.items()]
        return np.log(np.concatenate(times))

    def misses(logs: Array) -> Array:
        return np.concatenate([predicted(_moved(start, names, logs)) - measured, HOLD * (logs - origin)])

    limits = np.log([LIMITS.get(name, (1e-6, 1e6)) for name in names]).T
    starts = [origin + np.log(factor) * np.isin(names, SHARES) for factor in TRIED]
    settings = {"loss": "soft_l1", "f_scale": 0.1, "diff_step": 1e-3, "bounds": tuple(limits)}
    runs = [least_squares(misses, each, **settings) for each in starts]
    tuning = _moved(start, names, min(runs, key=lambda each: float(each.cost)).x)
    return tuning, float(np.median(np.abs(np.expm1(predicted(tuning) - measured))))


def _moved(start: Tuning, names: Sequence[str], logs: Array) -> Tuning:
    return dataclasses.replace(start, **dict(zip(names, np.exp(logs).tolist(), strict=True)))

"""How well two campaigns of the same device agree: the noise floor of its measurements, kind by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .ops import KINDS
from .store import Store


@dataclass(frozen=True)
class Agreement:
    """Rows of one kind that both stores have, and by how many percent the second differs from the first."""

    kind: str
    device: str
    rows: int
    median_percent: float
    p90_percent: float
    most_percent: float
    bias_percent: float  # median of the signed differences: a machine that became slower shows here
    only_one: int  # rows that are good in one store only


def agreements(first: Store, second: Store) -> list[Agreement]:
    """One entry for every kind and device that both stores have good rows of."""
    pairs = []
    for kind_name in sorted(set(first.kinds()) & set(second.kinds()) & set(KINDS)):
        for device_id in sorted(set(first.devices(kind_name)) & set(second.devices(kind_name))):
            one, other = (latencies(store, kind_name, device_id) for store in (first, second))
            if pair := agreement(kind_name, device_id, one, other):
                pairs.append(pair)
    return pairs


def latencies(store: Store, kind_name: str, device_id: str) -> dict[tuple[object, ...], float]:
    """The newest good latency in microseconds of every op, backend and state of the cache."""
    names = [*KINDS[kind_name].names, "dtype", "out_dtype", "backend", "cache"]
    table = store.read(kind_name, device_id, columns=[*names, "latency_us"])
    keys = zip(*(table[name].to_pylist() for name in names), strict=True)
    return dict(zip(keys, table["latency_us"].to_pylist(), strict=True))


def agreement(
    kind_name: str,
    device_id: str,
    one: Mapping[tuple[object, ...], float],
    other: Mapping[tuple[object, ...], float],
) -> Agreement | None:
    """How well two sets of latencies agree; None where they share no row."""
    shared = sorted(set(one) & set(other), key=repr)
    if not shared:
        return None
    apart = 100.0 * np.array([other[key] / one[key] - 1.0 for key in shared])
    median, p90, most = (float(np.percentile(np.abs(apart), share)) for share in (50, 90, 100))
    return Agreement(
        kind_name, device_id, len(shared), median, p90, most, float(np.median(apart)), len(set(one) ^ set(other))
    )

"""How full links are, as every answer and report says it: the fullest by name, kinds of links, both over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from .topology import Topology

HOT = 10  # links that are named
BINS = 100  # equal spans of time that load is told for


def fullest(load: np.ndarray, count: int = HOT) -> np.ndarray:
    """The fullest links that are used at all, equally full ones in their order. ``load`` [links] are shares."""
    order = np.argsort(-load, kind="stable")[:count]
    return order[load[order] > 0]


def described(topology: Topology, load: np.ndarray, hot: np.ndarray, shares: np.ndarray, us: float) -> dict[str, Any]:
    """``hot_links``, ``busy`` by kind and ``over_time`` as plain values.

    ``load`` [links] are shares of capacity over all ``us``, ``shares`` [bins, len(hot)] those of some links over time.
    """
    names = [topology.link_name(link) for link in hot.tolist()]
    peaks = shares.max(axis=0, initial=0.0).tolist()
    kinds = {kind: load[topology.of_kind((kind,))] for kind in sorted(set(topology.kind))}
    return {
        "hot_links": [
            {"link": name, "busy": busy, "peak": peak}
            for name, busy, peak in zip(names, load[hot].tolist(), peaks, strict=True)
        ],
        "busy": {kind: {"mean": float(each.mean()), "max": float(each.max())} for kind, each in kinds.items()},
        "over_time": {
            "span_us": us / len(shares),
            "links": dict(zip(names, shares.T.round(6).tolist(), strict=True)),
        },
    }

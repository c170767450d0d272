"""How full links are, as every answer and report says it: the fullest by name, kinds of links, both over time."""

from __future__ import annotations

from typing import Any

import numpy as np

from .topology import Topology

NAMED_LINKS = 10  # links that are named
BINS = 100  # equal spans of time that load is told for
DIGITS = 4  # of shares that are as full


def fullest(load: np.ndarray, count: int = NAMED_LINKS) -> np.ndarray:
    """The fullest links that are used at all, equally full ones in their order. ``load`` [links] are shares."""
    order = np.argsort(-load, kind="stable")[:count]
    return order[load[order] > 0]


def fullest_kinds(topology: Topology, load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The fullest links that are used at all, one for all of its kind that are as full; and how many those are."""
    kind = np.unique(np.array(topology.kind), return_inverse=True)[1]
    alike = np.stack([kind, np.round(load, DIGITS)])
    _, first, counts = np.unique(alike, axis=1, return_index=True, return_counts=True)
    order = np.argsort(-load[first], kind="stable")[:NAMED_LINKS]
    order = order[load[first[order]] > 0]
    return first[order], counts[order]


def describe_load(
    topology: Topology, load: np.ndarray, hot: tuple[np.ndarray, np.ndarray], shares: np.ndarray, us: float
) -> dict[str, Any]:
    """``hot_links``, ``busy`` by kind and ``over_time`` as plain values.

    ``load`` [links] are shares of capacity over all ``us``, ``hot`` the :func:`fullest_kinds` to name, and ``shares``
    [bins, kinds] theirs over time.
    """
    links, alike = hot
    names = [topology.link_name(link) for link in links.tolist()]
    peaks = shares.max(axis=0, initial=0.0).tolist()
    kinds = {kind: load[topology.of_kind((kind,))] for kind in sorted(set(topology.kind))}
    return {
        "hot_links": [
            {"link": name, "alike": count, "busy": busy, "peak": peak}
            for name, count, busy, peak in zip(names, alike.tolist(), load[links].tolist(), peaks, strict=True)
        ],
        "busy": {kind: {"mean": float(busy.mean()), "max": float(busy.max())} for kind, busy in kinds.items()},
        "over_time": {
            "span_us": us / len(shares),
            "links": dict(zip(names, shares.T.round(6).tolist(), strict=True)),
        },
    }

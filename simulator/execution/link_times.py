"""How long collectives and messages of a run take on a cluster's links, alone, by an algorithm that is named."""

from __future__ import annotations

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.loading import nearest
from ...datasets.traces.groups import JoinedRun
from ...datasets.traces.schema import TraceFileError
from ..network.build import build_fabric
from ..network.collectives import ALGORITHMS
from .run import OP_KINDS, call_bytes


def link_us(joint: JoinedRun, cluster: Cluster, device: Device, algorithm: str | None) -> dict[int, float]:
    """Microseconds of each collective and message by its node. Device i of the cluster is rank i.

    Collectives that do not have the algorithm take their fastest, as all do without one. TraceFileError for one that
    none has.
    """
    able = {kind for kind in ALGORITHMS if kind != "send" and algorithm in ALGORITHMS[kind]}
    if algorithm is not None and not able:
        algorithms = sorted({name for kind in ALGORITHMS if kind != "send" for name in ALGORITHMS[kind]})
        raise TraceFileError(f"algorithm={algorithm!r} is of no collective; {nearest(algorithm, algorithms, 'one of')}")
    links = build_fabric(cluster, device)
    latency_us: dict[tuple[str, tuple[int, ...], int], float] = {}
    node_latency_us = {}
    for node, call in enumerate(joint.calls):
        kind = "send" if call.kind is None else OP_KINDS[call.kind]
        key = kind, call.ranks, call_bytes(call, kind)
        if key not in latency_us:
            crosses_links = len(set(call.ranks)) > 1
            latency_us[key] = links.latency_us(*key, algorithm if kind in able else None) if crosses_links else 0.0
        node_latency_us[node] = latency_us[key]
    return node_latency_us

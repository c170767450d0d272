"""How long collectives and messages of a run take on a cluster's links, alone, by an algorithm that is named."""

from __future__ import annotations

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.loading import nearest
from ...datasets.traces.groups import JoinedRun
from ...datasets.traces.schema import TraceFileError
from ..network.build import fabric
from ..network.collectives import ALGORITHMS
from .run import KINDS_OF, bytes_of


def link_us(joint: JoinedRun, cluster: Cluster, device: Device, algorithm: str | None) -> dict[int, float]:
    """Microseconds of each collective and message by its node. Device i of the cluster is rank i.

    Collectives that do not have the algorithm take their fastest, as all do without one. TraceFileError for one that
    none has.
    """
    able = {kind for kind in ALGORITHMS if kind != "send" and algorithm in ALGORITHMS[kind]}
    if algorithm is not None and not able:
        known = sorted({name for kind in ALGORITHMS if kind != "send" for name in ALGORITHMS[kind]})
        raise TraceFileError(f"algorithm={algorithm!r} is of no collective; {nearest(algorithm, known, 'one of')}")
    on = fabric(cluster, device)
    found: dict[tuple[str, tuple[int, ...], int], float] = {}
    made = {}
    for place, call in enumerate(joint.calls):
        kind = "send" if call.kind is None else KINDS_OF[call.kind]
        key = kind, call.ranks, bytes_of(call, kind)
        if key not in found:
            several = len(set(call.ranks)) > 1
            found[key] = on.latency_us(*key, algorithm if kind in able else None) if several else 0.0
        made[place] = found[key]
    return made

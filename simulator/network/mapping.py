"""Which devices form the process groups of a plan, under a rank order: neighbours in a group need not be in a node.

Groups are given as in :class:`..plan.Group`: ``ranks`` members at a distance of ``stride``. The order says on which
device of the cluster each rank runs; the usual one is rank i on device i.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .fabric import Fabric, Transfer
from .fidelity import Outcome, simulate
from .topology import TopologyError


def process_groups(
    devices: int, ranks: int, stride: int = 1, order: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Every group of ``ranks`` members ``stride`` apart, as devices. TopologyError when they do not divide up."""
    if ranks < 1 or stride < 1 or devices % (ranks * stride):
        raise TopologyError(f"groups of {ranks} ranks, {stride} apart, do not divide {devices} devices")
    place = np.arange(devices) if order is None else np.asarray(order, dtype=np.int64)
    if sorted(place.tolist()) != list(range(devices)):
        raise TopologyError(f"a rank order names each of the {devices} devices once")
    members = place.reshape(-1, ranks, stride).swapaxes(1, 2).reshape(-1, ranks)
    return [tuple(each) for each in members.tolist()]


def all_groups(
    fabric: Fabric,
    collective: str,
    groups: Sequence[tuple[int, ...]],
    size_bytes: float,
    fidelity: str = "flow",
    algorithm: str | None = None,
) -> Outcome:
    """The same collective in all groups at once, as the ranks of a plan run it: they contend for links for real.

    Groups are alike but for their place, so the algorithm is chosen for the first.
    """
    first = Transfer(collective, groups[0], size_bytes, algorithm)
    chosen = fabric.algorithm(first) if len(groups[0]) > 1 else algorithm
    return simulate(fabric, [first._replace(group=each, algorithm=chosen) for each in groups], fidelity)

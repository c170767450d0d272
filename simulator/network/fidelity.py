"""One question, three answers: how long transfers take by formula, by fair flows, or packet by packet.

``analytical`` takes each transfer alone and stretches its bytes by how many others want its fullest link meanwhile;
``flow`` shares links max-min fairly from event to event; ``packet`` asks ns-3 (:mod:`.packet`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import packet
from .fabric import Fabric, Transfer
from .sharing import Run, max_min
from .topology import TopologyError

FIDELITIES = ("analytical", "flow", "packet")
MOMENTS = 3_000_000  # moments times used links up to which load over time comes from rates: about a second
TOGETHER = 2048  # transfers up to which the formula looks for contention


class Outcome(NamedTuple):
    """Start and end of each transfer, us [n]; bytes each link carried [links], and the us it was full (flow only).

    ``run`` has the parts of all transfers that ran as flows.
    """

    start_us: np.ndarray
    end_us: np.ndarray
    carried_bytes: np.ndarray
    full_us: np.ndarray
    run: Run | None = None

    @property
    def total_us(self) -> float:
        """When the last transfer ends."""
        return float(self.end_us.max(initial=0.0))

    def utilisation(self, bandwidth_gbps: np.ndarray) -> np.ndarray:
        """Share of each link's capacity that was used until the last end [links]."""
        return self.carried_bytes / np.maximum(bandwidth_gbps * 1e3 * self.total_us, 1e-30)


def simulate(
    fabric: Fabric, transfers: Sequence[Transfer], fidelity: str = "flow", python: str = sys.executable
) -> Outcome:
    """Times of transfers that share a fabric; ``after`` names earlier ones. TopologyError for an unknown fidelity.

    ``python`` is the interpreter that has ns-3, for ``packet``.
    """
    if fidelity == "flow":
        start, end, run = fabric.flow(transfers)
        return Outcome(start, end, run.carried_bytes, run.full_us, run)
    if fidelity not in FIDELITIES:
        raise TopologyError(f"network={fidelity!r} is not one of {', '.join(FIDELITIES)}")
    if fidelity == "packet":
        chosen = [packet.named(fabric, each) for each in transfers]
        end = packet.simulate(fabric, chosen, python)
        start = np.array([max((end[other] for other in each.after), default=0.0) for each in chosen])
        return Outcome(start, end, _loads(fabric, chosen).sum(axis=0), np.zeros(fabric.topology.links))
    start, end = _analytical(fabric, transfers)
    return Outcome(start, end, _loads(fabric, transfers).sum(axis=0), np.zeros(fabric.topology.links))


def over_time(
    fabric: Fabric, transfers: Sequence[Transfer], outcome: Outcome, bins: int = 100, links: np.ndarray | None = None
) -> np.ndarray:
    """Share of each link's capacity in use, by equal spans of the whole time [bins, links]; of some ``links`` only.

    Flows carry what their rates say, from event to event; where there are very many, and without flows, the bytes of a
    transfer count evenly from its start to its end.
    """
    chosen = np.arange(fabric.topology.links) if links is None else links
    edges = np.linspace(0.0, max(outcome.total_us, 1e-12), bins + 1)
    capacity = fabric.topology.bandwidth_gbps[chosen] * 1e3 * (edges[1] - edges[0])
    found = None if outcome.run is None else _by_rates(fabric, transfers, outcome.run, edges, chosen)
    if found is None:
        found = _inside(outcome.start_us, outcome.end_us, edges) @ _loads(fabric, transfers, chosen)
    return np.asarray(found / capacity)


def _inside(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Which part of each span of time lies between two edges [bins, n]."""
    before = np.maximum(start, edges[:-1, None])
    lasts = np.maximum(end - start, 1e-12)
    return np.asarray(np.clip(np.minimum(end, edges[1:, None]) - before, 0.0, None) / lasts)


def _by_rates(
    fabric: Fabric, transfers: Sequence[Transfer], run: Run, edges: np.ndarray, links: np.ndarray
) -> np.ndarray | None:
    """Bytes over each link between edges, from the rates of every moment [bins, links]; None where that takes long."""
    activities, _, _ = fabric.activities(transfers)
    begin, size = run.start_us + activities.latency_us, activities.size_bytes
    moving = (size > 0) & (run.end_us > begin)
    moments = np.unique(np.concatenate([begin[moving], run.end_us[moving]]))
    if len(moments) * len(activities.links) > MOMENTS:
        return None
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    capacity = fabric.topology.bandwidth_gbps * 1e3
    found = np.zeros((len(edges) - 1, len(links)))
    for now, then in itertools.pairwise(moments.tolist()):
        active = moving & (begin <= now) & (run.end_us >= then)
        if active.any():
            rate = max_min(activities, capacity, active)
            load = np.bincount(activities.links, activities.weights * rate[owner], fabric.topology.links)[links]
            part = np.clip(np.minimum(then, edges[1:]) - np.maximum(now, edges[:-1]), 0.0, None)
            found += part[:, None] * load
    return found


def _analytical(fabric: Fabric, transfers: Sequence[Transfer]) -> tuple[np.ndarray, np.ndarray]:
    costs = [fabric.cost(each.collective, fabric.algorithm(each), each.group) for each in transfers]
    latency = np.array([cost.latency_us for cost in costs])
    moving = np.array([cost.us_per_byte * each.size_bytes for cost, each in zip(costs, transfers, strict=True)])
    start, end = _schedule(transfers, latency + moving)
    if len(transfers) > TOGETHER:
        return start, end
    return _schedule(transfers, latency + moving * _contention(fabric, transfers, start, end, moving))


def _schedule(transfers: Sequence[Transfer], lasts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    start, end = np.zeros(len(lasts)), np.zeros(len(lasts))
    for i, each in enumerate(transfers):
        start[i] = max([each.release_us, *(end[other] for other in each.after)])
        end[i] = start[i] + lasts[i]
    return start, end


def _contention(
    fabric: Fabric, transfers: Sequence[Transfer], start: np.ndarray, end: np.ndarray, moving: np.ndarray
) -> np.ndarray:
    """How many times longer the bytes of each take: the demand of all on its fullest link while it runs [n]."""
    capacity = fabric.topology.bandwidth_gbps * 1e3
    share = _loads(fabric, transfers) / capacity / np.maximum(moving, 1e-12)[:, None]  # of each link, while it moves
    lasts = np.maximum(end - start, 1e-12)
    overlap = np.minimum(end[:, None], end) - np.maximum(start[:, None], start)
    together = np.clip(overlap / lasts[:, None], 0.0, 1.0)
    np.fill_diagonal(together, 1.0)
    demand = together @ share
    return np.maximum(1.0, (share * np.maximum(demand, 1.0)).max(axis=1, initial=0.0))


def _loads(fabric: Fabric, transfers: Sequence[Transfer], links: np.ndarray | None = None) -> np.ndarray:
    """Bytes of each transfer on each link, or on some of them [n, links]."""
    chosen = np.arange(fabric.topology.links) if links is None else links
    out = np.zeros((len(transfers), len(chosen)))
    for row, each in zip(out, transfers, strict=True):
        load = np.zeros(fabric.topology.links)
        fabric.add_load(load, each.collective, fabric.algorithm(each), each.group, each.size_bytes)
        row[:] = load[chosen]
    return out

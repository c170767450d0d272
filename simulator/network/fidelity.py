"""One question, three answers: how long transfers take by formula, by fair flows, or packet by packet.

``analytical`` takes each phase of a transfer alone and stretches it by what others move over its links meanwhile;
``flow`` shares links max-min fairly from event to event; ``packet`` asks ns-3 (:mod:`.packet`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...datasets.near import meant
from . import packet
from .fabric import Fabric, Transfer, TransferStep
from .sharing import SharedTimes, max_min
from .topology import TopologyError

FIDELITIES = ("analytical", "flow", "packet")
MAX_RATE_SAMPLES = 3_000_000  # moments times used links up to which load over time comes from rates: about a second
MAX_CONTENDING_PHASES = 1024  # phases of transfers up to which the formula looks for contention
DAMPING = (0.0, 0.5, 0.5, 0.5, 0.5, 0.5)  # of its rounds


class TransferOutcome(NamedTuple):
    """Start and end of each transfer, us [n], and bytes that each link carried [links].

    ``run`` has the parts of all transfers that ran as flows.
    """

    start_us: np.ndarray
    end_us: np.ndarray
    carried_bytes: np.ndarray
    run: SharedTimes | None = None

    @property
    def total_us(self) -> float:
        """When the last transfer ends."""
        return float(self.end_us.max(initial=0.0))

    def utilisation(self, bandwidth_gbps: np.ndarray) -> np.ndarray:
        """Share of each link's capacity that was used until the last end [links]."""
        return self.carried_bytes / np.maximum(bandwidth_gbps * 1e3 * self.total_us, 1e-30)


def simulate(
    fabric: Fabric,
    transfers: Sequence[Transfer],
    fidelity: str = "flow",
    python: str = sys.executable,
    folded: bool = False,
) -> TransferOutcome:
    """Times of transfers that share a fabric; ``after`` names earlier ones. TopologyError for an unknown fidelity.

    ``python`` is the interpreter that has ns-3, for ``packet``; ``folded`` flows that must do the same are run once.
    """
    if fidelity == "flow":
        start, end, run = fabric.flow(transfers, folded)
        return TransferOutcome(start, end, run.carried_bytes, run)
    if fidelity not in FIDELITIES:
        raise TopologyError(f"network={fidelity!r} is not one of {', '.join(FIDELITIES)}{meant(fidelity, FIDELITIES)}")
    if fidelity == "packet":
        resolved = [packet.with_algorithm(fabric, transfer) for transfer in transfers]
        end = packet.simulate(fabric, resolved, python)
        start = np.array([max((end[other] for other in transfer.after), default=0.0) for transfer in resolved])
        return TransferOutcome(start, end, _loads(fabric, resolved).sum(axis=0))
    start, end = _analytical(fabric, transfers)
    return TransferOutcome(start, end, _loads(fabric, transfers).sum(axis=0))


def load_over_time(
    fabric: Fabric,
    transfers: Sequence[Transfer],
    outcome: TransferOutcome,
    bins: int = 100,
    links: np.ndarray | None = None,
) -> np.ndarray:
    """Share of each link's capacity in use, by equal spans of the whole time [bins, links]; of some ``links`` only.

    Flows carry what their rates say, from event to event; where there are very many, and without flows, the bytes of a
    transfer count evenly from its start to its end.
    """
    shown_links = np.arange(fabric.topology.links) if links is None else links
    edges = np.linspace(0.0, max(outcome.total_us, 1e-12), bins + 1)
    capacity = fabric.topology.bandwidth_gbps[shown_links] * 1e3 * (edges[1] - edges[0])
    carried = None if outcome.run is None else _by_rates(fabric, transfers, outcome.run, edges, shown_links)
    if carried is None:
        carried = _overlap_shares(outcome.start_us, outcome.end_us, edges) @ _loads(fabric, transfers, shown_links)
    return np.asarray(carried / capacity)


def _overlap_shares(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Which part of each span of time lies between two edges [bins, n]."""
    before = np.maximum(start, edges[:-1, None])
    lasts = np.maximum(end - start, 1e-12)
    return np.asarray(np.clip(np.minimum(end, edges[1:, None]) - before, 0.0, None) / lasts)


def _by_rates(
    fabric: Fabric, transfers: Sequence[Transfer], run: SharedTimes, edges: np.ndarray, links: np.ndarray
) -> np.ndarray | None:
    """Bytes over each link between edges, from the rates of every moment [bins, links]; None where that takes long."""
    activities, _, _ = fabric.activities(transfers)
    begin, size = run.start_us + activities.latency_us, activities.size_bytes
    moving = (size > 0) & (run.end_us > begin)
    moments = np.unique(np.concatenate([begin[moving], run.end_us[moving]]))
    if len(moments) * len(activities.links) > MAX_RATE_SAMPLES:
        return None
    owner = np.repeat(np.arange(len(activities)), np.diff(activities.start))
    capacity = fabric.bandwidth_gbps * 1e3
    carried = np.zeros((len(edges) - 1, len(links)))
    for now, then in itertools.pairwise(moments.tolist()):
        active = moving & (begin <= now) & (run.end_us >= then)
        if active.any():
            rate = max_min(activities, capacity, active)
            load = np.bincount(activities.links, activities.weights * rate[owner], fabric.topology.links)[links]
            overlap_us = np.clip(np.minimum(then, edges[1:]) - np.maximum(now, edges[:-1]), 0.0, None)
            carried += overlap_us[:, None] * load
    return carried


def _analytical(fabric: Fabric, transfers: Sequence[Transfer]) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each transfer by the formulas of processor sharing (Kleinrock, 1967), solved in a few rounds.

    Phases that share a link move at one rate: while both are there, each lets the other move as much as the slower.
    """
    steps = [fabric.steps(transfer) for transfer in transfers]
    latency = np.array([step.latency_us for phases in steps for step in phases])
    pair = np.array([step.pair_bytes for phases in steps for step in phases])
    capacity = fabric.bandwidth_gbps * 1e3
    alone = np.array([np.max(s.moved_bytes / capacity[s.links], initial=0.0) for phases in steps for s in phases])
    moving = alone.copy()
    if 1 < len(alone) <= MAX_CONTENDING_PHASES:
        owner, column, us = _by_link([step for phases in steps for step in phases], capacity)
        for damping in DAMPING:
            *_, begin, end = _schedule(transfers, steps, latency + moving)
            contending = _contending_bytes(begin + latency, end, pair, moving)
            contended_us = np.zeros(len(alone))
            np.maximum.at(contended_us, owner, (contending @ us)[owner, column])
            moving = np.maximum(alone, moving**damping * contended_us ** (1.0 - damping))
    start, done, _, _ = _schedule(transfers, steps, latency + moving)
    return start, done


def _by_link(steps: Sequence[TransferStep], capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The phase and the column of every link that one uses, and us on it for a byte of a pair [n, columns]."""
    owner = np.repeat(np.arange(len(steps)), [len(step.links) for step in steps])
    links = np.concatenate([step.links for step in steps])
    moved = np.concatenate([step.moved_bytes / max(step.pair_bytes, 1e-12) for step in steps])
    used, column = np.unique(links, return_inverse=True)
    us = np.zeros((len(steps), len(used)))
    us[owner, column] = moved / capacity[links]
    return owner, column, us


def _contending_bytes(begin: np.ndarray, end: np.ndarray, pair: np.ndarray, moving: np.ndarray) -> np.ndarray:
    """Bytes that a pair of each phase moves while another one runs, at the rate of the slower [n, n]."""
    overlap_us = np.clip(np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin), 0.0, None)
    rate = pair / np.maximum(moving, 1e-12)
    contending = np.minimum(rate[:, None], rate) * overlap_us
    np.fill_diagonal(contending, pair)
    return contending


def _schedule(
    transfers: Sequence[Transfer], steps: Sequence[Sequence[TransferStep]], lasts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Start and end of each transfer [n], and of each of their phases."""
    start: list[float] = []
    end: list[float] = []
    begin: list[float] = []
    finish: list[float] = []
    phase_us = iter(lasts.tolist())
    for transfer, phases in zip(transfers, steps, strict=True):
        now = max([transfer.release_us, *(end[other] for other in transfer.after)])
        start.append(now)
        for _ in phases:
            begin.append(now)
            now += next(phase_us)
            finish.append(now)
        end.append(now)
    return np.array(start), np.array(end), np.array(begin), np.array(finish)


def _loads(fabric: Fabric, transfers: Sequence[Transfer], links: np.ndarray | None = None) -> np.ndarray:
    """Bytes of each transfer on each link, or on some of them [n, links]."""
    shown_links = np.arange(fabric.topology.links) if links is None else links
    out = np.zeros((len(transfers), len(shown_links)))
    for row, transfer in zip(out, transfers, strict=True):
        load = np.zeros(fabric.topology.links)
        fabric.add_load(load, transfer.collective, fabric.algorithm(transfer), transfer.group, transfer.size_bytes)
        row[:] = load[shown_links]
    return out

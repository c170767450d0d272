"""One collective on a cluster, or many transfers at once: what the engines know, stretched by what the links do.

An engine (a measurement, a predictor, the formula) knows how long a collective takes where nothing is in its way. The
links say how many times longer it takes on this fabric, in this group of devices, beside its like and with its faults;
the answer is the product, as in a step (:mod:`..engines.flow`). Transfers of different kinds that share links have
no such answer to start from: theirs is what the links say, at the rates that NCCL reaches on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...datasets.ops import KINDS, Op, bus_factor
from ..engines import Engine
from ..engines.coverage import COVERAGE, above_roofline
from ..engines.flow import MIN_STRETCH
from ..engines.network import FACTOR_NVLINK, FACTOR_OTHER, FACTOR_PCIE, NetworkEngine
from ..network.build import build_fabric, build_nonblocking_fabric
from ..network.fabric import Fabric, Transfer
from ..network.faults import Fault, read_drawing
from ..network.fidelity import TransferOutcome, simulate
from ..network.mapping import ranks_per_node
from ..network.nccl import GroupShapes
from ..network.nccl_times import collective_us, list_choices
from ..network.packet import check_devices
from ..network.query import bandwidths, parallel_groups, summarize_transfers
from ..network.reduction import SWITCH_ALGORITHMS as IN_SWITCH
from ..network.study import run_trials, with_faults
from ..network.topology import Topology, TopologyError
from ..report.answer import OpPrediction
from .ops import predict_ops

SHOWN = 64  # groups of which an answer lists the times
PACKET_LOAD = 4.5e8  # bytes times links that they cross: what takes ns-3 some seconds


@dataclass(frozen=True)
class Links:
    """The links of a cluster, ready to be asked. ``formula`` has cluster and device.

    TopologyError for a fault on a link that is not there, or a fabric that falls apart.
    """

    formula: NetworkEngine
    fidelity: str = "flow"
    faults: tuple[Fault, ...] = ()

    @cached_property
    def healthy(self) -> Fabric:
        """The fabric without faults."""
        cluster = self.formula.cluster
        if self.fidelity == "packet":
            check_devices(cluster.devices)
        return build_fabric(cluster, self.formula.device)

    @cached_property
    def fabric(self) -> Fabric:
        """The fabric as its faults leave it."""
        return with_faults(self.healthy, self.faults)

    @cached_property
    def open(self) -> Fabric:
        """The cluster's nodes on one switch that never blocks."""
        return build_nonblocking_fabric(self.formula.cluster, self.formula.device)

    def chosen(self, on: Fabric, transfers: Sequence[Transfer]) -> list[Transfer]:
        """The transfers with the algorithm that NCCL takes for each that names none."""
        algorithms: dict[tuple[Any, ...], str] = {}
        resolved = []
        for transfer in transfers:
            if transfer.algorithm is None and transfer.collective != "send" and len(transfer.group) > 1:
                together = on.ranks_per_server(transfer.group)
                key = transfer.collective, len(transfer.group), together, transfer.size_bytes
                if key not in algorithms:
                    algorithms[key] = self._usual(on, transfer, together)
                transfer = transfer._replace(algorithm=algorithms[key])
            resolved.append(transfer)
        return resolved

    def _usual(self, on: Fabric, transfer: Transfer, together: int) -> str:
        able = on.algorithms(transfer.collective, transfer.group)
        groups = _group(self.formula, len(transfer.group), together)
        algorithm = list_choices(transfer.collective, np.array([transfer.size_bytes]), groups)[0].partition("/")[0]
        if algorithm not in able or (algorithm in IN_SWITCH and self.fidelity == "packet"):
            return able[0]
        return algorithm if _reduces(on, transfer._replace(algorithm=algorithm)) else able[0]

    def run(
        self, on: Fabric, transfers: Sequence[Transfer], fidelity: str = "", part: float | None = None
    ) -> TransferOutcome:
        """When each transfer starts and ends; flows run one of those alike, packets ``part`` of the bytes."""
        fidelity = fidelity or self.fidelity
        if fidelity != "packet":
            return simulate(on, transfers, fidelity, folded=True)
        return _packets(on, transfers, _part(on, transfers) if part is None else part)


def predict_collective(
    op: Op,
    group: tuple[int, ...],
    links: Links,
    engine: Engine,
    algorithm: str | None = None,
    all_groups: bool = False,
    faults_study: Mapping[str, Any] | None = None,
    cache: str = "warm",
) -> OpPrediction:
    """How long a collective takes in a group of devices; with ``all_groups`` while all groups like it run it too.

    ``network`` of the answer says what the links did; ``engine`` is who answers where nothing blocks. TopologyError for
    an algorithm that the group cannot run.
    """
    op = placed(op, group, links.formula)
    answer = predict_ops([op], links.formula.device, engine, cache)[0]
    if len(group) < 2:
        return bounded(op, answer, links.formula, {"fidelity": links.fidelity})
    every = parallel_groups(group, links.formula.cluster.devices)
    own_transfers = [
        Transfer(op.kind, ranks, float(op.size_bytes), algorithm) for ranks in (every if all_groups else [group])
    ]
    transfers = links.chosen(links.fabric, own_transfers)
    used = str(transfers[0].algorithm)
    calm, undisturbed = _ideal(
        links, [Transfer(op.kind, ranks, float(op.size_bytes), used) for ranks in every], group, answer
    )
    # times are compared, so packets move the same part of both
    part = min(_part(links.fabric, transfers), _part(calm, undisturbed)) if links.fidelity == "packet" else None
    outcome = links.run(links.fabric, transfers, part=part)
    ideal = float(links.run(calm, undisturbed, part=part).end_us[0])
    network: dict[str, Any] = {"fidelity": links.fidelity, "algorithm": used, "groups": len(transfers)}
    is_default = algorithm is None and (used == _choice(links.formula, op) or links.fidelity == "packet")
    formula = answer if is_default else _by_formula(op, links, used, answer)
    stretch = outcome.total_us / ideal if ideal > 0 else 1.0
    own_links = links.formula.cluster.has_own_links and answer.engine != "measured"
    if formula is None or own_links:
        us = outcome.total_us + (_still_us(op, links.formula) if own_links else 0.0)
        prediction = replace(_within(answer, us, _spread(links, [group])), engine=links.fidelity, in_envelope=False)
    else:
        prediction = _stretched(formula, stretch, links)
    network |= bandwidths(op.kind, len(group), op.size_bytes, prediction.latency_us)
    network |= {"links_us": outcome.total_us, "stretch": stretch}
    network |= _said(links, transfers, [f"group {i}" for i in range(len(transfers))], outcome)
    if faults_study:
        network["faults_study"] = study(links, own_transfers, faults_study)
    return replace(bounded(op, prediction, links.formula, network), placed=_drawn(links, outcome))


def _still_us(op: Op, formula: NetworkEngine) -> float:
    """What NCCL adds to the rates of links that a user's own file gives: its latency without any byte."""
    columns = {name: np.array([value]) for name, value in zip(KINDS[op.kind].names, op.dims, strict=True)}
    return float(formula.still_us(op.kind, columns, op.dtype, op.out_dtype)[0])


def _reduces(on: Fabric, transfer: Transfer) -> bool:
    """Whether the switches that a transfer would be reduced in are still there."""
    if transfer.algorithm in IN_SWITCH:
        try:
            on.cost(transfer.collective, transfer.algorithm, transfer.group)
        except TopologyError:
            return False
    return True


def _stretched(answer: OpPrediction, stretch: float, links: Links) -> OpPrediction:
    """The answer so many times longer; where the links changed it, or a formula gave it, it is theirs."""
    us, low, high = (time_us * stretch for time_us in (answer.latency_us, answer.low_us, answer.high_us))
    theirs = answer.engine == links.formula.name or abs(stretch - 1.0) > MIN_STRETCH
    engine = links.fidelity if theirs else answer.engine
    return replace(answer, latency_us=us, low_us=low, high_us=high, engine=engine)


def _within(answer: OpPrediction, us: float, spread: float) -> OpPrediction:
    """The answer with a time that no predictor gave, and its interval."""
    low, high = us / spread, us * spread
    return replace(answer, latency_us=us, low_us=low, high_us=high, coverage=COVERAGE, predictor=None)


def _group(formula: NetworkEngine, ranks: int, per_node: int) -> GroupShapes:
    """What one group runs over."""
    return formula.groups({"ranks": np.array([ranks]), "ranks_per_node": np.array([per_node])})


def placed(op: Op, group: Sequence[int], formula: NetworkEngine) -> Op:
    """The op with the ranks, ranks in a node and slowest link of a group of devices."""
    cluster = formula.cluster
    near = int(ranks_per_node(np.array([sorted(group)]), cluster.devices_per_node).min())
    link = cluster.link if near == len(group) else cluster.fabric
    return op.replace(ranks=len(group), ranks_per_node=near, link=link)


def bounded(op: Op, prediction: OpPrediction, formula: NetworkEngine, network: Mapping[str, Any]) -> OpPrediction:
    """The answer with what its links did and the least that they take; a single rank has none."""
    if op.ranks < 2:
        return replace(prediction, network=network)
    floor = floor_us(op, formula)
    fullest = max((link["busy"] for link in network.get("hot_links", ())), default=0.0)
    full = max(floor / prediction.latency_us, fullest) if prediction.latency_us > 0 else 0.0
    latency_us, low_us, least_us = (np.array(us) for us in (prediction.latency_us, prediction.low_us, floor))
    low = float(above_roofline(latency_us, low_us, least_us, prediction.engine))
    still_us = _still_us(op, formula)  # a kernel that is slow for its bytes does not wait for their latency
    bound = "latency" if full <= 0.5 and still_us > 0.5 * prediction.latency_us else "network"
    return replace(prediction, low_us=low, roofline_us=floor, bound=bound, network=network)


def floor_us(op: Op, formula: NetworkEngine) -> float:
    """The least that a collective takes: what each node must send through its NICs, and each rank inside its node.

    Where switches reduce, each byte of an all-reduce goes there and back once.
    """
    groups = _group(formula, op.ranks, op.ranks_per_node)
    near, nodes = int(groups.per_node[0]), int(groups.nodes[0])
    out, inside = float(bus_factor(op.kind, nodes)), float(bus_factor(op.kind, near))
    if op.kind == "all_to_all":
        out = near * (op.ranks - near) / op.ranks
        inside = (near - 1) / op.ranks
    if op.kind == "all_reduce":
        inside = min(inside, 1.0) if formula.tuning.nvls > 0 else inside
        out = min(out, 1.0) if groups.in_network else out
    far_us = out * op.size_bytes / (groups.outside_gbps * near * 1e3)
    return max(far_us, inside * op.size_bytes / (float(groups.near_gbps[0]) * 1e3))


def predict_transfers(
    transfers: Sequence[Transfer],
    names: Sequence[str],
    links: Links,
    faults_study: Mapping[str, Any] | None = None,
) -> OpPrediction:
    """How long transfers take that share the links; ``network`` of the answer has each of them."""
    resolved = links.chosen(links.fabric, transfers)
    outcome = links.run(links.fabric, resolved)
    us, spread = outcome.total_us, _spread(links, [transfer.group for transfer in transfers])
    full = float((outcome.carried_bytes / (links.fabric.topology.bandwidth_gbps * 1e3)).max(initial=0.0))
    network = {"fidelity": links.fidelity, **_said(links, resolved, names, outcome)}
    if faults_study:
        network["faults_study"] = study(links, transfers, faults_study)
    return OpPrediction(
        op={"kind": "transfers", "count": len(transfers)},
        device=links.formula.device.id,
        latency_us=us,
        low_us=max(us / spread, min(us, full)),
        high_us=us * spread,
        coverage=COVERAGE,
        engine=links.fidelity,
        predictor=None,
        in_envelope=False,
        roofline_us=full,
        bound="network" if full > us / 2 else "latency",
        cache="warm",
        network=network,
        placed=_drawn(links, outcome),
    )


def study(links: Links, transfers: Sequence[Transfer], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What faults at random places, or with ``everywhere`` at each cable in turn, do to the time of transfers."""
    drawing = read_drawing(settings, "faults_study")
    if drawing.straggler is not None:
        raise TopologyError("faults_study.straggler slows compute: ask a step for it, a collective has none")
    fidelity = "flow" if links.fidelity == "packet" else links.fidelity

    def measure(faults: Sequence[Fault]) -> float:
        on = with_faults(links.fabric, faults)
        possible = [transfer if _reduces(on, transfer) else transfer._replace(algorithm=None) for transfer in transfers]
        return links.run(on, links.chosen(on, possible), fidelity).total_us

    return run_trials(drawing.faults(links.fabric.topology), measure).to_dict()


def _ideal(
    links: Links, every: Sequence[Transfer], group: tuple[int, ...], answer: OpPrediction
) -> tuple[Fabric, list[Transfer]]:
    """Where the engine's answer holds: a switch that never blocks; the group, and those that share its nodes' links.

    A measurement was made on this fabric; only faults stretch it.
    """
    transfer = next(other for other in every if other.group == group)
    if answer.engine == "measured":
        return links.healthy, [transfer]
    size = links.formula.cluster.devices_per_node
    nodes = {device // size for device in group}
    near = [
        other for other in every if other is not transfer and any(device // size in nodes for device in other.group)
    ]
    return links.open, _sharing(links.open, [transfer, *near])


def _sharing(on: Fabric, transfers: Sequence[Transfer]) -> list[Transfer]:
    """The first transfer and those that share links with it, or with others that do."""
    loads = np.zeros((len(transfers), on.topology.links))
    for load, transfer in zip(loads, transfers, strict=True):
        on.add_load(load, transfer.collective, on.algorithm(transfer), transfer.group, 1.0)
    connected, reached = np.zeros(len(transfers), dtype=bool), np.arange(len(transfers)) == 0
    while (connected != reached).any():
        connected = reached
        reached = (loads[:, loads[connected].any(axis=0)] > 0).any(axis=1) | connected
    return [transfer for transfer, stays in zip(transfers, connected.tolist(), strict=True) if stays]


def _by_formula(op: Op, links: Links, algorithm: str, answer: OpPrediction) -> OpPrediction | None:
    """The formula's answer for one algorithm; None for those that NCCL does not have."""
    groups, size = _group(links.formula, op.ranks, op.ranks_per_node), np.array([op.size_bytes])
    try:
        us = float(collective_us(op.kind, size, groups, links.formula.tuning, algorithm)[0])
    except ValueError:
        return None
    if not np.isfinite(us):
        raise TopologyError(f"{op.kind} over {op.ranks} ranks, {op.ranks_per_node} in a node, cannot run {algorithm}")
    prediction = _within(answer, us, float(links.formula.factor({"size_bytes": size}, groups)[0]))
    return replace(prediction, engine=links.formula.name, in_envelope=bool(groups.nodes[0] == 1))


def _spread(links: Links, groups: Sequence[tuple[int, ...]]) -> float:
    cluster = links.formula.cluster
    inside = all(len({device // cluster.devices_per_node for device in group}) == 1 for group in groups)
    near = FACTOR_NVLINK if cluster.link == "nvlink" else FACTOR_PCIE
    return near if inside else FACTOR_OTHER


def _said(
    links: Links, transfers: Sequence[Transfer], names: Sequence[str], outcome: TransferOutcome
) -> dict[str, Any]:
    summary = summarize_transfers(links.fabric, transfers, names, outcome)
    if len(transfers) > SHOWN:
        summary["transfers"] = sorted(summary["transfers"], key=lambda entry: -entry["end_us"])[:SHOWN]
    if links.faults:
        summary["faults"] = [asdict(fault) for fault in links.faults]
    return summary


def _drawn(links: Links, outcome: TransferOutcome) -> tuple[Topology, np.ndarray]:
    topology = links.fabric.topology
    return topology, outcome.utilisation(topology.bandwidth_gbps)


def _load(on: Fabric, transfers: Sequence[Transfer]) -> np.ndarray:
    """Bytes that transfers move over each link."""
    load = np.zeros(on.topology.links)
    for transfer in transfers:
        on.add_load(load, transfer.collective, on.algorithm(transfer), transfer.group, transfer.size_bytes)
    return load


def _part(on: Fabric, transfers: Sequence[Transfer]) -> float:
    """The part of all bytes whose packets are moved in some seconds."""
    return min(1.0, PACKET_LOAD / max(float(_load(on, transfers).sum()), 1.0))


def _packets(on: Fabric, transfers: Sequence[Transfer], part: float) -> TransferOutcome:
    """By ns-3; of large transfers it moves a part, and half of that: all of them lie on the line through both."""
    whole = simulate(on, [transfer._replace(size_bytes=transfer.size_bytes * part) for transfer in transfers], "packet")
    if part == 1.0:
        return whole
    half = simulate(
        on, [transfer._replace(size_bytes=transfer.size_bytes * part / 2) for transfer in transfers], "packet"
    )

    def line(few: np.ndarray, more: np.ndarray) -> np.ndarray:
        return few + (more - few) * (2.0 / part - 1.0)

    return TransferOutcome(line(half.start_us, whole.start_us), line(half.end_us, whole.end_us), _load(on, transfers))


def _choice(formula: NetworkEngine, op: Op) -> str:
    """The algorithm that NCCL takes where it may choose."""
    groups = _group(formula, op.ranks, op.ranks_per_node)
    return list_choices(op.kind, np.array([op.size_bytes]), groups)[0].partition("/")[0]


def predict_by_formula(
    op: Op, group: Sequence[int], formula: NetworkEngine, engine: Engine, cache: str
) -> OpPrediction:
    """How long a collective takes in a group of devices where nothing is in its way; no link is simulated."""
    op = placed(op, group, formula)
    prediction = predict_ops([op], formula.device, engine, cache)[0]
    algorithm = list_choices(op.kind, np.array([op.size_bytes]), _group(formula, op.ranks, op.ranks_per_node))[0]
    network = {"fidelity": "analytical", "algorithm": algorithm if op.ranks > 1 else "none"}
    return bounded(
        op, prediction, formula, {**network, **bandwidths(op.kind, op.ranks, op.size_bytes, prediction.latency_us)}
    )

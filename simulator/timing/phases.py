"""The phases of a chunk as programs for one device's streams, and how long each takes.

A micro-batch runs a chunk's ``forward`` and its ``backward`` (with what is recomputed); ``weight`` is the part of the
backward that only makes gradients of weights and may be put off; ``paired`` is a forward and a backward that run at
the same time, each hiding the other's communication (DualPipe); ``optimizer`` ends the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...datasets.devices import Device
from ..graph import GRADIENT, Block, Graph, Node
from ..question.plan import Plan
from .costs import Costs
from .schedule.streams import Overlap, Placed, place

PHASES = {
    "forward": ("forward",),
    "backward": ("recompute", "backward"),
    "optimizer": ("optimizer",),
}


Variant = tuple[bool, bool]  # whether a micro-batch is the first and the last of the step
FIRST, MIDDLE, LAST, ONLY = (True, False), (False, False), (False, True), (True, True)


@dataclass(frozen=True)
class PhaseTime:
    """How long one phase takes and what of that is not compute, in microseconds.

    ``exposed_us`` is communication by process group during which nothing computes, ``hidden_us`` what runs beside
    compute, ``host_us`` waiting for the host.
    """

    total_us: float = 0.0
    compute_us: float = 0.0
    exposed_us: Mapping[str, float] = field(default_factory=dict)
    hidden_us: Mapping[str, float] = field(default_factory=dict)
    host_us: float = 0.0


@dataclass(frozen=True)
class ChunkTimes:
    """A distinct chunk graph: what its nodes cost and how long its phases take, by variant of the micro-batch."""

    costs: dict[Variant, Costs]
    phases: dict[Variant, PhaseTimes]


@dataclass(frozen=True, eq=False)
class PhaseTimes(Mapping[str, PhaseTime]):
    """Every phase of one chunk by name, placed on the device's streams when it is first asked for."""

    costs: Costs
    plan: Plan
    device: Device
    known: dict[str, PhaseTime] = field(default_factory=dict)

    def __getitem__(self, name: str) -> PhaseTime:
        if name not in self.known:
            self.known[name] = self._time_phase(name)
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*PHASES, "weight", "paired"))

    def __len__(self) -> int:
        return len(PHASES) + 2

    def _time_phase(self, name: str) -> PhaseTime:
        if name == "weight":
            return PhaseTime(min(weight_us(self.costs), self["backward"].total_us))
        if name == "paired":
            return pair_phases(self["forward"], self["backward"], self.plan)
        time = time_phase(self.costs, name, self.plan, self.device)
        beside = self.plan.settings.ep_overlap and name != "optimizer"
        return beside_another(time, self.plan) if beside else time


def select_nodes(costs: Costs, phase: str) -> np.ndarray:
    """Positions of the stored nodes that a phase runs."""
    kinds = PHASES[phase]
    return np.array([i for i, node in enumerate(costs.nodes) if node.phase in kinds], dtype=np.int64)


def place_phase(costs: Costs, phase: str, plan: Plan, device: Device) -> Placed:
    """The nodes of a phase in time, from its start."""
    chosen = select_nodes(costs, phase)
    host = None if replays_graph(costs, plan) else costs.host_us[chosen]
    latency = costs.kernel_us[chosen]
    if device.synchronous and host is not None:
        latency, host = latency + host, None
    overlap = Overlap(plan.stack.compute_slowdown, plan.stack.communication_slowdown, not plan.explicit_links)
    waits = routing_waits([costs.nodes[i] for i in chosen.tolist()], plan)
    lead_us = lead_of(costs, plan, device) if phase == "backward" and host is not None else 0.0
    return place(phase_blocks(costs.graph, phase), latency, host, overlap, waits, lead_us, gap_of(plan, device))


def gap_of(plan: Plan, device: Device) -> float:
    """Microseconds between two kernels of a stream (``Stack.gap_us``): none in a CUDA graph that was asked for, whose
    gaps are in the times of its kernels, nor where the host itself computes.
    """
    return 0.0 if device.synchronous or plan.settings.cuda_graph else plan.stack.gap_us


def lead_of(costs: Costs, plan: Plan, device: Device) -> float:
    """Microseconds that the host has issued a chunk's forward before the device ends it: its lead in the backward.

    0 in a pipeline: Megatron waits for the device after every exchange with a neighbour (``torch.cuda.synchronize`` of
    ``p2p_communication.py``). Approximation: the host begins every forward level with the device.
    """
    chosen = select_nodes(costs, "forward")
    if plan.parallel.pp > 1 or not len(chosen):
        return 0.0
    placed = place_phase(costs, "forward", plan, device)
    host = costs.host_us[chosen][placed.node]
    waits = routing_waits([costs.nodes[i] for i in chosen.tolist()], plan)
    level = np.flatnonzero(np.zeros(0) if waits is None else waits[placed.node])
    issued = placed.end_us[level[-1]] + host[level[-1] + 1 :].sum() if len(level) else host.sum()
    return max(float(placed.total_us - issued), 0.0)


def routing_waits(nodes: Sequence[Node], plan: Plan) -> np.ndarray | None:
    """Nodes after which the host reads how many tokens each expert got; None where it need not know.

    Forward alone asks: backward runs on the same numbers. Experts of a fixed capacity, or tokens dropped to one, have
    the same number always.
    """
    fixed = plan.settings.capacity or plan.settings.token_drop
    if not plan.stack.waits_for_routing or fixed:
        return None
    kinds = [node.op.kind if node.op is not None and node.phase != "backward" else "" for node in nodes]
    waiting_kind = "ep_dispatch" if "ep_dispatch" in kinds else "moe_route"
    return np.array([kind == waiting_kind for kind in kinds], dtype=bool) if waiting_kind in kinds else None


def phase_blocks(graph: Graph, phase: str) -> tuple[Block, ...]:
    """The blocks of a graph with the nodes of one phase only."""
    kinds = PHASES[phase]
    blocks = []
    for block in graph.blocks:
        nodes = tuple(node for node in block.nodes if node.phase in kinds)
        if nodes:
            blocks.append(block if len(nodes) == len(block.nodes) else replace(block, nodes=nodes, uneven={}))
    return tuple(blocks)


def time_phase(costs: Costs, phase: str, plan: Plan, device: Device) -> PhaseTime:
    """The account of a phase placed on the device's streams; what passes between kernels counts as the host's."""
    chosen = select_nodes(costs, phase)
    if not len(chosen):
        return PhaseTime()
    placed = place_phase(costs, phase, plan, device)
    repeats = costs.repeats[chosen]
    own_us = float(costs.host_us[chosen] @ repeats) if device.synchronous and not replays_graph(costs, plan) else 0.0
    return PhaseTime(
        placed.total_us,
        max(placed.compute_us - own_us, 0.0),
        placed.exposed_us,
        placed.hidden_us,
        placed.idle_us + own_us,
    )


def replays_graph(costs: Costs, plan: Plan) -> bool:
    """Whether a CUDA graph holds the kernels, so that none waits for the host: by option, else by stack."""
    if costs.outside_graphs:
        return False
    choice = plan.settings.cuda_graph
    return plan.stack.cuda_graph if choice is None else choice


def beside_another(time: PhaseTime, plan: Plan) -> PhaseTime:
    """A phase whose exchanges between experts run beside the computing of another micro-batch's phase.

    Megatron-Core's ``overlap_moe_expert_parallel_comm`` interleaves a forward with a backward, layer by layer.
    Approximation: each phase offers as much computing as it takes itself, which the exchange slows down.
    """
    hidden = min(time.exposed_us.get("ep", 0.0), time.compute_us)
    slowed = hidden * plan.stack.compute_slowdown
    return replace(
        time,
        total_us=time.total_us - hidden + slowed,
        compute_us=time.compute_us + slowed,
        exposed_us={**time.exposed_us, "ep": time.exposed_us.get("ep", 0.0) - hidden},
        hidden_us={**time.hidden_us, "ep": time.hidden_us.get("ep", 0.0) + hidden},
    )


def weight_us(costs: Costs) -> float:
    """Microseconds of the products that only make gradients of weights."""
    roles = costs.graph.tensor_roles
    gradient = GRADIENT

    def only_gradients(node: Node) -> bool:
        is_product = node.kind in ("gemm", "grouped_gemm")
        return is_product and bool(node.writes) and all(roles[t] == gradient for t in node.writes)

    chosen = [i for i, n in enumerate(costs.nodes) if n.phase == "backward" and only_gradients(n)]
    return float((costs.kernel_us[chosen] * costs.repeats[chosen]).sum())


def pair_phases(forward: PhaseTime, backward: PhaseTime, plan: Plan) -> PhaseTime:
    """A forward beside a backward: what one exposes, the other's compute hides as far as it reaches.

    DeepSeek-V3 (arXiv 2412.19437, sec. 3.2.1) arranges the two so that all-to-all and sends are hidden; compute that
    runs beside them is slowed as on any other stream.
    """
    exposed = sum(forward.exposed_us.values()) + sum(backward.exposed_us.values())
    compute = forward.compute_us + backward.compute_us
    hidden = min(exposed, compute)
    slowed = compute + hidden * plan.stack.compute_slowdown
    host = forward.host_us + backward.host_us
    remaining = exposed - hidden
    by_group = {
        group: (forward.exposed_us.get(group, 0.0) + backward.exposed_us.get(group, 0.0)) * remaining / exposed
        for group in {*forward.exposed_us, *backward.exposed_us}
        if exposed
    }
    return PhaseTime(slowed + remaining + host, slowed, by_group, host_us=host)

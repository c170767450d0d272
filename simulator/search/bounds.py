"""What a point needs of memory and takes of time at least, from a few probes instead of its own simulation.

Points that differ in nothing but pipeline, data ranks and ZeRO are a *family*. One probe of it cuts the model into a
first layer, a second, the middle and the last one, walks their memory and costs their kernels. A stage of any pipeline
holds at least its layers' share of these: weights, gradients and optimizer states, divided by the ranks that ZeRO
shares them over, and what as many micro-batches as its schedule keeps in flight saved. Its step takes at least the
phases of all its micro-batches, placed on the device's streams with what tensor, context and expert ranks exchange in
them, after the first of them came through the stages before and until the last one went back through them. Gradients'
exchanges, the optimizer, sends and waiting come on top, so that neither is ever above what the simulation says;
:data:`MARGIN` covers the cold starts of kernels and rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...datasets.devices import Device
from ...datasets.own_errors import refusal
from ..engines import Engine, FusedEngine
from ..graph import Graph
from ..memory.breakdown import GIB
from ..memory.lifetimes import GRADIENTS, OPTIMIZER, WEIGHTS, ChunkWalk, walk_chunk
from ..memory.stage import COMMUNICATOR_GIB, CONTEXT_GIB
from ..passes.micro_batches import least_variant, micro_batch_variant
from ..passes.order import TRAINING, apply_passes
from ..passes.pipeline import boundaries, layer_stack, split_pipeline
from ..question.orders import make_orders, parts_of
from ..question.plan import Plan
from ..question.ranks import ORDER, PLACEMENTS
from ..step.build import engine_of, parts, traced
from ..step.checks import prepared
from ..timing.costs import Costs, cost_graphs
from ..timing.modifiers import Run, modify
from ..timing.phases import PhaseTimes, replays_graph
from ..timing.schedule.pipeline import in_flight
from .request import SearchSetup, request_of
from .space import Points

MARGIN = 0.98  # of a bound that is kept
LEAST_LAYERS = 5
SETTLED_US = 1e5  # of busy time from which clocks are steady (:mod:`..timing.clocks`)
FAMILY = ("cluster", "precision", "tp", "cp", "ep", "etp", "sequence_parallel", "overlap", "micro_batch", "recompute")
QUANTITIES = (  # bytes, then microseconds of kernels, of the host that issues them, and of whole phases
    *("weights", "gradients", "optimizer", "saved", "moment"),
    *("forward", "backward", "settled_forward", "settled_backward", "issue_forward", "issue_backward"),
    *("phase_forward", "phase_backward", "settled_phase_forward", "settled_phase_backward"),
)
SAVED, MOMENT, COLD, SETTLED, ISSUED, PHASES, SETTLED_PHASES = 3, 4, 5, 7, 9, 11, 13


class PointPlacer(Protocol):
    """Who says where the points of a search run: :class:`.evaluate.Evaluator`."""

    setup: SearchSetup
    graphs: Path

    def place(self, point: Mapping[str, Any]) -> tuple[Plan, Device, FusedEngine]: ...


@dataclass(frozen=True)
class Probe:
    """Of a layer, of what stands before the layers and after them: bytes and microseconds at least [3, quantities].

    ``model_flops`` is of one micro-batch on all its ranks.
    """

    parts: np.ndarray
    layers: int
    model_flops: float


def probe(evaluator: PointPlacer, point: Mapping[str, Any]) -> Probe | None:
    """The probe of a point's family; None where it has no pipeline of two stages, or too few layers."""
    try:
        return _probe(evaluator, {**point, "pp": 2, "vpp": 2, "zero_stage": 0, "schedule": "interleaved"})
    except ValueError as error:
        refusal(error)
        return None


def _probe(evaluator: PointPlacer, point: Mapping[str, Any]) -> Probe | None:
    plan, device, engine = evaluator.place(point)
    work = request_of(evaluator.setup, point).work
    if plan.offload or plan.passes or plan.slow_devices:
        return None  # they may move or change what is counted here
    work = replace(work, global_batch=work.micro_batch * plan.dp * 4)
    plan = prepared(plan, work, device)
    graph = traced(evaluator.setup.base.model, work, plan, next(parts(work)), device, evaluator.graphs)
    depth = layer_stack(graph)[1]
    if depth < LEAST_LAYERS:
        return None
    plan = replace(plan, parallel=replace(plan.parallel, stages=(1, 1, depth - 3, 1)))
    chunks = [chunk.graph for chunk in split_pipeline(apply_passes(graph, plan, TRAINING), plan)]
    steady = [micro_batch_variant(chunk, first=False, last=True) for chunk in chunks]
    least = [least_variant(chunk) for chunk in chunks]
    start, one, many, end = _quantities(steady, least, plan, device, engine)
    layer = np.minimum.reduce([(many - one) / (depth - 4), one, many / (depth - 3)])
    widest = np.maximum(one, (many - one) / (depth - 4))
    layer[MOMENT] = min(one[MOMENT], many[MOMENT])
    first, last = np.maximum(start - widest, 0.0), np.maximum(end - widest, 0.0)
    last[MOMENT] = end[MOMENT]
    return Probe(np.stack([np.maximum(layer, 0.0), first, last]), depth, graph.model_flops)


def _quantities(
    steady: Sequence[Graph], least: Sequence[Graph], plan: Plan, device: Device, engine: Engine
) -> list[np.ndarray]:
    """:data:`QUANTITIES` of each chunk [quantities]."""
    walks = [walk_chunk(chunk, plan) for chunk in steady]
    stack = plan.stack
    without = plan.settings.without
    costs = cost_graphs(list(least), device, engine_of(stack, engine), stack.issue_us, stack.eager, without)
    scales, prompts = [plan.scales(device.id, "train")] * len(costs), [False] * len(costs)
    run = Run(plan, device, lambda now: [10 * SETTLED_US] * len(now), scales, prompts)
    before, settled = (modify(costs, run, names) for names in (["calibration"], ["power_limit", "calibration"]))
    quantities = []
    for walk, cold, warm in zip(walks, before, settled, strict=True):
        times = [*_compute_us(cold), *_compute_us(warm)]
        alone = device.synchronous or replays_graph(cold, plan)
        times += [0.0, 0.0] if alone else _issue_us(cold)
        times += [us for chunk in (cold, warm) for us in _phases_us(chunk, plan, device)]
        quantities.append(np.array([*(walk.static[i] for i in (WEIGHTS, GRADIENTS, OPTIMIZER)), *_kept(walk), *times]))
    return quantities


def _kept(walk: ChunkWalk) -> tuple[float, float]:
    """Bytes that a micro-batch keeps for its backward pass, and what lives beside these at the fullest moment."""
    living = np.where(walk.optimizing, 0.0, walk.living.sum(axis=0))
    return walk.saved, max(float(living.max(initial=0.0) - walk.static.sum()) - walk.saved, 0.0)


def _phases_us(costs: Costs, plan: Plan, device: Device) -> tuple[float, float]:
    """Microseconds of a forward and of a backward on the device's streams, without what these wait for the host (which
    may be ahead of a whole stage, where it is late for a part); zero where they depend on other degrees.

    The probe's tensor, context and expert ranks are as near to each other as those of its family where ranks of data
    and of the pipeline are numbered after them.
    """
    layout = plan.parallel
    alike = layout.order == ORDER or (layout.order.startswith("tp-cp") and layout.ep == 1)
    if not alike or layout.placement != PLACEMENTS[0]:
        return 0.0, 0.0
    phases = PhaseTimes(costs, plan, device)
    forward, backward = (phases[name].total_us - phases[name].host_us for name in ("forward", "backward"))
    return forward, backward


def _compute_us(costs: Costs) -> tuple[float, float]:
    """Microseconds of kernels on the stream that computes, of a forward and of a backward with what it repeats."""
    by_phase = {"forward": 0.0, "backward": 0.0}
    for node, us, times in zip(costs.nodes, costs.kernel_us.tolist(), costs.repeats.tolist(), strict=True):
        network = node.op is not None and node.op.cost.unit == "network"
        if node.phase != "optimizer" and node.stream == "compute" and not network:
            by_phase["forward" if node.phase == "forward" else "backward"] += us * times
    return by_phase["forward"], by_phase["backward"]


def _issue_us(costs: Costs) -> list[float]:
    """Microseconds in which the host issues a forward, and a backward with what it repeats."""
    by_phase = {"forward": 0.0, "backward": 0.0}
    for node, us, times in zip(costs.nodes, costs.host_us.tolist(), costs.repeats.tolist(), strict=True):
        if node.phase != "optimizer":
            by_phase["forward" if node.phase == "forward" else "backward"] += us * times
    return list(by_phase.values())


@dataclass(frozen=True)
class _Shape:
    """What a schedule asks of each stage: layers it holds, whether it holds the first and last part [stages, 3], the
    same times the micro-batches in flight, and layers before it that a micro-batch passes first [stages]; on how many
    routes."""

    held: np.ndarray
    waiting: np.ndarray
    before: np.ndarray
    routes: int
    paired: bool


def _shape(schedule: str, pp: int, vpp: int, micro_batches: int, depth: int) -> _Shape:
    named = "interleaved" if vpp > 1 and schedule == "1f1b" else schedule
    orders = make_orders(named, pp, micro_batches, vpp)
    flying = in_flight(orders)
    sizes = np.diff(boundaries(depth, orders.routes.shape[1], (), "model"))
    stage_parts = [parts_of(orders, stage) for stage in range(pp)]
    both = [list(zip(chunks, flying[stage].tolist(), strict=True)) for stage, chunks in enumerate(stage_parts)]
    earliest = [min(chunks) if len(orders.routes) == 1 else 0 for chunks in stage_parts]

    def counted(chunks: Sequence[tuple[int, int]]) -> list[float]:
        ends = (sum(n for chunk, n in chunks if chunk == end) for end in (0, len(sizes) - 1))
        return [sum(sizes[chunk] * n for chunk, n in chunks), *ends]

    return _Shape(
        np.array([counted([(chunk, 1) for chunk in chunks]) for chunks in stage_parts], dtype=float),
        np.array([counted(chunks) for chunks in both], dtype=float),
        np.array([sizes[:at].sum() for at in earliest], dtype=float),
        len(orders.routes),
        bool(orders.paired.any()),
    )


def _on_stages(parts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """What parts [points, 3] come to on stages that have so many of each [stages, 3]: [points, stages]."""
    return sum((np.outer(parts[:, at], counts[:, at]) for at in (1, 2)), np.outer(parts[:, 0], counts[:, 0]))


@dataclass(frozen=True)
class Bounds:
    """At least so many GiB and seconds of each point, and its model's FLOPs a micro-batch [points]; zero: unknown."""

    memory_gib: np.ndarray
    time_s: np.ndarray
    model_flops: np.ndarray


def families(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """A point that stands for each family, and the family of each point [points]."""
    texts = np.array(
        ["|".join(map(str, key)) for key in zip(*(points.columns[n].tolist() for n in FAMILY), strict=True)]
    )
    _, standing, family = np.unique(texts, return_index=True, return_inverse=True)
    return standing, family


def standing(points: Points) -> list[dict[str, Any]]:
    """One point of each family, with as few ranks as the family has, so that a pipeline of two stages goes beside."""
    places, _ = families(points)
    return [points.at(int(position)) for position in places]


def bound(points: Points, probes: Sequence[Probe | None], evaluator: PointPlacer) -> Bounds:
    """The bounds of every point, from the probes of their families in the order of :func:`families`."""
    _, family = families(points)
    memory, time, flops = (np.zeros(len(points)) for _ in range(3))
    c = points.columns
    keys = [c["schedule"].tolist(), c["pp"].tolist(), c["vpp"].tolist(), c["micro_batches"].tolist()]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for at, key in enumerate(zip(*keys, strict=True)):
        probe = probes[family[at]]
        if probe is not None:
            alike.setdefault((*key, probe.layers), []).append(at)
    plan, device, _ = evaluator.place(points.at(0))
    slack = 0.0 if plan.settings.allocator else plan.stack.fragmentation
    context_gib = 0.0 if device.synchronous else _context_gib(plan, c)
    for key, places in alike.items():
        try:
            shape = _shape(*key)
        except ValueError:  # no such schedule: the simulation says so in its own words
            continue
        here = np.array(places)
        probes_here = [probe for i in places if (probe := probes[family[i]]) is not None]
        three = np.stack([probe.parts for probe in probes_here])
        point_columns = {name: column[here] for name, column in c.items()}
        memory_gib = _memory_gib(shape, three, point_columns, _whole(plan, point_columns))
        memory[here] = memory_gib * (1.0 + slack)
        time[here] = _time_s(shape, three, key[3], key[0])
        flops[here] = [probe.model_flops for probe in probes_here]
    memory = np.where(memory > 0, memory + context_gib, 0.0)
    return Bounds(memory * MARGIN, time * MARGIN, flops)


def _context_gib(plan: Plan, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """GiB of the device's context and of communicators that there are at least [points]."""
    c = columns
    groups = np.sum([degree > 1 for degree in (c["tp"], c["cp"], c["pp"], c["dp"] * c["cp"])], axis=0)
    return (plan.stack.context_gib or CONTEXT_GIB) + groups * COMMUNICATOR_GIB


def _whole(plan: Plan, columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Where weights, and where gradients, are there whole when a forward ends, whatever shards them [points].

    A pipeline gathers weights and sums gradients once for all micro-batches (:mod:`..passes.zero.sharded`).
    """
    settings, pipeline = plan.settings, columns["pp"] > 1
    weights = pipeline & (not settings.reshard_after_forward and not settings.gather_dtype)
    return weights, pipeline & (not settings.reduce_every_micro_batch)


def _memory_gib(
    shape: _Shape, three: np.ndarray, columns: Mapping[str, np.ndarray], shards: Sequence[np.ndarray]
) -> np.ndarray:
    """GiB of tensors on the fullest stage at least [points]; ``whole`` is :func:`_whole`."""
    c = columns
    ranks = np.maximum(c["dp"] * c["cp"], c["tp"] * c["cp"] * c["dp"] // (c["ep"] * c["etp"])).astype(float)
    shared = [np.where(c["zero_stage"] >= least, ranks, 1.0)[:, None] for least in (3, 2, 1)]
    once = (c["micro_batches"] == 1)[:, None]  # gradients are not there yet when the only forward ends
    weights, gradients, optimizer = (_on_stages(three[:, :, quantity], shape.held) for quantity in range(3))
    parts = [weights, np.where(once, 0.0, gradients), optimizer]
    saved = _on_stages(three[:, :, SAVED], shape.waiting)
    moment = np.maximum(*(np.outer(three[:, at, MOMENT], shape.held[:, at] > 0) for at in (0, 2)))
    fullest = sum(size / ranks for size, ranks in zip(parts, shared, strict=True)) + saved + moment
    shares = [np.where(at_end[:, None], 1.0, ranks) for at_end, ranks in zip(shards, shared, strict=False)]
    after_forward = sum(size / ranks for size, ranks in zip(parts, (*shares, shared[2]), strict=True)) + saved
    return np.maximum(fullest, after_forward).max(axis=1) / GIB


def _time_s(shape: _Shape, three: np.ndarray, micro_batches: int, schedule: str) -> np.ndarray:
    """Seconds of a step at least [points]."""
    full_backward = schedule in ("gpipe", "1f1b", "interleaved")  # others put the weights' half of a backward off
    parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for forward in (COLD, SETTLED, ISSUED, PHASES, SETTLED_PHASES):
        both = three[:, :, forward] + three[:, :, forward + 1]
        busy = _on_stages(both, shape.held)
        passed = both[:, 0] if full_backward else three[:, 0, forward]
        parts[forward] = busy * micro_batches / shape.routes, np.outer(passed, shape.before)
    totals = {forward: busy + before for forward, (busy, before) in parts.items()}
    settled = parts[COLD][0].max(axis=1, keepdims=True) >= SETTLED_US
    totals_us = [np.where(settled, totals[SETTLED], totals[COLD]), totals[ISSUED]]
    if not shape.paired:  # a forward beside a backward hides exchanges
        totals_us.append(np.where(settled, totals[SETTLED_PHASES], totals[PHASES]))
    return np.maximum.reduce(totals_us).max(axis=1) * 1e-6

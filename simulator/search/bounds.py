"""What a point needs of memory and takes of time at least, from a few probes instead of its own simulation.

Points that differ in nothing but pipeline, data ranks and ZeRO are a *family*. One probe of it cuts the model into a
first layer, a second, the middle and the last one, walks their memory and costs their kernels. A stage of any pipeline
holds at least its layers' share of these: weights, gradients and optimizer states, divided by the ranks that ZeRO
shares them over, and what as many micro-batches as its schedule keeps in flight saved. Its step takes at least the
kernels of all its micro-batches, and what the host needs to issue them, after the first of them came through the stages
before and until the last one went back through them. Communication, the optimizer, transients and waiting come on top,
so that neither is ever above what the simulation says; :data:`MARGIN` covers the cold starts of kernels and rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ..engines import Engine
from ..graph import Graph
from ..memory.amounts import GIB
from ..memory.stage import CONTEXT_GIB
from ..memory.walk import GRADIENTS, OPTIMIZER, WEIGHTS, walk_chunk
from ..passes.micro_batches import micro_batch_variant
from ..passes.order import TRAINING, apply_passes
from ..passes.pipeline import boundaries, layer_stack, split_pipeline
from ..question.orders import make_orders, parts_of
from ..question.plan import Plan
from ..step.build import engine_of, parts, traced
from ..step.checks import prepared
from ..timing.clocks import sustained
from ..timing.costs import Costs, cost_graphs, scaled
from ..timing.phases import MIDDLE, graphed
from ..timing.schedule.pipeline import in_flight
from .evaluate import Evaluator
from .request import request_of
from .space import Points

MARGIN = 0.98  # of a bound that is kept
LEAST_LAYERS = 5
SETTLED_US = 1e5  # of busy time from which clocks are steady (:mod:`..timing.clocks`)
FAMILY = ("cluster", "precision", "tp", "cp", "ep", "etp", "sequence_parallel", "overlap", "micro_batch", "recompute")
QUANTITIES = (  # bytes, then microseconds of kernels, of kernels at steady clocks, and of the host that issues them
    *("weights", "gradients", "optimizer", "saved"),
    *("forward", "backward", "settled_forward", "settled_backward", "issue_forward", "issue_backward"),
)
SAVED, COLD, SETTLED, ISSUED = 3, 4, 6, 8


@dataclass(frozen=True)
class Probe:
    """Of a layer, of what stands before the layers and after them: bytes and microseconds [quantities] at least.

    ``model_flops`` is of one micro-batch on all its ranks.
    """

    layer: np.ndarray
    first: np.ndarray
    last: np.ndarray
    layers: int
    model_flops: float


def probe(evaluator: Evaluator, point: Mapping[str, Any]) -> Probe | None:
    """The probe of a point's family; None where it has no pipeline of two stages, or too few layers."""
    try:
        return _probe(evaluator, {**point, "pp": 2, "vpp": 2, "zero_stage": 0, "schedule": "interleaved"})
    except ValueError as error:
        if not type(error).__module__.startswith("opcast"):
            raise
        return None


def _probe(evaluator: Evaluator, point: Mapping[str, Any]) -> Probe | None:
    plan, device, engine = evaluator.place(point)
    work = request_of(evaluator.made, point).work
    if plan.offload or plan.passes or plan.slow_devices:
        return None  # they may move or change what is counted here
    work = replace(work, global_batch=work.micro_batch * plan.dp * 4)
    plan = prepared(plan, work, device)
    graph = traced(evaluator.made.base.model, work, plan, next(parts(work)), device, evaluator.graphs)
    depth = layer_stack(graph)[1]
    if depth < LEAST_LAYERS:
        return None
    plan = replace(plan, parallel=replace(plan.parallel, stages=(1, 1, depth - 3, 1)))
    chunks = [chunk.graph for chunk in split_pipeline(apply_passes(graph, plan, TRAINING), plan)]
    steady = [micro_batch_variant(each, first=False, last=True) for each in chunks]
    usual = [micro_batch_variant(each, *MIDDLE) for each in chunks]
    found = _quantities(steady, usual, plan, device, engine)
    start, one, many, end = found
    layer = np.minimum.reduce([(many - one) / (depth - 4), one, many / (depth - 3)])
    widest = np.maximum(one, (many - one) / (depth - 4))
    return Probe(
        np.maximum(layer, 0.0), np.maximum(start - widest, 0.0), np.maximum(end - widest, 0.0), depth, graph.model_flops
    )


def _quantities(
    steady: Sequence[Graph], usual: Sequence[Graph], plan: Plan, device: Device, engine: Engine
) -> list[np.ndarray]:
    """:data:`QUANTITIES` of each chunk [quantities]."""
    walks = [walk_chunk(each, plan) for each in steady]
    costs = cost_graphs(list(usual), device, engine_of(plan.stack, engine), plan.stack.issue_us)
    scales = plan.scales(device.id, "train")
    settled = sustained(costs, device, 10 * SETTLED_US)
    made = []
    for walk, *own in zip(walks, costs, settled, strict=True):
        times = [us for each in own for us in _compute_us(scaled(each, *scales))]
        alone = device.synchronous or graphed(plan)
        times += [0.0, 0.0] if alone else _issue_us(scaled(own[0], *scales))
        made.append(np.array([*(walk.static[i] for i in (WEIGHTS, GRADIENTS, OPTIMIZER)), walk.saved, *times]))
    return made


def _compute_us(costs: Costs) -> tuple[float, float]:
    """Microseconds of kernels on the stream that computes, of a forward and of a backward with what it repeats."""
    found = {"forward": 0.0, "backward": 0.0}
    for node, us, times in zip(costs.nodes, costs.kernel_us.tolist(), costs.repeats.tolist(), strict=True):
        network = node.op is not None and node.op.cost.unit == "network"
        if node.phase != "optimizer" and node.stream == "compute" and not network:
            found["forward" if node.phase == "forward" else "backward"] += us * times
    return found["forward"], found["backward"]


def _issue_us(costs: Costs) -> list[float]:
    """Microseconds in which the host issues a forward, and a backward with what it repeats."""
    found = {"forward": 0.0, "backward": 0.0}
    for node, us, times in zip(costs.nodes, costs.host_us.tolist(), costs.repeats.tolist(), strict=True):
        if node.phase != "optimizer":
            found["forward" if node.phase == "forward" else "backward"] += us * times
    return list(found.values())


@dataclass(frozen=True)
class _Shape:
    """What a schedule asks of each stage: layers it holds [stages], whether it holds the first and last part, the same
    times the micro-batches in flight, and layers before it that a micro-batch passes first."""

    layers: np.ndarray
    first: np.ndarray
    last: np.ndarray
    waiting: np.ndarray
    waiting_first: np.ndarray
    waiting_last: np.ndarray
    before: np.ndarray
    routes: int


def _shape(schedule: str, pp: int, vpp: int, micro_batches: int, depth: int) -> _Shape:
    named = "interleaved" if vpp > 1 and schedule == "1f1b" else schedule
    orders = make_orders(named, pp, micro_batches, vpp)
    flying = in_flight(orders)
    bounds = boundaries(depth, orders.routes.shape[1], (), "model")
    sizes = np.diff(bounds)
    count = len(sizes)
    held = [parts_of(orders, stage) for stage in range(pp)]
    both = [list(zip(own, flying[stage].tolist(), strict=True)) for stage, own in enumerate(held)]
    earliest = [min(own) if len(orders.routes) == 1 else 0 for own in held]
    return _Shape(
        np.array([sizes[own].sum() for own in held], dtype=float),
        np.array([0 in own for own in held], dtype=float),
        np.array([count - 1 in own for own in held], dtype=float),
        np.array([sum(sizes[part] * n for part, n in own) for own in both], dtype=float),
        np.array([sum(n for part, n in own if part == 0) for own in both], dtype=float),
        np.array([sum(n for part, n in own if part == count - 1) for own in both], dtype=float),
        np.array([sizes[:at].sum() for at in earliest], dtype=float),
        len(orders.routes),
    )


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
    _, standing, own = np.unique(texts, return_index=True, return_inverse=True)
    return standing, own


def standing(points: Points) -> list[dict[str, Any]]:
    """One point of each family, with as few ranks as the family has, so that a pipeline of two stages goes beside."""
    places, _ = families(points)
    return [points.at(int(place)) for place in places]


def bound(points: Points, probes: Sequence[Probe | None], evaluator: Evaluator) -> Bounds:
    """The bounds of every point, from the probes of their families in the order of :func:`families`."""
    _, family = families(points)
    memory, time, flops = (np.zeros(len(points)) for _ in range(3))
    c = points.columns
    keys = [c["schedule"].tolist(), c["pp"].tolist(), c["vpp"].tolist(), c["micro_batches"].tolist()]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for at, key in enumerate(zip(*keys, strict=True)):
        known = probes[family[at]]
        if known is not None:
            alike.setdefault((*key, known.layers), []).append(at)
    plan, _, _ = evaluator.place(points.at(0))
    slack = 0.0 if plan.options.get("allocator") else plan.stack.fragmentation
    context_gib = plan.stack.context_gib or CONTEXT_GIB
    for key, places in alike.items():
        try:
            shape = _shape(*key)
        except ValueError:  # no such schedule: the simulation says so in its own words
            continue
        here = np.array(places)
        three = [np.array([getattr(probes[family[i]], name) for i in places]) for name in ("layer", "first", "last")]
        held = _memory_gib(shape, three, {name: column[here] for name, column in c.items()})
        memory[here] = held * (1.0 + slack) + context_gib
        time[here] = _time_s(shape, three, key[3], key[0])
        flops[here] = [known.model_flops for i in places if (known := probes[family[i]]) is not None]
    return Bounds(memory * MARGIN, time * MARGIN, flops)


def _memory_gib(shape: _Shape, three: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """GiB of tensors on the fullest stage at least [points]."""
    layer, first, last = three

    def held(quantity: int) -> np.ndarray:
        own = np.outer(layer[:, quantity], shape.layers) + np.outer(first[:, quantity], shape.first)
        return own + np.outer(last[:, quantity], shape.last)

    c = columns
    ranks = np.maximum(c["dp"] * c["cp"], c["tp"] * c["cp"] * c["dp"] // (c["ep"] * c["etp"])).astype(float)
    shared = [np.where(c["zero_stage"] >= least, ranks, 1.0)[:, None] for least in (3, 2, 1)]
    once = (c["micro_batches"] == 1)[:, None]  # gradients are not there yet when the only forward ends
    total = held(0) / shared[0] + np.where(once, 0.0, held(1) / shared[1]) + held(2) / shared[2]
    total += np.outer(layer[:, SAVED], shape.waiting) + np.outer(first[:, SAVED], shape.waiting_first)
    total += np.outer(last[:, SAVED], shape.waiting_last)
    found: np.ndarray = total.max(axis=1) / GIB
    return found


def _time_s(shape: _Shape, three: Sequence[np.ndarray], micro_batches: int, schedule: str) -> np.ndarray:
    """Seconds of a step at least [points]."""
    made = []
    whole = schedule in ("gpipe", "1f1b", "interleaved")  # others put the weights' half of a backward off
    for forward in (COLD, SETTLED, ISSUED):
        layer, first, last = (each[:, forward] + each[:, forward + 1] for each in three)
        busy = np.outer(layer, shape.layers) + np.outer(first, shape.first) + np.outer(last, shape.last)
        passed = layer if whole else three[0][:, forward]
        made.append((busy * micro_batches / shape.routes, np.outer(passed, shape.before)))
    cold, warm, issued = made
    settled = cold[0].max(axis=1, keepdims=True) >= SETTLED_US
    kernels = np.where(settled, sum(warm), sum(cold))
    found: np.ndarray = np.maximum(kernels, sum(issued)).max(axis=1) * 1e-6
    return found

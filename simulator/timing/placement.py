"""When the chunks of a model run on the stages of a cluster: their phases timed, their tasks and sends placed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import Op, make_op
from ..engines import Engine, ask
from ..passes.data import micro_batch_variant
from ..passes.pipeline import Chunk
from ..question.plan import Plan
from .costs import Costs, cost_graphs, slowed
from .phases import FIRST, LAST, MIDDLE, ONLY, ChunkTimes, Variant, time_phases
from .schedule.orders import Orders
from .schedule.pipeline import PipelineTimes, run_pipeline

NONE_SLOW: Mapping[int, float] = {}


class Sends(NamedTuple):
    """Microseconds of transfers between stages by [stage, chunk] of who sends, or by [stage, chunk, micro-batch]."""

    onward_us: np.ndarray
    back_us: np.ndarray

    def of(self, back: np.ndarray, stage: np.ndarray, chunk: np.ndarray) -> np.ndarray:
        """Those of senders [n], where they are by [stage, chunk]."""
        found: np.ndarray = np.where(back, self.back_us[stage, chunk], self.onward_us[stage, chunk])
        return found

    def scaled(self, usual: Sends, now: Sends) -> Sends:
        """These, each as many times longer as ``now`` is than ``usual``, both by [stage, chunk]."""

        def one(own: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
            ratio = np.divide(after, before, out=np.ones_like(after), where=before > 0)
            return own * ratio.reshape(ratio.shape + (1,) * (own.ndim - 2))

        return Sends(one(self.onward_us, usual.onward_us, now.onward_us), one(self.back_us, usual.back_us, now.back_us))


def time_chunks(
    chunks: tuple[Chunk, ...], plan: Plan, device: Device, engine: Engine, slow: Mapping[int, float] = NONE_SLOW
) -> dict[int, ChunkTimes]:
    """Times of every distinct chunk graph, by its identity; compute of ``slow`` ones takes so many times longer."""
    wanted = (ONLY,) if plan.micro_batches == 1 else (FIRST, MIDDLE, LAST)
    distinct = {id(chunk.graph): chunk.graph for chunk in chunks}
    keys = list(product(distinct, wanted))
    graphs = [micro_batch_variant(distinct[which], first, last) for which, (first, last) in keys]
    slowdown = {id(graph): slow[which] for (which, _), graph in zip(keys, graphs, strict=True) if which in slow}
    shared = {id(graph): graph for graph in graphs}
    stack = plan.stack
    found = cost_graphs(list(shared.values()), device, engine, plan.scale(device.id), stack.issue_us)
    costs = {which: slowed(each, slowdown.get(which, 1.0)) for which, each in zip(shared, found, strict=True)}
    phases = {which: time_phases(each, plan, device) for which, each in costs.items()}
    made: dict[int, ChunkTimes] = {which: ChunkTimes({}, {}) for which in distinct}
    for (which, variant), graph in zip(keys, graphs, strict=True):
        made[which].costs[variant] = costs[id(graph)]
        made[which].phases[variant] = phases[id(graph)]
    return made


def retime(
    times: ChunkTimes, costs: Mapping[Variant, Costs], plan: Plan, device: Device, anew: bool = False
) -> ChunkTimes:
    """The chunk with other costs; phases of those that are the very same are kept, unless all are wanted ``anew``."""
    pairs = [(times.costs[variant], times.phases[variant], costs[variant]) for variant in costs]
    changed = {id(new): new for old, _, new in pairs if new is not old or anew}
    phases = {id(new): usual for _, usual, new in pairs}
    phases |= {which: time_phases(new, plan, device) for which, new in changed.items()}
    return ChunkTimes(dict(costs), {variant: phases[id(new)] for variant, new in costs.items()})


def place_tasks(
    orders: Orders, chunks: tuple[Chunk, ...], times: Mapping[int, ChunkTimes], plan: Plan, sends: Sends
) -> PipelineTimes:
    """The pipeline's tasks placed in time. Chunk *c* stands where the schedule's routes put part *c* of the model."""
    names = ("forward", "backward", "weight", "first", "last", "paired")
    table = {name: np.zeros((orders.stages, orders.chunks)) for name in names}
    single = plan.micro_batches == 1
    for route in orders.routes.tolist():
        for chunk, (stage, position) in zip(chunks, route, strict=True):
            phases = times[id(chunk.graph)].phases
            usual = phases[ONLY if single else MIDDLE]
            at = stage, position
            table["forward"][at] = usual["forward"].total_us
            table["backward"][at] = usual["backward"].total_us
            table["weight"][at] = usual["weight"].total_us
            table["first"][at] = phases[ONLY if single else FIRST]["forward"].total_us
            table["last"][at] = phases[ONLY if single else LAST]["backward"].total_us
            table["paired"][at] = usual["paired"].total_us
    return run_pipeline(
        orders,
        table["forward"],
        table["backward"],
        table["weight"],
        send_us=sends.onward_us,
        return_us=sends.back_us,
        paired_us=table["paired"],
        first_forward_us=table["first"],
        last_backward_us=table["last"],
        blocking="pp" not in plan.stack.overlap,
        behind="dp" in plan.stack.overlap,
    )


def send_times(orders: Orders, chunks: tuple[Chunk, ...], plan: Plan, engine: Engine) -> Sends:
    """How long what each chunk makes takes to the next one's stage, and what its backward makes to the one before."""
    found = Sends(np.zeros((orders.stages, orders.chunks)), np.zeros((orders.stages, orders.chunks)))
    ops = send_ops(chunks, plan)
    if not ops:
        return found
    onward = np.where([chunk.send_bytes > 0 for chunk in chunks], ask(engine, ops).latency_us, 0.0)
    for route in orders.routes:
        found.onward_us[route[:, 0], route[:, 1]] = onward
        found.back_us[route[:, 0], route[:, 1]] = np.roll(onward, 1)
    return found


def by_micro_batch(sends: Sends, count: int) -> Sends:
    """The same sends by [stage, chunk, micro-batch]."""
    return Sends(*(np.repeat(each[:, :, None], count, axis=2) for each in sends))


def send_ops(chunks: tuple[Chunk, ...], plan: Plan) -> list[Op]:
    """The transfer of each chunk's result to the stage of the next; none where there is but one chunk."""
    if len(chunks) == 1:
        return []
    made = []
    for chunk, after in zip(chunks, (*chunks[1:], chunks[0]), strict=True):
        near = plan.neighbours(chunk.stage, after.stage)
        link = plan.cluster.link if near else plan.cluster.fabric
        size = round(chunk.send_bytes)
        made.append(make_op("send_recv", size_bytes=size, ranks=2, ranks_per_node=2 if near else 1, link=link))
    return made

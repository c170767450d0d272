"""A second way to the time of a step whose communication shares the links, for two stages of a pipeline.

The simulator places a step, shares the links, and places it again until nothing moves. Here tasks, sends and reductions
are one graph of activities on the links, run once from event to event: nothing is placed twice.
"""

from __future__ import annotations

import numpy as np

from opcast.simulator.contention.traffic import collect_communication
from opcast.simulator.network.sharing import Activities, run_activities
from opcast.simulator.question.orders import FORWARD
from opcast.simulator.step.state import Step
from opcast.simulator.timing.phases import MIDDLE
from opcast.simulator.timing.schedule.pipeline import sources


def event_by_event(placed: Step, bandwidth_gbps: np.ndarray) -> float:
    """Microseconds until the last gradient of a step is reduced; each link carries at most its bandwidth."""
    shared = placed.shared
    assert shared is not None
    said, orders = collect_communication(placed), placed.orders
    count, alike = len(said.collectives.slot), shared.patterns
    source, _ = sources(orders)
    usual = [times.phases[MIDDLE] for times in placed.times_of]
    lasts = [
        usual[stage]["forward" if kind == FORWARD else "backward"].total_us
        for stage, kind in zip(orders.stage.tolist(), orders.kind.tolist(), strict=True)
    ]
    rows: list[tuple[int, float, float, list[int]]] = []  # pattern (-1: none), still and moving us, waits
    task_at: dict[int, int] = {}
    sent = dict(
        zip(zip(*(column.tolist() for column in said.sends[:4]), strict=True), range(count, 10**9), strict=False)
    )

    def add(task: int) -> int:
        if task in task_at:
            return task_at[task]
        stage, waits = int(orders.stage[task]), []
        if task > orders.offsets[stage]:
            waits.append(add(task - 1))
        if source[task] >= 0:
            other = int(source[task])
            key = bool(orders.kind[other] != FORWARD), int(orders.stage[other]), 0, int(orders.micro_batch[other])
            rows.append((int(shared.traffic.pattern[sent[key]]), *moves(sent[key]), [add(other)]))
            waits.append(len(rows) - 1)
        rows.append((-1, lasts[task], 0.0, waits))
        task_at[task] = len(rows) - 1
        return task_at[task]

    def moves(at: int) -> tuple[float, float]:
        return float(shared.traffic.still_us[at]), float(shared.traffic.moving_us[at])

    for stage in range(2):
        before = add(int(orders.offsets[stage + 1]) - 1)
        for at in np.flatnonzero(said.collectives.stage == stage).tolist():
            if said.nodes[said.collectives.slot[at]].phase != "optimizer":
                rows.append((int(shared.traffic.pattern[at]), *moves(at), [before]))
                before = len(rows) - 1
    loads = [None if pattern < 0 else alike.usages[pattern] for pattern, *_ in rows]
    links = [np.zeros(0, np.int64) if use is None else np.flatnonzero(use.load) for use in loads]
    weights = [np.zeros(0) if use is None else use.load[own] / use.flow for use, own in zip(loads, links, strict=True)]
    sizes = [
        0.0 if use is None else moving / alike.us_per_byte[pattern] * use.flow
        for use, (pattern, _, moving, _) in zip(loads, rows, strict=True)
    ]
    starts = np.concatenate([[0], np.cumsum([len(own) for own in links])])
    waits = np.concatenate([[0], np.cumsum([len(row[3]) for row in rows])])
    activities = Activities(
        starts.astype(np.int64), np.concatenate(links), np.concatenate(weights), np.array(sizes),
        np.array([row[1] for row in rows]), np.zeros(len(rows)), waits.astype(np.int64),
        np.array([each for row in rows for each in row[3]], dtype=np.int64),
    )  # fmt: skip
    return run_activities(activities, bandwidth_gbps, 0.0).total_us

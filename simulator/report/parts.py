"""What the time of a workload is made of: its shares by cell of ops (family and format) and kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..question.calibration import FIXED, cell_of
from ..question.plan import Plan
from ..step.state import Executed, State
from ..timing.modifiers import Run, modify
from ..timing.phases import select_nodes

NO_FACTOR = ("shard_copies", "collective_checks")  # host's time that the calibration's factor was not fitted on
Part = tuple[str, str]  # cell (family and format of ops), regime


def parts_of(state: State, left_out: str = "", only: str = "") -> dict[Part, float]:
    """Shares of the time of a workload that follow each cell's factor, by regime.

    Kernels of a family count as far as they are not hidden: compute by its share of computing time, collectives by what
    is exposed. Bubbles follow what fills the pipeline. ``left_out`` is a phase that does not count, ``only`` the one
    kind of step that does.
    """
    part_us: dict[Part, float] = {}
    graphs = state.plan.stack.cuda_graph or bool(state.plan.settings.cuda_graph)  # gaps between kernels, no host
    for step in state.steps:
        if only and step.kind != only:
            continue
        cell_us: dict[str, float] = {}
        for stage in step.speaking:
            for execution in step.executions(stage):
                for cell, us in _cells(execution, state.plan) if execution.phase != left_out else ():
                    cell = FIXED if cell == "host" and graphs else cell
                    cell_us[cell] = cell_us.get(cell, 0.0) + us
        worked_us, step_us = sum(cell_us.values()), step.total_us * step.times
        sends_us = float(step.pipeline.sending_us[step.busiest]) * step.times if step.trains else 0.0
        fixed_us = min(sends_us + step.overhead_us * step.times, step_us / 2)
        for cell, us in cell_us.items():
            part_us[cell, step.kind] = part_us.get((cell, step.kind), 0.0) + us / worked_us * (step_us - fixed_us)
        part_us[FIXED, step.kind] = part_us.get((FIXED, step.kind), 0.0) + fixed_us
    total_us = sum(part_us.values())
    return {part_name: us / total_us for part_name, us in part_us.items() if us > 0.0}


def _cells(execution: Executed, plan: Plan) -> Iterator[tuple[str, float]]:
    """Microseconds of a phase by cell: computing, exposed communication, waiting for the host.

    What hosts take for collectives beside issuing them (:mod:`..timing.hosts`) follows no factor.
    """
    costs, time = execution.costs, execution.time
    chosen = select_nodes(costs, execution.phase)
    kernel_us: dict[bool, dict[str, float]] = {False: {}, True: {}}
    weights = (costs.kernel_us[chosen] * costs.repeats[chosen]).tolist()
    for index, us in zip(chosen.tolist(), weights, strict=True):
        cell = cell_of(costs.nodes[index].op)
        side = kernel_us[cell.startswith("collective")]
        side[cell] = side.get(cell, 0.0) + us
    side_us: dict[bool, float] = {False: time.compute_us, True: sum(time.exposed_us.values())}
    for communicates, by_cell in kernel_us.items():
        total_us = sum(by_cell.values())
        for cell, us in by_cell.items():
            yield cell, us / total_us * side_us[communicates] * execution.times if total_us else 0.0
    apart = _apart(execution, chosen, plan)
    yield "host", time.host_us * execution.times * (1.0 - apart)
    yield FIXED, time.host_us * execution.times * apart


def _apart(execution: Executed, chosen: np.ndarray, plan: Plan) -> float:
    """The share of the host's time in a phase that no factor on the host reaches."""
    if not (plan.stack.check_us or plan.stack.share_us):
        return 0.0
    costs = execution.costs
    nothing = replace(costs, host_us=np.zeros(len(costs.nodes)))
    run = Run(plan, plan.figures, lambda now: [0.0] * len(now), [({}, {})], [False])
    alone_us = modify([nothing], run, NO_FACTOR)[0].host_us
    total_us = float(costs.host_us[chosen] @ costs.repeats[chosen])
    return float(alone_us[chosen] @ costs.repeats[chosen]) / total_us if total_us else 0.0


def family_shares(state: State) -> dict[str, float]:
    """The same shares by family alone, and by what follows none.

    What hosts take for prompts (``Stack.prompt_issue_us``) is in none: no known run says how far that is off, and it
    has an interval of its own (:func:`.account.widen_for_host`).
    """
    shares: dict[str, float] = {}
    for (cell, _), share in parts_of(state).items():
        family = cell.partition(" ")[0]
        shares[family] = shares.get(family, 0.0) + share
    issued_us = sum(one.time.host_us * one.times for one in state.executions() if one.costs.outside_graphs)
    if issued_us:
        shares[FIXED] = max(shares.get(FIXED, 0.0) - issued_us / state.total_us, 0.0)
    return shares

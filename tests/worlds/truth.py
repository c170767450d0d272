"""What steps truly take in a world: opcast's own schedule, its ops answered by the laws for the kernels that a stack
runs.

So the schedule, overlap and memory are not what is tested, only the times of ops: plan, builders, store, predictors,
the choice of a row and the intervals. What the simulator does to kernel times of its own (power limit, older kernels,
rings) is left out: the laws already say what happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from opcast.datasets.ops import KINDS, Op
from opcast.simulator.engines import Answers, FusedEngine
from opcast.simulator.engines.answers import Columns
from opcast.simulator.question.requests import SimulateRequest, plan_of
from opcast.simulator.simulate import simulate
from opcast.tests.worlds.chip import World
from opcast.tests.worlds.emulation import Emulator
from opcast.tests.worlds.kernels import kernel_launched
from opcast.tests.worlds.laws import held_back, latency_us


@dataclass
class TruthEngine:
    """Answers every op exactly: the kernel that a stack launches, by the laws of a world.

    In ``long`` steps products run at the clock that the power limit leaves. ``told`` keeps every answer.
    """

    world: World
    stack: str
    long: bool
    emulator: Emulator
    name: str = "truth"
    told: dict[tuple[Op, str], float] = field(default_factory=dict)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        rows = zip(*(columns[name].tolist() for name in KINDS[kind].names), strict=True)
        found = np.array([self.of(Op(kind, row, dtype, out_dtype), cache) for row in rows], dtype=np.float64)
        answers = Answers.declined(len(found))
        answers.latency_us[:] = answers.low_us[:] = answers.high_us[:] = found
        answers.engine[:] = self.name
        answers.in_envelope[:] = True
        return answers

    def of(self, op: Op, cache: str) -> float:
        """Microseconds of one op."""
        if (op, cache) not in self.told:
            kernel = kernel_launched(self.world, self.stack, op)
            launches = self.emulator.launches(op, "torch") if kernel == "aten" else ()
            burst = latency_us(self.world, op, kernel, cache, launches)
            self.told[op, cache] = burst * (held_back(self.world, op, burst) if self.long else 1.0)
        return self.told[op, cache]


def true_report(request: SimulateRequest, world: World, emulator: Emulator, graphs: Path) -> tuple[Any, TruthEngine]:
    """The report of a step as it truly runs, and what answered."""
    device = replace(world.device, tdp_w=0.0)
    plan = plan_of(request, device)
    stack = replace(plan.stack, attention="fused", products="current", ring_factor=1.0, step_us={}, scale={})
    engine = TruthEngine(world, stack.id, request.work.kind != "prefill", emulator)
    report = simulate(request.model, request.work, replace(plan, stack=stack), device, FusedEngine([engine]), graphs)
    return report, engine

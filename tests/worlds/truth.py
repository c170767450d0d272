"""What steps truly take in a world: opcast's own schedule, its ops answered by the laws for the kernels that a stack
runs.

So the schedule, overlap and memory are not what is tested, only the times of ops: plan, builders, store, predictors,
the choice of a row and the intervals. What the simulator does to kernel times of its own (power limit, older kernels,
rings) is left out: the laws already say what happens, and :func:`in_step` what a step does to kernels that no
measuring of one op alone can know.
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

# What a step makes of kernels that were timed alone, in ln units, one draw a step and family of ops: root mean squares
# of one H200 (tests/benchmarks/in_step.py: kernels in traces of four steps against rows of the same shapes): products
# +1.2, +1.6, -0.7 and -0.3 %, attention -2.2, -0.5, +9.3, -0.1 and +6.1 %, AdamW and softmax +4.7 and -1.6 %.
PRODUCTS_IN_STEP, ATTENTION_IN_STEP, OTHERS_IN_STEP = 0.01, 0.05, 0.035
# How far products that run for long are from any law of clocks: bf16 of H200 and B200 0.96 to 1.03 times one
# (simulator/timing/clocks.py), of which nine in ten lie between.
LIMITER = 0.02


def in_step(world: World, step: str, op: Op) -> float:
    """How many times longer a kernel takes in a step than alone: other neighbours, values, places and caches."""
    family = KINDS[op.kind].family
    if family in ("gemm", "moe"):
        spread = PRODUCTS_IN_STEP
    else:
        spread = ATTENTION_IN_STEP if family == "attention" else OTHERS_IN_STEP
    return world.factor(spread, "in step", step, family)


@dataclass
class TruthEngine:
    """Answers every op exactly: the kernel that a stack launches, by the laws of a world.

    In ``long`` steps products run at the clock that the power limit leaves. ``told`` keeps every answer.
    """

    world: World
    stack: str
    long: bool
    emulator: Emulator
    step: str = ""
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
            self.told[op, cache] = burst * in_step(self.world, self.step, op)
            if self.long and (slower := held_back(self.world, op, burst)) > 1.0:
                self.told[op, cache] *= slower * self.world.factor(LIMITER, "limiter", self.step, op.dtype)
        return self.told[op, cache]


def true_report(
    request: SimulateRequest, world: World, emulator: Emulator, graphs: Path, step: str = ""
) -> tuple[Any, TruthEngine]:
    """The report of a step as it truly runs, and what answered. ``step``: its name, by which it differs from others."""
    device = replace(world.device, tdp_w=0.0)
    plan = plan_of(request, device)
    stack = replace(plan.stack, attention="fused", products="current", ring_factor=1.0, step_us={}, scale={})
    engine = TruthEngine(world, stack.id, request.work.kind != "prefill", emulator, step)
    report = simulate(request.model, request.work, replace(plan, stack=stack), device, FusedEngine([engine]), graphs)
    return report, engine

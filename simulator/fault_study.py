"""What faults of links do to a step: its communication timed anew, everything else as it was found.

RAPID-LLM (arXiv 2512.19606, fig. 10) draws the same: faults at random positions, the distribution of the slowdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..datasets.ops import Op, iterate_groups
from .cluster_report import ClusterStep, step_us
from .costs import Costs
from .engines import Engine, FusedEngine
from .engines.flow import FlowEngine, flow_engine
from .link_use import communicates
from .network.faults import Fault, draw, drawing
from .network.study import Study, finite
from .network.topology import TopologyError
from .placement import Sends, place_tasks, retime, send_times

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass
class Degraded:
    """A step that was simulated with an engine of flows, ready to be timed with other faults."""

    step: ClusterStep
    engine: FusedEngine

    @cached_property
    def flows(self) -> FlowEngine:
        """The engine of flows behind the step. TopologyError without one."""
        found = flow_engine(self.engine)
        if found is None:
            raise TopologyError("faults of links need network=flow or packet")
        return found

    @cached_property
    def ops(self) -> list[Op]:
        """Every distinct op that communicates."""
        costs = [each for times in self.step.times.values() for each in times.costs.values()]
        asked = (node.op for each in costs for node in each.nodes if node.op is not None)
        return list(dict.fromkeys(op for op in asked if communicates(op)))

    @cached_property
    def _usual(self) -> tuple[np.ndarray, Sends]:
        return stretches(self.flows, self.ops), self._sends(self.engine)

    @cached_property
    def _memo(self) -> dict[bytes, float]:
        return {}

    def step_us(self, faults: Sequence[Fault]) -> float:
        """The step with these faults beside those of the engine, us; infinite when ranks are cut off."""
        stretch, usual = self._usual
        try:
            flows = self.flows.with_faults((*self.flows.faults, *faults))
            factors = stretches(flows, self.ops) / stretch
            sends = self._sends(FusedEngine([flows if each is self.flows else each for each in self.engine.engines]))
        except TopologyError as error:
            if "partition" not in str(error):
                raise
            return np.inf
        key = factors.tobytes() + sends.onward_us.tobytes()
        if key not in self._memo:
            self._memo[key] = self._timed(
                dict(zip(self.ops, factors.tolist(), strict=True)), self.step.sends.scaled(usual, sends)
            )
        return self._memo[key]

    def _sends(self, engine: Engine) -> Sends:
        return send_times(self.step.orders, tuple(self.step.chunks), self.step.plan, engine)

    def _timed(self, factors: Mapping[Op, float], sends: Sends) -> float:
        step = self.step
        times = {}
        for which, each in step.times.items():
            made = {id(costs): stretched(costs, factors) for costs in each.costs.values()}
            costs = {variant: made[id(costs)] for variant, costs in each.costs.items()}
            times[which] = retime(each, costs, step.plan, step.device)
        pipeline = place_tasks(step.orders, tuple(step.chunks), times, step.plan, sends)
        return step_us(replace(step, times=times, pipeline=pipeline, sends=sends))


def stretches(flows: FlowEngine, ops: Sequence[Op]) -> np.ndarray:
    """How many times longer each op takes than on a fabric that never blocks [ops]."""
    found = np.ones(len(ops))
    for kind, dtype, out_dtype, positions, columns in iterate_groups(list(ops)):
        found[positions] = flows.stretch(kind, columns, out_dtype if kind == "ep_combine" else dtype)
    return found


def stretched(costs: Costs, factors: Mapping[Op, float]) -> Costs:
    """The costs with communication so many times longer; the very same where nothing changes."""
    factor = np.array([1.0 if node.op is None else factors.get(node.op, 1.0) for node in costs.nodes])
    return costs if (factor == 1.0).all() else replace(costs, kernel_us=costs.kernel_us * factor)


def study(step: ClusterStep, engine: FusedEngine, settings: Mapping[str, Any]) -> Study:
    """Step times over random places of faults: ``{samples, count, seed, kinds}`` and the figures of a fault.

    Without figures each fault halves its link's bandwidth. TopologyError for a setting that is not there.
    """
    samples, count, seed, like, kinds = drawing(settings, "faults_study")
    degraded = Degraded(step, engine)
    seeds = np.random.SeedSequence(seed).generate_state(samples)
    topology = degraded.flows.topology
    drawn = [draw(topology, count, like, int(each), kinds) for each in seeds]
    times = np.array([degraded.step_us(faults) for faults in drawn], dtype=np.float64)
    return Study(step_us(step), tuple(tuple(fault.where for fault in faults) for faults in drawn), times)


def to_dict(found: Study) -> dict[str, Any]:
    """A study as plain values: quantiles of the slowdown, the most critical links, how many samples fell apart."""
    slowdown = {f"p{round(100 * q):02d}": finite(value) for q, value in found.quantiles(QUANTILES).items()}
    slowdown["max"] = slowdown.pop("p100")
    return {**found.to_dict(), "slowdown": slowdown}

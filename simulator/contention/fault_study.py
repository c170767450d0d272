"""What faults of links and slow devices do to a step: what they touch timed anew, everything else as it was found.

RAPID-LLM (arXiv 2512.19606, fig. 10) draws the same: faults at random positions, the distribution of the slowdown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.ops import Op
from ..engines import Engine, FusedEngine
from ..engines.flow import FlowEngine, flow_engine
from ..network.faults import Fault, PartitionError, fault_sites, read_drawing
from ..network.study import Study
from ..network.topology import TopologyError
from ..question.stragglers import slow_devices, stage_slowdowns
from ..step.state import State, Step
from ..timing.costs import Costs, multiply_kernels, slow_compute
from ..timing.phases import ChunkTimes
from ..timing.placement import Sends, place_tasks, retime, send_times
from .link_usage import communicates


@dataclass
class FaultedStep:
    """A step that was simulated with an engine of flows, ready to be timed with other faults."""

    step: Step
    engine: FusedEngine

    @cached_property
    def flows(self) -> FlowEngine:
        """The engine of flows behind the step. TopologyError without one."""
        flows = flow_engine(self.engine)
        if flows is None:
            raise TopologyError("faults of links need network=flow or packet")
        return flows

    @cached_property
    def ops(self) -> list[Op]:
        """Every distinct op that communicates."""
        costs = [costs_ for times in self.step.times_of for costs_ in times.costs.values()]
        ops = (node.op for each in costs for node in each.nodes if node.op is not None)
        return list(dict.fromkeys(op for op in ops if communicates(op)))

    @cached_property
    def _baseline(self) -> tuple[np.ndarray, Sends]:
        return self.flows.stretches(self.ops), self._sends(self.engine)

    @cached_property
    def _memo(self) -> dict[bytes, float]:
        return {}

    def step_us(self, faults: Sequence[Fault]) -> float:
        """The step with these faults beside those of the engine, us; infinite when ranks are cut off."""
        stretch, baseline = self._baseline
        try:
            flows = self.flows.with_faults((*self.flows.faults, *faults))
            factors = flows.stretches(self.ops) / stretch
            engines = [flows if engine is self.flows else engine for engine in self.engine.engines]
            sends = self._sends(FusedEngine(engines, stack=self.engine.stack))
        except PartitionError:
            return np.inf
        key = factors.tobytes() + sends.onward_us.tobytes()
        if key not in self._memo:
            factors_of_ops = dict(zip(self.ops, factors.tolist(), strict=True))
            times = self._with([partial(stretch_costs, factors=factors_of_ops)] * len(self.step.times_of))
            self._memo[key] = self._place(times, self.step.sends.scaled(baseline, sends))
        return self._memo[key]

    def straggling_us(self, slow: Sequence[str], slowdown: float) -> float:
        """The step where ``device 3`` or ``node 1`` compute so many times longer than the plan's own do, us."""
        step = self.step
        values = [{kind: int(index), "slowdown": slowdown} for kind, index in (site.split() for site in slow)]
        devices = slow_devices(values, step.plan.cluster)
        plan = replace(step.plan, slow_devices={**step.plan.slow_devices, **devices})
        baseline, by_stage = (
            stage_slowdowns(plan_)[step.orders.routes[:, :, 0]].max(axis=0) for plan_ in (step.plan, plan)
        )
        factors = np.maximum(by_stage / baseline, 1.0)
        key = b"slow" + factors.tobytes()
        if key not in self._memo:
            times = self._with([partial(slow_compute, slowdown=factor) for factor in factors.tolist()])
            self._memo[key] = self._place(times, step.sends)
        return self._memo[key]

    def _with(self, changes: Sequence[Callable[[Costs], Costs]]) -> tuple[ChunkTimes, ...]:
        """The chunks with changed costs; those alike that change alike, and variants that share theirs, still do."""
        retimed: dict[tuple[int, str], ChunkTimes] = {}
        chunk_times = []
        for times, change in zip(self.step.times_of, changes, strict=True):
            key = id(times), repr(getattr(change, "keywords", {}).get("slowdown"))
            if key not in retimed:
                changed_costs = {id(costs): change(costs) for costs in times.costs.values()}
                costs = {variant: changed_costs[id(costs)] for variant, costs in times.costs.items()}
                retimed[key] = retime(times, costs, self.step.plan, self.step.device)
            chunk_times.append(retimed[key])
        return tuple(chunk_times)

    def _sends(self, engine: Engine) -> Sends:
        return send_times(self.step.orders, self.step.chunks, self.step.plan, engine)

    def _place(self, times: tuple[ChunkTimes, ...], sends: Sends) -> float:
        step = self.step
        pipeline = place_tasks(step.orders, times, step.plan, sends)
        return replace(step, times_of=times, pipeline=pipeline, sends=sends).total_us


def stretch_costs(costs: Costs, factors: Mapping[Op, float]) -> Costs:
    """The costs with communication so many times longer; the very same where nothing changes."""
    by_node = [1.0 if node.op is None else factors.get(node.op, 1.0) for node in costs.nodes]
    return multiply_kernels(costs, np.array(by_node))


def study_faults(state: State, engine: FusedEngine, settings: Mapping[str, Any]) -> Study:
    """Times of a workload over places of faults: ``{samples, count, seed, kinds, everywhere}``, the figures of a fault.

    Places are drawn, or with ``everywhere`` each is taken in turn. Without figures each fault halves its link's
    bandwidth; with ``straggler`` no link fails, but devices (or nodes, by ``kinds``) compute so many times longer.
    TopologyError for a setting that is not there.
    """
    drawing = read_drawing(settings, "faults_study")
    faulted = [FaultedStep(step, engine) for step in state.steps]

    def total_us(time_us: Callable[[FaultedStep], float]) -> float:
        return sum(time_us(step_) * step_.step.times for step_ in faulted)

    if drawing.straggler is None:
        samples = drawing.among(fault_sites(faulted[0].flows.topology, drawing.kinds))
        faults = [[replace(drawing.like, where=site) for site in failed] for failed in samples]
        times = [total_us(lambda step_, failed=failed: step_.step_us(failed)) for failed in faults]  # type: ignore[misc]
    else:
        samples = drawing.among(_slow_sites(state.plan.cluster, drawing.kinds))
        slowdown = float(drawing.straggler)
        times = [total_us(lambda step_, slow=slow: step_.straggling_us(slow, slowdown)) for slow in samples]  # type: ignore[misc]
    return Study(state.total_us, tuple(map(tuple, samples)), np.array(times, dtype=np.float64))


def _slow_sites(cluster: Cluster, kinds: Sequence[str]) -> list[str]:
    """Devices that may be slow, or nodes."""
    counts = {"device": cluster.devices, "node": cluster.nodes}
    return [f"{kind} {i}" for kind in kinds or ("device",) for i in range(counts[kind])]

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
from ..network.faults import Fault, PartitionError, drawing, places
from ..network.study import Study
from ..network.topology import TopologyError
from ..question.stragglers import slow_devices, stage_slowdowns
from ..step.state import State, Step
from ..timing.costs import Costs, longer, slowed
from ..timing.phases import ChunkTimes
from ..timing.placement import Sends, place_tasks, retime, send_times
from .use import communicates


@dataclass
class Degraded:
    """A step that was simulated with an engine of flows, ready to be timed with other faults."""

    step: Step
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
        costs = [each for times in self.step.times_of for each in times.costs.values()]
        asked = (node.op for each in costs for node in each.nodes if node.op is not None)
        return list(dict.fromkeys(op for op in asked if communicates(op)))

    @cached_property
    def _usual(self) -> tuple[np.ndarray, Sends]:
        return self.flows.stretches(self.ops), self._sends(self.engine)

    @cached_property
    def _memo(self) -> dict[bytes, float]:
        return {}

    def step_us(self, faults: Sequence[Fault]) -> float:
        """The step with these faults beside those of the engine, us; infinite when ranks are cut off."""
        stretch, usual = self._usual
        try:
            flows = self.flows.with_faults((*self.flows.faults, *faults))
            factors = flows.stretches(self.ops) / stretch
            engines = [flows if each is self.flows else each for each in self.engine.engines]
            sends = self._sends(FusedEngine(engines, stack=self.engine.stack))
        except PartitionError:
            return np.inf
        key = factors.tobytes() + sends.onward_us.tobytes()
        if key not in self._memo:
            by_op = dict(zip(self.ops, factors.tolist(), strict=True))
            times = self._with([partial(stretched, factors=by_op)] * len(self.step.times_of))
            self._memo[key] = self._placed(times, self.step.sends.scaled(usual, sends))
        return self._memo[key]

    def straggling_us(self, slow: Sequence[str], slowdown: float) -> float:
        """The step where ``device 3`` or ``node 1`` compute so many times longer than the plan's own do, us."""
        step = self.step
        values = [{kind: int(at), "slowdown": slowdown} for kind, at in (each.split() for each in slow)]
        devices = slow_devices(values, step.plan.cluster)
        plan = replace(step.plan, slow_devices={**step.plan.slow_devices, **devices})
        usual, by_stage = (stage_slowdowns(each)[step.orders.routes[:, :, 0]].max(axis=0) for each in (step.plan, plan))
        factors = np.maximum(by_stage / usual, 1.0)
        key = b"slow" + factors.tobytes()
        if key not in self._memo:
            times = self._with([partial(slowed, slowdown=factor) for factor in factors.tolist()])
            self._memo[key] = self._placed(times, step.sends)
        return self._memo[key]

    def _with(self, changes: Sequence[Callable[[Costs], Costs]]) -> tuple[ChunkTimes, ...]:
        """The chunks with changed costs; those alike that change alike, and variants that share theirs, still do."""
        known: dict[tuple[int, str], ChunkTimes] = {}
        found = []
        for times, change in zip(self.step.times_of, changes, strict=True):
            key = id(times), repr(getattr(change, "keywords", {}).get("slowdown"))
            if key not in known:
                made = {id(costs): change(costs) for costs in times.costs.values()}
                costs = {variant: made[id(costs)] for variant, costs in times.costs.items()}
                known[key] = retime(times, costs, self.step.plan, self.step.device)
            found.append(known[key])
        return tuple(found)

    def _sends(self, engine: Engine) -> Sends:
        return send_times(self.step.orders, self.step.chunks, self.step.plan, engine)

    def _placed(self, times: tuple[ChunkTimes, ...], sends: Sends) -> float:
        step = self.step
        pipeline = place_tasks(step.orders, times, step.plan, sends)
        return replace(step, times_of=times, pipeline=pipeline, sends=sends).total_us


def stretched(costs: Costs, factors: Mapping[Op, float]) -> Costs:
    """The costs with communication so many times longer; the very same where nothing changes."""
    return longer(costs, np.array([1.0 if node.op is None else factors.get(node.op, 1.0) for node in costs.nodes]))


def study(state: State, engine: FusedEngine, settings: Mapping[str, Any]) -> Study:
    """Times of a workload over places of faults: ``{samples, count, seed, kinds, everywhere}``, the figures of a fault.

    Places are drawn, or with ``everywhere`` each is taken in turn. Without figures each fault halves its link's
    bandwidth; with ``straggler`` no link fails, but devices (or nodes, by ``kinds``) compute so many times longer.
    TopologyError for a setting that is not there.
    """
    asked = drawing(settings, "faults_study")
    degraded = [Degraded(step, engine) for step in state.steps]

    def whole(time_us: Callable[[Degraded], float]) -> float:
        return sum(time_us(each) * each.step.times for each in degraded)

    if asked.straggler is None:
        drawn = asked.among(places(degraded[0].flows.topology, asked.kinds))
        faults = [[replace(asked.like, where=place) for place in failed] for failed in drawn]
        times = [whole(lambda each, failed=failed: each.step_us(failed)) for failed in faults]  # type: ignore[misc]
    else:
        drawn = asked.among(_slow_places(state.plan.cluster, asked.kinds))
        slowdown = float(asked.straggler)
        times = [whole(lambda each, slow=slow: each.straggling_us(slow, slowdown)) for slow in drawn]  # type: ignore[misc]
    return Study(state.total_us, tuple(map(tuple, drawn)), np.array(times, dtype=np.float64))


def _slow_places(cluster: Cluster, kinds: Sequence[str]) -> list[str]:
    """Devices that may be slow, or nodes."""
    counts = {"device": cluster.devices, "node": cluster.nodes}
    return [f"{kind} {i}" for kind in kinds or ("device",) for i in range(counts[kind])]

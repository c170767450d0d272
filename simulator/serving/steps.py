"""What simulates the steps of a replica, and the KV memory that its engine finds beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...models.power import capped
from ..question.requests import plan_of
from ..simulate import all_simulated
from ..step.build import engine_of
from ..trace.context import long_context
from ..trace.models import resolve
from .kv_memory import Overheads, kv_budget

if TYPE_CHECKING:
    from ...datasets.devices import Device
    from ..engines import Engine
    from ..engines.bench import Bench
    from ..question.plan import Plan
    from ..question.requests import SimulateRequest
    from ..question.work import Work
    from ..step.state import State
    from .between import Simulate
    from .engines import KvRule
    from .kv import KvBudget


@dataclass(frozen=True)
class ReplicaSteps:
    """A model by its ``config`` (that of its language model), laid out by a ``plan`` on a device. ``simulate_all``
    simulates steps of it; ``kernels`` are the engines that answer for its kernels."""

    config: Mapping[str, Any]
    plan: Plan
    device: Device
    simulate_all: Simulate
    kernels: Engine

    def simulate(self, work: Work) -> State:
        """A step of it; the errors of simulating."""
        return self.simulate_all([work])[0]

    def kv_budget(
        self, rule: KvRule, max_tokens: int = 8192, learned: Overheads | None = None, sequences: int = 256
    ) -> KvBudget:
        """The KV memory of the replica (of one attention-DP rank) under an engine's rule.

        ``learned`` takes the place of what is simulated, figure by figure. KvError where nothing is left; the errors of
        simulating.
        """
        total, long = self.device.memory_gib, long_context(self.config)
        return kv_budget(self.simulate, total, rule, self.plan.parallel, max_tokens, learned, sequences, long)


def without_prompt_issue(plan: Plan) -> Plan:
    """The plan whose steps are those of tables: the host's time for prompts is added to whole iterations."""
    without = [*plan.settings.without, "prompt_issue"]
    return replace(plan, options={**plan.options, "without": without})


def steps_of(request: SimulateRequest, bench: Bench) -> ReplicaSteps:
    """The steps of a request's model, layout, framework and device. The errors of what it names."""
    device = capped(bench.device(request.device, request.cluster), request.power_cap_w)
    plan = plan_of(request, device)
    engine = bench.engine_with_links(device, request.cluster, request.network, plan)

    bare_plan = without_prompt_issue(plan)

    def simulate(works: Sequence[Work]) -> list[State]:
        steps = [replace(work, expert_load=request.work.expert_load, cache="static") for work in works]
        return all_simulated(request.model, steps, bare_plan, device, engine, bench.graphs)

    return ReplicaSteps(resolve(request.model).language, plan, device, simulate, engine_of(plan.stack, engine))

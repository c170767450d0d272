"""What simulates the steps of a replica, and the KV memory that its engine finds beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...models.power import capped
from ..question.requests import plan_of
from ..simulate import all_simulated, laid_out_or_else
from ..step.build import LaidOut, engine_of
from ..trace.context import LONG, long_context
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
    simulates steps of it, ``lay_out`` says of one what it needs of memory; ``kernels`` are the engines that answer for
    its kernels."""

    config: Mapping[str, Any]
    plan: Plan
    device: Device
    simulate_all: Simulate
    lay_out: Callable[[Work], LaidOut]
    kernels: Engine

    def simulate(self, work: Work) -> State:
        """A step of it; the errors of simulating."""
        return self.simulate_all([work])[0]

    def kv_budget(
        self,
        rule: KvRule,
        max_tokens: int = 8192,
        learned: Overheads | None = None,
        sequences: int = 256,
        cached: float = LONG,
    ) -> KvBudget:
        """The KV memory of the replica (of one attention-DP rank) under an engine's rule, for sequences that have so
        many tokens ``cached`` on average.

        ``learned`` takes the place of what is simulated, figure by figure. KvError where nothing is left; the errors of
        simulating.
        """
        total, long = self.device.memory_gib, long_context(self.config)
        usual = max(1, min(round(cached), long))
        share = rule.window_share.get(str(self.config.get("model_type")), 1.0)
        parallel = self.plan.parallel
        return kv_budget(self.lay_out, total, rule, parallel, max_tokens, learned, sequences, long, usual, share)


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

    def served(work: Work) -> Work:
        return replace(work, expert_load=request.work.expert_load, cache="static")

    def simulate(works: Sequence[Work]) -> list[State]:
        return all_simulated(request.model, list(map(served, works)), bare_plan, device, engine, bench.graphs)

    def lay_out(work: Work) -> LaidOut:
        return laid_out_or_else(request.model, served(work), bare_plan, device, bench.graphs)

    config, kernels = resolve(request.model).language, engine_of(plan.stack, engine)
    return ReplicaSteps(config, plan, device, simulate, lay_out, kernels)

"""The KV memory of a request's replica: its steps simulated, its engine's rule applied (:mod:`.kv_memory`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..question.requests import plan_of
from ..question.work import Work
from ..simulate import simulated
from ..step.state import State
from ..trace.models import resolve
from .context import long_context
from .engines import KvRule
from .kv import KvBudget
from .kv_memory import Overheads, kv_budget

if TYPE_CHECKING:
    from ..question.requests import SimulateRequest
    from .bench import ServingBench


def budget(
    request: SimulateRequest,
    bench: ServingBench,
    rule: KvRule,
    max_tokens: int = 8192,
    learned: Overheads | None = None,
    sequences: int = 256,
) -> KvBudget:
    """The KV memory of a replica (of one attention-DP rank) under an engine's rule.

    ``learned`` takes the place of what is simulated, figure by figure. KvError where nothing is left; the errors of
    simulating.
    """
    device = bench.device(request.device, request.cluster)
    plan = plan_of(request, device)
    engine = bench.engine_with_links(device, request.cluster, request.network, plan)

    def state(work: Work) -> State:
        return simulated(request.model, work, plan, device, engine, bench.graphs)

    long = long_context(resolve(request.model).config or {})
    return kv_budget(state, device.memory_gib, rule, plan.parallel, max_tokens, learned, sequences, long)

"""The steps that somebody plans, as what a campaign is to measure for them: ``steps=["workload=train model=…"]``.

Each of ``steps`` is what would follow ``opcast simulate``, and is read as that verb reads it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..datasets.ops import KINDS, Op
from .composing import as_override, compose, quoted
from .show import BadInputError

if TYPE_CHECKING:
    from ..simulator.question.requests import SimulateRequest
    from ..simulator.workbench import Workbench

SHARED = ("home", "store", "predictors", "graphs")


def request_of(step: str, config: Mapping[str, Any]) -> SimulateRequest:
    """The request of one step, with the campaign's own folders. The errors of `opcast simulate`."""
    from . import resolve, simulate

    words = shlex.split(step)
    folders = [
        f"{name}={quoted(str(config[name]))}" for name in SHARED if not any(w.startswith(f"{name}=") for w in words)
    ]
    return resolve.request_of(
        "simulate", compose("simulate", [*folders, *(as_override(simulate, word) for word in words)])
    )


def answer_step(bench: Workbench, step: str, config: Mapping[str, Any]) -> Any:
    """The answer to one step. BadInputError that names the step, for what `opcast simulate` refuses."""
    try:
        return bench.answered(request_of(step, config))
    except ValueError as error:
        raise BadInputError(f"steps: `{step}`: {error}") from None


def planned_steps(config: Mapping[str, Any]) -> list[str]:
    """The words of ``steps``. BadInputError where they are no list of texts."""
    steps = config["steps"] or []
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise BadInputError(f"steps={steps} must be a list of what follows `opcast simulate`, each in quotes")
    return steps


def shares_of(config: Mapping[str, Any]) -> dict[Op, float]:
    """Share of the time of ``steps`` by op, collectives included; they are simulated with what is known so far."""
    from ..simulator.report.needs import needs, shares
    from . import resolve

    steps = planned_steps(config)
    bench = resolve.bench({**config, "engine": {"order": ["measured", "learned", "transfer", "network", "analytical"]}})
    reports = []
    for step in steps:
        report: Any = answer_step(bench, step, config).report
        if getattr(report, "state", None) is None:
            raise BadInputError(f"steps: `{step}` is no step of a model")
        reports.append(needs(report.state))
    return shares(reports)


def cases_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ops of ``steps`` as a campaign's explicit ops, each on the kernels that the step's stack runs."""
    from ..harness.coverage import to_measure, ways
    from ..simulator.engines.chain import caller_of
    from ..simulator.report.needs import needs
    from . import resolve

    bench = resolve.bench({**config, "engine": {"order": ["measured", "learned", "transfer", "network", "analytical"]}})
    cases: dict[tuple[Op, str], None] = {}
    for step in config["steps"]:
        answered: Any = answer_step(bench, step, config)
        state = answered.report.state
        caller = caller_of(state.plan.stack, answered.device)
        for need in needs(state):
            ways_of_op = to_measure(ways(need.op, answered.device, caller))
            cases.update(dict.fromkeys((way.op, way.backend) for way in ways_of_op))
    warm = {op: {"cache": "warm"} if KINDS[op.kind].collective else {} for op, _ in cases}
    return [{**op.to_dict(), "backend": backend, **warm[op]} for op, backend in cases]


def computing_ops(ops: Mapping[Op, float]) -> dict[Op, float]:
    """Those ops that one device runs by itself."""
    return {
        op: share
        for op, share in ops.items()
        if not KINDS[op.kind].collective and KINDS[op.kind].family != "expert_parallel"
    }

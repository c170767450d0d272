"""What a reader of a report should know: a batch that was chosen for them, a device that waits for its host."""

from __future__ import annotations

import math

from ..question.calibration import relative_spread
from ..question.work import Work
from ..step.state import State
from ..trace.workload import load_text, parse_load, skew_of
from .answer import InferenceReport, StepReport
from .parts import family_shares
from .view import time_text

MORE_EXPERTS = 1.15  # times those that tokens would choose by chance, from which it is worth a line
HOST_BOUND_SHARE = 1 / 3  # part of the time that the device waits for launches from which it is worth a line


def notes(report: StepReport | InferenceReport, request: Work, state: State) -> tuple[str, ...]:
    """The notes of a report beside those of its graph; ``request`` is the work as the user gave it."""
    lines = []
    work, plan = state.work, state.plan
    if work.kind == "train" and request.global_batch is None and work.sequences > work.micro_batch:
        lines.append(
            f"workload.global_batch={work.sequences}, as none was given: {plan.micro_batches} micro-batches of "
            f"{work.micro_batch} for each of {plan.dp} data ranks"
        )
    lines += _uncalibrated(state)
    lines += _experts(state)
    host_s = report.breakdown.host_s
    step_s, _, _ = report.times_s
    if host_s > HOST_BOUND_SHARE * step_s and not state.device.synchronous:
        what = "step" if isinstance(report, StepReport) else "whole"
        lines.append(
            f"for {host_s / step_s:.0%} of the time the device waits for the host that {_launches(state)}: "
            f"with CUDA graphs the {what} would take about {time_text(1e6 * (step_s - host_s))} "
            f"instead of {time_text(1e6 * step_s)}"
        )
    return tuple(lines)


def _launches(state: State) -> str:
    """How the host launches what the device waits for."""
    if not any(execution.costs.outside_graphs for execution in state.executions()):
        return "launches operators one by one"
    each_us = state.plan.prompt_issue_us
    return (
        f"launches the kernels of a prompt one by one, {each_us:g} µs each (stack.prompt_issue_us), as "
        f"{state.plan.stack.name} does unless it is asked for graphs of prompts, too (options.cuda_graph=true)"
    )


def _experts(state: State) -> list[str]:
    """A line where a load of experts is not read, or where an even one reads clearly more weights than chance would.

    Of so many experts a token chooses ``topk``; one that no token chose is not read.
    """
    load = load_text(state.plan.settings.expert_load) or state.work.routing
    executed = (each for step in state.steps for stage in step.speaking for each in step.executions(stage))
    ops = [node.op for each in executed for node in each.costs.nodes if node.op is not None]
    if state.work.kind == "train":
        experts = any(op.kind in ("fused_moe", "grouped_gemm") for op in ops)
        if experts and skew_of(load):
            return [
                f"expert_load={load} is read in inference alone: training loads experts evenly, or by zipf:EXPONENT"
            ]
        return []
    kernels = [op for op in ops if op.kind == "fused_moe"]
    if parse_load(load)[0] in ("zipf", "shares"):
        if any(op.ep == 1 for op in kernels):
            return [
                f"expert_load={load} is read where ranks share experts out (parallel.ep): on one rank they are loaded "
                "evenly, or by power_law:EXPONENT"
            ]
        return []
    for op in () if skew_of(load) else kernels:
        even = min(op.experts, op.tokens * op.topk)
        by_chance = op.experts * (1 - (1 - op.topk / op.experts) ** op.tokens)
        if even > MORE_EXPERTS * by_chance:
            return [
                f"{op.tokens:,} tokens are taken to load experts evenly, so that they read {even} of {op.experts} in a "
                f"layer: by chance they would read {by_chance:.0f}, by a trained router fewer "
                "(workload.expert_load=power_law:1.2)"
            ]
    return []


UNCALIBRATED_TEXTS = {
    "kind": "of {framework} on this chip that does such steps, but others of both",
    "pair": "of {framework} on this chip, but of both apart",
    "chip": "on this chip, but of {framework} on others",
    "framework": "of {framework}, but of others on this chip",
    "both": "of {framework} or on this chip",
}


def _uncalibrated(state: State) -> list[str]:
    """A line where no run is known of what was asked, with what the answer rests on."""
    for calibration in state.plan.calibrated.values():
        if calibration.unknown and calibration.width is not None:
            gap = UNCALIBRATED_TEXTS[calibration.unknown].format(framework=state.plan.stack.name)
            relative = relative_spread(calibration.spread, family_shares(state)) if calibration.spread else 1.0
            width = f"{math.expm1(calibration.width * relative):.0%}"
            line = f"no published run is known {gap}: 90 % of such answers are within {width}"
            adds = calibration.unknown in ("chip", "both")
            return [line + ", and what nobody measured of the ops adds to that" * adds]
    return []

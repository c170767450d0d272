"""What a reader of a report should know: a batch that was chosen for them, a device that waits for its host."""

from __future__ import annotations

import math

from ..question.work import Work
from ..step.state import State
from .answer import InferenceReport, StepReport

HOST_BOUND = 1 / 3  # part of the time that the device waits for launches from which it is worth a line


def notes(report: StepReport | InferenceReport, asked: Work, state: State) -> tuple[str, ...]:
    """The notes of a report beside those of its graph; ``asked`` is the work as the user gave it."""
    made = []
    work, plan = state.work, state.plan
    if work.kind == "train" and asked.global_batch is None and work.sequences > work.micro_batch:
        made.append(
            f"workload.global_batch={work.sequences}, as none was given: {plan.micro_batches} micro-batches of "
            f"{work.micro_batch} for each of {plan.dp} data ranks"
        )
    made += _uncalibrated(state)
    host_s = report.breakdown.host_s
    step_s = report.step_time_s if isinstance(report, StepReport) else report.e2e_ms / 1e3
    if host_s > HOST_BOUND * step_s and not state.device.synchronous:
        what = "step" if isinstance(report, StepReport) else "whole"
        made.append(
            f"for {host_s / step_s:.0%} of the time the device waits for the host that launches operators one by one: "
            f"with CUDA graphs the {what} would take about {spelled(step_s - host_s)} instead of {spelled(step_s)}"
        )
    return tuple(made)


MISSING = {
    "pair": "of {framework} on this chip, but of both apart",
    "chip": "on this chip, but of {framework} on others",
    "framework": "of {framework}, but of others on this chip",
    "both": "of {framework} or on this chip",
}


def _uncalibrated(state: State) -> list[str]:
    """A line where no run is known of what was asked, with what the answer rests on."""
    for known in state.plan.calibrated.values():
        if known.unknown and known.width is not None:
            what = MISSING[known.unknown].format(framework=state.plan.stack.name)
            width = f"{math.expm1(known.width):.0%}"
            said = f"no published run is known {what}: 90 % of such answers are within {width}"
            return [f"{said}, and what nobody measured of the ops adds to that"]
    return []


def spelled(seconds: float) -> str:
    """A duration in the unit that a reader would choose."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"

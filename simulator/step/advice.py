"""Advice that was tried: what to take instead of a degree that does not divide, and what makes a step fit.

Each check knows its own constraint alone, and what it would pass another may refuse. So a proposal is laid out like the
question itself, by every check and the whole walk over memory, before it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ...datasets.devices import Device
from ...datasets.own_errors import refusal
from ..memory.advice import MemoryChange, degrees_text, propose_changes, replace_degrees
from ..memory.breakdown import Memory
from ..question.errors import DegreeError, PlanError
from ..question.plan import Plan
from ..question.work import Work

Attempt = Callable[[Work, Plan], float]  # GiB of the fullest device of a question
NEAR = 0.7  # of what is too much: a change that saves less by its estimate is not tried alone
MOST_TRIED = 12


def other_degree(error: DegreeError, work: Work, plan: Plan, device: Device, attempt: Attempt) -> PlanError:
    """The error with the nearest value that every check passes and that fits, else the nearest that they pass."""
    devices = plan.cluster.devices
    able = (d for d in range(1, devices + 1) if devices % d == 0 and d != error.value)
    passed = []
    for degree in sorted(able, key=lambda d: (abs(d - error.value), d)):
        changed = replace_degrees(plan, **{error.name: degree}) if error.name != "dp" else _with_data(plan, degree)
        peak = _peak(attempt, work, changed)
        if peak is None:
            continue
        settings = degrees_text(changed, error.name) if error.name != "dp" else f"parallel.dp={degree}"
        if peak <= device.memory_gib:
            return PlanError(f"{error.why}; take {settings}")
        passed.append(f"{settings}, of which a device needs {peak:.1f} GiB and has {device.memory_gib:g}")
    if passed:
        return PlanError(f"{error.why}; take {passed[0]}")
    return PlanError(f"{error.why}; with the other settings as they are no parallel.{error.name} goes")


def fitting(memory: Memory, work: Work, plan: Plan, device: Device, attempt: Attempt) -> str:
    """What makes a step fit: the first change that is enough alone, else several together, each tried."""
    over = memory.peak_gib - device.memory_gib
    much = f"{over:.1f} GiB too much for {device.memory_gib:g} GiB"
    proposed = list(propose_changes(memory, work, plan, device))
    able = [change for change in proposed if change.saves_gib >= NEAR * over]
    for change in able[:MOST_TRIED]:
        peak = _peak(attempt, change.work, change.plan)
        if peak is not None and peak <= device.memory_gib:
            return f"{much}; shrink {change.spent}: {change.settings}"
    return f"{much}; {_together(memory.peak_gib, proposed, work, plan, device, attempt)}"


def _together(
    peak_gib: float, proposed: Iterable[MemoryChange], work: Work, plan: Plan, device: Device, attempt: Attempt
) -> str:
    """Changes that are enough together, one added to the other where it lowers the peak; what is left if none are."""
    combined: dict[str, str] = {}
    least = peak_gib
    for change in [change for change in proposed if not change.alone][:MOST_TRIED]:
        both = _merge_change(work, plan, change)
        peak = _peak(attempt, *both)
        if peak is None or peak >= least:
            continue
        least, (work, plan) = peak, both
        combined[change.settings.partition("=")[0]] = change.settings
        if least <= device.memory_gib:
            return f"take {' and '.join(combined.values())}"
    if not combined:
        return "no single change that opcast tried is enough"
    return (
        f"with {' and '.join(combined.values())} it still needs {least:.1f} GiB: "
        "take more devices or a shorter sequence"
    )


def _merge_change(work: Work, plan: Plan, change: MemoryChange) -> tuple[Work, Plan]:
    """A question with one more change, of the settings that a change may have."""
    p, degrees = plan.parallel, change.plan.parallel
    degrees = replace(
        p,
        tp=max(p.tp, degrees.tp),
        pp=max(p.pp, degrees.pp),
        zero_stage=max(p.zero_stage, degrees.zero_stage),
        dp=degrees.dp,
    )
    merged = replace(
        plan,
        parallel=degrees,
        recompute="full" if "full" in (plan.recompute, change.plan.recompute) else plan.recompute,
        offload=tuple(dict.fromkeys((*plan.offload, *change.plan.offload))),
        quantization=plan.quantization or change.plan.quantization,
        kv_dtype=plan.kv_dtype or change.plan.kv_dtype,
    )
    batches = {name: min(getattr(work, name), getattr(change.work, name)) for name in ("micro_batch", "batch")}
    return replace(work, **batches), merged


def _with_data(plan: Plan, ranks: int) -> Plan:
    return replace(plan, parallel=replace(plan.parallel, dp=ranks))


def _peak(attempt: Attempt, work: Work, plan: Plan) -> float | None:
    """What a question needs, or None where a check refuses it."""
    try:
        return attempt(work, plan)
    except ValueError as error:
        refusal(error)
        return None

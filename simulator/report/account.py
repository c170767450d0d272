"""From the state of a workload to its report: times, rates, memory, breakdown, provenance, interval.

Training, prefill, decode and a generation are added up alike, over the phases that the stages ran which speak for the
step (:attr:`..step.state.Step.speaking`); the parts of a breakdown add up to the whole.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...models.choice import LAW, NETWORK, OWN_ROWS
from ..engines import Witness
from ..passes.verify import tensor_flops
from ..question.calibration import EXPERTS, StepCalibration, relative_spread
from ..question.plan import Plan
from ..question.work import COVERAGE, tokens_of
from ..step.state import Executed, State, Step
from ..timing.phases import replays_graph, select_nodes
from . import distribution, trust
from .answer import InferenceReport, StepReport
from .energy import cost, energy
from .ledger import Ledger, ledger_of
from .parts import family_shares
from .step import Breakdown, Knowledge, OpShare, StageShare

FORMULA_SOURCES = (NETWORK, LAW, "bytes")  # sources that are no measurements of an op
NOTE_SHARE = 0.01  # of the kernels' time: a smaller share of another machine is not worth a note
MIN_BOUND_SHARE = 1e-3  # of the total: lower bounds are not lower
ROUNDING_SHARE = 1e-9  # of the total: smaller rests are rounding of float sums


def report_of(state: State, started: float, network: Mapping[str, Any]) -> StepReport | InferenceReport:
    """The report of a workload; ``started`` is when the question came (``perf_counter``), ``network`` what links do."""
    executions = list(state.executions())
    ledger = ledger_of(executions)
    low_us, high_us = widen_for_host(interval(state, ledger), state, executions)
    fields = common_fields(state, executions, ledger, network)
    if state.work.kind == "train":
        step = state.steps[0]
        seconds, low, high = state.total_us * 1e-6, low_us * 1e-6, high_us * 1e-6
        return StepReport(
            step_time_s=seconds,
            low_s=low,
            high_s=high,
            quantiles=distribution.quantiles(seconds, low, high, COVERAGE),
            stages=tuple(stage_shares(step)),
            wall_time_s=time.perf_counter() - started,
            **fields,
        )
    decodes = [step for step in state.steps if step.kind == "decode"]
    count = sum(step.times for step in decodes)
    first, ms = state.steps[0], state.total_us * 1e-3
    return InferenceReport(
        ttft_ms=first.total_us * 1e-3 if first.kind == "prefill" else None,
        tpot_ms=sum(step.total_us * step.times for step in decodes) / count * 1e-3 if count else None,
        e2e_ms=ms,
        low_ms=low_us * 1e-3,
        high_ms=high_us * 1e-3,
        quantiles=distribution.quantiles(ms, low_us * 1e-3, high_us * 1e-3, COVERAGE),
        wall_time_s=time.perf_counter() - started,
        **fields,
    )


def interval(state: State, ledger: Ledger) -> tuple[float, float]:
    """Bounds of the whole in us: what known runs were off by, and what is not known of ops that nobody measured.

    Errors of ops are in those of runs on the same chip; on one that no run is known of, those of ops that nobody
    measured there come on top. Without a calibration the intervals of all ops count.
    """
    total_us = state.total_us
    width = calibrated_width(state, any(kind in EXPERTS for kind in ledger.kinds()))
    if width is None or not total_us:
        return ledger.interval(total_us, state.device.synchronous)
    if not any(calibration.unknown in ("chip", "both") for calibration in state.plan.calibrated.values()):
        return total_us * math.exp(-width), total_us * math.exp(width)
    answers = zip(ledger.engine.tolist(), ledger.inside.tolist(), strict=True)
    is_unmeasured = np.array([trust.source(*answer) in trust.UNMEASURED_SOURCES for answer in answers])
    low_factors, high_factors = (np.where(is_unmeasured, bound, 1.0) for bound in (ledger.low, ledger.high))
    ops_alone = replace(ledger, low=low_factors, high=high_factors)
    low, high = ops_alone.interval(total_us, state.device.synchronous)
    below, above = (math.log(total_us / max(low, total_us * MIN_BOUND_SHARE)), math.log(high / total_us))
    return total_us * math.exp(-math.hypot(width, below)), total_us * math.exp(math.hypot(width, above))


def widen_for_host(bounds: tuple[float, float], state: State, executions: Sequence[Executed]) -> tuple[float, float]:
    """Bounds of the whole in us, widened by what is not known of the host's time.

    A slower host ends its phases no sooner than it has issued them; a faster one takes from what they wait for it.
    Errors of the host and of kernels do not go together.
    """
    total_us = state.total_us
    speaking_us = sum(execution.time.total_us * execution.times for execution in executions)
    issued = [execution for execution in executions if not replays_graph(execution.costs, state.plan)]
    if not issued or not total_us or not speaking_us:
        return bounds
    above = below = 0.0
    for execution in issued:
        costs, nodes = execution.costs, select_nodes(execution.costs, execution.phase)
        issue_us = float(costs.host_us[nodes] @ costs.repeats[nodes])
        above += execution.times * max(issue_us * costs.host_high - max(issue_us, execution.time.total_us), 0.0)
        below += execution.times * execution.time.host_us * (1.0 - costs.host_low)
    low, high = (
        math.log(total_us / max(bounds[0], total_us * MIN_BOUND_SHARE)),
        math.log(max(bounds[1] / total_us, 1.0)),
    )
    slower, faster = (math.log(1.0 + above / speaking_us), -math.log(max(1.0 - below / speaking_us, MIN_BOUND_SHARE)))
    return total_us * math.exp(-math.hypot(low, faster)), total_us * math.exp(math.hypot(high, slower))


def calibrated_width(state: State, experts: bool) -> float | None:
    """What 90 % of the errors of known runs are within (ln, each way), over the kinds of step; None without runs."""
    total = 0.0
    for step in state.steps:
        calibration = state.plan.calibrated.get(step.kind, StepCalibration())
        width = calibration.width_experts if experts else calibration.width
        if width is None:
            return None
        total += width * step.total_us * step.times
    spread = next((calibration.spread for calibration in state.plan.calibrated.values()), {})
    relative = relative_spread(spread, family_shares(state)) if spread else 1.0
    return total / max(state.total_us, ROUNDING_SHARE) * relative


def common_fields(
    state: State, executions: Sequence[Executed], ledger: Ledger, network: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that every report has."""
    plan, device, memory = state.plan, state.device, state.memory
    seconds, devices = state.total_us * 1e-6, plan.cluster.devices
    time_parts = breakdown(state, executions, ledger)
    energy_use = energy(device, devices, ledger.drawn_energy(state, speaking_stage_count(state)), seconds)
    shares = shares_of_total(ledger.by_source())
    step_cost = cost(plan.cluster.price_per_device_hour, devices, seconds)
    return {
        "model": state.steps[0].graph.name,
        "device": device.id,
        "devices": devices,
        "parallel": degrees(plan),
        "precision": plan.quantization or plan.precision,
        "workload": state.work.kind,
        "coverage": COVERAGE,
        "memory": memory,
        "fits": memory.peak_gib <= device.memory_gib,
        "p_oom": trust.probability_oom(memory.peak_gib, device.memory_gib, plan.stack.id, plan.stack.framework),
        "breakdown": time_parts,
        "provenance": provenance(ledger, state.total_us, time_parts.host_s),
        "trust": trust.shares(ledger.answers()),
        "sources": shares,
        "measure_next": trust.missing_measurements(ledger.questions()),
        "power_w": energy_use.power_w,
        "energy_j": energy_use.energy_j,
        "energy_measured": energy_use.measured,
        "cost": step_cost,
        "cost_per_million_tokens": None if step_cost is None else step_cost / tokens(state) * 1e6,
        "unmapped": ledger.unmapped(),
        "notes": (
            *plan.notes,
            *dict.fromkeys(note for step in state.steps for note in step.graph.notes),
            *mixture_notes(shares),
        ),
        "network": network,
        "stack": plan.stack.name,
        "state": state,
        **rates(state, seconds),
    }


def degrees(plan: Plan) -> dict[str, Any]:
    """The layout as a user writes it, with the data-parallel degree that it comes to."""
    return {**dataclasses.asdict(plan.parallel), "dp": plan.dp, "micro_batches": plan.micro_batches}


def tokens(state: State) -> int:
    """Tokens that all devices process (training, prefill) or produce (decode, generate)."""
    work = state.work
    return tokens_of(work) * (1 if work.kind == "train" else state.plan.dp)


def speaking_stage_count(state: State) -> int:
    """How many stages' times the ledger holds."""
    return len(state.steps[0].speaking)


def rates(state: State, seconds: float) -> dict[str, Any]:
    """Throughput and utilisation per device. HFU divides what devices execute, MFU what the model defines.

    MFU counts the tokens of all ranks alike, so that a busy rank of an uneven load does not raise it.
    """
    plan, devices = state.plan, state.plan.cluster.devices
    copies = plan.micro_batches * plan.dp
    model = sum(step.graph.model_flops * step.times for step in state.steps) * copies / devices
    stages = sum(tensor_flops(chunk.graph) * step.times for step in state.steps for chunk in step.chunks)
    hardware = stages * plan.micro_batches / plan.parallel.pp
    peak_tflops = state.device.tensor_rate(plan.quantization or plan.precision)
    return {
        "tokens_per_s_per_gpu": tokens(state) / seconds / devices,
        "tflops_per_gpu": model / seconds / 1e12,
        "mfu": model / seconds / 1e12 / peak_tflops,
        "hfu": hardware / seconds / 1e12 / peak_tflops,
    }


def breakdown(state: State, executions: Sequence[Executed], ledger: Ledger) -> Breakdown:
    """Where the time goes. Kernels that run beside others appear in ``by_op`` with their own time.

    What a schedule runs side by side (pairs of DualPipe, gradients reduced late) hides communication first, then
    computing. Where several stages speak for a step and work at the same time, all parts shrink alike.
    """
    exposed: dict[str, float] = {}
    compute = optimizer = host = bubble = 0.0
    for execution in executions:
        host += execution.time.host_us * execution.times
        if execution.phase == "optimizer":
            optimizer += execution.time.compute_us * execution.times
        else:
            compute += execution.time.compute_us * execution.times
        for group, us in execution.time.exposed_us.items():
            exposed[group] = exposed.get(group, 0.0) + us * execution.times
    saved_us, waiting_us = sum(overlap_saved_us(step) * step.times for step in state.steps), sum(exposed.values())
    waited_share = 1.0 - min(saved_us, waiting_us) / waiting_us if waiting_us else 1.0
    exposed = {group: us * waited_share for group, us in exposed.items()}
    compute -= max(saved_us - waiting_us, 0.0)
    for step in state.steps:
        host += step.overhead_us * step.times
        exposed["pp"] = exposed.get("pp", 0.0) + sending_us(step) * step.times
        bubble += float(step.pipeline.bubble_us[step.busiest]) * step.times if step.trains else 0.0
    accounted_us = compute + optimizer + host + bubble + sum(exposed.values())
    factor = min(state.total_us / max(accounted_us, 1e-9), 1.0)
    rest_us = state.total_us - accounted_us  # waiting for a slower optimizer, or for other stages
    bubble = bubble * factor + (rest_us if rest_us > ROUNDING_SHARE * state.total_us else 0.0)
    return Breakdown(
        compute_s=compute * factor * 1e-6,
        exposed_comm_s=sum(exposed.values()) * factor * 1e-6,
        bubble_s=bubble * 1e-6,
        optimizer_s=optimizer * factor * 1e-6,
        host_s=host * factor * 1e-6,
        by_op=by_op(ledger, state.total_us),
        by_phase=by_phase(state, ledger),
        by_parallelism={group: us * factor * 1e-6 for group, us in sorted(exposed.items()) if us > 0},
    )


def overlap_saved_us(step: Step) -> float:
    """Microseconds that the stages which speak for a step save by running one task beside another."""
    saved_us = 0.0
    for stage in step.speaking:
        phases = [e for e in step.executions(stage) if e.phase in ("forward", "backward")]
        alone_us = sum(e.time.total_us * e.times for e in phases) / step.times
        saved_us += max(alone_us - float(step.pipeline.busy_us[stage]), 0.0)
    return saved_us


def sending_us(step: Step) -> float:
    """Microseconds of transfers between stages that the stages which speak for a step wait for."""
    if step.trains:
        return float(step.pipeline.sending_us[step.busiest])
    sends = step.sends.onward_us.reshape(step.orders.stages, -1).mean(axis=1)
    return float(sends.sum()) * step.orders.micro_batches


def by_op(ledger: Ledger, total_us: float) -> tuple[OpShare, ...]:
    """Time by kind of op, most first."""
    rows = [
        OpShare(kind, round(count), us * 1e-6, us / total_us, engines, knowledge_of(witnesses))
        for kind, count, us, engines, witnesses in ledger.by_kind()
    ]
    return tuple(sorted(rows, key=lambda share: -share.time_s))


def knowledge_of(witnesses: Mapping[Witness, float]) -> tuple[Knowledge, ...]:
    """Whose measurements answered, most of the time first; ``witnesses`` are microseconds."""
    ordered = sorted(witnesses.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Knowledge(who.clause, who.source, who.predictor, us * 1e-6) for who, us in ordered)


def shares_of_total(time_us_by_name: Mapping[str, float]) -> dict[str, float]:
    """Microseconds by name as shares of their sum, most first."""
    total_us = sum(time_us_by_name.values()) or 1.0
    return {
        name: time_us / total_us
        for name, time_us in sorted(time_us_by_name.items(), key=lambda item: (-item[1], item[0]))
    }


def mixture_notes(shares: Mapping[str, float]) -> tuple[str, ...]:
    """A note where steps are put together of own rows and of other people's tables; none elsewhere."""
    own_share = sum(share for name, share in shares.items() if name.endswith(OWN_ROWS))
    noted = {name: share for name, share in shares.items() if not name.endswith(OWN_ROWS) and share >= NOTE_SHARE}
    other_sources = {name: share for name, share in noted.items() if name not in FORMULA_SOURCES}
    if own_share < NOTE_SHARE or not other_sources:
        return ()
    sources_text = ", ".join(f"{share:.0%} by {name}" for name, share in other_sources.items())
    return (
        f"several machines speak for this step: {own_share:.0%} of its kernels' time by your own rows, {sources_text}",
    )


def by_phase(state: State, ledger: Ledger) -> dict[str, float]:
    """Seconds of kernels by phase of a training step; of inference those of the kinds of step."""
    if state.work.kind == "train":
        return {phase: us * 1e-6 for phase, us in ledger.by_phase().items()}
    kinds = dict.fromkeys(step.kind for step in state.steps)
    return {kind: sum(s.total_us * s.times for s in state.steps if s.kind == kind) * 1e-6 for kind in kinds}


def provenance(ledger: Ledger, total_us: float, host_s: float) -> dict[str, float]:
    """Share of the time by who answered; ``host`` is waiting for the host."""
    shares = ledger.by_engine()
    kernels, host = sum(shares.values()) or 1.0, min(host_s * 1e6 / total_us, 1.0)
    share_of_time = {name: us / kernels * (1.0 - host) for name, us in shares.items()} | {"host": host}
    return dict(sorted(share_of_time.items(), key=lambda item: -item[1]))


def stage_shares(step: Step) -> list[StageShare]:
    """What every stage does with the step."""
    return [
        StageShare(
            stage=stage,
            layers=sum(step.chunks[chunk].layers for chunk in step.parts(stage)),
            busy_s=float(step.pipeline.busy_us[stage]) * 1e-6,
            bubble_s=float(step.pipeline.bubble_us[stage]) * 1e-6,
            parameters=sum(step.chunks[chunk].graph.parameters for chunk in step.parts(stage)),
        )
        for stage in range(step.orders.stages)
    ]

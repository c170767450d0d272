"""From a request about a job to its report: the time of its steps, its checkpoints, its lives."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.clusters import Cluster, one_device
from ...datasets.counts import counted
from ...datasets.devices import Device
from ...models import clocks
from ..question.canonical import RequestError
from ..question.requests import SimulateRequest
from ..report.answer import StepReport
from ..report.distribution import factors
from ..search.request import SearchRequest, request_of, set_up
from .answer import PlannedCheckpoints, PlanReport, spread_of
from .bills import bills, energy_notes, price_of
from .checkpoints import CheckpointCost, best_interval_s, cost_of, daly_s, state_gb
from .failures import DAY_S, JobRates, drawn_events, mean_setbacks, rates_of, setback_factors
from .lives import JobLives, live
from .request import JobPhase, PlanRequest
from .schedule import JobTimeline, PhaseSteps, phase_steps, timeline

if TYPE_CHECKING:
    from ..engines.bench import Bench

FEW = 256  # lives that an interval of checkpoints is tried on
TRACED = 10  # lives of the picture
BINS = 40  # of the histogram
MOST_EXPECTED = 10_000  # events of a life without delays
MOST_SPARES = 20_000_000  # of all lives: their moments are kept in memory
# of the FLOPs of a step, where no step is simulated: two of six of a weight and token (Kaplan et al. 2020, arXiv
# 2001.08361, section 2.1)
FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True)
class TimedPhases:
    """The phases of a job with their steps' times, and the step that most of the time goes into."""

    phases: tuple[PhaseSteps, ...]
    report: StepReport | None
    step_s: float
    low_s: float
    high_s: float
    gpu_j: float | None  # joules of one GPU in all steps


def plan_job(request: PlanRequest, bench: Bench) -> PlanReport:
    """The report of a job. RequestError for one that cannot be, and the errors of a step."""
    started = time.perf_counter()
    notes: list[str] = []
    if request.layout == "search":
        request = replace(request, step=best_layout(request, bench, notes), layout="given")
    device = bench.device(request.step.device, request.step.cluster)
    cluster = request.step.cluster or one_device(device)
    timed = times_of(request, bench, device)
    size_gb = request.checkpoint.size_gb
    if size_gb is None:
        if timed.report is None:
            raise RequestError("a step that was measured says nothing of its checkpoint: give checkpoint.size_gb")
        size_gb = state_gb(timed.report)
    cost = cost_of(request.checkpoint, size_gb, cluster, device)
    rates = rates_of(request.failures, request.restart, request.slow, cluster)
    whole_s = sum(phase.steps * phase.step_s for phase in timed.phases)
    check_size(request, rates, timeline_of(request, timed, cost, whole_s, True))  # with one checkpoint, at its end
    interval, in_seconds, daly, best = interval_of(request, timed, cost, rates)
    job = timeline_of(request, timed, cost, interval, in_seconds)
    check_size(request, rates, job)
    lives = set_back(request, lived(request, job, timed, cost, rates, request.lives, traced=TRACED))
    report = report_of(request, timed, cost, rates, job, lives, cluster, device, (daly, best))
    wall_s = time.perf_counter() - started
    return replace(report, notes=(*notes, *report.notes), wall_time_s=wall_s)


def best_layout(request: PlanRequest, bench: Bench, notes: list[str]) -> SimulateRequest:
    """The step in the best layout of the space."""
    question = SearchRequest(base=request.step, space=request.space, objectives=("step_time",))
    searched = bench.search(question)
    if not searched.best:
        raise RequestError(f"no layout can run: {searched.notes[0]}")
    best = request_of(set_up(question), searched.best[0])
    degrees = best.parallel
    notes.append(
        f"the best of {counted(searched.evaluated, 'layout')}: tp={degrees.tp} pp={degrees.pp} vpp={degrees.vpp} "
        f"cp={degrees.cp} ep={degrees.ep} zero_stage={degrees.zero_stage} "
        f"micro_batch={best.work.micro_batch} recompute={best.recompute}"
    )
    return best


def times_of(request: PlanRequest, bench: Bench, device: Device) -> TimedPhases:
    """The phases with the time of a step in each: simulated, or as it was measured."""
    work = request.step.work
    if request.step_time_s is not None or (request.phases and all(phase.step_time_s for phase in request.phases)):
        return _known(request)
    main: Any = bench.simulate(request.step)
    sequences = main.state.work.sequences
    phases = phase_steps(request.phases, request.ramp, request.tokens, request.steps, work.seq_len, sequences)
    reports: dict[tuple[int, int], Any] = {(work.seq_len, sequences): main}
    batches = {(phase.seq_len, phase.sequences) for phase in phases}
    if request.ramp.start:
        batches = {(work.seq_len, request.ramp.start), (work.seq_len, sequences)}
    for seq_len, batch in sorted(batches - reports.keys()):
        changed = replace(work, seq_len=seq_len, global_batch=batch)
        reports[seq_len, batch] = bench.simulate(replace(request.step, work=changed))
    settings = request.phases or (JobPhase(),) * len(phases)
    timed = tuple(
        replace(phase, step_s=setting.step_time_s or _step_s(reports, phase))
        for phase, setting in zip(phases, settings, strict=True)
    )
    longest = max(timed, key=lambda phase: phase.steps * phase.step_s)
    report = reports.get((longest.seq_len, longest.sequences), main)
    joules = [_joules(reports, phase, report) for phase in timed]
    gpu_j = None if None in joules else float(sum(energy or 0.0 for energy in joules))
    if request.energy.gpu_w is not None:
        gpu_j = request.energy.gpu_w * sum(phase.steps * phase.step_s for phase in timed)
    return TimedPhases(timed, report, report.step_time_s, report.low_s, report.high_s, gpu_j)


def _known(request: PlanRequest) -> TimedPhases:
    """Phases whose steps were measured."""
    work, ramp = request.step.work, request.ramp
    if work.global_batch is None:
        raise RequestError("a step that was measured needs its batch: workload.global_batch=1024")
    phases = phase_steps(request.phases, ramp, request.tokens, request.steps, work.seq_len, work.global_batch)
    settings = request.phases if request.phases else (JobPhase(),) * len(phases)
    usual = request.step_time_s or 0.0
    timed = []
    for phase, setting in zip(phases, settings, strict=True):
        step_s = setting.step_time_s or usual
        if ramp.start and ramp.step_time_s:
            share = (phase.sequences - ramp.start) / (work.global_batch - ramp.start)
            step_s = ramp.step_time_s + share * (usual - ramp.step_time_s)
        timed.append(replace(phase, step_s=step_s))
    longest = max(timed, key=lambda phase: phase.steps * phase.step_s)
    watts = request.energy.gpu_w
    gpu_j = None if watts is None else watts * sum(phase.steps * phase.step_s for phase in timed)
    return TimedPhases(tuple(timed), None, longest.step_s, longest.step_s, longest.step_s, gpu_j)


def _step_s(reports: Mapping[tuple[int, int], StepReport], phase: PhaseSteps) -> float:
    """Seconds of a step: simulated, or of a batch between two, on the line between them (micro-batches follow each
    other, so that a step grows by as much with each)."""
    if (phase.seq_len, phase.sequences) in reports:
        return reports[phase.seq_len, phase.sequences].step_time_s
    batches = sorted(batch for seq_len, batch in reports if seq_len == phase.seq_len)
    times = [reports[phase.seq_len, batch].step_time_s for batch in batches]
    return float(np.interp(phase.sequences, batches, times))


def _joules(reports: Mapping[tuple[int, int], StepReport], phase: PhaseSteps, usual: StepReport) -> float | None:
    """Joules of a GPU in all steps of a phase; between two batches it draws what it does in the usual step."""
    watts = reports.get((phase.seq_len, phase.sequences), usual).power_w
    return None if watts is None else watts * phase.steps * phase.step_s


def check_size(request: PlanRequest, rates: JobRates, job: JobTimeline) -> None:
    """RequestError for lives with more events, or more spare nodes, than are simulated.

    Events come in all of a job's time: evaluations and waiting for checkpoints count as steps do.
    """
    expected_events = rates.per_s * job.undisturbed_s
    if expected_events > MOST_EXPECTED:
        raise RequestError(
            f"a life with {expected_events:,.0f} interruptions is not simulated: at most {MOST_EXPECTED:,} are "
            "(failures.*)"
        )
    if (request.spares or 0) * request.lives > MOST_SPARES:
        raise RequestError(
            f"spares={request.spares:,} in lives={request.lives:,} are more than are simulated: take fewer lives, or "
            "spares=null, which is always another node"
        )


def interval_of(
    request: PlanRequest, timed: TimedPhases, cost: CheckpointCost, rates: JobRates
) -> tuple[float, bool, float | None, float | None]:
    """The interval of checkpoints, whether it is seconds of steps, and in seconds the best one by Daly and by lives."""
    whole_s = sum(phase.steps * phase.step_s for phase in timed.phases)
    daly = best = None
    if rates.interruptions_per_s and (cost.blocking_s or cost.durable_s):
        daly = daly_s(cost.blocking_s, 1.0 / rates.interruptions_per_s)

        usual = replace(rates, spread=0.0)  # lives whose rate is far off take long, and say little of the interval
        few = min(FEW, request.lives)

        def mean_s(interval_s: float) -> float:
            job = timeline_of(request, timed, cost, interval_s, True)
            return float(lived(request, job, timed, cost, usual, few).total_s.mean())

        around = max(daly, cost.durable_s, timed.step_s)
        best = best_interval_s(min(around, whole_s), whole_s, mean_s)
    asked_for = request.checkpoint
    if asked_for.every_steps is not None:
        return asked_for.every_steps, False, daly, best
    if asked_for.every_minutes is not None:
        return 60.0 * asked_for.every_minutes, True, daly, best
    if best is None and rates.interruptions_per_s:
        return max(timed.step_s, 60.0), True, daly, best  # one that costs nothing
    return (whole_s if best is None else best), True, daly, best


def timeline_of(
    request: PlanRequest, timed: TimedPhases, cost: CheckpointCost, interval: float, in_seconds: bool
) -> JobTimeline:
    """The job between its checkpoints."""
    pause = request.evaluation
    pause_s = pause.duration_s or 0.0
    if pause.every_steps and pause.duration_s is None:
        longest = max(timed.phases, key=lambda phase: phase.steps * phase.step_s)
        share = FORWARD_SHARE
        if timed.report is not None:
            by_phase = timed.report.breakdown.by_phase
            share = by_phase.get("forward", 0.0) / (sum(by_phase.values()) or 1.0) or FORWARD_SHARE
        pause_s = share * longest.step_s * (pause.sequences or longest.sequences) / longest.sequences
    costs = (cost.blocking_s, cost.durable_s)
    return timeline(timed.phases, interval, in_seconds, *costs, pause.every_steps, pause_s)


def lived(
    request: PlanRequest,
    job: JobTimeline,
    timed: TimedPhases,
    cost: CheckpointCost,
    rates: JobRates,
    lives: int,
    traced: int = 0,
) -> JobLives:
    """So many lives of a job. The same seed has the same lives, whatever else is asked."""
    of_step = np.ones(lives)
    if timed.report is not None:
        z = np.random.default_rng([request.seed, 9]).standard_normal(lives)
        of_step = factors(z, timed.step_s, timed.low_s, timed.high_s, timed.report.coverage)
    saved_s = cost.blocking_s + cost.durable_s
    events = drawn_events(rates, request.restart, request.slow, saved_s, cost.load_s, lives, request.seed)
    return live(
        job,
        of_step,
        events,
        begin_s=60.0 * request.restart.begin_minutes,
        spares=request.spares,
        repair_s=3600.0 * request.restart.repair_hours,
        traced=traced,
    )


def set_back(request: PlanRequest, lives: JobLives) -> JobLives:
    """Lives that people hold up, too: they stand still, and no step is made twice for it."""
    mean = mean_setbacks(request.setbacks, request.failures)
    longer = setback_factors(mean, len(lives.total_s), request.seed)
    more_s = lives.total_s * (longer - 1.0)
    traces = tuple(
        replace(trace, moments_s=[moment_s * times for moment_s in trace.moments_s])
        for trace, times in zip(lives.traces, longer.tolist(), strict=False)
    )
    return replace(lives, total_s=lives.total_s + more_s, held_s=lives.held_s + more_s, traces=traces)


def report_of(
    request: PlanRequest,
    timed: TimedPhases,
    cost: CheckpointCost,
    rates: JobRates,
    job: JobTimeline,
    lives: JobLives,
    cluster: Cluster,
    device: Device,
    intervals: Sequence[float | None],
) -> PlanReport:
    """What all lives say."""
    report = timed.report
    histogram, edges = np.histogram(lives.total_s / DAY_S, bins=BINS)
    price = price_of(request.step, cluster)
    return PlanReport(
        model=report.model if report else str(_name(request.step.model)),
        device=device.name,
        devices=cluster.devices,
        nodes=cluster.nodes,
        layout=tuple(report.degrees()) if report else (),
        tokens=float(job.tokens[-1]),
        steps=int(job.steps[-1]),
        step_time_s=timed.step_s,
        step_low_s=timed.low_s,
        step_high_s=timed.high_s,
        step_coverage=report.coverage if report else None,
        phases=timed.phases,
        **spreads_of(request, timed, job, lives, cluster, device, price),
        undisturbed_days=(job.undisturbed_s + lives.begin_s) / DAY_S,
        parts=parts_of(job, lives),
        mtbf_hours=1.0 / rates.interruptions_per_s / 3600.0 if rates.interruptions_per_s else None,
        rate_spread=rates.spread,
        rates_from=rates.source,
        causes=counted_causes(rates, lives),
        checkpoint=checkpoints_of(cost, job, intervals),
        gpu_w=None if timed.gpu_j is None else timed.gpu_j / float(job.steps_s[-1]),
        lives=request.lives,
        seed=request.seed,
        given_up=float(lives.given_up.mean()),
        notes=tuple(notes_of(request, timed, rates, lives, price)),
        wall_time_s=0.0,
        histogram=tuple(zip(edges[:-1].tolist(), histogram.tolist(), strict=True)),
        traces=lives.traces,
        step=report,
    )


def spreads_of(
    request: PlanRequest,
    timed: TimedPhases,
    job: JobTimeline,
    lives: JobLives,
    cluster: Cluster,
    device: Device,
    price: float,
) -> dict[str, Any]:
    """Figures over all lives: times, price and energy."""
    hours = lives.total_s / 3600.0
    paid = cluster.devices + (request.spares or 0) * cluster.devices_per_node
    kwh = kilowatt_hours(request, timed, job, lives, cluster, device)
    return {
        "days": spread_of(lives.total_s / DAY_S),
        **bills(hours * paid, price, kwh, request.energy),
        "goodput": spread_of(lives.goodput),
        "interruptions": spread_of(lives.interruptions.astype(float)),
        "lost_hours": spread_of(lives.lost_s / 3600.0),
        "down_hours": spread_of(lives.down_s / 3600.0),
    }


def parts_of(job: JobTimeline, lives: JobLives) -> dict[str, float]:
    """Shares of the mean life."""
    mean_s = float(lives.total_s.mean())
    return {
        "steps that count": float(lives.steps_s.mean()) / mean_s,
        "waiting for checkpoints": job.waits_s / mean_s,
        "evaluation": job.evaluation_s / mean_s,
        "work done twice": float(lives.lost_s.mean()) / mean_s,
        "down": float(lives.down_s.mean()) / mean_s,
        "standing still": (float(lives.held_s.mean()) + lives.begin_s) / mean_s,
    }


def checkpoints_of(cost: CheckpointCost, job: JobTimeline, intervals: Sequence[float | None]) -> PlannedCheckpoints:
    """Checkpoints as they were lived with; ``intervals`` are the best in seconds, by Daly and by simulation."""
    daly, best = (None if interval is None else interval / 60.0 for interval in intervals)
    every = float(np.diff(job.steps_s).mean()) / 60.0
    times = (cost.blocking_s, cost.durable_s, cost.load_s, cost.write_gbps, cost.read_gbps)
    return PlannedCheckpoints(cost.size_gb, job.checkpoints, every, *times, daly, best)


def counted_causes(rates: JobRates, lives: JobLives) -> dict[str, float]:
    """How often each cause came in the mean life, the most frequent first."""
    counts = np.zeros(len(rates.causes))
    counts[: len(lives.events)] = lives.events[: len(counts)] / len(lives.total_s)
    rows = zip((cause.name for cause in rates.causes), counts.tolist(), strict=True)
    return dict(sorted(rows, key=lambda row: -row[1]))


def _name(model: Any) -> str:
    """What a model is called."""
    return str(model.get("name", "a model")) if isinstance(model, Mapping) else str(getattr(model, "__name__", model))


def kilowatt_hours(
    request: PlanRequest, timed: TimedPhases, job: JobTimeline, lives: JobLives, cluster: Cluster, device: Device
) -> np.ndarray | None:
    """Energy of each life [lives] in kWh: GPUs at work and idle, hosts where they are known, and the building.

    A GPU works while steps run, also those that are done twice; else it is idle, as those of spare nodes always are.
    """
    if timed.gpu_j is None or not device.tdp_w:
        return None
    watts = timed.gpu_j / float(job.steps_s[-1])
    busy_s = lives.steps_s + lives.lost_s
    idle_s = lives.total_s - busy_s
    spares = request.spares or 0
    spare_w = spares * cluster.devices_per_node * clocks.idle_w(device)
    nodes_w = (request.energy.node_w or 0.0) * (cluster.nodes + spares)
    joules = cluster.devices * (watts * busy_s + clocks.idle_w(device) * idle_s) + (spare_w + nodes_w) * lives.total_s
    return joules * request.energy.pue / 3.6e6


def notes_of(request: PlanRequest, timed: TimedPhases, rates: JobRates, lives: JobLives, price: float) -> list[str]:
    """What the answer leaves out or cannot know."""
    notes = []
    report = timed.report
    if report is not None and not report.fits:
        notes.append(
            f"a step DOES NOT FIT: it needs {report.memory.peak_gib:.1f} GiB of a device; "
            "`opcast simulate` says what would help"
        )
    if lives.given_up.any():
        notes.append(
            f"{lives.given_up.sum():,} of {len(lives.given_up):,} lives would not end: checkpoints are too rare, "
            "or interruptions too many"
        )
    if report is None:
        notes.append("the step was given, so its time has no interval: days differ by interruptions alone")
    if rates.spread and rates.interruptions_per_s:
        notes.append(
            f"the rate of interruptions is unsure by a factor of {math.exp(rates.spread):.2g} each way, as published "
            "fleets differ: give your own (failures.per_gpu_year)"
        )
    if mean := mean_setbacks(request.setbacks, request.failures):
        notes.append(
            f"people lengthen a job by {math.expm1(mean * math.log(2)):.0%} in the median life"
            f"{', as they did published jobs' if request.setbacks is None else ''}: "
            "setbacks=0 is a job that is run well"
        )
    notes += energy_notes(request.energy, "this step" if timed.gpu_j is None else "")
    if not price:
        notes.append("no price: give price_per_gpu_hour")
    return notes

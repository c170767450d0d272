"""From a request about post-training to its report: the best placement, and the lives of a run on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..job.answer import spread_of
from ..job.bills import bills, energy_notes, price_of
from ..question.work import COVERAGE
from ..report.distribution import factors
from ..serving.figures import Z90
from .answer import PostTrainReport, PostTrainWay, RolloutFigures
from .energy import iteration_kwh, phase_kwh
from .groups import cluster_of
from .lengths import LengthBatch, batch_of
from .phases import ROLL, SYNC
from .placement import PlacedRun, PlacementTrial, best_way
from .request import PostTrainRequest
from .rollout import BatchRollout, RolloutReplicas, roll_out
from .schedule import idle_shares, iteration_times, timeline

if TYPE_CHECKING:
    from ..engines.bench import Bench

LIVED = 64  # iterations of a life that are drawn; all of a run are as these are in the mean
POINTS = 60  # of the curve of responses that run


def post_train(request: PostTrainRequest, bench: Bench) -> PostTrainReport:
    """The report of post-training. RequestError for what cannot be, KvError, and the errors of a step."""
    started = time.perf_counter()
    trial = PlacementTrial(request, bench)
    best, ways = best_way(trial)
    report = report_of(trial, best, ways)
    return replace(report, wall_time_s=time.perf_counter() - started)


@dataclass(frozen=True)
class RunLives:
    """Lives of a run: seconds of iterations [lives, iterations] and of the start [lives], tokens and kWh of each."""

    iteration_s: np.ndarray
    begin_s: np.ndarray
    tokens: np.ndarray
    kwh: np.ndarray | None


def live_through(
    request: PostTrainRequest, run: PlacedRun, rollouts: Sequence[BatchRollout], batches: Sequence[LengthBatch]
) -> RunLives:
    """Lives of a run. In each, steps and the engine's iterations are slower or faster than expected by
    a factor of their own, and batches come by chance."""
    random = np.random.default_rng([request.seed, 1 << 20])
    count = min(request.iterations, LIVED)
    which = random.integers(0, len(batches), (request.lives, count))
    z = random.standard_normal((2, request.lives))
    actor = run.parts.actor
    slower = factors(z[0], actor.step_time_s, actor.low_s, actor.high_s, actor.coverage)
    tokens = np.array([batch.tokens for batch in batches], float)
    more = (tokens / tokens.mean())[which]
    training_s = np.zeros(which.shape)
    for phase in run.phases:
        if phase.name not in (ROLL, SYNC):
            seconds = phase.seconds * (slower[:, None] if phase.simulated else 1.0)
            training_s += seconds * more if phase.by_tokens else seconds
    rollout_s = np.zeros(which.shape)
    if run.rollout is not None and rollouts:
        ends = np.array([batch.seconds for batch in rollouts])
        rollout_s = ends[which] * engine_factors(request, run.rollout, rollouts[0], z[1])[:, None]
    sync_s = 0.0 if run.sync is None else run.sync.seconds
    times = iteration_times(rollout_s, training_s, sync_s, run.asynchronous)
    seconds_of = {"rollout": rollout_s, "training": training_s, "iteration": times.iteration_s}
    kwh = iteration_kwh(run.phases, run.groups, run.device, request.energy, seconds_of)
    return RunLives(times.iteration_s, times.begin_s, tokens[which], kwh)


def engine_factors(
    request: PostTrainRequest, rollout: RolloutReplicas, usual: BatchRollout, z: np.ndarray
) -> np.ndarray:
    """How many times as long as expected a rollout takes in each life [lives]: the first batch once more, with
    iterations at both ends of their interval."""
    if rollout.replica.figures is None:
        return np.ones(len(z))
    first = [batch_of(request, 0)]
    fast, slow = (roll_out(rollout.at(side), request, first)[0].seconds for side in (-Z90, Z90))
    return factors(z, usual.seconds, min(fast, usual.seconds), max(slow, usual.seconds), COVERAGE)


def report_of(trial: PlacementTrial, run: PlacedRun, ways: tuple[PostTrainWay, ...]) -> PostTrainReport:
    """What all lives of a way say."""
    request, groups = trial.request, run.groups
    rollouts = rollouts_of(trial, run)
    batches = [batch.batch for batch in rollouts] or trial.batches
    run = with_mean_rollout(run, rollouts)
    phases, actor = run.phases, run.parts.actor
    lives = live_through(request, run, rollouts, batches)
    return PostTrainReport(
        model=actor.model,
        method=request.method,
        device=actor.device,
        gpus=groups.gpus,
        training_gpus=groups.training.devices,
        rollout_gpus=groups.rollout_gpus,
        placement="colocated" if groups.colocated else "apart",
        asynchronous=run.asynchronous,
        layout=tuple(actor.degrees()),
        prompts=request.prompts,
        responses=request.responses_of_prompt,
        tokens=float(np.mean([batch.tokens for batch in batches])),
        optimizer_steps=request.optimizer_steps,
        micro_batches=run.micro,
        iterations=request.iterations,
        **spreads_of(request, run, lives),
        phase_kwh=phase_kwh(phases, groups, run.device, request.energy, run.iteration_s),
        phases=phases,
        idle=idle_shares(phases, run.iteration_s),
        rollout=figures_of(run.rollout, rollouts, request) if run.rollout is not None else None,
        sync=run.sync,
        memory=run.memory,
        fits=run.fits,
        ways=ways,
        lives=request.lives,
        seed=request.seed,
        notes=tuple(notes_of(request, run, trial.batches)),
        wall_time_s=0.0,
        timeline=timeline(phases, run.asynchronous),
        running=running(rollouts[0]) if rollouts else (),
    )


def rollouts_of(trial: PlacementTrial, run: PlacedRun) -> list[BatchRollout]:
    """All batches of a way rolled out; none of a method that does not roll out."""
    if run.rollout is None or run.first is None:
        return []
    if trial.request.partial:
        return roll_out(run.rollout, trial.request, trial.batches)
    return [run.first, *roll_out(run.rollout, trial.request, trial.batches[1:])]


def with_mean_rollout(run: PlacedRun, rollouts: Sequence[BatchRollout]) -> PlacedRun:
    """The way with the rollout of a mean batch in place of the first one's."""
    if not rollouts:
        return run
    watts = [batch.gpu_w for batch in rollouts if batch.gpu_w is not None]
    mean: dict[str, Any] = {"seconds": float(np.mean([batch.seconds for batch in rollouts]))}
    mean |= {"gpu_w": float(np.mean(watts))} if watts else {}
    return replace(run, phases=tuple(replace(phase, **mean) if phase.name == ROLL else phase for phase in run.phases))


def spreads_of(request: PostTrainRequest, run: PlacedRun, lives: RunLives) -> dict[str, Any]:
    """Figures over all lives: times, price and energy."""
    hours = (lives.iteration_s.mean(axis=1) * request.iterations + lives.begin_s) / 3600.0
    gpus, price = run.groups.gpus, price_of(request.step, cluster_of(request))
    kwh = None if lives.kwh is None else lives.kwh.mean(axis=1) * request.iterations
    return {
        "iteration_s": spread_of(lives.iteration_s.ravel()),
        "hours": spread_of(hours),
        **bills(hours * gpus, price, kwh, request.energy),
        "iteration_kwh": None if lives.kwh is None else spread_of(lives.kwh.ravel()),
        "tokens_per_s_per_gpu": spread_of((lives.tokens / lives.iteration_s).ravel() / gpus),
    }


def figures_of(rollout: RolloutReplicas, rollouts: Sequence[BatchRollout], request: PostTrainRequest) -> RolloutFigures:
    """The mean of the batches."""
    engine = request.rollout
    degrees = [f"{name.upper()} {getattr(engine, name)}" for name in ("tp", "pp", "ep") if getattr(engine, name) > 1]
    responses = np.concatenate([batch.batch.response for batch in rollouts])
    gpus = rollout.replicas * rollout.replica.devices
    rates = [batch.batch.response.sum() / batch.seconds / gpus for batch in rollouts]
    return RolloutFigures(
        rollout.replicas,
        ", ".join(degrees),
        engine.engine,
        float(responses.mean()),
        int(responses.max()),
        float(np.mean(rates)),
        float(np.mean([batch.tail_share for batch in rollouts])),
        float(np.mean([batch.running_share for batch in rollouts])),
        max(batch.kv_peak for batch in rollouts),
        float(np.mean([batch.preemptions for batch in rollouts])),
        float(np.mean([batch.carried for batch in rollouts])),
    )


def running(rollout: BatchRollout) -> tuple[tuple[float, float], ...]:
    """(seconds, share of the responses that still run) of a batch."""
    at = np.linspace(0.0, rollout.seconds, POINTS)
    share = 1.0 - np.searchsorted(rollout.ends_s, at, side="left") / len(rollout.ends_s)
    return tuple(zip(at.tolist(), share.tolist(), strict=True))


def notes_of(request: PostTrainRequest, run: PlacedRun, batches: Sequence[LengthBatch]) -> list[str]:
    """What the answer leaves out, what was cut, and what does not fit."""
    notes = [
        f"{memory.name} DOES NOT FIT: it needs {memory.needed_gib:.1f} of {memory.total_gib:.1f} GiB of a GPU"
        for memory in run.memory
        if not memory.fits
    ]
    if cut := sum(batch.cut for batch in batches):
        share = cut * request.responses_of_prompt / sum(len(batch.prompt) for batch in batches)
        most = request.step.work.seq_len
        notes.append(
            f"{share:.0%} of the prompts are longer than workload.seq_len={most}: they are cut to leave one token for "
            "a response; take a longer seq_len or shorter prompt_len"
        )
    if request.rolls_out:
        notes += [] if run.rollout is None else list(run.rollout.replica.notes)
        if request.step.work.lora_rank:
            notes.append("the engine rolls out as with merged weights: what adapters add to its kernels is left out")
        if request.reward.model is None and not request.reward.seconds:
            notes.append("rewards take no time: give reward.seconds, or reward.model")
        if run.groups.colocated:
            notes.append("an engine that wakes keeps its CUDA graphs, and allocates its KV memory at no cost")
    has_watts = run.device.tdp_w and all(phase.gpu_w is not None for phase in run.phases)
    notes += energy_notes(request.energy, "" if has_watts else "a phase")
    if run.sync is not None:
        notes.append(
            f"weight sync: {run.sync.size_bytes / 1e9:,.3g} GB over the network, or {run.sync.tensors:,} tensors that "
            f"the trainer hands over in {run.sync.hand_over_s:,.3g} s: the longer of both"
        )
    return notes

"""A calibration out of one profile of one's own run: what its ops took, beside what was predicted of them.

Each family of ops of :mod:`..question.calibration` has an effect on its own framework and chip: the mean of ln of
measured over predicted time, over the steps that are fitted. The other steps are held out: the predicted traces are run
again with each node as much longer as its family, and compared with them. What the prediction knew already (its
calibration) stays, and the effects of the run add to it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

import numpy as np

from ...datasets.loading import whole
from ...datasets.traces.classes import CLASSES, GAP, OP, class_codes, is_network, is_work
from ...datasets.traces.groups import RankedTraces, join_ranks
from ...datasets.traces.linking import link_profile
from ...datasets.traces.profiles import Profile, cut_step
from ...datasets.traces.schema import TraceFileError
from ...datasets.traces.table import ExecutionTrace
from ..question.calibration import MOST, Calibration, Effect, family_of
from .analysis import covered_us, recorded_times
from .feeder import execute
from .run import op_in, recorded_us

HOST, COLLECTIVE_INSIDE, OTHER_WORK = "host", "collective_inside", "rest"
FAMILIES_BY_NAME = ("gemm", "attention")
MIN_STEP_SHARE = 0.005  # of a step: families below it say nothing of it
MIN_LN_WIDTH = 0.02  # ln: one step says no more, however well it is explained
COVERAGE_90_SIGMAS = 1.645  # standard deviations that 90 % of errors are within
SINGLE_STEP_LN_ERROR = 0.1  # standard error (ln) of an effect that one step alone says


@dataclass(frozen=True)
class FamilyFit:
    """A family: microseconds of a step as predicted and measured (mean of the fitted steps), and the factor."""

    family: str
    predicted_us: float
    measured_us: float
    factor: float
    error: float


@dataclass(frozen=True)
class HeldOutStep:
    """A step that was not fitted: microseconds as measured, as predicted before, and with the factors."""

    step: int
    measured_us: float
    before_us: float
    after_us: float


@dataclass(frozen=True)
class OwnCalibration:
    """What a profile says. ``framework`` and ``chip``: whose questions it is used for."""

    framework: str
    chip: str
    fitted: tuple[int, ...]
    families: tuple[FamilyFit, ...]
    held_out: tuple[HeldOutStep, ...]
    calibration: Calibration


def calibrate(
    predicted: RankedTraces, profile: Profile, base: Calibration, framework: str = "", chip: str = "",
    fit_steps: int | None = None,
) -> OwnCalibration:  # fmt: skip
    """Fit the first half of a profile's marked steps, hold out the others. ``base`` is what the prediction used.

    TraceFileError for a profile of fewer than two steps, and for traces that do not say what they predict.
    """
    first = predicted.traces[min(predicted.traces)]
    about = {name: str(value) for name, _, value in first.about.items(0, first.words)}
    framework, chip = framework or about.get("stack", ""), chip or about.get("chip", "")
    if not framework or not chip:
        raise TraceFileError("the predicted traces do not say of which stack and chip they are: write them again with "
                             "`opcast simulate chakra=DIR`")  # fmt: skip
    count = len(profile.steps)
    if count < 2:
        raise TraceFileError(f"{profile.path} has {count} marked steps: mark at least two (ProfilerStep, or the step() "
                             "of opcast's collect), one to fit and one to hold out")  # fmt: skip
    fitted = whole(TraceFileError, "steps", fit_steps if fit_steps is not None else count // 2, 1)
    if fitted >= count:
        raise TraceFileError(f"steps={fitted} leaves none of the {count} marked steps to hold out")
    measured = [link_profile(cut_step(profile, index))[0] for index in range(count)]
    lengths = [end - begin for begin, end in profile.steps]
    times = [families(trace, length) for trace, length in zip(measured, lengths, strict=True)]
    before_us = _run_total_us(predicted, {})
    fits = tuple(_fits(families(first, before_us), times[:fitted], before_us))
    factors = {fit.family: fit.factor for fit in fits}
    after_us = _run_total_us(predicted, factors)
    held = tuple(HeldOutStep(index, lengths[index], before_us, after_us) for index in range(fitted, count))
    calibration = _merge_effects(base, framework, chip, fits, held, fitted)
    return OwnCalibration(framework, chip, tuple(range(fitted)), fits, held, calibration)


def family_names(trace: ExecutionTrace) -> list[str]:
    """The family of each node: of its op, else of its class by name; empty for what is no work of the device."""
    codes = class_codes(trace)
    texts, work, network = trace.text(OP), is_work(trace, codes), is_network(codes)
    ops = {int(n): trace.words[n] for n in np.unique(texts[texts >= 0])}
    family_of_op = {n: HOST if text == GAP else family_of(op_in(text)) for n, text in ops.items()}
    by_class = [name if name in FAMILIES_BY_NAME else OTHER_WORK for name in CLASSES]
    return [
        family_of_op[text] if text >= 0 else COLLECTIVE_INSIDE if net else by_class[code] if busy else ""
        for text, net, busy, code in zip(texts.tolist(), network.tolist(), work.tolist(), codes.tolist(), strict=True)
    ]


def families(trace: ExecutionTrace, total_us: float) -> dict[str, float]:
    """Microseconds of each family in a step of so many; of the host what no work or communication covers."""
    start, end = recorded_times(trace)
    names = family_names(trace)
    family_us: dict[str, float] = defaultdict(float)
    for name, us in zip(names, (end - start).tolist(), strict=True):
        if name not in ("", HOST):
            family_us[name] += us
    busy = np.array([name not in ("", HOST) for name in names], bool)
    family_us[HOST] = max(total_us - covered_us(start[busy], end[busy]), 0.0)
    return dict(family_us)


def _fits(before: Mapping[str, float], steps: Sequence[Mapping[str, float]], total_us: float) -> list[FamilyFit]:
    fits = []
    for family, us in before.items():
        measured_us = [step.get(family, 0.0) for step in steps]
        if us < MIN_STEP_SHARE * total_us or min(measured_us) <= 0:
            continue
        logs = [max(min(math.log(measured / us), MOST - 1), 1 - MOST) for measured in measured_us]
        standard_error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else SINGLE_STEP_LN_ERROR
        fits.append(FamilyFit(family, us, fmean(measured_us), math.exp(median(logs)), standard_error))
    return sorted(fits, key=lambda fit: -abs(fit.measured_us - fit.predicted_us))


def _run_total_us(run: RankedTraces, factors: Mapping[str, float]) -> float:
    """How long a predicted run takes with each family so many times longer."""
    joint = join_ranks(run)
    duration = recorded_us(run, joint)
    for rank, trace in run.traces.items():
        node_factors = np.array([factors.get(name, 1.0) for name in family_names(trace)])
        calls = joint.call[joint.node[rank]] >= 0
        duration[joint.node[rank][~calls]] *= node_factors[~calls]
        if rank == min(run.traces):
            duration[joint.node[rank][calls]] *= node_factors[calls]
    return execute(run, joint, duration).total_us


def _merge_effects(base: Calibration, framework: str, chip: str, fits: Sequence[FamilyFit], held: Sequence[HeldOutStep],
            fitted: int) -> Calibration:  # fmt: skip
    """The base with the run's own effects on its framework and chip, and the width that held-out steps ask for."""
    of = f"framework={framework} chip={chip}"
    before = {effect.family: effect for effect in base.effects if effect.of == of}
    own_effects = [
        Effect(fit.family, of, math.log(fit.factor) + (before[fit.family].value if fit.family in before else 0.0),
               fit.error, fitted + (before[fit.family].rows if fit.family in before else 0))
        for fit in fits
    ]  # fmt: skip
    own_families = {effect.family for effect in own_effects}
    other_effects = [effect for effect in base.effects if effect.of != of or effect.family not in own_families]
    errors = [abs(math.log(step.measured_us / step.after_us)) for step in held if step.measured_us and step.after_us]
    width = max(
        MIN_LN_WIDTH,
        COVERAGE_90_SIGMAS * math.sqrt(fmean(error * error for error in errors)) if errors else MIN_LN_WIDTH,
    )
    widths = {**base.widths, f"{framework} {chip}": round(min(width, MOST), 4)}
    return replace(base, effects=(*other_effects, *own_effects), widths=widths,
                   made_by=f"opcast trace calibrate, on {base.made_by or 'physics'}")  # fmt: skip

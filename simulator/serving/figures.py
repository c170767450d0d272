"""What devices draw in an iteration, and how sure its time is: taken from some of the steps that tables are made of.

Watts are those of :mod:`..report.energy`, intervals those that ``opcast simulate`` states for the same step. A quantile
of the iteration times is the tables with every time off by as much as it is at that quantile: errors of one set-up have
one sign, because they are errors of its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...models.clocks import idle_w
from ..question.work import Work
from ..report.account import interval, shares_of_total, speaking_stage_count
from ..report.energy import energy, least_w
from ..report.ledger import Ledger, ledger_of
from ..step.state import State
from .between import Simulate
from .iteration import IterationTables

SEEN = (1, 16, 64, 256, 512, 1024, 2048, 8192)  # sizes of batches whose steps are looked at
Z90 = 1.6448536269514722  # standard deviations within which 90 % of a normal lie


class StepFigures(NamedTuple):
    """Axes ascend: sequences of batches that only decode, tokens of those with prompts (float64 arrays).

    ``_w`` are mean watts of a device while it computes (NaN: unknown), ``_width`` the logarithm of how far up and down
    90 % of times are. ``idle_w`` is drawn by a device that has nothing to do.
    """

    decode_axis: np.ndarray
    decode_w: np.ndarray
    decode_width: np.ndarray
    prompt_axis: np.ndarray
    prompt_w: np.ndarray
    prompt_width: np.ndarray
    idle_w: np.ndarray


class SeenSteps:
    """Passes steps on and keeps the figures of those whose size is one of SEEN."""

    def __init__(self, simulate: Simulate) -> None:
        self.simulate = simulate
        self.decodes: dict[int, tuple[float, float]] = {}
        self.prompts: dict[int, tuple[float, float]] = {}
        self.idle_w = math.nan
        self.source_us: dict[str, float] = {}

    def __call__(self, works: Sequence[Work]) -> list[State]:
        """The states of steps."""
        states = self.simulate(works)
        for work, state in zip(works, states, strict=True):
            self.look(work, state)
        return states

    def look(self, work: Work, state: State) -> None:
        """Keep the figures of a step of one of these sizes."""
        batch = work.iteration
        alone = len(work.prompts) + len(work.decodes) == 1
        size = batch.prefill_tokens or batch.decoding
        if alone and size in SEEN:
            ledger = ledger_of(list(state.executions()))
            (self.prompts if work.prompts else self.decodes)[size] = figures_of(state, ledger)
            for name, us in ledger.by_source().items():
                self.source_us[name] = self.source_us.get(name, 0.0) + us
            self.idle_w = idle_w(state.device) if state.device.tdp_w else math.nan

    @property
    def figures(self) -> StepFigures:
        """What was seen."""
        return StepFigures(*_columns(self.decodes), *_columns(self.prompts), np.array(self.idle_w))

    @property
    def sources(self) -> dict[str, float]:
        """Share of kernel time by whose measurements answered, over the steps that were looked at."""
        return shares_of_total(self.source_us)


def _columns(points: dict[int, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = np.array([(size, *points[size]) for size in sorted(points)], float).reshape(-1, 3)
    return rows[:, 0], rows[:, 1], rows[:, 2]


def figures_of(state: State, ledger: Ledger) -> tuple[float, float]:
    """(watts, width) of a step. Stages of a pipeline wait for each other in a step alone; in a full pipeline they do
    not, so that what they draw while they wait is taken out."""
    low, high = interval(state, ledger)
    seconds = state.total_us * 1e-6
    stages, device = state.plan.parallel.pp, state.device
    watts = energy(device, 1, ledger.drawn_energy(state, speaking_stage_count(state)), seconds).power_w
    if watts is not None:
        watts = min(stages * watts - (stages - 1) * least_w(device), device.tdp_w)
    return math.nan if watts is None else watts, math.log(high / low) / 2


def at_quantile(tables: IterationTables, figures: StepFigures, z: float) -> IterationTables:
    """The tables with times ``z`` standard deviations above what is likely."""
    decode = _factor(tables.decode_axis, figures.decode_axis, figures.decode_width, z)
    attend = _factor(tables.attend_rows, figures.decode_axis, figures.decode_width, z)
    mixed = _factor(tables.mixed_axis, figures.prompt_axis, figures.prompt_width, z)
    prompt = _factor(tables.prompt_rows, figures.prompt_axis, figures.prompt_width, z)
    sample = _factor(tables.sample_axis, figures.decode_axis, figures.decode_width, z)
    cached = _factor(tables.cached_axis, figures.prompt_axis, figures.prompt_width, z)
    return tables._replace(
        decode_us=tables.decode_us * decode,
        attend_us=tables.attend_us * attend[:, None],
        mixed_us=tables.mixed_us * mixed,
        prompt_us=tables.prompt_us * prompt[:, None],
        expert_us=tables.expert_us * _factor(tables.expert_axis, figures.prompt_axis, figures.prompt_width, z),
        sample_us=tables.sample_us * sample,
        cached_us=tables.cached_us * cached,
    )


def _factor(places: np.ndarray, axis: np.ndarray, width: np.ndarray, z: float) -> np.ndarray:
    return np.exp(z / Z90 * np.interp(places, axis, width)) if len(axis) else np.ones(len(places))

"""Spaces too large to list: points that Optuna's samplers ask about, those that cannot run told apart by constraints.

TPE (Bergstra et al. 2011) narrows in on the best of one objective or several, NSGA-II (Deb et al. 2002) on the whole
front. Trials are asked in waves, as large whatever the number of processes, so that a seed gives one answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.installing import install_command
from ..question.canonical import RequestError
from .outcome import OK, Row
from .points import Folder, Identity, identity
from .rank import losses
from .request import SearchSetup
from .space import AXES, derived, fitting, plainest_point
from .workers import Workers

if TYPE_CHECKING:
    import optuna

TRIALS_A_WAVE = 64
WORST = 1e30  # of a point that has no figures: samplers want numbers
VIOLATION = "violation"


def sampler_of(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """The sampler, which keeps away from points that cannot run. RequestError where Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise RequestError(f"sampler={name} needs Optuna: {install_command('search')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def constraints(trial: optuna.trial.FrozenTrial) -> Sequence[float]:
        return (float(trial.user_attrs[VIOLATION]),)

    if name == "tpe":
        # constant_liar: the trials of a wave differ. Optuna 5 does so by itself, 4 asks for one point 64 times.
        return optuna.samplers.TPESampler(
            seed=seed, constraints_func=constraints, multivariate=True, constant_liar=True
        )
    return optuna.samplers.NSGAIISampler(seed=seed, population_size=TRIALS_A_WAVE, constraints_func=constraints)


def sample(crew: Workers, folder: Folder, advance: Any, name: str) -> list[Row]:
    """The rows of all distinct points that so many trials ask about; those that do not fit together have none."""
    import optuna

    setup, request = crew.setup, crew.setup.request
    chooser = sampler_of(name, request.seed)
    study = optuna.create_study(directions=["minimize"] * len(request.objectives), sampler=chooser)
    rows_known: dict[Identity, Row] = dict(folder.known)
    rows_found: dict[Identity, Row] = {}
    for first in range(0, request.trials, TRIALS_A_WAVE):
        trials = [study.ask() for _ in range(min(TRIALS_A_WAVE, request.trials - first))]
        asked_for = [chosen(setup, trial) for trial in trials]
        unmet = misfits(setup, asked_for)
        new = {
            identity(p): p
            for p, lost in zip(asked_for, unmet, strict=True)
            if not lost and identity(p) not in rows_known
        }
        rows = crew.rows(list(new.values()), lambda done: None, folder.write)
        rows_known |= dict(zip(new, rows, strict=True))
        for trial, point, lost in zip(trials, asked_for, unmet, strict=True):
            row = None if lost else rows_known[identity(point)]
            if row is not None:
                rows_found[identity(point)] = row
            runs = row is not None and row["status"] == OK
            trial.set_user_attr(VIOLATION, 0.0 if runs else float(lost) or 0.5)
            loss = losses([row or {}], request.objectives)[0]
            study.tell(trial, [float(value) if runs and np.isfinite(value) else WORST for value in loss])
        advance(len(trials))
    return list(rows_found.values())


def chosen(setup: SearchSetup, trial: optuna.trial.Trial) -> dict[str, Any]:
    """The point that a trial asks about."""
    return plainest_point(
        {
            name: values[0] if len(values) == 1 else values[trial.suggest_int(name, 0, len(values) - 1)]
            for name, values in setup.axes.items()
        }
    )


def misfits(setup: SearchSetup, points: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many requirements and rules each point does not meet."""
    kinds = {name: object if isinstance(values[0], str) else None for name, values in setup.axes.items()}
    columns = {name: np.array([point[name] for point in points], dtype=kinds[name]) for name in AXES}
    points_derived = derived(columns, setup.clusters, setup.facts)
    holds = [
        *fitting(points_derived, setup.facts).values(),
        *(rule.holds(points_derived.columns) for rule in setup.request.before()),
    ]
    return np.sum([~requirement for requirement in holds], axis=0).tolist()

"""A small search for LightGBM's parameters: tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011).

The search sees a share of the groups only. Those rows are trained on but never scored afterwards, so that the
reported errors stay those of rows that nothing was fitted, chosen or tuned on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING

import numpy as np

from ..datasets.installing import install_command
from .candidates import LightGBM, OptionError, Options, Task
from .features import Frame
from .learning import fold_count, held_out, task_of
from .splits import Split, split
from .table import MeasurementTable, take

if TYPE_CHECKING:
    import optuna

SHARE = 4  # one group in so many is for the search
MAX_ROWS = 12_000
FOLDS = 3


def searched(table: MeasurementTable, ops: Frame, options: Options) -> tuple[Options, Split]:
    """Options with the best LightGBM of ``options.trials``, and the folds that leave the rows of the search unscored.

    ``options`` as :meth:`Options.for_kind` gives them. The given parameters are the first trial, so that the search
    never ends with worse ones on its rows. Deterministic for a seed. OptionError when optuna is not installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise OptionError(f"predictor.trials needs optuna: {install_command('search')}, or set predictor.trials=0")
    folds = split(table.kind, table.columns, fold_count(len(table), options), options.seed)
    rows = search_rows(table, options.seed)
    if "lightgbm" not in options.candidates or not options.lightgbm.able(len(rows)):
        return options, folds
    sample = table.take(rows)
    task = task_of(sample, take(ops, rows), options)
    inner = split(sample.kind, sample.columns, FOLDS, options.seed)
    best = _search(task, inner, options)
    return dataclasses.replace(options, lightgbm=best), folds.without(rows)


def search_rows(table: MeasurementTable, seed: int) -> np.ndarray:
    """Positions of the rows a search may see: whole groups, a quarter of them, thinned to at most 12,000 rows."""
    groups = split(table.kind, table.columns, SHARE, seed + 1)
    rows = np.flatnonzero(groups.fold == 0)
    if len(rows) <= MAX_ROWS:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, MAX_ROWS, replace=False))


def _search(task: Task, folds: Split, options: Options) -> LightGBM:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    start = options.lightgbm

    def loss(trial: optuna.Trial) -> float:
        suggested = dataclasses.replace(options, candidates=("lightgbm",), lightgbm=_suggested(trial, start))
        residual = held_out(task, folds, {"lightgbm": None}, suggested)["lightgbm"]
        scored = folds.scored
        return float(np.average(np.minimum(np.abs(residual[scored]), np.log(2.0)), weights=task.weights[scored]))

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=options.seed))
    study.enqueue_trial({name: getattr(start, name) for name in SPACE})
    study.optimize(loss, n_trials=options.trials)
    return dataclasses.replace(start, **study.best_params)


SPACE = ("leaves", "min_leaf", "learning_rate", "columns", "l2")


def _suggested(trial: optuna.Trial, start: LightGBM) -> LightGBM:
    """Trees stay within what is served quickly."""
    return dataclasses.replace(
        start,
        leaves=trial.suggest_int("leaves", 15, 127, log=True),
        min_leaf=trial.suggest_int("min_leaf", 2, 60, log=True),
        learning_rate=trial.suggest_float("learning_rate", 0.02, 0.2, log=True),
        columns=trial.suggest_float("columns", 0.3, 1.0),
        l2=trial.suggest_float("l2", 0.01, 20.0, log=True),
    )

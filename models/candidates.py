"""Ways to learn a correction, and their hyper-parameters as ``conf/predictor`` has them.

Each candidate is a frozen dataclass: its fields are its options, ``fit`` returns a :class:`Correction`. All are
deterministic for a seed and use the threads they are told.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .correction import Correction
from .forest import from_lightgbm, from_sklearn
from .kriging import Scales, search
from .kriging import fit as fit_kriging


class OptionError(ValueError):
    """An unknown or impossible training option; the message names it and what is possible."""


@dataclass(frozen=True)
class Task:
    """One table to learn from: features float32 [n, f], ln ratios and weights float64 [n]."""

    names: Sequence[str]
    matrix: np.ndarray
    target: np.ndarray
    weights: np.ndarray
    seed: int = 0
    threads: int = 1

    def rows(self, chosen: np.ndarray) -> Task:
        """The same task on some of its rows."""
        return dataclasses.replace(
            self, matrix=self.matrix[chosen], target=self.target[chosen], weights=self.weights[chosen]
        )

    @property
    def offset(self) -> float:
        return float(np.median(self.target))


class Candidate(Protocol):
    def able(self, rows: int) -> bool:
        """Whether a table of so many rows is worth trying."""

    def prepare(self, task: Task) -> Any:
        """Work done once per table and shared by folds; never looks at more than scales of features and noise."""

    def fit(self, task: Task, prepared: Any) -> Correction: ...


@dataclass(frozen=True)
class Calibrated:
    """The analytical time times one factor: the baseline every other must beat, and the answer for a few rows."""

    def able(self, rows: int) -> bool:
        return True

    def prepare(self, task: Task) -> None:
        return None

    def fit(self, task: Task, prepared: None) -> Correction:
        return Correction(task.matrix.shape[1], task.offset)


@dataclass(frozen=True)
class Interpolation:
    """Gaussian-process interpolation (:mod:`.kriging`): the best on tables of some dozen to some hundred rows."""

    min_rows: int = 8
    max_rows: int = 1500
    search_rows: int = 300

    def able(self, rows: int) -> bool:
        return self.min_rows <= rows <= self.max_rows

    def prepare(self, task: Task) -> Scales:
        return search(task.matrix, task.names, task.target - task.target.mean(), self.search_rows, task.seed)

    def fit(self, task: Task, prepared: Scales) -> Correction:
        kriging = fit_kriging(task.matrix, task.target - task.offset, task.weights, prepared)
        return Correction(task.matrix.shape[1], task.offset, kriging=kriging)


@dataclass(frozen=True)
class RandomForest:
    """scikit-learn's random forest on the ratio to the calibrated analytical time."""

    min_rows: int = 30
    max_rows: int = 20_000
    trees: int = 40
    leaves: int = 1024
    min_leaf: int = 1
    columns: float = 0.5

    def able(self, rows: int) -> bool:
        return self.min_rows <= rows <= self.max_rows

    def prepare(self, task: Task) -> None:
        return None

    def fit(self, task: Task, prepared: None) -> Correction:
        from sklearn.ensemble import RandomForestRegressor

        model = RandomForestRegressor(
            n_estimators=self.trees,
            max_leaf_nodes=self.leaves,
            min_samples_leaf=self.min_leaf,
            max_features=self.columns,
            random_state=task.seed,
            n_jobs=task.threads if len(task.matrix) > 4000 else 1,  # starting threads costs more than small trees
        )
        model.fit(task.matrix, task.target - task.offset, sample_weight=task.weights)
        return Correction(task.matrix.shape[1], task.offset, from_sklearn(model))


@dataclass(frozen=True)
class LightGBM:
    """Gradient-boosted trees on absolute log error: medians, which an outlier does not move."""

    min_rows: int = 60
    max_rows: int = 2_000_000
    trees: int = 300
    leaves: int = 31
    depth: int = 8
    min_leaf: int = 5
    learning_rate: float = 0.06
    columns: float = 0.7
    objective: str = "regression_l1"
    l2: float = 1.0

    def able(self, rows: int) -> bool:
        return self.min_rows <= rows <= self.max_rows

    def prepare(self, task: Task) -> None:
        return None

    def fit(self, task: Task, prepared: None) -> Correction:
        import lightgbm

        parameters = {
            "objective": self.objective,
            "num_leaves": min(self.leaves, max(4, len(task.matrix) // 8)),
            "max_depth": self.depth,
            "min_data_in_leaf": self.min_leaf,
            "learning_rate": self.learning_rate,
            "feature_fraction": self.columns,
            "lambda_l2": self.l2,
            "seed": task.seed,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": task.threads if len(task.matrix) > 4000 else 1,
            "verbosity": -1,
        }
        data = lightgbm.Dataset(task.matrix, task.target - task.offset, weight=task.weights)
        booster = lightgbm.train(parameters, data, num_boost_round=self.trees, keep_training_booster=True)
        return Correction(task.matrix.shape[1], task.offset, from_lightgbm(booster))


@dataclass(frozen=True)
class Options:
    """How predictors are trained: the schema of ``conf/predictor``."""

    candidates: tuple[str, ...] = ("calibrated", "interpolation", "random_forest", "lightgbm")
    folds: int = 5
    coverage: float = 0.9
    seed: int = 0
    threads: int = 1
    weight_power: float = 0.15  # a row's weight grows as latency to this power: step time is what counts
    random_rows: bool = False  # split rows at random instead of whole shapes
    calibrated: Calibrated = field(default_factory=Calibrated)
    interpolation: Interpolation = field(default_factory=Interpolation)
    random_forest: RandomForest = field(default_factory=RandomForest)
    lightgbm: LightGBM = field(default_factory=LightGBM)

    def __post_init__(self) -> None:
        if not self.candidates:
            raise OptionError(f"predictor.candidates is empty; choose from {', '.join(CANDIDATES)}")
        for name in self.candidates:
            if name not in CANDIDATES:
                raise OptionError(f"predictor.candidates has {name!r}; choose from {', '.join(CANDIDATES)}")
        if self.folds < 2 or self.threads < 1:
            raise OptionError(f"predictor.folds={self.folds} must be at least 2, predictor.threads={self.threads} 1")
        if not 0.0 < self.coverage < 1.0:
            raise OptionError(f"predictor.coverage={self.coverage} must lie between 0 and 1, for instance 0.9")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Options:
        """Options from the plain mapping of a config; OptionError for a name that does not exist."""
        return _from_dict(cls, "predictor", values)

    def candidate(self, name: str) -> Candidate:
        found: Candidate = getattr(self, name)
        return found


CANDIDATES = ("calibrated", "interpolation", "random_forest", "lightgbm")


def _from_dict(cls: type, where: str, values: Mapping[str, Any]) -> Any:
    known = {each.name: each for each in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise OptionError(f"{where} has no option {name!r}; {hint}")
        default = getattr(cls(), name)
        if dataclasses.is_dataclass(default):
            arguments[name] = _from_dict(type(default), f"{where}.{name}", value or {})
        elif isinstance(default, tuple):
            arguments[name] = tuple(value)
        else:
            arguments[name] = _typed(f"{where}.{name}", value, type(default))
    return cls(**arguments)


def _typed(where: str, value: Any, kind: type) -> Any:
    try:
        made = kind(value)
    except (TypeError, ValueError):
        made = None
    if made is None or (kind is not str and made != value):
        raise OptionError(f"{where}={value!r} is not of type {kind.__name__}")
    return made

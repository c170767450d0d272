"""Ways to learn a correction, and their hyper-parameters as ``conf/predictor`` has them.

Each candidate is a frozen dataclass: its fields are its options, ``fit`` returns a :class:`Correction`. All are
deterministic for a seed and use one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..datasets.loading import load, nearest
from ..datasets.vocabulary import KINDS
from .correction import Correction
from .interpolant import axis_of
from .interpolant import fit as fit_lines
from .kriging import Scales, search
from .kriging import fit as fit_kriging
from .splits import MODES
from .trees import from_lightgbm, from_sklearn


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
class Sized:
    """What is tried on tables of so many rows; as a rule it has nothing to prepare."""

    min_rows: int
    max_rows: int

    def able(self, rows: int) -> bool:
        return self.min_rows <= rows <= self.max_rows

    def prepare(self, task: Task) -> Any:
        return None


@dataclass(frozen=True)
class Interpolation(Sized):
    """Gaussian-process interpolation (:mod:`.kriging`): the best on tables of some dozen to some hundred rows."""

    min_rows: int = 8
    max_rows: int = 1500
    search_rows: int = 300

    def prepare(self, task: Task) -> Scales:
        return search(task.matrix, task.names, task.target - task.target.mean(), self.search_rows, task.seed)

    def fit(self, task: Task, prepared: Scales) -> Correction:
        kriging = fit_kriging(task.matrix, task.target - task.offset, task.weights, prepared)
        return Correction(task.matrix.shape[1], task.offset, kriging=kriging)


@dataclass(frozen=True)
class Lines(Sized):
    """Broken lines over size, alpha-beta beyond (:mod:`.interpolant`): where one size rules."""

    min_rows: int = 8
    max_rows: int = 4000

    def fit(self, task: Task, prepared: None) -> Correction:
        if axis_of(task.names) is None:  # no size to go along: only the calibration is left
            return Correction(task.matrix.shape[1], task.offset)
        lines = fit_lines(task.matrix, task.names, task.target, task.weights)
        return Correction(task.matrix.shape[1], lines=lines)


@dataclass(frozen=True)
class RandomForest(Sized):
    """scikit-learn's random forest on the ratio to the calibrated analytical time."""

    min_rows: int = 30
    max_rows: int = 5000
    trees: int = 40
    leaves: int = 1024
    min_leaf: int = 1
    columns: float = 0.5

    def fit(self, task: Task, prepared: None) -> Correction:
        from sklearn.ensemble import RandomForestRegressor

        model = RandomForestRegressor(
            n_estimators=self.trees,
            max_leaf_nodes=self.leaves,
            min_samples_leaf=self.min_leaf,
            max_features=self.columns,
            random_state=task.seed,
            n_jobs=1,
        )
        model.fit(task.matrix, task.target - task.offset, sample_weight=task.weights)
        return Correction(task.matrix.shape[1], task.offset, from_sklearn(model))


@dataclass(frozen=True)
class LightGBM(Sized):
    """Gradient-boosted trees on log error: squares up to ``alpha``, absolute beyond, so that no outlier rules."""

    min_rows: int = 60
    max_rows: int = 2_000_000
    trees: int = 300
    leaves: int = 63
    depth: int = -1  # unlimited: leaves bound what serving costs
    min_leaf: int = 20
    learning_rate: float = 0.1
    columns: float = 0.7
    objective: str = "huber"
    alpha: float = 0.05  # ln units; more where the farthest row could not be reached in so many steps
    l2: float = 1.0
    monotone: Mapping[str, int] = field(default_factory=dict)  # feature: 1 where the correction may only rise, -1 fall

    def fit(self, task: Task, prepared: None) -> Correction:
        import lightgbm

        target = task.target - task.offset
        rows, reach = len(target), self.trees * self.learning_rate
        parameters = {
            "objective": self.objective,
            "alpha": max(self.alpha, 2.0 * float(np.abs(target).max()) / reach),
            "num_leaves": min(self.leaves, max(4, rows // 8)),
            "max_depth": self.depth,
            "min_data_in_leaf": min(self.min_leaf, max(3, rows // 100)),
            "learning_rate": self.learning_rate,
            "feature_fraction": self.columns,
            "lambda_l2": self.l2,
            "seed": task.seed,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": 1,
            "verbosity": -1,
            "monotone_constraints": [self.monotone.get(name, 0) for name in task.names] if self.monotone else None,
        }
        data = lightgbm.Dataset(task.matrix, target, weight=task.weights)
        booster = lightgbm.train(parameters, data, num_boost_round=self.trees, keep_training_booster=True)
        return Correction(task.matrix.shape[1], task.offset, from_lightgbm(booster))


# What a family or a kind wants other than the rest; a kind's own come after its family's.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemm": {"lightgbm": {"learning_rate": 0.2, "min_leaf": 10}},
    "attention": {"lightgbm": {"leaves": 127, "alpha": 0.1, "columns": 1.0, "min_leaf": 5}},
    "moe": {"lightgbm": {"leaves": 127, "alpha": 0.1}},
    "collective": {"candidates": ["calibrated", "lines"]},
}


@dataclass(frozen=True)
class Options:
    """How predictors are trained: the schema of ``conf/predictor``; the last two fields are settings of the verb."""

    candidates: tuple[str, ...] = ("calibrated", "interpolation", "random_forest", "lightgbm")
    folds: int = 5
    coverage: float = 0.9
    seed: int = 0
    workers: int = 1  # processes that train tables side by side, each with one thread
    weight_power: float = 0.15  # a row's weight grows as latency to this power: step time is what counts
    eager: bool = False  # learn from rows whose time includes the host's dispatch, too
    trials: int = 0  # of a search for LightGBM's parameters
    calibrated: Calibrated = field(default_factory=Calibrated)
    interpolation: Interpolation = field(default_factory=Interpolation)
    lines: Lines = field(default_factory=Lines)
    random_forest: RandomForest = field(default_factory=RandomForest)
    lightgbm: LightGBM = field(default_factory=LightGBM)
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: FAMILIES)
    evaluations: tuple[str, ...] = ("groups",)
    promote: bool = False  # make the new predictor current even where it is worse

    def __post_init__(self) -> None:
        if not self.candidates:
            raise OptionError(f"predictor.candidates is empty; choose from {', '.join(CANDIDATES)}")
        _among("predictor.candidates", self.candidates, CANDIDATES)
        _among("eval", self.evaluations, MODES)
        if not self.evaluations:
            raise OptionError(f"eval is empty; choose from {', '.join(MODES)}")
        if self.folds < 2 or self.workers < 1:
            raise OptionError(f"predictor.folds={self.folds} must be at least 2, predictor.workers={self.workers} 1")
        if self.trials < 0:
            raise OptionError(f"predictor.trials={self.trials} must be 0 (no search) or the number of trials")
        if not 0.0 < self.coverage < 1.0:
            raise OptionError(f"predictor.coverage={self.coverage} must lie between 0 and 1, for instance 0.9")
        names = [*KINDS, *sorted({kind.family for kind in KINDS.values()})]
        _among("predictor.families", self.families, names)
        for name, values in self.families.items():
            _merged(type(self)(families={}), f"predictor.families.{name}", values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Options:
        """Options from the plain mapping of a config; OptionError for a name that does not exist."""
        return _merged(cls(), "predictor", values)

    def for_kind(self, kind_name: str) -> Options:
        """The same with what the kind's family and the kind itself want otherwise, but for what was set explicitly."""
        options = dataclasses.replace(self, families={})
        for name in (KINDS[kind_name].family, kind_name):
            values = _unset(self.families.get(name, {}), self, type(self)())
            options = _merged(options, f"predictor.families.{name}", values)
        return options

    @property
    def named(self) -> str:
        """The one algorithm that the user named; "" where the best of several is taken."""
        return self.candidates[0] if len(self.candidates) == 1 else ""

    def why_not(self, chosen: str, rows: int) -> str:
        """Why the algorithm that was named did not learn a table of so many rows; "" where it did, or none was."""
        if self.named in ("", chosen):
            return ""
        sized = self.candidate(self.named)
        limits = f"{sized.min_rows:,} to {sized.max_rows:,}" if isinstance(sized, Sized) else "other"
        return f"{self.named} takes {limits} rows, not {rows:,} (predictor.{self.named}.min_rows, max_rows)"

    def candidate(self, name: str) -> Candidate:
        return getattr(self, name)


CANDIDATES = ("calibrated", "interpolation", "lines", "random_forest", "lightgbm")


def _among(where: str, names: Iterable[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            raise OptionError(f"{where} has {name!r}; {nearest(name, choices, 'choose from')}")


def _unset(values: Mapping[str, Any], chosen: Any, default: Any) -> dict[str, Any]:
    """Those of some values whose option still has its default."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        chosen_value, usual = getattr(chosen, name), getattr(default, name)
        if dataclasses.is_dataclass(chosen_value):
            changes[name] = _unset(value, chosen_value, usual)
        elif chosen_value == usual:
            changes[name] = value
    return changes


def _merged(base: Options, where: str, values: Mapping[str, Any]) -> Options:
    """The options with some of their fields replaced by plain values, those of nested ones included."""
    return load(Options, _over(dataclasses.asdict(base), values), OptionError, where, "option")


def _over(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values over those of a dataclass and of its parts; one name stands for a list of it."""
    merged = dict(base)
    if not isinstance(values, Mapping):
        raise OptionError(f"{values!r} must be options by name")
    for name, value in values.items():
        old = base.get(name)
        if isinstance(old, dict) and name in CANDIDATES and isinstance(value or {}, Mapping):
            value = _over(old, value or {})
        elif isinstance(old, tuple) and isinstance(value, str):
            value = (value,)
        merged[name] = value
    return merged

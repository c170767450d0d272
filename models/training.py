"""Fitting: from a table of measurements to an evaluated, calibrated predictor.

What is learned is ln(measured / analytical), never raw time, so that beyond the data physics remains. One predictor
is trained per (kind, device, backend); dtype and cache state are features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..datasets.devices import Device
from ..datasets.vocabulary import KINDS, kind
from .candidates import Options, Task
from .correction import Correction
from .envelope import surround
from .evaluation import Split, choose, cross_fit, split, summarise
from .features import Frame, feature_names, frame
from .intervals import calibrate
from .predictor import Predictor
from .registry import DEFAULT_BACKEND, Registry

if TYPE_CHECKING:
    import pyarrow as pa

MIN_ROWS = 5
BASELINE = "calibrated"


class TrainingError(ValueError):
    """A table that cannot be learned from; the message says why and what to do."""


class MeasurementStore(Protocol):
    """What training needs of a measurement store."""

    def kinds(self) -> Iterable[str]: ...

    def read(self, kind: str, device: str | None = None, /) -> pa.Table: ...

    def device(self, device_id: str, /) -> Device | None: ...

    def fingerprint(self, kind: str, device: str, /) -> str: ...


@dataclass(frozen=True, eq=False)
class Table:
    """Measurements of one kind, device and backend as columns of n rows each."""

    kind: str
    device: Device
    backend: str
    columns: Mapping[str, np.ndarray]  # int64, by dimension
    dtype: np.ndarray
    out_dtype: np.ndarray
    cache: np.ndarray
    latency_us: np.ndarray
    fingerprint: str = ""
    sources: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.latency_us)

    def frame(self) -> Frame:
        """Features and analytical times of all rows, computed per dtype and cache state."""
        matrix = np.empty((len(self), len(feature_names(self.kind))), dtype=np.float32)
        analytical, roofline = np.empty(len(self)), np.empty(len(self))
        keys = np.stack([self.dtype.astype(str), self.out_dtype.astype(str), self.cache.astype(str)], axis=1)
        unique, codes = np.unique(keys, axis=0, return_inverse=True)
        for index, (dtype, out_dtype, cache) in enumerate(unique):
            rows = np.flatnonzero(codes.reshape(-1) == index)
            columns = {name: values[rows] for name, values in self.columns.items()}
            made = frame(self.kind, columns, str(dtype), str(out_dtype), self.device, str(cache))
            matrix[rows], analytical[rows], roofline[rows] = made.matrix, made.analytical_us, made.roofline_us
        return Frame(matrix, analytical, roofline)


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained predictor with its evaluation; ``held_out_us`` are the answers of models that had not seen a row."""

    predictor: Predictor
    table: Table
    frame: Frame
    held_out_us: np.ndarray
    result: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Trained:
    """A registered predictor and how it came about."""

    label: str
    outcome: Outcome
    predictor: Predictor
    path: Path
    options: Options


def tables(kind_name: str, rows: pa.Table, device: Device, fingerprint: str = "") -> list[Table]:
    """One :class:`Table` per backend of an Arrow table with the dims of the kind, ``dtype``, ``latency_us``, …

    ``out_dtype`` (default: dtype), ``backend`` (``torch``) and ``cache`` (``warm``) may be missing; rows whose
    latency is no positive number or whose dtype the device cannot run are left out. TrainingError for a column that
    is missing.
    """
    for name in (*kind(kind_name).names, "dtype", "latency_us"):
        if name not in rows.column_names:
            raise TrainingError(f"the {kind_name} table lacks column {name!r}; it has {', '.join(rows.column_names)}")
    latency = _column(rows, "latency_us").astype(np.float64)
    dtype = _column(rows, "dtype").astype(str)
    keep = np.isfinite(latency) & (latency > 0)
    if KINDS[kind_name].family in ("gemm", "attention"):
        keep &= np.isin(dtype, [name for name in np.unique(dtype) if device.supports(str(name))])
    backend = _column(rows, "backend", DEFAULT_BACKEND).astype(str)
    made = []
    for name in np.unique(backend[keep]):
        chosen = np.flatnonzero(keep & (backend == name))
        made.append(
            Table(
                kind_name,
                device,
                str(name),
                {dim: _column(rows, dim)[chosen].astype(np.int64) for dim in KINDS[kind_name].names},
                dtype[chosen],
                _column(rows, "out_dtype", dtype).astype(str)[chosen],
                _column(rows, "cache", "warm").astype(str)[chosen],
                latency[chosen],
                fingerprint,
                {name: _distinct(rows, name) for name in ("source", "license", "torch", "cuda", "driver")},
            )
        )
    return made


def fit(table: Table, options: Options | None = None) -> Outcome:
    """Evaluate all candidates on held-out groups, fit the best on every row, calibrate its interval.

    Deterministic for a seed. TrainingError for a table of fewer than five rows.
    """
    options = options or Options()
    if len(table) < MIN_ROWS:
        raise TrainingError(f"{table.kind} on {table.device.id} has {len(table)} usable rows; {MIN_ROWS} are needed")
    ops = table.frame()
    task = Task(
        feature_names(table.kind),
        ops.matrix,
        np.log(table.latency_us / ops.analytical_us),
        _weights(ops.analytical_us, options.weight_power),
        options.seed,
        options.threads,
    )
    folds = split(table.kind, table.columns, options.folds, options.seed, options.random_rows)
    prepared = _prepared(task, options)
    residuals = _held_out(task, folds, prepared, options)
    name = choose(residuals, task.weights, np.arange(len(table)))
    correction = options.candidate(name).fit(task, prepared[name])
    crossed = cross_fit(residuals, ops.analytical_us, task.weights, folds, options.coverage)
    result = {
        "n": len(table),
        **{f"test_{metric}": value for metric, value in summarise(crossed.residual).items()},
        "coverage": float(np.mean(crossed.inside)),
        "interval_width": float(np.median(np.expm1(crossed.width))),
        "roofline_median_ape": _median_ape(table.latency_us, ops.roofline_us),
        "analytical_median_ape": _median_ape(table.latency_us, ops.analytical_us),
        "candidates": {each: summarise(residual)["median_ape"] for each, residual in residuals.items()},
        "chosen": name,
        "split": folds.label,
    }
    predictor = _predictor(table, ops, task, correction, residuals[name], result, options)
    return Outcome(predictor, table, ops, table.latency_us / np.exp(crossed.residual), result)


def train(
    store: MeasurementStore,
    device: Device | str,
    kinds: Iterable[str] | None = None,
    options: Options | None = None,
    registry: Registry | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Train every kind a store holds for a device; results by kind (``kind@backend`` beside the default backend).

    With a registry, predictors are registered there. A kind that cannot be learned has an ``error`` in place of
    figures. TrainingError when the store knows neither the device nor a kind asked for.
    """
    if registry is not None:
        return train_and_register(store, device, registry, kinds, options, progress)[0]
    made = outcomes(store, device, kinds, options, progress)
    return {label: _result(outcome, None if isinstance(outcome, str) else outcome.predictor) for label, outcome in made}


def train_and_register(
    store: MeasurementStore,
    device: Device | str,
    registry: Registry,
    kinds: Iterable[str] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[Trained]]:
    """As :func:`train`, with what was registered beside the results, for tracking."""
    options = options or Options()
    results, trained = {}, []
    for label, outcome in outcomes(store, device, kinds, options, progress):
        predictor = None
        if not isinstance(outcome, str):
            predictor = registry.register(outcome.predictor)
            trained.append(Trained(label, outcome, predictor, registry.path(predictor), options))
        results[label] = _result(outcome, predictor)
    return results, trained


def _result(outcome: Outcome | str, predictor: Predictor | None) -> dict[str, Any]:
    if isinstance(outcome, str) or predictor is None:
        return {"error": str(outcome)}
    return {**outcome.result, "predictor": f"{predictor.name}@{predictor.version}"}


def outcomes(
    store: MeasurementStore,
    device: Device | str,
    kinds: Iterable[str] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, Outcome | str]]:
    """Each kind and backend by label as soon as it is trained; the reason in place of an outcome where it cannot be."""
    target = _device(store, device)
    known = list(store.kinds())
    wanted = list(kinds) if kinds is not None else known
    for name in wanted:
        if name not in known:
            raise TrainingError(f"the store has no {kind(name).name} measurements; it has {', '.join(known) or 'none'}")
    for name in wanted:
        rows = store.read(name, target.id)
        backends = tables(name, rows, target, store.fingerprint(name, target.id)) if rows.num_rows else []
        main = default_backend(backends)
        for table in backends:
            label = name if table.backend == main else f"{name}@{table.backend}"
            if progress:
                progress(f"training {label} on {len(table)} rows")
            try:
                yield label, fit(table, options)
            except TrainingError as error:
                yield label, str(error)


def default_backend(backends: list[Table]) -> str | None:
    """The backend that answers when none is named, as in :meth:`Registry.default_backend`."""
    if any(table.backend == DEFAULT_BACKEND for table in backends):
        return DEFAULT_BACKEND
    return max(backends, key=len).backend if backends else None


def _held_out(task: Task, folds: Split, prepared: Mapping[str, Any], options: Options) -> dict[str, np.ndarray]:
    """ln(measured / predicted) of every row by each candidate, from the fold that left the row's group out."""
    residuals = {name: np.empty(len(task.target)) for name in prepared}
    for index in range(folds.count):
        seen, unseen = folds.held_out(index)
        part = task.rows(seen)
        for name, work in prepared.items():
            made = options.candidate(name).fit(part, work)
            residuals[name][unseen] = task.target[unseen] - made.predict(task.matrix[unseen])
    return residuals


def _prepared(task: Task, options: Options) -> dict[str, Any]:
    rows = len(task.target)
    names = [name for name in options.candidates if options.candidate(name).able(rows)] or [BASELINE]
    return {name: options.candidate(name).prepare(task) for name in names}


def _predictor(
    table: Table,
    ops: Frame,
    task: Task,
    correction: Correction,
    residual: np.ndarray,
    result: Mapping[str, Any],
    options: Options,
) -> Predictor:
    from .. import __version__

    card = {
        **result,
        "stated_coverage": options.coverage,
        "fingerprint": table.fingerprint,
        "sources": dict(table.sources),
        "opcast_version": __version__,
        "seed": options.seed,
        "dtypes": sorted({str(each) for each in table.dtype}),
        "range": {name: [int(values.min()), int(values.max())] for name, values in table.columns.items()},
    }
    return Predictor(
        table.kind,
        table.device,
        table.backend,
        "0",
        correction,
        calibrate(residual, ops.analytical_us, options.coverage),
        surround(ops.matrix, task.names, options.seed),
        card,
    )


def _weights(analytical_us: np.ndarray, power: float) -> np.ndarray:
    weights = (analytical_us / np.median(analytical_us)) ** power
    weights = np.clip(weights, 0.25, 4.0)
    return np.asarray(weights / weights.mean())


def _median_ape(measured_us: np.ndarray, predicted_us: np.ndarray) -> float:
    return float(100.0 * np.median(np.abs(predicted_us - measured_us) / measured_us))


def _device(store: MeasurementStore, device: Device | str) -> Device:
    if isinstance(device, Device):
        return device
    from ..datasets.devices import DeviceError, load_device

    measured = store.device(device)
    if measured is not None:
        return measured
    try:
        return load_device(device)
    except DeviceError as error:
        raise TrainingError(f"{error}; the store holds no measured figures of it either") from None


def _column(rows: pa.Table, name: str, default: Any = None) -> np.ndarray:
    if name in rows.column_names:
        return np.asarray(rows.column(name).to_numpy(zero_copy_only=False))
    if isinstance(default, np.ndarray):
        return default
    return np.full(rows.num_rows, default)


def _distinct(rows: pa.Table, name: str) -> list[str]:
    if name not in rows.column_names:
        return []
    return sorted({str(each) for each in rows.column(name).unique().to_pylist() if each is not None})[:20]

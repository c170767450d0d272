"""Fitting: from a table of measurements to an evaluated, calibrated predictor.

One predictor is trained per (kind, device, backend); dtype and cache state are features. The predictor is fitted on
every row; ``eval`` chooses what is reported of the procedure (:mod:`.evaluation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..datasets.counts import counted
from ..datasets.devices import Device, DeviceError, load_device
from ..datasets.own_warnings import own_warnings
from ..datasets.version import __version__
from ..datasets.vocabulary import kind
from .candidates import Options
from .clocks import LONG_KINDS, with_own_clocks
from .evaluation import CrossFit, evaluate, summarise
from .features import Frame
from .few_rows import mended
from .learning import Learned, learn
from .outcome import TrainingOutcome
from .predictor import Predictor, PredictorError
from .promotion import judge
from .registry import Registry
from .sites import compared, for_any_site, without_effects
from .table import MeasurementStore, MeasurementTable, TrainingError, default_backend, tables, throttled
from .threads import one_thread
from .transfer import evaluate_device
from .tuning import searched

__all__ = [
    "MeasurementTable",
    "Trained",
    "TrainingError",
    "TrainingOutcome",
    "fit",
    "outcomes",
    "tables",
    "train",
    "train_and_register",
]

MIN_ROWS = 5
SHIPPED = Path(__file__).parent / "shipped"
SIDE_BY_SIDE = 20_000  # rows from which starting processes pays


@dataclass(frozen=True, eq=False)
class Trained:
    """A registered predictor and how it came about."""

    label: str
    outcome: TrainingOutcome
    predictor: Predictor
    path: Path
    promoted: bool = True
    why: str = ""


@one_thread()
def fit(table: MeasurementTable, options: Options | None = None) -> TrainingOutcome:
    """Evaluate all candidates on held-out groups, fit the best on every row, calibrate its interval.

    Deterministic for a seed. TrainingError for a table of fewer than five rows.
    """
    if len(table) < MIN_ROWS:
        raise TrainingError(f"{table.kind} on {table.device.id} has {len(table)} usable rows; {MIN_ROWS} are needed")
    options = (options or Options()).for_kind(table.kind)
    sites = compared(table)
    if sites is not None:
        table = without_effects(table, sites)
    ops = table.frame()
    folds = None
    if options.trials:
        options, folds = searched(table, ops, options)
    learned = learn(table, ops, options, folds)
    if sites is not None:
        learned = dataclasses.replace(learned, intervals=for_any_site(learned.intervals, sites))
    reports, crossed = _evaluations(table, ops, options, learned)
    main = next(name for name in [*crossed, "groups"] if name in reports)
    result = _result_of(table, ops, learned, reports, main)
    if why_not := options.why_not(learned.chosen, len(table)):
        result["why_not"] = why_not
    if options.trials:
        result["tuned"] = dataclasses.asdict(options.lightgbm)
    if sites is not None:
        result["sites"] = dataclasses.asdict(sites)
    predictor = _predictor(table, ops, learned, result, options)
    held_out_us = table.latency_us[crossed[main].rows] / np.exp(crossed[main].residual)
    return TrainingOutcome(predictor, table, crossed[main].rows, held_out_us, result, options, learned)


def _evaluations(
    table: MeasurementTable, ops: Frame, options: Options, learned: Learned
) -> tuple[dict[str, dict[str, Any]], dict[str, CrossFit]]:
    """Reports by name, and answers of those that could be made; by groups where none of the modes asked for can."""
    reports: dict[str, dict[str, Any]] = {}
    crossed: dict[str, CrossFit] = {}
    for mode in options.evaluations:
        if mode != "device":  # needs other devices' tables: the store's affair
            folds, answers = evaluate(table, ops, options, mode, learned)
            reports.update(folds)
            crossed.update(answers)
    if not crossed:
        folds, crossed = evaluate(table, ops, options, "groups", learned)
        reports.update(folds)
    return reports, crossed


def _result_of(
    table: MeasurementTable, ops: Frame, learned: Learned, reports: Mapping[str, Mapping[str, Any]], main: str
) -> dict[str, Any]:
    """What ``opcast train`` says of one kind: the contract's fields from the first evaluation, then all of them."""
    chief = reports[main]
    errors = {f"test_{name}": chief[name] for name in ("median_ape", "mean_ape", "p90_ape", "max_ape", "bias")}
    scored = learned.folds.scored
    return {
        "n": len(table),
        **errors,
        "coverage": chief["coverage"],
        "interval_width": chief["interval_width"],
        "roofline_median_ape": _median_ape(table.latency_us, ops.roofline_us),
        "analytical_median_ape": _median_ape(table.latency_us, ops.analytical_us),
        "candidates": {
            name: summarise(residuals[scored])["median_ape"] for name, residuals in learned.residuals.items()
        },
        "chosen": learned.chosen,
        "split": chief["split"],
        "evaluations": {name: dict(residuals) for name, residuals in reports.items()},
    }


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
    results = outcomes(store, device, kinds, options, progress)
    return {
        label: {"error": outcome} if isinstance(outcome, str) else _named(outcome, outcome.predictor)
        for label, outcome in results
    }


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
    results: dict[str, dict[str, Any]] = {}
    trained = []
    for label, outcome in outcomes(store, device, kinds, options, progress, registry):
        if isinstance(outcome, str):
            results[label] = {"error": outcome}
            continue
        current = _current(registry, outcome.predictor)
        answered = _mean_error(current, outcome) if current else None
        verdict = judge(outcome.predictor.card, current.card if current else None, options.promote, answered)
        predictor = registry.register(outcome.predictor, verdict.promoted)
        trained.append(Trained(label, outcome, predictor, registry.path(predictor), *verdict))
        results[label] = {**_named(outcome, predictor), "promoted": verdict.promoted, "why": verdict.why}
        if progress and not verdict.promoted:
            progress(
                f"{predictor.name}@{predictor.version} does not become current: {verdict.why} (promote=true forces)"
            )
    return results, trained


def _named(outcome: TrainingOutcome, predictor: Predictor) -> dict[str, Any]:
    return {**outcome.result, "predictor": f"{predictor.name}@{predictor.version}"}


def _current(registry: Registry, predictor: Predictor) -> Predictor | None:
    try:
        return registry.find(predictor.kind, predictor.device_id, predictor.backend)
    except PredictorError:  # damaged, or of another version: anything is better
        return None


def _mean_error(predictor: Predictor, outcome: TrainingOutcome) -> float:
    """Mean error in percent on the rows that the outcome was scored on."""
    test = outcome.table.take(outcome.held_out)
    residual = np.log(test.latency_us / predictor.predict_frame(test.frame()).latency_us)
    return float(summarise(residual)["mean_ape"])


def outcomes(
    store: MeasurementStore,
    device: Device | str,
    kinds: Iterable[str] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
    registry: Registry | None = None,
) -> Iterator[tuple[str, TrainingOutcome | str]]:
    """Each kind and backend by label as soon as it is trained; the reason in place of an outcome where it cannot be.

    With a registry, its predictors and those that ship may answer for a device of few rows, corrected by these.
    """
    target, stored = _device(store, device), list(store.kinds())
    target = with_own_clocks(target, [(name, store.read(name, target.id)) for name in LONG_KINDS if name in stored])
    names = list(kinds) if kinds is not None else stored
    for name in names:
        if name not in stored:
            raise TrainingError(
                f"the store has no {kind(name).name} measurements; it has {', '.join(stored) or 'none'}"
            )
    options = options or Options()
    jobs: list[tuple[str, MeasurementTable]] = []
    for name in names:
        rows = store.read(name, target.id)
        backends = tables(name, rows, target, store.fingerprint(name, target.id), options.eager)
        hot = int(throttled(rows).sum())
        if rows.num_rows and not backends:
            why = f"{hot} were taken on a throttled device; " if hot else ""
            yield name, f"none of {rows.num_rows} rows is usable ({why}predictor.eager=true takes eagerly timed ones)"
        elif hot and progress:
            progress(f"{name}: {hot:,} of {rows.num_rows:,} rows were taken on a throttled device and are left out")
        main = default_backend(backends)
        jobs += [(name if table.backend == main else f"{name}@{table.backend}", table) for table in backends]
    jobs.sort(key=lambda job: -len(job[1]))  # the longest first, so that no worker is left with it
    if progress:
        progress(f"training {counted(len(jobs), 'table')}, {counted(sum(len(table) for _, table in jobs), 'row')}")
    for position, (label, outcome) in enumerate(_fitted(jobs, options), 1):
        if registry is not None and not isinstance(outcome, str):
            others = [table for _, table in jobs if table.kind == outcome.table.kind]
            outcome = mended(outcome, [registry, Registry(SHIPPED)], others)
        if progress:
            line = outcome if isinstance(outcome, str) else _told(outcome)
            progress(f"{position} of {len(jobs)}: {label}, {line}")
        yield label, outcome if isinstance(outcome, str) else _across_devices(store, outcome, options)


def _fitted(
    jobs: Sequence[tuple[str, MeasurementTable]], options: Options
) -> Iterator[tuple[str, TrainingOutcome | str]]:
    """Each job's outcome, in order; large ones side by side in processes of one thread each.

    Threads inside one fit would spin against each other on a busy machine; tables side by side do not, and neither
    their number nor their order changes a result.
    """
    if options.workers == 1 or len(jobs) < 2 or sum(len(table) for _, table in jobs) < SIDE_BY_SIDE:
        yield from (_attempt(label, table, options) for label, table in jobs)
        return
    from joblib import Parallel, delayed

    work = Parallel(n_jobs=options.workers, return_as="generator")
    yield from work(delayed(_attempt)(label, table, options) for label, table in jobs)


@own_warnings()
def _attempt(label: str, table: MeasurementTable, options: Options) -> tuple[str, TrainingOutcome | str]:
    try:
        return label, fit(table, options)
    except TrainingError as error:
        return label, str(error)


def _told(outcome: TrainingOutcome) -> str:
    result = outcome.result
    text = f"{counted(result['n'], 'row')}, {result['chosen']}: median error {result['test_median_ape']:.1f} % held out"
    return f"{text}; {result['why_not']}" if "why_not" in result else text


def _across_devices(store: MeasurementStore, outcome: TrainingOutcome, options: Options) -> TrainingOutcome:
    """With what the other devices' rows, and some of this one's, would have answered, where it was asked for."""
    if "device" not in options.evaluations:
        return outcome
    table = outcome.table
    try:
        evaluation = evaluate_device(store, table.kind, table.device, outcome.options, backend=table.backend)
    except TrainingError as error:
        evaluation = {"device": {"error": str(error)}}
    evaluations = {**outcome.result["evaluations"], **evaluation}
    result = {**outcome.result, "evaluations": evaluations}
    predictor = dataclasses.replace(outcome.predictor, card={**outcome.predictor.card, "evaluations": evaluations})
    return dataclasses.replace(outcome, result=result, predictor=predictor)


def _predictor(
    table: MeasurementTable, ops: Frame, learned: Learned, result: Mapping[str, Any], options: Options
) -> Predictor:
    card = {
        **result,
        "stated_coverage": options.coverage,
        "fingerprint": table.fingerprint,
        "sources": dict(table.sources),
        "opcast_version": __version__,
        "seed": options.seed,
        "dtypes": sorted({str(dtype) for dtype in table.dtype}),
        **({"hidden_us": table.hidden_us} if table.hidden_us else {}),
        "range": {name: [int(values.min()), int(values.max())] for name, values in table.columns.items()},
    }
    parts = learned.correction, learned.intervals, learned.envelope
    return Predictor(table.kind, table.device, table.backend, "0", *parts, card)


def _median_ape(measured_us: np.ndarray, predicted_us: np.ndarray) -> float:
    return float(100.0 * np.median(np.abs(predicted_us - measured_us) / measured_us))


def _device(store: MeasurementStore, device: Device | str) -> Device:
    if isinstance(device, Device):
        return device
    measured = store.device(device)
    if measured is not None:
        return measured
    try:
        return load_device(device)
    except DeviceError as error:
        raise TrainingError(f"{error}; the store holds no measured figures of it either") from None

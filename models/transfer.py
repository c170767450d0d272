"""One model per kind over all devices, for a device with few rows or none, and what it is worth there.

A product that fills the same share of waves at the same distance from the ridge wastes about the same share of its
analytical time on another GPU: what is learned is ln(measured / analytical), from features that are mostly relative
to the device. Figures of the device stay in: with them a new one is answered by the devices most like it instead of
by the mean of all. Some rows of a device then correct the pooled answer as a table corrects the analytical one, if
that beats learning from those rows alone.

Tables correspond across devices when they come from the same framework: the same kernel where a device has rows of
it, else its rows of the same formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..datasets.backends import framework
from ..datasets.devices import Device, DeviceError, load_device
from .candidates import Options, Task
from .choice import is_own, sources_of
from .correction import Correction
from .envelope import surround
from .evaluation import summarise
from .features import Frame, feature_names
from .forest import joined as joined_forests
from .intervals import Intervals, calibrate, classes_of
from .learning import Learned, choose, learn, weigh, weights_of
from .predictor import ANY, Predictor, PredictorError
from .registry import Registry
from .splits import Split
from .table import MeasurementStore, MeasurementTable, TrainingError, default_backend, tables, take
from .threads import one_thread
from .together import learn_together, of_own_rows

DONOR_ROWS = 12_000  # of one device: more weigh one device against the others, and teach little about a new one
SCORED_ROWS = 4_000
POINTS = (0, 50, 200, 1000)
SEEDS = 3  # draws of points that an evaluation averages over, one where a draw has 500 or more
MIN_LEAF = 20  # rows a leaf of the pooled model needs: finer ones are habits of one device
ALONE = "alone"  # the way that asks no other device
TOGETHER = "together"  # the way that asks other kernels of the device (:mod:`.together`)
FEW = ("calibrated", "interpolation")  # what corrects another device's answer on few rows
MOST_BASES = 2  # that few rows correct in turn


@dataclass(frozen=True, eq=False)
class _Pool:
    """Rows of several devices end to end; ``device`` and ``home`` [n] name the device and what is left out with it."""

    task: Task
    analytical_us: np.ndarray
    device: np.ndarray
    home: np.ndarray


def pool(donors: Sequence[MeasurementTable], options: Options | None = None) -> Predictor:
    """The predictor of device ``any`` from tables of one kind of two devices or more.

    Its interval covers what was missed where a whole architecture (or, of one architecture, a device) was left out.
    Deterministic for a seed. TrainingError for tables of one device only, or of several kinds.
    """
    if len({table.kind for table in donors}) > 1:
        raise TrainingError("tables of several kinds cannot be pooled")
    if len({table.device.id for table in donors}) < 2:
        raise TrainingError("a model over devices needs rows of two devices at least")
    kind_name = donors[0].kind
    options = (options or Options()).for_kind(kind_name)
    merged = _merged(donors, options)
    residual = _left_out(merged, options)
    classes = classes_of(merged.task.names, merged.task.matrix)
    return Predictor(
        kind_name,
        _stand_in(donors),
        _shared_backend(donors),
        "0",
        _fitted(merged.task, options),
        calibrate(residual, merged.analytical_us, classes, options.coverage),
        surround(merged.task.matrix, merged.task.names, options.seed),
        _pool_card(donors, merged, residual, options),
    )


@dataclass(frozen=True, eq=False)
class Ways:
    """A device's rows learned in every way that there is: ``alone``, ``together`` with those of other kernels of the
    device, or as a correction of another device's answer.

    ``chosen`` is the way that missed held-out groups least, ``bases`` are the predictors that are corrected,
    ``kernels`` the backends that a table is learned with.
    """

    table: MeasurementTable
    options: Options
    ops: Frame
    weights: np.ndarray
    learned: Mapping[str, Learned]
    bases: Mapping[str, Predictor]
    kernels: Sequence[str]
    chosen: str

    @property
    def loss(self) -> dict[str, np.ndarray]:
        """ln(measured / predicted) [n] of rows held out, by way."""
        return {label: learned.residuals[learned.chosen] for label, learned in self.learned.items()}

    @property
    def folds(self) -> Split:
        return self.learned[ALONE].folds

    @property
    def names(self) -> Sequence[str]:
        return self.learned[ALONE].names


def learned_ways(
    bases: Sequence[Predictor],
    table: MeasurementTable,
    options: Options,
    folds: Split | None = None,
    alone: Learned | None = None,
    others: Sequence[MeasurementTable] = (),
) -> Ways:
    """All ways to learn a table, compared on groups that were held out, with options of its kind.

    Few rows correct another device's answer by what suits few, unless the user named an algorithm. ``alone`` is what
    the rows taught by themselves, where that is known; its folds are those of all ways but ``together``, which leaves
    groups out of the ``others`` (tables of kernels of the same device), too.
    """
    ops = table.frame()
    usual = len(table) > options.interpolation.max_rows or options.named
    few = options if usual else dataclasses.replace(options, candidates=FEW)
    weights = weights_of(table, ops, options)
    ways = {ALONE: alone or learn(table, ops, options, folds)}
    folds = ways[ALONE].folds
    kernels = of_own_rows(table, others, options)
    if kernels:
        ways[TOGETHER] = learn_together(table, ops, kernels, options, ways[ALONE])
    nearest = {_label(base): base for base in nearest_bases(bases, table, ops, weights)}
    for label, base in nearest.items():
        answered = Frame(ops.matrix, ops.analytical_us * np.exp(base.correction.predict(ops.matrix)), ops.roofline_us)
        ways[label] = learn(table, answered, few, folds)
    loss = {label: way.residuals[way.chosen] for label, way in ways.items()}
    backends = sorted(kernel.backend for kernel in kernels)
    chosen = choose(loss, weights, ways[ALONE].folds.scored)
    return Ways(table, options, ops, weights, ways, nearest, backends, chosen)


@one_thread()
def adapt(bases: Sequence[Predictor], table: MeasurementTable, options: Options | None = None) -> Predictor:
    """A device's predictor from those of others and rows of the device, or from the rows alone where that is better.

    ``bases``: a pooled predictor, other devices' own, or both. The :data:`MOST_BASES` that follow the rows best but
    for one factor are corrected by them; all ways are compared on the same held-out groups. Deterministic for a seed.
    TrainingError for predictors of another kind or a table of fewer than five rows.
    """
    if strange := next((base for base in bases if base.kind != table.kind), None):
        raise TrainingError(f"{strange.name} cannot be adapted to {table.kind}")
    if len(table) < 5:
        raise TrainingError(f"{table.kind} on {table.device.id} has {len(table)} usable rows; 5 are needed to adapt")
    return adapted(learned_ways(bases, table, (options or Options()).for_kind(table.kind)))


def adapted(ways: Ways) -> Predictor:
    """The predictor of the way that was chosen."""
    table, ops, options, label = ways.table, ways.ops, ways.options, ways.chosen
    rows, learned = ways.folds.scored, ways.learned[label]
    residual = ways.loss[label][rows]
    base = ways.bases.get(label)
    correction = joined(base.correction, learned.correction) if base else learned.correction
    intervals = learned.intervals
    if label != TOGETHER:
        intervals = _own_intervals(learned, residual, take(ops, rows), options.coverage)
    if table.noise is not None:
        intervals = intervals.at_least(table.noise, ops.analytical_us, classes_of(learned.names, ops.matrix))
    card = {
        "n": len(table),
        **{f"test_{key}": value for key, value in summarise(residual).items()},
        "chosen": f"{label}: {learned.chosen}",
        "split": learned.folds.label,
        **({"adapted_from": label} if base else {"learned_with": list(ways.kernels)} if label == TOGETHER else {}),
        "candidates": {key: summarise(losses[rows])["median_ape"] for key, losses in ways.loss.items()},
        "fingerprint": table.fingerprint,
        "sources": dict(table.sources),
        "stated_coverage": options.coverage,
        "seed": options.seed,
        "dtypes": sorted({str(losses) for losses in table.dtype}),
    }
    return Predictor(table.kind, table.device, table.backend, "0", correction, intervals, learned.envelope, card)


def nearest_bases(
    bases: Sequence[Predictor], table: MeasurementTable, ops: Frame, weights: np.ndarray
) -> list[Predictor]:
    """The few that miss a table's rows least once each is off by one factor, the nearest first.

    One that interpolates is left out: all that can correct it is a factor.
    """
    target, missed = np.log(table.latency_us / ops.analytical_us), []
    for base in bases:
        if base.correction.lines is None and base.correction.kriging is None:
            residual = target - base.correction.predict(ops.matrix)
            missed.append(
                (float(np.average(np.minimum(np.abs(residual - np.median(residual)), 1.0), weights=weights)), base)
            )
    return [base for _, base in sorted(missed, key=lambda entry: (entry[0], _label(entry[1])))[:MOST_BASES]]


def bases_of(registries: Sequence[Registry], table: MeasurementTable) -> list[Predictor]:
    """What is known of a kind by others: tables of this device by other labs, current predictors of other devices, and
    pools that never saw this device.

    All of formats that the table has; of two that a backend of a device has, the first registry's.
    """
    by_source: dict[tuple[str, str], Predictor] = {}
    formats = {str(dtype) for dtype in np.unique(table.dtype)}
    for registry in registries:
        for device_id in registry.devices():
            for backend in registry.backends(table.kind, device_id):
                try:
                    base = registry.find(table.kind, device_id, backend)
                except PredictorError:  # damaged, or of another version
                    continue
                if base is None or base.device.synchronous or (device_id, backend) in by_source:
                    continue
                same = set(sources_of(base.card)).intersection(table.sources.get("source", ()))
                if device_id == table.device.id and (is_own(sources_of(base.card)) or same):
                    continue  # learned from these rows, or from rows like them
                devices = {table.device.id}.intersection(base.card.get("devices", ()))
                if not devices and formats.intersection(base.card.get("dtypes", ())):
                    by_source[device_id, backend] = base
    return list(by_source.values())


def _label(base: Predictor) -> str:
    return f"{base.name}@{base.version}"


def joined(first: Correction, second: Correction) -> Correction:
    """A correction that answers the sum of two, of which at most one interpolates. ValueError otherwise."""
    if (first.kriging is not None and second.kriging is not None) or first.lines is not None:
        raise ValueError("two interpolations cannot be joined")
    forests = [correction.forest for correction in (first, second) if correction.forest is not None]
    forest = joined_forests(*forests) if len(forests) == 2 else next(iter(forests), None)
    return Correction(
        first.features, first.offset + second.offset, forest, first.kriging or second.kriging, second.lines
    )


def donors_of(
    store: MeasurementStore, kind_name: str, backend: str, dtypes: Iterable[str], without: str = "", eager: bool = False
) -> list[MeasurementTable]:
    """Tables of the kind on all devices but one that correspond to a backend and have rows of some of the formats."""
    formats = set(dtypes)
    donors = []
    for device_id in store.devices(kind_name):
        target = None if device_id == without else _device(store, device_id)
        if target is None:
            continue
        read_tables = tables(
            kind_name, store.read(kind_name, device_id), target, store.fingerprint(kind_name, device_id), eager
        )
        like = [table for table in read_tables if framework(table.backend) == framework(backend)]
        like = [_of_dtypes(table, formats) for table in like]
        like = [table for table in like if len(table)]
        kernel = backend.partition(":")[2]
        same = [table for table in like if kernel and table.backend.partition(":")[2] == kernel]
        donors += same or like
    return donors


def train_pooled(
    store: MeasurementStore,
    registry: Registry,
    kinds: Iterable[str] | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Pool every kind (of those named) and framework that two devices have in common; results by ``kind@framework``.

    Predictors are registered for device ``any``. TrainingError for a kind that the store lacks.
    """
    options = options or Options()
    stored = list(store.kinds())
    results: dict[str, dict[str, Any]] = {}
    for kind_name in list(kinds) if kinds is not None else stored:
        if kind_name not in stored:
            raise TrainingError(f"the store has no {kind_name} measurements; it has {', '.join(stored) or 'none'}")
        for name, donors in _by_framework(store, kind_name, options.eager).items():
            label = f"{kind_name}@{name}"
            if len({table.device.id for table in donors}) < 2:
                results[label] = {"error": f"only {donors[0].device.id} has rows of it"}
                continue
            entry = registry.register(pool(donors, options))
            results[label] = {**entry.card, "predictor": f"{entry.name}@{entry.version}"}
            if progress:
                progress(f"{label}: {entry.card['test_median_ape']:.1f} % where an architecture is left out")
    return results


def evaluate_device(
    store: MeasurementStore,
    kind_name: str,
    device: Device,
    options: Options | None = None,
    points: Sequence[int] = POINTS,
    backend: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Errors on a device that was left out whole, with 0 or more of its rows, by ``device+POINTS``.

    Points are drawn at random, averaged over seeds; ``… spread`` takes them farthest-first in log sizes instead.
    Scored are rows (4,000 at most) that no draw had, of formats that other devices have.
    TrainingError when no other device has rows that correspond.
    """
    options = (options or Options()).for_kind(kind_name)
    own_tables = tables(kind_name, store.read(kind_name, device.id), device, eager=options.eager)
    chosen = backend or default_backend(own_tables)
    table = next((candidate for candidate in own_tables if candidate.backend == chosen), None)
    if table is None:
        raise TrainingError(f"{kind_name} on {device.id} has no rows of backend {chosen}")
    donors = donors_of(store, kind_name, table.backend, np.unique(table.dtype), device.id, options.eager)
    if not donors:
        raise TrainingError(f"no other device has {kind_name} rows of {framework(table.backend)} in its formats")
    shared = {str(name) for candidate in donors for name in np.unique(candidate.dtype)}
    return score_left_out(_of_dtypes(table, shared), donors, options, points)


def score_left_out(
    table: MeasurementTable, donors: Sequence[MeasurementTable], options: Options, points: Sequence[int] = POINTS
) -> dict[str, dict[str, Any]]:
    """:func:`evaluate_device` for tables at hand."""
    base = pool(donors, options)
    reports = {}
    for count in points:
        if count and count > len(table) // 2:
            reports[f"device+{count}"] = {"error": f"{len(table)} rows are too few to draw {count} and score the rest"}
            continue
        for rule in ("random", "spread") if count else ("random",):
            label = f"device+{count}" + (" spread" if rule == "spread" else "")
            reports[label] = _score(base, table, options, count, rule)
    return reports


def draw(table: MeasurementTable, count: int, rule: str = "random", seed: int = 0) -> np.ndarray:
    """Positions of ``count`` rows: at random, or spread farthest-first over log sizes (of 4,096 rows)."""
    order = np.random.default_rng(seed).permutation(len(table))
    if rule == "random":
        return np.sort(order[:count])
    some = order[:4096]
    sizes = np.stack([np.log2(np.maximum(values[some], 0.5)) for values in table.columns.values()], axis=1)
    sizes = sizes / np.maximum(sizes.std(axis=0), 1e-9)
    near = np.full(len(some), np.inf)
    picked = [0]
    while len(picked) < min(count, len(some)):
        near = np.minimum(near, ((sizes - sizes[picked[-1]]) ** 2).sum(axis=1))
        picked.append(int(np.argmax(near)))
    return np.sort(some[picked])


def _score(base: Predictor, table: MeasurementTable, options: Options, count: int, rule: str) -> dict[str, Any]:
    residuals, inside, widths, chosen = [], [], [], []
    for seed in range(1 if not count or count >= 500 else SEEDS):
        train_rows = draw(table, count, rule, options.seed + seed)
        others = np.setdiff1d(np.arange(len(table)), train_rows)
        others = np.sort(np.random.default_rng(seed).permutation(others)[:SCORED_ROWS])
        predictor = adapt([base], table.take(train_rows), options) if count else base
        test = table.take(others)
        prediction = predictor.predict_frame(test.frame())
        residuals.append(np.log(test.latency_us / prediction.latency_us))
        widths.append(np.log(prediction.high_us / prediction.latency_us))
        inside.append(np.abs(residuals[-1]) <= widths[-1])
        chosen.append(str(predictor.card["chosen"]))
    how = f"whole device left out, {count} of its rows given" + (f", drawn {rule}" if count else "")
    return {
        "split": how,
        "n": len(residuals[0]),
        **summarise(np.concatenate(residuals)),
        "coverage": float(np.mean(np.concatenate(inside))),
        "interval_width": float(np.median(np.expm1(np.concatenate(widths)))),
        "chosen": chosen,
        "donors": list(base.card["devices"]),
    }


def _merged(donors: Sequence[MeasurementTable], options: Options) -> _Pool:
    """Rows of all devices with features, each device weighing the same; architectures to leave out."""
    names = feature_names(donors[0].kind)
    shares: dict[str, int] = {}
    for table in donors:
        shares[table.device.id] = shares.get(table.device.id, 0) + 1
    matrices, targets, analytical, weights, devices, homes = [], [], [], [], [], []
    several = len({table.device.architecture for table in donors}) > 1
    for table in donors:
        rows = np.random.default_rng(options.seed).permutation(len(table))[: DONOR_ROWS // shares[table.device.id]]
        sample = table.take(np.sort(rows))
        ops = sample.frame()
        matrices.append(ops.matrix)
        analytical.append(ops.analytical_us)
        targets.append(np.log(sample.latency_us / ops.analytical_us))
        weights.append(weigh(ops.analytical_us, options.weight_power) / (len(sample) * shares[table.device.id]))
        devices += [table.device.id] * len(sample)
        homes += [table.device.architecture if several else table.device.id] * len(sample)
    weight = np.concatenate(weights)
    task = Task(names, np.concatenate(matrices), np.concatenate(targets), weight / weight.mean(), options.seed)
    return _Pool(task, np.concatenate(analytical), np.array(devices), np.array(homes))


def _left_out(merged: _Pool, options: Options) -> np.ndarray:
    """ln(measured / predicted) [n] of each row by a model that saw nothing of its architecture."""
    residual = np.empty(len(merged.home))
    for name in np.unique(merged.home):
        train_rows, test_rows = np.flatnonzero(merged.home != name), np.flatnonzero(merged.home == name)
        fitted = _fitted(merged.task.rows(train_rows), options)
        residual[test_rows] = merged.task.target[test_rows] - fitted.predict(merged.task.matrix[test_rows])
    return residual


def _fitted(task: Task, options: Options) -> Correction:
    trees = dataclasses.replace(options.lightgbm, min_leaf=max(options.lightgbm.min_leaf, MIN_LEAF))
    return trees.fit(task, None) if trees.able(len(task.target)) else options.calibrated.fit(task, None)


def _own_intervals(learned: Learned, residual: np.ndarray, ops: Frame, coverage: float) -> Intervals:
    """Intervals whose bands are in analytical time, as a predictor asks for them, grown outside as learned."""
    intervals = calibrate(residual, ops.analytical_us, classes_of(learned.names, ops.matrix), coverage)
    return dataclasses.replace(intervals, growth=learned.intervals.growth)


def _by_framework(store: MeasurementStore, kind_name: str, eager: bool) -> dict[str, list[MeasurementTable]]:
    by_framework: dict[str, list[MeasurementTable]] = {}
    for device_id in store.devices(kind_name):
        target = _device(store, device_id)
        if target is not None:
            mark = store.fingerprint(kind_name, device_id)
            for table in tables(kind_name, store.read(kind_name, device_id), target, mark, eager):
                by_framework.setdefault(framework(table.backend), []).append(table)
    return by_framework


def _of_dtypes(table: MeasurementTable, dtypes: set[str]) -> MeasurementTable:
    return table.take(np.flatnonzero(np.isin(table.dtype, sorted(dtypes))))


def _stand_in(donors: Sequence[MeasurementTable]) -> Device:
    """The figures of the device with most rows under the id ``any``: a stand-in where nobody names a device."""
    largest = max(donors, key=len).device
    names = ", ".join(sorted({table.device.id for table in donors}))
    return dataclasses.replace(largest, id=ANY, name=f"any device, learned from {names}")


def _shared_backend(donors: Sequence[MeasurementTable]) -> str:
    names = {framework(table.backend) for table in donors}
    return names.pop() if len(names) == 1 else ANY


def _pool_card(
    donors: Sequence[MeasurementTable], merged: _Pool, residual: np.ndarray, options: Options
) -> dict[str, Any]:
    by_home = {str(name): summarise(residual[merged.home == name]) for name in np.unique(merged.home)}
    return {
        "n": len(residual),
        **{f"test_{key}": value for key, value in summarise(residual).items()},
        "chosen": "pooled",
        "split": f"one of {', '.join(by_home)} left out",
        "evaluations": {f"without {name}": evaluation for name, evaluation in by_home.items()},
        "devices": sorted({table.device.id for table in donors}),
        "device_figures": [
            evaluation.to_dict() for evaluation in {table.device.id: table.device for table in donors}.values()
        ],
        "backends": sorted({table.backend for table in donors}),
        "fingerprint": "+".join(sorted({table.fingerprint for table in donors if table.fingerprint})),
        "dtypes": sorted({str(evaluation) for table in donors for evaluation in np.unique(table.dtype)}),
        "stated_coverage": options.coverage,
        "seed": options.seed,
    }


def _device(store: MeasurementStore, device_id: str) -> Device | None:
    measured = store.device(device_id)
    if measured is not None:
        return measured
    try:
        return load_device(device_id)
    except DeviceError:
        return None

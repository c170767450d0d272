"""What opcast predicts for the rows of a table: quantities by row, or why a row has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.truth import (
    FailedRow,
    InferenceRow,
    NetworkRow,
    OperatorRow,
    Row,
    ServingRow,
    TrainingRow,
    UnsupportedRow,
)
from ...models.power import Limits
from ..engines import Engine
from ..memory.breakdown import Memory
from ..memory.errors import error_spread, peak_interval
from ..predict.ops import predict_ops, with_power
from ..question.plan import Stack
from ..report.answer import InferenceReport, StepReport
from ..report.distribution import quantile
from ..report.step import Answer
from .cases import Question, ValidationSettings, cluster_of, device_of, inference_case, training_case
from .metrics import Bounded, Pair, grouped

Progress = Callable[[int], None]
KEPT = "activations kept for the backward pass"
CACHED = "cached"  # a prompt whose keys and values are there already
COVERAGE = 0.9  # of the intervals that are scored


class Estimate(NamedTuple):
    """A predicted quantity and its 90 % interval (None where opcast gives none)."""

    value: float
    interval: tuple[float, float] | None = None


Quantities = dict[str, Estimate]


@dataclass
class Predictions:
    """Predictions and their 90 % intervals by row id and quantity, the rows that have none, and those that failed."""

    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    intervals: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    unsupported: list[UnsupportedRow] = field(default_factory=list)
    failed: list[FailedRow] = field(default_factory=list)

    def note(self, row: Row, quantities: Quantities) -> None:
        """Keeps what is predicted for a row."""
        self.predicted[row.id] = {name: estimate.value for name, estimate in quantities.items()}
        self.intervals[row.id] = {
            name: estimate.interval for name, estimate in quantities.items() if estimate.interval is not None
        }

    def left_out(self, row: Row, error: Exception) -> None:
        """Notes why a row has no prediction: opcast's own words for what it cannot do, else a failure."""
        if isinstance(error, ValueError) and type(error).__module__.startswith("opcast"):
            self.unsupported.append(UnsupportedRow(row.id, str(error), row.source))
        else:
            self.failed.append(FailedRow.by(row.id, error, row.source))


@dataclass
class Engines:
    """The engines of every device and cluster asked about, each built once."""

    setting: ValidationSettings
    built: dict[str, Engine] = field(default_factory=dict)

    def of(self, device: Device, cluster: Cluster | None = None) -> Engine:
        """The engine of a device in a cluster."""
        key = f"{device!r} {cluster!r}"
        if key not in self.built:
            self.built[key] = self.setting.engine(device, cluster)
        return self.built[key]


def simulated(rows: Sequence[Row], setting: ValidationSettings, progress: Progress) -> Predictions:
    """Predictions of all rows: rows of one device and cluster together; ``progress`` is told how many are done."""
    answers, engines = Predictions(), Engines(setting)
    steps = [row for row in rows if isinstance(row, (TrainingRow, InferenceRow))]
    for members in grouped(steps, lambda row: (row.hardware.device, row.hardware.cluster, row.model)).values():
        for row in members:
            answered(answers, row, lambda row=row: step_quantities(row, setting, engines))  # type: ignore[misc]
            progress(1)
    for each in rows:
        if isinstance(each, NetworkRow):
            answered(answers, each, lambda each=each: network_quantities(each))  # type: ignore[misc]
            progress(1)
    requests = [row for row in rows if isinstance(row, ServingRow)]
    if requests:
        from .serving import Replicas, served

        replicas = Replicas(setting, engines.of)
        for each in requests:
            answered(answers, each, lambda each=each: _spread(each, served(each, replicas)))  # type: ignore[misc]
            progress(1)
    ops = [row for row in rows if isinstance(row, OperatorRow)]
    for alike in grouped(ops, lambda row: (repr(row.hardware), row.clock_mhz)).values():
        operator_quantities(answers, alike, setting, engines)
        progress(len(alike))
    return answers


def answered(answers: Predictions, row: Row, ask: Callable[[], Quantities]) -> None:
    """Notes what ``ask`` gives for a row, or the reason that it gives nothing."""
    try:
        answers.note(row, ask())
    except Exception as error:  # one row never ends a run
        answers.left_out(row, error)


def step_quantities(row: TrainingRow | InferenceRow, setting: ValidationSettings, engines: Engines) -> Quantities:
    """What a step's report says of the quantities that tables publish."""
    case = training_case(row, setting) if isinstance(row, TrainingRow) else inference_case(row, setting)
    report = simulated_case(case, setting, engines)
    timed = training_quantities if isinstance(row, TrainingRow) else inference_quantities
    quantities = timed(report, row) | memory_quantities(report, row, case.plan.stack)
    if isinstance(row, TrainingRow) and "activation_share" in row.measured:
        without_recompute = replace(row, recompute="none", layout=replace(row.layout, sequence_parallel=False))
        activations = simulated_case(training_case(without_recompute, setting), setting, engines).memory.by_class[KEPT]
        quantities["activation_share"] = Estimate(100.0 * report.memory.by_class.get(KEPT, 0.0) / activations)
    return quantities


def simulated_case(case: Question, setting: ValidationSettings, engines: Engines) -> StepReport | InferenceReport:
    """The report of a row's question."""
    from ..simulate import simulate

    engine = engines.of(case.device, case.plan.cluster)
    return simulate(case.config, case.work, case.plan, case.device, engine, setting.cache_dir, advice=False)


def training_quantities(report: Any, row: Any) -> Quantities:
    """Step time in s: of forward and backward, where a row has no optimizer."""
    left_out = report.breakdown.optimizer_s if row.options.get("optimizer") == "none" else 0.0
    share = 1.0 - left_out / report.step_time_s
    low, high = ninety(report.step_time_s, report.low_s, report.high_s, report.coverage)
    step = Estimate(report.step_time_s - left_out, (low * share, high * share))
    return {"step_time": step}


def inference_quantities(report: Any, row: Any) -> Quantities:
    """Latencies in ms and output tokens per second of all devices; a cached prompt's first token is one like others."""
    low, high = ninety(report.e2e_ms, report.low_ms, report.high_ms, report.coverage)
    named = {"ttft": report.ttft_ms, "tpot": report.tpot_ms, "e2e": report.e2e_ms}
    if row.options.get("prompt") == CACHED and report.tpot_ms is not None:
        decode_ms = report.tpot_ms * row.output_len
        low, high = (bound * decode_ms / report.e2e_ms for bound in (low, high))
        named |= {"ttft": report.tpot_ms, "e2e": decode_ms}
    quantities = {name: Estimate(float(value)) for name, value in named.items() if value is not None}
    for name in ("e2e", *(("ttft",) if quantities.keys() == {"ttft", "e2e"} else ())):  # a prompt alone is the whole
        quantities[name] = Estimate(quantities[name].value, (low, high))
    quantities["throughput"] = Estimate(rate(row, quantities["e2e"].value), (rate(row, high), rate(row, low)))
    return quantities


def rate(row: InferenceRow, millis: float) -> float:
    """Output tokens per second of all devices, of a batch that takes so long."""
    return row.batch * row.output_len / millis * 1e3


def memory_quantities(report: Answer, row: TrainingRow | InferenceRow, stack: Stack) -> Quantities:
    """The peak in GiB as the table counts it and on the device, and whether it fits."""
    counted = peak(report.memory, row.memory)
    return {
        "peak_memory": Estimate(counted, peak_interval(counted, error_spread(stack.id, stack.framework))),
        "device_memory": Estimate(report.memory.peak_gib),
        "fits": Estimate(float(report.fits)),
    }


def peak(memory: Memory, counts: str) -> float:
    """The peak in GiB as a table counts it: ``allocated``, ``reserved`` or the whole ``device``."""
    return {"allocated": memory.allocated_gib, "reserved": memory.reserved_gib}.get(counts, memory.peak_gib)


def ninety(value: float, low: float, high: float, coverage: float) -> tuple[float, float]:
    """The 90 % interval of a time whose interval has another coverage."""
    if coverage == COVERAGE:
        return low, high
    tail = (1.0 - COVERAGE) / 2
    return quantile(tail, value, low, high, coverage), quantile(1.0 - tail, value, low, high, coverage)


def _spread(row: ServingRow, values: Mapping[str, float]) -> Quantities:
    """Quantities of a served run with what 90 % of runs were within of which as much was known."""
    from ..serving.host import fitted_hosts
    from .serving import named_of

    estimates = {}
    for name, value in values.items():
        width = fitted_hosts().width(named_of(row), name)
        within = None if width is None else (value * math.exp(-width), value * math.exp(width))
        estimates[name] = Estimate(value, within)
    return estimates


def network_quantities(row: NetworkRow) -> Quantities:
    """The latency in ms of a collective alone on one dimension."""
    from ..network.fabric import Fabric
    from ..network.shapes import Dimension, product

    ranks = row.hardware.devices
    fabric = Fabric(product([Dimension(row.shape, ranks, row.bandwidth_gbps, row.latency_us)]))
    latency_us = fabric.latency_us(row.collective, range(ranks), row.size_bytes, row.algorithm)
    return {"latency": Estimate(latency_us * 1e-3)}


def operator_quantities(
    answers: Predictions, rows: Sequence[OperatorRow], setting: ValidationSettings, engines: Engines
) -> None:
    """Latencies of ops that share machine and clock, asked together; those it cannot run one by one."""
    first = rows[0]
    try:
        device = device_of(first.hardware, setting)
        cluster = cluster_of(first.hardware, setting) if first.hardware.devices > 1 else None
        engine = engines.of(device, cluster)
        limits = Limits(clock_mhz=first.clock_mhz)
        ops = [row.op for row in rows]
        predictions = with_power(predict_ops(ops, device, engine), ops, device, (), limits)
    except Exception as error:  # one row never ends a run
        if len(rows) == 1:
            answers.left_out(first, error)
            return
        for row in rows:
            operator_quantities(answers, [row], setting, engines)
        return
    for row, prediction in zip(rows, predictions, strict=True):
        beside = max(row.empty_op_us - device.launch_us, 0.0)  # every kernel has been launched
        times = (
            prediction.latency_us,
            *ninety(prediction.latency_us, prediction.low_us, prediction.high_us, prediction.coverage),
        )
        millis, low, high = ((us + beside) * 1e-3 for us in times)
        answers.note(row, {"latency": Estimate(millis, (low, high))})


def joined(predicted: Mapping[str, Mapping[str, float]], rows: Iterable[Row]) -> dict[str, list[Pair]]:
    """(predicted, measured) pairs by quantity, of rows that have both.

    Where a run did not fit there is nothing to time: only ``fits`` counts.
    """
    return {name: [pair for _, pair in pairs] for name, pairs in _compared(predicted, rows).items()}


def bounded(answers: Predictions, rows: Iterable[Row]) -> dict[str, list[Bounded]]:
    """(low, high, predicted, measured) by quantity, of rows that have an interval."""
    by_quantity = {}
    for name, keyed_pairs in _compared(answers.predicted, rows).items():
        bounds = [(answers.intervals.get(key, {}).get(name), pair) for key, pair in keyed_pairs]
        by_quantity[name] = [(*interval, *pair) for interval, pair in bounds if interval is not None]
    return by_quantity


def _compared(predicted: Mapping[str, Mapping[str, float]], rows: Iterable[Row]) -> dict[str, list[tuple[str, Pair]]]:
    by_quantity: dict[str, list[tuple[str, Pair]]] = {}
    for row in rows:
        for name, measured in row.measured.items():
            value = predicted.get(row.id, {}).get(name)
            if value is not None:
                by_quantity.setdefault(name, []).append((row.id, (value, measured)))
    return by_quantity

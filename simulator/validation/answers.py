"""What opcast predicts for the rows of a table: quantities by row, or why a row has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...datasets.clusters import Cluster
from ...datasets.devices import Device
from ...datasets.truth import Failed, InferenceRow, NetworkRow, OperatorRow, Row, TrainingRow, UnsupportedRow
from ...models.power import Limits
from ..engines import Engine
from ..predict.ops import predict_ops, with_power
from ..report.answer import InferenceReport, Memory, StepReport
from .cases import Question, ValidationSettings, cluster_of, device_of, inference_case, training_case
from .metrics import grouped

Progress = Callable[[int], None]


@dataclass
class Predictions:
    """Predictions by row id and quantity, the rows that have none, and those whose simulation raised an error."""

    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    unsupported: list[UnsupportedRow] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    def left_out(self, row: Row, error: Exception) -> None:
        """Notes why a row has no prediction: opcast's own words for what it cannot do, else a failure."""
        if isinstance(error, ValueError) and type(error).__module__.startswith("opcast"):
            self.unsupported.append(UnsupportedRow(row.id, str(error)))
        else:
            self.failed.append(Failed.by(row.id, error))


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
    ops = [row for row in rows if isinstance(row, OperatorRow)]
    for alike in grouped(ops, lambda row: (row.hardware.device, row.hardware.devices, row.clock_mhz)).values():
        operator_quantities(answers, alike, setting, engines)
        progress(len(alike))
    return answers


def answered(answers: Predictions, row: Row, ask: Callable[[], dict[str, float]]) -> None:
    """Notes what ``ask`` gives for a row, or the reason that it gives nothing."""
    try:
        answers.predicted[row.id] = ask()
    except Exception as error:  # one row never ends a run
        answers.left_out(row, error)


def step_quantities(row: TrainingRow | InferenceRow, setting: ValidationSettings, engines: Engines) -> dict[str, float]:
    """What a step's report says of the quantities that tables publish."""
    if isinstance(row, TrainingRow):
        return training_quantities(simulated_case(training_case(row, setting), setting, engines), row)
    return inference_quantities(simulated_case(inference_case(row, setting), setting, engines), row)


def simulated_case(case: Question, setting: ValidationSettings, engines: Engines) -> StepReport | InferenceReport:
    """The report of a row's question."""
    from ..simulate import simulate

    engine = engines.of(case.device, case.plan.cluster)
    return simulate(case.config, case.work, case.plan, case.device, engine, setting.cache_dir)


def training_quantities(report: Any, row: TrainingRow) -> dict[str, float]:
    """Step time in s (of forward and backward, where a row has no optimizer), peak memory in GiB, whether it fits."""
    left_out = report.breakdown.optimizer_s if row.options.get("optimizer") == "none" else 0.0
    return {
        "step_time": report.step_time_s - left_out,
        "peak_memory": peak(report.memory, row.memory),
        "fits": float(report.fits),
    }


def peak(memory: Memory, counts: str) -> float:
    """The peak in GiB as a table counts it: ``allocated``, ``reserved`` or the whole ``device``."""
    return {"allocated": memory.allocated_gib, "reserved": memory.reserved_gib}.get(counts, memory.peak_gib)


def inference_quantities(report: Any, row: InferenceRow) -> dict[str, float]:
    """Latencies in ms, output tokens per second of all devices, peak memory in GiB, and whether it fits."""
    named = {"ttft": report.ttft_ms, "tpot": report.tpot_ms, "e2e": report.e2e_ms}
    made = {name: float(value) for name, value in named.items() if value is not None}
    made["throughput"] = row.batch * row.output_len / report.e2e_ms * 1e3
    return {**made, "peak_memory": peak(report.memory, row.memory), "fits": float(report.fits)}


def network_quantities(row: NetworkRow) -> dict[str, float]:
    """The latency in ms of a collective alone on one dimension."""
    from ..network.fabric import Fabric
    from ..network.shapes import Dimension, product

    ranks = row.hardware.devices
    fabric = Fabric(product([Dimension(row.shape, ranks, row.bandwidth_gbps, row.latency_us)]))
    return {"latency": fabric.latency_us(row.collective, range(ranks), row.size_bytes, row.algorithm) * 1e-3}


def operator_quantities(
    answers: Predictions, rows: Sequence[OperatorRow], setting: ValidationSettings, engines: Engines
) -> None:
    """Latencies of ops that share device, group and clock, asked together; those it cannot run one by one."""
    first = rows[0]
    try:
        device = device_of(first.hardware, setting)
        cluster = cluster_of(first.hardware, setting) if first.hardware.devices > 1 else None
        engine = engines.of(device, cluster)
        limits = Limits(clock_mhz=first.clock_mhz)
        found = predict_ops([row.op for row in rows], device, engine)
        found = with_power(found, [row.op for row in rows], device, (), limits) if limits.asked else found
    except Exception as error:  # one row never ends a run
        if len(rows) == 1:
            answers.left_out(first, error)
            return
        for row in rows:
            operator_quantities(answers, [row], setting, engines)
        return
    for row, each in zip(rows, found, strict=True):
        answers.predicted[row.id] = {"latency": each.latency_us * 1e-3}


def joined(predicted: Mapping[str, Mapping[str, float]], rows: Iterable[Row]) -> dict[str, list[tuple[float, float]]]:
    """(predicted, measured) pairs by quantity, of rows that have both.

    Where a run did not fit there is nothing to time: only ``fits`` counts.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, measured in row.measured.items():
            value = predicted.get(row.id, {}).get(name)
            if value is not None:
                pairs.setdefault(name, []).append((value, measured))
    return pairs

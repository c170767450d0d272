"""What one could say without opcast: kernels at their roofline, and a constant MFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.clusters import Cluster, one_node
from ...datasets.devices import Device, DeviceError
from ...datasets.ops import KINDS
from ...datasets.truth import TrainingRow
from ...datasets.truth.dimensions import dimensions_of
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ..engines import Answers, Engine, FusedEngine
from ..engines.answers import Columns
from ..engines.network import NetworkEngine
from .metrics import Pair, grouped

LINKS = ("collective", "expert_parallel")  # families that the network answers for


@dataclass(frozen=True)
class RooflineEngine:
    """Kernels at their roofline: FLOPs at the peak rate, or bytes at full bandwidth. Declines collectives."""

    device: Device
    name: str = "roofline"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if KINDS[kind].family not in LINKS:
            floor = analytical.roofline_us(OpColumns(kind, columns, dtype, out_dtype), self.device)
            for column in (answers.latency_us, answers.low_us, answers.high_us):
                column[:] = floor
            answers.engine[:] = self.name
        return answers.by(self.name, self.name)


def roofline_engine(device: Device, cluster: Cluster | None) -> Engine:
    """Kernels at their roofline, collectives by the network's law."""
    return FusedEngine([RooflineEngine(device), NetworkEngine(device, cluster or one_node(device), [])])


def constant_mfu(rows: Sequence[TrainingRow], devices: Mapping[str, Device]) -> dict[str, Pair]:
    """(predicted, measured) seconds by row id, of rows whose time and FLOPs are known.

    A row's MFU is that of the median over rows of other models on the same GPU in the same format; a row without any
    such has no answer.
    """
    predicted: dict[str, Pair] = {}
    for members in grouped(
        utilised(rows, devices), lambda entry: (entry[0].hardware.gpu, format_of(entry[0]))
    ).values():
        for row, ideal, _ in members:
            others = [share for other, _, share in members if other.model != row.model]
            if others:
                predicted[row.id] = (ideal / float(np.median(others)), row.measured["step_time"])
    return predicted


def utilised(rows: Sequence[TrainingRow], devices: Mapping[str, Device]) -> list[tuple[TrainingRow, float, float]]:
    """(row, seconds at peak rate, MFU) of the rows whose step time and FLOPs are known."""
    entries = []
    for row in rows:
        sizes = dimensions_of(row.config)
        device = devices.get(row.hardware.device)
        if "step_time" not in row.measured or sizes is None or device is None:
            continue
        try:
            peak = device.tensor_rate(format_of(row))
        except DeviceError:
            continue
        tokens = row.global_batch * row.seq_len / row.hardware.devices
        ideal = tokens * sizes.flops_per_token(row.seq_len) / (peak * 1e12)
        entries.append((row, ideal, ideal / row.measured["step_time"]))
    return entries


def format_of(row: TrainingRow) -> str:
    """The format of a row's matrix products."""
    return row.quantization or row.precision

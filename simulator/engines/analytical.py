"""Answers from physics alone: works for any device with a data sheet, with wide intervals."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.devices import Device
from ...models import analytical
from .answers import Answers, Columns

# Of the interval each way: nine in ten rows lie within it in the median of 120 tables, each of a kind and backend on a
# device: aiconfigurator's of products, attention and experts on H100 and L40S, NeuSight's and Vidur's. Of 16-bit
# products it is 1.3 to 2.7, of attention 1.5 to 10, of experts 2.2 to 15, of norms and element-wise kernels 1.4 to 7;
# tests/benchmarks/accuracy_law.py
UNCALIBRATED_FACTOR = 3.0


@dataclass(frozen=True)
class AnalyticalEngine:
    """The latency law of ``models/analytical``; never declines."""

    device: Device
    name: str = "analytical"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        latency = analytical.latency_us(kind, columns, dtype, out_dtype, self.device, cache)
        answers = Answers.declined(len(latency))
        answers.latency_us[:] = latency
        answers.low_us[:] = latency / UNCALIBRATED_FACTOR
        answers.high_us[:] = latency * UNCALIBRATED_FACTOR
        answers.engine[:] = self.name
        return answers

"""Answers from physics alone: works for any device with a data sheet, with wide intervals."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.devices import Device
from ...datasets.vocabulary import OpColumns
from ...models import analytical
from ...models.choice import LAW
from ...models.intervals import UNCALIBRATED_FACTOR
from .answers import Answers, Columns


@dataclass(frozen=True)
class AnalyticalEngine:
    """The latency law of ``models/analytical``; never declines."""

    device: Device
    name: str = "analytical"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        latency = analytical.latency_us(OpColumns(kind, columns, dtype, out_dtype, cache), self.device)
        answers = Answers.declined(len(latency))
        answers.latency_us[:] = latency
        answers.low_us[:] = latency / UNCALIBRATED_FACTOR
        answers.high_us[:] = latency * UNCALIBRATED_FACTOR
        answers.engine[:] = self.name
        return answers.by(LAW, LAW)

"""Caches that a decode step streams: no table is faster than the memory they lie in.

TensorRT-LLM's table of A100 reads caches in 16 bits at 3.4 TB/s, where the memory has 2.0: they were kept in 8. Such a
table loses to physics, whose interval begins at the memory's rate. What the last-level cache may hold counts at its
rate, so that only long streams are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets.devices import Device
from ...models import analytical
from ...models.choice import BEYOND_MEMORY
from .analytical import AnalyticalEngine
from .answers import Answers, Columns, Engine, in_turn
from .mat_vec import CONTRADICTION, is_told

STREAMS = ("attention_decode", "mla_decode")  # what reads each byte of a cache once
MEASURED_PEAK = 1.05  # times a data sheet's bandwidth that a clock above the usual one may give. A judgement


@dataclass(frozen=True)
class StreamEngine:
    """Answers what streams a cache where ``others`` are faster than the device's memory; declines all else."""

    device: Device
    others: Sequence[Engine]
    name: str = "analytical"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind not in STREAMS:
            return answers
        answers.put(slice(None), in_turn(self.others, kind, columns, dtype, out_dtype, cache))
        least_us = analytical.roofline_us(kind, columns, dtype, out_dtype, self.device, "warm")
        with np.errstate(invalid="ignore"):
            at = np.flatnonzero(is_told(answers) & (answers.latency_us < least_us / MEASURED_PEAK))
        if len(at):
            too_fast = {name: values[at] for name, values in columns.items()}
            law = AnalyticalEngine(self.device).answer(kind, too_fast, dtype, out_dtype, cache)
            law.low_us[:], law.high_us[:] = least_us[at] / MEASURED_PEAK, law.latency_us * CONTRADICTION
            answers.put(at, law.by(BEYOND_MEMORY, ""))
        return answers

"""Answers from registered predictors, found by device and kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...datasets.devices import Device
from ...models.registry import Registry
from .answers import Answers, Columns


@dataclass(frozen=True)
class LearnedEngine:
    """Asks the first registry that holds a predictor for the kind on this device; declines kinds without one."""

    device: Device
    registries: Sequence[Registry]
    backend: str | None = None
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        n = len(next(iter(columns.values())))
        answers = Answers.declined(n)
        for registry in self.registries:
            predictor = registry.find(kind, self.device.id, self.backend)
            if predictor is None:
                continue
            found = predictor.predict(columns, dtype, out_dtype, self.device, cache)
            answers.latency_us[:] = found.latency_us
            answers.low_us[:] = found.low_us
            answers.high_us[:] = found.high_us
            answers.in_envelope[:] = found.in_envelope
            answers.engine[:] = self.name
            answers.predictor[:] = f"{predictor.name}@{predictor.version}"
            answers.coverage[:] = predictor.coverage
            break
        return answers

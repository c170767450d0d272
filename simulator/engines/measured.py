"""Answers from the store: exactly this op was timed on this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS
from ...datasets.store import Exact, Store
from ...models.registry import DEFAULT_BACKEND
from .answers import Answers, Columns

PERCENTILE_COVERAGE = 0.8  # the 10th to 90th percentile of the samples


@dataclass
class MeasuredEngine:
    """Exact hits in the first store that has one; every other op is declined.

    Without a ``backend`` that of the registry's default answers (``torch``), else the newest measurement.
    """

    device: Device
    stores: Sequence[Store]
    backend: str | None = None
    name: str = "measured"
    _tables: dict[tuple[str, str], list[Mapping[tuple[Any, ...], list[Exact]]]] = field(default_factory=dict)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        dims = np.stack([columns[name] for name in KINDS[kind].names], axis=1).tolist()
        answers = Answers.declined(len(dims))
        for table in self._lookup(kind, cache):
            if not table:
                continue
            for position in answers.open.tolist():
                found = [
                    exact
                    for exact in table.get((*dims[position], dtype, out_dtype), ())
                    if self.backend in (None, exact.backend)
                ]
                if found:
                    _put(answers, position, usual(found))
        return answers

    def _lookup(self, kind: str, cache: str) -> list[Mapping[tuple[Any, ...], list[Exact]]]:
        key = (kind, cache)
        if key not in self._tables:
            self._tables[key] = [store.lookup(kind, self.device.id, cache) for store in self.stores]
        return self._tables[key]


def usual(found: Sequence[Exact]) -> Exact:
    """Of measurements, newest first, the first on the default backend, or the first of all."""
    return next((exact for exact in found if exact.backend == DEFAULT_BACKEND), found[0])


def _put(answers: Answers, position: int, exact: Exact) -> None:
    answers.latency_us[position] = exact.latency_us
    answers.low_us[position] = min(exact.low_us, exact.latency_us)
    answers.high_us[position] = max(exact.high_us, exact.latency_us)
    answers.engine[position] = "measured"
    answers.in_envelope[position] = True
    answers.coverage[position] = PERCENTILE_COVERAGE

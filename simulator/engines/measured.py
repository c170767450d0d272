"""Answers from the store: exactly this op was timed on this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...datasets.backends import ranked
from ...datasets.devices import Device
from ...datasets.ops import KINDS
from ...datasets.store import Exact, Store
from ...models.intervals import PERCENTILES
from .answers import Answers, Columns
from .coverage import brought

# Of the interval each way. What no sample tells of the spread: three in four of the 62,000 ops that NeuSight's and
# Vidur's tables repeat have their 10th and 90th percentile within 4 %. Nobody knows a time to less than 1 %.
UNREPEATED_FACTOR, LEAST_FACTOR = 1.05, 1.01
TRACES = {"kineto": "a profile of PyTorch"}
"""Sources of rows that were read out of a run's trace: neither warmed up nor repeated as the harness does."""


@dataclass
class MeasuredEngine:
    """Exact hits in the first store that has one; every other op is declined.

    ``backend`` may be a whole backend, a version or a framework. Of several that fit, and of all without one, that
    answers which :func:`opcast.datasets.backends.ranked` puts first by ``preferences``; of its measurements the newest.
    """

    device: Device
    stores: Sequence[Store]
    backend: str | None = None
    preferences: Sequence[str] = ()
    name: str = "measured"
    _tables: dict[tuple[str, str], list[tuple[Mapping[tuple[Any, ...], list[Exact]], Mapping[str, int]]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        tables = self._lookup(kind, cache)
        if not tables:
            return answers
        dims = np.stack([columns[name] for name in KINDS[kind].names], axis=1).tolist()
        positions, hits = [], []
        for position, values in enumerate(dims):
            key = (*values, dtype, out_dtype)
            for table, places in tables:
                found = [exact for exact in table.get(key, ()) if exact.backend in places]
                if found:
                    positions.append(position)
                    hits.append(min(found, key=lambda exact: places[exact.backend]))
                    break
        if hits:
            self._put(answers, np.array(positions), hits)
        return answers

    def _lookup(self, kind: str, cache: str) -> list[tuple[Mapping[tuple[Any, ...], list[Exact]], Mapping[str, int]]]:
        """For each store with rows of a kind: measurements by op, and the places of the backends that may answer."""
        if (kind, cache) not in self._tables:
            asked = kind, self.device.id, cache
            found = ((store.lookup(*asked), self._places(store.backend_rows(*asked))) for store in self.stores)
            self._tables[kind, cache] = [(table, places) for table, places in found if places]
        return self._tables[kind, cache]

    def _places(self, rows: Mapping[str, int]) -> dict[str, int]:
        return {backend: at for at, backend in enumerate(ranked(rows, self.backend, self.preferences))}

    def _put(self, answers: Answers, positions: np.ndarray, hits: Sequence[Exact]) -> None:
        for at, each in zip(positions.tolist(), hits, strict=True):
            if each.source in TRACES:
                answers.predictor[at] = TRACES[each.source]
        latency, low, high = np.array([each[:3] for each in hits], dtype=np.float64).T
        untold = (low >= latency) & (high <= latency)
        least = np.where(untold, UNREPEATED_FACTOR, LEAST_FACTOR)
        low, high = brought(latency, np.minimum(low, latency), np.maximum(high, latency), PERCENTILES)
        answers.latency_us[positions] = latency
        answers.low_us[positions] = np.minimum(low, latency / least)
        answers.high_us[positions] = np.maximum(high, latency * least)
        answers.engine[positions] = self.name
        answers.in_envelope[positions] = True

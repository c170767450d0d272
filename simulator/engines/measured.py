"""Answers from the store: exactly this op was timed on this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS
from ...datasets.store import Exact, Store
from ...models.choice import ANYONE, OTHER, OWN, OWN_ROWS, ROW, Caller, is_own, launched, ranked
from ...models.intervals import PERCENTILES
from .answers import Answers, Columns
from .coverage import brought

# Of the interval each way. What no sample tells of the spread: three in four of the 62,000 ops that NeuSight's and
# Vidur's tables repeat have their 10th and 90th percentile within 4 %. Nobody knows a time to less than 1 %.
UNREPEATED_FACTOR, LEAST_FACTOR = 1.05, 1.01
TRACES = {"kineto": "a profile of PyTorch"}
"""Sources of rows that were read out of a run's trace: neither warmed up nor repeated as the harness does."""


Places = Mapping[str, int]  # of the backends that may answer, best first
Table = tuple[Mapping[tuple[Any, ...], list[Exact]], Places]


@dataclass
class MeasuredEngine:
    """Exact hits in the first store that has one; every other op is declined.

    ``backend`` may be a whole backend, a version or a framework. Of several that fit, and of all without one, that
    answers which :mod:`...models.choice` puts first for the ``caller``; of its measurements the newest. ``rows`` are
    ``any``, or those of one clause of the rule: ``own`` (of the kernel that is launched), ``others`` (of other labs) or
    ``rest`` (own ones of another kernel).
    """

    device: Device
    stores: Sequence[Store]
    backend: str | None = None
    preferences: Sequence[str] = ()
    name: str = "measured"
    rows: str = "any"
    caller: Caller = ANYONE
    _tables: dict[tuple[str, str, str], list[Table]] = field(default_factory=dict, init=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        tables = self._lookup(kind, dtype, cache)
        if not tables:
            return answers
        dims = np.stack([columns[name] for name in KINDS[kind].names], axis=1).tolist()
        positions, hits = [], []
        for position, values in enumerate(dims):
            key = (*values, dtype, out_dtype)
            for table, places in tables:
                found = [exact for exact in table.get(key, ()) if exact.backend in places and self._counts(exact)]
                if found:
                    positions.append(position)
                    hits.append(min(found, key=lambda exact: places[exact.backend]))
                    break
        if hits:
            self._put(answers, np.array(positions), hits)
        return answers

    def _counts(self, exact: Exact) -> bool:
        """Whether a row is one of those that are asked for."""
        return self.rows == "any" or is_own((exact.source,)) == (self.rows != "others")

    def _lookup(self, kind: str, dtype: str, cache: str) -> list[Table]:
        """For each store with rows of a kind: measurements by op, and the places of the backends that may answer."""
        key = kind, dtype, cache
        if key not in self._tables:
            asked = kind, self.device.id, cache
            tables = (
                (store.lookup(*asked), self._places(kind, dtype, store.backend_rows(*asked))) for store in self.stores
            )
            self._tables[key] = [(table, places) for table, places in tables if places]
        return self._tables[key]

    def _places(self, kind: str, dtype: str, rows: Mapping[str, int]) -> Places:
        mine = launched(rows, self.preferences, kind, dtype, self.caller)
        order = mine if self.rows == "own" else ranked(rows, self.backend, self.preferences, kind, self.caller)
        return {each: at for at, each in enumerate(order) if self.rows != "rest" or each not in mine}

    def _put(self, answers: Answers, positions: np.ndarray, hits: Sequence[Exact]) -> None:
        for at, each in zip(positions.tolist(), hits, strict=True):
            answers.predictor[at] = TRACES.get(each.source)
            mine = is_own((each.source,))
            answers.source[at] = OWN_ROWS if mine else each.source
            answers.clause[at] = (OTHER if self.rows == "rest" else OWN) if mine else ROW
        latency, low, high = np.array([each[:3] for each in hits], dtype=np.float64).T
        untold = (low >= latency) & (high <= latency)
        least = np.where(untold, UNREPEATED_FACTOR, LEAST_FACTOR)
        low, high = brought(latency, np.minimum(low, latency), np.maximum(high, latency), PERCENTILES)
        answers.latency_us[positions] = latency
        answers.low_us[positions] = np.minimum(low, latency / least)
        answers.high_us[positions] = np.maximum(high, latency * least)
        answers.engine[positions] = self.name
        answers.in_envelope[positions] = True

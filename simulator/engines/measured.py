"""Answers from the store: exactly this op was timed on this device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...datasets.devices import Device
from ...datasets.launches import ANYONE, Caller
from ...datasets.ops import KINDS
from ...datasets.store import Exact, Store
from ...datasets.vocabulary import OpColumns
from ...models.choice import OTHER, OWN, OWN_ROWS, ROW, is_own, launched, ranked
from ...models.clocks import at_boost
from ...models.intervals import PERCENTILES
from .answers import Answers, Columns
from .coverage import kernels_apart, rescale_bounds, widen_for_labs

# Of the interval each way. What no sample tells of the spread: three in four of the 62,000 ops that NeuSight's and
# Vidur's tables repeat have their 10th and 90th percentile within 4 %. Nobody knows a time to less than 1 %.
UNREPEATED_FACTOR, MIN_FACTOR = 1.05, 1.01
TRACE_NAMES = {"kineto": "a profile of PyTorch"}
"""Sources of rows that were read out of a run's trace: neither warmed up nor repeated as the harness does."""


BackendRanks = Mapping[str, int]  # of the backends that may answer, best first
RowTable = tuple[Mapping[tuple[Any, ...], list[Exact]], BackendRanks]


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
    _tables: dict[tuple[str, str, str], list[RowTable]] = field(default_factory=dict, init=False, repr=False)

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        tables = self._lookup(kind, dtype, cache)
        if not tables:
            return answers
        dims = np.stack([columns[name] for name in KINDS[kind].names], axis=1).tolist()
        positions, hits = [], []
        for position, values in enumerate(dims):
            key = (*values, dtype, out_dtype)
            for table, ranks in tables:
                rows = [exact for exact in table.get(key, ()) if exact.backend in ranks and self._is_asked_for(exact)]
                if rows:
                    positions.append(position)
                    hits.append(min(rows, key=lambda exact: ranks[exact.backend]))
                    break
        if hits:
            hit_positions = np.array(positions)
            self._put_hits(answers, kind, hit_positions, hits)
            query = OpColumns(kind, columns, dtype, out_dtype, cache)
            self._rescale_to_boost(answers, hit_positions, hits, query)
        return answers

    def _rescale_to_boost(
        self, answers: Answers, positions: np.ndarray, hits: Sequence[Exact], query: OpColumns
    ) -> None:
        """Bring rows that were timed at a clock which the power limit left to boost clock: steps slow them again."""
        clock = np.array([hit.clock for hit in hits])
        throttled = positions[clock < 1.0]
        if not len(throttled):
            return
        latency = answers.latency_us[throttled]
        factor = at_boost(query.take(throttled), self.device, latency, clock[clock < 1.0]) / latency
        for bound in (answers.latency_us, answers.low_us, answers.high_us):
            bound[throttled] *= factor

    def _is_asked_for(self, exact: Exact) -> bool:
        """Whether a row is one of those that are asked for."""
        return self.rows == "any" or is_own((exact.source,)) == (self.rows != "others")

    def _lookup(self, kind: str, dtype: str, cache: str) -> list[RowTable]:
        """For each store with rows of a kind: measurements by op, and the places of the backends that may answer."""
        key = kind, dtype, cache
        if key not in self._tables:
            query = kind, self.device.id, cache
            tables = (
                (store.lookup(*query), self._rank_backends(kind, dtype, store.backend_rows(*query)))
                for store in self.stores
            )
            self._tables[key] = [(table, ranks) for table, ranks in tables if ranks]
        return self._tables[key]

    def _rank_backends(self, kind: str, dtype: str, rows: Mapping[str, int]) -> BackendRanks:
        own_backends = launched(rows, self.preferences, kind, dtype, self.caller)
        order = own_backends if self.rows == "own" else ranked(rows, self.backend, self.preferences, kind, self.caller)
        return {
            backend: rank for rank, backend in enumerate(order) if self.rows != "rest" or backend not in own_backends
        }

    def _put_hits(self, answers: Answers, kind: str, positions: np.ndarray, hits: Sequence[Exact]) -> None:
        for position, hit in zip(positions.tolist(), hits, strict=True):
            answers.predictor[position] = TRACE_NAMES.get(hit.source)
            is_local = is_own((hit.source,))
            answers.source[position] = OWN_ROWS if is_local else hit.source
            answers.clause[position] = (OTHER if self.rows == "rest" else OWN) if is_local else ROW
        latency, low, high = np.array([hit[:3] for hit in hits], dtype=np.float64).T
        unrepeated = (low >= latency) & (high <= latency)
        factor = np.where(unrepeated, UNREPEATED_FACTOR, MIN_FACTOR)
        low, high = rescale_bounds(latency, np.minimum(low, latency), np.maximum(high, latency), PERCENTILES)
        answers.latency_us[positions] = latency
        low, high = np.minimum(low, latency / factor), np.maximum(high, latency * factor)
        if self.rows == "rest":
            low, high = widen_for_labs(latency, low, high, kernels_apart(KINDS[kind].family, latency))
        answers.low_us[positions], answers.high_us[positions] = low, high
        answers.engine[positions] = self.name
        answers.in_envelope[positions] = True

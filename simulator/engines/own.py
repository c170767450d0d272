"""Own rows first, and beyond what they reach a table that they correct.

A campaign that was cut short, or planned for smaller shapes, says nothing of what it did not reach. Physics times the
last correction is a poor guess where a table of the same device knows the op. There the table's answer counts, times
what own rows are off it at the nearest op that they reach: each dim moved into the range of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...models.choice import BEYOND, CORRECTED
from ...models.predictor import Predictor
from .answers import Answers, Columns, Engine
from .learned import LearnedEngine

STATES = ("warm", "cold")  # of the cache: most tables were timed in one of them, and are asked in both
MOST_RATIO = 4.0  # that own rows and a table of the same device differ by: more is another op, or a fault


@dataclass(frozen=True)
class OwnEngine:
    """Answers by ``learned`` (predictors of own rows), beyond their envelope by the first table that knows the op."""

    learned: LearnedEngine
    tables: Sequence[Engine]
    name: str = "learned"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = self.learned.answer(kind, columns, dtype, out_dtype, cache)
        predictor = self.learned.predictor(kind, dtype)
        outside = np.flatnonzero(~answers.in_envelope)
        if predictor is None or not len(outside) or not predictor.card.get("range"):
            return answers
        whole = Answers.declined(len(answers.latency_us))
        whole.put(slice(None), answers)
        for table in self.tables:
            if len(outside):
                part = {name: values[outside] for name, values in columns.items()}
                found = self._corrected(table, predictor, kind, part, (dtype, out_dtype, cache))
                known = np.isfinite(found.latency_us)
                whole.put(outside[known], found.take(known))
                outside = outside[~known]
        return whole

    def _corrected(
        self, table: Engine, predictor: Predictor, kind: str, columns: Columns, formats: tuple[str, str, str]
    ) -> Answers:
        """The table's answers, times what own rows are off it at the nearest op that they reach; NaN outside of it."""
        dtype, out_dtype, _ = formats
        told = table.answer(kind, columns, *formats)
        inside = np.any([table.answer(kind, columns, dtype, out_dtype, each).in_envelope for each in STATES], axis=0)
        near = nearest_columns(columns, predictor)
        own, base = (each.answer(kind, near, *formats) for each in (self.learned, table))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = own.latency_us / base.latency_us
            width = np.hypot(np.log(told.high_us / told.latency_us), np.log(own.high_us / own.latency_us))
        known = inside & (ratio < MOST_RATIO) & (ratio > 1 / MOST_RATIO)
        latency = np.where(known, told.latency_us * ratio, np.nan)
        return Answers(
            latency,
            latency * np.exp(-width),
            latency * np.exp(width),
            told.engine,
            np.array(
                [f"{theirs} x {ours}" for theirs, ours in zip(told.predictor, own.predictor, strict=True)], object
            ),
            known & told.in_envelope,
            np.full(len(latency), BEYOND, dtype=object),
            np.array([f"{each}{CORRECTED}" for each in told.source], dtype=object),
        )


def nearest_columns(columns: Columns, predictor: Predictor) -> Columns:
    """The nearest ops [n] whose dims lie in the ranges of the rows that a predictor learned from."""
    reach = predictor.card.get("range", {})
    return {
        name: np.clip(values, *reach[name]).astype(np.int64) if name in reach else values
        for name, values in columns.items()
    }

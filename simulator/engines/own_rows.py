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

CACHE_STATES = ("warm", "cold")  # of the cache: most tables were timed in one of them, and are asked in both
MAX_RATIO = 4.0  # that own rows and a table of the same device differ by: more is another op, or a fault


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
        combined = Answers.declined(len(answers.latency_us))
        combined.put(slice(None), answers)
        for table in self.tables:
            if len(outside):
                outside_columns = {name: values[outside] for name, values in columns.items()}
                corrected = self._correct_table(table, predictor, kind, outside_columns, (dtype, out_dtype, cache))
                answered = np.isfinite(corrected.latency_us)
                combined.put(outside[answered], corrected.take(answered))
                outside = outside[~answered]
        return combined

    def _correct_table(
        self, table: Engine, predictor: Predictor, kind: str, columns: Columns, formats: tuple[str, str, str]
    ) -> Answers:
        """The table's answers, times what own rows are off it at the nearest op that they reach; NaN outside of it."""
        dtype, out_dtype, _ = formats
        table_answers = table.answer(kind, columns, *formats)
        inside = np.any(
            [table.answer(kind, columns, dtype, out_dtype, cache_state).in_envelope for cache_state in CACHE_STATES],
            axis=0,
        )
        near = nearest_columns(columns, predictor)
        own_answers, base_answers = (engine.answer(kind, near, *formats) for engine in (self.learned, table))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = own_answers.latency_us / base_answers.latency_us
            width = np.hypot(
                np.log(table_answers.high_us / table_answers.latency_us),
                np.log(own_answers.high_us / own_answers.latency_us),
            )
        valid = inside & (ratio < MAX_RATIO) & (ratio > 1 / MAX_RATIO)
        latency = np.where(valid, table_answers.latency_us * ratio, np.nan)
        return Answers(
            latency,
            latency * np.exp(-width),
            latency * np.exp(width),
            table_answers.engine,
            np.array(
                [
                    f"{table_name} x {own_name}"
                    for table_name, own_name in zip(table_answers.predictor, own_answers.predictor, strict=True)
                ],
                object,
            ),
            valid & table_answers.in_envelope,
            np.full(len(latency), BEYOND, dtype=object),
            np.array([f"{source}{CORRECTED}" for source in table_answers.source], dtype=object),
        )


def nearest_columns(columns: Columns, predictor: Predictor) -> Columns:
    """The nearest ops [n] whose dims lie in the ranges of the rows that a predictor learned from."""
    ranges = predictor.card.get("range", {})
    return {
        name: np.clip(values, *ranges[name]).astype(np.int64) if name in ranges else values
        for name, values in columns.items()
    }

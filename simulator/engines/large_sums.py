"""Sums of a serving engine that its own plain kernel does not make: large ones, and those with the norm in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.devices import Device
from ...models import analytical
from .answers import Answers, Columns, Engine, in_turn

OWN_SUM_BYTES = 8 << 20
"""The largest sum of a kernel of an engine's own: CustomAllreduce's max_size of vLLM (0.33), of which SGLang's is."""


@dataclass(frozen=True)
class LargeSumsEngine:
    """Answers all-reduces above :data:`OWN_SUM_BYTES`, or that leave a node, by rows of NCCL; declines others."""

    nccl: Engine

    @property
    def name(self) -> str:
        return self.nccl.name

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if kind != "all_reduce":
            return answers
        large = (columns["size_bytes"] > OWN_SUM_BYTES) | (columns["ranks"] > columns["ranks_per_node"])
        positions = np.flatnonzero(large)
        if len(positions):
            large_columns = {name: values[positions] for name, values in columns.items()}
            answers.put(positions, self.nccl.answer(kind, large_columns, dtype, out_dtype, cache))
        return answers


@dataclass(frozen=True)
class NormSumsEngine:
    """Answers all-reduces with the norm in them; declines all else.

    ``own`` are rows and predictors of kernels that do both. What those do not reach takes as long as the sum alone by
    ``plain``, whom tables know, and what physics says that the norm adds to it: the residual's way through memory.
    """

    device: Device
    own: Sequence[Engine]
    plain: Sequence[Engine]
    name: str = "sums"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        at = np.flatnonzero(columns["norm"]) if kind == "all_reduce" else ()
        if not len(at):
            return answers
        formats = dtype, out_dtype, cache
        rows = {name: values[at] for name, values in columns.items()}
        for engine in self.own:
            reply = engine.answer(kind, rows, *formats)
            reached = np.isfinite(reply.latency_us) & reply.in_envelope & np.isnan(answers.latency_us[at])
            answers.put(at[reached], reply.take(reached))
        unanswered = np.flatnonzero(np.isnan(answers.latency_us[at]))
        if len(unanswered):
            answers.put(
                at[unanswered], self._apart(kind, {name: values[unanswered] for name, values in rows.items()}, formats)
            )
        return answers

    def _apart(self, kind: str, columns: Columns, formats: tuple[str, str, str]) -> Answers:
        """The sum without the norm, and what the norm adds."""
        alone = {**columns, "norm": np.zeros_like(columns["norm"])}
        answers = in_turn(self.plain, kind, alone, *formats)
        dtype, out_dtype, cache = formats
        with_sum, less = (
            analytical.latency_us(kind, op_columns, dtype, out_dtype, self.device, cache)
            for op_columns in (columns, alone)
        )
        added = with_sum - less
        times = {name: getattr(answers, name) + added for name in ("latency_us", "low_us", "high_us")}
        return replace(answers, **times)

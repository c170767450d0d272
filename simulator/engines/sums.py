"""Sums that a serving engine leaves to NCCL: those too large for its own kernel between the GPUs of a node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .answers import Answers, Columns, Engine

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
        at = np.flatnonzero(large)
        if len(at):
            part = {name: values[at] for name, values in columns.items()}
            answers.put(at, self.nccl.answer(kind, part, dtype, out_dtype, cache))
        return answers

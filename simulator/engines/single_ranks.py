"""Collectives of a single rank: nothing moves."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.ops import KINDS
from ...models.choice import SINGLE_RANK
from .answers import Answers, Columns


@dataclass(frozen=True)
class SingleRankEngine:
    """Answers collectives and exchanges between experts of one rank with 0 us; declines all others.

    NCCL launches no kernel for one rank in place (``ncclLaunchOneRank``), and frameworks call it only for groups of
    more. A kernel that also adds the residual and normalises runs on one rank, too: that is for others to answer.
    """

    name: str = "analytical"

    def answer(self, kind: str, columns: Columns, dtype: str, out_dtype: str, cache: str) -> Answers:
        answers = Answers.declined(len(next(iter(columns.values()))))
        if KINDS[kind].collective:
            alone = (columns["ranks"] == 1) & (columns.get("norm", 0) == 0)
            for name in ("latency_us", "low_us", "high_us"):
                getattr(answers, name)[alone] = 0.0
            answers.engine[alone], answers.in_envelope[alone] = self.name, True
            answers.clause[alone] = answers.source[alone] = SINGLE_RANK
        return answers

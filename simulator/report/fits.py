"""A step that does not fit into memory has no time: what follows from one is None in its report."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

T = TypeVar("T")
TIMED = (  # fields that only a step which runs can have
    *("step_time_s", "low_s", "high_s", "ttft_ms", "tpot_ms", "e2e_ms", "low_ms", "high_ms", "quantiles", "p_within"),
    *("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "breakdown", "stages", "power_w", "energy_j"),
    *("cost", "cost_per_million_tokens"),
)


def timed(report: T) -> T:
    """The report itself, without times where its step does not fit."""
    step: Any = report
    if getattr(step, "fits", True):
        return report
    made: T = replace(step, **{each.name: None for each in fields(step) if each.name in TIMED})
    return made

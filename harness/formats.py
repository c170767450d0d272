"""A campaign for a device that lacks the format it was written for: T4, V100 and P100 have no bf16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .plan import CampaignPlan, Case

WRITTEN_FOR = "bf16"


def in_format_of(plan: CampaignPlan, precision: str) -> CampaignPlan:
    """A made plan with ``precision`` in place of bf16, as :func:`in_format` changes a specification.

    Called where the plan runs: a plan that was made elsewhere does not know its device.
    """
    if precision == WRITTEN_FOR:
        return plan
    cases = tuple(dict.fromkeys(_case_in(case, precision) for case in plan.cases))
    return replace(plan, cases=cases, canaries=tuple(_case_in(case, precision) for case in plan.canaries))


def _case_in(case: Case, precision: str) -> Case:
    op = case.op
    if op.dtype != op.out_dtype and {op.dtype, op.out_dtype} == {WRITTEN_FOR, precision}:
        return case  # a cast
    renamed = (precision if name == WRITTEN_FOR else name for name in (op.dtype, op.out_dtype))
    dtype, out_dtype = renamed
    return replace(case, op=op.replace(dtype=dtype, out_dtype=out_dtype))


def in_format(spec: Any, precision: str) -> Any:
    """The same specification with ``precision`` in place of bf16 wherever it names formats.

    Keys that name formats are ``dtype`` and ``out_dtype``, alone or with other axes (``dtype, out_dtype``). A cast
    stays a cast: where both sides would become one format, bf16 is left, which any device can store.
    """
    if precision == WRITTEN_FOR:
        return spec
    if isinstance(spec, Mapping):
        return {
            key: _renamed(value, precision, "," in str(key)) if "dtype" in str(key) else in_format(value, precision)
            for key, value in spec.items()
        }
    if isinstance(spec, list):
        return [in_format(value, precision) for value in spec]
    return spec


def _renamed(value: Any, precision: str, pairs: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            device: formats if device == "cpu" else _renamed(formats, precision, pairs)
            for device, formats in value.items()
        }
    if isinstance(value, list):
        cast = pairs and WRITTEN_FOR in value and precision in value
        return value if cast else [_renamed(item, precision, pairs) for item in value]
    return precision if value == WRITTEN_FOR else value

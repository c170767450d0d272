"""A campaign for a device that lacks the format it was written for: T4, V100 and P100 have no bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WRITTEN_FOR = "bf16"


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
        return {device: each if device == "cpu" else _renamed(each, precision, pairs) for device, each in value.items()}
    if isinstance(value, list):
        cast = pairs and WRITTEN_FOR in value and precision in value
        return value if cast else [_renamed(each, precision, pairs) for each in value]
    return precision if value == WRITTEN_FOR else value

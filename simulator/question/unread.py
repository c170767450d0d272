"""Settings that nothing would read: refused, so that nobody takes an answer for theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from .canonical import RequestError


def changed(settings: Any, names: Iterable[str] = (), prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass (``names``: these alone) that are not at their defaults, those of its parts by path."""
    chosen_names = tuple(names)
    values: dict[str, Any] = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if (chosen_names and field.name not in chosen_names) or value == usual:
            continue
        if is_dataclass(value):
            values |= changed(value, prefix=f"{prefix}{field.name}.")
        else:
            values[f"{prefix}{field.name}"] = value
    return values


def refuse_unread(values: Mapping[str, Any], reason: str) -> None:
    """RequestError for the first of settings by path, where there is one; ``reason`` says why nothing reads it."""
    for path, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
        raise RequestError(f"{path}={text} is not read {reason}: leave it out")

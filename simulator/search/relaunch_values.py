"""Values of launch files: mappings, whole numbers, flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .launch_errors import LaunchError


def mapping(path: Path, name: str, value: Any) -> dict[str, Any]:
    """Names with values, none where nothing is said; LaunchError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LaunchError(f"launch={path}: {name} must have names with values")
    return {str(key): inner for key, inner in value.items()}


def whole(path: Path, name: str, value: Any) -> int:
    """A whole number; LaunchError for anything else."""
    try:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise ValueError
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise LaunchError(f"launch={path}: {name}={value} must be a whole number") from None


def flag(path: Path, name: str, value: Any) -> bool:
    """True or false; LaunchError for anything else."""
    text = str(value).lower()
    if text in ("true", "1", "yes"):
        return True
    if text in ("false", "0", "no", "null", "none"):
        return False
    raise LaunchError(f"launch={path}: {name}={value} must be true or false")

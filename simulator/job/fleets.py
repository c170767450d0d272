"""Fleets whose interruptions were published (``conf/job_failures.yaml``), and how much they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...datasets.loading import load
from ...datasets.reading import read_yaml
from ..question.canonical import RequestError

FILE = Path(__file__).resolve().parents[2] / "conf" / "job_failures.yaml"
PUBLISHED = "published"
BY_CAUSE = "llama3"  # the only fleet that was published by cause: others' shares of causes are taken from it


@dataclass(frozen=True)
class FleetCause:
    """Interruptions of one cause that were counted, and the unit that they go with."""

    count: float
    of: str
    replaced: bool = False
    planned: bool = False


@dataclass(frozen=True)
class Fleet:
    """What was counted on so many devices in so many days, with its source."""

    source: str
    devices: int
    devices_per_node: int
    days: float
    causes: Mapping[str, FleetCause]
    manual_share: float = 0.0

    @property
    def unplanned(self) -> float:
        """Interruptions that nobody planned."""
        return sum(cause.count for cause in self.causes.values() if not cause.planned)

    @property
    def per_gpu_day(self) -> float:
        """Interruptions that nobody planned, of a GPU in a day."""
        return self.unplanned / (self.devices * self.days)


@lru_cache
def fleets() -> Mapping[str, Fleet]:
    """All fleets by name."""
    values: Any = read_yaml(FILE, RequestError)
    return {name: load(Fleet, fleet, RequestError, f"{FILE.name}: {name}") for name, fleet in values.items()}


def fleet_names() -> tuple[str, ...]:
    """The names of all fleets."""
    return tuple(fleets())


@lru_cache
def published_rate() -> tuple[float, float]:
    """Interruptions of a GPU in a day over all fleets: their geometric mean, the standard deviation of logarithms."""
    logs = [math.log(fleet.per_gpu_day) for fleet in fleets().values()]
    mean = sum(logs) / len(logs)
    return math.exp(mean), math.sqrt(sum((log - mean) ** 2 for log in logs) / (len(logs) - 1))

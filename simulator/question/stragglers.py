"""Devices whose compute takes longer than that of others, and what that does to a plan.

A slow rank holds up whoever waits for it: its tensor and data ranks in every collective, so its whole pipeline stage,
and through the pipeline the step. So a stage is as slow as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...datasets.clusters import Cluster
from ...datasets.loading import finite
from .plan import Plan, PlanError


@dataclass(frozen=True)
class Straggler:
    """A device, or a node of devices, whose compute takes ``slowdown`` times longer."""

    slowdown: float
    device: int | None = None
    node: int | None = None

    def __post_init__(self) -> None:
        if (self.device is None) == (self.node is None):
            raise PlanError(f"stragglers has {self}; it takes {EXAMPLE}")
        if not finite(self.slowdown) or self.slowdown < 1.0:
            raise PlanError(f"stragglers has slowdown={self.slowdown!r}; it must be a number of at least 1")

    def devices(self, cluster: Cluster) -> range:
        """The devices that are slow. PlanError for a device or node that is not there."""
        what, at = ("device", self.device) if self.node is None else ("node", self.node)
        count = cluster.devices if self.node is None else cluster.nodes
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < count:
            raise PlanError(f"stragglers has {what}={at!r}; {cluster.id} has {what}s 0 to {count - 1}")
        size = 1 if self.node is None else cluster.devices_per_node
        return range(at * size, (at + 1) * size)


EXAMPLE = "{node: 3, slowdown: 1.2} or {device: 17, ...}"


def stragglers(values: Any) -> tuple[Straggler, ...]:
    """From plain values as the command line has them. PlanError for what is none."""
    if not isinstance(values, (list, tuple)):
        raise PlanError(f"stragglers={values!r} must be a list, such as [{{node: 3, slowdown: 1.2}}]")
    result = []
    for value in values:
        if isinstance(value, Straggler):
            result.append(value)
        elif isinstance(value, Mapping) and set(value) in ({"node", "slowdown"}, {"device", "slowdown"}):
            result.append(Straggler(**value))
        else:
            raise PlanError(f"stragglers has {value!r}; it takes {EXAMPLE}")
    return tuple(result)


def slow_devices(values: Sequence[Straggler | Mapping[str, Any]], cluster: Cluster) -> dict[int, float]:
    """How many times longer compute takes, by device. PlanError for a device or node that is not there."""
    slowdowns: dict[int, float] = {}
    for straggler in stragglers(values):
        for device in straggler.devices(cluster):
            slowdowns[device] = max(slowdowns.get(device, 1.0), float(straggler.slowdown))
    return slowdowns


def stage_slowdowns(plan: Plan) -> np.ndarray:
    """How many times longer compute takes on each pipeline stage: that of its slowest rank [stages]."""
    slowdowns = np.ones(plan.cluster.devices)
    slowdowns[list(plan.slow_devices)] = list(plan.slow_devices.values())
    return np.array([slowdowns[plan.stage_devices(stage)].max() for stage in range(plan.parallel.pp)])

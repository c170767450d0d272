"""Devices whose compute takes longer than that of others, and what that does to a plan.

A slow rank holds up whoever waits for it: its tensor and data ranks in every collective, so its whole pipeline stage,
and through the pipeline the step. So a stage is as slow as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...datasets.clusters import Cluster
from .plan import Plan, PlanError


def slow_devices(values: Sequence[Mapping[str, Any]], cluster: Cluster) -> dict[int, float]:
    """How many times longer compute takes, by device, of ``{node: 3, slowdown: 1.2}`` or ``{device: 17, ...}``.

    PlanError for a device or node that is not there, or a figure that slows nothing down.
    """
    found: dict[int, float] = {}
    if not isinstance(values, (list, tuple)):
        raise PlanError(f"stragglers={values!r} must be a list, such as [{{node: 3, slowdown: 1.2}}]")
    for value in values:
        keys = set(value) if isinstance(value, Mapping) else set()
        if keys not in ({"node", "slowdown"}, {"device", "slowdown"}):
            raise PlanError(f"stragglers has {value!r}; it takes {{node: 3, slowdown: 1.2}} or {{device: 17, ...}}")
        what, slowdown = ("node" if "node" in keys else "device"), value["slowdown"]
        count = cluster.nodes if what == "node" else cluster.devices
        at = value[what]
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < count:
            raise PlanError(f"stragglers has {what}={at!r}; {cluster.id} has {what}s 0 to {count - 1}")
        if isinstance(slowdown, bool) or not isinstance(slowdown, (int, float)) or not 1.0 <= slowdown < float("inf"):
            raise PlanError(f"stragglers has slowdown={slowdown!r}; it must be a number of at least 1")
        each = cluster.devices_per_node if what == "node" else 1
        for device in range(at * each, (at + 1) * each):
            found[device] = max(found.get(device, 1.0), float(slowdown))
    return found


def stage_slowdowns(plan: Plan) -> np.ndarray:
    """How many times longer compute takes on each pipeline stage: that of its slowest rank [stages]."""
    slowdowns = np.ones(plan.cluster.devices)
    slowdowns[list(plan.slow_devices)] = list(plan.slow_devices.values())
    return np.array([slowdowns[plan.stage_devices(stage)].max() for stage in range(plan.parallel.pp)])

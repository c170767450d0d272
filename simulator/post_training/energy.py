"""What an iteration draws: each phase by its watts, GPUs that wait at idle power, hosts and the building as told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose

import numpy as np

from ...datasets.devices import Device
from ...models import clocks
from ..job.request import JobEnergy
from .groups import ALL, ROLLOUT, TRAINING, GpuGroups
from .phases import ROLL, SYNC, Phase

WAITING, HOSTS = "waiting GPUs", "hosts"
J_PER_KWH = 3.6e6


def gpus_of(groups: GpuGroups) -> dict[str, int]:
    """GPUs by the name of their group."""
    return {ALL: groups.gpus, TRAINING: groups.training.devices, ROLLOUT: groups.rollout_gpus}


def phase_kwh(
    phases: Sequence[Phase], groups: GpuGroups, device: Device, energy: JobEnergy, iteration_s: float
) -> dict[str, float]:
    """kWh of a mean batch by phase, of GPUs that wait, and of hosts where they are known; {} without watts."""
    if not device.tdp_w or any(phase.gpu_w is None for phase in phases):
        return {}
    count, to_kwh = gpus_of(groups), energy.pue / J_PER_KWH
    joules: dict[str, float] = {}
    busy_s = 0.0  # of GPUs together
    for phase in phases:
        gpu_s = phase.seconds * count[phase.group]
        joules[phase.name] = joules.get(phase.name, 0.0) + (phase.gpu_w or 0.0) * gpu_s
        busy_s += gpu_s
    all_s = groups.gpus * iteration_s
    if not isclose(busy_s, all_s):  # a sum of seconds, which rounds
        joules[WAITING] = clocks.idle_w(device) * max(all_s - busy_s, 0.0)
    if energy.node_w:
        joules[HOSTS] = energy.node_w * groups.nodes * iteration_s
    return {name: amount * to_kwh for name, amount in joules.items() if amount}


def iteration_kwh(
    phases: Sequence[Phase],
    groups: GpuGroups,
    device: Device,
    energy: JobEnergy,
    seconds: Mapping[str, np.ndarray],
) -> np.ndarray | None:
    """kWh of iterations whose ``rollout``, ``training`` and whole take so long [lives, iterations]; None without watts.

    Watts of training are the mean over its phases; all that is left of an iteration is drawn at idle power.
    """
    if not device.tdp_w or any(phase.gpu_w is None for phase in phases):
        return None
    idle_w, count = clocks.idle_w(device), gpus_of(groups)
    all_s = seconds["iteration"]
    joules = groups.gpus * idle_w * all_s + (energy.node_w or 0.0) * groups.nodes * all_s
    for work, group in (("rollout", ROLLOUT), ("training", TRAINING)):
        mine = [phase for phase in phases if phase.name != SYNC and (phase.name == ROLL) == (work == "rollout")]
        length_s = sum(phase.seconds for phase in mine)
        if length_s:
            watts = sum((phase.gpu_w or 0.0) * phase.seconds for phase in mine) / length_s
            gpus = groups.gpus if groups.colocated else count[group]
            joules = joules + gpus * (watts - idle_w) * seconds[work]
    return joules * energy.pue / J_PER_KWH

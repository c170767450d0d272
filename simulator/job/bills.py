"""What all lives of a job or of post-training cost: GPU-hours, price, energy and CO2, and what of it is not known."""

from __future__ import annotations

import numpy as np

from ...datasets.clusters import Cluster
from ..question.requests import SimulateRequest
from .answer import LifeSpread, spread_of
from .request import JobEnergy


def price_of(step: SimulateRequest, cluster: Cluster) -> float:
    """The price of a GPU-hour: as asked, or the cluster's own; 0 where nobody says it."""
    return cluster.price_per_device_hour if step.price_per_gpu_hour is None else step.price_per_gpu_hour


def bills(
    gpu_hours: np.ndarray, price: float, kwh: np.ndarray | None, energy: JobEnergy
) -> dict[str, LifeSpread | None]:
    """Spreads of GPU-hours and kWh [lives], of their price and CO2; None where a price, watts or the grid's grams are
    not known."""
    grams = energy.grid_g_per_kwh
    return {
        "gpu_hours": spread_of(gpu_hours),
        "cost": spread_of(gpu_hours * price) if price else None,
        "kwh": None if kwh is None else spread_of(kwh),
        "co2_kg": None if kwh is None or grams is None else spread_of(kwh * grams / 1000.0),
    }


def energy_notes(energy: JobEnergy, unknown: str) -> list[str]:
    """What kWh leave out; ``unknown`` names whose watts nobody knows (empty: all are known)."""
    if unknown:
        return [f"no energy: nobody knows the watts of {unknown} (energy.gpu_w)"]
    hosts = "kWh are those of the GPUs: hosts and switches are left out (energy.node_w, energy.pue)"
    return [
        *([hosts] if energy.node_w is None else []),
        "watts have no interval: kWh differ between lives by time alone",
        *(["no CO2 without the grid's grams (energy.grid_g_per_kwh)"] if energy.grid_g_per_kwh is None else []),
    ]

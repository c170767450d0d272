"""Power, energy and price of a step: from the watts of its ops where they were measured, else from what ops do.

A device draws what it does with nothing to do all the time. Kernels add to that, those of several streams together: of
kinds whose power was measured (:func:`...models.power.measured_w`) what the power model says, of others what their
bytes and FLOPs cost (:func:`...models.power.estimated_w`). Gaps between kernels, waiting and the host add nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import KINDS, Op, iterate_groups
from ...datasets.vocabulary import OpColumns
from ...models import clocks, power


@dataclass(frozen=True)
class Energy:
    """Mean watts of one device and joules of all of them for one step; None where the TDP is unknown.

    ``measured`` is the share of the joules that are of ops whose watts were measured.
    """

    power_w: float | None
    energy_j: float | None
    measured: float = 0.0


@dataclass(frozen=True)
class DrawnEnergy:
    """Joules of one device in kernels, beyond what it draws idle meanwhile; and all joules of those measured."""

    joules: float
    measured_j: float


def energy(device: Device, devices: int, drawn: DrawnEnergy, step_s: float) -> Energy:
    """Of ``devices`` whose kernels add so much to what they draw idle throughout a step. No more than the limit."""
    if not device.tdp_w or step_s <= 0.0:
        return Energy(None, None)
    joules = drawn.joules + least_w(device) * step_s
    share = min(device.tdp_w * step_s / joules, 1.0)  # kernels of several streams may draw at the same time
    return Energy(joules * share / step_s, joules * share * devices, min(drawn.measured_j / joules, 1.0))


def least_w(device: Device) -> float:
    """No device of a step draws less in the mean: what it draws with clocks up and nothing to do."""
    return min(clocks.idle_w(device), device.tdp_w) if device.tdp_w else 0.0


def drawn_by(
    ops: Sequence[Op | None],
    us: np.ndarray,
    latency_us: np.ndarray,
    device: Device,
    roots: Sequence[Path],
    backend: str | None = None,
) -> DrawnEnergy:
    """What kernels add in ``us`` microseconds [n], each call of which takes ``latency_us`` [n]."""
    watts = watts_of(ops, latency_us, device)
    distinct = [op for op in dict.fromkeys(ops) if op is not None]
    known = dict(zip(distinct, power.measured_w(distinct, device, roots, backend).tolist(), strict=True))
    own = np.array([np.nan if op is None else known[op] for op in ops])
    measured = np.isfinite(own)
    watts, seconds = np.where(measured, own, watts), us * 1e-6
    return DrawnEnergy(float((watts - least_w(device)) @ seconds), float(watts[measured] @ seconds[measured]))


def watts_of(ops: Sequence[Op | None], latency_us: np.ndarray, device: Device) -> np.ndarray:
    """Watts of calls that take so long [n]: of an op by what it does, of the host's none beyond idle ones.

    An operator without a kind is taken to keep memory busy.
    """
    if not device.tdp_w:
        return np.zeros(len(ops))
    idle = least_w(device)
    watts = np.full(len(ops), power.streaming_w(device), dtype=float)
    places = [at for at, op in enumerate(ops) if op is not None]
    for kind, dtype, out_dtype, positions, columns in iterate_groups([op for op in ops if op is not None]):
        at = np.array(places)[positions]
        host = KINDS[kind].family == "host"
        watts[at] = (
            idle if host else power.estimated_w(OpColumns(kind, columns, dtype, out_dtype), device, latency_us[at])
        )
    return watts


def cost(price_per_device_hour: float, devices: int, seconds: float) -> float | None:
    """Price of ``seconds`` on ``devices``; None without a price."""
    return price_per_device_hour * devices * seconds / 3600.0 if price_per_device_hour else None

"""Power, energy and price of a step: from the watts of its ops where they were measured, else from what ops do.

Of kinds whose power was measured (:func:`...models.power.measured_w`) every op draws what the power model says. Another
draws a share of the TDP by what holds it back: a product of few rows waits for memory and draws what memory does. These
shares are stated, not fitted: published steps give time, rarely watts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ...datasets.devices import Device
from ...datasets.ops import Op, iterate_groups
from ...models import analytical, clocks, power

# Share of TDP: matrix units at work; HBM at work; waiting for the network or a bubble.
COMPUTING, MEMORY, WAITING = 0.92, 0.65, 0.35
MOST_KNOWN = 10_000  # ops of a device whose bounds are kept


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
    """Joules of one device in kernels that keep it busy, for how many seconds, and how many joules were measured."""

    joules: float
    busy_s: float
    measured_j: float


def energy(device: Device, devices: int, drawn: DrawnEnergy, step_s: float) -> Energy:
    """Of ``devices`` that draw so much while kernels run, and wait for the rest of the step. No more than the TDP."""
    if not device.tdp_w or step_s <= 0.0:
        return Energy(None, None)
    joules = drawn.joules + WAITING * device.tdp_w * max(step_s - drawn.busy_s, 0.0)
    share = min(device.tdp_w * step_s / joules, 1.0)  # kernels of several streams may draw at the same time
    return Energy(joules * share / step_s, joules * share * devices, drawn.measured_j / joules)


def least_w(device: Device) -> float:
    """No device of a step draws less in the mean."""
    return min(WAITING * device.tdp_w, clocks.idle_w(device)) if device.tdp_w else 0.0


def drawn_by(
    ops: Sequence[Op | None], us: np.ndarray, device: Device, roots: Sequence[Path], backend: str | None = None
) -> DrawnEnergy:
    """What kernels of ``us`` microseconds [n] draw; those that wait for launches, hosts and networks are left out."""
    bounds = np.array(bounds_of(ops, device), dtype=object)
    watts = device.tdp_w * np.select([bounds == "compute", bounds == "memory"], [COMPUTING, MEMORY], 0.0)
    distinct = [op for op in dict.fromkeys(ops) if op is not None]
    known = dict(zip(distinct, power.measured_w(distinct, device, roots, backend).tolist(), strict=True))
    own = np.array([np.nan if op is None else known[op] for op in ops])
    measured = np.isfinite(own)
    watts, seconds = np.where(measured, own, watts), us * 1e-6
    return DrawnEnergy(
        float(watts @ seconds), float(seconds[watts > 0].sum()), float(watts[measured] @ seconds[measured])
    )


def bounds_of(ops: Sequence[Op | None], device: Device) -> list[str]:
    """What holds each op back: compute, memory, latency, network or host; memory where an operator has no kind."""
    found = _known(repr(device))
    if len(found) > MOST_KNOWN:
        found.clear()
    distinct = [op for op in dict.fromkeys(ops) if op is not None and op not in found]
    for kind, dtype, out_dtype, positions, columns in iterate_groups(distinct):
        bounds = analytical.bound(kind, columns, dtype, out_dtype, device)
        found.update((distinct[at], str(bound)) for at, bound in zip(positions.tolist(), bounds, strict=True))
    return ["memory" if op is None else found[op] for op in ops]


@lru_cache(maxsize=8)
def _known(device: str) -> dict[Op, str]:
    """What was found out about ops on a device, for the next question."""
    return {}


def cost(price_per_device_hour: float, devices: int, seconds: float) -> float | None:
    """Price of ``seconds`` on ``devices``; None without a price."""
    return price_per_device_hour * devices * seconds / 3600.0 if price_per_device_hour else None

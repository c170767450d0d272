"""The clocks that a power limit leaves: what long matrix products sustain, whatever a table of short ones says.

Operators timed for milliseconds run at boost clocks. Products that go on for tenths of a second draw more than the
limit there, and the clock falls until they do not. Watts beyond idle and memory grow as the clock to the power
``alpha``, so that one measured chip of a kind says what others of it sustain at other limits. At one clock they grow
as the rate: a FLOP costs the same energy in a product that leaves units idle, so that it is slowed too, if less.

What a machine itself sustains, its own rows of long products say (:func:`with_own_clocks`), and of attention, which
runs on the same units, those of long attention. Where nobody timed that, it is taken to keep its clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..datasets.columns import numbers, values
from ..datasets.devices import DEVICE_DIRECTORY, RATE_OF, Device, DeviceError, load_device
from ..datasets.dtypes import itemsize
from ..datasets.row_clocks import burst_mhz, relative_clocks
from ..datasets.vocabulary import KINDS, OpColumns
from .busy import parts
from .labs import HARNESS

if TYPE_CHECKING:
    import pyarrow as pa

PRODUCTS = ("gemm", "moe")  # families of matrix products
# The kind whose long rows say what attention sustains, and the name of its rates beside those of products by format. Of
# formats of 16 bits alone: others are not timed for long.
ATTENTION, ATTENTION_RATE = "attention_prefill", "attention"
LONG_KINDS = ("gemm", ATTENTION)
MEMORY_PJ = 100.0  # a byte: H200 110 to 120, B200 75 to 100 (aiconfigurator's tables with watts)
IDLE_SHARE = 0.2  # of the limit, clocks up and nothing to do: H200 126 of 700 W, B200 241 of 1000 W (aiconfigurator)
LONG_US = 60_000.0  # a product whose one call the limiter would slow down, where it does: it settles in 30 to 100 ms
SATURATING = 0.8  # of the best rate of long products: of lower ones, other things say what they draw
MOST_WRITTEN = 2  # bytes of a result: products that add to fp32 sums draw power for them, too
SAME_UNITS = 0.02  # by how much FLOPs a clock and unit may differ between chips that have the same units


TELLING = ("dtype", "out_dtype", "cache", "source", "throttled", "clocks", "sm_clock_mhz")
# Of rows that say what a machine sustains, by kind.
COLUMNS = {kind: (*KINDS[kind].names, *TELLING, "latency_us") for kind in LONG_KINDS}


@dataclass(frozen=True)
class Anchor:
    """What one chip sustains in one format: TFLOP/s at its limit, where compute units draw ``core_w`` of that.

    ``boost_tflops`` is what its saturating products reach at ``clock_mhz``, until the limiter takes hold.
    """

    tflops: float
    boost_tflops: float
    clock_mhz: float
    core_w: float
    compute_units: int
    alpha: float


def steady_rate(device: Device, dtype: str, limit_w: float) -> float:
    """TFLOP/s of long saturating products under a limit, at most the boost rate; infinite where nothing is known.

    S(P) = S_r · (SM / SM_r) · ((P - P0 - Pm) / (P_r - P0_r - Pm_r)) ^ (1 / alpha), with the anchor as reference r.
    """
    measured = anchor(device, dtype)
    if measured is None:
        return math.inf
    room = max(limit_w - floor_w(device), 0.0) / measured.core_w
    rate = measured.tflops * device.compute_units / measured.compute_units * room ** (1.0 / measured.alpha)
    return min(rate, device.tensor_rate(dtype))


def at_boost(ops: OpColumns, device: Device, latency_us: np.ndarray, clock: np.ndarray) -> np.ndarray:
    """Microseconds of ops [n] at boost clock, of those that took ``latency_us`` at a ``clock`` relative to it.

    Only the time in which products compute follows the clock. Where a format has no anchor nobody slows them again, and
    they stay as they are; so do other families.
    """
    if (clock >= 1.0).all() or anchor(device, rate_name(ops.kind, ops.dtype)) is None:
        return latency_us
    return latency_us / parts(ops, device).slower(clock)


def rate_name(kind: str, dtype: str) -> str:
    """Under which name a device has the rate that ops of a kind and format sustain; "" for kinds that have none."""
    family = KINDS[kind].family
    if family in PRODUCTS:
        return dtype
    return ATTENTION_RATE if family == "attention" and dtype in ("bf16", "fp16") else ""


def with_own_clocks(device: Device, tables: Sequence[tuple[str, pa.Table]]) -> Device:
    """The device with the steady and boost rates that its own rows of :data:`LONG_KINDS` show, by :func:`rate_name`.

    Such a product (:data:`LONG_US`, or held at a clock that the power limit leaves) says how low the clock falls at its
    rate, and so which rate the limit just lets through. Where the clock of none fell, no product is slowed down. So it
    is with attention.
    """
    if device.synchronous or not device.tdp_w:
        return device
    complete = [(kind, rows) for kind, rows in tables if {*TELLING, "latency_us"} <= set(rows.column_names)]
    own_rates = {
        name: _sustained(*rates, device)
        for kind, rows in complete
        for name, rates in _long_rates(device, kind, rows).items()
    }
    if not own_rates:
        return device
    steady, boost = ({name: rates[at] for name, rates in own_rates.items()} for at in (0, 1))
    return replace(
        device,
        steady_tflops={**device.steady_tflops, **steady},
        boost_tflops={**device.boost_tflops, **boost},
    )


def _long_rates(device: Device, kind: str, rows: pa.Table) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rates at boost clock in TFLOP/s, and relative clocks, of own rows of long calls by :func:`rate_name`."""
    names = KINDS[kind].names
    words, mhz = np.array(values(rows["clocks"]), dtype=object), numbers(rows["sm_clock_mhz"])
    clock = relative_clocks(words, mhz, burst_mhz(words, mhz, device.clock_mhz))
    latency, own = numbers(rows["latency_us"]), np.array(values(rows["source"]), dtype=object) == HARNESS
    told = own & ~numbers(rows["throttled"]).astype(bool) & (words != None)  # noqa: E711
    long = told & ((clock < 1.0) | (latency >= LONG_US))
    states = np.stack([np.array(values(rows[name]), dtype=object) for name in ("dtype", "out_dtype", "cache")], axis=1)
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for state in sorted({tuple(each) for each in states[long]}):
        dtype, out_dtype, cache = state
        name = rate_name(kind, dtype)
        if itemsize(out_dtype) > MOST_WRITTEN or not name or not device.supports(dtype):
            continue
        at = np.flatnonzero(long & (states == state).all(axis=1))
        busy = parts(OpColumns(kind, {dim: numbers(rows[dim])[at] for dim in names}, dtype, out_dtype, cache), device)
        found.setdefault(name, []).append((busy.tflops(latency[at] / busy.slower(clock[at])), clock[at]))
    return {name: tuple(np.concatenate(each) for each in zip(*made, strict=True)) for name, made in found.items()}  # type: ignore[misc]


def _sustained(rate: np.ndarray, clock: np.ndarray, device: Device) -> tuple[float, float]:
    """The steady and boost rate in TFLOP/s of saturating products, by long ones [n] and the clocks that they kept.

    Watts of compute units are in proportion to rate · clock ^ alpha, and under the limit as many as there is room for.
    """
    boost = float(rate.max())
    limited = (clock < 1.0) & (rate >= SATURATING * boost)
    if not limited.any():
        most = max(boost, *device.tensor_tflops.values())
        return most, most
    fits = float(np.median(rate[limited] * clock[limited] ** device.alpha))
    return boost * (fits / boost) ** (1.0 / device.alpha), boost


def core_w(device: Device, dtype: str, tflops: np.ndarray) -> np.ndarray:
    """Watts of compute units at boost clock where products reach rates [n] there; 0 without anchor.

    core_w_r · (T / S_r) · (max(T, B_r) / S_r) ^ (alpha - 1), with the anchor's steady rate S_r and boost rate B_r (by
    units and clock of this device): what saturating products draw, in proportion for those that leave units idle.
    """
    measured = anchor(device, dtype)
    if measured is None:
        return np.zeros_like(tflops)
    rate = tflops * measured.compute_units / device.compute_units
    boost = measured.boost_tflops * device.clock_mhz / measured.clock_mhz
    watts: np.ndarray = measured.core_w * rate / measured.tflops
    return watts * (np.maximum(rate, boost) / measured.tflops) ** (measured.alpha - 1.0)


def adding_w(device: Device, sum_bytes: np.ndarray, latency_us: np.ndarray) -> np.ndarray:
    """Watts of memory for products that add to fp32 sums of so many bytes [n], beyond those that write 16 bits.

    Sums are read and written; half as many bytes are the usual result. Memory moves no more than its bandwidth.
    """
    gbps = np.minimum((2.0 - 0.5) * 1e-3 * sum_bytes / latency_us, device.memory_gbps)
    return np.asarray(MEMORY_PJ * 1e-3 * gbps)


def idle_w(device: Device) -> float:
    """Watts with clocks up and nothing to do."""
    return device.idle_w or IDLE_SHARE * stock_limit_w(device)


def floor_w(device: Device) -> float:
    """Watts that a device draws beside its compute units while products run."""
    return idle_w(device) + device.memory_w


def stock_limit_w(device: Device) -> float:
    """The limit of the data sheet under a device's id; its own where there is none, or a higher one."""
    try:
        return max(load_device(device.id).tdp_w, device.tdp_w)
    except DeviceError:
        return device.tdp_w


@lru_cache(maxsize=1024)
def _anchor(device_id: str, dtype: str) -> Anchor | None:
    device = load_device(device_id)
    if device.steady_tflops.get(dtype):
        return _of(device, dtype)
    kin = [
        entry
        for entry in _measured()
        if entry.architecture == device.architecture
        and entry.steady_tflops.get(dtype)
        and abs(_each_clock(entry, dtype) / _each_clock(device, dtype) - 1.0) < SAME_UNITS
    ]
    nearest = min(kin, key=lambda entry: (abs(math.log(entry.tdp_w / device.tdp_w)), entry.id), default=None)
    return None if nearest is None else _of(nearest, dtype)


def anchor(device: Device, dtype: str) -> Anchor | None:
    """The measured chip that says what a device sustains: its own, else the nearest in power limit of the same kind.

    Of the same kind are chips of one architecture whose units do as many FLOPs a clock. None where none was measured.
    """
    names = dict.fromkeys((dtype, *RATE_OF.get(dtype, ()), *(("bf16",) if dtype == "fp16" else ())))
    for name in names if device.vendor != "cpu" else ():
        if device.steady_tflops.get(name, 0.0) != _shipped_rates(device.id).get(name, 0.0):
            return _of(device, name)  # of this very machine
        try:
            measured = _anchor(device.id, name)
        except DeviceError:  # not shipped, or without the format
            measured = _of(device, name) if device.steady_tflops.get(name) else None
        if measured is not None:
            return measured
    return None


def _of(device: Device, dtype: str) -> Anchor:
    room, steady = stock_limit_w(device) - floor_w(device), device.steady_tflops[dtype]
    boost = device.boost_tflops.get(dtype, steady)
    return Anchor(steady, boost, device.clock_mhz, room, device.compute_units, device.alpha)


@lru_cache(maxsize=1024)
def _shipped_rates(device_id: str) -> Mapping[str, float]:
    """The steady rates in the file of a device; none where it has no file."""
    try:
        return load_device(device_id).steady_tflops
    except DeviceError:
        return {}


def _each_clock(device: Device, dtype: str) -> float:
    """FLOPs of one compute unit a clock."""
    return device.tensor_rate(dtype) / (device.compute_units * device.clock_mhz)


@lru_cache
def _measured() -> tuple[Device, ...]:
    """The shipped devices with steady figures of their own."""
    files = sorted(DEVICE_DIRECTORY.glob("*.yaml"))
    return tuple(load_device(path.stem) for path in files if "steady_tflops:" in path.read_text("utf-8"))

"""What a device can do at best: peak rates, memories, power. One YAML per device in ``conf/device``.

Each figure of a data sheet stands beside its source. The CPU has no file: its figures are *measured* on the
machine at hand (``harness/probe.py``) and kept in the store as ``devices/<device_id>.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from .device_names import shipped_device_id
from .dtypes import ByFormat, family_format
from .loading import finite, load
from .near import did_you_mean
from .reading import read_json, read_yaml
from .reuse import ReuseCurves

DEVICE_DIRECTORY = Path(__file__).resolve().parent.parent / "conf" / "device"
MEASURED_DIRECTORY = Path(__file__).resolve().parent / "measured" / "steps" / "devices"  # of tables that ship
AT_HAND = ("cpu", "local")  # the processor, and what was measured last, of the machine at hand: files without figures
ALIASES = DEVICE_DIRECTORY.parent / "aliases.yaml"

# Formats that run on another format's units at that format's rate when the device lists no rate of their own.
_NAMED_RATES = {
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32", "tf32"),
    "fp8_e5m2": ("fp8",),
    "fp8_block": ("fp8",),
    "mxfp8": ("mxfp8", "fp8"),
    "mxfp4": ("mxfp4", "nvfp4"),
    "int4": ("int8",),
    "w8a16": ("bf16", "fp16"),
    "w4a16": ("bf16", "fp16"),
    "mxfp4a16": ("bf16", "fp16"),
    "nf4": ("bf16", "fp16"),
    "w4a8": ("fp8",),
    "mxfp4a8": ("mxfp8", "fp8"),
}
# scales of 32 need units that multiply them in
_NAMED_UNITS = _NAMED_RATES | {"mxfp8": ("mxfp8",), "mxfp4a8": ("mxfp8",)}
RATE_OF = ByFormat(_NAMED_RATES, lambda name: _NAMED_RATES.get(family_format(name)))
UNITS_OF = ByFormat(_NAMED_UNITS, lambda name: _NAMED_UNITS.get(family_format(name)))


class DeviceError(ValueError):
    """An unknown device, a missing or impossible figure. The message says which and what to do."""


@dataclass(frozen=True)
class Device:
    """Peak figures of one device. Rates are dense (no sparsity) and decimal (1 GB/s = 1e9 B/s)."""

    id: str
    name: str
    vendor: str  # nvidia, amd, cpu
    architecture: str
    compute_units: int  # streaming multiprocessors, compute units, or CPU threads in use
    clock_mhz: float  # boost clock that the peak rates assume
    tensor_tflops: Mapping[str, float]  # by dtype, on matrix units (on a CPU: best measured matrix product)
    vector_tflops: float  # fp32 on ordinary lanes
    memory_gib: float
    memory_gbps: float
    l2_mib: float  # last-level cache
    l2_gbps: float
    shared_kib: float = 0.0  # shared memory of one compute unit
    link_gbps: float = 0.0  # NVLink or xGMI, one direction, all links of the device together
    pcie_gbps: float = 0.0  # to the host, one direction
    launch_us: float = 2.0  # shortest kernel in a graph replay
    dispatch_us: float = 5.0  # host time of one eager operator call
    tdp_w: float = 0.0  # the power limit: that of the data sheet, or the cap under which it runs
    idle_w: float = 0.0  # draws with clocks up and nothing to do; 0 = unknown
    memory_w: float = 0.0  # memory draws beside long products
    steady_tflops: Mapping[str, float] = field(default_factory=dict)  # of what runs long, at the data sheet's limit
    boost_tflops: Mapping[str, float] = field(default_factory=dict)  # the same, before the limiter takes hold
    alpha: float = 2.0  # watts of compute units grow as their clock to this power
    die: str = ""  # the chip's code name: devices of one die differ in what is enabled, memory, links and power
    sm: float = 0.0  # compute capability of NVIDIA's, 0 elsewhere
    reuse: Mapping[str, Any] = field(default_factory=dict)  # of a measured CPU: the fields of ReuseCurves
    variant_of: str = ""  # the device whose predictors answer for it, corrected by physics for what differs
    sources: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def curves(self) -> ReuseCurves | None:
        """How cold a call is by what was touched since it was last made; None where nobody measured it."""
        return ReuseCurves.from_dict(self.reuse) if self.reuse else None

    @property
    def synchronous(self) -> bool:
        """Whether the host itself computes, so that host time and kernel time add up."""
        return self.vendor == "cpu"

    def supports(self, dtype: str) -> bool:
        """Whether the device has a rate for matrix products in this dtype."""
        return any(name in self.tensor_tflops for name in UNITS_OF.get(dtype, (dtype,)))

    def tensor_rate(self, dtype: str) -> float:
        """Peak TFLOP/s of matrix products; DeviceError when the device lacks the dtype."""
        for name in UNITS_OF.get(dtype, (dtype,)):
            if name in self.tensor_tflops:
                return self.tensor_tflops[name]
        raise DeviceError(f"{self.name} has no {dtype} matrix units; it has {', '.join(self.tensor_tflops)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as the YAML has them."""
        return dataclasses.asdict(self)

    def __post_init__(self) -> None:
        for name in ("tensor_tflops", "steady_tflops", "boost_tflops"):
            if not isinstance(getattr(self, name), Mapping):
                raise DeviceError(f"device.{name}={getattr(self, name)!r} must be rates by dtype, as {{bf16: 989}}")
        if finite(self.alpha) and not 1.0 <= self.alpha <= 3.0:
            raise DeviceError(
                f"device.alpha={self.alpha} must lie between 1 (one voltage) and 3 (voltage as the clock)"
            )
        try:
            self.curves  # noqa: B018  shows what is wrong with them
        except (TypeError, ValueError) as error:
            raise DeviceError(f"device.reuse is not what `opcast profile` measures: {error}") from None
        for figure in dataclasses.fields(self):
            value, needed = getattr(self, figure.name), figure.default is dataclasses.MISSING
            rates = value.values() if isinstance(value, Mapping) and figure.name != "sources" else (value,)
            for rate in rates if str(figure.type) in ("int", "float", "Mapping[str, float]") else ():
                if isinstance(rate, bool) or not isinstance(rate, (int, float)):
                    raise DeviceError(f"device.{figure.name}={rate!r} must be a number")
                if not finite(rate) or rate < 0 or (needed and rate == 0):
                    raise DeviceError(f"device.{figure.name}={rate} must be positive")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Device:
        """A checked device; DeviceError names an unknown, missing or impossible figure."""
        return load(cls, values, DeviceError, "device", "figure")


def overridden(device: Device, figures: Mapping[str, Any]) -> Device:
    """A device with some figures of its own. Peak rates stand for its compute units at its clock, so they follow these.

    So does the bandwidth of its last-level cache. A rate that ``figures`` change is taken as it is. DeviceError as
    :meth:`Device.from_dict`.
    """
    changed = Device.from_dict(device.to_dict() | dict(figures))
    share = (changed.compute_units / device.compute_units) * (changed.clock_mhz / device.clock_mhz)
    if share == 1.0:
        return changed
    tensor = {
        dtype: rate * share if rate == device.tensor_tflops.get(dtype) else rate
        for dtype, rate in changed.tensor_tflops.items()
    }
    rates = {
        name: getattr(device, name) * share
        for name in ("vector_tflops", "l2_gbps")
        if getattr(changed, name) == getattr(device, name)
    }
    return dataclasses.replace(changed, tensor_tflops=tensor, **rates)


def device_of_file(path: Path) -> Device:
    """The device that a file in the format of ``conf/device`` describes. DeviceError for one that cannot be read."""
    path = path.expanduser()
    if not path.is_file():
        raise DeviceError(f"device={path}: there is no such file, nor a device of that name")
    return Device.from_dict(read_yaml(path, DeviceError, f"device={path}"))


def is_file_name(name: str) -> bool:
    """Whether a device or cluster is named by a file of its figures."""
    return name.endswith((".yaml", ".yml"))


def known_devices() -> list[str]:
    """The ids of the devices that ship with opcast; not the names of the machine at hand (``cpu``, ``local``)."""
    return sorted(path.stem for path in DEVICE_DIRECTORY.glob("*.yaml") if path.stem not in AT_HAND)


def measured_machines() -> list[str]:
    """The ids of machines whose measured figures ship with opcast, beside tables of their steps."""
    return sorted(path.stem for path in MEASURED_DIRECTORY.glob("*.json"))


def device_aliases() -> frozenset[str]:
    """The short names of shipped devices (``conf/aliases.yaml``), in small letters."""
    return frozenset(read_yaml(ALIASES, DeviceError)["device"])


def device_id_of(name: str) -> str:
    """The id of a device by an alias (``conf/aliases.yaml``) or a driver's name for it; the name itself of no such."""
    if (DEVICE_DIRECTORY / f"{name}.yaml").is_file():
        return name
    return str(read_yaml(ALIASES, DeviceError)["device"].get(name.lower()) or shipped_device_id(name) or name)


@lru_cache
def load_device(device_id: str) -> Device:
    """A shipped device by id or alias (``conf/aliases.yaml``), or a measured machine that ships.

    DeviceError suggests the nearest known one.
    """
    path, measured = DEVICE_DIRECTORY / f"{device_id}.yaml", MEASURED_DIRECTORY / f"{device_id}.json"
    if measured.is_file() and measured.parent == MEASURED_DIRECTORY:
        return Device.from_dict(read_json(measured, DeviceError, "a device's figures"))
    if not path.is_file() or path.parent != DEVICE_DIRECTORY:
        if (meant := device_id_of(device_id)) != device_id:
            return load_device(meant)
        short = [*AT_HAND, *read_yaml(ALIASES, DeviceError)["device"]]  # what a person types is a short name
        hint = did_you_mean(device_id, [*short, *known_devices()], "see `opcast list devices`")
        raise DeviceError(f"unknown device {device_id!r}; {hint}")
    return Device.from_dict(read_yaml(path, DeviceError))

"""What AMD's GPUs do otherwise: their 8-bit floats, their clocks and power by amdsmi (it comes with ROCm), xGMI."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .clock_reading import Clocks

FNUZ = {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e5m2": "float8_e5m2fnuz"}  # without a negative zero
FNUZ_TARGETS = ("gfx940", "gfx941", "gfx942")  # MI300: their units know no others; MI350 has the usual ones
XGMI = 2  # of amdsmi's kinds of links
MICROWATTS = 1e5  # a limit above this is in microwatts: releases of amdsmi differ
# What of gpu_metrics counts on while a GPU is held back, and what the clocks' reasons call it. Power is no disturbance.
RESIDENCIES = {
    "prochot_residency_acc": "hw_slowdown",
    "socket_thm_residency_acc": "hw_thermal",
    "vr_thm_residency_acc": "hw_thermal",
    "hbm_thm_residency_acc": "hw_thermal",
    "ppt_residency_acc": "power_cap",
}
LAST: dict[int, Mapping[str, float]] = {}
"""The counters of the last reading of each device."""


def target() -> str:
    """LLVM's name of the current device, as ``gfx942``; "" on other vendors'. Imports torch."""
    import torch

    if not torch.version.hip or not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(properties, "gcnArchName", "")).partition(":")[0]


def native_float8(name: str) -> str:
    """torch's name for the 8-bit float that the current device multiplies, for one of the usual names."""
    return FNUZ.get(name, name) if target() in FNUZ_TARGETS else name


def clocks(index: int) -> Clocks:
    """Clocks, temperature, power and what holds a device back since the last reading; unknown without amdsmi."""
    handle = _handle(index)
    if handle is None:
        return Clocks()
    metrics = _ask("amdsmi_get_gpu_metrics_info", handle)
    power = _number(metrics.get("current_socket_power")) or _number(metrics.get("average_socket_power"))
    return Clocks(
        sm_clock_mhz=_number(metrics.get("current_gfxclk")) or _number(metrics.get("current_gfxclks")),
        mem_clock_mhz=_number(metrics.get("current_uclk")),
        temperature_c=_number(metrics.get("temperature_hotspot")),
        power_w=power,
        reasons=_reasons(index, metrics),
    )


def power_limit_w(index: int) -> float | None:
    """The watts that a device may draw; None where amdsmi does not tell."""
    handle = _handle(index)
    limit = None if handle is None else _number(_ask("amdsmi_get_power_cap_info", handle).get("power_cap"))
    return limit / 1e6 if limit and limit > MICROWATTS else limit


def has_xgmi() -> bool | None:
    """Whether xGMI joins every two of the devices here; None where amdsmi does not say."""
    smi = _smi()
    if smi is None:
        return None
    try:
        gpus = smi.amdsmi_get_processor_handles()
        kinds = [smi.amdsmi_topo_get_link_type(a, b)["type"] for a in gpus for b in gpus if a is not b]
    except smi.AmdSmiException:
        return None
    return bool(kinds) and all(int(getattr(kind, "value", kind)) == XGMI for kind in kinds)


def _reasons(index: int, metrics: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names of what has counted on since the last reading; None where nothing is counted, as before MI300."""
    counted = {name: value for name in RESIDENCIES if (value := _number(metrics.get(name))) is not None}
    if not counted:
        return None
    before = LAST.get(index, counted)
    LAST[index] = counted
    grown = [RESIDENCIES[name] for name, value in counted.items() if value > before.get(name, value)]
    return tuple(dict.fromkeys(grown))


@lru_cache
def _smi() -> Any:
    """amdsmi, initialised, or None where it is not or no driver answers."""
    try:
        import amdsmi

        amdsmi.amdsmi_init()
    except (ImportError, OSError, KeyError):  # KeyError: it wants ROCm's folder in the environment
        return None
    except amdsmi.AmdSmiException:
        return None
    return amdsmi


def _handle(index: int) -> Any:
    """amdsmi's handle of torch's device ``index``, found by its place on the bus: devices may be numbered unlike."""
    import torch

    smi = _smi() if torch.version.hip else None
    if smi is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    pci_address = tuple(getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    try:
        handles = smi.amdsmi_get_processor_handles()
        matches = [handle for handle in handles if _bus(smi.amdsmi_get_gpu_device_bdf(handle)) == pci_address]
    except smi.AmdSmiException:
        return None
    return matches[0] if matches else handles[index] if None in pci_address and index < len(handles) else None


def _bus(bdf: str) -> tuple[int, ...]:
    """Domain, bus and device of ``0000:c1:00.0``."""
    domain, bus, device_function = bdf.split(":")
    return int(domain, 16), int(bus, 16), int(device_function.partition(".")[0], 16)


def _ask(question: str, handle: Any) -> Mapping[str, Any]:
    smi = _smi()
    try:
        answer: Mapping[str, Any] = getattr(smi, question)(handle)
    except (smi.AmdSmiException, AttributeError):
        return {}
    return answer


def _number(value: Any) -> float | None:
    """A figure, the largest of a list of them; None for "N/A" and for what stands for it (all bits set)."""
    if isinstance(value, (list, tuple)):
        return max((number for number in map(_number, value) if number is not None), default=None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (2**16 - 1, 2**32 - 1, 2**64 - 1):
        return None
    return float(value)

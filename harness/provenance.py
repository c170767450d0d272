"""What else decides how fast a GPU is: its power limit, ECC, held clocks, and the libraries whose kernels run."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

from . import environment
from .environment import ask_number, ask_nvml

MAPS = Path("/proc/self/maps")
TRITON_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm")


def gpu_facts() -> dict[str, Any]:
    """Provenance columns of the first CUDA device beside those of :func:`.environment.environment`; None is unknown."""
    import torch

    version = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        **limits(0),
        "health": health(0),
        "gpu": uuid_hash(getattr(torch.cuda.get_device_properties(0), "uuid", None)),
        "cudnn": None if version is None else dotted(version, 10_000 if version >= 90_000 else 1000),
        "cublas": cublas_version(MAPS.read_text() if MAPS.is_file() else ""),
        "triton": triton_version(),
    }


def limits(index: int) -> dict[str, Any]:
    """Power limit in watts, ECC, the VBIOS, and the clock that the device is held to when that is below its highest.

    NVML tells of application clocks (``nvidia-smi -ac``). A lock (``-lgc``) shows in ``sm_clock_mhz`` alone.
    """
    power: dict[str, Any] = {"power_limit_w": environment.power_limit_w(index)}
    handle = environment._nvml_handle(index)
    if handle is None:
        return power | dict.fromkeys(("ecc", "clock_limit_mhz", "firmware"))
    ecc, core = ask_nvml("nvmlDeviceGetEccMode", handle), environment._nvml().NVML_CLOCK_SM
    applied, highest = (
        ask_nvml(f"nvmlDeviceGet{name}", handle, core) for name in ("ApplicationsClock", "MaxClockInfo")
    )
    return power | {
        "ecc": None if ecc is None else bool(ecc[0]),
        "clock_limit_mhz": float(applied) if applied and highest and applied < highest else None,
        "firmware": environment.plain(ask_nvml("nvmlDeviceGetVbiosVersion", handle)),
    }


def health(index: int) -> dict[str, float]:
    """What tells an ill or badly seated GPU from its like: uncorrected memory errors since the last restart, PCIe
    generation and lanes beside the best that it has, its highest clock. Only what NVML tells."""
    nvml, handle = environment._nvml(), environment._nvml_handle(index)
    if handle is None:
        return {}
    uncorrected = getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1), getattr(nvml, "NVML_VOLATILE_ECC", 0)
    questions: dict[str, tuple[Any, ...]] = {
        "ecc_errors": ("nvmlDeviceGetTotalEccErrors", *uncorrected),
        "pcie_gen": ("nvmlDeviceGetCurrPcieLinkGeneration",),
        "pcie_gen_max": ("nvmlDeviceGetMaxPcieLinkGeneration",),
        "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth",),
        "pcie_width_max": ("nvmlDeviceGetMaxPcieLinkWidth",),
        "clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1)),
    }
    facts = {name: ask_number(question, handle, *arguments) for name, (question, *arguments) in questions.items()}
    return {name: value for name, value in facts.items() if value is not None}


def uuid_hash(identity: object) -> str | None:
    """A name for one GPU that tells it from others without publishing its serial number."""
    if identity is None:
        return None
    return "gpu-" + hashlib.sha256(str(identity).encode()).hexdigest()[:10]


def dotted(number: int, major: int) -> str:
    """``9.10.2`` of cuDNN's 91002 (major 10,000), ``8.9.2`` of its 8902 (major 1,000)."""
    return f"{number // major}.{number % major // 100}.{number % 100}"


def cublas_version(maps: str) -> str | None:
    """The version of the cuBLASLt that this process has loaded, as the library says; ``maps`` names its file."""
    path = next((line.split()[-1] for line in maps.splitlines() if "/libcublasLt.so" in line), None)
    if path is None:
        return None
    try:
        question = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, AttributeError):
        return None
    question.restype = ctypes.c_size_t
    return dotted(question(), 10_000)


def triton_version() -> str | None:
    """The installed version of triton, under any of its names."""
    from importlib import metadata

    for name in TRITON_PACKAGES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None

"""The accelerator at hand, before anything is measured: what it is, whether it works, what it can run.

``python -P -m opcast.harness.accelerator`` answers with one JSON line. :func:`ask` has a process of its own do so: a
driver that hangs or crashes ends that process only, and the caller holds no place on a device that takes one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from .environment import child_environment, driver_version, gpu_device_id, one_process_only

NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
AMD_GPUS = Path("/dev/kfd")
ASK_TIMEOUT_S = 180.0
PROBE_SIDE = 64
SLOW_HALVES = (6.1, 5.0, 5.2)  # compute capabilities whose fp16 runs at a 64th of fp32's rate


@dataclass(frozen=True)
class Accelerator:
    """What opcast measures on: ``hardware`` is ``cuda`` (NVIDIA, or AMD through HIP) or ``cpu``.

    ``precision`` is the format in which models are run on it. ``trouble`` says in one line why an accelerator that is
    here is not used; empty when all is well. ``one_process`` is set where the device takes one process at a time.
    """

    hardware: str
    device_id: str = ""
    name: str = ""
    precision: str = "fp32"
    one_process: bool = False
    trouble: str = ""


def look() -> Accelerator:
    """What is here, found out in this process, with a small product as proof that it works. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return Accelerator("cpu", trouble=why_none())
    try:
        one = torch.ones(PROBE_SIDE, PROBE_SIDE, device="cuda")
        works = float((one @ one).sum().item()) == float(PROBE_SIDE**3)
        torch.cuda.synchronize()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        accelerator = Accelerator("cuda", gpu_device_id(), properties.name, best_format(properties), one_process_only())
    except RuntimeError as error:
        return Accelerator("cpu", trouble=f"the GPU does not work ({_first_line(error)}): `nvidia-smi` says more")
    if not works:
        return Accelerator("cpu", trouble=f"the GPU {properties.name} multiplies wrongly: do not trust it")
    return accelerator


def best_format(properties: object) -> str:
    """bf16 where the device has units for it, else fp16 where that is fast, else fp32.

    torch says that it supports bf16 on devices where it only emulates it, so its answer is not asked for.
    """
    import torch

    major, minor = int(getattr(properties, "major", 0)), int(getattr(properties, "minor", 0))
    if torch.version.hip or major >= 8:
        return "bf16"
    return "fp16" if (major, minor) >= (6, 0) and float(f"{major}.{minor}") not in SLOW_HALVES else "fp32"


def why_none() -> str:
    """Why torch finds no device that opcast can measure on; empty where there is none. Imports torch."""
    import torch

    version = torch.__version__
    if torch.backends.mps.is_available():
        return "an Apple GPU (mps) is here, but torch has no graphs to time it with yet"
    if NVIDIA_GPUS.is_dir() and any(NVIDIA_GPUS.iterdir()):
        if torch.version.cuda is None:
            return f"an NVIDIA GPU is here, but torch {version} was built without CUDA: {_install('NVIDIA')}"
        return (
            f"an NVIDIA GPU is here, but torch {version} for CUDA {torch.version.cuda} cannot use it: "
            f"the driver ({driver_version() or 'unknown'}) is too old for it or the GPU is lost (`nvidia-smi`)"
        )
    if AMD_GPUS.exists() and not torch.version.hip:
        return f"an AMD GPU is here, but torch {version} was built without ROCm: {_install('AMD')}"
    if AMD_GPUS.exists():
        return f"an AMD GPU is here, but torch {version} cannot use it: see `rocminfo`, and the groups video and render"
    return ""


def _install(vendor: str) -> str:
    kind = "CUDA" if vendor == "NVIDIA" else "ROCm"
    return f"install one for {kind} (https://pytorch.org/get-started/locally)"


def ask() -> Accelerator:
    """What :func:`look` finds in a process of its own. A process that hangs or dies is trouble, never an error."""
    command = [sys.executable, "-P", "-m", f"{__package__}.accelerator"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), timeout=ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Accelerator("cpu", trouble=f"the GPU's driver did not answer within {ASK_TIMEOUT_S:g} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Accelerator("cpu", trouble=f"torch cannot say what is here: {last[:200]}")
    return Accelerator(**json.loads(done.stdout.splitlines()[-1]))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    print(json.dumps(asdict(look())))

"""What a measurement was made in: device, software, clocks, memory; and the environment of child processes.

The only module of the harness that reads environment variables. Clocks come from NVML through ``nvidia-ml-py``
where that is installed (:mod:`.amd` asks amdsmi), else they are unknown (None); a clock is read, never set.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..datasets.device_names import seen_device_id, slug
from ..datasets.version import __version__
from . import amd
from .clock_reading import Clocks
from .gpu_cache import last_level_bytes
from .network_interfaces import interface_to

CPUINFO = Path("/proc/cpuinfo")
FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
BOOT = Path("/proc/sys/kernel/random/boot_id")
NODE, JOB = "OPCAST_NODE", "OPCAST_JOB"
"""Environment variables in which a launcher names the node and the job, where the machine cannot tell (containers)."""

# What glibc's malloc does with freed memory. Its default hands large blocks back to the kernel at once, so that
# every large tensor pays for fresh zeroed pages: filling 100 MiB took 430 us/MiB so, 35 us/MiB with these.
ALLOCATOR: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",  # not MALLOC_MMAP_THRESHOLD_: glibc before 2.35 ignores one above 32 MiB
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

REASON_QUESTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # new, old
KINDS = ("GPU", "MIG")  # what a UUID of NVML begins with: a whole device, or a slice of one
# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, nvmlClocksEventReasons).
CLOCK_REASONS: Mapping[int, str] = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "power_brake",
    0x100: "display_clocks",
}
NCCL_ELSE = ("NCCL_DEBUG", "NCCL_COMM_ID", "NCCL_HOSTID", "NCCL_TOPO_DUMP", "NCCL_GRAPH_DUMP")  # they change no time


# --- the device ----------------------------------------------------------------------------------------


@lru_cache
def _cpuinfo() -> tuple[dict[str, str], ...]:
    """One mapping per logical processor, as /proc/cpuinfo lists them; empty where there is no such file."""
    if not CPUINFO.is_file():
        return ()
    blocks = CPUINFO.read_text(errors="replace").strip().split("\n\n")
    return tuple(
        {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        for block in blocks
    )


@lru_cache
def cpu_name() -> str:
    """The processor's model name, as the machine gives it."""
    for processor in _cpuinfo():
        if name := processor.get("model name"):
            return name
    if platform.system() == "Darwin":
        reply = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        if reply.stdout.strip():
            return reply.stdout.strip()
    return platform.processor() or platform.machine() or "unknown"


def _cgroup_cpus() -> float:
    """Processors that the control group grants; infinite without a quota."""
    for path in (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")):
        if not path.is_file():
            continue
        fields = path.read_text().split()
        period = fields[1] if len(fields) > 1 else (path.parent / "cpu.cfs_period_us").read_text()
        return float("inf") if fields[0] in ("max", "-1") else float(fields[0]) / float(period)
    return float("inf")


def physical_cores() -> list[list[int]]:
    """The logical processors of each physical core that this process may use, lowest first."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    core_of = {int(p["processor"]): (p.get("physical id"), p.get("core id")) for p in _cpuinfo() if "processor" in p}
    cores: dict[object, list[int]] = {}
    for cpu in allowed:
        where = core_of.get(cpu, (None, None))
        cores.setdefault(cpu if where[1] is None else where, []).append(cpu)
    return list(cores.values())


def core_ids() -> list[int]:
    """One logical processor of each physical core that this process may use, lowest first."""
    return [core[0] for core in physical_cores()]


def default_threads() -> int:
    """Threads a campaign uses unless told: the physical cores at hand, within the control group's quota."""
    return max(1, int(min(len(core_ids()), _cgroup_cpus())))


def cpu_device_id(threads: int = 0) -> str:
    """``cpu_<model>_<threads>t``; ``threads`` 0 stands for :func:`default_threads`. Takes under a millisecond.

    Virtual machines may call every generation by one name ("AMD EPYC"): a name without a digit gets the
    processor's family and model numbers.
    """
    model = slug(cpu_name())
    if not re.search(r"\d", model) and _cpuinfo() and "cpu family" in _cpuinfo()[0]:
        model += f"_f{_cpuinfo()[0]['cpu family']}m{_cpuinfo()[0].get('model', '0')}"
    return f"cpu_{model}_{threads or default_threads()}t"


def default_device() -> str:
    """``cuda`` when torch finds such a device, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def free_memory_bytes(device: str) -> int:
    """Bytes that a program can still take on the device, or of the machine (and its control group) for ``cpu``."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    return min(_available_bytes(), _cgroup_memory_bytes())


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_memory_bytes() -> int:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.is_file() or not used.is_file() or limit.read_text().strip() == "max":
        return 2**62
    return max(0, int(limit.read_text()) - int(used.read_text()))


# --- provenance ----------------------------------------------------------------------------------------


def node_name() -> str:
    """A name for this machine that tells it from others without publishing its hostname."""
    name = os.environ.get(NODE) or platform.node()
    return "node-" + hashlib.sha256(name.encode()).hexdigest()[:10]


def machine_name() -> str:
    """What two processes have in common when they run on one machine, in containers of their own or not."""
    return BOOT.read_text().strip() if BOOT.is_file() else node_name()


def job_name() -> str:
    """What the scheduler calls this job, as ``slurm 17_3``; "" outside one."""
    if name := os.environ.get(JOB):
        return name
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"slurm {array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return f"slurm {job}" if (job := os.environ.get("SLURM_JOB_ID")) else ""


def environment(device: str, threads: int = 0) -> dict[str, str | None]:
    """Provenance columns of a measurement made here on ``cpu`` or ``cuda``; None for what is missing. Imports torch."""
    import torch

    facts: dict[str, str | None] = {
        "device_id": cpu_device_id(threads),
        "device_name": cpu_name(),
        "node": node_name(),
        "opcast_version": __version__,
        "torch": str(torch.__version__),
        "cuda": None,
        "driver": None,
        "nccl": None,
        "source": "harness",
    }
    if device != "cuda":
        return facts
    name = torch.cuda.get_device_name()
    runtime = torch.version.cuda or f"rocm {torch.version.hip}"
    return facts | {
        "device_id": gpu_device_id(),
        "device_name": name,
        "cuda": runtime,
        "driver": driver_version(),
        "nccl": _nccl_version(),
    }


def gpu_device_id() -> str:
    """The id of the current GPU: of its file, or of its own where it is none of those that have one. Imports torch."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cache_mib = last_level_bytes(properties) / 2**20
    return seen_device_id(properties.name, properties.multi_processor_count, properties.total_memory / 2**30, cache_mib)


def _nccl_version() -> str | None:
    """NCCL's version (AMD's as ``rccl``), and its settings behind it: with others it is another library."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()
    dotted = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return " ".join([f"rccl {dotted}" if torch.version.hip else dotted, *nccl_settings()])


def nccl_settings() -> list[str]:
    """``NCCL_*`` and ``RCCL_*`` variables of this process that bear on speed, as ``NAME=VALUE``, in order of names."""
    families = ("NCCL_", "RCCL_")
    named = (name for name in sorted(os.environ) if name.startswith(families) and not name.startswith(NCCL_ELSE))
    return [f"{name}={os.environ[name]}" for name in named]


def plain(text: bytes | str | None) -> str | None:
    """A text of NVML, which some of its bindings give as bytes."""
    return text.decode() if isinstance(text, bytes) else text


def driver_version() -> str | None:
    """The NVIDIA driver's version; None where neither NVML nor the kernel module tells it."""
    if nvml := _nvml():
        version = nvml.nvmlSystemGetDriverVersion()
        return plain(version)
    module = Path("/sys/module/nvidia/version")
    return module.read_text().strip() if module.is_file() else None


# --- clocks --------------------------------------------------------------------------------------------


@lru_cache
def _nvml() -> Any:
    """The initialised NVML binding, or None where there is none or no driver answers."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except pynvml.NVMLError:
        return None
    return pynvml


@lru_cache
def is_slice(index: int = 0) -> bool:
    """Whether a GPU is a slice of one (MIG), which its name tells: it has units and memory of its own, but clocks, heat
    and supply are of the whole chip, and no other GPU reaches it."""
    import torch

    return torch.cuda.is_available() and " MIG " in f"{torch.cuda.get_device_properties(index).name} "


@lru_cache
def _nvml_handle(index: int) -> Any:
    """NVML's handle of torch's device ``index``, found by UUID: the two may number devices differently.

    Of a slice it is that of the chip which it is of: NVML answers of slices what they are, but not how they do.
    """
    import torch

    nvml = _nvml()
    if nvml is None or not torch.cuda.is_available() or torch.version.hip:
        return None
    identity = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if identity is None:
        return ask_nvml("nvmlDeviceGetHandleByIndex", index)
    by_uuid = {kind: ask_nvml("nvmlDeviceGetHandleByUUID", f"{kind}-{identity}".encode()) for kind in KINDS}
    mig_slice = by_uuid["MIG"]  # older CUDA gives a slice the UUID of its chip
    return by_uuid["GPU"] or (mig_slice and ask_nvml("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", mig_slice))


def ask_nvml(question: str, *arguments: Any) -> Any:
    """NVML's answer; None where the binding does not know the question, or the driver does not answer it."""
    nvml = _nvml()
    try:
        return getattr(nvml, question)(*arguments) if hasattr(nvml, question) else None
    except nvml.NVMLError:
        return None


def ask_number(question: str, *arguments: Any) -> float | None:
    """The same as a number."""
    value = ask_nvml(question, *arguments)
    return None if value is None else float(value)


def decode_reasons(bits: int) -> tuple[str, ...]:
    """Names of the set bits of NVML's clock event reasons."""
    return tuple(name for bit, name in CLOCK_REASONS.items() if bits & bit)


def clocks(device: str = "cuda", index: int = 0) -> Clocks:
    """Clocks, temperature, power and throttle reasons now. Unknown figures are None, never an error.

    The power of a slice is unknown: the chip's is that of all its slices.
    """
    if device != "cuda":
        return Clocks(sm_clock_mhz=_cpu_clock_mhz())
    handle = _nvml_handle(index)
    if handle is None:
        return amd.clocks(index)
    nvml = _nvml()
    answers = (ask_nvml(name, handle) for name in REASON_QUESTIONS)
    reasons = next((bits for bits in answers if bits is not None), None)  # an old driver lacks the newer question
    power = None if is_slice(index) else ask_number("nvmlDeviceGetPowerUsage", handle)
    return Clocks(
        sm_clock_mhz=ask_number("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        mem_clock_mhz=ask_number("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        temperature_c=ask_number("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power is None else power / 1000,
        reasons=None if reasons is None else decode_reasons(int(reasons)),
    )


def energy_j(index: int = 0) -> float | None:
    """Joules that a GPU has used since its driver was loaded; None where NVML does not count them (before Volta, or of
    a slice alone)."""
    handle = None if is_slice(index) else _nvml_handle(index)
    millijoules = None if handle is None else ask_number("nvmlDeviceGetTotalEnergyConsumption", handle)
    return None if millijoules is None else millijoules / 1000


def has_nvlink() -> bool | None:
    """Whether the first GPU has an active NVLink; None where NVML does not answer, as without ``nvidia-ml-py``."""
    nvml, handle = _nvml(), _nvml_handle(0)
    if handle is None or is_slice():
        return None if handle is None else False
    links = (ask_number("nvmlDeviceGetNvLinkState", handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    return any(state == nvml.NVML_FEATURE_ENABLED for state in links)


def nvlink_domain(index: int = 0) -> str:
    """The NVLink domain of a GPU that reaches beyond its machine (NVL72), as NVML names it; "" elsewhere.

    A board with NVSwitch alone has a fabric without an id.
    """
    nvml, handle = _nvml(), _nvml_handle(index)
    if handle is None or is_slice(index) or not hasattr(nvml, "nvmlDeviceGetGpuFabricInfo"):
        return ""
    fabric = nvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(fabric))
    except nvml.NVMLError:
        return ""
    field = type(fabric).clusterUuid  # as text to old releases of pynvml, to others as numbers
    identity = ctypes.string_at(ctypes.addressof(fabric) + field.offset, field.size)
    if fabric.state != FABRIC_COMPLETED or not any(identity):
        return ""
    clique = getattr(fabric, "cliqueId", None)  # once called partitionId
    clique = fabric.partitionId if clique is None else clique
    return hashlib.sha256(identity + bytes([clique % 256])).hexdigest()[:10]


def boost_clock_mhz() -> float | None:
    """The highest clock of the first GPU's compute units; None where NVML does not tell."""
    nvml, handle = _nvml(), _nvml_handle(0)
    return None if handle is None else ask_number("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM)


def power_limit_w(index: int = 0) -> float | None:
    """The watts that a GPU may draw; None where NVML does not tell, and of a slice, which has no limit of its own."""
    handle = _nvml_handle(index)
    if is_slice(index):
        return None
    if handle is None:
        return amd.power_limit_w(index)
    milliwatts = ask_number("nvmlDeviceGetEnforcedPowerLimit", handle)
    return None if milliwatts is None else milliwatts / 1000


def one_process_only() -> bool:
    """Whether the first GPU takes one process at a time (exclusive-process mode), as NVML or ``nvidia-smi`` tells."""
    nvml, handle = _nvml(), _nvml_handle(0)
    if handle is not None:
        return ask_number("nvmlDeviceGetComputeMode", handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    if (smi := shutil.which("nvidia-smi")) is None:
        return False
    question = [smi, "--query-gpu=compute_mode", "--format=csv,noheader"]
    return "Exclusive_Process" in subprocess.run(question, capture_output=True, text=True, check=False).stdout


def _cpu_clock_mhz() -> float | None:
    """The first allowed core's clock; None where the kernel does not tell."""
    core = core_ids()[0]
    current = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")
    try:
        if current.is_file():
            return float(current.read_text()) / 1000
    except OSError:
        return None
    for processor in _cpuinfo():
        if processor.get("processor") == str(core) and "cpu MHz" in processor:
            return float(processor["cpu MHz"])
    return None


# --- child processes -----------------------------------------------------------------------------------


def child_environment(threads: int = 0) -> dict[str, str]:
    """The environment of a process that measures, or that runs a model to compare with measurements.

    This process's own, with a malloc that keeps freed memory (:data:`ALLOCATOR`, as a long-running model's
    allocator does) and the thread count pinned (0 stands for :func:`default_threads`). Packages warn nobody there,
    unless the user says so.
    """
    count = str(threads or default_threads())
    return {"PYTHONWARNINGS": "ignore", **os.environ, **ALLOCATOR, **dict.fromkeys(THREAD_VARIABLES, count)}


def use_loopback() -> None:
    """Have gloo's ranks on this machine talk over the loopback interface, unless the user names another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")


def use_route_to_master() -> None:
    """Have gloo's ranks on several machines talk over the interface that leads to the master, unless told another.

    gloo itself takes the one that the host's name stands for, which on Debian and in containers is the loopback's.
    """
    name = interface_to(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 1))
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def gloo_words() -> str:
    """What to set when gloo's ranks do not find each other."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or "what the host's name stands for"
    return (
        f"gloo uses the network interface {interface} here: set GLOO_SOCKET_IFNAME to the one that joins the nodes "
        "(`ip -br addr` lists them), on every node"
    )


def threads_beside(threads: int, processes: int) -> int:
    """Threads for each of so many processes on a machine, together as many as one would use."""
    return max(1, (threads or default_threads()) // max(processes, 1))


def torchrun_rank() -> tuple[int, int, int] | None:
    """(rank, world size, local world size) that torchrun gave this process; None outside torchrun."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])

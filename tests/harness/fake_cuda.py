"""CUDA devices that are not there: torch's CUDA interface on a machine without a GPU, for tests in this process.

``with fake_cuda(FakeGpu(...)) as machine:`` makes ``torch.cuda`` show the given devices. Tensors for ``cuda`` live on
the CPU; streams, events, graphs and spin kernels keep a clock of their own (:class:`FakeMachine`), on which a kernel
takes what the device's figures say: its FLOPs, its bytes, a shortest time. Large operators are not computed, only their
shapes. NVML is faked through ``pynvml``, or taken away.

What goes wrong on real machines can be asked for: a context that is beyond use after some launches (``ill_after``), a
device that has fallen off the bus (``off_the_bus``), a driver that is too old for torch (``old_driver``), no NVML, an
old NVML, another order of devices in NVML, exclusive-process mode, formats that the device lacks.

For a child process see ``fake_cuda_site/sitecustomize.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

COMPUTED_BYTES = 32 << 20  # operators that touch more are not computed
COMPUTED_FLOPS = 2e9
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_int_mm", "_scaled_mm")
FREE = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "slice",
    "select",
    "detach",
    "alias",
    "as_strided",
    "permute",
)
SHORTEST_US = 1.5


@dataclass(frozen=True)
class FakeGpu:
    """What a device says of itself, and what is wrong with it."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    units: int = 132
    memory_gib: float = 79.1
    l2_mib: float = 50.0
    memory_gbps: float = 3000.0
    l2_gbps: float = 9000.0
    clock_mhz: float = 1980.0
    power_limit_w: float = 700.0
    half_tflops: float = 800.0  # of products in 16 bits
    single_tflops: float = 50.0  # of products in fp32
    bf16: bool = True
    uuid: str = "6f2c8b1e-0000-4000-8000-000000000001"
    nvlink: bool = False
    hip: bool = False


@dataclass
class FakeMachine:
    """Devices, the software around them, and the clock on which their work passes.

    ``skipped_ns`` is how far the host's time in the device's eyes is ahead of the real one: waiting costs no test time.
    """

    gpus: Sequence[FakeGpu]
    nvml: bool = True
    old_nvml: bool = False  # a driver without the newer questions
    nvml_order: Sequence[int] = ()  # NVML's numbers of the devices; () = as torch counts
    exclusive: bool = False
    old_driver: bool = False
    off_the_bus: bool = False
    ill_after: int = 0  # launches after which the context is beyond use; 0 = never
    capture_fails: bool = False
    driver: str = "570.86.10"
    cuda: str = "12.8"
    launches: int = 0
    skipped_ns: int = 0
    current: int = 0
    ready_ns: dict[int, float] = field(default_factory=dict)  # by stream
    stream: int = 0
    captured_us: list[float] | None = None  # of the graph that is being captured

    @property
    def gpu(self) -> FakeGpu:
        """The current device."""
        return self.gpus[self.current]

    def now_ns(self) -> float:
        """The host's time."""
        return float(time.perf_counter_ns() + self.skipped_ns)

    def launch(self, us: float) -> None:
        """Queue a kernel on the current stream."""
        self.launches += 1
        self.check()
        if self.captured_us is not None:
            self.captured_us.append(us)
            return
        start = max(self.now_ns(), self.ready_ns.get(self.stream, 0.0))
        self.ready_ns[self.stream] = start + us * 1e3

    def check(self) -> None:
        """Raise what CUDA raises when its context is beyond use."""
        if self.off_the_bus:
            raise RuntimeError("CUDA error: unknown error: CUDA-capable device is lost (GPU has fallen off the bus)")
        if self.ill_after and self.launches > self.ill_after:
            raise _sticky("CUDA error: an illegal memory access was encountered")

    def wait(self) -> None:
        """Let the host wait for all streams."""
        self.check()
        self.skipped_ns += max(0, math.ceil(max(self.ready_ns.values(), default=0.0) - self.now_ns()))

    def kernel_us(self, name: str, flops: float, touched: float, half: bool) -> float:
        """What an operator takes: the longest of its products, its bytes and the shortest kernel."""
        if name in FREE:
            return 0.0
        gpu = self.gpu
        rate = (gpu.half_tflops if half else gpu.single_tflops) * 1e6
        lanes = gpu.l2_gbps if touched <= gpu.l2_mib * 2**20 else gpu.memory_gbps
        return max(SHORTEST_US, flops / rate, touched / (lanes * 1e3))


def _sticky(words: str) -> Exception:
    try:
        return torch.AcceleratorError(words)
    except (AttributeError, TypeError):
        return RuntimeError(words)


# --- tensors -------------------------------------------------------------------------------------------


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class OnCpu(TorchFunctionMode):
    """Tensors that are wanted on ``cuda`` are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        args = tuple("cpu" if _is_cuda(value) else value for value in args)
        kwargs = {
            name: "cpu" if _is_cuda(value) or (name == "device" and isinstance(value, int)) else value
            for name, value in (kwargs or {}).items()
        }
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class OnDevice(TorchDispatchMode):
    """Every operator is a kernel on the machine's current stream; large ones have their shapes worked out only."""

    def __init__(self, machine: FakeMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "meta" or isinstance(each, FakeTensor) for each in tensors):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        flops = product_flops(name, tensors)
        half = any(each.dtype.itemsize <= 2 and each.is_floating_point() for each in tensors)
        if flops and not self.machine.gpu.bf16 and any(each.dtype == torch.bfloat16 for each in tensors):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`")
        touched = float(sum(each.numel() * each.element_size() for each in tensors))
        asked = math.prod(args[0]) * 4 if args and isinstance(args[0], (list, tuple)) and not tensors else 0
        large = flops > COMPUTED_FLOPS or max(touched, asked) > COMPUTED_BYTES
        result = shapes_only(func, args, kwargs) if large and name not in FREE else func(*args, **kwargs)
        made = sum(each.numel() * each.element_size() for each in _leaves(result)) if "out" not in kwargs else 0
        if us := self.machine.kernel_us(name, flops, touched + (0 if name.endswith("_") else made), half):
            self.machine.launch(us)
        return result


def product_flops(name: str, tensors: Sequence[torch.Tensor]) -> float:
    """FLOPs of a matrix product, 0 of anything else."""
    if name not in PRODUCTS:
        return 0.0
    left, right = [each for each in tensors if each.dim() >= 2][-2:] if "add" in name else tensors[:2]
    return 2.0 * left.numel() * right.shape[-1]


def _leaves(result: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


def shapes_only(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator without its values."""
    if "out" in kwargs:
        return kwargs["out"]
    if func.overloadpacket.__name__.endswith("_"):
        return args[0]

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        return None if isinstance(value, torch.Generator) else value

    with torch.utils._python_dispatch._disable_current_modes():
        settings = {name: "meta" if name == "device" else to_meta(value) for name, value in kwargs.items()}
        shaped = func(*tree_map(to_meta, args), **settings)
        return tree_map(
            lambda each: torch.empty_like(each, device="cpu") if isinstance(each, torch.Tensor) else each, shaped
        )


# --- torch.cuda ----------------------------------------------------------------------------------------


def cuda_names(machine: FakeMachine) -> dict[str, Any]:
    """What replaces names of ``torch.cuda``."""

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            self.number = len(machine.ready_ns) + 1
            machine.ready_ns[self.number] = 0.0

        def wait_stream(self, other: Any) -> None:
            mine, theirs = (machine.ready_ns.get(each.number, 0.0) for each in (self, other))
            machine.ready_ns[self.number] = max(mine, theirs)

        def synchronize(self) -> None:
            machine.wait()

    default = Stream()
    default.number = 0
    streams = {0: default}

    @contextlib.contextmanager
    def use(stream: Any) -> Iterator[None]:
        before, machine.stream = machine.stream, stream.number
        streams[stream.number] = stream
        try:
            yield
        finally:
            machine.stream = before

    class Event:
        def __init__(self, **_: object) -> None:
            self.at_ns = 0.0

        def record(self, stream: Any = None) -> None:
            machine.check()
            number = machine.stream if stream is None else stream.number
            self.at_ns = max(machine.now_ns(), machine.ready_ns.get(number, 0.0))

        def synchronize(self) -> None:
            machine.wait()

        def query(self) -> bool:
            return machine.now_ns() >= self.at_ns

        def elapsed_time(self, other: Any) -> float:
            return (other.at_ns - self.at_ns) / 1e6

    class CUDAGraph:
        def __init__(self, *_: object, **__: object) -> None:
            self.us = 0.0

        def replay(self) -> None:
            machine.launch(self.us)

        def reset(self) -> None:
            self.us = 0.0

    @contextlib.contextmanager
    def graph(made: Any, stream: Any = None, **_: object) -> Iterator[None]:
        if machine.capture_fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        machine.captured_us = []
        try:
            yield
            made.us = sum(machine.captured_us)
        finally:
            machine.captured_us = None

    def properties(index: Any = None) -> types.SimpleNamespace:
        machine.check()
        return device_properties(machine.gpus[machine.current if not isinstance(index, int) else index])

    def seen() -> bool:
        return bool(machine.gpus) and not machine.old_driver and not machine.off_the_bus

    def sleep(cycles: int) -> None:
        machine.launch(max(cycles / machine.gpu.clock_mhz, SHORTEST_US))

    def free(index: Any = None) -> tuple[int, int]:
        whole = int(machine.gpu.memory_gib * 2**30)
        return int(0.95 * whole), whole

    def choose(index: Any) -> None:
        machine.current = int(getattr(index, "index", index) or 0)

    return {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph, "stream": use,
        "current_stream": lambda *_: streams[machine.stream], "default_stream": lambda *_: default,
        "is_available": seen, "is_initialized": seen, "init": machine.check, "_lazy_init": machine.check,
        "device_count": lambda: len(machine.gpus) if seen() else 0,
        "current_device": lambda: machine.current, "set_device": choose,
        "get_device_name": lambda index=None: properties(index).name,
        "get_device_properties": properties,
        "get_device_capability": lambda index=None: (properties(index).major, properties(index).minor),
        "is_bf16_supported": lambda *_, **__: True,  # newer torch emulates it, and says so
        "synchronize": lambda *_: machine.wait(), "empty_cache": machine.check,
        "mem_get_info": free, "memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0, "reset_peak_memory_stats": lambda *_: None,
        "_sleep": sleep, "manual_seed": lambda _: None, "manual_seed_all": lambda _: None,
    }  # fmt: skip


def device_properties(gpu: FakeGpu) -> types.SimpleNamespace:
    """``torch.cuda.get_device_properties`` of a device."""
    return types.SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=gpu.units,
        total_memory=int(gpu.memory_gib * 2**30), L2_cache_size=int(gpu.l2_mib * 2**20), uuid=gpu.uuid,
        shared_memory_per_multiprocessor=100 << 10, warp_size=32, gcnArchName="gfx942" if gpu.hip else "",
    )  # fmt: skip


# --- NVML ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """A slice of a GPU (MIG) as NVML hands it out: no question of how it does is answered of it, but of its chip."""

    gpu: FakeGpu


def nvml_module(machine: FakeMachine) -> types.ModuleType:
    """A stand-in for ``pynvml``."""
    module = types.ModuleType("pynvml")

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__({3: "Not Supported", 6: "Not Found", 13: "Function Not Found", 15: "GPU is lost"}[value])
            self.value = value

    def device(handle: Any) -> FakeGpu:
        if machine.off_the_bus:
            raise NVMLError(15)
        if isinstance(handle, Slice):
            raise NVMLError(3)
        return handle

    def by_uuid(uuid: bytes | str) -> FakeGpu | Slice:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        found = next((gpu for gpu in machine.gpus if gpu.uuid in text), None)
        part = found is not None and " MIG " in found.name
        if found is None or text != f"{'MIG' if part else 'GPU'}-{found.uuid}":
            raise NVMLError(6)
        return Slice(found) if part else found

    def chip(handle: Any) -> FakeGpu:
        if not isinstance(handle, Slice):
            raise NVMLError(3)
        return handle.gpu

    def by_index(index: int) -> FakeGpu:
        order = machine.nvml_order or range(len(machine.gpus))
        return machine.gpus[list(order)[index]]

    def refuse(value: int) -> Callable[..., Any]:
        def asked(*_: object) -> Any:
            raise NVMLError(value)

        return asked

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None, "nvmlSystemGetDriverVersion": lambda: machine.driver,
        "nvmlDeviceGetCount": lambda: len(machine.gpus),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": chip,
        "nvmlDeviceGetHandleByUUID": by_uuid, "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetName": lambda handle: device(handle).name,
        "nvmlDeviceGetClockInfo": lambda handle, kind: device(handle).clock_mhz,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: device(handle).clock_mhz,
        "nvmlDeviceGetTemperature": lambda handle, kind: 40,
        "nvmlDeviceGetPowerUsage": lambda handle: int(device(handle).power_limit_w * 500),
        "nvmlDeviceGetTotalEnergyConsumption": refuse(3) if machine.old_nvml else lambda handle: int(
            device(handle).power_limit_w * 800 * time.perf_counter()
        ),
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: int(device(handle).power_limit_w * 1000),
        "nvmlDeviceGetPowerManagementLimit": lambda handle: int(device(handle).power_limit_w * 1000),
        "nvmlDeviceGetEccMode": lambda handle: (1, 1), "nvmlDeviceGetComputeMode": lambda handle: 3 * machine.exclusive,
        "nvmlDeviceGetCurrentClocksEventReasons": refuse(13) if machine.old_nvml else lambda handle: 0x4,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x40 if machine.old_nvml else 0x4,
        "nvmlDeviceGetNvLinkState": lambda handle, link: int(device(handle).nvlink),
        "NVMLError": NVMLError, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0,
        "NVML_FEATURE_ENABLED": 1, "NVML_NVLINK_MAX_LINKS": 18, "NVML_COMPUTEMODE_EXCLUSIVE_PROCESS": 3,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


# --- putting it in place -------------------------------------------------------------------------------


class Generator(torch._C.Generator):
    """A generator on the CPU, whatever device was wanted."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator.__new__(torch._C.Generator, "cpu")


def install(machine: FakeMachine, patch: pytest.MonkeyPatch) -> list[Any]:
    """Put the fake in place; the modes that the caller must leave, last first."""
    for name, value in cuda_names(machine).items():
        patch.setattr(torch.cuda, name, value, raising=False)
    hip = any(gpu.hip for gpu in machine.gpus)
    patch.setattr(torch.version, "cuda", None if hip else machine.cuda)
    patch.setattr(torch.version, "hip", "6.4.1" if hip else None, raising=False)
    patch.setattr(torch, "Generator", Generator)
    patch.setitem(sys.modules, "pynvml", nvml_module(machine) if machine.nvml and not hip else None)
    forget()
    modes = [OnCpu(), OnDevice(machine)]
    for mode in modes:
        mode.__enter__()
    return modes


def forget() -> None:
    """Empty what the harness remembers of the devices here."""
    from opcast.harness import cuda_timer, environment
    from opcast.harness.cases import base

    for module in (cuda_timer, environment, base):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextlib.contextmanager
def fake_cuda(*gpus: FakeGpu, **machine: Any) -> Iterator[FakeMachine]:
    """The devices in this process, as torch and NVML show them; settings as :class:`FakeMachine` has them."""
    made = FakeMachine(gpus or (FakeGpu(),), **machine)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators are small here, and threads that wait for each other cost more than they do
    with pytest.MonkeyPatch.context() as patch:
        modes = install(made, patch)
        try:
            yield made
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
            torch.set_num_threads(threads)
    forget()


def to_json(machine: FakeMachine) -> str:
    """A machine's description for a child process."""
    return json.dumps(asdict(machine))


def from_json(text: str) -> FakeMachine:
    """The machine that :func:`to_json` described."""
    values = json.loads(text)
    gpus = [FakeGpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in values.pop("gpus")]
    order = tuple(values.pop("nvml_order"))
    return FakeMachine(**{**values, "gpus": gpus, "nvml_order": order, "ready_ns": {}})

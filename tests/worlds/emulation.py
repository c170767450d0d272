"""The harness's own builders, run on tensors without memory: what they refuse, and which kernels they launch.

``with emulator.shown():`` makes torch show a GPU that is not there. Tensors for ``cuda`` are torch's meta
tensors: they have shapes, types and strides, so that a builder and torch refuse what they refuse on a GPU. Packages of
serving engines are stand-ins that take anything and launch one kernel a call.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opcast.datasets.ops import Op
from opcast.harness.cases import BUILDERS, Inputs, Unsupported, refusals
from opcast.tests.harness.fake_cuda import Generator
from opcast.tests.worlds.laws import Launch

PACKAGES = (
    *("flash_attn", "flash_attn_interface", "flashinfer", "deep_gemm", "deep_ep", "fla", "mamba_ssm", "causal_conv1d"),
    *("vllm", "sglang", "sgl_kernel", "transformer_engine", "tensorrt_llm", "flash_mla", "opcast.harness.kernels"),
)
EAGER = ("torch", "math", "autograd", "loop", "foreach")  # backends that run operators one after the other
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm")
NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh", "_record_function_enter_new",
             "_record_function_exit", "arange")  # fmt: skip
ONE_KERNEL = (functional.rms_norm, torch.ops.aten.silu_backward)  # on a GPU; elsewhere torch takes them apart
NEEDS_VALUES = ("meta tensors", "meta tensor", "Meta backend", "data-dependent", "'Meta'", "fake_device")
OWN_TYPES = {torch.float8_e4m3fn: "fp8", torch.float32: "fp32", torch.float16: "fp16"}


class EmulationError(RuntimeError):
    """A builder that needs values, so that tensors without memory cannot run it; a GPU could."""


class Anything(types.ModuleType):
    """A package, its functions and their results: takes any call, which is one kernel."""

    __path__: list[str] = []
    __version__ = "1.0"
    calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        Anything.calls += 1
        return Anything(self.__name__)

    def __getitem__(self, _: Any) -> Any:
        return Anything("first"), Anything("second")

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __int__(self) -> int:
        return 128


class StandIns:
    """Finds any module of a package of :data:`PACKAGES`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        if name.partition(".")[0] in PACKAGES or name in PACKAGES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        return Anything(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


class Recorder(TorchDispatchMode):
    """Kernels that operators launch while it is ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.on and not getattr(func, "is_view", False) and name not in NO_KERNEL:
            self.launches.append(launch_of(name, args, kwargs, result))
        return result


def launch_of(name: str, args: Any, kwargs: Any, result: Any) -> Launch:
    """One kernel: each tensor that it was given read once, each that it gave written once."""
    read = {id(each): each for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)}
    written = {id(each): each for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
    moved = sum(float(each.numel() * each.element_size()) for each in (*read.values(), *written.values()))
    flops, dtype = 0.0, "bf16"
    if name in PRODUCTS:
        matrices = [each for each in read.values() if each.dim() >= 2 and each.is_floating_point()]
        left, right = matrices[-2:] if "add" in name else matrices[:2]
        flops, dtype = 2.0 * left.numel() * right.shape[-1], OWN_TYPES.get(left.dtype, "bf16")
    return Launch(name, moved, flops, dtype)


def _moved(value: Any) -> Any:
    """What stands for the GPU in a call: the meta device."""
    named = isinstance(value, str) and value.startswith("cuda")
    return "meta" if named or (isinstance(value, torch.device) and value.type == "cuda") else value


class OnCuda(TorchFunctionMode):
    """Tensors for ``cuda`` are meta tensors; random numbers come from no generator, pinned memory is the host's."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        args = tuple(_moved(value) for value in args)
        kwargs = {name: _moved(value) for name, value in (kwargs or {}).items()}
        kwargs = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
        if func not in ONE_KERNEL or not self.recorder.on:
            return func(*args, **kwargs)
        self.recorder.on = False
        result = func(*args, **kwargs)
        self.recorder.on = True
        self.recorder.launches.append(launch_of(str(getattr(func, "__name__", func)), args, kwargs, result))
        return result


@dataclass
class Emulator:
    """Runs builders on a GPU of so much memory and that compute capability. What they launch is kept in ``known``."""

    memory_gib: float
    capability: tuple[int, int] = (9, 0)
    recorder: Recorder = field(default_factory=Recorder)
    known: dict[tuple[Op, str], tuple[Launch, ...]] = field(default_factory=dict)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Torch shows the GPU, and packages are there, for as long as this lasts."""
        finder: Any = StandIns()
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES or name in PACKAGES]:
                patch.delitem(sys.modules, name)
            patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
            _patch(patch, self.capability)
            with self.recorder, OnCuda(self.recorder):
                yield
            for name in [name for name in sys.modules if isinstance(sys.modules[name], Anything)]:
                del sys.modules[name]

    def run(self, op: Op, backend: str, seed: int = 0) -> tuple[str | None, tuple[Launch, ...]]:
        """The kernel that a builder names, and the kernels of an eager form; () where it is one.

        Raises what the builder raises: Unsupported, OutOfMemoryError, or an error of its own. EmulationError where
        nobody can tell without a GPU.
        """
        builder = BUILDERS.get((op.kind, backend))
        if builder is None or "cuda" not in builder.devices or not builder.accepts(op, "cuda"):
            raise Unsupported(f"{op.kind} in {op.dtype} has no backend {backend!r} on cuda")
        if builder.clock == "host" or op.kind == "copy":
            return None, ()
        self.recorder.launches, Anything.calls = [], 0
        inputs = Inputs("cuda", seed)
        try:
            with refusals():
                call = builder.build(op, inputs)
                if inputs.bytes + float(op.cost.write_bytes) > 0.95 * self.memory_gib * 2**30:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                self._recorded(call)
        except (Unsupported, RuntimeError, AttributeError) as error:
            if any(word in str(error) for word in NEEDS_VALUES):
                raise EmulationError(str(error)) from error
            raise
        found = tuple(self.recorder.launches)
        eager = backend in EAGER and len(found) > 1 and not Anything.calls
        return inputs.kernel, found if eager else ()

    def _recorded(self, call: Any) -> None:
        self.recorder.on = True
        try:
            with torch.no_grad():
                call()
        finally:
            self.recorder.on = False

    def launches(self, op: Op, backend: str) -> tuple[Launch, ...]:
        """The kernels of an eager form; () where it is one kernel, or where nobody can tell."""
        if (op, backend) not in self.known:
            try:
                with self.shown():
                    self.known[op, backend] = self.run(op, backend)[1]
            except Exception:  # noqa: BLE001  whatever a builder refuses has no eager form
                self.known[op, backend] = ()
        return self.known[op, backend]


def _pick(operands: Any, arguments: dict[str, Any]) -> str:
    """SDPA's choice on a GPU that has FlashAttention: flash for heads of one width, else the efficient kernel."""
    query, key, value = operands
    if arguments["attn_mask"] is None and query.shape[-1] == value.shape[-1] <= 256:
        return "flash"
    return "efficient" if query.shape[1] == key.shape[1] else "math"


def _patch(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """What torch and the harness are asked about a GPU."""
    from torch.optim import adam, adamw, optimizer

    from opcast.harness.cases import attention, packages

    patch.setattr(packages, "version", lambda root: "1.0")
    patch.setattr(attention, "picked", _pick)
    patch.setattr(torch.ops, "_C", Anything("_C"), raising=False)
    patch.setattr(torch, "Generator", Generator)
    shown = {"is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1}
    shown |= {"get_device_capability": lambda *_: capability, "synchronize": lambda *_: None}
    for name, value in (shown | {"is_current_stream_capturing": lambda: False}).items():
        patch.setattr(torch.cuda, name, value)
    for module in (adam, adamw, optimizer):
        for name in ("_get_fused_kernels_supported_devices", "_get_capturable_supported_devices"):
            if hasattr(module, name):
                patch.setattr(module, name, lambda *_, **__: ["meta", "cuda", "cpu"])

"""The harness's own builders, run on tensors without memory: what they refuse, and which kernels they launch.

The builders' inputs are those of :mod:`opcast.harness.cases.outline`: meta tensors, and stand-ins for packages. What is
added here is a count: each operator that an eager form calls is a kernel, with the bytes that it moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opcast.datasets.devices import Device
from opcast.datasets.kernels import lacking
from opcast.datasets.ops import Op
from opcast.harness.cases import BUILDERS, Unsupported, refusals
from opcast.harness.cases.outline import OutlineInputs
from opcast.tests.worlds.laws import Launch

EAGER = ("torch", "math", "autograd", "loop", "foreach")  # backends that run operators one after the other
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm")
NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh", "arange")
ONE_KERNEL = (functional.rms_norm, torch.ops.aten.silu_backward)  # on a GPU; elsewhere torch takes them apart
ON_GPU_ALONE = ("adamw", "copy")  # torch refuses tensors without memory, and no GPU would
OWN_TYPES = {torch.float8_e4m3fn: "fp8", torch.float32: "fp32", torch.float16: "fp16"}


class Recorder(TorchDispatchMode):
    """Kernels that operators launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.inside = 0  # of operators that are one kernel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.inside and not getattr(func, "is_view", False) and name not in NO_KERNEL and name[0:7] != "_record":
            self.launches.append(launch_of(name, args, kwargs, result))
        return result


class Whole(TorchFunctionMode):
    """Takes operators as one kernel that torch takes apart where there is no GPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ONE_KERNEL:
            return func(*args, **(kwargs or {}))
        self.recorder.inside += 1
        result = func(*args, **(kwargs or {}))
        self.recorder.inside -= 1
        self.recorder.launches.append(launch_of(str(getattr(func, "__name__", func)), args, kwargs, result))
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


@dataclass
class Emulator:
    """Runs builders for a device. What they launch is kept in ``known``."""

    device: Device
    known: dict[tuple[Op, str], tuple[str | None, tuple[Launch, ...]]] = field(default_factory=dict)

    def run(self, op: Op, backend: str) -> tuple[str | None, tuple[Launch, ...]]:
        """The kernel that a builder names, and the kernels of an eager form; () where it is one.

        Raises what the builder raises: Unsupported, OutOfMemoryError, or an error of its own.
        """
        if (op, backend) not in self.known:
            self.known[op, backend] = self._run(op, backend)
        return self.known[op, backend]

    def _run(self, op: Op, backend: str) -> tuple[str | None, tuple[Launch, ...]]:
        builder = BUILDERS.get((op.kind, backend))
        if builder is None or "cuda" not in builder.devices or not builder.accepts(op, "cuda"):
            raise Unsupported(f"{op.kind} in {op.dtype} has no backend {backend!r} on cuda")
        if why := lacking(op, backend, self.device):
            raise Unsupported(why)
        if builder.clock == "host" or op.kind in ON_GPU_ALONE:
            return None, ()
        major, minor = divmod(round(10 * self.device.sm), 10)
        inputs, recorder = OutlineInputs((major, minor)), Recorder()
        with torch.no_grad(), refusals():
            call = builder.build(op, inputs)
            if inputs.bytes + float(op.cost.write_bytes) > 0.95 * self.device.memory_gib * 2**30:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if backend not in EAGER:
                call()
                return inputs.kernel, ()
            with recorder, Whole(recorder):
                call()
        found = tuple(recorder.launches)
        return inputs.kernel, found if len(found) > 1 else ()

    def launches(self, op: Op, backend: str) -> tuple[Launch, ...]:
        """The kernels of an eager form; () where it is one kernel, or where the builder refuses."""
        try:
            return self.run(op, backend)[1]
        except (Unsupported, RuntimeError):
            return ()

"""Whether a backend can run an op on some GPU, asked of the real builder without that GPU.

The builder runs on tensors without memory, on which torch checks shapes, strides and dtypes and computes nothing. A
package that is not installed is a stand-in that takes any call. What chips refuse is a table
(:mod:`....datasets.kernels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .base import Inputs, Unsupported, torch_dtype

if TYPE_CHECKING:
    import torch

META = "meta"
TILE_ROWS = 128  # what a stand-in says when it is asked for a number


class OutlineInputs(Inputs):
    """Tensors without memory, on a GPU of the given compute capability that need not be here."""

    outline = True

    def __init__(self, capability: tuple[int, int]) -> None:
        self.device, self.seed, self.bytes, self.kernel = META, 0, 0, None
        self._capability = capability

    @property
    def capability(self) -> tuple[int, int]:
        return self._capability

    def count(self, mask: torch.Tensor, share: float) -> int:
        return round(mask.numel() * share)

    def normal(self, *shape: int, dtype: str) -> torch.Tensor:
        return self._empty(shape, dtype)

    def integers(self, *shape: int, high: int, dtype: str = "int64") -> torch.Tensor:
        return self._empty(shape, dtype)

    def permutation(self, count: int) -> torch.Tensor:
        return self._empty((count,), "int64")

    def another(self) -> OutlineInputs:
        return OutlineInputs(self._capability)

    def pinned(self, numel: int, dtype: str) -> torch.Tensor:
        return self._empty((numel,), dtype)

    def _empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        import torch

        return self._count(torch.empty(shape, dtype=torch_dtype(dtype), device=META))


class StandIn:
    """A package that is not here: every name is there, every call is taken, and what comes back is one more."""

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __call__(self, *arguments: Any, **named: Any) -> StandIn:
        return StandIn()

    def __getitem__(self, index: Any) -> StandIn:
        if isinstance(index, int) and index > 1:
            raise IndexError  # what unpacks a result gets two parts
        return StandIn()

    def __int__(self) -> int:
        return TILE_ROWS


@dataclass(frozen=True)
class Outline:
    """What one input set of an op takes on a backend, in bytes, and the kernel as the builder names it."""

    bytes: int
    kernel: str | None


def outline(op: Op, backend: str, capability: tuple[int, int]) -> Outline:
    """Run a builder on tensors without memory. Unsupported, in the builder's or torch's words, where it refuses."""
    import torch

    from . import BUILDERS, backends, refusals

    if backend not in backends(op, "cuda"):
        raise Unsupported(f"{op.kind} in {op.dtype} has no backend {backend!r}")
    builder, inputs = BUILDERS[op.kind, backend], OutlineInputs(capability)
    with torch.no_grad(), refusals():
        run = builder.build(op, inputs)
        if builder.clock == "device" and not _reads_a_number(op):
            run()
    return Outline(inputs.bytes + int(op.cost.write_bytes), inputs.kernel)


def _reads_a_number(op: Op) -> bool:
    """Whether the call hands Python a number, which a tensor without memory has not."""
    from .system import is_item

    return op.kind == "copy" and is_item(op)

"""What a case is made of: random inputs, one call, and the registry from (kind, backend) to the way it is run.

A *builder* takes an op and an :class:`Inputs` and returns a call without arguments that runs the op once and
returns its result. Builders run the operator as a model runs it: the functional form that allocates its result
anew, so that allocation and page faults are in the latency, and without autograd. Backward kinds call the
aten operator that autograd would call. Some of those have no binding but ``torch.ops``, whose call takes about a
microsecond longer than autograd's engine needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from ..amd import native_float8
from ..gpu_cache import last_level_bytes
from ..probe import last_level_cache_bytes

if TYPE_CHECKING:
    import torch

Run = Callable[[], object]

COLD_CACHES = 3  # input sets of a cold measurement together exceed the last-level cache this many times
MOST_SETS = 256  # smaller ops than cache / MOST_SETS need the cache emptied between laps instead
TILE_ELEMENTS = 1 << 16  # larger random tensors on the CPU repeat a tile of this many elements

TORCH_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_block": "float8_e4m3fn",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "bool",
}


class Unsupported(ValueError):  # noqa: N818  # not an error of the program: a row says it, and the campaign goes on
    """This op cannot run on this backend, device or version of torch. The message says why."""


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for opcast's name, on MI300 with its own 8-bit floats; Unsupported for the packed 4-bit and
    microscaling formats."""
    import torch

    if name not in TORCH_DTYPES:
        raise Unsupported(f"torch has no plain tensors of {name}")
    return getattr(torch, native_float8(TORCH_DTYPES[name]))


class Inputs:
    """Seeded random, non-zero tensors on one device. ``bytes`` counts what they occupy.

    ``kernel`` is where a builder says which kernel runs, when its backend chooses among several or is another package.
    ``outline`` is true of inputs without memory (:mod:`.outline`), for which packages are stand-ins.
    """

    outline = False

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.device = device
        self.seed = seed
        self.bytes = 0
        self.kernel: str | None = None
        self.generator = torch.Generator(device).manual_seed(seed)

    @property
    def on_gpu(self) -> bool:
        """Whether the op runs on a GPU, or is outlined for one."""
        return self.device != "cpu"

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the GPU."""
        import torch

        return torch.cuda.get_device_capability()

    def count(self, mask: torch.Tensor, share: float) -> int:
        """How many entries are true, of which ``share`` is expected where there is no memory to look into."""
        return int(mask.sum())

    def normal(self, *shape: int, dtype: str) -> torch.Tensor:
        """Standard normal values; integers from 1 to 99 and booleans are uniform instead."""
        import torch

        target = torch_dtype(dtype)
        if not target.is_floating_point:
            low, high = (0, 2) if target == torch.bool else (1, 100)
            return self._count(self._tiled(shape, lambda n: self._integers(n, low, high, target)))
        drawn_dtype = torch.float32 if target.itemsize == 1 else target

        def draw(count: int) -> torch.Tensor:
            return torch.randn(count, generator=self.generator, device=self.device, dtype=drawn_dtype).to(target)

        return self._count(self._tiled(shape, draw))

    def integers(self, *shape: int, high: int, dtype: str = "int64") -> torch.Tensor:
        """Uniform integers from 0 to ``high`` - 1."""
        count = 1
        for size in shape:
            count *= size
        return self._count(self._integers(count, 0, high, torch_dtype(dtype)).view(shape))

    def permutation(self, count: int) -> torch.Tensor:
        """The integers from 0 to ``count`` - 1 in random order."""
        import torch

        return self._count(torch.randperm(count, generator=self.generator, device=self.device))

    def another(self) -> Inputs:
        """Inputs of the same kind and seed, whose bytes are counted apart."""
        return Inputs(self.device, self.seed)

    def pinned(self, numel: int, dtype: str) -> torch.Tensor:
        """Random values in the host's memory, where the device reads and writes them directly."""
        return Inputs("cpu", self.seed).normal(numel, dtype=dtype).pin_memory()

    def runs(self, numel: int, run: int, dtype: str) -> torch.Tensor:
        """``numel`` elements, each ``run`` of them contiguous and followed by as many that are skipped.

        The pitch of twice the run is that of half of each attention head, or of one half of a gated layer.
        Unsupported when ``run`` does not divide ``numel``.
        """
        if run in (0, numel):
            return self.normal(numel, dtype=dtype)
        if numel % run:
            raise Unsupported(f"{numel} elements do not divide into runs of {run}")
        return self.normal(numel // run, 2 * run, dtype=dtype)[:, :run]

    def _integers(self, count: int, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.randint(low, high, (count,), generator=self.generator, device=self.device, dtype=dtype)

    def _tiled(self, shape: tuple[int, ...], draw: Callable[[int], torch.Tensor]) -> torch.Tensor:
        import torch

        count = 1
        for size in shape:
            count *= size
        if self.device != "cpu" or count <= TILE_ELEMENTS:
            return draw(count).view(shape)
        tile = draw(TILE_ELEMENTS)
        values = torch.empty(count, dtype=tile.dtype)
        for start in range(0, count, TILE_ELEMENTS):
            span = values[start : start + TILE_ELEMENTS]
            span.copy_(tile[: span.numel()])
        return values.view(shape)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor


Build = Callable[[Op, Inputs], Run]


@dataclass(frozen=True)
class Builder:
    """One way to run a kind.

    ``clock`` is ``device`` when the work itself is timed and ``host`` when only the host's time counts.
    ``capturable`` says whether a CUDA graph can hold an op's work: not where the graph would miss it (autograd runs on
    the forward's stream), nor where a call waits for the device, because a failed capture costs the process.
    """

    build: Build
    devices: tuple[str, ...]
    accepts: Callable[[Op, str], bool]
    clock: str = "device"
    capturable: Callable[[Op], bool] = lambda op: True


BUILDERS: dict[tuple[str, str], Builder] = {}


def case(
    kind: str,
    *backends: str,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    when: Callable[[Op, str], bool] = lambda op, device: True,
    clock: str = "device",
    capturable: Callable[[Op], bool] = lambda op: True,
) -> Callable[[Build], Build]:
    """Register the decorated builder for a kind under the given backend names (``torch`` when none).

    ``when`` says of an op and a device whether the backend may run it there.
    """

    def register(build: Build) -> Build:
        for backend in backends or ("torch",):
            if (kind, backend) in BUILDERS:
                raise ValueError(f"{kind} has two builders for backend {backend!r}")
            BUILDERS[kind, backend] = Builder(build, devices, when, clock, capturable)
        return build

    return register


@dataclass(frozen=True)
class Prepared:
    """An op ready to be timed.

    ``run`` executes it once on one input set and returns its result; call it inside :meth:`context`.
    ``bytes_needed`` is what one input set and its result occupy; ``kernel`` what the backend chose, where it says so.
    """

    op: Op
    backend: str
    device: str
    seed: int
    run: Run
    bytes_needed: int
    clock: str = "device"
    capturable: bool = True
    kernel: str | None = None

    @cached_property
    def rotate(self) -> tuple[Run, ...]:
        """``run`` over distinct input sets, enough to exceed the last-level cache :data:`COLD_CACHES` times.

        At most :data:`MOST_SETS` of them, made when first asked for. Their first is ``run``.
        """
        copies = -(-COLD_CACHES * cache_bytes(self.device) // max(self.bytes_needed, 1))
        sets = max(1, min(copies, MOST_SETS))
        build = BUILDERS[self.op.kind, self.backend].build
        others = (build(self.op, Inputs(self.device, self.seed + 1 + i)) for i in range(sets - 1))
        return (self.run, *others)

    @property
    def rotation_is_cold(self) -> bool:
        """Whether a lap over :attr:`rotate` pushes an input set out of the cache before it comes up again."""
        return len(self.rotate) * self.bytes_needed >= (COLD_CACHES - 1) * cache_bytes(self.device)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """How the op runs: without autograd, and fp32 products in fp32 unless the dtype is tf32."""
        import torch

        with torch.no_grad(), _tf32(self.op.dtype == "tf32") if self.device == "cuda" else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    import torch

    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@lru_cache
def cache_bytes(device: str) -> int:
    """Size of the last-level cache of the CPU, or of the current GPU."""
    if device == "cpu":
        return last_level_cache_bytes()
    import torch

    return last_level_bytes(torch.cuda.get_device_properties(torch.cuda.current_device()))

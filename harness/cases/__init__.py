"""How each op is run: :func:`prepare` turns an Op and a backend into a call that the timer times.

Each module that is imported here registers the builders of its family in :data:`BUILDERS`; :func:`backends` lists what
an op can run on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ...datasets.loading import nearest
from ...datasets.ops import Op
from ..environment import free_memory_bytes
from . import (  # noqa: F401  # each registers its builders
    attention,
    compiled,
    elements,
    experts,
    fused,
    gather,
    gemm,
    latent,
    mixers,
    moe,
    paged,
    rows,
    served,
    system,
    transformer_engine,
)
from .base import BUILDERS, Builder, Inputs, Prepared, Run, Unsupported

__all__ = [
    "BUILDERS",
    "Builder",
    "Inputs",
    "Prepared",
    "Run",
    "Unsupported",
    "backends",
    "prepare",
]

CPU_OUT_OF_MEMORY = "can't allocate memory"  # torch's words; on a GPU it has an exception of its own
HARNESS = Path(__file__).resolve().parent.parent
GLIBC_LARGEST_THRESHOLD = 32 << 20  # DEFAULT_MMAP_THRESHOLD_MAX of glibc's malloc on 64-bit machines


def backends(op: Op, device: str) -> list[str]:
    """Names of the backends that may run this op on ``cpu`` or ``cuda``, the usual one first."""
    return [
        backend
        for (kind, backend), builder in BUILDERS.items()
        if kind == op.kind and device in builder.devices and builder.accepts(op, device)
    ]


def prepare(op: Op, backend: str, device: str, seed: int = 0) -> Prepared:
    """Allocate inputs, run the op once, and return what the timer needs.

    Raises Unsupported with the reason when this backend cannot run the op, and torch.OutOfMemoryError when
    the inputs do not fit in memory.
    """
    builder = _builder(op, backend, device)
    _refuse_more_than_memory(op, device)
    if device == "cpu":
        _settle_allocator()
    inputs = Inputs(device, seed)
    with refusals():
        run = builder.build(op, inputs)
        needed = inputs.bytes + int(op.cost.write_bytes)
        prepared = Prepared(
            op, backend, device, seed, run, needed, builder.clock, builder.capturable(op), inputs.kernel
        )
        with prepared.context():
            run()
            if device == "cuda":
                _synchronise()
    return prepared


def _builder(op: Op, backend: str, device: str) -> Builder:
    builder = BUILDERS.get((op.kind, backend))
    names = backends(op, device)
    if builder is None or backend not in names:
        raise Unsupported(f"{op.kind} in {op.dtype} has no backend {backend!r} on {device}; {nearest(backend, names)}")
    return builder


def _synchronise() -> None:
    import torch

    torch.cuda.synchronize()


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What torch refuses shows when an op first runs: Unsupported, with torch's words. Crashes pass."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Unsupported:
        raise
    except (NotImplementedError, ValueError) as error:  # TORCH_CHECK_VALUE raises ValueError
        raise Unsupported(_first_line(error)) from error
    except RuntimeError as error:
        if CPU_OUT_OF_MEMORY in str(error):
            raise torch.OutOfMemoryError(_first_line(error)) from error
        if _is_crash(error):
            raise
        raise Unsupported(_first_line(error)) from error
    except Exception as error:
        if _refused_by_triton(error) or _refused_by_package(error):
            raise Unsupported(_first_line(error)) from error
        raise


TRITON_REFUSALS = ("CompilationError", "OutOfResources")  # no such type on this GPU, not so much shared memory


def _refused_by_triton(error: Exception) -> bool:
    return any(
        kind.__module__.startswith("triton.") and kind.__name__ in TRITON_REFUSALS for kind in type(error).__mro__
    )


def _refused_by_package(error: Exception) -> bool:
    """Whether a package lacks something or asserts that it can do without: its words, not an error of ours."""
    if isinstance(error, ImportError):
        return True
    raised = error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    ours = raised is not None and Path(raised.tb_frame.f_code.co_filename).is_relative_to(HARNESS)
    return isinstance(error, AssertionError) and not ours


def _is_crash(error: RuntimeError) -> bool:
    """Whether the device or torch broke, rather than refused the arguments."""
    import torch

    text = str(error)
    if "STATUS_NOT_SUPPORTED" in text or "STATUS_INVALID_VALUE" in text:
        return False
    words = ("CUDA error", "CUDA driver", "cuDNN error", "INTERNAL ASSERT", "Triton Error")
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or any(word in text for word in words)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _refuse_more_than_memory(op: Op, device: str) -> None:
    """A CPU process that takes too much memory is killed without a word, so ask first; a small GPU need not try."""
    import torch

    if device == "cuda" and op.kind in system.IN_PIECES:
        return
    needed, available = float(op.cost.bytes), free_memory_bytes(device)
    if needed > (0.9 if device == "cpu" else 1.0) * available:
        raise torch.OutOfMemoryError(f"{op} needs {needed / 2**30:.1f} GiB of {available / 2**30:.1f} GiB available")


@lru_cache
def _settle_allocator() -> None:
    """Bring glibc's malloc into the state of a process that has run for a while.

    Its threshold for handing memory back to the system rises when a large block is freed, up to 32 MiB. Until
    then every large result would be page-faulted anew, which no step after the first does.
    """
    import torch

    block = torch.empty(GLIBC_LARGEST_THRESHOLD - (64 << 10), dtype=torch.uint8)
    del block

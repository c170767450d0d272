"""Optimizer updates, copies, and what the host spends on its own."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from ...datasets.ops import KINDS, Op
from ..environment import free_memory_bytes
from ..launch import LAUNCH_QUEUE, LAYER_OPERATORS, host_calls
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .rows import same_dtype

if TYPE_CHECKING:
    import torch


IN_PIECES = ("adamw",)  # kinds of which a GPU runs a piece several times where it has no room for all
ADAMW_TENSORS = 4  # parameter, gradient and two moments
MEMORY_SHARE = 0.8  # of what is free, that parameters may take


def _parameters(op: Op, inputs: Inputs, pieces: int = 1) -> list[torch.Tensor]:
    """``tensors`` parameters that share ``numel`` (a piece of it) as evenly as they can, each with its gradient."""
    import torch

    if op.tensors > op.numel // pieces:
        raise Unsupported(f"{op.numel // pieces} elements cannot be spread over {op.tensors} tensors")
    share, extra = divmod(op.numel // pieces, op.tensors)
    parameters: list[torch.Tensor] = []
    for i in range(op.tensors):
        size = share + (i < extra)
        parameter = torch.nn.Parameter(inputs.normal(size, dtype=op.dtype))
        parameter.grad = inputs.normal(size, dtype=op.dtype)
        parameters.append(parameter)
    return parameters


def _adamw(op: Op, inputs: Inputs, *, fused: bool = False, foreach: bool = False) -> Run:
    """``torch.optim.AdamW.step``, its Python included; torch keeps the moments in the parameters' dtype.

    Where a GPU has no room for all parameters, one piece of them is updated so often that as many bytes move.
    """
    import torch

    same_dtype(op)
    cuda, pieces = inputs.on_gpu, _pieces(op, inputs)
    parameters = _parameters(op, inputs, pieces)
    if pieces > 1:
        inputs.kernel = f"a piece of 1/{pieces}, {pieces} times"
    if inputs.outline:
        return lambda: parameters
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, capturable=cuda, fused=fused, foreach=foreach)
    optimizer.step()

    if pieces == 1:
        return partial(optimizer.step)

    def run() -> None:
        for _ in range(pieces):
            optimizer.step()

    return run


def _pieces(op: Op, inputs: Inputs) -> int:
    """Into how many pieces the parameters are cut, so that one fits into the memory of the GPU."""
    if inputs.device != "cuda":
        return 1
    needed = ADAMW_TENSORS * op.numel * torch_dtype(op.dtype).itemsize
    return max(1, math.ceil(needed / (MEMORY_SHARE * free_memory_bytes("cuda"))))


@case("adamw", "torch")
def adamw(op: Op, inputs: Inputs) -> Run:
    """The fused implementation: one pass over all tensors."""
    return _adamw(op, inputs, fused=True)


@case("adamw", "foreach")
def adamw_foreach(op: Op, inputs: Inputs) -> Run:
    """The horizontally fused one: a dozen passes, each over the whole list of tensors."""
    return _adamw(op, inputs, foreach=True)


@case("adamw", "loop", devices=("cpu",))
def adamw_loop(op: Op, inputs: Inputs) -> Run:
    """Tensor by tensor: what torch does on a CPU unless told otherwise."""
    return _adamw(op, inputs)


@case("copy", capturable=lambda op: not is_item(op))
def copy(op: Op, inputs: Inputs) -> Run:
    """d2d: ``clone``, or ``contiguous`` of a source in runs, or ``cat`` of several. h2d, d2h: ``copy_`` between device
    and pinned memory.

    One element to the host is ``item``, which is all that a CPU has of these.
    """
    direction = KINDS["copy"].dims[1].choices[op.direction]
    numel, run = _elements(op)
    if op.joins:
        return partial(_cat, _parts(op, inputs))
    if direction == "d2d":
        source = inputs.runs(numel, run, op.dtype)
        return source.clone if source.is_contiguous() else source.contiguous
    if is_item(op):
        return inputs.normal(1, dtype=op.dtype).item
    if inputs.device == "cpu":
        raise Unsupported(f"copy {direction}: the CPU has one memory")
    if run not in (0, numel):
        raise Unsupported(f"copy {direction} moves whole buffers: set run_bytes=0")
    return _across(inputs, numel, op.dtype, direction == "h2d")


def _parts(op: Op, inputs: Inputs) -> list[torch.Tensor]:
    """Tensors in runs, with gaps between: ``joins`` equal ones; of 1 a large one and one run, as a cache grows."""
    numel, run = _elements(op)
    rows = numel // run if run and numel % run == 0 else 0
    if op.direction or rows < max(2 * op.joins, 3) or rows % op.joins:
        raise Unsupported(
            f"{op.joins} parts need direction=d2d and as many runs each, two at the least (of one: three)"
        )
    shares = [rows - 1, 1] if op.joins == 1 else [rows // op.joins] * op.joins
    return [inputs.runs(share * run, run, op.dtype).view(share, run) for share in shares]


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(parts)


def is_item(op: Op) -> bool:
    """Whether the copy is a number that Python waits for."""
    to_host = KINDS["copy"].dims[1].choices[op.direction] == "d2h"
    return to_host and op.size_bytes == torch_dtype(op.dtype).itemsize


def _elements(op: Op) -> tuple[int, int]:
    size = torch_dtype(op.dtype).itemsize
    if op.size_bytes % size or op.run_bytes % size:
        raise Unsupported(f"size_bytes and run_bytes must be multiples of {size}, one {op.dtype}; or take uint8")
    return op.size_bytes // size, op.run_bytes // size


def _across(inputs: Inputs, numel: int, dtype: str, to_device: bool) -> Run:
    import torch

    host = inputs.pinned(numel, dtype)
    device = torch.empty_like(inputs.normal(numel, dtype=dtype)) if to_device else inputs.normal(numel, dtype=dtype)
    target, source = (device, host) if to_device else (host, device)
    return partial(target.copy_, source, non_blocking=True)


@case("host_pass", clock="host")
def host_pass(op: Op, inputs: Inputs) -> Run:
    """A multiplication in place in the host's memory, by as many threads as torch has: half is read, half written."""
    import torch

    return partial(torch.ones(max(op.size_bytes // 8, 1)).mul_, 1.0)


@case("host_overhead", clock="host")
def host_overhead(op: Op, inputs: Inputs) -> Run:
    """As :func:`..launch.host_calls` says; torch is driven from Python, as a model drives it."""
    what = KINDS["host_overhead"].dims[0].choices[op.what]
    if inputs.on_gpu and what == "launch" and op.calls > LAUNCH_QUEUE:
        raise Unsupported(f"at most {LAUNCH_QUEUE} launches fit the queue: the host would wait for the device")
    if what == "operator" and op.calls % LAYER_OPERATORS:
        raise Unsupported(f"calls must be a multiple of {LAYER_OPERATORS}, the operators of a layer")
    return host_calls(what, op.calls, inputs.device)

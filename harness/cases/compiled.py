"""Operators that torch.compile joins: the eager form of a kind, compiled as compiled stacks run it (TorchInductor)."""

from __future__ import annotations

from functools import partial

from ...datasets.ops import Op
from .attention import CUDA
from .base import BUILDERS, Inputs, Run, case

KINDS_JOINED = (
    "rms_norm",
    "silu_mul",
    "silu_mul_backward",
    "gelu",
    "gelu_backward",
    "rope",
    "quantize",
    "cross_entropy",
    "cross_entropy_backward",
)


def compiled(kind: str, op: Op, inputs: Inputs) -> Run:
    """What backend ``torch`` runs, as one graph for this shape; the first call compiles it, which takes seconds.

    What was compiled for other shapes is forgotten first: torch refuses a ninth shape of the same code.
    """
    import torch

    run = BUILDERS[kind, "torch"].build(op, inputs)
    inputs.kernel = f"inductor {torch.__version__}"
    if inputs.outline:
        return run
    torch.compiler.reset()
    return torch.compile(run, dynamic=False, fullgraph=True)


for _kind in KINDS_JOINED:
    case(_kind, "inductor", devices=CUDA)(partial(compiled, _kind))

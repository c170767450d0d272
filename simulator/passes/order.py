"""The order in which passes compose, and the user's own among them.

Kernels are fused and quantized before work is shared out, so that what a rank runs is shared kernels; recomputation
comes after sharding, so that it repeats a rank's own collectives; data parallelism sees what is left of each weight.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph import Graph
from ..question.plan import Plan
from .context import context_parallel
from .custom import load_pass
from .data import data_parallel
from .expert import expert_parallel
from .fuse import fuse
from .gathered import keep_gathered
from .offload import offload
from .overlap import overlap
from .quantize import quantize
from .recompute import recompute
from .tensor import tensor_parallel
from .unfuse import unfuse_attention

Pass = Callable[[Graph, Plan], Graph]

TRAINING: tuple[Pass, ...] = (
    fuse,
    quantize,
    context_parallel,
    expert_parallel,
    tensor_parallel,
    keep_gathered,
    unfuse_attention,
    recompute,
    data_parallel,
    offload,
    overlap,
)


def apply_passes(graph: Graph, plan: Plan, passes: tuple[Pass, ...] = TRAINING) -> Graph:
    """The graph after ``passes`` in order, then the user's own (``plan.passes``, each ``module:function``)."""
    for each in (*passes, *map(load_pass, plan.passes)):
        graph = each(graph, plan)
    return graph

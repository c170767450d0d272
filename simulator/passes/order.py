"""The order in which passes compose, for training and for inference, and the user's own among them.

Training: kernels are fused and quantized before work is shared out, so that what a rank runs is shared kernels;
attention is cut in parts after sharding, for its heads and tokens are then a rank's own; recomputation comes after
sharding, so that it repeats a rank's own collectives; data parallelism sees what is left of each weight; the loss is
cut in chunks of a rank's own tokens then, between gathered weights and reduced gradients; what is offloaded is what a
rank holds then; streams come last, when every communication is there.

Inference: an engine's own kernels (:mod:`.serving`) take the place of the model's code first, for the rules of fusion
look for what is left of it. Attention is cut in parts before fusion, so that a rule may see its parts. What an engine
knows beforehand goes after fusion, which reads it to tell a rotary embedding; what is rounded for a product is merged
into its maker after quantization has put it there. Sharding follows as in training. Norms take
adds and all-reduces along when those are there (:mod:`.norms`); caches are offloaded when each rank
has its own part of them, of the size that an engine gives it (:mod:`.caches`). ``ungrouped`` and ``packed`` only change
how much an attention reads and how many rows are real, so that they come after everything that asks what an op is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..graph import Graph
from ..question.plan import Plan
from . import remembered
from .caches import sized_caches
from .chunked_loss import chunk_loss
from .context import context_parallel
from .custom import load_pass
from .data import data_parallel
from .expert import expert_parallel
from .fuse import fuse
from .gathered import keep_gathered
from .layouts import laid_out
from .norms import RULES, carried, reduced, summed
from .offload import offload
from .overlap import overlap
from .packing import packed
from .quantize import quantize, scaled
from .recompute import recompute
from .serving import OTHERS, STEPS, bare, rounded, serve, ungrouped
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
    laid_out,
    recompute,
    data_parallel,
    chunk_loss,
    offload,
    overlap,
)


def fuse_rest(graph: Graph, plan: Plan) -> Graph:
    """Fusion by the rules that the stack names beside those of :mod:`.serving`."""
    rest = tuple(name for name in plan.stack.fusion if name not in (*STEPS, *OTHERS, *RULES))
    return fuse(graph, replace(plan, stack=replace(plan.stack, fusion=rest)))


INFERENCE: tuple[Pass, ...] = (
    serve,
    unfuse_attention,
    fuse_rest,
    bare,
    quantize,
    rounded,
    context_parallel,
    expert_parallel,
    tensor_parallel,
    summed,
    carried,
    reduced,
    scaled,
    sized_caches,
    offload,
    overlap,
    ungrouped,
    packed,
)


def apply_passes(graph: Graph, plan: Plan, passes: tuple[Pass, ...] = TRAINING) -> Graph:
    """The graph after ``passes`` in order, then the user's own (``plan.passes``, each ``module:function``)."""
    for each in passes:
        graph = remembered.run(each, graph, plan)
    for name in plan.passes:
        graph = load_pass(name)(graph, plan)
    return graph

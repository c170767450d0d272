"""The order in which passes compose, for training and for inference, and the user's own among them.

Training: kernels are fused and quantized before work is shared out, so that what a rank runs is shared kernels;
attention is cut in parts after sharding, for its heads and tokens are then a rank's own; recomputation comes after
sharding, so that it repeats a rank's own collectives; data parallelism sees what is left of each weight; the loss is
cut in chunks of a rank's own tokens then, between gathered weights and reduced gradients; what is offloaded is what a
rank holds then; streams come last, when every communication is there.

Inference: an engine's own kernels (:mod:`.serving`) take the place of the model's code first, for the rules of fusion
look for what is left of it. Attention is cut in parts before fusion, so that a rule may see its parts. What an engine
knows beforehand goes after fusion, which reads it to tell a rotary embedding; what is rounded for a product is merged
into its maker after quantization has put it there. Sharding follows as in training. Norms take adds and all-reduces
along when those are there (:mod:`.norms`); caches are offloaded when each rank has its own part of them, of the size
that an engine gives it (:mod:`.caches`). ``ungroup_heads`` and ``remove_padding`` only change how much an attention
reads and how many rows are real, so that they come after everything that asks what an op is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..graph import Graph
from ..question.plan import Plan
from . import remembered, verify
from .caches import size_caches
from .chunked_loss import chunk_loss
from .context import context_parallel
from .custom import load_pass
from .data import data_parallel
from .expert import expert_parallel
from .fuse import fuse
from .gathered import keep_gathered
from .int8_results import write_integers
from .layouts import copy_layouts
from .norms import RULES, fuse_allreduce_norm, fuse_next_norm, reduce_once
from .offload import offload
from .overlap import overlap
from .packing import remove_padding
from .quantize import quantize, shard_scales
from .recompute import recompute
from .serving import OTHERS, STEPS, drop_precomputed, fuse_quantization, serve, ungroup_heads
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
    copy_layouts,
    recompute,
    data_parallel,
    chunk_loss,
    offload,
    overlap,
)


def fuse_rest(graph: Graph, plan: Plan) -> Graph:
    """Fusion by the rules that the stack names beside those of :mod:`.serving`."""
    rules = tuple(name for name in plan.stack.fusion if name not in (*STEPS, *OTHERS, *RULES))
    return fuse(graph, replace(plan, stack=replace(plan.stack, fusion=rules)))


INFERENCE: tuple[Pass, ...] = (
    serve,
    unfuse_attention,
    fuse_rest,
    drop_precomputed,
    quantize,
    fuse_quantization,
    write_integers,
    context_parallel,
    expert_parallel,
    tensor_parallel,
    reduce_once,
    fuse_next_norm,
    fuse_allreduce_norm,
    shard_scales,
    size_caches,
    offload,
    overlap,
    ungroup_heads,
    remove_padding,
)


# Passes that change no arithmetic of matrix products and attention (:func:`.verify.verify_flops`). Others share it out,
# repeat it, or put kernels in its place that do more or less.
KEEPS_FLOPS: frozenset[Pass] = frozenset(
    {
        *(fuse, quantize, keep_gathered, copy_layouts, data_parallel, chunk_loss, offload, overlap),
        *(fuse_rest, drop_precomputed, fuse_quantization, reduce_once, fuse_next_norm, fuse_allreduce_norm),
        *(write_integers, shard_scales, size_caches),
    }
)


def apply_passes(graph: Graph, plan: Plan, passes: tuple[Pass, ...] = TRAINING) -> Graph:
    """The graph after ``passes`` in order, then the user's own (``plan.passes``, each ``module:function``)."""
    for graph_pass in passes:
        before, graph = graph, remembered.run(graph_pass, graph, plan)
        if verify.EVERY_PASS and graph is not before:
            _verify(graph_pass, before, graph)
    for name in plan.passes:
        graph = load_pass(name)(graph, plan)
    return graph


def _verify(graph_pass: Pass, before: Graph, after: Graph) -> None:
    """GraphError that names the pass whose graph does not fit together, or has other FLOPs than it promises."""
    try:
        verify.verify(after)
        if graph_pass in KEEPS_FLOPS:
            verify.verify_flops(before, after)
    except verify.GraphError as error:
        raise verify.GraphError(f"pass {graph_pass.__name__}: {error}") from None

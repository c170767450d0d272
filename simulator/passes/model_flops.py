"""The arithmetic that a model defines, which MFU divides: what a step needs, whatever code or kernels run it.

A latent cache (MLA) is read by queries that the keys' projection was moved to (DeepSeek-V2, arXiv 2405.04434, sec.
2.1.2). transformers' own code projects every cached latent up again in each decode step instead: that work counts as
executed (HFU), not as the model's.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph import Graph
from ..question.plan import Plan
from ..trace.entry import phase_flops
from .packing import remove_padding
from .serving import absorb_latents


def count_model_flops(graph: Graph, plan: Plan) -> Graph:
    """A traced graph of an inference step whose ``model_flops`` leave out padding and what its code computes again."""
    needed = remove_padding(absorb_latents(graph), plan)
    return replace(graph, model_flops=min(graph.model_flops, phase_flops(needed, "forward")))

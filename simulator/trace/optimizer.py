"""The optimizer step of a traced training step.

torch's fused AdamW updates all parameters of one dtype in one call, whatever the model, so it is written down
from the graph's tensors rather than traced. Its op stands for the whole of ``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...datasets.dtypes import itemsize
from ...datasets.ops import make_op
from ..graph import Block, Graph, Node, Tensor

MOMENTS = 2  # exp_avg and exp_avg_sq, in the parameter's dtype


def add_adamw(graph: Graph) -> Graph:
    """The graph with one fused AdamW node for each dtype of its trained parameters."""
    count = graph.tensor_count
    tensors, nodes = list(graph.tensors), []
    gradients = [tensor for tensor in graph.tensors if tensor.role == "gradient"]
    for dtype in dict.fromkeys(tensor.dtype for tensor in gradients):
        updated = [t for t in graph.tensors if t.role == "weight" and t.dtype == dtype]
        state = _state(updated, count)
        count += sum(tensor.count for tensor in state)
        tensors += state
        nodes.append(_node(updated, [t for t in gradients if t.dtype == dtype], state))
    return replace(graph, tensors=tuple(tensors), blocks=(*graph.blocks, Block(tuple(nodes)))) if nodes else graph


def _state(weights: Sequence[Tensor], first: int) -> list[Tensor]:
    """Moments of every weight, numbered from ``first`` on."""
    state = []
    for _ in range(MOMENTS):
        for weight in weights:
            state.append(replace(weight, id=first, role="optimizer_state"))
            first += weight.count
    return state


def _node(weights: Sequence[Tensor], gradients: Sequence[Tensor], state: Sequence[Tensor]) -> Node:
    size = sum(weight.size_bytes * weight.count for weight in weights)
    tensors, dtype = sum(weight.count for weight in weights), weights[0].dtype
    op = make_op("adamw", dtype=dtype, numel=int(size / itemsize(dtype)), tensors=tensors)
    reads, writes = (*_ids(weights), *_ids(gradients), *_ids(state)), (*_ids(weights), *_ids(state))
    return Node(op, "aten._fused_adamw_", "optimizer", "optimizer", reads, writes, int(op.cost.bytes))


def _ids(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.id + index for tensor in tensors for index in range(tensor.count)]

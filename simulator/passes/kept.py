"""What an engine keeps of the sequences that it serves: the one rule, which everybody asks who counts a cache.

- Grouped heads: each tensor rank keeps ``max(1, heads / tp)`` whole heads of keys and values; where ranks are more than
  heads, several keep the same one (``get_num_kv_heads`` of vLLM's ``config/model.py``; SGLang and TensorRT-LLM alike).
- Latent attention (MLA): every tensor rank keeps the whole latent of a token and its rotary part.
- A window: the tokens that it sees, or all of them under engines whose blocks are ``alike`` for all layers.
- Linear attention: its states, in fp32, and the last tokens of its short convolution, whatever the context.

An op says how many heads a rank has and in which format they are kept, so that an op is all that is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...datasets.dtypes import itemsize
from ...datasets.mixer_ops import STATE_BYTES, state_elements
from ...datasets.ops import KINDS, Op
from ..graph import CACHE, Block, Graph, Node

STEPS = ("prefill", "decode")
TOKENWISE = tuple(
    f"{name}_{step}" for name in ("attention", "mla", "sparse_attention", "sparse_index") for step in STEPS
)
STATES = tuple(f"linear_attention_{step}" for step in STEPS)
CONVOLUTION = "causal_conv1d"


def token_bytes(op: Op) -> float:
    """Bytes that a kernel of attention keeps of each token of a sequence on one rank."""
    size = 1.0 if "kv_dtype" in KINDS[op.kind].names and op.kv_dtype else itemsize(op.dtype)
    if op.kind.startswith("mla"):
        return (op.kv_lora_rank + op.qk_rope_head_dim) * size
    if op.kind.startswith("sparse_index"):
        return op.head_dim * itemsize(op.dtype)
    if op.kind.startswith("sparse_attention") and op.latent:
        return op.head_dim * size
    return op.heads_kv * (op.head_dim + op.v_head_dim) * size


def kept_tokens(op: Op, context: int = 0) -> int:
    """Tokens of a sequence that a kernel of attention keeps; with a ``context`` (of decoding) also those beyond its
    window."""
    if context:
        return max(context, op.seq_kv) if op.kind.endswith("decode") else op.seq_kv
    window = op.window if "window" in KINDS[op.kind].names else 0
    return min(op.seq_kv, window) if window else op.seq_kv


def keeps(op: Op | None) -> bool:
    """Whether a kernel keeps something of its sequences for the next step."""
    return op is not None and (op.kind in (*TOKENWISE, *STATES) or (op.kind == CONVOLUTION and bool(op.update)))


def cache_bytes(op: Op, context: int = 0) -> float:
    """Bytes that a kernel keeps of all its sequences on one rank; see :func:`kept_tokens`."""
    if op.kind in STATES:
        return float(STATE_BYTES * state_elements(op))
    if op.kind == CONVOLUTION:
        return float(op.rows * op.cols * op.width * itemsize(op.dtype))
    return op.batch * kept_tokens(op, context) * token_bytes(op)


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of the caches of a graph: of layers that see all tokens, of those with a window, and of states."""

    whole: float = 0.0
    windowed: float = 0.0
    state: float = 0.0

    @property
    def all(self) -> float:
        """Bytes of everything that is kept."""
        return self.whole + self.windowed + self.state


def kept_bytes(graphs: Iterable[Graph], context: int) -> KeptBytes:
    """What the chunks of one rank keep, each cache once; fewer tokens than ``context`` are those of a window."""
    sums = [0.0, 0.0, 0.0]
    for graph in graphs:
        counted = np.zeros(graph.tensor_count, dtype=bool)
        for block in graph.blocks:
            for node in block.nodes:
                if keeps(node.op):
                    sums[_class(node.work, context)] += _uncounted_bytes(graph, block, node, counted)
    return KeptBytes(*sums)


def _class(op: Op, context: int) -> int:
    return 2 if op.kind not in TOKENWISE else int(op.seq_kv < context)


def _uncounted_bytes(graph: Graph, block: Block, node: Node, counted: np.ndarray) -> float:
    """Bytes of a node's caches, in all repetitions, that no node before had."""
    size = 0.0
    for tensor in dict.fromkeys(node.touches):
        if graph.tensor_roles[tensor] != CACHE:
            continue
        step = block.steps.get(tensor, 0)
        ids = tensor + step * np.arange(block.repeat if step else 1)
        size += float(graph.tensor_bytes[ids[~counted[ids]]].sum())
        counted[ids] = True
    return size

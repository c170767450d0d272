"""Log-probs of tokens by operators of PyTorch that go over all logits one after the other, as NeMo-RL takes them.

``nemo_rl/distributed/model_utils.py``, ``DistributedLogprob``. Forward: the largest logit, what is left above it,
exponentials, their sum, log-softmax, a copy of it, exponentials in its place. Backward: a one-hot of 64-bit integers,
its product with a mask, a cast, and two products in place. The loss of a packed micro-batch is that of one sequence
after the other (``SequencePackingLossWrapper``): each reads a slice of the logits, whose gradient is put into zeros
of the size of all and added to those of the others.
"""

from __future__ import annotations

import numpy as np

from ....datasets.ops import KINDS, make_op
from ..rewriting.draft import Draft, Item, Section
from ..rewriting.match import expand
from ..rewriting.nodes import kernel, name_of

# Tensors of all logits in fp32 that go through memory beside the two of a softmax and the three of its gradient; one of
# 64-bit integers counts twice
FORWARD, BACKWARD = 10, 11
NAMES = {"_log_softmax": FORWARD, "_log_softmax_backward_data": BACKWARD}


def log_probs_apart(draft: Draft, released: np.ndarray) -> bool:
    """What goes over logits beside each log-softmax and its gradient."""
    sequences = sequences_of(draft)

    def with_others(_: Section, item: Item) -> list[Item]:
        node, op = item.node, item.node.op
        tensors = NAMES.get(name_of(node))
        if tensors is None or op is None:
            return [item]
        if node.phase == "backward" and sequences > 1:
            tensors += tensors_of_slices(sequences)
        moved = make_op("elementwise", numel=op.rows * op.cols, inputs=tensors - 1, dtype="fp32")
        return [item, Item(kernel(moved, "fused.pointwise", node, node.writes, node.writes))]

    return expand(draft.sections, with_others)


def tensors_of_slices(sequences: int) -> int:
    """Tensors that gradients of so many slices move: zeros of all, the slice into them, and all but one added up."""
    return sequences + 2 + 3 * (sequences - 1)


def sequences_of(draft: Draft) -> int:
    """Sequences of a micro-batch: those of its attention; 1 where there is none."""
    ops = [item.node.op for _, item in draft.walk()]
    return max((op.batch for op in ops if op is not None and KINDS[op.kind].family == "attention"), default=1)

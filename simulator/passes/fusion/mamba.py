"""Mamba-2 as Megatron-Core trains it: one autograd function from the mixer's first product to its last.

``mamba_split_conv1d_scan_combined`` (``mamba_ssm/ops/triton/ssd_combined.py``) takes the gate into the scan's last
kernel, which then writes its result twice, with and without the gate. For the backward pass it convolves once more and
splits the gate's gradient from the scan's in a kernel of its own. Its kernels write the parts of the gradient where
they belong: nothing is put together. Tokens come before sequences in Megatron-Core, sequences before tokens in the
scan: micro-batches of several sequences are copied on the way in, out and back (``megatron/core/ssm/mamba_mixer.py``,
``_ssm_training``; Transformer Engine makes gradients contiguous before it multiplies).
"""

from __future__ import annotations

import numpy as np

from ....datasets.mixer_ops import SSD
from ....datasets.ops import Op, make_op
from ...graph import Node
from ..rewriting.draft import Draft, Item, Section
from ..rewriting.match import find, insert
from ..rewriting.nodes import kernel, name_of

SCANS = ("linear_attention_prefill", "linear_attention_backward")
# Tensors as wide as the result that gating moves: z is read, the result written again; backward the gradient, the
# result, z and x are read, two gradients written (_chunk_scan_fwd_kernel and _chunk_scan_bwd_dz with z)
GATED_READS, GATED_READS_BACKWARD = 1, 5


def split_scan(draft: Draft, released: np.ndarray) -> bool:
    """The kernels around Mamba-2's scan, in every mixer of the graph."""
    changed = False
    for section in draft.sections:
        for item in [scan for scan in section.items if _scans(scan.node.op)]:
            (_forward if item.node.phase == "forward" else _backward)(draft, section, item)
            changed = True
    return changed


def _scans(op: Op | None) -> bool:
    return op is not None and op.kind in SCANS and op.rule == SSD


def _forward(draft: Draft, section: Section, scan: Item) -> None:
    node, convolution = scan.node, _partner_of(section, scan, "causal_conv1d")
    out, projected = node.writes[0], (convolution or scan).node.reads[0]
    several = scan.node.work.batch > 1
    after = [_gate(draft, node, out, GATED_READS)]
    if several:
        after.append(_copy_of(draft, node, out))
        insert(section, section.place(convolution or scan), [_copy_of(draft, node, projected)])
    insert(section, section.place(scan) + 1, after)


def _backward(draft: Draft, section: Section, scan: Item) -> None:
    node, convolution = scan.node, _partner_of(section, scan, "causal_conv1d_backward")
    ahead = [_gate(draft, node, node.reads[0], GATED_READS_BACKWARD)]
    if convolution is not None:
        of = convolution.node.work
        again = make_op("causal_conv1d", rows=of.rows, cols=of.cols, width=of.width, dtype=of.dtype)
        ahead.append(Item(kernel(again, "opcast.causal_conv1d", node, (convolution.node.reads[1],), ())))
    joined = [i for i in find(section, path=node.path) if name_of(i.node) == "cat" and i.node.op is not None]
    joined = [cat for cat in joined if cat.node.phase == "backward"]
    widest = max(joined, key=lambda cat: int(cat.node.work.size_bytes), default=None)
    for cat in joined:
        if cat is widest and node.work.batch > 1:
            cat.compute(make_op("copy", size_bytes=draft.sizes[cat.node.writes[0]], dtype=node.work.dtype))
        else:
            cat.change(op=None, bytes_moved=0)
    insert(section, section.place(scan), ahead)


def _partner_of(section: Section, scan: Item, kind: str) -> Item | None:
    """The node of a kind that stands in the scan's module."""
    return next(iter(find(section, sources=(f"opcast.{kind}",), path=scan.node.path)), None)


def _gate(draft: Draft, node: Node, tensor: int, inputs: int) -> Item:
    op = make_op("elementwise", numel=draft.numel(tensor), inputs=inputs, dtype=node.work.dtype)
    return Item(kernel(op, "fused.pointwise", node, (tensor,), (tensor,)))


def _copy_of(draft: Draft, node: Node, tensor: int) -> Item:
    op = make_op("copy", size_bytes=draft.sizes[tensor], dtype=node.work.dtype)
    return Item(kernel(op, "aten.clone", node, (tensor,), (tensor,)))

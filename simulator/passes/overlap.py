"""Communication beside compute: which collectives leave the compute stream, and what they then wait for.

``plan.stack.overlap`` names the groups. A collective of such a group moves to a stream of its own (``comm:tp``) and
is waited for only by who reads it; nodes that do not are moved in between (:mod:`.reorder`): an all-reduce of an input
gradient runs beside the product for the weight gradient, experts' exchanges beside the shared experts. Gradients
and weights of data parallelism (:mod:`.data`) and the sends of a pipeline (its schedule) are placed elsewhere.

Where a product waits for the very collective beside it (sequence parallelism), both are cut in chunks that pipeline:
Transformer Engine's user buffers, torch's AsyncTP; one chunk per rank. Approximation: of k chunks only two pieces are
modelled. A gather's first chunk, then k - 1 chunks of the product beside k - 1 chunks of the gather, then the
product's last; in the other direction the product's first chunk, k - 1 chunks of both beside each other, the
last of the scatter. The piece that is computed meanwhile takes as long as a product of that size.

Frameworks without such chunks (``stack.tensor_chunks`` false) compute the rank's own rows beside the gather, the others
after it, and leave a scatter that follows a product as it is: it runs beside whatever does not read it. ``tp_forward``
names tensor ranks whose forward passes alone are cut so (torch's AsyncTP).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...datasets.ops import LAYOUT
from ..graph import REST_SUFFIX, Graph, Node
from ..question.plan import Plan
from .reorder import COMPUTE, reorder_section
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors
from .rewriting.nodes import ALONE

GROUPS = ("tp", "etp", "ep", "cp")
TENSOR = ("tp", "etp")
FORWARD = "tp_forward"
FORWARD_PHASES = ("forward", "recompute")


def overlap(graph: Graph, plan: Plan) -> Graph:
    """The graph with the collectives of ``plan.stack.overlap`` on streams of their own."""
    groups = {name for name in plan.stack.overlap if name in GROUPS}
    half = FORWARD in plan.stack.overlap and "tp" not in groups  # of the step, for tensor ranks
    groups |= {"tp"} if half else set()
    groups |= {"etp"} if "tp" in groups else set()

    def beside(node: Node) -> bool:
        return (
            node.group in groups
            and not node.source.startswith(ALONE)
            and not (half and node.group in TENSOR and node.phase not in FORWARD_PHASES)
        )

    if not any(beside(node) and node.op is not None for node, _ in graph.weighted()):
        return graph
    draft = Draft(graph)
    released = freed_tensors(draft)
    for section in draft.sections:
        if not any(beside(item.node) for item in section.items):
            continue
        if "tp" in groups:
            _pipeline(draft, section, plan.stack.tensor_chunks, beside)
        for item in section.items:
            if beside(item.node) and item.node.stream == COMPUTE:
                item.change(stream=f"comm:{item.node.group}")
        reorder_section(section)
    free_after_last_use(draft, released)
    return draft.graph()


def _pipeline(draft: Draft, section: Section, chunks: bool, beside: Callable[[Node], bool]) -> None:
    """Cut gathers and scatters of tensor ranks, with the product next to them, in chunks; else only the product that
    reads a gather. Nothing is cut of what does not run ``beside`` compute."""
    items: list[Item] = []
    overlapped: set[int] = set()
    for position, item in enumerate(section.items):
        node = item.node
        if id(item) in overlapped:
            continue
        if node.group == "tp" and node.op is not None and node.stream == COMPUTE and beside(node):
            if node.op.kind == "all_gather":
                product = _reader(section, position)
                if product is not None and len(node.writes) == 1:
                    cut = (
                        _overlap_gather(draft, section, node, product.node) if chunks else _own_rows(node, product.node)
                    )
                    items += cut
                    overlapped.add(id(product))
                    continue
            if chunks and node.op.kind == "reduce_scatter" and items and _feeds(items[-1].node, node):
                items += _overlap_scatter(draft, section, items.pop().node, node)
                continue
        items.append(item)
    section.items = items


def _reader(section: Section, position: int) -> Item | None:
    """The first product that multiplies a gather's rows, if it can be cut and moved up to the gather."""
    gather = section.items[position].node
    touched: set[int] = set()
    for item in section.items[position + 1 :]:
        node = item.node
        if gather.writes[0] in node.reads and _cuts(node, gather):
            return item if touched.isdisjoint(node.touches) else None
        touched.update(node.writes)
    return None


def _feeds(product: Node, node: Node) -> bool:
    return _cuts(product, node) and product.writes == node.reads


def _cuts(product: Node, node: Node) -> bool:
    """Whether a product's rows can be cut into one chunk per rank."""
    op = product.op
    if op is None or node.op is None or op.kind != "gemm" or product.phase != node.phase or product.stream != COMPUTE:
        return False
    return LAYOUT.choices[op.layout] != "tn" and op.m % node.op.ranks == 0


def _overlap_gather(draft: Draft, section: Section, gather: Node, product: Node) -> list[Item]:
    """Gather and product, cut in a first and a last piece each."""
    ranks, gathered = gather.work.ranks, gather.writes[0]
    head = draft.local(section, draft.sizes[gathered] / ranks, draft.dtype(gathered))
    first, others = _in_two(gather, "size_bytes", ranks, first=True)
    begun, ended = _in_two(product, "m", ranks, first=False)
    reads = tuple(head if t == gathered else t for t in product.reads)
    return [
        Item(replace(first, writes=(head,))),
        Item(replace(others, reads=(*gather.reads, head))),
        Item(replace(begun, reads=reads)),
        Item(replace(ended, reads=tuple(dict.fromkeys(product.touches)))),
    ]


def _own_rows(gather: Node, product: Node) -> list[Item]:
    """A gather, beside it the product of the rank's own rows, then that of all others."""
    begun, ended = _in_two(product, "m", gather.work.ranks, first=True)
    reads = tuple(t for tensor in product.reads for t in (gather.reads if tensor == gather.writes[0] else (tensor,)))
    return [
        Item(gather),
        Item(replace(begun, reads=reads)),
        Item(replace(ended, reads=tuple(dict.fromkeys(product.touches)))),
    ]


def _overlap_scatter(draft: Draft, section: Section, product: Node, scatter: Node) -> list[Item]:
    """Product and scatter, cut in a first and a last piece each."""
    ranks, partial, out = scatter.work.ranks, product.writes[0], scatter.writes[0]
    head = draft.local(section, draft.sizes[partial] / ranks, draft.dtype(partial))
    summed = draft.local(section, draft.sizes[out] / ranks, draft.dtype(out))
    begun, ended = _in_two(product, "m", ranks, first=True)
    first, others = _in_two(scatter, "size_bytes", ranks, first=False)
    return [
        Item(replace(begun, writes=(head,))),
        Item(ended),
        Item(replace(first, reads=(head,), writes=(summed,))),
        Item(replace(others, reads=(*scatter.reads, summed))),
    ]


def _in_two(node: Node, dim: str, ranks: int, first: bool) -> tuple[Node, Node]:
    """A node in two along a dimension: one chunk and the rest, or the rest and one chunk; collectives on their stream.

    A collective moves what lies in its buffer.
    """
    whole, stream = getattr(node.work, dim), f"comm:{node.group}" if node.group else node.stream
    one = whole // ranks
    ops = [node.work.replace(**{dim: size}) for size in ((one, whole - one) if first else (whole - one, one))]
    begun, ended = (
        replace(node, op=op, bytes_moved=op.size_bytes if node.group else int(op.cost.bytes), frees=(), stream=stream)
        for op in ops
    )
    return begun, replace(ended, source=f"{node.source}{REST_SUFFIX}")

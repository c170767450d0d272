"""The loss in chunks of tokens: logits of a few tokens at a time, and their gradients at once.

The product with the output weights, the loss and both products of its backward pass run for one chunk of tokens after
the other, at the end of the forward pass, so that logits of all tokens never live together. The gradient of the hidden
states is one tensor that chunks fill, that of the output weights one that they add to. Ways (``stack.loss``,
``options={loss: …}``):

- ``liger``: Liger-Kernel's ``fused_linear_cross_entropy``. As many chunks as the vocabulary is wider than the hidden
  states, their tokens rounded up to a power of two, and one kernel for loss and gradient, in place in 16 bits
  (``ops/fused_linear_cross_entropy.py``, ``fused_linear_cross_entropy_forward``). Each rank needs the whole vocabulary.
- ``chunks:N``: N chunks by the framework's own kernels of the loss. torchtitan (``components/loss.py``,
  ``ChunkedLossWrapper``, 8 unless told otherwise), DeepSpeed (``ulysses_sp.py``, ``TiledFusedLogitsLoss``) and whoever
  wraps head and loss in such a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ...datasets.ops import LAYOUT, make_op
from ..graph import Graph, Node, layer_of
from ..question.options import LIGER, WHOLE
from ..question.plan import Plan, PlanError
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors
from .rewriting.nodes import Location, addition, elementwise, kernel
from .rewriting.split import axes, share

HELD = ("weight", "frozen", "buffer")  # roles of the output weights, before and after they are gathered


@dataclass(frozen=True)
class Head:
    """Head and loss in a section: from the product that makes the logits to the last one of its backward pass."""

    section: Section
    first: int
    last: int

    @property
    def product(self) -> Node:
        """The product that makes the logits."""
        return self.section.items[self.first].node

    @property
    def items(self) -> list[Item]:
        """All nodes from the first product to the last, or to the sum of the bias's gradient behind it."""
        return self.section.items[self.first : self.last + 1]


def chunk_loss(graph: Graph, plan: Plan) -> Graph:
    """The graph with head and loss in chunks, if ``options.loss`` or the stack says so; PlanError where that cannot be.

    Unchanged where no loss follows a product with its backward pass.
    """
    way = plan.settings.loss or plan.stack.loss
    if way == WHOLE:
        return graph
    draft = Draft(graph)
    head = _head(draft)
    if head is None:
        return graph
    if way == LIGER and plan.parallel.tp > 1:
        raise PlanError(
            f"loss=liger needs the whole vocabulary on each rank, but parallel.tp={plan.parallel.tp}; "
            "take loss=chunks:8"
        )
    released = freed_tensors(draft)
    _loop(draft, head, way, plan.stack.fused_gradients)
    free_after_last_use(draft, released)
    return draft.graph()


def chunk_tokens(way: str, tokens: int, vocab: int, hidden: int) -> int:
    """Tokens of a chunk: a power of two by Liger's rule (its logits are about as large as the hidden states), or a
    share of all."""
    if way != LIGER:
        return -(-tokens // int(way.partition(":")[2]))
    least = -(-tokens // -(-vocab // hidden))
    return int(min(1 << (least - 1).bit_length(), tokens))


def _head(draft: Draft) -> Head | None:
    """The widest product outside of layers that has its backward pass in the same section."""
    heads = []
    for section in draft.sections:
        places = enumerate(section.items) if section.repeat == 1 else ()
        for first, node in ((at, item.node) for at, item in places if _product(item.node, "forward", "nt")):
            back = [
                at
                for at, item in enumerate(section.items)
                if item.node.phase == "backward" and item.node.path == node.path
            ]
            products = any(_product(section.items[at].node, "backward", "nn", "tn") for at in back)
            if products and layer_of(node.path) is None and any(draft.role(t) in HELD for t in node.reads):
                heads.append(Head(section, first, back[-1]))
    return max(heads, key=lambda head: head.product.work.n, default=None)


def _product(node: Node, phase: str, *layouts: str) -> bool:
    return node.kind == "gemm" and node.phase == phase and LAYOUT.choices[node.work.layout] in layouts


def _sums(node: Node) -> bool:
    """Whether a node sums over tokens: the product for the weights' gradient."""
    return _product(node, "backward", "tn")


def _loop(draft: Draft, head: Head, way: str, fused_gradients: bool) -> None:
    """Puts in the place of the section what comes before head and loss, their chunks, and what comes after."""
    op, section = head.product.work, head.section
    tokens = chunk_tokens(way, op.m, op.n, op.k)
    parts, loop = Fraction(op.m, tokens), Section([], -(-op.m // tokens), {}, "", 0)
    before, inside, after = _split_at_head(head)
    if way == LIGER:
        inside = _one_kernel(head, inside)
    begin, loop.items = _adding(draft, inside, fused=fused_gradients or way == LIGER)
    ahead, behind = section.items[: head.first], section.items[head.last + 1 :]
    pieces = [
        Section([*ahead, *before, *begin], 1, dict(section.steps), section.stack, section.stride),
        loop,
        Section([*after, *behind], 1, dict(section.steps), section.stack, section.stride),
    ]
    position = next(index for index, other in enumerate(draft.sections) if other is section)
    draft.sections[position : position + 1] = [piece for piece in pieces if piece.items]
    _shrink(draft, loop, op.m, parts)


def _shrink(draft: Draft, loop: Section, tokens: int, parts: Fraction) -> None:
    """Has the nodes of the loop work on a part of the ``tokens``; what nobody else needs is of a chunk's own."""
    others = {t for section, item in draft.walk() if section is not loop for t in item.node.touches}
    sums = {t for item in loop.items if _sums(item.node) for t in item.node.writes}
    names = {}
    for tensor in dict.fromkeys(t for item in loop.items for t in item.node.writes):
        if tensor not in others and draft.role(tensor) != "gradient":
            along = tensor not in sums and draft.numel(tensor) >= tokens
            size = draft.sizes[tensor] / (parts if along else 1)
            names[tensor] = draft.local(loop, float(size), draft.dtype(tensor), draft.role(tensor))
    for item in loop.items:
        op = item.node.op
        adds = op is not None and op.kind == "elementwise" and not sums.isdisjoint(item.node.reads)
        if op is not None and not adds and "tokens" in axes(op):
            item.compute(share(op, "tokens", parts, uneven=True))
        item.rename(names)
        item.change(phase="forward")


def _split_at_head(head: Head) -> tuple[list[Item], list[Item], list[Item]]:
    """Nodes between the products: what does not need logits, what does, and what needs gradients made of them."""
    chunked: set[int] = set(head.product.writes)
    gradients: set[int] = set()
    before: list[Item] = []
    inside: list[Item] = []
    after: list[Item] = []
    for item in head.items:
        node = item.node
        if node is head.product or not chunked.isdisjoint(node.reads):
            inside.append(item)
            (gradients if _product(node, "backward", "nn", "tn") else chunked).update(node.writes)
        elif not gradients.isdisjoint(node.touches):
            after.append(item)
            gradients.update(node.writes)
        else:
            before.append(item)
    return before, inside, after


def _one_kernel(head: Head, inside: Sequence[Item]) -> list[Item]:
    """Products with one kernel between them that puts the logits' gradient in their place."""
    product, (logits, *_) = head.product, head.product.writes
    op = product.work
    products = [item for item in inside if item.node.kind == "gemm"]
    losses = [item.node for item in inside if not any(item is other for other in products)]
    outside = dict.fromkeys(t for node in losses for t in node.reads)
    written = dict.fromkeys(t for node in losses for t in node.writes)
    gradient = next(t for t in products[-1].node.reads if t in written)
    reads = (logits, *(t for t in outside if t not in written and t != logits))
    scalars = tuple(t for t in written if t != gradient)
    loss = make_op("cross_entropy", tokens=op.m, vocab=op.n, dtype=op.out_dtype)
    node = kernel(loss, "liger.cross_entropy", Location("forward", losses[0].path), reads, (logits, *scalars))
    for item in products:
        item.rename({gradient: logits})
    return [products[0], Item(node), *products[1:]]


def _adding(draft: Draft, inside: list[Item], fused: bool) -> tuple[list[Item], list[Item]]:
    """Chunks add to the gradient of the output weights: the product by itself where ``fused``, else autograd after it.

    Returns what fills it with zeros before, and the nodes of a chunk.
    """
    begin: list[Item] = []
    chunk: list[Item] = []
    for item in inside:
        chunk.append(item)
        node = item.node
        if not _sums(node):
            continue
        gradient = node.writes[0]
        numel, dtype = draft.numel(gradient), draft.dtype(gradient)
        if gradient not in node.reads:
            near = Location("forward", node.path)
            zeros = elementwise("aten.zeros_like", numel, near, (), (gradient,), dtype, inputs=0, fn="fill")
            begin.append(Item(zeros))
        if fused:
            item.change(reads=tuple(dict.fromkeys((*node.reads, gradient))))
        else:
            share = draft.new(draft.sizes[gradient], dtype)
            item.change(writes=(share, *node.writes[1:]))
            chunk.append(Item(addition(gradient, share, numel, dtype, node)))
    return begin, chunk

"""What products of int8 write, where that is not 16 bits, and the kernels that come with it (FasterTransformer).

``stack.int8_results`` says it: ``int32`` sums as they are (``int8_mode`` 1), or ``int8`` (modes 2 and 3), for each of
which cuBLASLt has a product (``cublasINT8MMWrapper::Gemm``). What comes between two products then
(``BertLayerINT8.cc``, ``FfnLayerINT8.cc``, ``FusedAttentionLayerINT8.cu``):

- Queries, keys and values: a kernel of its own adds biases, rounds and puts them in order for fused attention
  (``invokeTrtAddQkvBias…``), which reads and writes int8. Another lays out what it wrote for the next product
  (``invokeRowMajorToCOL32``).
- Activations read results and write int8.
- Norms read results and the residual stream. That is in int8 where results are. Else it stays in 16 bits, and a kernel
  of its own rounds it for the product that reads it (``invokeQuantization``), twice a layer.
"""

from __future__ import annotations

from functools import partial

from ...datasets.dtypes import itemsize
from ...datasets.ops import make_op
from ..graph import Graph, Node
from ..question.plan import Plan
from .quantize import HIGH
from .rewriting.draft import Draft, Item, Section
from .rewriting.match import expand, find, rewrite, writes_of
from .rewriting.nodes import Ids, elementwise, kernel

INT8 = "int8"


def write_integers(graph: Graph, plan: Plan) -> Graph:
    """The graph whose products of int8 write what the stack says; itself where it says nothing."""
    results = plan.stack.int8_results
    return rewrite(graph, partial(_write, results=results)) if results and plan.quantization == INT8 else graph


def _write(draft: Draft, section: Section, results: str) -> bool:
    """Gives a section's tensors their formats, then the nodes that move them."""
    products = [item for item in find(section, ("gemm",)) if item.node.work.dtype == INT8]
    if not products:
        return False
    product_results = writes_of(products)
    others = [item for item in section.items if not any(item is product for product in products)]
    read_by_others = {t for item in others for t in item.node.reads}
    written = {t for item in others for t in item.node.writes if draft.dtype(t) in HIGH}
    operands = {t for item in products for t in _operands(draft, item)}
    for tensor in product_results:
        _retype(draft, section, tensor, results)
    for tensor in written | operands if results == INT8 else operands & written - read_by_others:
        _retype(draft, section, tensor, INT8)
    for item in products:
        item.compute(item.node.work.replace(out_dtype=results))
    for item in others:
        if item.node.kind != "attention_prefill" and not product_results.isdisjoint(item.node.reads):
            _move(draft, item)
    expand([section], partial(_attend, draft, product_results))
    _round(draft, section, products)
    return True


def _operands(draft: Draft, product: Item) -> Ids:
    """What a product multiplies with its weight, where that is still in 16 bits."""
    op = product.node.work
    wide = (t for t in product.node.reads if draft.dtype(t) in HIGH and draft.role(t) not in ("weight", "frozen"))
    return tuple(t for t in wide if draft.numel(t) == op.m * op.k)


def _retype(draft: Draft, section: Section, tensor: int, dtype: str) -> None:
    numel, ids = draft.numel(tensor), section.ids(tensor)
    draft.sizes[ids], draft.dtypes[ids] = round(numel * itemsize(dtype)), draft.code(dtype)


def _move(draft: Draft, item: Item) -> None:
    """A pointwise kernel or a norm reads what it reads now: bytes in units of the narrowest of its large inputs."""
    op, node = item.node.op, item.node
    if op is None or not node.writes:
        return
    out = draft.dtype(node.writes[0])
    numel = draft.numel(node.writes[0])
    large = [t for t in node.reads if draft.numel(t) == numel]
    narrowest = min((draft.dtype(t) for t in large), key=itemsize, default=op.dtype)
    if op.kind == "elementwise":
        read_bytes = sum(int(draft.sizes[t]) for t in large)
        inputs = round(read_bytes / (numel * itemsize(narrowest)))
        item.compute(op.replace(inputs=max(inputs, 1), dtype=narrowest, out_dtype=out))
    else:
        item.compute(op.replace(dtype=narrowest, out_dtype=out))


def _attend(draft: Draft, product_results: set[int], section: Section, item: Item) -> list[Item]:
    """Fused attention in int8, between the kernel that rounds what it reads and the one that lays out its result."""
    node, op = item.node, item.node.op
    if op is None or op.kind != "attention_prefill" or product_results.isdisjoint(node.reads):
        return [item]
    results = tuple(t for t in node.reads if t in product_results)
    copies = {t: draft.local(section, draft.numel(t), INT8) for t in results}
    before = _pass("fused.add_bias", draft, node, results, tuple(copies.values()))
    out = node.writes[0]
    _retype(draft, section, out, INT8) if draft.dtype(out) in HIGH else None
    row_major = draft.local(section, draft.numel(out), INT8)
    after = _pass("fused.lay_out", draft, node, (row_major,), (out,))
    reads = tuple(copies.get(t, t) for t in node.reads)
    item.compute(op.replace(dtype=INT8, out_dtype=INT8), reads=reads, writes=(row_major, *node.writes[1:]))
    return [before, item, after]


def _pass(source: str, draft: Draft, near: Node, reads: Ids, writes: Ids) -> Item:
    """A kernel that reads and writes each element once."""
    numel = sum(map(draft.numel, writes))
    return Item(elementwise(source, numel, near, reads, writes, draft.dtype(reads[0]), draft.dtype(writes[0])))


def _round(draft: Draft, section: Section, products: list[Item]) -> None:
    """A kernel that rounds what is left in 16 bits before the first product that reads it."""
    rounded: dict[int, int] = {}
    for product in products:
        node, op = product.node, product.node.work
        for tensor in _operands(draft, product):
            if tensor not in rounded:
                rounded[tensor] = draft.local(section, draft.numel(tensor), INT8)
                cast = make_op("quantize", draft.dtype(tensor), INT8, rows=op.m, cols=op.k, part="apply")
                rounding = kernel(cast, "fused.quantize", node, (tensor,), (rounded[tensor],))
                section.items.insert(section.place(product), Item(rounding))
        product.read_instead(rounded)

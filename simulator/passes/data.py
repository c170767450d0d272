"""Data parallelism and mixed precision: who sums gradients, in which dtype, and who holds what of the optimizer.

With ``zero_stage`` 0 (DDP; Li et al. 2020, arXiv 2006.15704) gradients are all-reduced in buckets. ZeRO (Rajbhandari et
al. 2020, arXiv 1910.02054) shards over the n ranks that hold the same weights the optimizer's state (1: gradients are
reduce-scattered, updated weights gathered), gradients too (2), weights too (3, FSDP: :mod:`.zero.sharded`). Bytes sent
per rank, with weights and gradients of Ψ bytes: 2Ψ(n-1)/n for stages 0 to 2, 3Ψ(n-1)/n for stage 3. With
``parallel.shard`` (HSDP) shards lie on fewer ranks and are all-reduced over the rest.

A graph is that of the only micro-batch of a step. The ``source`` of a node that belongs to the last of several begins
with ``sync.``, to the first with ``refresh.``; :func:`micro_batch_variant` leaves them out of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...datasets.dtypes import itemsize
from ..graph import GRADIENT, Graph, Node
from ..question.plan import Plan, Stack
from .micro_batches import REFRESH, SYNC, micro_batch_variant
from .rewriting.draft import Draft, Insertions, Item, Section
from .rewriting.nodes import Location, addition, collective, elementwise
from .zero.families import WeightFamily, families, rename_gradient, summing, units
from .zero.sharded import buckets, gather_weights, scatter_gradients
from .zero.update import insert_update

__all__ = ["data_parallel", "micro_batch_variant"]


def data_parallel(graph: Graph, plan: Plan) -> Graph:
    """The graph of one data rank. Unchanged for a single rank that keeps every dtype, and without an optimizer."""
    draft = Draft(graph)
    weight_families = families(draft, plan)
    if not any(node.kind == "adamw" for node, _ in graph.weighted()) or not _changes(weight_families, plan):
        return graph
    parallel, overlap = plan.parallel, plan.stack.overlap
    if plan.sums_whole_gradients:
        _main_gradients(draft, plan.stack)
    shards = {f.name: gather_weights(draft, plan, f) if parallel.shards_weights else f.weights for f in weight_families}
    weight_families = [family for family in weight_families if family.trained]
    summed = {
        f.name: scatter_gradients(draft, plan, f) if parallel.shards_gradients else f.gradients for f in weight_families
    }
    for family in weight_families:
        if not parallel.shards_gradients and "dp" in overlap:
            _sync_buckets(draft, plan, family)
        if parallel.gathers_updated_weights and "dp_gather" in overlap:
            _refresh_weights(draft, family)
    insert_update(draft, plan, weight_families, shards, summed)
    return draft.graph()


def _changes(weight_families: Sequence[WeightFamily], plan: Plan) -> bool:
    stack = plan.stack
    mixed = stack.master_weights or {stack.gradient_dtype, stack.moment_dtype} != {"same"}
    return (
        mixed
        or stack.fused_gradients
        or stack.gradient_clipping
        or any(family.group.ranks > 1 for family in weight_families)
    )


def _main_gradients(draft: Draft, stack: Stack) -> None:
    """Gradients in the stack's dtype: products write them themselves, or what autograd made is added to them."""
    touched: dict[int, list[tuple[Section, int]]] = {}
    for section in draft.sections:
        for position, item in enumerate(section.items):
            for tensor in item.node.writes:
                if draft.roles[tensor] == GRADIENT and item.node.phase != "optimizer":
                    touched.setdefault(tensor, []).append((section, position))
    insertions = Insertions()
    fused: dict[int, tuple[Item, list[float]]] = {}
    for gradient, places in touched.items():
        if stack.fused_gradients or stack.gradient_dtype not in ("same", draft.dtype(gradient)):
            section, position = places[-1]
            size, item = float(draft.sizes[gradient]), section.items[position]
            if _widen(draft, stack, gradient, places, insertions):
                fused.setdefault(id(item), (item, []))[1].append(size)
    insertions.apply()
    _stand_ins(draft, fused.values())


def _stand_ins(draft: Draft, fused: Iterable[tuple[Item, list[float]]]) -> None:
    """Products that add to gradients themselves hand autograd an empty tensor instead: one is kept for each shape.

    This is what Transformer Engine does for Megatron-Core (``get_dummy_wgrad``).
    """
    buffers: dict[float, int] = {}
    for item, sizes in fused:
        experts = getattr(item.node.work, "experts", 1) if item.node.kind == "grouped_gemm" else 1
        size = sum(sizes) / experts
        if size not in buffers:
            buffers[size] = draft.new(size, "bf16", "buffer")
        item.change(reads=(*item.node.reads, buffers[size]))


def _widen(
    draft: Draft, stack: Stack, gradient: int, places: list[tuple[Section, int]], insertions: Insertions
) -> bool:
    """One gradient in the stack's dtype: there from the start, and added to; whether the product itself adds."""
    section, position = places[-1]
    item, ids = section.items[position], section.ids(gradient)
    old = draft.dtype(gradient)
    dtype = old if stack.gradient_dtype == "same" else stack.gradient_dtype
    numel = float(draft.elements(ids[:1])[0])
    draft.sizes[ids] = round(numel * itemsize(dtype))
    draft.dtypes[ids] = draft.code(dtype)
    op, node = item.node.op, item.node
    if stack.fused_gradients and len(places) == 1 and op is not None and op.kind in ("gemm", "grouped_gemm"):
        item.change(op=op.replace(out_dtype=dtype), reads=tuple(dict.fromkeys((*node.reads, gradient))))
        return True
    addend, casts = rename_gradient(draft, gradient, places, numel * itemsize(old), old), []
    if stack.converts_gradients and dtype != old:
        product, addend = addend, draft.local(section, numel * itemsize(dtype), dtype)
        casts = [elementwise("aten._to_copy", numel, node, (product,), (addend,), old, dtype, frees=(product,))]
    insertions.after(section, position, [*casts, addition(gradient, addend, numel, dtype, node)])
    return False


def _sync_buckets(draft: Draft, plan: Plan, family: WeightFamily) -> None:
    """Sums each bucket beside the rest of the backward pass (stages 0 and 1)."""
    insertions = Insertions()
    for section, position, path, gradients in buckets(draft, plan, family):
        insertions.after(section, position, _sums(draft, plan, family, gradients, path))
    insertions.apply()


def _sums(draft: Draft, plan: Plan, family: WeightFamily, gradients: tuple[int, ...], path: str) -> list[Node]:
    """The collectives that sum a bucket in place beside the backward pass; none for a single rank."""
    size, near = float(draft.sizes[list(gradients)].sum()), Location("backward", path)
    summed = near, gradients, gradients, draft.dtype(gradients[0])
    return [
        collective(kind, amount, group, *summed, stream="comm:dp", issuer=SYNC)
        for kind, amount, group in summing(plan, family, size)
    ]


def _refresh_weights(draft: Draft, family: WeightFamily) -> None:
    """Gathers updated weights layer by layer beside the first forward pass of the next step."""
    insertions, mine = Insertions(), set(family.weights.tolist())
    for unit in units(draft, ("forward",)) if family.shard.ranks > 1 else ():
        weights = tuple(t for t in unit.weights if t in mine)
        if weights:
            size, near = float(draft.sizes[list(weights)].sum()), Location("forward", unit.path)
            gather = "all_gather", size, family.shard, near, weights, weights, draft.dtype(weights[0])
            insertions.before(unit.section, unit.first, [collective(*gather, stream="comm:dp", issuer=REFRESH)])
    insertions.apply()

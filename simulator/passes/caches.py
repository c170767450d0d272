"""Caches of an engine: as large as :mod:`.kept` says of the kernel that keeps them.

A traced model keeps what its own code does, and its caches are cut with what is written into them; engines have blocks
of their own. So each kernel's caches get the size that its op asks for, after everything that shares work out among
ranks; what walks over memory, copies to the host and transfers then count the same bytes.
"""

from __future__ import annotations

from math import ceil

from ..graph import Graph
from ..question.plan import Plan
from .kept import TOKENWISE, cache_bytes, keeps
from .rewriting.draft import WHOLE_NUMBERS, Draft, Item, Section


def size_caches(graph: Graph, plan: Plan) -> Graph:
    """The graph with the caches of an engine; itself where the model's own code keeps them.

    Under ``stack.windows`` ``alike`` layers with a window keep all tokens of ``plan.context`` too.
    """
    if "paged_attention" not in plan.stack.fusion:
        return graph
    context = ceil(plan.context / plan.parallel.cp) if plan.stack.windows == "alike" else 0
    draft = Draft(graph)
    for section in draft.sections:
        _size(draft, section, context)
    return draft.graph()


def _size(draft: Draft, section: Section, context: int) -> None:
    """Give the caches of each kernel, in equal parts, the bytes that it keeps; one of its own where the trace has none.

    What the model's code keeps beside them is not there.
    """
    kernels = [(item, _caches(draft, item)) for item in section.items if keeps(item.node.op)]
    kernels = [(item, caches) for item, caches in kernels if caches or not _encodes(item)]
    for item, caches in kernels:
        op = item.node.work
        size = cache_bytes(op, context if op.kind in TOKENWISE else 0)
        if not caches:
            caches.append(draft.local(section, size, op.dtype, "cache"))
            item.change(reads=(*item.node.reads, *caches))
        for tensor in caches:
            draft.sizes[section.span(tensor)] = ceil(size / len(caches))
    kernel_caches = {t for _, caches in kernels for t in caches}
    for item in [i for i in section.items if kernels and not keeps(i.node.op)]:
        for tensor in set(_caches(draft, item)) - kernel_caches:
            draft.sizes[section.span(tensor)] = 0
        item.change(writes=tuple(t for t in item.node.writes if t not in kernel_caches))


def _encodes(item: Item) -> bool:
    """Whether a kernel attends in both directions, as encoders do, which no step reads again."""
    return item.node.kind in ("attention_prefill", "mla_prefill") and not item.node.work.causal


def _caches(draft: Draft, item: Item) -> list[int]:
    """The caches that a node touches, without counters of positions."""
    touched = dict.fromkeys(item.node.touches)
    return [t for t in touched if draft.role(t) == "cache" and draft.dtype(t) not in WHOLE_NUMBERS]

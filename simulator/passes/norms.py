"""Norms of inference engines: one kernel with the residual add before it, from layer to layer, or part of all-reduces.

``next_norm``: the add that ends a layer is part of the norm that begins the next. Engines carry the residual stream
from layer to layer beside what is added to it, so that each norm but the first adds too (``fused_add_rms_norm`` of vLLM
and SGLang, ``next_layer_layernorm`` of TensorRT-LLM). A layer that stands for many counts the first one's norm with an
add, and the last norm of the model without.

``reduced_norms``: an all-reduce of few bytes over tensor ranks adds the residual and normalises what it reduced, in one
kernel (FlashInfer's and TensorRT-LLM's): its op says ``norm=yes``. Each takes one norm. Larger ones are reduced first.
Engines do so on some devices and for some models alone (:class:`..question.kernels.ReducedNorm`).

``reduce_once``: where two all-reduces of the same ranks are added, what is added is reduced once: shared experts and
routed ones that tensor ranks share out (``final_hidden_states`` of all three engines).

All come after sharding, which puts the all-reduces there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..graph import Graph
from ..question.kernels import ReducedNorm
from ..question.plan import Plan
from .expert import PRODUCTS
from .rewriting.draft import Draft, Item, Section
from .rewriting.match import distinct, drop, find, insert, read_instead, rewrite, weights_of

NEXT_NORM, REDUCE_ONCE = "next_norm", "reduce_once"
RULES = (NEXT_NORM, REDUCE_ONCE)
NORMS = ("rms_norm", "layer_norm")
ADDED = ("fused.add_norm", "fused.residual_norm")
SUMS = ("add", "add_", "pointwise")


def fuse_next_norm(graph: Graph, plan: Plan) -> Graph:
    """The graph whose repeated layers leave their last add to the norm of the next."""
    return rewrite(graph, _carry) if NEXT_NORM in plan.stack.fusion else graph


def fuse_allreduce_norm(graph: Graph, plan: Plan) -> Graph:
    """The graph whose small all-reduces normalise too: what is a part of them is a kernel no more."""
    mixture = any(node.kind in PRODUCTS for node in graph.nodes())
    choices = [choice for choice in plan.stack.reduced_norms if mixture or not choice.mixtures]
    return rewrite(graph, partial(_normalise, choices=choices)) if choices else graph


def reduce_once(graph: Graph, plan: Plan) -> Graph:
    """The graph that reduces the sum of two tensors, where it summed two that were reduced."""
    return rewrite(graph, _reduce_sum) if REDUCE_ONCE in plan.stack.fusion else graph


def _reduce_sum(_: Draft, section: Section) -> bool:
    """Adds what two all-reduces would reduce and reduces the sum, where nobody else reads either before."""
    changed = False
    for item in [i for i in find(section, ("elementwise",)) if i.node.source.endswith(SUMS)]:
        before = section.items[: section.place(item)]
        reductions = {t: total for t in item.node.reads if (total := _reduced_alone(before, t)) is not None}
        totals = list(reductions.values())
        if len(totals) != 2 or totals[0].node.op != totals[1].node.op:
            continue
        one, other = reductions
        drop(section, totals)
        add = Item(replace(item.node, source="aten.add_", reads=(one, other), writes=(one,), frees=()))
        add.compute(item.node.work.replace(inputs=2))
        total = Item(replace(totals[0].node, reads=(one,), writes=(one,), frees=()))
        insert(section, section.place(item), (add, total))
        addends = tuple(t for t in item.node.reads if t != other)
        if addends == (one,):
            total.rename({one: item.node.writes[0]})
            add.change(writes=item.node.writes)
            drop(section, [item])
        else:
            item.compute(item.node.work.replace(inputs=len(addends)), reads=addends)
        changed = True
    return changed


def _reduced_alone(before: Sequence[Item], tensor: int) -> Item | None:
    """The all-reduce that touched a tensor last."""
    touched = [item for item in before if tensor in item.node.touches]
    return touched[-1] if touched and touched[-1].node.kind == "all_reduce" else None


def _carry(draft: Draft, section: Section) -> bool:
    """Moves the add that ends a layer into the norm that begins it, where both are there.

    A norm before that add (Gemma's, which a compiler runs with it) goes along: the kernel is then like those within
    the layers.
    """
    ending = _ending(section)
    if ending is None:
        return False
    last, entered = ending
    size = _numel(last)
    alike = next((i for i in section.items if _adds(i) and _numel(i) == size and i is not last), None)
    first = next((i for i in find(section, NORMS) if entered in i.node.reads), None)
    written = last.node.writes[0]
    added = [t for t in last.node.reads if _like(draft, section, t, written)]  # the layer's own output, residual first
    if alike is None or first is None or not added or _numel(first) != size:
        return False
    first.compute(alike.node.work, source=ADDED[0], reads=(*weights_of(draft, last.node), *first.node.reads))
    drop(section, [last])
    latest = _latest(section, added)
    maker = next(item for item in section.items if latest in item.node.writes)
    maker.change(reads=distinct((*maker.node.reads, *(t for t in added if t != latest))))  # the residual lives so long
    for item in section.items:
        item.rename({latest: written})
    return True


def _like(draft: Draft, section: Section, tensor: int, other: int) -> bool:
    """Whether a tensor can stand for another of each repetition."""
    alike = draft.sizes[tensor] == draft.sizes[other] and draft.dtypes[tensor] == draft.dtypes[other]
    return bool(alike and section.steps.get(tensor, 0) and draft.role(tensor) == "activation")


def _latest(section: Section, tensors: Sequence[int]) -> int:
    """The one that a section writes last."""
    positions = {t: at for at, item in enumerate(section.items) for t in item.node.writes}
    return max(tensors, key=lambda t: positions.get(t, -1))


def _ending(section: Section) -> tuple[Item, int] | None:
    """The add that makes what the next repetition begins with, and that tensor as this one reads it."""
    for item in reversed(find(section, ("elementwise",))):
        written, step = item.node.writes[0], section.steps.get(item.node.writes[0], 0)
        if len(item.node.writes) == 1 and section.repeat > 1 and step and section.steps.get(written - step, 0) == step:
            return item, written - step
    return None


def _normalise(draft: Draft, section: Section, choices: Sequence[ReducedNorm]) -> bool:
    """Takes norms with an add out where a fitting all-reduce of this layer or the one before made what they read."""
    before = len(section.items)
    totals: dict[int, Item] = {}  # the all-reduces that wrote tensors, those reduced last at the end
    for item in list(section.items):
        node = item.node
        reduced = [t for t in totals if t in node.reads and _fits(draft, item, totals[t], choices)]
        if reduced:
            _normalise_in(draft, section, item, totals[reduced[-1]], reduced[-1])
            continue
        totals = {t: total for t, total in totals.items() if t not in node.writes}
        if item.node.kind == "all_reduce":
            totals |= dict.fromkeys(node.writes, item)
    for item in section.items if section.repeat > 1 else ():
        last = {t: t + section.steps[t] for t in item.node.reads if section.steps.get(t, 0)}
        entered = [t for t in last if last[t] in totals and _fits(draft, item, totals[last[t]], choices)]
        if entered:
            _normalise_in(draft, section, item, totals[last[entered[0]]], entered[0])
            break
    return len(section.items) < before


def _fits(draft: Draft, norm: Item, total: Item, choices: Sequence[ReducedNorm]) -> bool:
    """Whether a kernel is a norm with an add before it that one of the choices does with the all-reduce before it."""
    op, node = total.node.work, norm.node
    weights = weights_of(draft, node)
    if not _adds(norm) or op.norm or (weights and node.reads[-len(weights) :] != weights):
        return False  # what was reduced is normalised before the add as well (Gemma)
    tokens = _numel(norm) / draft.numel(weights[0]) if weights else 0

    def fits(choice: ReducedNorm) -> bool:
        limits = (choice.most_mib * 2**20, op.size_bytes), (choice.most_tokens, tokens)
        return choice.ranks in (0, op.ranks) and all(not most or value <= most for most, value in limits)

    return any(fits(choice) for choice in choices)


def _normalise_in(draft: Draft, section: Section, norm: Item, total: Item, reduced: int) -> None:
    """Puts a norm into an all-reduce: who read what it made reads what was reduced, the first one the weight too."""
    total.compute(total.node.work.replace(norm="yes"))
    weights, written = weights_of(draft, norm.node), set(norm.node.writes)
    drop(section, [norm])
    reader = next((item for item in section.items if written.intersection(item.node.reads)), None)
    if reader is not None:
        reads = reader.node.reads
        reader.change(reads=distinct(new for t in reads for new in ((reduced, *weights) if t in written else (t,))))
    read_instead(section, dict.fromkeys(written, (reduced,)))


def _adds(item: Item) -> bool:
    """Whether a kernel is a norm that adds the residual first."""
    return item.node.source in ADDED and item.node.kind == "elementwise"


def _numel(item: Item) -> int:
    """Elements that a pointwise kernel or a norm works on."""
    op = item.node.work
    return int(op.numel if op.kind == "elementwise" else op.rows * op.cols)

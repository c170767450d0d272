"""Norms of inference engines: one kernel with the residual add before it, from layer to layer, or part of all-reduces.

``next_norm``: the add that ends a layer is part of the norm that begins the next. Engines carry the residual stream
from layer to layer beside what is added to it, so that each norm but the first adds too (``fused_add_rms_norm`` of vLLM
and SGLang, ``next_layer_layernorm`` of TensorRT-LLM). A layer that stands for many counts the first one's norm with an
add, and the last norm of the model without.

``reduced_norms``: an all-reduce of few bytes over tensor ranks adds the residual and normalises what it reduced, in the
time of the all-reduce (FlashInfer's and TensorRT-LLM's fused kernels). Larger ones are reduced first. Engines do so on
some devices and for some models alone (:class:`..question.plan.ReducedNorm`).

``reduce_once``: where two all-reduces of the same ranks are added, what is added is reduced once: shared experts and
routed ones that tensor ranks share out (``final_hidden_states`` of all three engines).

All come after sharding, which puts the all-reduces there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ...datasets.ops import Op
from ..graph import Graph
from ..question.plan import Plan, ReducedNorm
from .expert import PRODUCTS
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed

NEXT_NORM, REDUCE_ONCE = "next_norm", "reduce_once"
RULES = (NEXT_NORM, REDUCE_ONCE)
NORMS = ("rms_norm", "layer_norm")
ADDED = "fused.add_norm"
SUMS = ("add", "add_", "pointwise")


def carried(graph: Graph, plan: Plan) -> Graph:
    """The graph whose repeated layers leave their last add to the norm of the next."""
    return _rewritten(graph, _carry) if NEXT_NORM in plan.stack.fusion else graph


def reduced(graph: Graph, plan: Plan) -> Graph:
    """The graph whose small all-reduces normalise too: what is a part of them is a kernel no more."""
    mixture = any(node.op is not None and node.op.kind in PRODUCTS for node in graph.nodes())
    choices = [choice for choice in plan.stack.reduced_norms if mixture or not choice.mixtures]
    return _rewritten(graph, partial(_normalise, choices=choices)) if choices else graph


def summed(graph: Graph, plan: Plan) -> Graph:
    """The graph that reduces the sum of two tensors, where it summed two that were reduced."""
    return _rewritten(graph, _sum_first) if REDUCE_ONCE in plan.stack.fusion else graph


def _rewritten(graph: Graph, change: Callable[[Draft, Section], bool]) -> Graph:
    """The graph with each section changed; ``change`` says whether it did anything."""
    draft = Draft(graph)
    released = freed(draft)
    changed = [change(draft, section) for section in draft.sections]
    if not any(changed):
        return graph
    free_after_last_use(draft, released)
    return draft.graph()


def _sum_first(_: Draft, section: Section) -> bool:
    """Adds what two all-reduces would reduce and reduces the sum, where nobody else reads either before."""
    changed = False
    for item in [i for i in section.items if _kind(i) == "elementwise" and i.node.source.endswith(SUMS)]:
        before = section.items[: section.place(item)]
        made = {t: each for t in item.node.reads if (each := _reduced_alone(before, t)) is not None}
        if len(made) != 2 or len({each.node.op for each in made.values()}) != 1 or item.node.op is None:
            continue
        (one, other), whole = made, next(iter(made.values()))
        gone = {id(each) for each in made.values()}
        section.items = [each for each in section.items if id(each) not in gone]
        add = Item(replace(item.node, source="aten.add_", reads=(one, other), writes=(one,), frees=()))
        add.compute(item.node.op.replace(inputs=2))
        summed_once = Item(replace(whole.node, reads=(one,), writes=(one,), frees=()))
        rest = tuple(t for t in item.node.reads if t != other)
        if rest == (one,):
            summed_once.rename({one: item.node.writes[0]})
            add.change(writes=item.node.writes)
            section.items[section.place(item) : section.place(item) + 1] = [add, summed_once]
        else:
            item.compute(item.node.op.replace(inputs=len(rest)), reads=rest)
            at = section.place(item)
            section.items[at:at] = [add, summed_once]
        changed = True
    return changed


def _reduced_alone(before: Sequence[Item], tensor: int) -> Item | None:
    """The all-reduce that touched a tensor last."""
    touched = [item for item in before if tensor in (*item.node.reads, *item.node.writes)]
    return touched[-1] if touched and _kind(touched[-1]) == "all_reduce" else None


def _carry(draft: Draft, section: Section) -> bool:
    """Moves the add that ends a layer into the norm that begins it, where both are there."""
    ending = _ending(section)
    if ending is None:
        return False
    last, entered = ending
    size = _numel(last)
    alike = next((i.node.op for i in section.items if _adds(i) and _numel(i) == size), None)
    first = next((i for i in section.items if _kind(i) in NORMS and entered in i.node.reads), None)
    made = last.node.writes[0]
    added = [t for t in last.node.reads if _like(draft, section, t, made)]  # the layer's own output, residual first
    if alike is None or first is None or not added or _numel(first) != size:
        return False
    first.compute(alike, source=ADDED)
    section.items.remove(last)
    latest = _latest(section, added)
    maker = next(item for item in section.items if latest in item.node.writes)
    maker.change(reads=_distinct((*maker.node.reads, *(t for t in added if t != latest))))  # the residual lives so long
    for item in section.items:
        item.rename({latest: made})
    return True


def _like(draft: Draft, section: Section, tensor: int, other: int) -> bool:
    """Whether a tensor can stand for another of each repetition."""
    alike = draft.sizes[tensor] == draft.sizes[other] and draft.dtypes[tensor] == draft.dtypes[other]
    return bool(alike and section.steps.get(tensor, 0) and draft.role(tensor) == "activation")


def _latest(section: Section, tensors: Sequence[int]) -> int:
    """The one that a section writes last."""
    place = {t: at for at, item in enumerate(section.items) for t in item.node.writes}
    return max(tensors, key=lambda t: place.get(t, -1))


def _ending(section: Section) -> tuple[Item, int] | None:
    """The add that makes what the next repetition begins with, and that tensor as this one reads it."""
    for item in reversed(section.items):
        if _kind(item) == "elementwise" and len(item.node.writes) == 1 and not _adds(item):
            made = item.node.writes[0]
            step = section.steps.get(made, 0)
            entered = made - step
            if section.repeat > 1 and step and section.steps.get(entered, 0) == step:
                return item, entered
    return None


def _normalise(draft: Draft, section: Section, choices: Sequence[ReducedNorm]) -> bool:
    """Takes norms with an add out where a fitting all-reduce of this layer or the one before made what they read."""
    before = len(section.items)
    made: dict[int, Op] = {}  # what all-reduces wrote, those reduced last at the end
    for item in list(section.items):
        node = item.node
        found = [t for t in made if t in node.reads and _joined(draft, item, made[t], choices)]
        if found:
            _without(draft, section, item, found[-1])
            continue
        made = {t: op for t, op in made.items() if t not in node.writes}
        if node.op is not None and node.op.kind == "all_reduce":
            made |= dict.fromkeys(node.writes, node.op)
    for item in section.items if section.repeat > 1 else ():
        ended = {t: t + section.steps[t] for t in item.node.reads if section.steps.get(t, 0)}
        entered = [t for t, last in ended.items() if last in made and _joined(draft, item, made[last], choices)]
        if entered:
            _without(draft, section, item, entered[0])
            break
    return len(section.items) < before


def _joined(draft: Draft, norm: Item, op: Op, choices: Sequence[ReducedNorm]) -> bool:
    """Whether a kernel is a norm with an add that one of the choices does with the all-reduce before it."""
    if not _adds(norm):
        return False
    weights = [t for t in norm.node.reads if draft.role(t) in ("weight", "frozen")]
    tokens = _numel(norm) / draft.numel(weights[0]) if weights else 0

    def fits(choice: ReducedNorm) -> bool:
        limits = (choice.most_mib * 2**20, op.size_bytes), (choice.most_tokens, tokens)
        return choice.ranks in (0, op.ranks) and all(not most or value <= most for most, value in limits)

    return any(fits(choice) for choice in choices)


def _without(draft: Draft, section: Section, norm: Item, reduced: int) -> None:
    """Takes a norm out of a section: who read what it made reads what was reduced, and the norm's weight."""
    made = set(norm.node.writes)
    weights = tuple(t for t in norm.node.reads if draft.role(t) in ("weight", "frozen"))
    section.items.remove(norm)
    for item in section.items:
        if made.intersection(item.node.reads):
            reads = [t for each in item.node.reads for t in ((reduced, *weights) if each in made else (each,))]
            item.change(reads=_distinct(reads))
            weights = ()


def _distinct(tensors: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(tensors))


def _kind(item: Item) -> str:
    return item.node.op.kind if item.node.op is not None else ""


def _adds(item: Item) -> bool:
    """Whether a kernel is a norm that adds the residual first."""
    return item.node.source == ADDED and _kind(item) == "elementwise"


def _numel(item: Item) -> int:
    """Elements that a pointwise kernel or a norm works on."""
    op = item.node.op
    assert op is not None
    return int(op.numel if op.kind == "elementwise" else op.rows * op.cols)

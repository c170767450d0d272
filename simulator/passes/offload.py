"""Offload: what waits in host memory, and the copies that bring it and take it away, on a stream of their own.

``optimizer``: the host updates weights (:mod:`.host_update`). ``activations``: what a layer keeps for its backward
pass is copied out after its forward nodes and back before its backward nodes, one layer ahead. ``kv``: keys and values
live on the host; those that a layer attends to are copied in one layer ahead, in halves of a double buffer, and what it
appends is copied out, both beside compute (as FlexGen does; Sheng et al. 2023, arXiv 2303.06865, sec. 4.1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...datasets.loading import choice
from ..graph import ACTIVATION, CACHE, Graph
from ..question.plan import OFFLOAD, Plan, PlanError
from .host_update import COPY, COPY_OUT, update_on_host
from .pipeline import layer_stack
from .rewriting.draft import WHOLE_NUMBERS, Draft, Insertions, Item, Section, begin_token
from .rewriting.layers import Layer, layer_pairs, mapping, read_elsewhere, read_ids
from .rewriting.lifetimes import move_frees
from .rewriting.nodes import Location, copy_kernel
from .sharding.attention import attention_of


def offload(graph: Graph, plan: Plan) -> Graph:
    """The graph with the plan's offloads; unchanged without any. PlanError names one that is not known."""
    if not plan.offload:
        return graph
    for what in plan.offload:
        choice(PlanError, "offload", what, tuple(OFFLOAD))
    draft = Draft(graph)
    if "optimizer" in plan.offload:
        update_on_host(draft, plan)
    if "kv" in plan.offload:
        _caches(draft)
    if "activations" in plan.offload:
        _activations(draft, layer_stack(graph)[0])
    return draft.graph()


def _caches(draft: Draft) -> None:
    """Keeps caches on the host: what a layer attends to comes before it, what it appends goes out behind it.

    A copy in waits until the layer before has begun, so that two layers' caches are on the device at a time.
    """
    numbers = {draft.code(name) for name in WHOLE_NUMBERS}
    insertions = Insertions()
    for section in draft.sections:
        uses = _uses(draft, section, numbers)
        if not uses:
            continue
        token = begin_token(draft, section, 0)
        moved = sum(float(draft.sizes[tensor]) for tensor, use in uses.items() if use.comes or use.new == 1)
        spare = (draft.new(moved, "int8", "buffer"),) if section.repeat > 1 else ()
        for tensor, use in uses.items():
            size, node = float(draft.sizes[tensor]), section.items[use.first].node
            staging = draft.local(section, size, draft.dtype(tensor))
            for item in section.items:
                item.rename({tensor: staging})
                item.keep(staging)
            if use.comes:
                reads = (tensor, *token, *spare)
                come = copy_kernel("copy.cache_in", size, node, reads, (staging,), "h2d", stream=COPY)
                insertions.before(section, use.first, [come])
            elif tensor not in node.writes:  # an engine's kernel fills it and reads nothing of it
                first_use = section.items[use.first]
                others = tuple(t for t in first_use.node.reads if t != staging)
                first_use.change(reads=others, writes=(*first_use.node.writes, staging))
            if not use.new:
                section.items[use.last].free(staging)
                continue
            go = "copy.cache_out", size * use.new, node, (staging, *spare), (tensor,), "d2h"
            insertions.after(section, use.last, [copy_kernel(*go, frees=(staging,), stream=COPY_OUT)])
    insertions.apply()
    draft.sizes[(draft.roles == CACHE) & ~np.isin(draft.dtypes, list(numbers))] = 0


class CacheUse(NamedTuple):
    """Where a section first and last touches a cache, whether it comes from the host, and what part of it is new."""

    first: int
    last: int
    comes: bool
    new: float


def _uses(draft: Draft, section: Section, numbers: set[int]) -> dict[int, CacheUse]:
    """The use of every cache that a section touches; counters of positions stay on the device.

    Attention over more keys than queries reads what earlier steps have left; it appends its own tokens.
    """
    uses: dict[int, CacheUse] = {}
    for position, item in enumerate(section.items):
        node, call = item.node, attention_of(item.node)
        share = call.seq_q / call.seq_kv if call is not None else 0.0
        for tensor in dict.fromkeys(node.touches):
            if draft.roles[tensor] != CACHE or draft.dtypes[tensor] in numbers or not draft.sizes[tensor]:
                continue
            comes = tensor in node.reads and (call is None or share < 1)
            use = uses.setdefault(tensor, CacheUse(position, position, comes, 0.0))
            uses[tensor] = use._replace(last=position, new=share or use.new)
    return uses


# --- activations ---------------------------------------------------------------------------------------


def _activations(draft: Draft, stack: str) -> None:
    """Copies what each layer keeps out and back."""
    reads = read_ids(draft)
    moved: list[slice] = []
    late: list[slice] = []
    sent: list[tuple[Item, tuple[int, ...]]] = []
    offloaded: set[int] = set()
    for layer, partners in reversed(layer_pairs(draft, ("recompute", "backward"), stack)):
        activations = tuple(t for t in _saved_activations(draft, layer, partners, reads) if t not in offloaded)
        if not activations:
            continue
        offloaded.update(activations)
        size = float(draft.sizes[list(activations)].sum())
        moved += [layer.section.span(tensor) for tensor in activations]
        item, outside = _send(draft, layer, activations, size)
        sent.append((item, activations))
        for partner in partners:
            late += _fetch(draft, layer, partner, activations, size, outside)
    move_frees(draft, moved, sent, late)


def _saved_activations(
    draft: Draft, layer: Layer, partners: list[Layer], reads: dict[int, np.ndarray]
) -> tuple[int, ...]:
    """Activations that only this layer and its backward pass use."""
    section, others = layer.section, read_elsewhere(draft, reads, (layer, *partners))
    touched = dict.fromkeys(t for p in layer.positions for t in section.items[p].node.touches)
    freed = {t for item in section.items for t in item.node.frees}
    activations = []
    for tensor in touched:
        step = section.steps.get(tensor, 0)
        shared = section.repeat > 1 and not step
        twin = step != 0 and tensor - step in touched
        if draft.roles[tensor] != ACTIVATION or shared or twin or tensor in freed:
            continue
        used = all(reads[id(p.section)][mapping(layer, p)(tensor)] for p in partners)
        if used and not others[section.span(tensor)].any():
            activations.append(tensor)
    return tuple(activations)


def _send(draft: Draft, layer: Layer, activations: tuple[int, ...], size: float) -> tuple[Item, int]:
    """The copy out after a layer, and the empty tensor that stands for what is on the host."""
    section = layer.section
    outside = draft.local(section, 0, "int8", "buffer")
    last = layer.positions[-1]
    near = Location("forward", section.items[last].node.path)
    copy = Item(copy_kernel("copy.out", size, near, activations, (outside,), "d2h", stream=COPY))
    section.items.insert(last + 1, copy)
    return copy, outside


def _fetch(
    draft: Draft, layer: Layer, partner: Layer, activations: tuple[int, ...], size: float, outside: int
) -> list[slice]:
    """The copy back before a backward layer, waiting for the layer before it to begin; what it brings."""
    section, there = partner.section, mapping(layer, partner)
    names = {there(tensor): _local(draft, section, tensor) for tensor in activations}
    for item in section.items:
        item.rename(names)
    brought = set(names.values())
    position = next(p for p, item in enumerate(section.items) if not brought.isdisjoint(item.node.reads))
    reads = (there(outside), *begin_token(draft, section, position))
    near = Location("backward", section.items[position].node.path)
    copy = copy_kernel("copy.in", size, near, reads, tuple(names.values()), "h2d", stream=COPY)
    section.items.insert(position, Item(copy))
    return [section.span(copy_of) for copy_of in names.values()]


def _local(draft: Draft, section: Section, tensor: int) -> int:
    return draft.local(section, float(draft.sizes[tensor]), draft.dtype(tensor))

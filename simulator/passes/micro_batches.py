"""What each micro-batch of a step runs: gradients are summed with the last, weights gathered for the first.

Nodes say so in ``source``: ``sync.…`` belongs to the last micro-batch, ``refresh.…`` to the first. The optimizer runs
after the last. From the second on, gradients are added to those that are there.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ..graph import GRADIENT, Graph
from .rewriting.draft import Draft, Insertions, Item, Section
from .rewriting.nodes import addition
from .zero.families import rename_gradient

SYNC, REFRESH = "sync.", "refresh."
KEPT = 64  # graphs made last, which times and memory both ask for
_KNOWN: OrderedDict[tuple[int, bool, bool], tuple[Graph, Graph]] = OrderedDict()  # with the source, so its id stays


def micro_batch_variant(graph: Graph, first: bool, last: bool) -> Graph:
    """The graph of one micro-batch of several, from that of a step with a single one; unchanged when it is both."""
    if first and last:
        return graph
    key = id(graph), first, last
    if key not in _KNOWN:
        _KNOWN[key] = graph, _variant(graph, first, last)
        if len(_KNOWN) > KEPT:
            _KNOWN.popitem(last=False)
    return _KNOWN[key][1]


def least_variant(graph: Graph) -> Graph:
    """What every micro-batch runs at least: nothing of the first or the last, and no adding to gradients of others."""
    return _variant(graph, first=False, last=False, adds=False)


def _variant(graph: Graph, first: bool, last: bool, adds: bool = True) -> Graph:
    draft = Draft(graph)
    if not last:
        _keep_gathered(draft)
    for section in draft.sections:
        section.items = [item for item in section.items if _runs(item, first, last)]
    if adds and not first:
        _accumulate(draft)
    return draft.graph()


def _runs(item: Item, first: bool, last: bool) -> bool:
    node = item.node
    if node.phase == "optimizer" or node.source.startswith(SYNC):
        return last
    return first or not node.source.startswith(REFRESH)


def _keep_gathered(draft: Draft) -> None:
    """Weights gathered once for all micro-batches stay until the last."""
    kept = np.zeros(len(draft.sizes), dtype=bool)
    for section, item in draft.walk():
        if item.node.source.startswith(REFRESH):
            for tensor in item.node.writes:
                kept[section.ids(tensor)] = draft.role(tensor) == "buffer"
    if not kept.any():
        return

    gathered = np.flatnonzero(kept).tolist()
    for _, item in draft.walk():
        if not item.node.source.startswith(REFRESH):
            item.keep(*gathered)


def _accumulate(draft: Draft) -> None:
    """Gradients that this micro-batch writes afresh and that stay are added to what is there."""
    written: dict[int, list[tuple[Section, int]]] = {}
    leaving: set[int] = set()
    for section in draft.sections:
        for position, item in enumerate(section.items):
            node = item.node
            if node.phase == "optimizer" or node.source.startswith(SYNC):
                continue
            leaving.update(t for t in node.frees if draft.roles[t] == GRADIENT)
            for tensor in node.writes:
                if draft.roles[tensor] == GRADIENT:
                    written.setdefault(tensor, []).append((section, position))
    insertions = Insertions()
    for gradient, places in written.items():
        section, position = places[0]
        if gradient in leaving or gradient in section.items[position].node.reads:
            continue
        numel, dtype = float(draft.elements(np.array([gradient]))[0]), draft.dtype(gradient)
        total = rename_gradient(draft, gradient, places, float(draft.sizes[gradient]), dtype)
        section, position = places[-1]
        insertions.after(section, position, [addition(gradient, total, numel, dtype, section.items[position].node)])
    insertions.apply()

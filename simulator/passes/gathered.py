"""Gathered operands that stay: sequence parallelism whose backward pass uses what the forward pass has gathered.

Megatron-LM gathers a layer's inputs again for its backward pass and keeps a shard (Korthikanti et al. 2022, arXiv
2205.05198, sec. 4.2.2); other frameworks keep the whole tensor and save the collective (``stack.keep_gathered``).
"""

from __future__ import annotations

from ..graph import Graph, Node
from ..question.plan import Plan
from .pipeline import layer_stack
from .rewriting.draft import Draft, Item
from .rewriting.layers import Layer, layer_pairs, mapping
from .rewriting.lifetimes import move_frees


def keep_gathered(graph: Graph, plan: Plan) -> Graph:
    """The graph without the backward pass's second gathers of what tensor ranks share; unchanged where none is kept."""
    if not plan.stack.keep_gathered or not plan.parallel.sequence_parallel:
        return graph
    draft, stack = Draft(graph), layer_stack(graph)[0]
    moved: list[slice] = []
    late: list[slice] = []
    frees: list[tuple[Item, tuple[int]]] = []
    for layer, partners in layer_pairs(draft, ("backward",), stack):
        items = [layer.section.items[position] for position in layer.positions]
        gathers = {item.node.reads[0]: item for item in items if _gathers(item.node)}
        for shard, item in gathers.items():
            used = [_replace(layer, partner, shard, item.node.writes[0]) for partner in partners]
            if not all(used):
                continue
            gathered = item.node.writes[0]
            moved += [layer.section.span(gathered), layer.section.span(shard)]
            late += [partner.section.span(mapping(layer, partner)(gathered)) for partner in partners]
            readers = [i for i in layer.section.items if shard in i.node.touches]
            frees.append((readers[-1], (shard,)))
    move_frees(draft, moved, frees, late)
    return draft.graph()


def _gathers(node: Node) -> bool:
    return node.group == "tp" and node.kind == "all_gather"


def _replace(layer: Layer, partner: Layer, shard: int, gathered: int) -> bool:
    """Takes the second gather of a part out of a backward layer; whether that was its only use there."""
    section, there = partner.section, mapping(layer, partner)
    uses = [item for item in section.items if there(shard) in item.node.reads]
    if len(uses) != 1 or not _gathers(uses[0].node):
        return False
    section.items.remove(uses[0])
    for item in section.items:
        item.rename({uses[0].node.writes[0]: there(gathered)})
    return True

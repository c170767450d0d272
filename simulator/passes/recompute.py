"""Activation recomputation: what the forward pass lets go of is computed again before its backward pass.

A *region* is a set of a layer's forward nodes. Tensors that it makes are freed as soon as the forward pass has done
with them; the nodes that make what the backward pass reads are copied in front of the first backward node that reads it
(phase ``recompute``, collectives included), and what they read is kept until then. Policies (``plan.recompute``):

- ``full``: each layer is one region, its input alone is kept (Chen et al. 2016, arXiv 1604.06174); ``full:N``: the
  first N layers of every pipeline chunk (Megatron-LM's ``block`` method); ``layers:0-15,31``: the layers named;
- ``selective``: the attention core (Korthikanti et al. 2022, arXiv 2205.05198, sec. 5); ``selective:core_attn,mlp,…``:
  the modules named, as Megatron-Core's ``recompute_modules``. Those in ``DISCARDED`` let go of their outputs too;
- ``ops``: each layer but the results of attention, reduce-scatters and every second product (torchtitan's default).

``full`` ends each region with the last tensor that anybody reads, as torch's checkpoint does, or runs whole layers
again, as Megatron-LM's: ``stack.recompute_early_stop``, which the option of that name overrides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...datasets.counts import counted
from ...datasets.loading import nearest
from ...datasets.ops import KINDS
from ..graph import ACTIVATION, Block, Graph, Node, layer_of, shift_path
from ..question.plan import Plan, PlanError
from .pipeline import boundaries, layer_stack, slice_block
from .rewriting.draft import Draft, Item, Section
from .rewriting.layers import Layer, layer_pairs, mapping, read_elsewhere, read_ids
from .rewriting.lifetimes import move_frees
from .rewriting.match import insert

MODULES = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")
DISCARDED = ("moe_act", "layernorm", "mla_up_proj")
ATTENTION = ("attention_prefill", "mla_prefill")


@dataclass(frozen=True)
class RecomputedRegion:
    """Positions of forward nodes of a layer; ``saved`` ones keep what they make, the others run again.

    It ``discards`` its outputs when what others read of it goes too.
    """

    positions: frozenset[int]
    discards: bool = False
    saved: frozenset[int] = frozenset()


def recompute(graph: Graph, plan: Plan) -> Graph:
    """The graph with its policy of recomputation; unchanged for ``none`` and for graphs without a backward pass.

    PlanError names an unknown policy or module.
    """
    kind, _, detail = plan.recompute.partition(":")
    if plan.recompute == "none" or not any(node.phase == "backward" for node, _ in graph.weighted()):
        return graph
    stack, depth = layer_stack(graph)
    layers = _layers(kind, detail, plan, depth)
    modules = tuple(detail.replace("+", ",").split(",")) if kind == "selective" and detail else ("core_attn",)
    for module in modules:
        if module not in (*MODULES, "none"):
            raise PlanError(f"recompute=selective:{module}: no such module; {nearest(module, MODULES, 'choose from')}")
    graph = _cut(_passes_apart(graph, stack), stack, layers)
    rewriter = _Rewriter(Draft(graph), kind != "full" or early_stop(plan))
    for layer, partners in layer_pairs(rewriter.draft, ("backward",), stack):
        if layers[layer.first]:
            rewriter.apply(layer, partners, regions(layer, "full" if kind == "layers" else kind, modules))
    return rewriter.finish()


def early_stop(plan: Plan) -> bool:
    """Whether full recomputation ends with the last tensor that the backward pass reads: by option, else by stack."""
    choice = plan.settings.recompute_early_stop
    return plan.stack.recompute_early_stop if choice is None else choice


def _layers(kind: str, detail: str, plan: Plan, depth: int) -> np.ndarray:
    """Which layers are recomputed."""
    if kind == "full" and detail:
        count = _whole(detail, plan.recompute)
        p = plan.parallel
        starts = boundaries(depth, p.pp * p.vpp, p.stages, "the model")
        chosen = np.zeros(depth, dtype=bool)
        longest = int(np.diff(starts).max())
        if count > longest:
            raise PlanError(
                f"recompute={plan.recompute!r}: no pipeline chunk has more than {counted(longest, 'layer')}; take "
                f"full:{longest}, "
                "or full for all of them"
            )
        for first, last in pairwise(starts):
            chosen[first : min(first + count, last)] = True
        return chosen
    if kind == "layers":
        chosen = np.zeros(depth, dtype=bool)
        for span in detail.split(","):
            first, last = _range(span, plan.recompute, depth)
            chosen[first : last + 1] = True
        return chosen
    if kind not in ("full", "selective", "ops") or (detail and kind == "ops"):
        raise PlanError(
            f"recompute={plan.recompute!r} is not none, selective, selective:MODULES, full, full:N, layers:A-B or ops"
        )
    return np.ones(depth, dtype=bool)


def _range(span: str, policy: str, depth: int) -> tuple[int, int]:
    """First and last layer of ``A-B`` or ``A``; PlanError where they are the wrong way round or not there."""
    low, _, high = span.partition("-")
    first, last = _whole(low, policy), _whole(high or low, policy)
    if first > last:
        raise PlanError(f"recompute={policy!r}: {span} ends before it starts; take layers:{last}-{first}")
    if last >= depth:
        near = f"{first}-{depth - 1}" if high and first < depth else str(depth - 1)
        raise PlanError(
            f"recompute={policy!r}: the last of {counted(depth, 'layer')} is {depth - 1}; take layers:{near}"
        )
    return first, last


def _whole(text: str, policy: str) -> int:
    if not text.strip().isdigit():
        raise PlanError(f"recompute={policy!r}: {text!r} is not a number of layers; take full:4 or layers:0-3,8")
    return int(text)


def _passes_apart(graph: Graph, stack: str) -> Graph:
    """The graph without a block of a layer's both passes: the last layer has one where no other is like it.

    The block of the head and the loss stays whole.
    """
    blocks: list[Block] = []
    for block in graph.blocks:
        first = next((at for at, node in enumerate(block.nodes) if node.phase == "backward"), 0)
        halves = [replace(block, nodes=block.nodes[:first]), replace(block, nodes=block.nodes[first:])]
        both = block.repeat == 1 and all(_withinof(half, stack) for half in halves)
        blocks += halves if both else [block]
    return replace(graph, blocks=tuple(blocks))


def _cut(graph: Graph, stack: str, wanted: np.ndarray) -> Graph:
    """The graph with its folded layers split where the policy changes, and alike in forward and backward pass."""
    ranges = [_withinof(block, stack) for block in graph.blocks]
    edges = set((np.flatnonzero(np.diff(wanted)) + 1).tolist())
    for block, within in zip(graph.blocks, ranges, strict=True):
        if block.repeat > 1 and within:
            ends = (within[0], within[0] + (block.repeat - 1) * block.stride)
            edges |= {min(ends), max(ends) + within[1] - within[0]}
    cuts = np.array(sorted(edges))
    blocks: list[Block] = []
    for block, within in zip(graph.blocks, ranges, strict=True):
        if block.repeat == 1 or not within:
            blocks.append(block)
            continue
        layers = np.array([[within[0]], [within[1] - 1]]) + block.stride * np.arange(block.repeat)
        changes = np.flatnonzero(np.diff(np.searchsorted(cuts, layers, side="right")).any(axis=0)) + 1
        starts = [0, *changes.tolist(), block.repeat]
        blocks += [slice_block(block, a, b - a, None) for a, b in pairwise(starts)]
    return replace(graph, blocks=tuple(blocks))


def _withinof(block: Block, stack: str) -> tuple[int, int] | None:
    """The layers, to one beyond, of a block's first repetition."""
    layers = {layer[1] for layer in map(layer_of, {n.path for n in block.nodes}) if layer and layer[0] == stack}
    return (min(layers), max(layers) + 1) if layers else None


# --- what a policy recomputes --------------------------------------------------------------------------


def regions(layer: Layer, kind: str, modules: Sequence[str]) -> list[RecomputedRegion]:
    """The regions of a layer under a policy."""
    nodes = {position: layer.section.items[position].node for position in layer.positions}
    if kind == "full":
        return [RecomputedRegion(frozenset(nodes))]
    if kind == "ops":
        return [RecomputedRegion(frozenset(nodes), saved=_saved_positions(nodes))]
    recomputed = []
    for module in modules:
        chosen = frozenset(position for position, node in nodes.items() if _belongs(node, module))
        if module == "mla_up_proj" and chosen:
            chosen |= _until_attention(nodes, min(chosen))
        if chosen:
            recomputed.append(RecomputedRegion(chosen, module in DISCARDED))
    return recomputed


def _saved_positions(nodes: dict[int, Node]) -> frozenset[int]:
    """What torchtitan keeps: attention, reduce-scatters, and every second product."""
    kinds = {position: node.kind for position, node in nodes.items()}
    products = [position for position, kind in kinds.items() if kind == "gemm"]
    return frozenset([p for p, kind in kinds.items() if kind in (*ATTENTION, "reduce_scatter")] + products[::2])


def _belongs(node: Node, module: str) -> bool:
    names = node.path.split(".")
    kind = node.kind
    purpose = KINDS[kind].purpose if kind else ""
    expert = "experts" in names
    if module == "core_attn":
        return kind in ATTENTION or node.source.startswith("unfused.")
    if module == "layernorm":
        alone = names[-1] == "norm" and len(names) > 1 and names[-2].isdigit()  # the one norm of a layer of one mixer
        return alone or names[-1] in ("input_layernorm", "post_attention_layernorm", "ln_1", "ln_2", "norm1", "norm2")
    if module == "mla_up_proj":
        return names[-1] in ("q_b_proj", "kv_b_proj")
    if module == "moe_act":
        return expert and purpose in ("activation", "pointwise") and node.path.endswith(("experts", "act_fn"))
    if "shared_experts" in names or "shared_expert" in names:
        return module in ("shared_experts", "moe")
    within = "mlp" in names or "feed_forward" in names or "ffn" in names or "block_sparse_moe" in names
    return within and (module == "moe") == (expert or "gate" in names[-1:])


def _until_attention(nodes: dict[int, Node], first: int) -> frozenset[int]:
    """Nodes of the attention module itself between its up-projections and its core: rotation and concatenation."""
    module = nodes[first].path.rsplit(".", 1)[0]
    core = next((p for p, node in nodes.items() if node.kind in ATTENTION), first)
    return frozenset(p for p, node in nodes.items() if first <= p < core and node.path == module)


# --- rewriting -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """One layer and what of it runs again: region by position, and by tensor that nobody keeps."""

    layer: Layer
    region_of: dict[int, int]
    made: dict[int, int]

    def node(self, position: int) -> Node:
        return self.layer.section.items[position].node


class _Rewriter:
    """Copies regions into the backward pass and moves lifetimes accordingly."""

    def __init__(self, draft: Draft, early_stop: bool) -> None:
        self.draft, self.early_stop = draft, early_stop
        self.moved: list[slice] = []  # ids that are freed elsewhere from now on
        self.late: list[slice] = []  # ids that are freed after their last use in the backward pass
        self.frees: list[tuple[Item, tuple[int]]] = []
        self.copies: list[tuple[Section, Item, list[Item]]] = []
        self.reads = read_ids(draft)

    def apply(self, layer: Layer, partners: Sequence[Layer], chosen: Sequence[RecomputedRegion]) -> None:
        """Recompute regions of one layer, in every repetition."""
        chosen = sorted(chosen, key=lambda region: min(region.positions, default=0))
        inside = {p: number for number, region in enumerate(chosen) for p in region.positions}
        copies_of = self._copies_needed(layer, chosen, inside, partners)
        saved = {p for region in chosen for p in region.saved}
        work = _Work(layer, {p: number for p, number in inside.items() if p not in saved}, copies_of)
        for partner in partners:
            self._insert(work, partner)
        section = layer.section
        freed = {t for item in section.items for t in item.node.frees}
        for tensor in work.made:
            if tensor not in freed:
                self.moved.append(section.span(tensor))
                uses = [i for i in section.items if tensor in i.node.touches]
                self.frees.append((uses[-1], (tensor,)))

    def _copies_needed(
        self, layer: Layer, chosen: Sequence[RecomputedRegion], region_of: dict[int, int], partners: Sequence[Layer]
    ) -> dict[int, int]:
        """Tensors that regions make and that nobody else keeps, by region."""
        section = layer.section
        readers, others = section.readers(), read_elsewhere(self.draft, self.reads, (layer, *partners))
        copies_of: dict[int, int] = {}
        for position, number in region_of.items():
            for tensor in section.items[position].node.writes if position not in chosen[number].saved else ():
                step = section.steps.get(tensor, 0)
                carried = step != 0 and tensor - step in readers
                elsewhere = bool(others[section.span(tensor)].any())
                outside = any(p not in region_of for p in readers.get(tensor, ())) and not chosen[number].discards
                if self.draft.roles[tensor] == ACTIVATION and not (carried or elsewhere or outside):
                    copies_of[tensor] = number
        return copies_of

    def _insert(self, work: _Work, partner: Layer) -> None:
        """Puts copies of the nodes that make what a backward layer reads before the first node that reads it."""
        target = partner.section
        there = mapping(work.layer, partner)
        originals = {there(tensor): tensor for tensor in work.made}
        first: dict[int, int] = {}
        needed: set[int] = set()
        for position, item in enumerate(target.items):
            for tensor in (originals[t] for t in item.node.reads if t in originals):
                needed.add(tensor)
                first.setdefault(work.made[tensor], position)
        again = self._closure(work, needed)
        names = {t: 0 for p in again for t in work.node(p).writes}
        for tensor in names:
            names[tensor] = self.draft.local(target, float(self.draft.sizes[tensor]), self.draft.dtype(tensor))
            self.late.append(target.span(names[tensor]))
        for item in target.items:
            item.rename({t: names[original] for t, original in originals.items() if original in names})
        _feed(work, again, first)
        for number in sorted(first):
            copies = []
            positions = [p for p in again if work.region_of[p] == number]
            written = {t for p in positions for t in work.node(p).writes}
            for position in positions:
                node = work.node(position)
                inner = {t for t in node.reads if t in names and (t in work.made or t in written)}
                for tensor in node.reads:
                    if tensor not in inner and self.draft.roles[tensor] == ACTIVATION:
                        self.moved.append(target.span(there(tensor)))
                        self.late.append(target.span(there(tensor)))
                node = replace(
                    node,
                    phase="recompute",
                    path=shift_path(node.path, work.layer.stack, partner.first - work.layer.first),
                    reads=tuple(names[t] if t in inner else there(t) for t in node.reads),
                    writes=tuple(names[t] for t in node.writes),
                    frees=(),
                )
                copies.append(Item(node))
            self.copies.append((target, target.items[first[number]], copies))

    def _closure(self, work: _Work, needed: set[int]) -> list[int]:
        """Positions that run again, in order: what makes the needed tensors, and what makes what that reads."""
        if not self.early_stop:
            touched = {work.made[t] for t in needed}
            return sorted(p for p, number in work.region_of.items() if number in touched)
        again: list[int] = []
        closure = set(needed)
        for position in sorted(work.region_of, reverse=True):
            node = work.node(position)
            if closure & set(node.writes):
                again.append(position)
                closure.update(t for t in node.reads if t in work.made)
        return again[::-1]

    def finish(self) -> Graph:
        """The graph with all copies in place and every tensor freed after its last use."""
        for section, before, copies in self.copies:
            insert(section, section.place(before), copies)
        move_frees(self.draft, self.moved, self.frees, self.late)
        return self.draft.graph()


def _feed(work: _Work, again: Sequence[int], first: dict[int, int]) -> None:
    """Regions that other regions read run no later than those: completes ``first``, positions by region."""
    for position in reversed(again):
        reader = first.get(work.region_of[position])
        for tensor in work.node(position).reads:
            number = work.made.get(tensor)
            if number is not None and reader is not None:
                first[number] = min(first.get(number, reader), reader)

"""The optimizer's part of a step on one data rank: what is left to sum, the norm, the update, the weights' way back.

Masters and moments as in mixed-precision training (Micikevicius et al. 2018, arXiv 1710.03740, sec. 3.1): AdamW updates
fp32 masters where they are kept, which are then rounded to weights. Sharded, each rank updates its part and gathers the
rest (Rajbhandari et al. 2020, arXiv 1910.02054, sec. 5.1). Every node reads the weights it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from ....datasets.dtypes import itemsize
from ....datasets.ops import make_op
from ...graph import STATE, Node
from ...question.plan import Group, Plan
from ..micro_batches import REFRESH
from ..rewriting.draft import Draft, Item
from ..rewriting.nodes import Ids, Location, collective, elementwise, kernel, reduction
from .families import WeightFamily, summing

UPDATE = Location("optimizer", "optimizer")


def insert_update(
    draft: Draft,
    plan: Plan,
    weight_families: Sequence[WeightFamily],
    shards: Mapping[str, np.ndarray],
    summed: Mapping[str, np.ndarray],
) -> None:
    """Replaces the AdamW nodes. ``shards`` (or whole weights) and ``summed`` gradients are by family."""
    moments = _moments(draft)
    nodes: list[Node] = []
    parts = [_Part(draft, plan, family, shards[family.name], summed[family.name]) for family in weight_families]
    for update in parts:
        nodes += update.sums()
    if plan.stack.gradient_clipping:
        nodes += _clipping(draft, plan, parts)
    for update in parts:
        nodes += update.update(moments)
    for update in parts:
        nodes += update.gathered()
    for section in draft.sections:
        others = [item for item in section.items if item.node.kind != "adamw"]
        if len(others) < len(section.items):
            section.items = [*others, *map(Item, nodes)]
            nodes = []


def _moments(draft: Draft) -> dict[int, Ids]:
    """The states of every weight, by the weight's id: AdamW nodes name them in the order of the weights."""
    states_of: dict[int, Ids] = {}
    for _, item in draft.walk():
        if item.node.kind == "adamw":
            states = [t for t in item.node.reads if draft.roles[t] == STATE]
            weights = [t for t in item.node.writes if draft.roles[t] != STATE]
            for index, weight in enumerate(weights):
                states_of[weight] = tuple(states[index :: len(weights)])
    return states_of


class _Part:
    """One family's share of the optimizer's work."""

    def __init__(self, draft: Draft, plan: Plan, family: WeightFamily, shard: np.ndarray, summed: np.ndarray) -> None:
        self.draft, self.plan, self.family = draft, plan, family
        self.own: Ids = tuple(shard.tolist())
        self.gradients: Ids = tuple(summed.tolist())
        self.ranks = family.shard.ranks if plan.parallel.shards_optimizer else 1
        self.counts = draft.elements(family.weights)
        self.numel = float(np.ceil(self.counts / self.ranks).sum())
        self.gradient_dtype = draft.dtype(self.gradients[0]) if self.gradients else "fp32"
        self.weight_dtype = draft.dtype(int(family.weights[0]))
        narrow = itemsize(self.weight_dtype) < itemsize("fp32")
        self.mastered = plan.stack.master_weights and narrow

    def sums(self) -> list[Node]:
        """Sums of gradients that were not summed beside the backward pass."""
        if self.plan.parallel.shards_gradients or "dp" in self.plan.stack.overlap:
            return []
        size = float(self.draft.sizes[list(self.gradients)].sum())
        reads, dtype = (*self.own, *self.gradients), self.gradient_dtype
        return [
            collective(kind, amount, group, UPDATE, reads, self.gradients, dtype)
            for kind, amount, group in summing(self.plan, self.family, size)
        ]

    def pointwise(self, source: str, inputs: int, fn: str = "arithmetic", numel: float = 0.0) -> Node:
        """A kernel over this rank's gradients."""
        reads, writes, dtype = (*self.own, *self.gradients), self.gradients, self.gradient_dtype
        return elementwise(source, numel or self.numel, UPDATE, reads, writes, dtype, inputs=inputs, fn=fn)

    def update(self, moments: Mapping[int, Ids]) -> list[Node]:
        """The update of what this rank owns, and the rounding of masters to weights."""
        draft = self.draft
        dtype = "fp32" if self.mastered else self.weight_dtype
        moment = dtype if self.plan.stack.moment_dtype == "same" else self.plan.stack.moment_dtype
        shares = np.ceil(self.counts / self.ranks)
        states = np.array([moments[int(t)] for t in self.family.weights], dtype=np.int64)
        draft.sizes[states] = (shares * itemsize(moment)).astype(np.int64)[:, None]
        draft.dtypes[states] = draft.code(moment)
        held: Ids = tuple(states.T.ravel().tolist())
        apart = self.mastered and not self.plan.masters_are_shards
        masters = self._masters(shares) if apart else ()
        target = masters or self.own
        op = make_op("adamw", numel=round(self.numel), tensors=len(self.own), dtype=dtype, out_dtype=moment)
        reads = tuple(dict.fromkeys((*self.own, *self.gradients, *held, *masters)))
        nodes = [kernel(op, "aten._fused_adamw_", UPDATE, reads, (*target, *held))]
        if apart:
            copy = "aten._foreach_copy_", self.numel, UPDATE, (*self.own, *masters), self.own, "fp32", self.weight_dtype
            nodes.append(elementwise(*copy, fn="cast"))
        summed = self.plan.stack.fused_gradients or self.plan.stack.gradient_dtype != "same"
        if summed and not self.plan.parallel.shards_gradients:
            nodes.append(self.pointwise("aten.zero_", 0, "fill", float(self.counts.sum())))
        return nodes

    def _masters(self, shares: np.ndarray) -> Ids:
        """An fp32 copy of this rank's share of every weight."""
        first = self.draft.new(0, "fp32", "optimizer_state", len(shares))
        self.draft.sizes[first:] = (shares * itemsize("fp32")).astype(np.int64)
        return tuple(range(first, first + len(shares)))

    def gathered(self) -> list[Node]:
        """Updated weights from the ranks that updated them, unless the next forward pass gathers them.

        ``options.gather_dtype``: those that products read in few bits are rounded before (``fp8_param_gather``
        of Megatron-Core).
        """
        gathers = self.plan.parallel.gathers_updated_weights and "dp_gather" not in self.plan.stack.overlap
        if not gathers or self.ranks == 1:
            return []
        wire = self.plan.settings.gather_dtype or self.weight_dtype
        sizes = self.draft.sizes[list(self.own)].astype(float)
        if wire != self.weight_dtype:
            sizes *= np.where(self._rounded_apart(), itemsize(wire) / itemsize(self.weight_dtype), 1.0)
        return [collective("all_gather", float(sizes.sum()), self.family.shard, UPDATE, self.own, self.own, wire)]

    def _rounded_apart(self) -> np.ndarray:
        """Which weights are rounded for their products once a step: each rank rounds its part of them."""
        apart = np.zeros(len(self.own), dtype=bool)
        for section, item in self.draft.walk():
            op = item.node.op
            if op is None or op.kind != "quantize" or not item.node.source.startswith(REFRESH):
                continue
            mine = np.isin(self.own, np.concatenate([section.ids(t) for t in item.node.reads]))
            if mine.any():
                shard_op = op.replace(rows=ceil(op.rows / self.ranks))
                item.compute(shard_op)
                apart |= mine
        return apart


def _clipping(draft: Draft, plan: Plan, parts: Sequence[_Part]) -> list[Node]:
    """The norm of all gradients, over all ranks, and their scaling by it."""
    norm = draft.new(4, "fp32")
    nodes = []
    for update in parts:
        reads, dtype = (*update.own, *update.gradients), update.gradient_dtype
        nodes.append(reduction("aten._foreach_norm", update.numel, UPDATE, reads, (norm,), dtype))
    everyone = _everyone(plan)
    if everyone.ranks > 1:
        nodes.append(collective("all_reduce", 4, everyone, UPDATE, (norm, *parts[0].own), (norm,), "fp32"))
    for update in parts:
        scale = update.pointwise("aten._foreach_mul_", 1)
        nodes.append(replace(scale, reads=(*scale.reads, norm)))
    return nodes


def _everyone(plan: Plan) -> Group:
    cluster = plan.cluster
    ranks = plan.parallel.model_ranks * plan.dp
    together = min(ranks, cluster.devices_per_node)
    return Group("dp_cp", ranks, together, cluster.link if together == ranks else cluster.fabric)

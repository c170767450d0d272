"""The weights of a graph by who shares them: dense ones, and experts, whose copies lie on fewer ranks; frozen ones.

All ranks that hold the same weight sum its gradient. Dense weights are alike on every data and context rank, an
expert's only on the ranks that hold that expert (Megatron's expert-data group). ZeRO (Rajbhandari et al. 2020, arXiv
1910.02054) shards over all of them or, in HSDP (Zhao et al. 2023, arXiv 2304.11277), over some; the rest are replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...graph import FROZEN, GRADIENT, WEIGHT, Node, layer_of
from ...question.plan import Group, Plan
from ..rewriting.draft import Draft, Section


@dataclass(frozen=True)
class WeightFamily:
    """Weights that one process group holds alike, and their gradients, by id.

    ``shard`` are the ranks that one copy of what is sharded lies on, ``replicas`` those that hold the same shard.
    """

    name: str
    weights: np.ndarray
    gradients: np.ndarray
    group: Group
    shard: Group
    replicas: Group

    @property
    def trained(self) -> bool:
        """Whether an optimizer updates them."""
        return not self.name.startswith("frozen")


@dataclass(frozen=True)
class Unit:
    """Weights that consecutive nodes of a section read, gathered and let go of together: a layer, or what is outside.

    ``first`` and ``last`` are the positions of the first and the last node that reads one of them.
    """

    section: Section
    path: str
    weights: tuple[int, ...]
    first: int
    last: int


def families(draft: Draft, plan: Plan) -> list[WeightFamily]:
    """Dense weights and experts; where weights are sharded, frozen ones too, by format. None is without weights."""
    expert = _experts(draft)
    weight_families = []
    for name, group_name, mine in (("dense", "dp_cp", ~expert), ("expert", "edp", expert)):
        group = plan.group(group_name)
        weights, frozen, gradients = (np.flatnonzero(mine & (draft.roles == r)) for r in (WEIGHT, FROZEN, GRADIENT))
        members = [(name, weights, gradients)] if len(weights) else []
        for code in np.unique(draft.dtypes[frozen]) if plan.parallel.shards_weights else ():
            alike = frozen[draft.dtypes[frozen] == code]  # what is gathered at once has one format
            members.append((f"frozen {name} {draft.dtype_names[code]}", alike, gradients[:0]))
        weight_families += [WeightFamily(*member, group, *halves(group, plan)) for member in members]
    return weight_families


def halves(group: Group, plan: Plan) -> tuple[Group, Group]:
    """The ranks that shard and those that replicate: all and none, unless ``parallel.shard`` asks for fewer."""
    ranks = min(plan.parallel.shard or group.ranks, group.ranks)
    return plan.group(group.name, ranks), plan.group(group.name, group.ranks // ranks, ranks)


def summing(plan: Plan, family: WeightFamily, size: float) -> list[tuple[str, float, Group]]:
    """How gradients of ``size`` bytes are summed: (collective, bytes, ranks), in order."""
    steps = [("all_reduce", size, family.group)]
    if plan.parallel.shards_optimizer:
        ranks = family.shard.ranks
        steps = [("reduce_scatter", size, family.shard), ("all_reduce", size / ranks, family.replicas)]
    return [step for step in steps if step[2].ranks > 1]


def _experts(draft: Draft) -> np.ndarray:
    """Which tensors belong to experts: weights and gradients of the modules that run grouped products."""
    modules = {_module(item.node) for _, item in draft.walk() if item.node.kind == "grouped_gemm"}
    expert = np.zeros(len(draft.sizes), dtype=bool)
    if modules:
        for section, item in draft.walk():
            if item.node.phase != "optimizer" and _module(item.node) in modules:
                for tensor in item.node.touches:
                    if draft.roles[tensor] in (WEIGHT, FROZEN, GRADIENT):
                        expert[section.ids(tensor)] = True
    return expert


def _module(node: Node) -> str:
    return re.sub(r"\.\d+\b", ".N", node.path)


def layer_path(path: str) -> str:
    """The path of the layer that a module is in; empty outside of layers."""
    layer = layer_of(path)
    return f"{layer[0]}.{layer[1]}".lstrip(".") if layer else ""


def units(draft: Draft, phases: tuple[str, ...]) -> Iterator[Unit]:
    """The units that nodes of these phases read, section by section."""
    for section in draft.sections:
        reads: dict[str, dict[int, None]] = {}
        span: dict[str, tuple[int, int]] = {}
        for position, item in enumerate(section.items):
            if item.node.phase not in phases:
                continue
            weights = [t for t in item.node.reads if draft.roles[t] in (WEIGHT, FROZEN)]
            if weights:
                path = layer_path(item.node.path)
                reads.setdefault(path, {}).update(dict.fromkeys(weights))
                span[path] = (span.get(path, (position, 0))[0], position)
        for path, weights_of in reads.items():
            yield Unit(section, path, tuple(weights_of), *span[path])


def rename_gradient(draft: Draft, tensor: int, places: Sequence[tuple[Section, int]], size: float, dtype: str) -> int:
    """A tensor of its own for what the nodes up to the last of ``places``, where it is written, know as ``tensor``."""
    last = {id(section): (section, position) for section, position in places}
    sections = list(last.values())
    own = draft.local(sections[0][0], size, dtype) if len(sections) == 1 else draft.new(size, dtype)
    for section, position in sections:
        for item in section.items[: position + 1]:
            if item.node.phase != "optimizer" and tensor in item.node.touches:
                item.touch_instead({tensor: own})
    return own

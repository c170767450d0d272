"""Sharded weights and gradients: ZeRO-3 and FSDP (Zhao et al. 2023, arXiv 2304.11277), FSDP2, and ZeRO-2's gradients.

A layer's weights are gathered before its forward nodes and let go of after them, gathered again before its backward
nodes, and its gradients are cast, reduce-scattered and let go of. Gathers run on a stream of their own, one layer
ahead: an empty tensor that a layer's first node writes is what the next layer's gather waits for. Options of the plan:
``reshard_after_forward`` (default: without pipeline stages), ``reduce_every_micro_batch`` (the same default),
``flat_parameters`` (FSDP1, DeepSpeed: what is gathered is used in place, without copies), ``gather_dtype``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ....datasets.dtypes import itemsize
from ...graph import BUFFER, Node
from ...question.plan import Plan
from ..micro_batches import REFRESH, SYNC
from ..rewriting.draft import Draft, Insertions, Section, begin_token
from ..rewriting.nodes import Location, collective, copy_kernel, elementwise
from .families import Unit, WeightFamily, layer_path, units

FSDP = "fsdp."  # begins the source of what every micro-batch runs


Bucket = tuple[Section, int, str, tuple[int, ...]]  # section, position of the last writer, layer, gradients


def gather_weights(draft: Draft, plan: Plan, family: WeightFamily) -> np.ndarray:
    """Weights of a family become gathered copies; returns the ids of the shards that they are gathered from."""
    forward = list(_own_units(draft, family, ("forward",)))
    backward = list(_own_units(draft, family, ("recompute", "backward")))
    gatherer = _Gatherer(draft, plan, family)
    shards = [gatherer.shard(unit) for unit in forward]
    needed = {t for unit in backward for w in unit.weights for t in unit.section.ids(w).tolist()}
    reshard = plan.reshards_after_forward
    for unit in forward:
        lasting = any(t in needed for t in unit.weights)
        gatherer.gather(unit, "forward", FSDP if reshard else REFRESH)
        if (reshard and unit.path) or not lasting:
            unit.section.items[unit.last].free(*unit.weights)
    for unit in backward:
        if reshard and unit.path:
            unit = gatherer.copies(unit)
            gatherer.gather(unit, "backward", FSDP)
        unit.section.items[unit.last].free(*unit.weights)
    gatherer.insertions.apply()
    draft.roles[family.weights] = BUFFER
    return np.concatenate(shards) if shards else np.zeros(0, dtype=np.int64)


def _own_units(draft: Draft, family: WeightFamily, phases: tuple[str, ...]) -> Iterator[Unit]:
    """Units with the weights of a family alone, each weight outside of layers in the first unit that reads it."""
    mine = set(family.weights.tolist())
    for unit in units(draft, phases):
        weights = tuple(t for t in unit.weights if t in mine)
        if not unit.path:
            mine.difference_update(weights)
        if weights:
            yield replace(unit, weights=weights)


class _Gatherer:
    """Shards of weights, and the nodes that gather them."""

    def __init__(self, draft: Draft, plan: Plan, family: WeightFamily) -> None:
        self.draft, self.plan, self.family = draft, plan, family
        self.insertions = Insertions()
        self.shard_of = np.full(len(draft.sizes), -1, dtype=np.int64)
        self.stream = "comm:dp" if "dp" in plan.stack.overlap else "compute"

    @property
    def _mastered(self) -> bool:
        """Whether shards are fp32 masters; what no optimizer updates needs none, and DeepSpeed keeps them apart."""
        return self.plan.stack.master_weights and self.family.trained and not self.plan.stack.half_shards

    def shard(self, unit: Unit) -> np.ndarray:
        """A rank's part of a unit's weights, in fp32 where masters are kept: one tensor for every repetition."""
        numel = float(self.draft.elements(np.array(unit.weights)).sum())
        dtype = "fp32" if self._mastered else self.draft.dtype(unit.weights[0])
        size = np.ceil(numel / self.family.shard.ranks) * itemsize(dtype)
        role = "weight" if self.family.trained else "frozen"
        ids = unit.section.ids(self.draft.local(unit.section, size, dtype, role))
        for weight in unit.weights:
            self.shard_of[unit.section.ids(weight)] = ids
        return ids

    def copies(self, unit: Unit) -> Unit:
        """The unit reading copies of its weights that live in its own section only."""
        draft, section, renamed = self.draft, unit.section, {}
        for weight in unit.weights:
            size, dtype = float(draft.sizes[weight]), draft.dtype(weight)
            renamed[weight] = draft.local(section, size, dtype, "buffer")
            ids = section.ids(weight)
            own_ids = section.ids(renamed[weight])
            self.shard_of = np.concatenate([self.shard_of, np.full(len(draft.sizes) - len(self.shard_of), -1)])
            self.shard_of[own_ids] = self.shard_of[ids if len(ids) == len(own_ids) else ids[:1]]
        for item in section.items[unit.first : unit.last + 1]:
            if item.node.phase != "forward":
                item.read_instead(renamed)
        return replace(unit, weights=tuple(renamed.values()))

    def gather(self, unit: Unit, phase: str, prefix: str) -> None:
        """Puts before a unit: the cast of its shard, the gather, and the copies into place."""
        draft, section = self.draft, unit.section
        weights = unit.weights
        dtype, numel = draft.dtype(weights[0]), float(draft.elements(np.array(weights)).sum())
        shards, nodes = self._sources(unit), []
        send: tuple[int, ...] = shards
        frees: tuple[int, ...] = ()
        if self._mastered and itemsize(dtype) < itemsize("fp32"):
            share = numel / self.family.shard.ranks
            send = frees = (draft.local(section, share * itemsize(dtype), dtype, "buffer"),)
            waits = (*shards, *self._awaited(unit))
            cast = f"{prefix}cast", share, Location(phase, unit.path), waits, send, "fp32", dtype
            nodes.append(elementwise(*cast, fn="cast", stream=self.stream))
        if self.family.shard.ranks > 1:
            nodes += self._collected(unit, phase, prefix, send, frees, numel)
        self.insertions.before(section, unit.first, nodes)

    def _collected(
        self, unit: Unit, phase: str, prefix: str, send: tuple[int, ...], frees: tuple[int, ...], numel: float
    ) -> list[Node]:
        draft, plan, weights = self.draft, self.plan, unit.weights
        wire = plan.settings.gather_dtype or draft.dtype(weights[0])
        size, flat = numel * itemsize(wire), weights
        if not plan.settings.flat_parameters:
            flat = (draft.local(unit.section, size, wire, "buffer"),)
        reads = send if frees else (*send, *self._awaited(unit))
        near = Location(phase, unit.path)
        about = "all_gather", size, self.family.shard, near, reads, flat, wire
        nodes = [collective(*about, stream=self.stream, frees=frees, issuer=prefix)]
        if flat is not weights:
            nodes.append(copy_kernel(f"{prefix}split", size, near, flat, weights, frees=flat))
        return nodes

    def _sources(self, unit: Unit) -> tuple[int, ...]:
        """The shards of a unit, with their steps made known to its section."""
        section, sources = unit.section, {}
        for weight in unit.weights:
            ids = self.shard_of[section.ids(weight)]
            sources[int(ids[0])] = int(ids[1] - ids[0]) if len(ids) > 1 else 0
        section.steps.update({shard: step for shard, step in sources.items() if step})
        return tuple(sources)

    def _awaited(self, unit: Unit) -> tuple[int, ...]:
        """An empty tensor that the layer before this one writes as it begins; this one writes the next one's."""
        return () if self.stream == "compute" else begin_token(self.draft, unit.section, unit.first)


def buckets(draft: Draft, plan: Plan, family: WeightFamily) -> list[Bucket]:
    """Gradients of a family in the order they are ready, cut where they reach ``bucket_mib``, and where a layer ends.

    FSDP takes a layer whole. DDP cuts between parameters (torch's ``compute_bucket_assignment_by_size``): what one
    module makes is never cut, and what is left of a layer goes with its last bucket, where it has one.
    """
    mine = set(family.gradients.tolist())
    last: dict[int, tuple[int, int]] = {}
    for index, section in enumerate(draft.sections):
        for position, item in enumerate(section.items):
            if item.node.phase != "optimizer":
                last.update({t: (index, position) for t in item.node.writes if t in mine})
    ready: dict[tuple[int, int], list[int]] = {}
    for tensor, place in last.items():
        ready.setdefault(place, []).append(tensor)
    limit = np.inf if plan.parallel.shards_weights else plan.stack.bucket_mib * 2**20
    path_of = {place: draft.sections[place[0]].items[place[1]].node.path for place in ready}
    filled: list[Bucket] = []
    waiting: list[int] = []
    begun = 0  # buckets before those of the layer at hand
    places = sorted(ready)
    for place, following in zip(places, [*places[1:], None], strict=True):
        waiting += ready[place]
        layer = layer_path(path_of[place])
        ends = following is None or following[0] != place[0] or layer_path(path_of[following]) != layer
        complete = ends or following is None or path_of[following] != path_of[place]
        full = draft.sizes[waiting].sum() >= limit
        if ends and not full and len(filled) > begun:
            waiting = [*filled.pop()[3], *waiting]
        if ends or (full and complete):
            filled.append((draft.sections[place[0]], place[1], layer, tuple(waiting)))
            waiting = []
        begun = len(filled) if ends else begun
    return filled


def scatter_gradients(draft: Draft, plan: Plan, family: WeightFamily) -> np.ndarray:
    """Gradients of each bucket are cast, reduced and let go of; returns the ids of the shards that stay."""
    every = plan.reduces_every_micro_batch
    insertions, shards, buffer = Insertions(), [], _bucket_buffer(draft, plan, family)
    shard_of: dict[int, int] = {}
    for bucket in buckets(draft, plan, family):
        section, position, _, gradients = bucket
        shard, nodes = _scatter_bucket(draft, plan, family, bucket, FSDP if every else SYNC, buffer)
        insertions.after(section, position, nodes)
        shards.append(section.ids(shard))
        for gradient in gradients:
            shard_of.update(zip(section.ids(gradient).tolist(), shards[-1].tolist(), strict=True))
    _sum_shards(draft, shard_of, family.shard.ranks)
    insertions.apply()
    return np.concatenate(shards) if shards else np.zeros(0, dtype=np.int64)


def _sum_shards(draft: Draft, shard_of: dict[int, int], ranks: int) -> None:
    """Let sums over other ranks before the update (gradients of norms, under sequence parallelism) sum the shards."""
    for _, item in draft.walk():
        node = item.node
        if node.phase != "optimizer" or not node.group or not shard_of.keys() & set(node.reads):
            continue
        scattered = [tensor in shard_of for tensor in node.reads]
        elements = draft.elements(np.array(node.reads))
        kept_share = 1.0 - elements[scattered].sum() / elements.sum() * (1 - 1 / ranks)
        shards = tuple(dict.fromkeys(shard_of.get(tensor, tensor) for tensor in node.reads))
        size_bytes = int(np.ceil(node.work.size_bytes * kept_share))
        item.change(op=node.work.replace(size_bytes=size_bytes), reads=shards, writes=shards)


def _bucket_buffer(draft: Draft, plan: Plan, family: WeightFamily) -> int:
    """The buffer that gradients wait in, where the framework keeps one for good; -1 for none."""
    if not plan.stack.bucket_buffer or family.shard.ranks == 1:
        return -1
    return draft.new(plan.stack.bucket_mib * 2**20, draft.dtype(int(family.gradients[0])), "buffer")


def _scatter_bucket(
    draft: Draft, plan: Plan, family: WeightFamily, bucket: Bucket, prefix: str, buffer: int
) -> tuple[int, list[Node]]:
    section, _, path, gradients = bucket
    stack, old, ranks = plan.stack, draft.dtype(gradients[0]), family.shard.ranks
    dtype = old if stack.gradient_dtype == "same" else stack.gradient_dtype
    numel = float(draft.elements(np.array(gradients)).sum())
    size = numel * itemsize(dtype)
    fits = buffer >= 0 and size <= draft.sizes[buffer]
    flat = buffer if fits else draft.local(section, size, dtype)
    shard = draft.local(section, np.ceil(numel / ranks) * itemsize(dtype), dtype, "gradient")
    source, into = f"{prefix}flatten", (flat if ranks > 1 else shard,)
    near, stream = Location("backward", path), "comm:dp_reduce" if "dp" in stack.overlap else "compute"
    nodes = [  # torch._chunk_cat joins and converts in a kernel of its own, which is none of ATen's casts
        copy_kernel(source, size, near, gradients, into, frees=gradients)
        if old == dtype
        else elementwise(source, numel, near, gradients, into, old, dtype, frees=gradients)
    ]
    steps = [
        ("reduce_scatter", size, family.shard, (flat,), () if fits else (flat,)),
        ("all_reduce", size / ranks, family.replicas, (shard,), ()),
    ]
    for kind, amount, group, reads, frees in steps:
        if group.ranks > 1:
            about = kind, amount, group, near, reads, (shard,), dtype
            nodes.append(collective(*about, stream=stream, frees=frees, issuer=prefix))
    return shard, nodes

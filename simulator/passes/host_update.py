"""An optimizer on the host (ZeRO-Offload; Ren et al. 2021, arXiv 2101.06840): its states never come to the device.

Gradients go out, the host's cores update masters and moments in the host's memory, weights come back. Where gradients
are sharded (ZeRO-2 and 3) each shard leaves as soon as it is summed, beside the rest of the backward pass; its part
of the norm is taken before. Shards in 16 bits go out with each micro-batch, come back for the next one, and go out in
fp32 with the last (DeepSpeed's ``stage3.py``, ``partition_grads``). Else gradients go out before the update. FSDP's
shards live on the host, too, and come before each gather (``CPUOffloadPolicy``); DeepSpeed's stay on the device in 16
bits.

The update takes ``stack.host_bytes`` bytes of the host's memory for each parameter, at the rate that the cluster's host
keeps up for one rank of many (:meth:`opcast.datasets.clusters.Cluster.host_share_gbps`). Nothing runs beside it:
DeepSpeed and FSDP update when all gradients are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...datasets.dtypes import itemsize
from ...datasets.ops import make_op
from ..graph import GRADIENT, STATE, WEIGHT, Node
from ..question.plan import Plan
from .micro_batches import SYNC
from .rewriting.draft import Draft, Insertions, Item, Section
from .rewriting.match import expand
from .rewriting.nodes import Ids, copy_kernel, kernel, name_of, reduction

COPY, COPY_OUT = "copy", "copy_out"  # from the host and to it: PCIe carries both at once
ADAM_BYTES = 28.0  # that a fused update reads and writes for an fp32 parameter: p, g, m, v in, p, m, v out
ON_HOST = ("_foreach_mul_", "_foreach_copy_")  # scaling by the norm and rounding to weights, when the host updates


def update_on_host(draft: Draft, plan: Plan) -> None:
    """Moves the optimizer to the host, in place."""
    updates = [item for _, item in draft.walk() if item.node.kind == "adamw"]
    if not updates:
        return
    early, resident = plan.parallel.shards_gradients, not plan.masters_are_shards
    offloaded = _gradients_out(draft, resident, [item.node for item in updates]) if early else {}

    def on_host(_: Section, item: Item) -> list[Item]:
        if any(item is update for update in updates):
            return [Item(node) for node in _update(draft, plan, item.node, offloaded, resident)]
        return [] if _done_on_host(item.node, early) else [item]

    expand(draft.sections, on_host)
    if not resident:
        _weights_in(draft)
    draft.sizes[draft.roles == STATE] = 0


def _done_on_host(node: Node, early: bool) -> bool:
    """Whether a node of the optimizer has nothing left to do on the device."""
    if node.phase != "optimizer":
        return False
    return name_of(node) in ON_HOST or (early and name_of(node) == "_foreach_norm")


def _update(draft: Draft, plan: Plan, node: Node, offloaded: dict[int, int], resident: bool) -> list[Node]:
    """What takes the place of an update: gradients that go out now, the host's work, weights that come in."""
    op = node.work
    gradients = tuple(t for t in node.reads if draft.roles[t] == GRADIENT)
    weights = tuple(t for t in node.reads if draft.roles[t] == WEIGHT)
    outside = tuple(dict.fromkeys(offloaded[t] for t in gradients if t in offloaded))
    staying = tuple(t for t in gradients if t not in offloaded)
    nodes: list[Node] = []
    if staying:
        here, size = draft.new(0, "int8", "buffer"), op.numel * itemsize(op.dtype)
        nodes.append(_gone(size, (*weights, *staying), (here,), node))
        outside = (*outside, here)
    there = draft.new(0, "int8", "buffer")
    size = op.cost.bytes * plan.stack.host_bytes / ADAM_BYTES
    rate = plan.cluster.host_share_gbps(plan.stack.host_threads)
    work = make_op("host_pass", size_bytes=max(round(size), 1), host_mbps=max(round(rate * 1e3), 1))
    nodes.append(kernel(work, "host.adamw", node, (*weights, *outside), (there,)))
    if resident:
        back = op.numel * itemsize(draft.dtype(weights[0]))
        nodes.append(_come("copy.weights_in", back, (*weights, there), weights, node))
    return nodes


def _gradients_out(draft: Draft, resident: bool, updates: Sequence[Node]) -> dict[int, int]:
    """Sends each gradient out behind its last writer; by gradient, the empty tensor that stands for it on the host."""
    gradients = {t for node in updates for t in node.reads if draft.roles[t] == GRADIENT}
    last: dict[int, tuple[Section, Item, int]] = {}
    for section, item in draft.walk():
        for tensor in item.node.writes if item.node.phase != "optimizer" else ():
            ids = section.ids(tensor).tolist()
            if len(ids) == section.repeat and gradients.issuperset(ids):  # else chunks of a loop add to it
                last.update((t, (section, item, tensor)) for t in ids)
    norm, insertions = _norm(draft) if resident else (), Insertions()
    offloaded: dict[int, int] = {}
    for section, item, tensor in {(id(i), t): (s, i, t) for s, i, t in last.values()}.values():
        outside = draft.local(section, 0, "int8", "buffer")
        leaving = _Leaving(tensor, outside, norm, updates[0].work.dtype, resident)
        insertions.after(section, section.place(item), leaving.nodes(draft, section, item.node))
        offloaded.update(zip(section.ids(tensor).tolist(), section.ids(outside).tolist(), strict=True))
    insertions.apply()
    return offloaded


@dataclass(frozen=True)
class _Leaving:
    """A gradient that leaves for ``outside``, its norm taken. DeepSpeed's meets there what earlier micro-batches left,
    which comes back for it, and goes once more in the ``dtype`` of the update with the last of them."""

    tensor: int
    outside: int
    norm: Ids
    dtype: str
    summed_on_device: bool

    def nodes(self, draft: Draft, section: Section, writer: Node) -> list[Node]:
        """What follows the gradient's writer, in the same micro-batches."""
        mine: Ids = (self.tensor,)
        size = float(draft.sizes[self.tensor])
        numel, dtype = draft.numel(self.tensor), draft.dtype(self.tensor)
        last: list[Node] = []
        if self.norm:
            stream = writer.stream if writer.stream != "compute" else COPY_OUT
            last.append(replace(reduction("aten._foreach_norm", numel, writer, mine, self.norm, dtype), stream=stream))
        kernels: list[Node] = []
        if self.summed_on_device and dtype != self.dtype:
            earlier = draft.local(section, size, dtype, "buffer")
            kernels.append(_come("copy.gradients_in", size, mine, (earlier,), writer))
            last.append(_gone(float(numel * itemsize(self.dtype)), (*mine, earlier), (self.outside,), writer))
            mine = (*mine, earlier)
        kernels += [replace(node, source=SYNC + node.source) for node in last]
        kernels.append(replace(_gone(size, mine, (self.outside,), writer), frees=mine))
        prefix = SYNC if writer.source.startswith(SYNC) else ""
        return [
            node if node.source.startswith(SYNC) else replace(node, source=prefix + node.source) for node in kernels
        ]


def _gone(size: float, reads: Ids, writes: Ids, near: Node) -> Node:
    """A copy of gradients to the host."""
    return copy_kernel("copy.gradients_out", size, near, reads, writes, "d2h", stream=COPY_OUT)


def _come(source: str, size: float, reads: Ids, writes: Ids, near: Node) -> Node:
    """A copy from the host."""
    return copy_kernel(source, size, near, reads, writes, "h2d", stream=COPY)


def _norm(draft: Draft) -> Ids:
    """What the norm of all gradients is summed in; empty where nobody clips."""
    nodes = (item.node for _, item in draft.walk() if item.node.phase == "optimizer")
    return next((node.writes for node in nodes if name_of(node) == "_foreach_norm"), ())


def _weights_in(draft: Draft) -> None:
    """Brings shards from the host before whatever reads them."""

    def with_copy(section: Section, item: Item) -> list[Item]:
        node = item.node
        shards = tuple(t for t in node.reads if draft.roles[t] == WEIGHT and draft.sizes[t])
        if node.phase == "optimizer" or not shards:
            return [item]
        size = float(draft.sizes[list(shards)].sum())
        staging = draft.local(section, size, draft.dtype(shards[0]), "buffer")
        item.change(reads=(staging, *(t for t in node.reads if t not in shards)))
        item.free(staging)
        return [Item(_come("copy.weights_in", size, node.reads, (staging,), node)), item]

    expand(draft.sections, with_copy)
    draft.sizes[draft.roles == WEIGHT] >>= 20  # next to nothing, by which pipeline stages still share the update

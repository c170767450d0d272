"""Tensor parallelism: the work of every layer shared by the ranks of a node, as Megatron-LM shares it.

Shoeybi et al. 2019 (arXiv 1909.08053): a product out of the residual stream is cut by columns, the next one back into
it by rows; its result is a sum over ranks. The table of embeddings and the head of the model are cut by vocabulary.
With ``sequence_parallel`` (Korthikanti et al. 2022, arXiv 2205.05198) the residual stream is shared by tokens: gathered
before columns (once more in backward, for their weights' gradients) and scattered as it is summed after rows.

Summands that meet (attention and MLP side by side) are added and reduced once, but where each product reduces what it
makes by itself (``reduce_each``: ``RowLinear`` of TensorRT-LLM 0.5 to 0.7).

Nothing goes by names: :mod:`.sharding.linears` finds each weight's cut by data flow, :mod:`.sharding.shards` says what
each tensor is to the ranks, :mod:`.sharding.sharing` what of each op is left to one of them, and here the walk over the
graph puts the collectives where a sum meets an op that cannot go on with its summands, or a share one that needs the
whole.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS, Op
from ..graph import GRADIENT, Graph, Node
from ..question.errors import DegreeError
from ..question.options import ALL_TO_ALL
from ..question.plan import Group, Plan
from ..trace.optimizer import MOMENTS
from .rewriting.draft import Draft, Item, Section
from .rewriting.nodes import ALONE, collective, elementwise
from .rewriting.split import nearest
from .sharding.products import shared
from .sharding.shards import DONE, EXCHANGE, EXPERT_SUM, FEATURES, GRADIENT_SUM, SCALAR_SUM, SUM, VOCAB
from .sharding.sharing import RankWork, Sharing
from .zero.update import UPDATE

MAX_ROUNDS = 6


def tensor_parallel(graph: Graph, plan: Plan) -> Graph:
    """The graph of one tensor rank. PlanError where heads, widths or tokens cannot be shared by ``parallel.tp``."""
    if plan.parallel.tp == 1:
        return graph
    sharing = Sharing(Draft(graph), plan)
    for _ in range(MAX_ROUNDS):
        sharing.shards.dirty = False
        _TensorWalk(sharing, write=False).run()
        _check(sharing, graph.name)
        if not sharing.shards.dirty:
            break
    walk = _TensorWalk(sharing, write=True)
    walk.run()
    sharing.shards.sized()
    walk.finish()
    return sharing.draft.graph(notes=(*graph.notes, *sharing.notes()))


def _check(sharing: Sharing, name: str) -> None:
    """PlanError for the first size that ranks cannot share, with the nearest degree that shares all of them."""
    for degree, value in (("tp", sharing.plan.parallel.tp), ("etp", sharing.expert_parts)):
        limits = [limit for limit in sharing.limits if limit.degree == degree]
        broken = [limit for limit in limits if not limit.allows(value)]
        if broken:
            valid = [d for d in range(1, 2 * value) if all(limit.allows(d) for limit in limits)]
            take = min(valid, key=lambda d: (abs(d - value), d))
            why = f"parallel.{degree}={value} does not divide the {broken[0].size} {broken[0].what} of {name}"
            raise DegreeError(why, degree, value, take)
    if sharing.sequence and sharing.tokens % sharing.tp:
        why = f"parallel.sequence_parallel shares {sharing.tokens} tokens, which tp={sharing.tp} does not divide"
        take = nearest(sharing.tokens, sharing.tp)
        raise DegreeError(why, "tp", sharing.tp, take, " or sequence_parallel=false")


class _TensorWalk:
    """One pass over all nodes in order: it settles what every tensor is, or, with ``write``, rewrites the draft."""

    def __init__(self, sharing: Sharing, write: bool) -> None:
        self.sharing, self.shards, self.draft, self.write = sharing, sharing.shards, sharing.draft, write
        self.section: Section
        self.done: list[Item] = []
        self.gathered: dict[int, tuple[int, Item, bool]] = {}
        self.shards.pending[:] = 0

    def run(self) -> None:
        """Visit every node."""
        for section in self.draft.sections:
            if section.items and section.items[0].node.phase == "optimizer":
                continue
            self.section, self.done = section, []
            self.sharing.enter(section)
            for position, item in enumerate(section.items):
                self._visit(position, item)
            self._leave()
            if self.write:
                section.items = self.done

    def _visit(self, position: int, item: Item) -> None:
        node = item.node
        if node.phase == "optimizer":
            self.done.append(item)
            return
        work = self.sharing.carried(node)
        if work is None:
            node = self._settle(item)
            work = shared(self.sharing, position, node)
        elif self.write and self.sharing.sequence:
            self._keep_full(item)
        if self.write:
            self._rewrite(item, work)
        self.done.append(item)
        for tensor in node.writes:
            self._let_go(tensor)
            self.shards.wait(self.section, tensor, work.pending.get(tensor, 0))

    def _settle(self, item: Item) -> Node:
        """Sum over ranks what a node reads; several summands that a fused kernel would add up are added before."""
        node = item.node
        waiting = [t for t in node.reads if self.shards.pending[t] in (SUM, EXPERT_SUM)]
        alike = len({int(self.shards.numel[t]) for t in waiting}) == 1
        joint = node.op is not None and _adds(node.op) and node.source.startswith("fused.")
        if len(waiting) > 1 and alike and joint and not self.sharing.sequence and not self.sharing.reduce_each:
            first, *others = waiting
            for other in others:
                self._add(first, other, node)
                self.shards.wait(self.section, other, DONE)
            if self.write:
                item.change(reads=tuple(t for t in node.reads if t not in others))
        for tensor in node.reads:
            if self.shards.pending[tensor]:
                self._sum(tensor)
        return item.node

    def _add(self, tensor: int, other: int, near: Node) -> None:
        if self.write:
            numel, dtype = int(self.shards.numel[tensor]), self.draft.dtype(tensor)
            self.done.append(Item(elementwise("aten.add_", numel, near, (tensor, other), (tensor,), dtype, inputs=2)))

    def _keep_full(self, item: Item) -> None:
        """Summands that go into another sum are as large as all tokens until then."""
        for tensor in (t for t in item.node.frees if t in item.node.reads and self.shards.pending[t] == SUM):
            full = self.draft.local(self.section, int(self.draft.sizes[tensor]), self.draft.dtype(tensor))
            for other in (*self.done, item):
                other.rename({tensor: full})

    def _rewrite(self, item: Item, work: RankWork) -> None:
        """Give a node its share: the op, gathered operands, and the collectives over statistics before it."""
        node = item.node
        names = {tensor: self._gather(tensor, node, work) for tensor in work.gathers}
        reads, frees = tuple(names.get(t, t) for t in node.reads), node.frees
        moved = node.bytes_moved
        if work.op is not None and work.op is not node.op:
            moved = int(work.op.cost.bytes)
        elif node.op is None and work.parts != 1:
            moved = ceil(moved / work.parts)
        item.change(op=work.op, reads=reads, frees=frees, bytes_moved=moved)
        for tensor, full in names.items():
            self.gathered[tensor] = (full, item, work.exchanged)
        if work.statistics:
            self._statistics(item, work.statistics)

    # --- collectives ---------------------------------------------------------------------------------------

    def _gather(self, tensor: int, node: Node, work: RankWork) -> int:
        """The whole of a tensor that is shared by tokens, gathered before ``node`` unless this phase has it already."""
        full, item, exchanged = self.gathered.get(tensor, (0, None, False))
        if item is not None and item.node.phase == node.phase and exchanged == work.exchanged:
            return full
        self._let_go(tensor)
        group, size = self._scope(tensor, work.expert)
        dtype = self.draft.dtype(tensor)
        kind, size = self._exchange(size) if work.exchanged else ("all_gather", size)
        full = self.draft.local(self.section, size, dtype)
        issuer = ALONE if work.exchanged else "nccl."
        self.done.append(Item(collective(kind, size, group, node, (tensor,), (full,), dtype, issuer=issuer)))
        return full

    def _exchange(self, size: int) -> tuple[str, int]:
        """The collective between shares of features and of tokens of so many bytes, and the bytes of its buffer."""
        if self.sharing.sequence and self.sharing.exchange == ALL_TO_ALL:
            return "all_to_all", size // self.sharing.tp
        return "all_gather", size

    def _scope(self, tensor: int, expert: bool) -> tuple[Group, int]:
        """The group that holds the shares of a tensor of tokens, and its size when they are together."""
        size = int(self.draft.sizes[tensor])
        if expert and self.sharing.plan.parallel.etp > 1:
            return self.sharing.plan.group("etp"), size // self.sharing.token_shares
        return self.sharing.plan.group("tp"), size

    def _let_go(self, tensor: int) -> None:
        """Free what was gathered of a tensor with its last use: the tensor changes, or the section ends."""
        full, item, _ = self.gathered.pop(tensor, (0, None, False))
        if item is not None:
            item.free(full)

    def _sum(self, tensor: int) -> None:
        """Sum a tensor over ranks where it was last written: everywhere, or in shares of its tokens."""
        how = int(self.shards.pending[tensor])
        if how == GRADIENT_SUM:
            return
        self.shards.wait(self.section, tensor, 0)
        if not self.write:
            return
        writers = [i for i, item in enumerate(self.done) if tensor in item.node.writes]
        last = writers[-1] if writers else len(self.done) - 1
        near, dtype = self.done[last].node, self.draft.dtype(tensor)
        group, size = self._scope(tensor, how == EXPERT_SUM)
        if how == EXCHANGE:
            kind, moved = self._exchange(size)
            part = self.draft.local(self.section, size // self.sharing.tp, dtype)
            for item in self.done[writers[0] : last + 1]:
                item.rename({tensor: part})
            node = collective(kind, moved, group, near, (part,), (tensor,), dtype, frees=(part,), issuer=ALONE)
        elif not self.sharing.sequence or how == SCALAR_SUM:
            node = collective("all_reduce", size, group, near, (tensor,), (tensor,), dtype)
        else:
            full = self.draft.local(self.section, size, dtype)
            for item in self.done[writers[0] : last + 1]:
                item.rename({tensor: full})
            node = collective("reduce_scatter", size, group, near, (full,), (tensor,), dtype, frees=(full,))
        self.done.insert(last + 1, Item(node))

    def _statistics(self, item: Item, count: int) -> None:
        """Sums and maxima over what ranks share, a number a token each, which loss and norms need of all of them."""
        size = self.sharing.tokens * 4
        features = [t for t in item.node.reads if t < len(self.shards.kind) and not self.shards.weight[t]]
        table = max(features, key=lambda t: int(self.shards.kind[t]))
        statistics = self.draft.local(self.section, size, "fp32")
        for number in range(count):
            reads = (statistics,) if number else (table,)
            group = self.sharing.plan.group("tp")
            self.done.append(Item(collective("all_reduce", size, group, item.node, reads, (statistics,), "fp32")))
        item.change(reads=(*item.node.reads, statistics))
        item.free(statistics)

    def _leave(self) -> None:
        """Settle what a section leaves behind: sums that others read, and what was gathered in it."""
        for tensor in list(self.gathered):
            self._let_go(tensor)
        dead = {t for item in self.done for t in item.node.frees}
        for tensor in dict.fromkeys(t for item in self.done for t in item.node.writes if t not in dead):
            if tensor < len(self.shards.pending) and self.shards.pending[tensor] in (SUM, SCALAR_SUM, EXCHANGE):
                self._sum(tensor)

    # --- after the last node -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Sum the gradients of whole weights, or gather the logits of inference; shrink the optimizer."""
        optimizer = [(s, i) for s, i in self.draft.walk() if i.node.phase == "optimizer"]
        if any(item.node.phase == "backward" for _, item in self.draft.walk()):
            self._sum_gradients(optimizer[0][0] if optimizer else None)
        else:
            self._gather_logits()
        for _, item in optimizer:
            if item.node.kind == "adamw":
                self._shrink(item)

    def _sum_gradients(self, section: Section | None) -> None:
        """One small all-reduce of gradients that every rank has a part of: norms, routers, keys held by several."""
        shards, count = self.shards, len(self.shards.kind)
        gradient = self.draft.roles[:count] == GRADIENT
        copied = (shards.kind == FEATURES) & (shards.den == 1) & (shards.num < self.sharing.tp) & ~self.sharing.expert
        where = np.flatnonzero(gradient & ((shards.pending == GRADIENT_SUM) | copied))
        if not len(where):
            return
        if section is None:
            section = Section([], 1, {}, "", 0)
            self.draft.sections.append(section)
        ids, size = tuple(where.tolist()), int(self.draft.sizes[where].sum())
        dtype, group = self.draft.dtype(ids[0]), self.sharing.plan.group("tp")
        section.items.insert(0, Item(collective("all_reduce", size, group, UPDATE, ids, ids, dtype)))

    def _gather_logits(self) -> None:
        """Inference gives out logits of the whole vocabulary."""
        last = None
        for section, item in self.draft.walk():
            logits = [t for t in item.node.writes if t < len(self.shards.kind) and self.shards.kind[t] == VOCAB]
            last = (section, item, logits[0]) if logits else last
        if last is None:
            return
        section, item, tensor = last
        size, dtype = int(self.sharing.full[tensor]), self.draft.dtype(tensor)
        gathered = self.draft.local(section, size, dtype)
        node = collective("all_gather", size, self.sharing.plan.group("tp"), item.node, (tensor,), (gathered,), dtype)
        section.items.insert(section.place(item) + 1, Item(node))

    def _shrink(self, item: Item) -> None:
        """An optimizer step over shares of weights; its state follows the weights."""
        op, reads = item.node.work, np.array(item.node.reads)
        full, sizes = self.sharing.full, self.draft.sizes
        weights = reads[: op.tensors]
        for first in range(len(reads) - MOMENTS * op.tensors, len(reads), op.tensors):
            state = reads[first : first + op.tensors]
            sizes[state] = np.ceil(full[state] * (sizes[weights] / full[weights]) - 1e-6).astype(np.int64)
        numel = int(sizes[weights].sum() / itemsize(op.dtype))
        item.compute(op.replace(numel=numel))


def _adds(op: Op) -> bool:
    """Whether a fused kernel of this op adds up what it reads."""
    return op.kind == "elementwise" or (KINDS[op.kind].purpose == "norm" and not KINDS[op.kind].backward)

"""Expert parallelism: ranks that share the experts of every mixture out, and send each other the tokens for them.

Of E experts a rank holds E / ep, and its tokens go where their experts are: ``ep_dispatch`` before, ``ep_combine``
after them. In backward the gradients take the same ways: a dispatch undoes a combine and the reverse (GShard, Lepikhin
et al. 2020, arXiv 2006.16668; DeepEP in DeepSeek-V3, arXiv 2412.19437). Every rank sends its tokens and receives
others, as many on average; what the busiest receives decides, by the expert load of the trace: its products have more
rows, and exchanges take as long as they would with as many more tokens for all (its links are the ones that are waited
for). Weights, gradients and optimizer state of experts are shared; experts that all tokens use (DeepSeek's shared ones)
are dense.

``plan.options``:

- ``capacity``: every expert takes so many times the mean, no more and no less: loads are even, the rest is dropped or
  padded (0: nobody is dropped); ``token_drop`` is a capacity of 1 where none is given;
- ``ep_mode``: ``normal`` kernels, which send a token once to each rank, ``low_latency`` ones for few tokens, or
  ``alltoall``: a plain all-to-all of one row for each choice, or ``replicated``: tensor ranks that hold the same tokens
  send none, each computes what its experts say of all, and one all-reduce sums that (engines that serve; between
  ranks with tokens of their own it is ``normal``), or ``gathered``: all ranks gather the tokens of all, and what their
  experts say is reduce-scattered (vLLM's default; tensor ranks that hold the same tokens are ``replicated``);
- ``dispatch_dtype``: what tokens are sent in (``fp8``); empty, as they are;
- ``expert_load``: as of a workload; empty, what the trace says of the busiest expert.

Exchanges run on the ``compute`` stream unless the stack's ``overlap`` names ``ep``. Tensor ranks without sequence
parallelism hold the same tokens: each sends its part of them (all, where ``etp`` ranks share an expert), and all gather
the results. ``parallel.etp`` cuts every expert once more (:mod:`.sharding.expert_width`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

import numpy as np

from ...datasets.dtypes import itemsize
from ...datasets.loading import choice
from ...datasets.ops import LAYOUT, Op, make_op
from ..graph import FROZEN, GRADIENT, STATE, WEIGHT, Graph, Node
from ..question.errors import DegreeError
from ..question.options import EP_MODES
from ..question.plan import Group, Plan, PlanError
from ..trace.values import expert_counts
from ..trace.workload import load_text, parse_load, traced_load
from .rewriting.draft import Draft, Item, Section
from .rewriting.match import insert
from .rewriting.nodes import Ids, collective, kernel
from .rewriting.split import nearest, share
from .rewriting.tokens import share_item
from .sharding.expert_width import gather_rows, narrow, scatter_rows

MODULE = re.compile(r"^(?:.*\.)?experts(?=\.|$)")
PRODUCTS = ("grouped_gemm", "fused_moe")
REPLICATED, GATHERED = "replicated", "gathered"
GATHERS = {"ep_dispatch": "all_gather", "ep_combine": "reduce_scatter"}
HELD = (WEIGHT, FROZEN, GRADIENT)


def is_expert(path: str) -> bool:
    """Whether a path lies in a module of routed experts; shared experts, which all tokens use, do not."""
    return MODULE.match(path) is not None


def mode_of(plan: Plan) -> str:
    """How tokens are exchanged: as the plan says, else as the framework does."""
    mode = plan.settings.ep_mode or plan.stack.ep_mode or EP_MODES[0]
    if mode in (REPLICATED, GATHERED) and _alike(plan):
        return REPLICATED
    return EP_MODES[0] if mode == REPLICATED else mode


def _alike(plan: Plan) -> bool:
    """Whether the ranks that share experts out all hold the same tokens."""
    p = plan.parallel
    return p.ep > 1 and not p.sequence_parallel and (p.tp // p.etp) % p.ep == 0


def capacity_of(plan: Plan) -> float:
    """Rows that every expert takes, over the mean; 0 where nobody is dropped. Tokens are dropped to the mean."""
    return float(plan.settings.capacity or plan.settings.token_drop)


def expert_parallel(graph: Graph, plan: Plan) -> Graph:
    """The graph of one expert rank. Unchanged where experts are not shared out and have no fixed capacity.

    PlanError for a model without routed experts, and for degrees that do not divide their number.
    """
    p, capacity = plan.parallel, capacity_of(plan)
    if p.ep == 1 and not capacity and (p.etp == 1 or p.tp > 1):
        return graph
    counts = {op.experts for node, _ in graph.weighted() if (op := _product(node)) is not None}
    if not counts and p.ep == p.etp == 1:
        return graph
    _check(graph, counts, plan)
    draft = Draft(graph)
    mine, inner = np.zeros((2, len(draft.sizes)), dtype=bool)
    parts = p.ep * _width_parts(plan)
    for section in draft.sections:
        _share_weights(draft, section, mine, parts)
        for region in list(_regions(draft, section)):
            _share_region(draft, section, region, plan, inner)
    _share_optimizer(draft, mine, parts)
    draft.sizes[: len(mine)][mine] //= parts
    draft.sizes[: len(inner)][inner & ~mine] //= _width_parts(plan)
    return draft.graph()


def _width_parts(plan: Plan) -> int:
    """Parts of each expert; where there are tensor ranks, tensor parallelism cuts them."""
    return plan.parallel.etp if plan.parallel.tp == 1 else 1


def _product(node: Node) -> Op | None:
    return node.op if node.kind in PRODUCTS and is_expert(node.path) else None


def _check(graph: Graph, counts: set[int], plan: Plan) -> None:
    ep, mode = plan.parallel.ep, mode_of(plan)
    if not counts:
        name = "ep" if ep > 1 else "etp"
        degree = f"parallel.{name}={getattr(plan.parallel, name)}"
        raise PlanError(f"{degree} shares out routed experts, and {graph.name} has none; take parallel.{name}=1")
    for count in sorted(counts):
        if count % ep:
            raise DegreeError(f"parallel.ep={ep} does not divide {count} experts", "ep", ep, nearest(count, ep))
    choice(PlanError, "ep_mode", mode, tuple(EP_MODES))


# --- where experts work --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertRegion:
    """The nodes of one layer's experts in one phase, from routed tokens to their weighted sum (or its gradient).

    ``copies`` are tensor ranks that hold the same tokens, ``skew`` what the busiest rank receives over the mean.
    """

    items: tuple[Item, ...]
    tokens: int
    hidden: int
    topk: int
    product: Op
    copies: int = 1
    skew: float = 1.0

    @property
    def numel(self) -> int:
        """Elements of what goes in and out: one row a token."""
        return self.tokens * self.hidden


def _regions(draft: Draft, section: Section) -> Iterator[ExpertRegion]:
    regions: dict[tuple[str, str], list[Item]] = {}
    for item in section.items:
        match = MODULE.match(item.node.path)
        if match is not None and item.node.phase != "optimizer":
            regions.setdefault((match.group(), item.node.phase), []).append(item)
    for items in regions.values():
        products = [op for item in items if (op := _product(item.node)) is not None]
        if products:
            yield ExpertRegion(tuple(items), *_shape(draft, items, products[0]), products[0])


def _shape(draft: Draft, items: list[Item], product: Op) -> tuple[int, int, int]:
    """Tokens, their width and the experts of each: from the kernel, or the permutation with most rows a token.

    Biases by expert are looked up like tokens, in a table of as many rows as there are experts.
    """
    if product.kind == "fused_moe":
        return product.tokens, product.hidden, product.topk
    shapes = [
        item.node.work
        for item in items
        if item.node.kind == "moe_permute" and not any(draft.roles[t] in HELD for t in item.node.touches)
    ]
    tokens = [op for op in shapes if op.tokens != product.experts] or shapes
    if not tokens:
        return product.tokens, product.k, 1
    first = max(tokens, key=lambda op: op.topk)
    return first.tokens, first.hidden, first.topk


def _share_region(draft: Draft, section: Section, region: ExpertRegion, plan: Plan, inner: np.ndarray) -> None:
    """One rank's part of a region: fewer experts, the rows that it receives, and the exchanges around."""
    p, parts = plan.parallel, _width_parts(plan)
    capacity = capacity_of(plan)
    copies = max(1, p.tp // p.etp) if p.ep > 1 and not p.sequence_parallel else 1
    load = load_text(plan.settings.expert_load)
    load = traced_load(load) if load else ""
    busiest = capacity or _busiest(region, p.ep, load)
    skew = 1.0 if capacity or parse_load(load or "balanced")[0] == "balanced" else _more_sent(region, plan, busiest)
    for item in region.items:
        op = _product(item.node)
        if op is not None:
            tokens = op.tokens / copies if mode_of(plan) == REPLICATED else ceil(op.tokens / copies)
            shared = _fewer_experts(op, p.ep, parts, tokens, busiest, bool(capacity))
            item.compute(shared)
    region = replace(region, copies=copies, skew=skew)
    received, last = _entry(draft, region), _exit(draft, region)
    if received is None or last is None:
        return
    exchanged = p.ep > 1 and mode_of(plan) != REPLICATED
    if exchanged:
        received = _dispatch(draft, section, region, received, plan)
    if parts > 1:
        received = gather_rows(draft, section, region.items, received, plan.group("etp"))
    rows = Fraction(busiest).limit_denominator(10**6) * parts / copies
    _resize(draft, section, region, received, last, rows)
    if parts > 1:
        narrow(draft, section, region.items, region.hidden, inner, parts)
        last = scatter_rows(draft, section, region.items, last, plan.group("etp")), last[1]
    if exchanged:
        _combine(draft, section, region, last, plan)
    elif p.ep > 1:
        _sum(draft, section, last, plan)


def _fewer_experts(op: Op, ep: int, parts: int, tokens: float, busiest: float, capacity: bool) -> Op:
    """One rank's experts; each rank has so many ``tokens`` of its own, where all hold the same the mean of its part."""
    if op.kind == "fused_moe":
        return op.replace(ep=ep, tp=op.tp * parts, tokens=ceil(round(tokens * ep * parts * busiest, 6)))
    imbalance = 100 if capacity else max(100, round(op.imbalance / busiest))
    return op.replace(experts=op.experts // ep, imbalance=imbalance)


def _busiest(region: ExpertRegion, ep: int, load: str) -> float:
    """Rows of the busiest rank over the mean. Neighbouring experts lie on one rank.

    Where only the busiest expert is known, its rank has it among others that share the rest evenly. A fused kernel of
    balanced experts has their like in its own data.
    """
    op = region.product
    if op.kind != "grouped_gemm" and parse_load(load or "balanced")[0] == "balanced":
        return 1.0
    local = op.experts // ep
    if load:
        counts = np.array(expert_counts(region.tokens, region.topk, op.experts, load), dtype=float)
        ranks = counts.reshape(ep, local).sum(axis=1)
        return float(ranks.max() / ranks.mean())
    top = op.imbalance / 100
    others = (op.experts - top) / max(op.experts - 1, 1)
    return (top + (local - 1) * others) / local


# --- exchanges -------------------------------------------------------------------------------------------


def _entry(draft: Draft, region: ExpertRegion) -> int | None:
    """What the region reads first with one row a token, made outside."""
    written: set[int] = set()
    for item in region.items:
        for tensor in item.node.reads:
            if tensor not in written and _rows(draft, tensor, region):
                return tensor
        written.update(item.node.writes)
    return None


def _exit(draft: Draft, region: ExpertRegion) -> tuple[Item, int] | None:
    """The last node that writes one row a token, and that tensor."""
    for item in reversed(region.items):
        for tensor in item.node.writes:
            if _rows(draft, tensor, region):
                return item, tensor
    return None


def _rows(draft: Draft, tensor: int, region: ExpertRegion) -> bool:
    size = float(draft.elements(np.array([tensor]))[0])
    return size == region.numel and draft.roles[tensor] not in (*HELD, STATE)


def _dispatch(draft: Draft, section: Section, region: ExpertRegion, entry: int, plan: Plan) -> int:
    """Sends tokens to their experts' ranks before the region; returns what is received, which the region reads."""
    users = [item for item in region.items if entry in item.node.reads]
    dtype = plan.settings.dispatch_dtype or draft.dtype(entry)
    group = plan.group("ep")
    rows = _receive(region, group, plan) * region.skew / region.copies
    received = draft.local(section, rows * region.hidden * itemsize(draft.dtype(entry)), draft.dtype(entry))
    for item in users:
        item.read_instead({entry: received})
    node = _exchange("ep_dispatch", region, plan, (entry,), (received,), dtype)
    users[-1].free(received)
    insert(section, section.place(users[0]), map(Item, (node, *_by_expert(region, plan, received, dtype))))
    return received


def _combine(draft: Draft, section: Section, region: ExpertRegion, last: tuple[Item, int], plan: Plan) -> None:
    """Takes experts' results back to their tokens after the region, and sums them there."""
    item, tensor = last
    dtype = draft.dtype(tensor)
    nodes = [*_by_expert(region, plan, tensor, dtype)]
    nodes.append(_exchange("ep_combine", region, plan, (tensor,), (tensor,), dtype))
    if region.copies > 1:
        together, size = plan.group("tp", region.copies, plan.parallel.etp), float(draft.sizes[tensor])
        nodes.append(collective("all_gather", size, together, item.node, (tensor,), (tensor,), dtype))
    insert(section, section.place(item) + 1, map(Item, nodes))


def _sum(draft: Draft, section: Section, last: tuple[Item, int], plan: Plan) -> None:
    """Sums what each tensor rank's experts say of the tokens that all hold."""
    item, tensor = last
    size, mine, dtype = float(draft.sizes[tensor]), (tensor,), draft.dtype(tensor)
    total = collective("all_reduce", size, plan.group("tp"), item.node, mine, mine, dtype)
    section.items.insert(section.place(item) + 1, Item(total))


def _by_expert(region: ExpertRegion, plan: Plan, tensor: int, dtype: str) -> Iterator[Node]:
    """A plain all-to-all receives rows by rank, and experts want them by expert: they are sorted there and back."""
    if mode_of(plan) == "alltoall" and region.product.experts > plan.parallel.ep:
        rows = ceil(region.tokens * region.topk / region.copies)
        op = make_op("moe_permute", dtype, tokens=rows, hidden=region.hidden, topk=1)
        yield kernel(op, "opcast.sort", region.items[0].node, (tensor,), (tensor,))


def _exchange(kind: str, region: ExpertRegion, plan: Plan, reads: Ids, writes: Ids, dtype: str) -> Node:
    group, near = plan.group("ep"), region.items[0].node
    stream = "comm:ep" if "ep" in plan.stack.overlap else "compute"
    mode = mode_of(plan)
    tokens = ceil(region.tokens * region.skew / region.copies)
    if mode == GATHERED:
        size = tokens * group.ranks * region.hidden * itemsize(dtype)
        return collective(GATHERS[kind], size, group, near, reads, writes, dtype, stream=stream)
    if mode == "alltoall":
        size = tokens * region.topk * region.hidden * itemsize(dtype) * (capacity_of(plan) or 1)
        return collective("all_to_all", size, group, near, reads, writes, dtype, stream=stream)
    choices = {"tokens": tokens, "hidden": region.hidden, "topk": region.topk, "experts": region.product.experts}
    ranks = {"ranks": group.ranks, "ranks_per_node": group.ranks_per_node, "link": group.link}
    op = make_op(kind, dtype, dtype, **choices, **ranks, mode=mode)
    return replace(kernel(op, f"opcast.{kind}", near, reads, writes, stream=stream), group=group.name)


def _receive(region: ExpertRegion, group: Group, plan: Plan) -> float:
    """Rows that a rank receives: one for each rank that a token reaches, or one for each of its experts."""
    if mode_of(plan) == GATHERED:
        return region.tokens * group.ranks
    if mode_of(plan) != "normal":
        return region.tokens * region.topk
    return region.tokens * group.ranks * _reach(1.0 / group.ranks, region.topk)


def _reach(share: float, topk: int) -> float:
    """Part of the tokens that reach a rank which has ``share`` of all choices."""
    return 1.0 - (1.0 - min(share, 1.0)) ** topk


def _more_sent(region: ExpertRegion, plan: Plan, busiest: float) -> float:
    """What the busiest rank receives over the mean; a token comes once however many of its experts a rank has."""
    if mode_of(plan) == GATHERED:
        return 1.0
    if mode_of(plan) != "normal":
        return busiest
    ranks = plan.parallel.ep
    return _reach(busiest / ranks, region.topk) / _reach(1.0 / ranks, region.topk)


# --- sizes -----------------------------------------------------------------------------------------------


def _resize(
    draft: Draft, section: Section, region: ExpertRegion, received: int, last: tuple[Item, int] | None, factor: Fraction
) -> None:
    """Work on rows as the rank receives them: ``factor`` times the mean of a rank that has all tokens."""
    if factor == 1 or region.product.kind == "fused_moe":
        return
    along = np.zeros(len(draft.sizes), dtype=bool)
    along[section.ids(received)] = True
    for item in region.items:
        share_item(draft, section, item, along, region.tokens, 1 / factor)
    along[section.ids(received)] = False
    if last is not None:
        along[section.ids(last[1])] = False
    draft.sizes[along] = np.ceil(draft.sizes[along] * float(factor)).astype(np.int64)


def _share_weights(draft: Draft, section: Section, mine: np.ndarray, ep: int) -> None:
    """Note in ``mine`` what of a section belongs to experts, and divide what works on nothing but that."""
    for item in section.items:
        node, op = item.node, item.node.op
        if node.phase == "optimizer" or not is_expert(node.path):
            continue
        weights = [t for t in node.touches if draft.roles[t] in HELD]
        gradient = node.kind == "grouped_gemm" and node.work.layout == LAYOUT.choices.index("tn")
        only = bool(node.reads) and all(draft.roles[t] in HELD or mine[t] for t in node.reads)
        for tensor in (*weights, *(node.writes if gradient or only else ())):
            mine[section.ids(tensor)] = True
        if op is not None and op.kind in ("embedding", "embedding_backward") and weights:
            item.change(op=op.replace(vocab=max(1, op.vocab // ep)))
        elif op is not None and only and op.kind not in PRODUCTS:
            shared = share(op, "elements", ep, uneven=True)
            item.compute(shared)


def _share_optimizer(draft: Draft, mine: np.ndarray, ep: int) -> None:
    """Update the rank's own experts only: their moments, in the order of the weights, are shared like them."""
    for _, item in draft.walk():
        node, op = item.node, item.node.op
        if op is None or op.kind != "adamw":
            continue
        weights = [t for t in node.reads if draft.roles[t] == WEIGHT]
        local = np.array([t for t in weights if mine[t]], dtype=np.int64)
        if not len(local):
            continue
        states = np.array([t for t in node.reads if draft.roles[t] == STATE], dtype=np.int64)
        if len(states) % len(weights) == 0:
            mine[states] = np.tile(mine[weights], len(states) // len(weights))
        numel = op.numel - round(float(draft.elements(local).sum()) * (1 - 1 / ep))
        update = op.replace(numel=numel)
        item.compute(update)

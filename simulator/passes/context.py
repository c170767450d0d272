"""Context parallelism: ranks that share the tokens of every sequence, each with all weights.

Whatever works on tokens does 1/cp of it; only attention needs what others hold (``parallel.cp_style``):

- ``ring``: keys and values go round in cp - 1 exchanges beside the attention on those that have arrived, and
  their gradients follow them home (Liu et al. 2023, arXiv 2310.01889);
- ``allgather``: keys and values are gathered before, their gradients summed and scattered after (Llama 3,
  arXiv 2407.21783, sec. 3.3.2);
- ``ring_allgather``: keys and values are gathered before, attended to part by part as in a ring, partial results
  summed in fp32; gradients of keys and values go round in fp32 (PyTorch's ``context_parallel``);
- ``ulysses``: an all-to-all hands each rank all tokens of 1/cp of the heads, another one takes them back (Jacobs et
  al. 2023, arXiv 2309.14509);
- ``dynamic``: every sequence of the batch is shared by as many ranks as suit its length, in a ring
  (:mod:`.dynamic_context`); the busiest rank stands for all.

``options.sequence_lengths`` are those of the sequences that a micro-batch is packed of; each attends to itself.

Under a causal mask the first tokens see little and the last ones much. With ``options.zigzag`` (the default) every
rank holds an early and a late part, which makes all equal: rank r of cp has parts r and 2 cp - 1 - r. Without it the
last rank decides. Weights' gradients are partial sums over the ``dp_cp`` group, which data parallelism adds up.

In inference each rank keeps 1/cp of the cache. A step of generation has a token of each sequence, which all ranks
compute alike; each attends to its part of the cache, and partial results are merged, whatever the style
(:func:`.sharding.attention.partial_generation`).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil

import numpy as np

from ...datasets.counts import counted
from ...datasets.ops import KINDS
from ..graph import ACTIVATION, CACHE, Graph, Node
from ..question.errors import DegreeError
from ..question.plan import Plan, PlanError
from .dynamic_context import Assignment, Placement, attention_work, dynamic_context
from .rewriting.draft import WHOLE_NUMBERS, Draft, Item, Section
from .rewriting.match import expand
from .rewriting.tokens import share_tokens
from .sharding.attention import (
    SCANS,
    Attention,
    attention_of,
    gather_attention,
    gathered_ring,
    partial_generation,
    ring,
    scattered_heads,
    scattered_scan,
)

STATEFUL = ("linear_attention_decode", "causal_conv1d")
STYLES = {"ring": ring, "ring_allgather": gathered_ring, "allgather": gather_attention, "ulysses": scattered_heads}


def context_parallel(graph: Graph, plan: Plan) -> Graph:
    """What one of ``parallel.cp`` ranks does of a graph traced at the full length.

    Unchanged for a single rank. PlanError where tokens or heads do not divide.
    """
    cp, lengths = plan.parallel.cp, plan.settings.sequence_lengths
    if cp == 1 and not lengths:
        return graph
    _refuse_sparse(graph, cp)
    calls = [found for node, _ in graph.weighted() if (found := attention_of(node)) is not None]
    if not calls:
        raise PlanError(f"parallel.cp={cp} shares out attention, and {graph.name} has no fused one; take parallel.cp=1")
    if all(call.seq_q < call.seq_kv for call in calls):
        if lengths:
            raise PlanError(f"options.sequence_lengths={list(lengths)} are of prompts; leave them out of a decode step")
        return _generation(graph, plan)
    length = max(call.seq_q for call in calls)
    if lengths or plan.parallel.cp_style == "dynamic":
        return _by_sequence(graph, plan, calls, length)
    _check(calls, length, plan)
    draft = Draft(graph)
    share_tokens(draft, length, cp)
    expand(draft.sections, partial(_rewrite_attention, draft, plan))
    return draft.graph()


def _refuse_sparse(graph: Graph, cp: int) -> None:
    """PlanError for attention to chosen tokens: what others hold would have to be chosen from first."""
    if any(node.kind.startswith("sparse") for node, _ in graph.weighted()):
        raise PlanError(f"parallel.cp={cp}: {graph.name} attends to tokens that an indexer chooses; take parallel.cp=1")


def _by_sequence(graph: Graph, plan: Plan, calls: list[Attention], length: int) -> Graph:
    """What the busiest rank does of a batch of unequal sequences. PlanError for lengths that do not fill the batch."""
    style, call = plan.parallel.cp_style, calls[0]
    lengths = [int(sequence) for sequence in plan.settings.sequence_lengths or [length] * call.batch]
    total = call.batch * length
    if sum(lengths) != total:
        raise PlanError(
            f"options.sequence_lengths add up to {sum(lengths)} tokens, and a micro-batch has {total} = {call.batch} x "
            f"{length}; let them add up to that"
        )
    if any(call.seq_q != call.seq_kv or call.window for call in calls):
        raise PlanError("options.sequence_lengths and cp_style=dynamic are for attention to whole sequences")
    if style not in ("ring", "dynamic"):
        raise PlanError(f"options.sequence_lengths goes with cp_style=ring or dynamic, not with {style}")
    placed = _place_sequences(graph, plan, call, lengths)
    rank = int(np.argmax(placed.load))
    mine = [sequence for sequence in placed.placements if rank in sequence.ranks]
    tokens = sum(sequence.length // sequence.degree for sequence in mine)
    draft = Draft(graph)
    share_tokens(draft, length, Fraction(total, tokens))
    expand(draft.sections, partial(_sequences, draft, plan, mine))
    runs = sum(times for node, times in graph.weighted() if node.phase == "forward" and attention_of(node) is not None)
    before = float(next(call for call in calls if not call.backward).op.cost.flops)
    after = sum(float(_alone(call, sequence).op.cost.flops) for sequence in lengths)
    training = any(call.backward for call in calls)
    flops = graph.model_flops - (before - after) * runs * (3 if training else 1)
    return draft.graph(model_flops=flops)


def _place_sequences(graph: Graph, plan: Plan, call: Attention, lengths: list[int]) -> Assignment:
    """Which ranks share each sequence: all of them in a ring, those that suit its length where that is dynamic."""
    cp = plan.parallel.cp
    if plan.parallel.cp_style == "dynamic":
        nodes = [(node, times) for node, times in graph.weighted() if node.op is not None and node.phase == "forward"]
        runs = sum(times for node, times in nodes if attention_of(node) is not None)
        others = sum(
            float(node.op.cost.flops) * times
            for node, times in nodes
            if node.op is not None and node.op.cost.unit == "tensor" and attention_of(node) is None
        )
        hidden = call.heads_q * (call.width_k + call.width_v) // 2
        device = plan.figures
        rate = device.tensor_rate(plan.precision) * 1e12 / ((device.link_gbps or device.pcie_gbps) * 1e9)
        sent = call.kv_bytes(1) / call.batch * rate  # what could be computed while a token's keys and values are sent
        return dynamic_context(lengths, cp, attention_work(hidden, others / runs / sum(lengths), sent))
    for sequence in lengths:
        if sequence % cp:
            raise PlanError(
                f"a sequence of {sequence} tokens cannot be cut into {cp} equal parts; take cp_style=dynamic"
            )
    ranks = tuple(range(cp))
    placements = [
        Placement(index, sequence, ranks, zigzag(plan) and sequence % (2 * cp) == 0)
        for index, sequence in enumerate(lengths)
    ]
    return Assignment(tuple(placements), (1.0,) * cp)


def _alone(call: Attention, length: int) -> Attention:
    """An attention over one sequence of its batch."""
    op = call.op.replace(batch=1, seq_q=length, seq_kv=length)
    return replace(call, op=op, batch=1, seq_q=length, seq_kv=length)


def _sequences(draft: Draft, plan: Plan, mine: list[Placement], section: Section, item: Item) -> list[Item]:
    """The items that take the place of one: attention over a rank's part of each sequence, one after the other."""
    call = attention_of(item.node)
    if call is None:
        return [item]
    kernels: list[Node] = []
    for sequence in mine:
        one = _alone(call, sequence.length)
        if sequence.degree == 1:
            kernels.append(replace(item.node, op=one.op, bytes_moved=int(one.op.cost.bytes), frees=()))
            continue
        nodes, buffers = ring(draft, section, item.node, one, plan.group("cp", sequence.degree), sequence.zigzag)
        kernels += [*nodes[:-1], replace(nodes[-1], frees=buffers)]
    return _in_place(item, kernels, ())


def _check(calls: list[Attention], length: int, plan: Plan) -> None:
    cp, parts = plan.parallel.cp, plan.parallel.cp * (2 if zigzag(plan) else 1)
    if any(call.seq_q != call.seq_kv for call in calls):
        raise PlanError(
            f"parallel.cp={cp} shares out the tokens of a prompt, and {calls[0].op.kind} has more; take cp=1"
        )
    if length % parts:
        fits = max(d for d in range(1, cp + 1) if d == 1 or length % (d * parts // cp) == 0)
        raise DegreeError(
            f"sequences of {counted(length, 'token')} cannot be cut into {parts} equal parts", "cp", cp, fits
        )
    heads = min(call.heads_q for call in calls)
    if plan.parallel.cp_style == "ulysses" and heads % cp:
        fits = max(d for d in range(1, cp + 1) if heads % d == 0)
        raise DegreeError(
            f"parallel.cp={cp} does not divide {counted(heads, 'head')} (cp_style=ulysses)", "cp", cp, fits
        )


def zigzag(plan: Plan) -> bool:
    """Whether each rank holds an early and a late part of a sequence; pointless where heads are shared out."""
    return plan.settings.zigzag and plan.parallel.cp_style != "ulysses"


def _generation(graph: Graph, plan: Plan) -> Graph:
    """A step of generation over a rank's part of the cache. PlanError where keys are computed from it before."""
    cp, group = plan.parallel.cp, plan.group("cp")
    draft = Draft(graph)
    numbers = [draft.code(name) for name in WHOLE_NUMBERS]
    mine = (draft.roles == CACHE) & ~np.isin(draft.dtypes, numbers)
    for section, item in draft.walk():
        if item.node.kind in STATEFUL:  # states are of sequences, not of tokens
            for tensor in item.node.reads:
                mine[section.ids(tensor)] = False
    for section in draft.sections:
        items: list[Item] = []
        for item in section.items:
            node, call = item.node, attention_of(item.node)
            if call is not None:
                nodes, buffers = partial_generation(draft, section, node, call, group)
                items += _in_place(item, nodes, buffers)
                continue
            items.append(item)
            if not any(t < len(mine) and mine[t] for t in node.touches) or node.op is None:
                continue
            if KINDS[node.op.kind].family == "gemm":
                raise PlanError(
                    f"parallel.cp={cp} shares out a cache that attention reads, and {graph.name} makes keys of it in "
                    f"{node.path}; take parallel.cp=1, or a stack with absorbed_mla such as vllm"
                )
            if node.op.kind == "copy":  # a cache that grows by copying
                for tensor in node.writes:
                    mine[section.ids(tensor)] |= draft.roles[tensor] in (CACHE, ACTIVATION)
                item.compute(node.op.replace(size_bytes=max(ceil(node.op.size_bytes / cp), 1)))
        section.items = items
    draft.sizes[: len(mine)][mine] = -(-draft.sizes[: len(mine)][mine] // cp)
    return draft.graph()


def _in_place(item: Item, nodes: list[Node], buffers: tuple[int, ...]) -> list[Item]:
    """Items for nodes that take the place of one; the last of them lets go of what that did, and of buffers."""
    kernels = [Item(node) for node in nodes]
    kernels[0].change(host=item.node.host)
    buffers = (*kernels[-1].node.frees, *buffers)
    kernels[-1] = Item(replace(kernels[-1].node, frees=item.node.frees), item.first, item.last)
    kernels[-1].free(*buffers)
    return kernels


def _rewrite_attention(draft: Draft, plan: Plan, section: Section, item: Item) -> list[Item]:
    """The items that take the place of one: attention with its communication, everything else as it is."""
    if item.node.kind in SCANS:
        return _in_place(item, scattered_scan(item.node, plan.group("cp")), ())
    call = attention_of(item.node)
    if call is None:
        return [item]
    if plan.stack.repeats_keys and not call.op.kind.startswith("mla"):
        call = replace(call, op=call.op.replace(heads_kv=call.heads_q), heads_kv=call.heads_q)
    nodes, buffers = STYLES[plan.parallel.cp_style](draft, section, item.node, call, plan.group("cp"), zigzag(plan))
    return _in_place(item, nodes, buffers)

"""Context parallelism: ranks that share the tokens of every sequence, each with all weights.

Whatever works on tokens does 1/cp of it; only attention needs what others hold (``parallel.cp_style``):

- ``ring``: keys and values go round in cp - 1 exchanges beside the attention on those that have arrived, and
  their gradients follow them home (Liu et al. 2023, arXiv 2310.01889);
- ``allgather``: keys and values are gathered before, their gradients summed and scattered after (Llama 3,
  arXiv 2407.21783, sec. 3.3.2);
- ``ulysses``: an all-to-all hands each rank all tokens of 1/cp of the heads, another one takes them back (Jacobs et
  al. 2023, arXiv 2309.14509).

Under a causal mask the first tokens see little and the last ones much. With ``options["zigzag"]`` (the default) every
rank holds an early and a late part, which makes all equal: rank r of cp has parts r and 2 cp - 1 - r. Without it the
last rank decides. Weights' gradients are partial sums over the ``dp_cp`` group, which data parallelism adds up.

In inference each rank keeps 1/cp of the cache. A step of generation has a token of each sequence, which all ranks
compute alike; each attends to its part of the cache, and partial results are merged, whatever the style
(:func:`.sharding.attention.partial`).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np

from ...datasets.ops import KINDS
from ..graph import ROLES, Graph, Node
from ..question.plan import Plan, PlanError
from .rewriting.draft import Draft, Item, Section
from .rewriting.tokens import share_tokens
from .sharding.attention import Attention, attention_of, gathered, partial, ring, scattered_heads

CACHE = ROLES.index("cache")
STYLES = {"ring": ring, "allgather": gathered, "ulysses": scattered_heads}


def context_parallel(graph: Graph, plan: Plan) -> Graph:
    """What one of ``parallel.cp`` ranks does of a graph traced at the full length.

    Unchanged for a single rank. PlanError where tokens or heads do not divide.
    """
    cp = plan.parallel.cp
    if cp == 1:
        return graph
    calls = [found for node, _ in graph.weighted() if (found := attention_of(node)) is not None]
    if not calls:
        raise PlanError(f"parallel.cp={cp} shares out attention, and {graph.name} has no fused one; take parallel.cp=1")
    if all(call.seq_q < call.seq_kv for call in calls):
        return _generation(graph, plan)
    length = max(call.seq_q for call in calls)
    _check(calls, length, plan)
    draft = Draft(graph)
    share_tokens(draft, length, cp)
    for section in draft.sections:
        section.items = [made for item in section.items for made in _rewritten(draft, section, item, plan)]
    return draft.graph()


def _check(calls: list[Attention], length: int, plan: Plan) -> None:
    cp, parts = plan.parallel.cp, plan.parallel.cp * (2 if zigzag(plan) else 1)
    if any(call.seq_q != call.seq_kv for call in calls):
        raise PlanError(
            f"parallel.cp={cp} shares out the tokens of a prompt, and {calls[0].op.kind} has more; take cp=1"
        )
    if length % parts:
        fits = max(d for d in range(1, cp + 1) if d == 1 or length % (d * parts // cp) == 0)
        raise PlanError(f"sequences of {length} tokens cannot be cut into {parts} equal parts; take parallel.cp={fits}")
    heads = min(call.heads_q for call in calls)
    if plan.parallel.cp_style == "ulysses" and heads % cp:
        fits = max(d for d in range(1, cp + 1) if heads % d == 0)
        raise PlanError(f"parallel.cp={cp} does not divide {heads} heads (cp_style=ulysses); take parallel.cp={fits}")


def zigzag(plan: Plan) -> bool:
    """Whether each rank holds an early and a late part of a sequence; pointless where heads are shared out."""
    return bool(plan.options.get("zigzag", True)) and plan.parallel.cp_style != "ulysses"


def _generation(graph: Graph, plan: Plan) -> Graph:
    """A step of generation over a rank's part of the cache. PlanError where keys are computed from it before."""
    cp, group = plan.parallel.cp, plan.group("cp")
    draft = Draft(graph)
    numbers = [draft.code(name) for name in ("int64", "int32", "bool")]
    mine = (draft.roles == CACHE) & ~np.isin(draft.dtypes, numbers)
    for section in draft.sections:
        items: list[Item] = []
        for item in section.items:
            node, call = item.node, attention_of(item.node)
            if call is not None:
                nodes, buffers = partial(draft, section, node, call, group)
                items += _in_place(item, nodes, buffers)
                continue
            items.append(item)
            if not any(t < len(mine) and mine[t] for t in (*node.reads, *node.writes)) or node.op is None:
                continue
            if KINDS[node.op.kind].family == "gemm":
                raise PlanError(
                    f"parallel.cp={cp} shares out a cache that attention reads, and {graph.name} makes keys of it in "
                    f"{node.path}; take parallel.cp=1, or a stack with absorbed_mla such as vllm"
                )
            if node.op.kind == "copy":  # a cache that grows by copying
                for tensor in node.writes:
                    mine[section.ids(tensor)] |= draft.roles[tensor] in (CACHE, ROLES.index("activation"))
                item.compute(node.op.replace(size_bytes=max(ceil(node.op.size_bytes / cp), 1)))
        section.items = items
    draft.sizes[: len(mine)][mine] = -(-draft.sizes[: len(mine)][mine] // cp)
    return draft.graph()


def _in_place(item: Item, nodes: list[Node], buffers: tuple[int, ...]) -> list[Item]:
    """Items for nodes that take the place of one; the last of them lets go of what that did, and of buffers."""
    made = [Item(node) for node in nodes]
    made[0].change(host=item.node.host)
    made[-1] = Item(replace(made[-1].node, frees=item.node.frees), item.first, item.last)
    made[-1].free(*buffers)
    return made


def _rewritten(draft: Draft, section: Section, item: Item, plan: Plan) -> list[Item]:
    """The items that take the place of one: attention with its communication, everything else as it is."""
    call = attention_of(item.node)
    if call is None:
        return [item]
    nodes, buffers = STYLES[plan.parallel.cp_style](draft, section, item.node, call, plan.group("cp"), zigzag(plan))
    return _in_place(item, nodes, buffers)

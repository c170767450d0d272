"""Expert-tensor parallelism on ranks that hold different tokens: each has a part of every expert's inner width.

All ranks of the group gather each other's rows, compute with their part of the width, and sum the results while each
takes its own rows back (Megatron-LM's expert tensor parallelism; Liu et al. 2025, arXiv 2504.14960). A rank thus works
on ``etp`` times the rows and 1 / ``etp`` of the width. Where tensor ranks share the tokens, :mod:`..tensor` does this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....datasets.ops import LAYOUT, Op
from ...graph import ACTIVATION
from ...question.plan import Group, PlanError
from ..rewriting.draft import Draft, Item, Section
from ..rewriting.nodes import collective
from ..rewriting.split import share

TN = LAYOUT.choices.index("tn")


def gather_rows(draft: Draft, section: Section, items: Sequence[Item], entry: int, group: Group) -> int:
    """Gathers the rows of all ranks before ``items``, which read the new tensor instead of ``entry``."""
    users = [item for item in items if entry in item.node.reads]
    near, size = users[0].node, float(draft.sizes[entry]) * group.ranks
    gathered = draft.local(section, size, draft.dtype(entry))
    for item in users:
        item.read_instead({entry: gathered})
    users[-1].free(gathered)
    gather = Item(collective("all_gather", size, group, near, (entry,), (gathered,), draft.dtype(entry)))
    if entry in users[-1].node.frees:
        users[-1].keep(entry)
        gather.free(entry)
    section.items.insert(section.place(users[0]), gather)
    return gathered


def scatter_rows(draft: Draft, section: Section, items: Sequence[Item], last: tuple[Item, int], group: Group) -> Item:
    """Sums the partial results that ``items`` write and takes the rank's own rows back into the tensor of ``last``."""
    item, tensor = last
    near, size = item.node, float(draft.sizes[tensor]) * group.ranks
    partial = draft.local(section, size, draft.dtype(tensor))
    for user in items:
        user.touch_instead({tensor: partial})
    about = near, (partial,), (tensor,), draft.dtype(tensor)
    scatter = Item(collective("reduce_scatter", size, group, *about, frees=(partial,)))
    section.items.insert(section.place(item) + 1, scatter)
    return scatter


def narrow(draft: Draft, section: Section, items: Sequence[Item], hidden: int, inner: np.ndarray, ranks: int) -> None:
    """Divide the inner width of experts among ``ranks``; ``inner`` flags, by tensor id, what is as wide as that."""
    for item in items:
        node, op = item.node, item.node.op
        wide = [t for t in node.reads if t < len(inner) and inner[t]]
        if op is None or not (wide or op.kind == "grouped_gemm"):
            continue
        if op.kind == "grouped_gemm":
            dim = _inner_dim(op, hidden, bool(wide) and node.reads[0] == wide[0])
            shared, partial = _share_width(op, dim, ranks), op.layout != TN and dim == "n"
        else:
            shared, partial = share(op, "features", ranks, uneven=True), op.kind != "reduce"
        item.compute(shared)
        for tensor in node.writes if partial else ():
            if tensor < len(inner) and draft.roles[tensor] == ACTIVATION:
                inner[section.ids(tensor)] = True


def _inner_dim(op: Op, hidden: int, from_inner: bool) -> str:
    """A product's dimension along the inner width; the other one is the model's."""
    if op.layout == TN:
        return "n" if op.k == hidden else "k"
    return "k" if from_inner else "n"


def _share_width(op: Op, dim: str, ranks: int) -> Op:
    try:
        return share(op, dim, ranks)
    except PlanError as error:
        raise PlanError(f"parallel.etp={ranks} shares the inner width of experts: {error}") from None

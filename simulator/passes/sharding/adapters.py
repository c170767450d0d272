"""The second product of an adapter beside a layer cut by rows, cut by columns as NeMo does it.

NeMo's ``ParallelLinearAdapter``: what the first product (``linear_in``, cut by rows) makes is summed on every rank for
all tokens, under sequence parallelism, too. The second one (``linear_out``) makes a share of features of all tokens.
These are gathered. Under sequence parallelism each rank then keeps its own tokens, and backward it gathers gradients of
all tokens. With ``all_to_all`` (``a2a_experimental``) ranks under sequence parallelism exchange shares of features for
shares of tokens, forward and backward: 1/tp of those bytes.
"""

from __future__ import annotations

from fractions import Fraction

from ....datasets.ops import Op
from ...graph import Node
from ..rewriting.split import share
from .shards import COLUMN, EXCHANGE, FEATURES, SCALAR_SUM
from .sharing import Sharing
from .work import RankWork


def first_product(sharing: Sharing, node: Node, op: Op, parts: Fraction) -> RankWork:
    """The thin product cut by rows: a sum on all ranks, whose readers are second products."""
    for tensor in node.writes:
        sharing.shards.thin[list(sharing.section.ids(tensor))] = True
    return RankWork(share(op, "k", parts, uneven=True), pending=dict.fromkeys(node.writes, SCALAR_SUM), parts=parts)


def second_product(sharing: Sharing, node: Node, op: Op, weights: list[int]) -> RankWork:
    """A share of its features, of all tokens, which the ranks exchange."""
    for weight in weights:
        sharing.cut(weight, COLUMN, FEATURES, sharing.tp)
        sharing.shards.thin[list(sharing.section.ids(weight))] = True
    sharing.scatter(node.writes)
    return _share(sharing, op, "n", node, EXCHANGE)


def input_gradient(sharing: Sharing, node: Node, op: Op) -> RankWork:
    """The gradient of the thin tensor: each rank sums over its features, for all tokens."""
    return _share(sharing, op, "k", node, SCALAR_SUM)


def weight_gradient(sharing: Sharing, node: Node, op: Op) -> RankWork:
    """The gradient of a rank's own features; the thin side of the product is the one that the thin tensor has."""
    rank = min(op.m, op.n)
    sharing.mark(node, sharing.tp)
    return _share(sharing, op, "n" if op.m == rank else "m", node)


def _share(sharing: Sharing, op: Op, axis: str, node: Node, how: int = 0) -> RankWork:
    shared = share(op, axis, sharing.tp, uneven=True)
    gathers = sharing.to_gather(node.reads)
    pending = dict.fromkeys(node.writes, how) if how else {}
    return RankWork(shared, gathers, pending, parts=Fraction(sharing.tp), exchanged=True)

"""How the weight of a Linear is cut, found by where its result flows: by columns, by vocabulary, or not at all.

A product out of the residual stream is cut by columns when another product, or attention, follows before anything needs
all of its features at once; a norm over all of them before a product (the latent projections of MLA), a router's choice
or the residual stream itself before that leaves the weight whole, and so does a result of few features, as the first
product of an adapter (LoRA) has: ranks exchange less of it than of the sums that a cut would make. A norm over all
queries or keys on their way to attention (OLMo 2) does not: ranks sum its statistic. What is as wide as the table of
embeddings and reaches no further product is the head of the language model. (Rows are cut where the input is shared
already.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....datasets.ops import KINDS
from ...graph import Node
from ..rewriting.draft import Section
from .shards import COLUMN, REPLICATED, TABLE

THIN = 512  # features; ranks of adapters are 4 to 256
OVER_ROWS = ("norm", "softmax")  # purposes of ops that need all features of a row
CHOOSING = ("moe_route", "sparse_index_prefill", "sparse_index_decode")  # all ranks choose, and choose alike


class Heads(NamedTuple):
    """Heads of an attention: of queries, of keys and values as attention is given them, and their widths."""

    queries: int
    keys: int
    key_dim: int
    value_dim: int


class DataFlow:
    """Who reads what within a section."""

    def __init__(self, section: Section, weight: np.ndarray, tokens: int, vocab: int) -> None:
        self.section, self.weight, self.tokens, self.vocab = section, weight, tokens, vocab
        self.readers = section.readers()

    def cut(self, position: int) -> tuple[int, Heads | None]:
        """How the weight of the product at ``position`` is cut, and the heads that its result belongs to, if any."""
        node = self.section.items[position].node
        width = node.op.n if node.op is not None else 0
        waiting, visited = list(node.writes), {position}
        product, normed, heads = False, False, None
        while waiting:
            tensor = waiting.pop()
            for reader in self.readers.get(tensor, ()):
                after = self.section.items[reader].node
                if reader in visited or reader < position or after.phase != node.phase:
                    continue
                visited.add(reader)
                heads_after = attention_heads(after, self.tokens)
                if heads_after or self._product(after):
                    product, heads = product or not heads_after, heads or heads_after
                    continue
                if after.kind in CHOOSING and width != self.vocab:
                    return REPLICATED, None
                normed = normed or self._norms(after, width)
                waiting.extend(after.writes)
        if product and not heads and _thin(node):
            return REPLICATED, None
        if normed and (product or heads is None or not heads.key_dim):
            return REPLICATED, None
        if product or heads:
            return COLUMN, heads
        return (TABLE if width == self.vocab else REPLICATED), None

    def adapts(self, position: int) -> bool:
        """Whether a product is the first of an adapter: thin, and read by another product at once."""
        node = self.section.items[position].node
        readers = [self.section.items[r].node for t in node.writes for r in self.readers.get(t, ()) if r > position]
        return _thin(node) and any(self._product(after) for after in readers if after.phase == node.phase)

    def _product(self, node: Node) -> bool:
        if node.kind not in ("gemm", "grouped_gemm", "fused_moe"):
            return False
        return any(self.weight[t] for t in node.reads)

    def _norms(self, node: Node, width: int) -> bool:
        """Whether rows of a node run over most features of a result of this width."""
        op = node.op
        if op is None or width == self.vocab:
            return False
        if KINDS[op.kind].purpose in OVER_ROWS and not KINDS[op.kind].backward:
            return 2 * op.cols > width
        return op.kind == "reduce" and op.inner == 1 and 2 * op.length > width


def _thin(node: Node) -> bool:
    """Whether a product keeps so few of its input's features that the ranks had better all have its result."""
    return node.kind == "gemm" and node.work.n <= min(THIN, node.work.k // 4)


def attention_heads(node: Node, tokens: int) -> Heads | None:
    """The heads of an attention, fused or as the batched products that it is made of; None for other nodes."""
    op = node.op
    if op is None:
        return None
    if op.kind.startswith("sparse_attention") and op.latent:
        return Heads(op.heads_q, op.heads_q, 0, 0)
    if op.kind.startswith(("attention", "sparse_attention")):
        return Heads(op.heads_q, op.heads_kv, op.head_dim, op.v_head_dim)
    if op.kind.startswith("mla") or KINDS[op.kind].family == "linear_attention":
        return Heads(op.heads, op.heads, 0, 0)
    if op.kind == "gemm" and op.batch > 1 and op.batch * op.m % tokens == 0:
        heads = op.batch * op.m // tokens
        return Heads(heads, heads, op.k, op.k)
    return None

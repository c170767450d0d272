"""What of every op is left to one tensor rank, and what that makes of the tensors it writes.

Rules go by the states of what a node reads (:mod:`.shards`): a product with shared features sums over ranks, one with
a weight cut by columns makes shared features, attention shares its heads, elements are shared as they come. Those of
products stand in :mod:`.products`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from ....datasets.ops import KINDS, Op
from ...graph import GRADIENT, Node
from ...question.plan import Plan
from ..rewriting.draft import Draft, Section
from ..rewriting.nodes import name_of
from ..rewriting.split import axes, share
from .linears import DataFlow
from .shards import (
    COLUMN,
    DONE,
    EXPERT_SUM,
    FEATURES,
    GRADIENT_SUM,
    SCALAR_SUM,
    SUM,
    TABLE,
    TOKENS,
    VOCAB,
    WHOLE,
    Shards,
)
from .work import Limit, RankWork

ADDS = ("add", "add_")
MIXERS = ("attention", "linear_attention")  # families that share heads out, and keep a cache
LINEAR = frozenset(
    "mul mul_ div div_ neg index index_select index_put_ _index_put_impl_ clone copy_ _to_copy sum scatter_add_ "
    "slice_backward select_backward cat".split()
)
SHAPES = frozenset("new_zeros new_ones new_full zeros_like ones_like full_like new_empty empty_like".split())


class Sharing:
    """The rules, with what they know of the graph: its tokens, vocabulary and heads."""

    def __init__(self, draft: Draft, plan: Plan) -> None:
        self.draft, self.plan = draft, plan
        p = plan.parallel
        self.tp, self.sequence = p.tp, p.sequence_parallel
        together = p.etp == 1 and p.ep == 1 and not p.sequence_parallel
        self.expert_parts = p.tp if together else p.etp
        self.token_shares = max(1, p.tp // p.etp) if p.etp > 1 and (p.ep > 1 or p.sequence_parallel) else 1
        self.tokens, self.vocab, self.table = _vocabulary(draft)
        self.full = draft.sizes.copy()
        self.cuts: dict[str, int] = {}
        self.shards = Shards(draft, p.tp, self.tokens)
        self.expert = np.zeros(len(draft.sizes), dtype=bool)
        self.limits: dict[Limit, None] = {}
        self.queries = 0
        self.flows: dict[int, DataFlow] = {}
        self.flow: DataFlow
        self.section: Section

    def enter(self, section: Section) -> None:
        """Begin a section."""
        self.section = section
        if id(section) not in self.flows:
            self.flows[id(section)] = DataFlow(section, self.shards.weight, self.tokens, self.vocab)
        self.flow = self.flows[id(section)]

    def notes(self) -> tuple[str, ...]:
        """What was rounded."""
        padded = -(-self.vocab // self.tp) * self.tp
        return (f"vocabulary of {self.vocab} padded to {padded} for tp={self.tp}",) if padded != self.vocab else ()

    @property
    def reduce_each(self) -> bool:
        """Whether each product that makes summands is reduced by itself, though they meet in a sum."""
        return "reduce_each" in self.plan.stack.fusion

    @property
    def exchange(self) -> str:
        """How ranks exchange what adapters add to layers cut by rows; empty: every rank makes all of it."""
        return self.plan.stack.adapter_exchange

    # --- sums that wait --------------------------------------------------------------------------------------

    def carried(self, node: Node) -> RankWork | None:
        """A node that goes on with summands of a sum over ranks; None where there are none, or it cannot."""
        pending = self.shards.pending
        waiting = {t: int(pending[t]) for t in node.reads if pending[t]}
        if not waiting:
            return None
        if name_of(node) in SHAPES:
            return self.no_product(node)
        how = self._carries(node, waiting)
        if not how:
            return None
        if how == SUM:
            self.scatter(node.writes)
        sums = dict.fromkeys(node.writes, how)
        if how == EXPERT_SUM and len(node.writes) > 1:  # gradients: of the rows, and of the weights that summed them
            largest = max(int(self.shards.numel[t]) for t in node.writes)
            sums = {t: DONE if self.shards.numel[t] == largest else SUM for t in node.writes}
        return RankWork(node.op, pending=sums)

    def _carries(self, node: Node, waiting: dict[int, int]) -> int:
        hows, op = set(waiting.values()), node.op
        name = name_of(node)
        if hows == {GRADIENT_SUM}:
            return GRADIENT_SUM
        if self.reduce_each and hows == {SUM} and len(waiting) > 1:
            return 0
        if name in ADDS and hows <= {SUM, EXPERT_SUM} and not (self.sequence and EXPERT_SUM in hows):
            alone = any(t not in waiting for t in node.reads)
            return 0 if alone else SUM if SUM in hows else EXPERT_SUM
        if hows != {EXPERT_SUM} or len(waiting) > 1 or op is None or self.sequence:
            return 0
        if op.kind == "reduce":
            return SUM if op.inner == 1 else EXPERT_SUM
        return EXPERT_SUM if op.kind in ("moe_permute", "copy") or name in LINEAR else 0

    # --- every kind ------------------------------------------------------------------------------------------

    def no_product(self, node: Node) -> RankWork:
        """One rank's share of a node that is no product and whose operands are summed."""
        kind = node.kind
        if self._looks_up(node):
            return self._table(node)
        self.note_sources(node)
        top = self.top(node)
        if top == WHOLE:
            return self._of_weights(node)
        if kind == "reduce":
            return self._reduce(node, top)
        if kind == "quantize" and top == TOKENS and self.plan.settings.fp8_scaling == "rowwise":
            return RankWork(node.op, self.to_gather(node.reads))  # rows of all tokens
        norm = bool(kind) and KINDS[kind].purpose == "norm"
        if norm and top == FEATURES and self._spans_ranks(node):
            return self._wide_norm(node)
        if (norm and KINDS[kind].backward) or (kind == "embedding_backward" and top == TOKENS):
            return self._gradients(node, top)
        return self.by_tokens(node) if top == TOKENS else self._features(node, top)

    def _of_weights(self, node: Node) -> RankWork:
        """A node that rounds or transposes weights alone has a rank's share of them to do; others stay whole."""
        shards, op = self.shards, node.op
        parts = shards.share(node.reads[0]) if node.reads else Fraction(1)
        if op is None or op.kind not in ("quantize", "copy") or not all(shards.weight[t] for t in node.reads):
            return RankWork(op)
        for tensor in node.writes:
            shards.mark(self.section, tensor, FEATURES, parts)
        return RankWork(share(op, "elements", parts, uneven=True), parts=parts)

    def top(self, node: Node) -> int:
        """The state that decides a node: the most shared of its operands, weights apart."""
        shards = self.shards
        return max((int(shards.kind[t]) for t in node.touches if not shards.weight[t]), default=WHOLE)

    def note_sources(self, node: Node) -> None:
        """What is made of weights alone is a weight; what is made of nothing takes the state of its use."""
        shards = self.shards
        tensors = [t for t in node.reads if t not in node.writes]
        for written in node.writes:
            if tensors and all(shards.weight[t] for t in tensors):
                self._derive(written, tensors)
            if all(shards.generated[t] for t in node.reads):
                shards.generated[list(self.section.ids(written))] = True

    def _derive(self, written: int, sources: list[int]) -> None:
        shards, ids = self.shards, list(self.section.ids(written))
        shards.weight[ids] = True
        for source in sources:
            if shards.numel[source] == shards.numel[written] and shards.kind[written] > shards.kind[source]:
                shards.mark(self.section, source, int(shards.kind[written]), shards.share(written), visible=True)
                shards.cut[list(self.section.ids(source))] = shards.cut[written]

    def _adopt(self, node: Node, kind: int, parts: Fraction | int) -> None:
        """Operands without a history of their own (dropout masks, biases, caches) are shared as the result is."""
        shards = self.shards
        size = int(shards.numel[node.writes[0]]) if node.writes else 0
        keeps = name_of(node) == "cat" or (node.op is not None and KINDS[node.op.kind].family in MIXERS)
        for tensor in node.reads:
            if shards.kind[tensor] >= kind:
                continue
            generated = shards.generated[tensor] and shards.numel[tensor] == size
            bias = shards.weight[tensor] and kind == FEATURES and shards.numel[tensor] * self.tokens == size
            cache = kind == FEATURES and keeps and self.draft.role(tensor) == "cache"
            if generated or bias or cache:
                shards.mark(self.section, tensor, kind, parts, visible=True)

    def by_tokens(self, node: Node) -> RankWork:
        op = node.op
        if op is not None and "tokens" in axes(op):
            op = share(op, "tokens", self.tp, uneven=True)
        sums = {t: GRADIENT_SUM for t in node.writes if self.draft.role(t) == "gradient"}
        for tensor in (t for t in node.writes if t not in sums):
            if self.shards.numel[tensor] >= self.tokens:
                self.shards.mark(self.section, tensor, TOKENS, self.tp, tensor in node.reads)
        self._adopt(node, TOKENS, self.tp)
        return RankWork(op, pending=sums, parts=Fraction(self.tp))

    def _features(self, node: Node, top: int) -> RankWork:
        shards, kind = self.shards, node.kind
        sources = [t for t in node.touches if shards.kind[t] == top and not shards.weight[t]]
        cached = any(self.draft.role(t) == "cache" for t in node.touches)
        new = [t for t in sources if self.draft.role(t) != "cache"] or sources
        parts = shards.share(new[0])
        largest = max(shards.numel[t] for t in sources)
        pending = {}
        for tensor in node.writes:
            if top == VOCAB and shards.numel[tensor] < largest:
                continue
            if node.op is not None and kind == "rope" and self._one_for_all(tensor, node.op.head_dim, sources):
                if node.phase == "backward":
                    pending[tensor] = SUM
                    self.scatter((tensor,))
                continue
            parts = shards.share(new[0]) if cached else shards.derived(tensor, sources)
            shards.mark(self.section, tensor, top, parts, tensor in node.reads)
        if top == VOCAB:
            parts = shards.share(sources[0])
        self._adopt(node, top, parts)
        if kind and KINDS[kind].family in MIXERS:
            self._adopt_generated(node)
            parts = Fraction(self.tp)
        picks = "nll_loss_forward" in node.source  # one word's logit of each row
        statistics = 1 if picks else KINDS[kind].statistics if kind else 0
        gathers = self.to_gather(node.reads)
        op = node.op if picks else self._of_features(node.op, parts, top)
        return RankWork(op, gathers, pending, statistics if top == VOCAB else 0, parts)

    def _largest(self, node: Node, top: int) -> int:
        """The largest tensor in a state that a node reads."""
        return max((t for t in node.reads if self.shards.kind[t] == top), key=lambda t: int(self.shards.numel[t]))

    def _over_all(self, length: int, source: int) -> bool:
        """Whether rows run over all features of a token, which several ranks share, not over those of a head."""
        return length * self.tokens == int(self.shards.numel[source]) and self.shards.share(source) > 1

    def _spans_ranks(self, node: Node) -> bool:
        """Whether a norm's rows are shared by several ranks."""
        return node.op is not None and self._over_all(node.op.cols, self._largest(node, FEATURES))

    def _wide_norm(self, node: Node) -> RankWork:
        """A norm over all queries or keys: each rank has its features and weights, and the statistics are summed."""
        op, shards = node.work, self.shards
        source = self._largest(node, FEATURES)
        parts = shards.share(source)
        for tensor in node.reads:
            if shards.weight[tensor]:
                self.cut(tensor, COLUMN, FEATURES, parts)
        for tensor in node.writes:
            if shards.numel[tensor] == shards.numel[source] or self.draft.role(tensor) == "gradient":
                shards.mark(self.section, tensor, FEATURES, parts, tensor in node.reads)
        return RankWork(share(op, "features", parts, uneven=True), statistics=KINDS[op.kind].statistics, parts=parts)

    def _one_for_all(self, tensor: int, width: int, sources: list[int]) -> bool:
        """Whether a tensor is what all heads share (the rotary part of MLA's keys): heads' gradients add up to one."""
        numel = int(self.shards.numel[tensor])
        return numel <= self.tokens * width and all(numel < self.shards.numel[t] for t in sources)

    def _adopt_generated(self, node: Node) -> None:
        """Statistics that attention is handed ready made (zeros a head and token)."""
        for tensor in node.reads:
            if self.shards.generated[tensor] and self.shards.numel[tensor] % max(self.queries, 2) == 0:
                self.shards.mark(self.section, tensor, FEATURES, self.tp, visible=True)

    def _of_features(self, op: Op | None, parts: Fraction, top: int) -> Op | None:
        """An op on elements, rows or heads, of which ``parts`` ranks have a share each."""
        if op is None:
            return None
        axes_of_op = axes(op)
        if "elements" in axes_of_op and "features" in axes_of_op and op.kind in ("elementwise", "copy"):
            run, size = (op.run, op.numel) if op.kind == "elementwise" else (op.run_bytes, op.size_bytes)
            axis = "features" if run and run * self.tokens >= size else "elements"
        elif KINDS[op.kind].purpose in ("norm", "softmax"):
            axis = "vocab" if top == VOCAB else "heads"
        else:
            ways = ("vocab", "features", "heads") if top == VOCAB else ("features", "heads")
            axis = next((way for way in ways if way in axes_of_op), "elements")
        return share(op, axis, parts, uneven=True) if axis in axes_of_op else op

    # --- sums inside an op -----------------------------------------------------------------------------------

    def _reduce(self, node: Node, top: int) -> RankWork:
        op, result = node.work, node.writes[0]
        if top == TOKENS:
            return self._reduce_tokens(node, op, result)
        source = self._largest(node, top)
        parts = self.shards.share(source)
        if top == VOCAB or (op.inner == 1 and self._over_all(op.length, source)):
            return RankWork(share(op, "length", parts, uneven=True), pending={result: SCALAR_SUM}, parts=parts)
        if op.inner == 1:
            return self._keep_axis(op, "outer", result, parts, parts)
        if op.length == self.tokens and op.outer == 1:
            return self._keep_axis(op, "inner", result, parts, parts)
        if op.length > self.tokens and op.length % self.tokens == 0:
            return RankWork(share(op, "length", parts, uneven=True), pending={result: GRADIENT_SUM}, parts=parts)
        if op.length == self.queries:
            self.scatter((result,))
            return RankWork(share(op, "length", parts, uneven=True), pending={result: SUM}, parts=parts)
        return self._keep_axis(op, "outer" if op.outer > 1 else "inner", result, parts, self.shards.of_width(result))

    def _keep_axis(self, op: Op, axis: str, result: int, parts: Fraction, kept: Fraction) -> RankWork:
        """A sum inside each share: over features of a head, tokens of a feature, or queries' heads of a key's."""
        self.shards.mark(self.section, result, FEATURES, kept)
        shared = share(op, axis, kept, uneven=True)
        if parts > kept:
            shared = share(shared, "length", parts / kept, uneven=True)
        return RankWork(shared, parts=parts)

    def _reduce_tokens(self, node: Node, op: Op, result: int) -> RankWork:
        """Sums over all tokens are gradients of whole weights; others stay with their tokens."""
        over_tokens = op.inner > 1 and op.outer == 1 and op.length % self.tokens == 0
        if over_tokens or (op.inner == 1 and op.outer < self.tp):
            gradient = self.draft.roles[result] == GRADIENT or over_tokens
            return RankWork(
                share(op, "length", self.tp, uneven=True), pending={result: GRADIENT_SUM} if gradient else {}
            )
        self.shards.mark(self.section, result, TOKENS, self.tp)
        axis = "outer" if op.outer >= self.tp else "inner"
        return RankWork(share(op, axis, self.tp, uneven=True), parts=Fraction(self.tp))

    def _gradients(self, node: Node, top: int) -> RankWork:
        """Norms and tables of positions: gradients of the input and of a gate are shared, those of weights sums."""
        work = self.by_tokens(node) if top == TOKENS else self._features(node, top)
        table = node.kind == "embedding_backward"
        stream = -1 if table else max(node.writes, key=lambda t: int(self.shards.numel[t]))
        for tensor in (t for t in node.writes if stream < 0 or self.shards.numel[t] < self.shards.numel[stream]):
            ids = list(self.section.ids(tensor))
            self.shards.kind[ids], self.shards.num[ids], self.shards.den[ids] = WHOLE, 1, 1
            work.pending[tensor] = GRADIENT_SUM
        return work

    def _looks_up(self, node: Node) -> bool:
        """Whether a node reads or makes rows of the table of embeddings, alone or fused with what follows."""
        op = node.op
        if op is None or not self.vocab:
            return False
        if op.kind in ("embedding", "embedding_backward"):
            return op.vocab == self.vocab
        table = (t for t in node.reads if self.shards.weight[t] and self.shards.numel[t] == self.table)
        return op.kind == "elementwise" and node.phase == "forward" and any(True for _ in table) and len(node.reads) > 1

    def _table(self, node: Node) -> RankWork:
        """Rows of the table of embeddings that this rank holds: others' rows are zeros until summed."""
        op, shards = node.work, self.shards
        parts = Fraction(self.vocab, -(-self.vocab // self.tp))
        shared = share(op, "vocab", parts) if op.kind != "elementwise" else op
        if op.kind != "embedding_backward":
            table = max(node.reads, key=lambda t: int(shards.numel[t]))
            self.cut(table, TABLE, VOCAB, parts)
            return self.summed(shared, node, parts)
        self.mark(node, parts, VOCAB)
        return RankWork(shared, self.to_gather(node.reads), parts=parts)

    def cut(self, weight: int, cut: int, kind: int, parts: Fraction | int) -> None:
        self.shards.mark(self.section, weight, kind, parts)
        ids = list(self.section.ids(weight))
        self.shards.cut[ids] = np.where(self.shards.cut[ids] == 0, cut, self.shards.cut[ids])

    def summed(self, op: Op | None, node: Node, parts: Fraction, how: int = SUM) -> RankWork:
        self.scatter(node.writes)
        return RankWork(op, pending=dict.fromkeys(node.writes, how), parts=parts)

    def to_gather(self, tensors: Iterable[int]) -> tuple[int, ...]:
        """Those that are shared by tokens."""
        return tuple(t for t in tensors if self.shards.kind[t] == TOKENS)

    def mark(self, node: Node, parts: Fraction | int, kind: int = FEATURES) -> None:
        """What a node writes is shared so."""
        for tensor in node.writes:
            self.shards.mark(self.section, tensor, kind, parts, tensor in node.reads)

    def scatter(self, tensors: Iterable[int]) -> None:
        """Sums are shared by tokens, under sequence parallelism."""
        for tensor in tensors if self.sequence else ():
            self.shards.mark(self.section, tensor, TOKENS, self.tp)


def _vocabulary(draft: Draft) -> tuple[int, int, int]:
    """Tokens of the step, words and elements of the table of embeddings: of the widest one, else of the head."""
    ops = [item.node.op for _, item in draft.walk() if item.node.op is not None]
    tables = [op for op in ops if op.kind in ("embedding", "embedding_backward")]
    products = [i.node.op for _, i in draft.walk() if i.node.op is not None and _weigh(draft, i.node)]
    if tables:
        widest = max(tables, key=lambda op: op.vocab)
        tokens = max((op.m for op in products), default=widest.tokens)
        return tokens, widest.vocab, widest.vocab * widest.hidden
    tokens = max((op.m for op in products), default=1)
    return (tokens, products[-1].n, products[-1].n * products[-1].k) if products else (tokens, 0, 0)


def _weigh(draft: Draft, node: Node) -> bool:
    product = node.kind == "gemm" and node.phase == "forward" and node.work.batch == 1
    return product and any(draft.role(t) in ("weight", "frozen") for t in node.reads)

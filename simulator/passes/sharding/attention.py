"""Attention whose tokens several ranks share: what one of them computes, and what it exchanges meanwhile.

Each style is a function ``(draft, section, node, call, group, zigzag) -> (nodes, buffers)``: the nodes of one rank in
place of one attention over whole sequences, and the tensors that they need beside its own. With zigzag every rank
computes the same; without it the nodes are those of the last rank, which sees most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from ....datasets.dtypes import itemsize
from ....datasets.mixer_ops import operands
from ....datasets.ops import Op, make_op
from ...graph import NO_CALLS, Node
from ...question.plan import Group
from ..rewriting.draft import Draft, Section
from ..rewriting.nodes import collective
from ..rewriting.split import share

KINDS = ("attention_prefill", "attention_backward", "attention_decode", "mla_prefill", "mla_decode")
SCANS = ("linear_attention_prefill", "linear_attention_backward")
Nodes = tuple[list[Node], tuple[int, ...]]


@dataclass(frozen=True)
class Attention:
    """The dimensions of an attention op, by one name whatever its kind. Widths are elements of a head."""

    op: Op
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    width_k: int
    width_v: int
    causal: bool
    window: int

    @property
    def backward(self) -> bool:
        """Whether it computes gradients."""
        return self.op.kind == "attention_backward"

    def kv_bytes(self, tokens: int) -> float:
        """Bytes of keys and values of so many tokens of every sequence."""
        return self.batch * tokens * self.heads_kv * (self.width_k + self.width_v) * itemsize(self.op.dtype)

    def q_bytes(self, tokens: int) -> float:
        """Bytes of queries."""
        return self.batch * tokens * self.heads_q * self.width_k * itemsize(self.op.dtype)

    def out_elements(self, tokens: int) -> int:
        """Elements of the result."""
        return self.batch * tokens * self.heads_q * self.width_v

    def of(self, seq_q: int, seq_kv: int, causal: bool, window: int = 0) -> Op:
        """The op of a part of queries and keys."""
        changes: dict[str, Any] = {"seq_q": seq_q, "seq_kv": seq_kv, "causal": int(causal)}
        if self.op.kind.startswith("attention"):
            changes["window"] = window
        return self.op.replace(**changes)


class QueryPart(NamedTuple):
    """Queries of a rank against some keys: tokens of each, and whether a causal mask lies over them."""

    seq_q: int
    seq_kv: int
    causal: bool


def attention_of(node: Node) -> Attention | None:
    """The attention that a node computes, or None."""
    op = node.op
    if op is None or op.kind not in KINDS:
        return None
    causal = bool(op.causal)
    if op.kind.startswith("mla"):
        width = op.qk_nope_head_dim + op.qk_rope_head_dim
        return Attention(op, op.batch, op.heads, op.heads, op.seq_q, op.seq_kv, width, op.v_head_dim, causal, 0)
    heads, widths = (op.heads_q, op.heads_kv), (op.head_dim, op.v_head_dim)
    return Attention(op, op.batch, *heads, op.seq_q, op.seq_kv, *widths, causal, op.window)


def ring_parts(tokens: int, ranks: int, causal: bool, zigzag: bool) -> list[QueryPart]:
    """What a rank computes on its own ``tokens`` and on those that arrive, in order of arrival.

    Zigzag under a causal mask: of keys from an earlier rank all queries see the first half, of those from a later
    one the second half of the queries sees all; the rank in the middle of the ring stands for all.
    """
    diagonal = QueryPart(tokens, tokens, causal)
    if not (causal and zigzag):
        return [diagonal] + [QueryPart(tokens, tokens, False)] * (ranks - 1)
    half, middle = tokens // 2, ranks // 2
    earlier, later = QueryPart(tokens, half, False), QueryPart(half, tokens, False)
    return [diagonal, *([earlier] * middle), *([later] * (ranks - 1 - middle))]


def ring(draft: Draft, section: Section, node: Node, call: Attention, group: Group, zigzag: bool) -> Nodes:
    """Keys and values travel round the ring beside the attention on those that have come; gradients follow them."""
    tokens = call.seq_q // group.ranks
    if call.window:
        return _neighbours(draft, section, node, call, group, zigzag)
    parts = ring_parts(tokens, group.ranks, call.causal, zigzag)
    size, dtype = call.kv_bytes(tokens), call.op.dtype
    buffers = tuple(draft.local(section, size, dtype) for _ in range(min(2, group.ranks - 1)))
    send = _sender(node, group, dtype, size)
    if call.backward:
        block_bytes = call.kv_bytes(tokens) + call.q_bytes(tokens)
        partial = tuple(draft.local(section, block_bytes, dtype) for _ in buffers)
        home = tuple(draft.local(section, size, dtype) for _ in buffers)
        return _ring_backward(node, call, parts, (buffers, partial, home), send), (*buffers, *partial, *home)
    return _ring_forward(node, call, parts, buffers, send), buffers


def _ring_forward(
    node: Node, call: Attention, parts: list[QueryPart], buffers: tuple[int, ...], send: Any
) -> list[Node]:
    nodes: list[Node] = []
    here = node.reads
    for step, query_part in enumerate(parts):
        coming = buffers[step % len(buffers)]
        if step + 1 < len(parts):
            nodes.append(send(here, (coming,)))
        merged = node.writes if step else ()
        reads = tuple(dict.fromkeys((*node.reads, *here, *merged)))
        nodes.append(_compute(node, call.of(*query_part), reads, node.writes))
        if step:
            nodes.append(_merge(node, call.out_elements(query_part.seq_q), node.writes, node.writes))
        here = (coming,)
    return nodes


def _ring_backward(
    node: Node, call: Attention, parts: list[QueryPart], buffers: tuple[tuple[int, ...], ...], send: Any
) -> list[Node]:
    """Gradients of keys and values are summed on their way round and come home after the last part.

    ``buffers``: keys and values that come, gradients of one part, and gradients under way.
    """
    arriving, partial, home = buffers
    nodes: list[Node] = []
    here, travelling = node.reads, node.writes
    for step, query_part in enumerate(parts):
        coming = (arriving[step % len(arriving)],)
        if step + 1 < len(parts):
            nodes.append(send(here, coming))
        results = (partial[step % len(partial)],) if step else node.writes
        nodes.append(_compute(node, call.of(*query_part), (*node.reads, *here), results))
        if step:
            size = call.kv_bytes(query_part.seq_kv) + call.q_bytes(query_part.seq_q)
            nodes.append(_merge(node, int(size / itemsize(call.op.dtype)), (*results, *travelling), travelling))
        onward = node.writes if step + 1 == len(parts) else (home[step % len(home)],)
        nodes.append(send(travelling, onward))
        here, travelling = coming, onward
    return nodes


def _neighbours(draft: Draft, section: Section, node: Node, call: Attention, group: Group, zigzag: bool) -> Nodes:
    """A sliding window needs the last keys of the neighbour only (of both, where a rank has two parts)."""
    tokens = call.seq_q // group.ranks
    beyond = min(call.window, call.seq_kv - tokens)
    size, dtype = call.kv_bytes(beyond) * (1 + zigzag), call.op.dtype
    buffer = draft.local(section, size, dtype)
    send = _sender(node, group, dtype, size)
    op = call.of(tokens, tokens + beyond, call.causal, call.window)
    compute = _compute(node, op, (*node.reads, buffer), node.writes)
    nodes = [send(node.reads, (buffer,)), compute]
    if call.backward:
        merge = _merge(node, int(size / itemsize(dtype)), (buffer, *node.writes), node.writes)
        nodes += [send(node.writes, (buffer,)), merge]
    return nodes, (buffer,)


def gather_attention(draft: Draft, section: Section, node: Node, call: Attention, group: Group, zigzag: bool) -> Nodes:
    """All keys and values are gathered, in backward once more; their gradients are summed and scattered."""
    tokens, size, dtype = call.seq_q // group.ranks, call.kv_bytes(call.seq_kv), call.op.dtype
    gathered_keys = draft.local(section, size, dtype)
    nodes = [collective("all_gather", size, group, node, node.reads, (gathered_keys,), dtype)]
    partial = (draft.local(section, size, dtype),) if call.backward else ()
    reads, writes = (*node.reads, gathered_keys), (*node.writes, *partial)
    for step, op in enumerate(_gathered_parts(call, tokens, group.ranks, zigzag)):
        nodes.append(_compute(node, op, (*reads, *writes) if step else reads, writes))
    if call.backward:
        nodes.append(collective("reduce_scatter", size, group, node, writes, node.writes, dtype))
    return nodes, (gathered_keys, *partial)


def gathered_ring(draft: Draft, section: Section, node: Node, call: Attention, group: Group, zigzag: bool) -> Nodes:
    """The parts of a ring on keys and values that are gathered at once, summed in fp32; gradients go round in fp32.

    PyTorch's ``context_parallel`` with its usual ``rotate_method``, allgather
    (``torch/distributed/tensor/experimental/_attention.py``, _templated_ring_attention and its backward). Nothing hides
    the exchanges: under torch.compile each is waited for at once (``_functional_collectives.py``, _maybe_wrap_tensor).
    """
    if call.window:
        return gather_attention(draft, section, node, call, group, zigzag)
    tokens, dtype = call.seq_q // group.ranks, call.op.dtype
    size, widened = call.kv_bytes(call.seq_kv), itemsize("fp32") / itemsize(dtype)
    gathered_keys = draft.local(section, size, dtype)
    nodes = [collective("all_gather", size, group, node, node.reads, (gathered_keys,), dtype)]
    reads, local_bytes = (*node.reads, gathered_keys), call.kv_bytes(tokens)
    result_bytes = local_bytes + call.q_bytes(tokens) if call.backward else call.out_elements(tokens) * itemsize(dtype)
    partial, sums = draft.local(section, result_bytes, dtype), draft.local(section, result_bytes * widened, "fp32")
    home = (draft.local(section, local_bytes * widened, "fp32"),) if call.backward else ()
    for step, query_part in enumerate(ring_parts(tokens, group.ranks, call.causal, zigzag)):
        nodes.append(_compute(node, call.of(*query_part), reads, (partial,) if step else node.writes))
        news = (partial, sums) if step else node.writes
        if call.backward:
            elements = (call.kv_bytes(query_part.seq_kv) + call.q_bytes(query_part.seq_q)) / itemsize(dtype)
            nodes.append(_merge(node, int(elements), news, (sums,), "fp32"))
            nodes.append(collective("send_recv", local_bytes * widened, group, node, (sums,), home, "fp32"))
        elif step:
            both = (sums, *node.writes)
            nodes.append(_merge(node, call.out_elements(query_part.seq_q), (*news, *node.writes), both, "fp32"))
    return nodes, (gathered_keys, partial, sums, *home)


def _gathered_parts(call: Attention, tokens: int, ranks: int, zigzag: bool) -> list[Op]:
    """An early and a late part of the queries, each against all keys up to it; without zigzag the last part only."""
    if not call.causal:
        return [call.of(tokens, call.seq_kv, False, call.window)]
    if not zigzag:
        return [call.of(tokens, call.seq_kv, True, call.window)]
    half, middle = tokens // 2, ranks // 2
    return [call.of(half, half * position, True, call.window) for position in (middle + 1, 2 * ranks - middle)]


def scattered_heads(draft: Draft, section: Section, node: Node, call: Attention, group: Group, zigzag: bool) -> Nodes:
    """All tokens of 1/cp of the heads: an all-to-all of each operand before, of each result after, in place.

    Keys and values with fewer heads than ranks go to several of them.
    """
    del draft, section, zigzag
    tokens, dtype = call.seq_q // group.ranks, call.op.dtype
    few = max(1, group.ranks // call.heads_kv)
    op = call.op.replace(**_fewer_heads(call, group.ranks))
    queries, outputs = call.q_bytes(tokens), call.out_elements(tokens) * itemsize(dtype)
    both = call.kv_bytes(tokens) * few
    keys = both * call.width_k / (call.width_k + call.width_v)
    before = (outputs,) if call.backward else (queries, keys, both - keys)
    after = (queries, keys, both - keys) if call.backward else (outputs,)
    first, last = node.reads[:1] if call.backward else node.reads, node.writes

    def exchange(size: float, tensors: tuple[int, ...]) -> Node:
        return collective("all_to_all", size, group, node, tensors, tensors, dtype)

    nodes = [exchange(size, _nth(first, index)) for index, size in enumerate(before)]
    nodes.append(_compute(node, op, node.reads, node.writes))
    nodes += [exchange(size, _nth(last, index)) for index, size in enumerate(after)]
    return nodes, ()


def scattered_scan(node: Node, group: Group) -> list[Node]:
    """All tokens of 1/cp of the heads of linear attention: what is exchanged is what a scan reads and makes.

    So does Megatron-Core, whatever attention does (``megatron/core/ssm/mamba_context_parallel.py``).
    """
    op = node.work
    tokens = op.batch * op.seq / group.ranks * itemsize(op.dtype)
    keys, values, gates = (float(operand) * tokens for operand in operands(op))
    sizes = (values, keys + values + gates) if op.kind.endswith("backward") else (keys + values + gates, values)
    scan = _compute(node, share(op, "heads", group.ranks, uneven=True), node.reads, node.writes)
    before, after = (
        collective("all_to_all", size, group, node, tensors[:1], tensors[:1], op.dtype)
        for size, tensors in zip(sizes, (node.reads, node.writes), strict=True)
    )
    return [before, scan, after]


def partial_generation(draft: Draft, section: Section, node: Node, call: Attention, group: Group) -> Nodes:
    """A step of generation over 1/cp of the cached tokens, and its merger with what the other ranks found.

    Every rank attends with all queries; the logarithms of its sums of exponentials are gathered, its result is weighted
    by them and summed over ranks (Flash-Decoding's merger across devices, as vLLM's decode context parallelism does it;
    Helix, arXiv 2507.07120, sec. 2.1, exchanges the same partial results by an all-to-all).
    """
    tokens, window = ceil(call.seq_kv / group.ranks), ceil(call.window / group.ranks)
    elements, dtype = call.out_elements(call.seq_q), call.op.dtype
    sums = draft.local(section, call.batch * call.seq_q * call.heads_q * 4 * group.ranks, "fp32")
    out = node.writes[:1]
    gathered = call.batch * call.seq_q * call.heads_q * 4 * group.ranks
    nodes = [
        _compute(node, call.of(call.seq_q, tokens, call.causal, window), node.reads, node.writes),
        collective("all_gather", gathered, group, node, out, (sums,), "fp32"),
        _merge(node, elements, (*out, sums), out),
        collective("all_reduce", elements * itemsize(dtype), group, node, out, out, dtype),
    ]
    return nodes, (sums,)


def _fewer_heads(call: Attention, ranks: int) -> dict[str, int]:
    if call.op.kind.startswith("mla"):
        return {"heads": call.heads_q // ranks}
    return {"heads_q": call.heads_q // ranks, "heads_kv": max(1, call.heads_kv // ranks)}


def _nth(tensors: tuple[int, ...], index: int) -> tuple[int, ...]:
    """One operand of several; all of them where they lie in fewer tensors."""
    return tensors[index : index + 1] or tensors[:1]


def _compute(node: Node, op: Op, reads: tuple[int, ...], writes: tuple[int, ...]) -> Node:
    moved = int(op.cost.bytes)
    return replace(
        node, op=op, reads=tuple(dict.fromkeys(reads)), writes=writes, bytes_moved=moved, frees=(), host=NO_CALLS
    )


def _merge(node: Node, elements: int, reads: tuple[int, ...], writes: tuple[int, ...], dtype: str = "") -> Node:
    """Adds a partial result to what there is, in place."""
    dtype = dtype or (node.op.dtype if node.op else "bf16")
    op = make_op("elementwise", dtype, numel=elements, inputs=2, fn="arithmetic")
    merged = replace(node, op=op, source="opcast.merge", reads=reads, writes=writes, bytes_moved=int(op.cost.bytes))
    return replace(merged, frees=(), host=NO_CALLS)


def _sender(node: Node, group: Group, dtype: str, size: float) -> Callable[[tuple[int, ...], tuple[int, ...]], Node]:
    """Exchanges with the neighbours of a ring, beside compute."""

    def send(reads: tuple[int, ...], writes: tuple[int, ...]) -> Node:
        return collective("send_recv", size, group, node, reads, writes, dtype, stream=f"comm:{group.name}")

    return send

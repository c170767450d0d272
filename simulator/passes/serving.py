"""What inference engines run in place of transformers' own code: attention with its cache, experts as one kernel.

``plan.stack.fusion`` names what is done. ``paged_attention``: the kernel appends to the cache itself, positions, masks
and rotary tables are its arguments, layouts need no copies, and rotary embeddings are one kernel, or with
``rope_in_attention`` part of attention. ``absorbed_mla``: latent attention decodes from its latent cache, key and
value projections moved to the side of the queries (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2), and is one kernel for a
prompt. ``fused_moe``: routed experts are one kernel from tokens to their weighted sum. ``rounded_outputs``: what a
product wants in few bits its maker writes so; ``rounded_norms``: norms and activations alone do, of formats with one
scale (torch.compile merges them). ``ungrouped_decode``: a decode kernel reads keys and values once for
every query head, as before kernels shared them (TensorRT-LLM until 2023).

:func:`serve` comes before fusion, :func:`bare` after it, :func:`rounded` after quantization and :func:`ungrouped` last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...datasets.dtypes import itemsize
from ...datasets.ops import Op, make_op
from ..graph import Graph, Node
from ..question.plan import Plan
from ..trace.workload import load_text, skew_of
from .rewriting.draft import Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed
from .rewriting.nodes import kernel

ATTENTION = ("attention_prefill", "attention_decode", "mla_prefill", "mla_decode")
APPLY = 2  # the part of a rounding that is left where a checkpoint says the scale of the whole tensor
ACTIVATIONS = ("silu_mul", "gelu")
COMPILED = (*ACTIVATIONS, "rms_norm", "layer_norm", "elementwise")
SPARSE = ("sparse_attention_prefill", "sparse_attention_decode")
CACHING = (*ATTENTION, *SPARSE, "sparse_index_prefill", "sparse_index_decode")  # kernels that append to their caches
KEEPING = (*CACHING, "linear_attention_prefill")
READING = (*CACHING, "causal_conv1d", "linear_attention_decode", "gemm")  # a product reads a prompt's latents
APPENDS = ("aten.index_copy_", "aten.copy_", "aten.cat")
LAYOUTS = ("aten.clone", "aten.contiguous")
WHOLE_NUMBERS = ("int64", "int32", "bool")
# Of memory's time that reading again from the last-level cache takes: assumed, between what L2 could at best (5,120 B a
# clock on A100, NVIDIA's white paper of its architecture: 0.28) and no gain.
REREAD = 0.5
EXPERTS = re.compile(r"\bexperts(\.|$)")
SHARED = re.compile(r"shared_expert")
ROTARY = re.compile(r"rotary|rope")
ROUTER = re.compile(r"\b(gate|router)\b")
ROUTED = re.compile(r"\b(gate|router)\b|expert")


def serve(graph: Graph, plan: Plan) -> Graph:
    """The graph with the attention and experts of an inference engine."""
    steps = [step for name, step in STEPS.items() if name in plan.stack.fusion]
    if not steps:
        return graph
    draft = Draft(graph)
    released = freed(draft)
    skew = skew_of(load_text(plan.options.get("expert_load") or ""))
    for section in draft.sections:
        for step in steps:
            step(draft, section)
        for item in section.items if skew else ():
            if _kind(item) == "fused_moe":
                item.change(op=item.node.op.replace(skew=skew))  # type: ignore[union-attr]
    free_after_last_use(draft, released)
    return draft.graph()


def absorb_latents(graph: Graph) -> Graph:
    """The graph with latent attention as engines run it, and everything else as the model's code does."""
    draft = Draft(graph)
    released = freed(draft)
    for section in draft.sections:
        _latent(draft, section)
    free_after_last_use(draft, released)
    return draft.graph()


def bare(graph: Graph, plan: Plan) -> Graph:
    """The graph without what an engine knows beforehand: positions, masks and rotary tables."""
    if "paged_attention" not in plan.stack.fusion:
        return graph
    draft = Draft(graph)
    released = freed(draft)
    dropped: set[int] = set()
    kept: set[int] = set()
    for section in draft.sections:
        for item in section.items:
            tensors = {int(i) for t in item.node.writes for i in section.ids(t)}
            (dropped if _known(draft, item.node) else kept).update(tensors)
        section.items = [item for item in section.items if not _known(draft, item.node)]
    gone = dropped - kept
    for _, item in draft.walk():
        if not gone.isdisjoint(item.node.reads):
            item.change(reads=tuple(t for t in item.node.reads if t not in gone))
    free_after_last_use(draft, released)
    return draft.graph()


def rounded(graph: Graph, plan: Plan) -> Graph:
    """The graph without kernels that only round what a product reads: the kernel before writes it so."""
    every = "rounded_outputs" in plan.stack.fusion
    if not plan.quantization or not (every or "rounded_norms" in plan.stack.fusion):
        return graph
    draft = Draft(graph)
    released = freed(draft)
    for section in draft.sections:
        made: dict[int, int] = {}
        rounding = [i for i in section.items if _kind(i) == "quantize" and _merged(section, i, every)]
        gone = {id(item) for item in rounding}
        for item in section.items:
            if every and _kind(item) == "quantize" and id(item) not in gone:
                item.compute(item.node.op.replace(part=APPLY))  # type: ignore[union-attr]
            if id(item) in gone:
                made.update(dict.fromkeys(item.node.writes, item.node.reads[0]))
            elif made.keys() & set(item.node.reads):
                item.change(reads=tuple(dict.fromkeys(made.get(t, t) for t in item.node.reads)))
        section.items = [item for item in section.items if id(item) not in gone]
    free_after_last_use(draft, released)
    return draft.graph()


def _merged(section: Section, rounding: Item, every: bool) -> bool:
    """Whether a rounding is part of the kernel before: ``every`` one but behind activations in NVFP4 (swiglu and
    fp4_quantize are two kernels in TensorRT-LLM), else those with one scale behind norms and activations."""
    makers = [i for i in section.items if rounding.node.reads[0] in i.node.writes]
    maker, op = _kind(makers[-1]) if makers else "", rounding.node.op
    if every:
        return op is None or op.out_dtype != "nvfp4" or maker not in ACTIVATIONS
    return op is not None and op.block == 0 and maker in COMPILED


def ungrouped(graph: Graph, plan: Plan) -> Graph:
    """The graph with decode kernels that read keys and values anew for every query head.

    What one head of a group has read the others mostly find in the cache: an op stands for such a kernel that has as
    many heads, each with keys of its own, as its traffic amounts to.
    """
    if "ungrouped_decode" not in plan.stack.fusion:
        return graph
    draft = Draft(graph)
    for _, item in draft.walk():
        if item.node.op is not None and item.node.op.kind == "attention_decode":
            op = item.node.op
            heads = max(round(op.heads_kv + REREAD * (op.heads_q - op.heads_kv)), 1)
            item.change(op=op.replace(heads_q=heads, heads_kv=heads))
    return draft.graph()


def _known(draft: Draft, node: Node) -> bool:
    """Whether a node makes whole numbers or flags outside of a router, or tables of rotary embeddings."""
    if node.group or (node.op is not None and node.op.kind not in ("elementwise", "copy", "reduce")):
        return False
    if ROTARY.search(node.path):
        return True
    numbers = node.writes and all(draft.dtype(t) in WHOLE_NUMBERS for t in node.writes)
    return bool(numbers) and not ROUTED.search(node.path)


# --- attention -------------------------------------------------------------------------------------------


def _paged(draft: Draft, section: Section) -> None:
    """Attention kernels that append to their caches; no copies of caches or of what is attended.

    Weights lie as products want them, whichever way the model's code stores them.
    """
    _kept(draft, section)
    caches = {t for item in section.items if _kind(item) in CACHING for t in item.node.reads}
    latent = draft.code("int64")  # appended positions are numbers, keys and values are not
    appended: dict[int, tuple[int, ...]] = {}
    for item in list(section.items):
        node = item.node
        if node.source in APPENDS and node.writes and node.writes[0] in caches & set(node.reads):
            new = tuple(t for t in node.reads if t != node.writes[0] and draft.dtypes[t] != latent)
            appended[node.writes[0]] = (*appended.get(node.writes[0], ()), *new)
            section.items.remove(item)
    section.items = [i for i in section.items if not (i.node.source == "aten.zeros" and i.node.writes[0] in appended)]
    for item in section.items:
        if _kind(item) in CACHING:
            new = tuple(t for cache in item.node.reads for t in appended.get(cache, ()))
            item.change(reads=tuple(dict.fromkeys((*item.node.reads, *new))))
    _without_layouts(draft, section)
    for item in [i for i in section.items if _kind(i) in CACHING]:
        _turned(draft, section, item)
        _grouped(draft, section, item, appended)
    for item in section.items:
        if _kind(item) == "gemm" and _weights(draft, item.node):
            item.change(op=item.node.op.replace(layout="nt"))  # type: ignore[union-attr]


def _kept(draft: Draft, section: Section) -> None:
    """Kernels that write what a prompt leaves in caches that its own attention does not read.

    The model's code attends to all keys and values of a prompt longer than a window, or scans it, and copies the last
    ones, or the state, into a new cache beside it.
    """
    for keeper in [item for item in section.items if _kind(item) in KEEPING]:
        beside = [i for i in section.items if i.node.path == keeper.node.path and _kind(i) not in KEEPING]
        made = {t for i in beside if i.node.source in APPENDS for t in i.node.writes if draft.role(t) == "cache"}
        made -= {t for item in section.items if _kind(item) in READING for t in item.node.reads}
        section.items = [i for i in section.items if _kind(i) in KEEPING or made.isdisjoint(i.node.writes)]
        keeper.change(reads=(*keeper.node.reads, *sorted(made)))


def _turned(draft: Draft, section: Section, attention: Item) -> None:
    """One rotary kernel, or none, for all that stands between the projections and attention in the same module."""
    node, op = attention.node, attention.node.op
    wanted, members = set(node.reads), []
    for item in reversed(section.items[: section.items.index(attention)]):
        light = item.node.op is None or _kind(item) in ("elementwise", "copy")
        if light and item.node.path == node.path and wanted.intersection(item.node.writes):
            members.append(item)
            wanted.update(item.node.reads)
    made = {t for item in members for t in item.node.writes}
    inside = {id(item) for item in members}
    used = {t for item in section.items if id(item) not in inside for t in item.node.reads if t in made}
    rotary = any(item.node.source in ("aten.neg", "aten.sub") for item in members)
    if op is None or not members or (not rotary and used - set(node.reads)):
        return
    outside = tuple(dict.fromkeys(t for i in reversed(members) for t in i.node.reads if t not in made))
    if rotary:
        members[0].node = _node(members[0].node, _rope(op), "fused.rope", node.path, outside, sorted(used))
        inside.remove(id(members[0]))
    else:
        attention.change(reads=tuple(dict.fromkeys((*outside, *(t for t in node.reads if t not in made)))))
    section.items = [item for item in section.items if id(item) not in inside]


def _grouped(draft: Draft, section: Section, attention: Item, caches: Iterable[int]) -> None:
    """Keys and values of as many heads as one product of queries, keys and values makes, not as many as queries."""
    op = attention.node.op
    if op is None or op.kind not in ATTENTION[:2] or op.heads_q != op.heads_kv:
        return
    near = [i for i in section.items if i.node.path == attention.node.path and _kind(i) == "rope"]
    read = {t for item in (attention, *near) for t in item.node.reads}
    products = [i.node.op for i in section.items if _kind(i) == "gemm" and read.intersection(i.node.writes)]
    if len(products) != 1 or products[0] is None or op.head_dim != op.v_head_dim:
        return
    heads, rest = divmod(products[0].n // op.head_dim - op.heads_q, 2)
    if rest or not 0 < heads < op.heads_kv or op.heads_q % heads:
        return
    for cache in caches:
        draft.sizes[section.ids(cache)] = draft.sizes[section.ids(cache)] * heads // op.heads_kv
    attention.change(op=op.replace(heads_kv=heads))
    for item in near:
        item.change(op=_rope(attention.node.op))  # type: ignore[arg-type]


def _rope(op: Op) -> Op:
    """Rotary embedding of an attention's queries and keys."""
    if op.kind in ATTENTION[2:]:
        heads, width = op.heads + 1, op.qk_rope_head_dim
    elif op.kind.startswith("sparse_index"):
        heads, width = op.heads + 1, op.head_dim
    elif op.kind in SPARSE and op.latent:
        heads, width = op.heads_q + 1, op.head_dim - op.v_head_dim
    else:
        heads, width = op.heads_q + op.heads_kv, op.head_dim
    return make_op("rope", op.dtype, tokens=op.batch * op.seq_q, heads=heads, head_dim=width)


def _rope_inside(draft: Draft, section: Section) -> None:
    """Rotary embeddings as part of the attention kernel that reads them."""
    for item in [i for i in section.items if i.node.source == "fused.rope"]:
        made = set(item.node.writes)
        section.items.remove(item)
        for reader in section.items:
            if made.intersection(reader.node.reads):
                kept = (t for t in reader.node.reads if t not in made)
                reader.change(reads=tuple(dict.fromkeys((*item.node.reads, *kept))))


def _without_layouts(draft: Draft, section: Section) -> None:
    """Drop copies around attention that only change the layout: kernels write what the next one reads."""
    attended = {t for i in section.items if _kind(i) in CACHING for t in (*i.node.reads, *i.node.writes)}
    same: dict[int, int] = {}
    for item in list(section.items):
        node = item.node
        if node.source in LAYOUTS and len(node.reads) == len(node.writes) == 1:
            source, made = node.reads[0], node.writes[0]
            if draft.sizes[source] == draft.sizes[made] and not attended.isdisjoint((source, made)):
                same[made] = same.get(source, source)
                section.items.remove(item)
    if same:
        for item in section.items:
            item.change(reads=tuple(dict.fromkeys(same.get(t, t) for t in item.node.reads)))


def _latent(draft: Draft, section: Section) -> None:
    """Multi-head latent attention as engines run it, wherever keys and values are projected from a latent cache."""
    for item in [i for i in section.items if _kind(i) in (*ATTENTION[:2], *SPARSE)]:
        _of_latents(draft, section, item)


def _of_latents(draft: Draft, section: Section, attention: Item) -> None:
    """One attention as engines run it, where its keys and values are projected from a latent cache."""
    own = [i for i in section.items if i.node.path.startswith(f"{attention.node.path}.")]
    up = next((i for i in own if attention.node.op is not None and _projects(i, attention.node.op)), None)
    if up is None or up.node.op is None or attention.node.op is None:
        return
    op, gemm = attention.node.op, up.node.op
    nope = gemm.n // op.heads_q - op.v_head_dim
    widths = Widths(op.batch * op.seq_q, op.heads_q, gemm.k, nope, op.v_head_dim)
    if op.kind in SPARSE:
        width = gemm.k + op.head_dim - nope
        latent = op.replace(heads_kv=1, head_dim=width, v_head_dim=gemm.k, latent="yes")
        _gather_keys(draft, section, attention, up, {*up.node.reads} - set(_weights(draft, up.node)))
        _absorb(draft, section, attention, up, latent, widths)
        return
    dims = {
        "batch": op.batch,
        "heads": op.heads_q,
        "seq_q": op.seq_q,
        "seq_kv": op.seq_kv,
        "kv_lora_rank": gemm.k,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": op.head_dim - nope,
        "v_head_dim": op.v_head_dim,
        "causal": op.causal,
    }
    if op.kind == "attention_prefill":
        attention.change(op=make_op("mla_prefill", op.dtype, op.out_dtype, **dims))
        _gather_keys(draft, section, attention, up, {*up.node.writes})
        return
    latent = make_op("mla_decode", op.dtype, op.out_dtype, **dims)
    _gather_keys(draft, section, attention, up, {*up.node.reads} - set(_weights(draft, up.node)))
    _absorb(draft, section, attention, up, latent, widths)


def _projects(item: Item, op: Op) -> bool:
    """Whether a node makes keys and values of all heads from a latent of every cached token."""
    gemm = item.node.op
    wanted = op.batch * op.seq_kv
    return bool(gemm is not None and gemm.kind == "gemm" and "kv_b" in item.node.path and gemm.m == wanted)


def _gather_keys(draft: Draft, section: Section, attention: Item, up: Item, latents: set[int]) -> None:
    """Let attention read what its keys were put together from, and leave the putting together out."""
    keys = set(attention.node.reads) - set(up.node.writes)
    reads = dict.fromkeys((*attention.node.reads, *sorted(latents)))
    for item in list(section.items):
        node = item.node
        if node.source in ("aten.cat", "aten.copy_") and keys.intersection(node.writes):
            section.items.remove(item)
            reads.update(dict.fromkeys(node.reads))
            for made in node.writes:
                reads.pop(made, None)
    attention.change(reads=tuple(reads))


class Widths(NamedTuple):
    """Sizes of latent attention: rows of queries, heads, and widths of the latent, of keys without rope, of values."""

    rows: int
    heads: int
    latent: int
    nope: int
    value: int


def _absorb(draft: Draft, section: Section, attention: Item, up: Item, op: Op, of: Widths) -> None:
    """Queries times the keys' projection, attention over the latent cache, its result times the values' projection."""
    weights = _weights(draft, up.node)
    size = of.rows * of.heads * of.latent * itemsize(op.dtype)
    queries, attended = (draft.local(section, size, op.dtype) for _ in range(2))
    into = make_op("gemm", op.dtype, batch=of.heads, m=of.rows, n=of.latent, k=of.nope, layout="nn")
    out = make_op("gemm", op.dtype, batch=of.heads, m=of.rows, n=of.value, k=of.latent, layout="nt")
    node, reads = attention.node, tuple(t for t in attention.node.reads if t not in up.node.writes)
    path, made = up.node.path, tuple(t for t in reads if draft.role(t) == "activation")
    projected = [
        Item(_node(up.node, into, "fused.absorb_keys", path, (*made, *weights), (queries,))),
        Item(_node(node, op, f"fused.{op.kind}", node.path, (queries, *reads), (attended,))),
        Item(_node(up.node, out, "fused.absorb_values", path, (attended, *weights), node.writes[:1])),
    ]
    section.items.remove(up)
    at = section.items.index(attention)
    section.items[at : at + 1] = projected


# --- experts ---------------------------------------------------------------------------------------------


def _experts(draft: Draft, section: Section) -> None:
    """Every run of routed experts in a section as one kernel."""
    members = [i for i in section.items if EXPERTS.search(i.node.path) and not SHARED.search(i.node.path)]
    for path in dict.fromkeys(EXPERTS.split(i.node.path)[0] for i in members):
        own = [i for i in members if i.node.path.startswith(path) and i.node.phase == "forward"]
        op = _fused_moe([i.node for i in own if i.node.op is not None])
        if op is None:
            continue
        _replace(section, own, op, "fused.moe", f"{path}experts")
        router = [i for i in section.items if ROUTER.search(i.node.path) and i.node.path.startswith(path)]
        _route(draft, section, router, op)


def _fused_moe(nodes: list[Node]) -> Op | None:
    """The kernel that two grouped products and what stands between them amount to."""
    products = [n.op for n in nodes if n.op is not None and n.op.kind == "grouped_gemm"]
    routes = [n.op for n in nodes if n.op is not None and n.op.kind == "moe_permute"]
    if len(products) != 2 or not routes:
        return None
    (first, second), topk = products, routes[0].topk
    return make_op(
        "fused_moe",
        tokens=first.tokens // topk,
        hidden=second.n,
        inter=second.k,
        topk=topk,
        experts=first.experts,
        gated=int(first.n == 2 * second.k),
        dtype=first.dtype,
        out_dtype=second.out_dtype,
    )


def _route(draft: Draft, section: Section, router: list[Item], moe: Op) -> None:
    """Scores as products of the model's own format, and one kernel from scores to weights of the chosen experts."""
    scores = [i for i in router if _kind(i) == "gemm"]
    rest = [i for i in router if _kind(i) != "gemm"]
    choice = [i for i in rest if _kind(i) == "moe_route"]
    if len(scores) != 1 or not choice:
        return
    gemm = scores[0]
    casts = {
        i.node.writes[0]: i for i in rest if i.node.source == "aten._to_copy" and i.node.writes[0] in gemm.node.reads
    }
    if casts and gemm.node.op is not None:
        reads = tuple(casts[t].node.reads[0] if t in casts else t for t in gemm.node.reads)
        gemm.change(reads=reads, op=gemm.node.op.replace(dtype=moe.dtype))
    gone = {id(item) for item in casts.values()}
    section.items = [item for item in section.items if id(item) not in gone]
    op = make_op("moe_route", choice[-1].node.op.dtype, tokens=moe.tokens, experts=moe.experts, topk=moe.topk)  # type: ignore[union-attr]
    _replace(section, [i for i in rest if id(i) not in gone], op, "fused.moe_route", choice[-1].node.path)


def _replace(section: Section, members: list[Item], op: Op, source: str, path: str) -> None:
    """One node in the place of the last member: it reads what all read from outside, writes what others then read."""
    nodes, inside = [item.node for item in members], {id(item) for item in members}
    made = {t for node in nodes for t in node.writes}
    reads = tuple(dict.fromkeys(t for node in nodes for t in node.reads if t not in made))
    used = {t for item in section.items if id(item) not in inside for t in item.node.reads}
    writes = [t for node in nodes for t in node.writes if t in used] or list(nodes[-1].writes)
    members[-1].node = _node(nodes[-1], op, source, path, reads, dict.fromkeys(writes))
    gone = inside - {id(members[-1])}
    section.items = [item for item in section.items if id(item) not in gone]


# --- parts -----------------------------------------------------------------------------------------------


def _node(like: Node, op: Op, source: str, path: str, reads: Iterable[int], writes: Iterable[int]) -> Node:
    return kernel(op, source, path, like.phase, tuple(dict.fromkeys(reads)), tuple(writes))


def _kind(item: Item) -> str:
    return item.node.op.kind if item.node.op is not None else ""


def _weights(draft: Draft, node: Node) -> tuple[int, ...]:
    return tuple(t for t in node.reads if draft.role(t) in ("weight", "frozen"))


OTHERS = ("rounded_outputs", "rounded_norms", "ungrouped_decode", "reduce_each")
STEPS: dict[str, Callable[[Draft, Section], None]] = {
    "absorbed_mla": _latent,
    "fused_moe": _experts,
    "paged_attention": _paged,
    "rope_in_attention": _rope_inside,
}

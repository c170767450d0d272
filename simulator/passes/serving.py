"""What inference engines run in place of transformers' own code: attention with its cache, experts as one kernel.

``plan.stack.fusion`` names what is done. ``paged_attention``: the kernel appends to the cache itself, positions, masks
and rotary tables are its arguments, layouts need no copies, and rotary embeddings are one kernel, or with
``rope_in_attention`` part of attention. ``absorbed_mla``: latent attention decodes from its latent cache, key and
value projections moved to the side of the queries (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2), and is one kernel for a
prompt. ``fused_moe``: routed experts are one kernel from tokens to their weighted sum. ``rounded_outputs``: what a
product wants in few bits its maker writes so; ``rounded_norms``: norms and activations alone do, of formats with one
scale (torch.compile merges them). ``ungrouped_decode``: a decode kernel reads keys and values once for
every query head, as before kernels shared them (TensorRT-LLM until 2023).

:func:`serve` comes before fusion, :func:`drop_precomputed` after it, :func:`fuse_quantization` after quantization and
:func:`ungroup_heads` last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ...datasets.dtypes import itemsize
from ...datasets.ops import Op, make_op
from ..graph import Graph, Node
from ..question.plan import Plan
from ..trace.workload import load_text, skew_of
from .rewriting.draft import WHOLE_NUMBERS, Draft, Item, Section
from .rewriting.lifetimes import free_after_last_use, freed_tensors
from .rewriting.match import (
    bypass,
    distinct,
    drop,
    find,
    insert,
    merge,
    outputs_of,
    read_instead,
    rewrite,
    weights_of,
    writes_of,
)
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
    skew = skew_of(load_text(plan.settings.expert_load))

    def skew_experts(_: Draft, section: Section) -> None:
        for item in find(section, ("fused_moe",)) if skew else ():
            item.change(op=item.node.work.replace(skew=skew))

    return rewrite(graph, *steps, skew_experts) if steps else graph


def absorb_latents(graph: Graph) -> Graph:
    """The graph with latent attention as engines run it, and everything else as the model's code does."""
    return rewrite(graph, _latent)


def drop_precomputed(graph: Graph, plan: Plan) -> Graph:
    """The graph without what an engine knows beforehand: positions, masks and rotary tables."""
    if "paged_attention" not in plan.stack.fusion:
        return graph
    draft = Draft(graph)
    released = freed_tensors(draft)
    constants: set[int] = set()
    others: set[int] = set()
    for section in draft.sections:
        precomputed = [item for item in section.items if _is_precomputed(draft, item.node)]
        drop(section, precomputed)
        for items, tensors in ((precomputed, constants), (section.items, others)):
            tensors.update(int(i) for t in writes_of(items) for i in section.ids(t))
    constants -= others
    for section in draft.sections:
        read_instead(section, dict.fromkeys(constants, ()))
    free_after_last_use(draft, released)
    return draft.graph()


def fuse_quantization(graph: Graph, plan: Plan) -> Graph:
    """The graph without kernels that only round what a product reads: the kernel before writes it so."""
    every = "rounded_outputs" in plan.stack.fusion
    if not plan.quantization or not (every or "rounded_norms" in plan.stack.fusion):
        return graph

    def fuse_section(_: Draft, section: Section) -> None:
        quantizations = find(section, ("quantize",))
        merged = [item for item in quantizations if _is_merged(section, item, every)]
        drop(section, merged)
        for item in find(section, ("quantize",)) if every else ():
            item.compute(item.node.work.replace(part=APPLY))
        read_instead(section, {t: item.node.reads[:1] for item in merged for t in item.node.writes})

    return rewrite(graph, fuse_section)


def _is_merged(section: Section, quantization: Item, every: bool) -> bool:
    """Whether a rounding is part of the kernel before: ``every`` one but behind activations in NVFP4 (swiglu and
    fp4_quantize are two kernels in TensorRT-LLM), else those with one scale behind norms and activations."""
    makers = [i for i in section.items if quantization.node.reads[0] in i.node.writes]
    maker, op = makers[-1].node.kind if makers else "", quantization.node.op
    if every:
        return op is None or op.out_dtype != "nvfp4" or maker not in ACTIVATIONS
    return op is not None and op.block == 0 and maker in COMPILED


def ungroup_heads(graph: Graph, plan: Plan) -> Graph:
    """The graph with decode kernels that read keys and values anew for every query head.

    What one head of a group has read the others mostly find in the cache: an op stands for such a kernel that has as
    many heads, each with keys of its own, as its traffic amounts to.
    """
    if "ungrouped_decode" not in plan.stack.fusion:
        return graph
    draft = Draft(graph)
    for _, item in draft.walk():
        if item.node.kind == "attention_decode":
            op = item.node.work
            heads = max(round(op.heads_kv + REREAD * (op.heads_q - op.heads_kv)), 1)
            item.change(op=op.replace(heads_q=heads, heads_kv=heads))
    return draft.graph()


def _is_precomputed(draft: Draft, node: Node) -> bool:
    """Whether a node makes whole numbers or flags outside of a router, or tables of rotary embeddings."""
    if node.group or node.kind not in ("", "elementwise", "copy", "reduce"):
        return False
    if ROTARY.search(node.path):
        return True
    numbers = node.writes and all(draft.dtype(t) in WHOLE_NUMBERS for t in node.writes)
    return bool(numbers) and not ROUTED.search(node.path)


# --- attention -------------------------------------------------------------------------------------------


def _page(draft: Draft, section: Section) -> None:
    """Attention kernels that append to their caches; no copies of caches or of what is attended.

    Weights lie as products want them, whichever way the model's code stores them.
    """
    _write_beside(draft, section)
    kernels = find(section, CACHING)
    caches = {t for item in kernels for t in item.node.reads}
    number = draft.code("int64")  # appended positions are numbers, keys and values are not
    appended: dict[int, tuple[int, ...]] = {}
    appends = [i for i in find(section, sources=APPENDS) if caches & set(i.node.reads) & set(i.node.writes[:1])]
    for item in appends:
        cache = item.node.writes[0]
        entries = (t for t in item.node.reads if t != cache and draft.dtypes[t] != number)
        appended[cache] = (*appended.get(cache, ()), *entries)
    zeros = [i for i in find(section, sources=("aten.zeros",)) if i.node.writes[0] in appended]
    drop(section, [*appends, *zeros])
    for item in kernels:
        entries = (t for cache in item.node.reads for t in appended.get(cache, ()))
        item.change(reads=distinct((*item.node.reads, *entries)))
    _drop_layouts(draft, section)
    for item in kernels:
        _merge_rotary(section, item)
        _group_heads(draft, section, item, appended)
    for item in find(section, ("gemm",)):
        if weights_of(draft, item.node):
            item.change(op=item.node.work.replace(layout="nt"))


def _write_beside(draft: Draft, section: Section) -> None:
    """Kernels that write what a prompt leaves in caches that its own attention does not read.

    The model's code attends to all keys and values of a prompt longer than a window, or scans it, and copies the last
    ones, or the state, into a new cache beside it.
    """
    for keeper in find(section, KEEPING):
        beside = [i for i in find(section, sources=APPENDS, path=keeper.node.path) if i.node.kind not in KEEPING]
        caches = {t for t in writes_of(beside) if draft.role(t) == "cache"}
        caches -= {t for item in find(section, READING) for t in item.node.reads}
        writers = [i for i in section.items if i.node.kind not in KEEPING and not caches.isdisjoint(i.node.writes)]
        drop(section, writers)
        keeper.change(reads=(*keeper.node.reads, *sorted(caches)))


def _merge_rotary(section: Section, attention: Item) -> None:
    """One rotary kernel, or none, for all that stands between the projections and attention in the same module."""
    node, op = attention.node, attention.node.work
    needed, members = set(node.reads), list[Item]()
    for item in reversed(section.items[: section.place(attention)]):
        light = item.node.kind in ("", "elementwise", "copy")
        if light and item.node.path == node.path and needed.intersection(item.node.writes):
            members.insert(0, item)
            needed.update(item.node.reads)
    if not members:
        return
    if any(item.node.source in ("aten.neg", "aten.sub") for item in members):
        merge(section, members, _rope(op), "fused.rope", node.path)
    elif outputs_of(section, members) <= set(node.reads):
        bypass(section, members)


def _group_heads(draft: Draft, section: Section, attention: Item, caches: Iterable[int]) -> None:
    """Keys and values of as many heads as one product of queries, keys and values makes, not as many as queries."""
    op = attention.node.work
    if op.kind not in ATTENTION[:2] or op.heads_q != op.heads_kv:
        return
    ropes = find(section, ("rope",), path=attention.node.path)
    inputs = {t for item in (attention, *ropes) for t in item.node.reads}
    products = [i.node.work for i in find(section, ("gemm",)) if inputs.intersection(i.node.writes)]
    if len(products) != 1 or op.head_dim != op.v_head_dim:
        return
    heads, remainder = divmod(products[0].n // op.head_dim - op.heads_q, 2)
    if remainder or not 0 < heads < op.heads_kv or op.heads_q % heads:
        return
    for cache in caches:
        draft.sizes[section.ids(cache)] = draft.sizes[section.ids(cache)] * heads // op.heads_kv
    op = op.replace(heads_kv=heads)
    attention.change(op=op)
    for item in ropes:
        item.change(op=_rope(op))


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


def _bypass_rotary(_: Draft, section: Section) -> None:
    """Rotary embeddings as part of the attention kernel that reads them."""
    for item in find(section, sources=("fused.rope",)):
        bypass(section, [item])


def _drop_layouts(draft: Draft, section: Section) -> None:
    """Drop copies around attention that only change the layout: kernels write what the next one reads."""
    attended = {t for i in find(section, CACHING) for t in i.node.touches}
    same: dict[int, tuple[int, ...]] = {}
    copies = []
    for item in find(section, sources=LAYOUTS):
        if len(item.node.reads) != 1 or len(item.node.writes) != 1:
            continue
        source, result = item.node.reads[0], item.node.writes[0]
        if draft.sizes[source] == draft.sizes[result] and not attended.isdisjoint((source, result)):
            same[result] = same.get(source, (source,))
            copies.append(item)
    drop(section, copies)
    read_instead(section, same)


def _latent(draft: Draft, section: Section) -> None:
    """Multi-head latent attention as engines run it, wherever keys and values are projected from a latent cache."""
    for attention in find(section, (*ATTENTION[:2], *SPARSE)):
        op = attention.node.work
        products = [i for i in find(section, ("gemm",), below=attention.node.path) if "kv_b" in i.node.path]
        up = next((i for i in products if i.node.work.m == op.batch * op.seq_kv), None)
        if up is not None:
            _attend_latents(draft, section, attention, up)


def _attend_latents(draft: Draft, section: Section, attention: Item, up: Item) -> None:
    """Attention over a latent cache, where ``up`` projects keys and values of all heads from every cached token."""
    op, gemm = attention.node.work, up.node.work
    nope = gemm.n // op.heads_q - op.v_head_dim
    if op.kind in SPARSE:
        latent = op.replace(heads_kv=1, head_dim=gemm.k + op.head_dim - nope, v_head_dim=gemm.k, latent="yes")
    else:
        alike = {name: getattr(op, name) for name in ("batch", "seq_q", "seq_kv", "v_head_dim", "causal")}
        widths = {"kv_lora_rank": gemm.k, "qk_nope_head_dim": nope, "qk_rope_head_dim": op.head_dim - nope}
        kind = op.kind.replace("attention", "mla")
        latent = make_op(kind, op.dtype, op.out_dtype, heads=op.heads_q, **alike, **widths)
    if op.kind == "attention_prefill":
        attention.change(op=latent)
        _gather_keys(section, attention, up, up.node.writes)
        return
    weights = weights_of(draft, up.node)
    _gather_keys(section, attention, up, (t for t in up.node.reads if t not in weights))
    _absorb(draft, section, attention, up, latent, nope)


def _gather_keys(section: Section, attention: Item, up: Item, latents: Iterable[int]) -> None:
    """Let attention read what its keys were put together from, and leave the putting together out."""
    keys = set(attention.node.reads) - set(up.node.writes)
    gathers = [i for i in find(section, sources=("aten.cat", "aten.copy_")) if keys.intersection(i.node.writes)]
    drop(section, gathers)
    reads = (*attention.node.reads, *sorted(latents), *(t for item in gathers for t in item.node.reads))
    gathered = writes_of(gathers)
    attention.change(reads=distinct(t for t in reads if t not in gathered))


def _absorb(draft: Draft, section: Section, attention: Item, up: Item, latent: Op, nope: int) -> None:
    """Queries times the keys' projection, attention over the latent cache, its result times the values' projection."""
    op, gemm, weights = attention.node.work, up.node.work, weights_of(draft, up.node)
    rows, heads, rank = op.batch * op.seq_q, op.heads_q, gemm.k
    queries, attended = (draft.local(section, rows * heads * rank * itemsize(op.dtype), op.dtype) for _ in range(2))
    into = make_op("gemm", op.dtype, batch=heads, m=rows, n=rank, k=nope, layout="nn")
    out = make_op("gemm", op.dtype, batch=heads, m=rows, n=op.v_head_dim, k=rank, layout="nt")
    node = attention.node
    reads = tuple(t for t in node.reads if t not in up.node.writes)
    activations = tuple(t for t in reads if draft.role(t) == "activation")
    before = kernel(into, "fused.absorb_keys", up.node, distinct((*activations, *weights)), (queries,))
    attend = kernel(latent, f"fused.{latent.kind}", node, distinct((queries, *reads)), (attended,))
    after = kernel(out, "fused.absorb_values", up.node, distinct((attended, *weights)), node.writes[:1])
    insert(section, section.place(attention), map(Item, (before, attend, after)))
    drop(section, (up, attention))


# --- experts ---------------------------------------------------------------------------------------------


def _fuse_experts(_: Draft, section: Section) -> None:
    """Every run of routed experts in a section as one kernel."""
    members = [i for i in section.items if EXPERTS.search(i.node.path) and not SHARED.search(i.node.path)]
    for path in dict.fromkeys(EXPERTS.split(i.node.path)[0] for i in members):
        experts = [i for i in members if i.node.path.startswith(path) and i.node.phase == "forward"]
        op = _fused_moe([i.node.op for i in experts if i.node.op is not None])
        if op is None:
            continue
        merge(section, experts, op, "fused.moe", f"{path}experts")
        router = [i for i in section.items if ROUTER.search(i.node.path) and i.node.path.startswith(path)]
        _route(section, router, op)


def _fused_moe(ops: list[Op]) -> Op | None:
    """The kernel that two grouped products and what stands between them amount to."""
    products = [op for op in ops if op.kind == "grouped_gemm"]
    routes = [op for op in ops if op.kind == "moe_permute"]
    if len(products) != 2 or not routes:
        return None
    (first, second), topk = products, routes[0].topk
    sizes = {"tokens": first.tokens // topk, "hidden": second.n, "inter": second.k, "topk": topk}
    gated = int(first.n == 2 * second.k)
    return make_op("fused_moe", first.dtype, second.out_dtype, **sizes, experts=first.experts, gated=gated)


def _route(section: Section, router: list[Item], moe: Op) -> None:
    """Scores as products of the model's own format, and one kernel from scores to weights of the chosen experts."""
    scores = [i for i in router if i.node.kind == "gemm"]
    choice = [i for i in router if i.node.kind == "moe_route"]
    if len(scores) != 1 or not choice:
        return
    gemm = scores[0].node
    casts = [i for i in router if i.node.source == "aten._to_copy" and i.node.writes[0] in gemm.reads]
    if casts:
        scores[0].read_instead({i.node.writes[0]: i.node.reads[0] for i in casts})
        scores[0].change(op=gemm.work.replace(dtype=moe.dtype))
    drop(section, casts)
    selection = [i for i in router if i is not scores[0] and not any(i is cast for cast in casts)]
    like = choice[-1].node
    op = make_op("moe_route", like.work.dtype, tokens=moe.tokens, experts=moe.experts, topk=moe.topk)
    merge(section, selection, op, "fused.moe_route", like.path)


OTHERS = ("rounded_outputs", "rounded_norms", "ungrouped_decode", "reduce_each")
STEPS: dict[str, Callable[[Draft, Section], None]] = {
    "absorbed_mla": _latent,
    "fused_moe": _fuse_experts,
    "paged_attention": _page,
    "rope_in_attention": _bypass_rotary,
}

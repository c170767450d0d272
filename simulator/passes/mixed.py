"""One pass of an inference engine over prompt chunks and decoding sequences together.

The graph of a prompt of all tokens, after every other pass, has each layer's token-wise kernels as they are. Its
attention becomes one kernel over the chunks, and after it stands what decoding runs in that layer: one kernel over the
decoding sequences and, where latent attention is absorbed, the products around it. These come from the decode step of
the same model under the same plan, so that ranks, formats and windows are as they are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..graph import Graph, Node, shift_path
from ..question.iteration import Iteration, attended
from ..trace.entry import phase_flops
from .rewriting.draft import Draft, Item, Section
from .rewriting.match import distinct, find, insert, rewrite, weights_of

PROMPT = ("attention_prefill", "mla_prefill", "sparse_attention_prefill", "sparse_index_prefill")
DECODE = ("attention_decode", "mla_decode", "sparse_attention_decode", "sparse_index_decode", "linear_attention_decode")
SCAN = "linear_attention_prefill"
ABSORBED = ("fused.absorb_keys", "fused.absorb_values")


def mix(prompts: Graph, decodes: Graph | None, batch: Iteration) -> Graph:
    """The pass over ``batch``: ``prompts`` is that of one prompt of all tokens, ``decodes`` the decode step alone."""
    decoding = _by_path(decodes) if decodes is not None else {}

    def mix_section(draft: Draft, section: Section) -> None:
        for item in find(section, (*PROMPT, SCAN)):
            _chunk(item, batch)
            _project(section, item, batch)
            if decodes is not None:
                _insert(draft, section, item, decoding.get(item.node.path, []), decodes)

    graph = rewrite(prompts, mix_section)
    share = phase_flops(graph, "forward") / max(phase_flops(prompts, "forward"), 1.0)  # ranks share all out alike
    return replace(graph, model_flops=prompts.model_flops * share)


def _by_path(graph: Graph) -> dict[str, list[Node]]:
    """What decoding runs in place of a prompt's attention, in order, by the attention's module."""
    nodes_by_path: dict[str, list[Node]] = {}
    for block in graph.blocks:
        kernels = [node for node in block.nodes if node.kind in DECODE]
        for attention in kernels:
            around = [
                node
                for node in block.nodes
                if node is attention or (node.source in ABSORBED and _around(attention, node))
            ]
            for index in range(block.repeat):
                nodes_by_path[shift_path(attention.path, block.stack, index * block.stride)] = around
    return nodes_by_path


def _around(attention: Node, node: Node) -> bool:
    """Whether a product belongs to a step of latent attention alone: sparse ones run their prompts so, too."""
    dense = attention.kind == "mla_decode"
    return dense and node.path.startswith(f"{attention.path}.")


def _chunk(item: Item, batch: Iteration) -> None:
    """The attention of the chunks in place of that of one prompt of all tokens."""
    count, new, keys = attended(batch.chunks)
    sizes = {"seq": new} if item.node.kind == SCAN else {"seq_q": new, "seq_kv": keys}
    item.compute(item.node.work.replace(batch=count, **sizes))


def _project(section: Section, attention: Item, batch: Iteration) -> None:
    """Keys and values of a latent cache are projected up for the chunks and what is cached of them, for no one else."""
    op = attention.node.work
    if op.kind != "mla_prefill":
        return
    for item in find(section, ("gemm",), below=attention.node.path):
        gemm = item.node.work
        if gemm.k == op.kv_lora_rank and gemm.batch == 1:
            item.compute(gemm.replace(m=batch.prefill_tokens + batch.prefill_context))


def _insert(draft: Draft, section: Section, attention: Item, nodes: Sequence[Node], decodes: Graph) -> None:
    """Puts what decoding runs after the chunks' attention: each reads what the one before wrote."""
    weights = {item.node.path: weight_ids for item in section.items if (weight_ids := weights_of(draft, item.node))}
    beside = tuple(t for t in attention.node.reads if draft.role(t) != "cache")
    reads, items = beside, []
    for node in nodes:
        absorbed_weights = weights.get(node.path, ()) if node.source in ABSORBED else ()
        size = sum(decodes.tensor(t).size_bytes for t in node.writes)
        last = node is nodes[-1]
        written = (
            attention.node.writes if last else (draft.local(section, size, draft.dtype(attention.node.writes[0])),)
        )
        cached: tuple[int, ...] = ()
        if node.kind in DECODE:
            cached = (*beside, *_own_caches(draft, section, decodes, node))
        new = replace(
            node,
            path=node.path if node.source in ABSORBED else attention.node.path,
            reads=distinct((*reads, *absorbed_weights, *cached)),
            writes=written,
            frees=(),
        )
        items.append(Item(new))
        reads = written
    insert(section, section.place(attention) + 1, items)


def _own_caches(draft: Draft, section: Section, decodes: Graph, node: Node) -> tuple[int, ...]:
    """Caches of the decoding sequences: none but this kernel reads them, once a pass."""
    caches = [decodes.tensor(t) for t in node.reads if decodes.tensor(t).role == "cache"]
    return tuple(draft.local(section, cache.size_bytes, cache.dtype, "cache") for cache in caches)

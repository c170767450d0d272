"""Mixers of tokens beside attention to all of them: linear attention with a state, and attention to chosen tokens.

*Linear attention* keeps, for each head, one state of ``state_dim`` x ``head_dim`` instead of all keys and values. Over
a prompt it runs in chunks: products inside a chunk as in attention, and from chunk to chunk through the state. ``rule``
says how a token changes the state:

- ``ssd``: decayed by a number a head, then the outer product of key and value added (Mamba-2; Dao and Gu 2024, arXiv
  2405.21060, sec. 6; queries are C, keys B, values x of that paper);
- ``gated_delta``: what the key reads of the decayed state is replaced (Yang et al. 2024, arXiv 2412.06464, sec. 3;
  chunks by the WY form of arXiv 2406.06484, sec. 3.2);
- ``kda``: the same with a decay for each element of a key (Kimi Linear, arXiv 2510.26692, sec. 3).

*Sparse attention* (DeepSeek-V3.2-Exp's report, sec. 2.1, "lightning indexer") scores all tokens by a few small heads,
and attends to the ``topk`` best of every query alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .vocabulary import Cost, Dim, define

RULES = ("ssd", "gated_delta", "kda")
SSD, GATED_DELTA, KDA = range(len(RULES))
STATE_FORMATS = ("fp32", "bf16")  # of a state: most kernels keep it in fp32
STATE_BYTES = 4.0  # of an element of it in fp32
SCORE_BYTES = 4.0  # of a score of the indexer, and of the index of a chosen token

STATES = (
    Dim("batch", default=1),
    Dim("heads", help="heads of values, each with a state"),
    Dim("groups", help="heads of queries and keys, each shared by as many heads of values", along=("heads",)),
    Dim("head_dim", help="width of a value"),
    Dim("state_dim", help="width of a query and of a key: a state has state_dim x head_dim elements"),
    Dim("rule", low=0, default=0, choices=RULES, help="how a token changes the state"),
)
SCANNED = (
    *STATES[:-1],
    Dim("seq", help="tokens of each sequence", along=()),
    Dim("chunk", default=128, help="tokens that are multiplied as one block"),
    STATES[-1],
)
CHOOSING = (
    Dim("batch", default=1),
    Dim("heads_q"),
    Dim("heads_kv"),
    Dim("head_dim"),
    Dim("v_head_dim"),
    Dim("seq_q"),
    Dim("seq_kv"),
    Dim("topk", help="tokens that a query attends to"),
    Dim("latent", low=0, default=0, choices=("no", "yes"), help="values are the first v_head_dim of each key"),
    Dim("kv_dtype", low=0, default=0, choices=("same", "fp8", "int8"), help="format of the cache where it is another"),
)
INDEXING = (
    Dim("batch", default=1),
    Dim("heads", help="heads that score, of one key a token", along=()),
    Dim("head_dim", along=()),
    Dim("seq_q"),
    Dim("seq_kv"),
    Dim("topk", help="tokens that are chosen for each query"),
)


def chunk_pairs(seq: Any, chunk: Any) -> Any:
    """(query, key) pairs of a sequence inside its chunks, each query with those up to its own position."""
    full_chunks, tail = np.floor(seq / chunk), np.mod(seq, chunk)
    return full_chunks * chunk * (chunk + 1.0) / 2.0 + tail * (tail + 1.0) / 2.0


def scan_flops(d: Any) -> tuple[Any, Any]:
    """FLOPs of the chunked form, and the part of them that backward has no need to repeat: the outputs.

    ``ssd``: queries by keys once a group, those by values; keys by values into each chunk's state, queries by it.
    Delta rules: keys by keys and queries by keys, a triangular system of chunk² / 3 a token, its solution times keys
    and values, and three products with the state.
    """
    pairs, tokens = d.batch * chunk_pairs(d.seq, d.chunk), d.batch * d.seq
    state = d.heads * tokens * d.state_dim * d.head_dim
    outputs = 2.0 * d.heads * pairs * d.head_dim + 2.0 * state
    scores = 2.0 * d.groups * pairs * d.state_dim
    delta = np.asarray(d.rule) != SSD
    solved = d.heads * tokens * np.minimum(d.chunk, d.seq) ** 2 / 3.0
    products = 2.0 * d.heads * pairs * (3.0 * d.state_dim + d.head_dim)
    return outputs + np.where(delta, products + solved + 4.0 * state, scores + 2.0 * state), outputs


def operands(d: Any) -> tuple[Any, Any, Any]:
    """Elements of a token of every sequence: queries and keys, values, decays and gates."""
    gates = np.asarray([1.0, 2.0, 1.0])[np.asarray(d.rule, dtype=np.int64)] * d.heads
    gates = gates + np.where(np.asarray(d.rule) == KDA, d.heads * d.state_dim, 0.0)
    return 2.0 * d.groups * d.state_dim, 1.0 * d.heads * d.head_dim, gates


def state_elements(d: Any) -> Any:
    """Elements of the states of all sequences."""
    return 1.0 * d.batch * d.heads * d.state_dim * d.head_dim


@define(*SCANNED, family="linear_attention", purpose="scan")
def linear_attention_prefill(d: Any) -> Cost:
    """Linear attention over a prompt, in chunks: FLOPs as in :func:`scan_flops` (arXiv 2405.21060, sec. 6).

    Reads queries, keys, values and gates, writes the result and the last state.
    """
    keys, values, gates = operands(d)
    tokens = d.batch * d.seq
    bytes_read = tokens * (keys + values + gates) * d.itemsize
    write = tokens * values * d.out_itemsize + STATE_BYTES * state_elements(d)
    return Cost(scan_flops(d)[0], bytes_read, write, "tensor")


@define(*SCANNED, family="linear_attention", purpose="scan")
def linear_attention_backward(d: Any) -> Cost:
    """Gradients of :func:`linear_attention_prefill`: two products for each of its, and its states once more.

    Kernels keep no scores and no states of chunks, but make them again (``mamba_ssm/ops/triton/ssd_combined.py``, FLA's
    ``chunk_gated_delta_rule_bwd``). Reads its operands and the result's gradient, writes theirs.
    """
    keys, values, gates = operands(d)
    forward, outputs = scan_flops(d)
    tokens = d.batch * d.seq
    bytes_read = tokens * (keys + 2.0 * values + gates) * d.itemsize
    return Cost(3.0 * forward - outputs, bytes_read, tokens * (keys + values + gates) * d.out_itemsize, "tensor")


@define(
    *STATES,
    Dim("state_format", low=0, default=0, choices=STATE_FORMATS, help="format in which the state is kept"),
    family="linear_attention",
    purpose="decode",
)
def linear_attention_decode(d: Any) -> Cost:
    """One token of each sequence: its state is decayed, changed and read, once in and once out of memory.

    Five FLOPs an element of the state, seven with a delta rule, which reads the state before it changes it (arXiv
    2405.21060, eq. 1; arXiv 2412.06464, eq. 10). Nothing grows with what came before.
    """
    keys, values, gates = operands(d)
    states = state_elements(d)
    flops = np.where(np.asarray(d.rule) == SSD, 5.0, 7.0) * states
    state_bytes = STATE_BYTES / (1.0 + np.asarray(d.state_format)) * states
    bytes_read = state_bytes + d.batch * (keys + values + gates) * d.itemsize
    return Cost(flops, bytes_read, state_bytes + d.batch * values * d.out_itemsize)


# --- short convolutions --------------------------------------------------------------------------------


@define(
    *("rows", "cols", Dim("width", default=4, help="tokens that a result is made of")),
    Dim(
        "update", low=0, default=0, choices=("no", "yes"), help="one token each of as many sequences, from their states"
    ),
    family="pointwise",
    purpose="convolution",
    law="causal_conv1d",
)
def causal_conv1d(d: Any) -> Cost:
    """Each column convolved over ``width`` tokens and SiLU of that: 2·width + 5 FLOPs an element (Dao's causal-conv1d).

    ``update`` reads and writes the last ``width`` tokens of each row's sequence besides.
    """
    size = d.rows * d.cols
    state_bytes = np.where(np.asarray(d.update) > 0, size * d.width, 0.0) * d.itemsize
    return Cost((2.0 * d.width + 5.0) * size, size * d.itemsize + state_bytes, size * d.out_itemsize + state_bytes)


@define(
    "rows", "cols", Dim("width", default=4), family="pointwise", purpose="convolution", law="causal_conv1d_backward"
)
def causal_conv1d_backward(d: Any) -> Cost:
    """Gradients of :func:`causal_conv1d` for its input and weights: reads x and dy, writes dx."""
    size = d.rows * d.cols
    return Cost((6.0 * d.width + 10.0) * size, 2.0 * size * d.itemsize, size * d.out_itemsize)


# --- attention to chosen tokens ------------------------------------------------------------------------


def chosen_pairs(seq_q: Any, seq_kv: Any, topk: Any) -> Any:
    """(query, key) pairs of one head when every query takes the ``topk`` best of what it sees, or all of that.

    Queries are the last ``seq_q`` of ``seq_kv`` positions.
    """
    offset = np.maximum(seq_kv - seq_q, 0)
    short = np.clip(topk - offset, 0, seq_q)
    return short * offset + short * (short + 1) / 2 + (seq_q - short) * topk


def cache_itemsize(d: Any) -> Any:
    """Bytes of one element of the cache."""
    return np.where(np.asarray(d.kv_dtype) > 0, 1.0, d.itemsize)


def key_width(d: Any) -> Any:
    """Elements of one head's key and value."""
    return d.head_dim + np.where(np.asarray(d.latent) > 0, 0.0, d.v_head_dim)


def _chosen(d: Any, products: float, tensors_q: float, write_q: float, write_kv: float) -> Cost:
    pairs = chosen_pairs(d.seq_q, d.seq_kv, d.topk)
    flops = products * d.batch * d.heads_q * pairs * (d.head_dim + d.v_head_dim)
    keys_read = d.batch * np.minimum(d.seq_kv, pairs)  # each token of the cache is read once at the least
    queries = d.batch * d.heads_q * d.seq_q * (d.head_dim + d.v_head_dim) / 2.0
    indices = SCORE_BYTES * d.batch * d.seq_q * np.minimum(d.topk, d.seq_kv)
    cache = keys_read * d.heads_kv * key_width(d)
    bytes_read = tensors_q * queries * d.itemsize + cache * cache_itemsize(d) + indices
    return Cost(flops, bytes_read, (write_q * queries + write_kv * cache) * d.out_itemsize, "tensor")


@define(*CHOOSING, family="attention")
def sparse_attention_prefill(d: Any) -> Cost:
    """Attention over a prompt, of each query to ``topk`` tokens: 2·pairs·heads_q·(head_dim + v_head_dim) FLOPs.

    Pairs as in :func:`chosen_pairs`. With ``latent`` all heads read one cache of latents (DeepSeek-V2, arXiv
    2405.04434, sec. 2.1.2), as kernels of sparse attention do in prompts too.
    """
    return _chosen(d, 2.0, 1.0, 1.0, 0.0)


@define(*CHOOSING, family="attention", purpose="decode")
def sparse_attention_decode(d: Any) -> Cost:
    """One step of generation against ``topk`` tokens of a cache of ``seq_kv``: beyond them nothing more is read."""
    return _chosen(d, 2.0, 1.0, 1.0, 0.0)


@define(*CHOOSING, family="attention")
def sparse_attention_backward(d: Any) -> Cost:
    """Gradients of :func:`sparse_attention_prefill`: five products against its two (arXiv 2307.08691, sec. 3.1.2)."""
    return _chosen(d, 5.0, 3.0, 1.0, 1.0)


def _indexed(d: Any) -> Cost:
    offset = np.maximum(d.seq_kv - d.seq_q, 0)
    pairs = d.seq_q * offset + d.seq_q * (d.seq_q + 1.0) / 2.0
    flops = 2.0 * d.batch * pairs * d.heads * d.head_dim
    bytes_read = d.batch * (d.seq_q * d.heads + d.seq_kv) * d.head_dim * d.itemsize
    return Cost(flops, bytes_read, SCORE_BYTES * d.batch * d.seq_q * np.minimum(d.topk, d.seq_kv), "tensor")


@define(*INDEXING, family="attention")
def sparse_index_prefill(d: Any) -> Cost:
    """Scores of all tokens that a query sees, by small heads of one shared key, and the best ``topk`` of them.

    Σ w·relu(q·k) over heads (DeepSeek-V3.2-Exp, eq. 1): 2·pairs·heads·head_dim FLOPs; scores need not leave the chip.
    """
    return _indexed(d)


@define(*INDEXING, family="attention", purpose="decode")
def sparse_index_decode(d: Any) -> Cost:
    """:func:`sparse_index_prefill` of a step of generation: reads the key of every cached token."""
    return _indexed(d)

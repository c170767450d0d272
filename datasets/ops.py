"""The op kinds: dimensions, FLOPs and bytes of every operator and collective opcast knows.

Adding a kind takes one function here and one way to run it in ``harness/cases`` (docs/extending.md). A function states
the *algorithmic* cost: each operand read once, each result written once; what caches and tiles make of it is
the latency model's affair. A fused multiply-add counts as two FLOPs. Backward passes are kinds of their own
(``rms_norm_backward``) because they move other bytes and run other kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .experts import expert_loads, rows_and_touched
from .vocabulary import (
    KINDS,
    Cost,
    Dim,
    Op,
    OpError,
    OpKind,
    cost_columns,
    define,
    iterate_groups,
    kind,
    make_op,
)

__all__ = [
    "KINDS",
    "LINKS",
    "Cost",
    "Dim",
    "Op",
    "OpError",
    "OpKind",
    "attended_pairs",
    "bus_factor",
    "cost_columns",
    "iterate_groups",
    "kind",
    "make_op",
]

LAYOUT = Dim(
    "layout",
    low=0,
    default=1,
    choices=("nn", "nt", "tn"),
    help="operand transposition, row major: nn = A·B, nt = A·Bᵀ (a torch Linear), tn = Aᵀ·B (a weight gradient)",
)
CAUSAL = Dim("causal", low=0, default=1, choices=("no", "yes"), help="1 when query i sees keys up to its own position")
WINDOW = Dim("window", low=0, default=0, help="sliding window in tokens, 0 = none")
KV_DTYPE = Dim(
    "kv_dtype", low=0, default=0, choices=("same", "fp8", "int8"), help="format of the KV cache where it is another"
)
ATTENTION = (
    Dim("batch", default=1),
    Dim("heads_q"),
    Dim("heads_kv"),
    Dim("head_dim"),
    Dim("v_head_dim"),
    Dim("seq_q"),
    Dim("seq_kv"),
    CAUSAL,
    WINDOW,
    KV_DTYPE,
)
MLA = (
    Dim("batch", default=1),
    Dim("heads"),
    Dim("seq_q"),
    Dim("seq_kv"),
    Dim("kv_lora_rank", default=512),
    Dim("qk_nope_head_dim", default=128),
    Dim("qk_rope_head_dim", default=64),
    Dim("v_head_dim", default=128),
    CAUSAL,
    KV_DTYPE,
)
ROWS_COLS = ("rows", "cols")


def attended_pairs(seq_q: Any, seq_kv: Any, causal: Any, window: Any) -> Any:
    """(query, key) pairs that attention computes for one head: exact for causal masks and sliding windows.

    Queries are the last ``seq_q`` of ``seq_kv`` positions. Query i sees ``offset + i`` keys, at most ``window``.
    """
    offset = np.maximum(seq_kv - seq_q, 0)
    limit = np.where(np.asarray(window) > 0, window, seq_kv + seq_q)
    short = np.clip(limit - offset, 0, seq_q)
    causal_pairs = short * offset + short * (short + 1) / 2 + (seq_q - short) * np.minimum(limit, seq_kv)
    return np.where(np.asarray(causal) > 0, causal_pairs, seq_q * np.minimum(limit, seq_kv))


# --- matrix multiplication -----------------------------------------------------------------------------


@define(
    Dim("batch", default=1, along=("batch", "heads", "experts")),
    *("m", "n", "k", LAYOUT),
    family="gemm",
    purpose="product",
)
def gemm(d: Any) -> Cost:
    """C[m,n] = A[m,k]·B[k,n], ``batch`` times: 2·m·n·k FLOPs (the textbook count)."""
    bytes_read = d.batch * (d.m * d.k * d.itemsize + d.k * d.n * d.weight_itemsize)
    return Cost(2.0 * d.batch * d.m * d.n * d.k, bytes_read, d.batch * d.m * d.n * d.out_itemsize, "tensor")


@define(
    "experts",
    Dim("tokens", along=("tokens",)),
    "n",
    "k",
    Dim("imbalance", low=100, default=100, help="tokens of the busiest expert over the mean, in percent"),
    LAYOUT,
    family="gemm",
    purpose="experts",
)
def grouped_gemm(d: Any) -> Cost:
    """One GEMM per expert over ``tokens`` routed rows in all: 2·tokens·n·k FLOPs (MegaBlocks, arXiv 2211.15841).

    Each expert that has a token reads its k·n weights once. Layout tn is the weights' gradient: it reads both
    matrices of ``tokens`` rows and writes k·n for every expert.
    """
    weights, gradient = d.k * d.n, np.asarray(d.layout) == LAYOUT.choices.index("tn")
    busy = np.minimum(d.experts, d.tokens)
    forward = d.tokens * d.k * d.itemsize + busy * weights * d.weight_itemsize
    bytes_read = np.where(gradient, d.tokens * (d.k + d.n) * d.itemsize, forward)
    write = np.where(gradient, d.experts * weights, d.tokens * d.n) * d.out_itemsize
    return Cost(2.0 * d.tokens * weights, bytes_read, write, "tensor")


# --- attention -----------------------------------------------------------------------------------------


def kv_itemsize(d: Any) -> Any:
    """Bytes of one element of the KV cache."""
    return np.where(np.asarray(d.kv_dtype) > 0, 1.0, d.itemsize)


def _attention(d: Any, matmuls: float, tensors_q: float, tensors_kv: float, write_q: float, write_kv: float) -> Cost:
    pairs = attended_pairs(d.seq_q, d.seq_kv, d.causal, d.window)
    flops = matmuls * d.batch * d.heads_q * pairs * (d.head_dim + d.v_head_dim)
    keys = np.where(np.asarray(d.window) > 0, np.minimum(d.seq_kv, d.window + d.seq_q - 1), d.seq_kv)
    width = d.head_dim + d.v_head_dim
    queries = d.batch * d.heads_q * d.seq_q * width / 2
    cache = d.batch * d.heads_kv * keys * width
    bytes_read = tensors_q * queries * d.itemsize + tensors_kv * cache * kv_itemsize(d)
    write = (write_q * queries + write_kv * cache) * d.out_itemsize
    return Cost(flops, bytes_read, write, "tensor")


@define(*ATTENTION, family="attention")
def attention_prefill(d: Any) -> Cost:
    """softmax(QKᵀ)V over a prompt: 2·pairs·heads_q·(head_dim + v_head_dim) FLOPs, scores never leave the chip.

    FlashAttention (arXiv 2205.14135, sec. 3); pairs as in :func:`attended_pairs`. Reads Q, K, V; writes O.
    """
    return _attention(d, 2.0, 1.0, 1.0, 1.0, 0.0)


@define(*ATTENTION, family="attention", purpose="decode")
def attention_decode(d: Any) -> Cost:
    """One step of generation (``seq_q`` new tokens, usually 1) against a KV cache of ``seq_kv`` tokens.

    The same FLOPs as :func:`attention_prefill`, bound by reading the cache (Flash-Decoding, split KV).
    ``seq_kv`` counts the new tokens.
    """
    return _attention(d, 2.0, 1.0, 1.0, 1.0, 0.0)


@define(*ATTENTION, family="attention")
def attention_backward(d: Any) -> Cost:
    """dQ, dK, dV with recomputed scores: five matrix products against the forward's two, so 2.5 × its FLOPs.

    FlashAttention-2 (arXiv 2307.08691, sec. 3.1.2). Reads Q, O, dO, K, V; writes dQ, dK, dV.
    """
    return _attention(d, 5.0, 3.0, 1.0, 1.0, 1.0)


@define(*MLA, family="attention")
def mla_prefill(d: Any) -> Cost:
    """Multi-head latent attention over a prompt, unabsorbed: keys of nope + rope, values of v_head_dim per head.

    DeepSeek-V2 (arXiv 2405.04434, sec. 2.1). 2·pairs·heads·(nope + rope + v) FLOPs.
    """
    qk = d.qk_nope_head_dim + d.qk_rope_head_dim
    pairs = attended_pairs(d.seq_q, d.seq_kv, d.causal, 0)
    bytes_read = d.batch * d.heads * (d.seq_q * qk + d.seq_kv * (qk + d.v_head_dim)) * d.itemsize
    write = d.batch * d.heads * d.seq_q * d.v_head_dim * d.out_itemsize
    return Cost(2.0 * d.batch * d.heads * pairs * (qk + d.v_head_dim), bytes_read, write, "tensor")


@define(*MLA, family="attention", purpose="decode")
def mla_decode(d: Any) -> Cost:
    """Absorbed MLA decoding: every head attends to one shared latent cache of kv_lora_rank + rope per token.

    DeepSeek-V2 (arXiv 2405.04434, sec. 2.1.2). 2·seq_q·seq_kv·heads·(2·rank + rope) FLOPs.
    """
    latent = d.kv_lora_rank + d.qk_rope_head_dim
    pairs = attended_pairs(d.seq_q, d.seq_kv, d.causal, 0)
    bytes_read = d.batch * latent * (d.seq_kv * kv_itemsize(d) + d.seq_q * d.heads * d.itemsize)
    write = d.batch * d.seq_q * d.heads * d.kv_lora_rank * d.out_itemsize
    return Cost(2.0 * d.batch * d.heads * pairs * (latent + d.kv_lora_rank), bytes_read, write, "tensor")


# --- rows of a matrix ----------------------------------------------------------------------------------


def _rowwise(d: Any, flops: float, read: float, write: float) -> Cost:
    size = d.rows * d.cols
    return Cost(flops * size, read * size * d.itemsize, write * size * d.out_itemsize)


@define(*ROWS_COLS, family="norm", statistics=1)
def rms_norm(d: Any) -> Cost:
    """x / rms(x) · w over the last axis (arXiv 1910.07467, eq. 4): about 4 FLOPs an element, one read, one write."""
    return _rowwise(d, 4.0, 1.0, 1.0)


@define(*ROWS_COLS, family="norm", law="rows_and_weights", statistics=1)
def rms_norm_backward(d: Any) -> Cost:
    """Gradients of :func:`rms_norm` for x and w: reads x and dy, writes dx; about 8 FLOPs an element."""
    return _rowwise(d, 8.0, 2.0, 1.0)


@define(*ROWS_COLS, family="norm", statistics=2)
def layer_norm(d: Any) -> Cost:
    """(x - mean) / std · w + b over the last axis (arXiv 1607.06450, eq. 4): about 7 FLOPs an element."""
    return _rowwise(d, 7.0, 1.0, 1.0)


@define(*ROWS_COLS, family="norm", law="rows_and_weights", statistics=2)
def layer_norm_backward(d: Any) -> Cost:
    """Gradients of :func:`layer_norm` for x, w and b: reads x and dy, writes dx; about 12 FLOPs an element."""
    return _rowwise(d, 12.0, 2.0, 1.0)


@define(*ROWS_COLS, family="norm", purpose="softmax", statistics=2)
def softmax(d: Any) -> Cost:
    """exp(x - max) / sum over the last axis, or its logarithm: about 5 FLOPs an element, one read, one write."""
    return _rowwise(d, 5.0, 1.0, 1.0)


@define(*ROWS_COLS, family="norm", purpose="softmax")
def softmax_backward(d: Any) -> Cost:
    """y · (dy - sum(y · dy)): reads y and dy, writes dx; about 4 FLOPs an element."""
    return _rowwise(d, 4.0, 2.0, 1.0)


@define(*ROWS_COLS, family="pointwise", purpose="activation")
def silu_mul(d: Any) -> Cost:
    """SwiGLU's gate: silu(a) · b with a, b the two halves of a row of 2·cols (arXiv 2002.05202, eq. 6)."""
    return _rowwise(d, 5.0, 2.0, 1.0)


@define(*ROWS_COLS, family="pointwise", purpose="activation")
def silu_mul_backward(d: Any) -> Cost:
    """Gradients of :func:`silu_mul`: reads a, b, dy, writes da, db; about 10 FLOPs an element."""
    return _rowwise(d, 10.0, 3.0, 2.0)


@define(*ROWS_COLS, family="pointwise", purpose="activation")
def gelu(d: Any) -> Cost:
    """Gaussian error linear unit, tanh or erf form (arXiv 1606.08415, sec. 2): about 10 FLOPs an element."""
    return _rowwise(d, 10.0, 1.0, 1.0)


@define(*ROWS_COLS, family="pointwise", purpose="activation")
def gelu_backward(d: Any) -> Cost:
    """Gradient of :func:`gelu`: reads x and dy, writes dx; about 16 FLOPs an element."""
    return _rowwise(d, 16.0, 2.0, 1.0)


@define(
    *ROWS_COLS,
    Dim("block", low=0, default=0, help="elements a scale, 0 = one scale a row"),
    Dim(
        "part",
        low=0,
        default=0,
        choices=("all", "scale", "apply", "both"),
        help="the maxima, the rounding by them, all of it, or that along both dimensions",
    ),
    family="pointwise",
    purpose="rounding",
)
def quantize(d: Any) -> Cost:
    """Absolute maximum per block, then scale and round to ``out_dtype``: 3 FLOPs an element; writes fp32 scales.

    ``both`` reads once and writes what is rounded along the rows and along the columns.
    """
    size, part = d.rows * d.cols, np.asarray(d.part, dtype=np.int64)
    scales = d.rows * np.where(np.asarray(d.block) > 0, np.ceil(d.cols / np.maximum(d.block, 1)), 1.0)
    work, copies, factors = (
        np.array(factors_of_part)[part] for factors_of_part in ((3.0, 1.5, 1.5, 4.5), (1, 0, 1, 2), (1, 1, 0, 2))
    )
    return Cost(work * size, size * d.itemsize, copies * size * d.out_itemsize + 4.0 * factors * scales)


# --- elements ------------------------------------------------------------------------------------------


@define(
    "tokens",
    Dim("heads", help="query and key heads together"),
    "head_dim",
    family="pointwise",
    purpose="rotary",
)
def rope(d: Any) -> Cost:
    """Rotary embedding x·cos + rotate(x)·sin on queries and keys (arXiv 2104.09864, eq. 34): 6 FLOPs a pair."""
    size = d.tokens * d.heads * d.head_dim
    return Cost(3.0 * size, size * d.itemsize, size * d.out_itemsize)


FUNCTIONS = ("arithmetic", "division", "exponential", "cast", "fill")


@define(
    "numel",
    Dim("inputs", low=0, default=1, help="tensors of full size that are read"),
    Dim("fn", low=0, default=0, choices=FUNCTIONS, help="cost class of the scalar function"),
    Dim("run", low=0, default=0, help="elements that lie contiguous in every operand, 0 = all"),
    family="pointwise",
)
def elementwise(d: Any) -> Cost:
    """y = f(x1, …, x_inputs) element by element; broadcast operands are not counted.

    ``arithmetic``: add, mul, compare, where; ``division``: div, sqrt, rsqrt; ``exponential``: exp, log, silu,
    tanh, sin, pow; ``cast``: dtype to out_dtype; ``fill``: writes only.
    """
    work = np.asarray([1.0, 4.0, 8.0, 1.0, 0.0])[np.asarray(d.fn, dtype=np.int64)]
    return Cost(work * d.numel, d.numel * d.inputs * d.itemsize, d.numel * d.out_itemsize)


@define("outer", "length", Dim("inner", default=1), family="pointwise", purpose="reduction")
def reduce(d: Any) -> Cost:
    """Sum, mean or maximum over the middle axis of [outer, length, inner]: one FLOP an element read."""
    size = d.outer * d.length * d.inner
    return Cost(1.0 * size, size * d.itemsize, d.outer * d.inner * d.out_itemsize)


@define("tokens", "vocab", "hidden", family="gather")
def embedding(d: Any) -> Cost:
    """Rows of a [vocab, hidden] table by int64 index: reads and writes tokens·hidden elements."""
    size = d.tokens * d.hidden
    return Cost(0.0 * size, size * d.itemsize + 8.0 * d.tokens, size * d.out_itemsize)


@define("tokens", "vocab", "hidden", family="gather")
def embedding_backward(d: Any) -> Cost:
    """Dense gradient of :func:`embedding`: zeroes [vocab, hidden] and adds tokens rows into it."""
    size = d.tokens * d.hidden
    return Cost(1.0 * size, size * (d.itemsize + d.out_itemsize), (d.vocab * d.hidden + size) * d.out_itemsize)


@define("tokens", "vocab", family="norm", purpose="loss", law="rows", statistics=3)
def cross_entropy(d: Any) -> Cost:
    """log-softmax and negative log-likelihood over [tokens, vocab]: reads the logits, writes log-probabilities."""
    size = d.tokens * d.vocab
    return Cost(5.0 * size, size * d.itemsize, size * d.out_itemsize)


@define("tokens", "vocab", family="norm", purpose="loss", law="rows")
def cross_entropy_backward(d: Any) -> Cost:
    """(softmax - onehot) · dy over [tokens, vocab]: reads log-probabilities, writes the logits' gradient."""
    size = d.tokens * d.vocab
    return Cost(3.0 * size, size * d.itemsize, size * d.out_itemsize)


# --- mixture of experts --------------------------------------------------------------------------------


@define(
    *("tokens", "experts", "topk"),
    Dim("kernels", low=0, default=0, choices=("fused", "topk"), help="a router's own, or torch.topk alone"),
    family="moe",
)
def moe_route(d: Any) -> Cost:
    """Router: softmax over experts, top-k, renormalise (arXiv 2101.03961, sec. 2.1): reads scores, writes k pairs.

    ``topk`` is the selection alone by ``torch.topk``, whose kernel goes over each row once for every two bits.
    """
    size = d.tokens * d.experts
    return Cost(6.0 * size, size * d.itemsize, d.tokens * d.topk * (d.out_itemsize + 8.0))


@define(
    "tokens",
    "hidden",
    "topk",
    Dim("direction", low=0, default=0, choices=("permute", "unpermute")),
    family="moe",
)
def moe_permute(d: Any) -> Cost:
    """Gather of each token's row to its topk experts, or the weighted sum back (MegaBlocks, arXiv 2211.15841)."""
    copies = d.tokens * d.topk * d.hidden
    back = np.asarray(d.direction) > 0
    bytes_read = np.where(back, copies, d.tokens * d.hidden) * d.itemsize + 8.0 * d.tokens * d.topk
    write = np.where(back, d.tokens * d.hidden, copies) * d.out_itemsize
    return Cost(np.where(back, 2.0 * copies, 0.0), bytes_read, write)


@define(
    Dim("tokens", help="tokens of all expert-parallel ranks together", along=()),
    Dim("hidden", along=()),
    Dim("inter", help="width of one expert before tensor parallelism"),
    "topk",
    Dim("experts", along=()),
    Dim("tp", default=1, help="ranks that share each expert"),
    Dim("ep", default=1, help="ranks that share the experts out"),
    Dim("gated", low=0, default=1, choices=("no", "yes"), help="three matrices an expert (SwiGLU) or two"),
    Dim("skew", low=0, default=0, help="exponent of the power law of expert loads in hundredths, 0 = balanced"),
    family="moe",
    purpose="experts",
)
def fused_moe(d: Any) -> Cost:
    """One rank's experts from routed tokens to their weighted sum: what serving engines call fused MoE.

    6·tokens·topk·hidden·inter / (tp·ep) FLOPs when gated, 4 when not, of an average rank; each expert that has a
    row reads its weights once (MegaBlocks, arXiv 2211.15841); which do says :mod:`.experts`.
    """
    matrices = 2.0 + np.asarray(d.gated)
    rows, width = d.tokens * d.topk / d.ep, d.inter / d.tp
    _, touched = rows_and_touched(*expert_loads(d.tokens, d.topk, d.experts, d.ep, d.skew))
    bytes_read = touched * matrices * d.hidden * width * d.weight_itemsize + rows * d.hidden * d.itemsize
    return Cost(2.0 * rows * matrices * d.hidden * width, bytes_read, rows * d.hidden * d.out_itemsize, "tensor")


# --- optimizer, memory, host ---------------------------------------------------------------------------


@define(
    Dim("numel", along=("elements",)),
    Dim("tensors", default=1, help="parameter tensors that numel is spread over"),
    family="optimizer",
)
def adamw(d: Any) -> Cost:
    """One AdamW update (arXiv 1711.05101, alg. 2): parameter and gradient in dtype, two moments in out_dtype.

    Reads p, g, m, v; writes p, m, v; about 14 FLOPs an element.
    """
    bytes_read = d.numel * (2.0 * d.itemsize + 2.0 * d.out_itemsize)
    return Cost(14.0 * d.numel, bytes_read, d.numel * (d.itemsize + 2.0 * d.out_itemsize))


@define(
    "size_bytes",
    Dim("direction", low=0, default=0, choices=("d2d", "h2d", "d2h"), help="between device and host memory"),
    Dim("run_bytes", low=0, default=0, help="bytes that lie contiguous in the source, 0 = all of them"),
    Dim("joins", low=0, default=0, help="torch.cat of parts with gaps, the largest a n-th of the whole; 0 = one copy"),
    family="copy",
)
def copy(d: Any) -> Cost:
    """Bytes copied inside device memory, or between host and device."""
    return Cost(0.0 * d.size_bytes, 1.0 * d.size_bytes, 1.0 * d.size_bytes)


@define(
    Dim("what", low=0, default=0, choices=("launch", "dispatch", "view", "module", "autograd", "operator")),
    Dim("calls", default=1),
    family="host",
)
def host_overhead(d: Any) -> Cost:
    """Time the host spends on ``calls`` of one thing while no kernel's work is done.

    ``launch``: put an empty kernel on a stream; ``dispatch``: the framework's own part of one operator call;
    ``view``: one call that only makes a view; ``module``: enter and leave one nn.Module; ``autograd``: record
    one node forward and run it backward; ``operator``: one operator inside a model, with the views, modules and Python
    around it.
    """
    return Cost(0.0 * d.calls, 0.0 * d.calls, 0.0 * d.calls, "host")


@define(
    "size_bytes", Dim("host_mbps", help="MB/s of its memory that the host's cores keep up for this rank"), family="host"
)
def host_pass(d: Any) -> Cost:
    """Bytes that the host's cores read and write in its own memory: an optimizer that runs there (ZeRO-Offload)."""
    return Cost(0.0 * d.size_bytes, 0.0 * d.size_bytes, 0.0 * d.size_bytes, "host")


from . import mixer_ops  # noqa: E402, F401  kinds are listed as they are defined: these last
from .collective_ops import LINKS, bus_factor  # noqa: E402

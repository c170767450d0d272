"""Linear attention, chunk by chunk through a state, and attention to chosen tokens.

A scan over a prompt is a handful of kernels: products inside chunks on matrix units, each chunk's state written, a walk
over the states of a sequence in order, and the results (mamba_ssm/ops/triton/ssd_combined.py; FLA's
chunk_gated_delta_rule). The walk waits for each chunk in turn, however many units are idle. Attention to chosen tokens
gives every query its own rows of the cache, which come from the last-level cache as often as queries choose them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...datasets.mixer_ops import SCORE_BYTES, SSD, chosen_pairs, key_width, operands, state_elements
from .attention import BACKWARD_PRODUCTS, SUSTAINED, split_kv
from .matmul import FILL_CLOCKS
from .rows import by_rows, by_rows_with_weight_gradient
from .setting import Array, Dims, Setting, Terms

ByRule = tuple[float, float, float]


@dataclass(frozen=True)
class Passes:
    """What a scan does beside its arithmetic, by rule (ssd, gated_delta, kda), counted in the kernels it calls.

    ``keys`` and ``values`` are how often each operand (in a backward pass: and gradient) goes through memory, over once
    an operand; ``solved`` the same of the keys that delta rules solve for (w), a row a head; ``state_bytes`` the bytes
    that move of an element of a chunk's state; ``decays`` how often the decay between any two tokens of a chunk is
    worked out for every head, ``scores`` how often their score in fp32 is read for it; ``walks`` how often blocks go
    from chunk to chunk.
    """

    kernels: ByRule
    keys: ByRule
    values: ByRule
    solved: ByRule
    state_bytes: ByRule
    decays: ByRule
    scores: ByRule
    walks: float


# ssd: mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_fwd and _bwd (without z). Delta rules:
# fla/ops/gated_delta_rule/chunk.py; KDA's kernels take the same steps.
# Forward, ssd: sums, chunk_state (x, B), state_passing, bmm_chunk (B, C), chunk_scan (x, C); states are written and
# read in fp32, passed on and read in 16 bits; chunk_scan reads bmm_chunk's scores, works the decays out. Delta: sums,
# scaled_dot_kkt (k), solve_tril, recompute_w_u (k, v; writes w, u), fwd_h (k, w, u; writes v_new), fwd_o (k, q, v_new);
# states stay in registers, are written and read in 16 bits.
FORWARD = Passes(
    kernels=(5.0, 6.0, 6.0),
    keys=(2.0, 2.5, 2.5),
    values=(2.0, 5.0, 5.0),
    solved=(0.0, 2.0, 2.0),
    state_bytes=(12.0, 4.0, 4.0),
    decays=(1.0, 1.0, 1.0),
    scores=(1.0, 0.0, 0.0),
    walks=1.0,
)
# Backward, ssd: the first four again, then dstates (C, dy), state_passing_bwd, dx (x, B, dy), dB (x, B), dC (C, dy),
# dcb (x, dy), two bmm_chunk_bwd (B, C), ddAcs (x, dy), sums; states 4 + 4 + 4 bytes to make them again, gradients
# 4 + 4, the walk back 4 + 2 + 2, three reads of 2; dx, dcb and ddAcs work the decays out, dx and ddAcs read scores.
# Delta: recompute_w_u, fwd_h, dv_local (q, k, do), dhu (q, w, do, dv), dqkwg (q, k, v_new, w, do, dv),
# prepare_wy_repr_bwd (k, v, dw, dv), two sums of gradients, sums.
BACKWARD = Passes(
    kernels=(14.0, 9.0, 9.0),
    keys=(4.5, 4.0, 4.0),
    values=(9.0, 12.0, 12.0),
    solved=(0.0, 6.0, 6.0),
    state_bytes=(34.0, 8.0, 8.0),
    decays=(3.0, 2.0, 2.0),
    scores=(2.0, 0.0, 0.0),
    walks=2.0,
)
# On a decay, in _chunk_scan_fwd_kernel: a difference, the scale of its exponent, times the score, times the step, a
# comparison, a choice, a rounding
DECAY_LANES = 7.0
# Bytes that one compute unit moves a clock in the kernels of a scan, however fast the memory is: they wait for their
# own loads between small products. By TensorRT-LLM's table of FLA's Triton kernels (chunk_gated_delta_rule) 7.6 to 9.7
# on Hopper and Blackwell with launches and walks, 10 without; on L40S and RTX PRO 6000 the memory is slower than that.
# By its table of causal_conv1d 10 to 14 (python tests/benchmarks/scans.py FOLDER)
SCAN_BYTES_A_CLOCK, CONVOLUTION_BYTES_A_CLOCK = 10.0, 12.5
STATE_COLUMNS = 64.0  # of a state that one block walks with (fla/ops/common/chunk_delta_h.py: BV, 32 or 64)
# Elements of states that one block of threads of a decode kernel takes: 512 for widths up to 128
# (mamba_ssm/ops/triton/selective_state_update.py), 8 values of a key of 128
# (fla/ops/gated_delta_rule/fused_recurrent.py)
VALUES_A_BLOCK = (512.0, 1024.0, 1024.0)
# Of the indexer (tilelang's examples/deepseek_v32: fp8_lighting_indexer.py, topk_selector.py): scores in fp32 are
# written, read for a histogram of their leading bits, and read for those above its threshold
SCORE_PASSES, INDEX_KERNELS = 3.0, 2.0


def of_rule(figures: ByRule, d: Dims) -> Array:
    """The figure of each op's rule [n]."""
    return np.array(figures)[np.asarray(d.rule, dtype=np.int64)]


def linear_attention_prefill(d: Dims, s: Setting) -> Terms:
    """Products in chunks, and the states of chunks through memory."""
    return _scan(d, s, FORWARD)


def linear_attention_backward(d: Dims, s: Setting) -> Terms:
    """The forward's states once more, and a walk back over their gradients."""
    return _scan(d, s, BACKWARD)


def _scan(d: Dims, s: Setting, passes: Passes) -> Terms:
    keys, values, gates = operands(d)
    launches = of_rule(passes.kernels, d) * s.device.launch_us
    chunks = np.ceil(d.seq / d.chunk)
    size = np.minimum(d.chunk, d.seq)
    again = (of_rule(passes.keys, d) - 1.0) * (keys + gates) + (of_rule(passes.values, d) - 1.0) * values
    again = again + of_rule(passes.solved, d) * d.heads * d.state_dim
    states = chunks * of_rule(passes.state_bytes, d) * state_elements(d)
    moved = s.cost.bytes + d.batch * d.seq * again * s.itemsize + states
    memory = s.traffic_us(moved)
    if s.cpu:
        return Terms(s.cost.flops / s.tensor_rate, memory, launches)
    memory = np.maximum(memory, _by_units(moved, SCAN_BYTES_A_CLOCK, s))
    pairs = 0.5 * d.batch * d.heads * chunks * size**2  # of tokens, one not after the other
    products = s.cost.flops / (s.tensor_rate * SUSTAINED) + of_rule(passes.decays, d) * pairs / s.exp_rate
    ssd = d.rule == SSD
    lanes = of_rule(passes.decays, d) * pairs * DECAY_LANES / (s.vector_rate / 2.0)
    scores = of_rule(passes.scores, d) * pairs * SCORE_BYTES / s.l2_rate
    products = products + np.where(ssd, lanes + scores, 0.0)
    blocks = d.batch * d.heads * np.ceil(d.head_dim / STATE_COLUMNS)
    step = FILL_CLOCKS / s.device.clock_mhz + _step(d, size, s)
    walk = passes.walks * np.ceil(blocks / s.units) * chunks * step
    hints = {"waves": blocks / s.units, "shared": 1.0 + products, "last": 1.0 + walk}
    apart = np.where(ssd, np.minimum(products, memory), 0.0)  # no kernel computes while another one moves states
    return Terms(products, memory, launches + walk + apart, hints=hints)


def _by_units(size: Array, bytes_a_clock: float, s: Setting) -> Array:
    """us that all compute units need to move so many bytes, each so many a clock."""
    return size / (bytes_a_clock * s.device.clock_mhz * s.units)


def _step(d: Dims, size: Array, s: Setting) -> Array:
    """us of one chunk in one block's walk: delta rules multiply by the state, the others only decay it."""
    flops = 4.0 * size * d.state_dim * np.minimum(d.head_dim, STATE_COLUMNS)
    return np.where(d.rule == SSD, 0.0, flops * s.units / (s.tensor_rate * SUSTAINED))


def linear_attention_decode(d: Dims, s: Setting) -> Terms:
    """Every state once through memory."""
    states = state_elements(d)
    blocks = np.maximum(states / of_rule(VALUES_A_BLOCK, d), 1.0)
    longest = 0.0 if s.cpu else np.ceil(blocks / s.units) * s.cost.bytes / blocks / s.unit_rate
    compute = s.cost.flops / (0.5 * s.vector_rate)
    return Terms(
        compute, np.maximum(s.traffic_us(s.cost.bytes), longest), s.device.launch_us, hints={"waves": blocks / s.units}
    )


def causal_conv1d(d: Dims, s: Setting) -> Terms:
    """A few tokens of each column, and SiLU: no unit keeps up with the memory of later chips."""
    return _convolved(by_rows(d, s), s, np.asarray(d.update) > 0)


def causal_conv1d_backward(d: Dims, s: Setting) -> Terms:
    """The same of its gradients, which are half as many bytes more."""
    return _convolved(by_rows_with_weight_gradient(d, s), s, np.zeros(np.shape(d.rows), dtype=bool))


def _convolved(terms: Terms, s: Setting, one_token: Array) -> Terms:
    slowest = _by_units(s.cost.bytes, CONVOLUTION_BYTES_A_CLOCK, s)
    memory = terms.memory if s.cpu else np.where(one_token, terms.memory, np.maximum(terms.memory, slowest))
    return Terms(terms.compute, memory, terms.overhead, hints=terms.hints)


def sparse_attention(d: Dims, s: Setting) -> Terms:
    """Each query's own rows of the cache: as decoding has them, for every query of a prompt."""
    chosen = np.maximum(chosen_pairs(d.seq_q, d.seq_kv, d.topk) / d.seq_q, 1.0)
    width = key_width(d)
    terms = split_kv(
        d, d.batch * d.seq_q * d.heads_kv, d.heads_q / d.heads_kv, chosen, width, d.head_dim + d.v_head_dim, s
    )
    gathered = d.batch * d.seq_q * d.heads_kv * chosen * width * np.where(d.kv_dtype > 0, 1.0, s.itemsize) / s.l2_rate
    return Terms(terms.compute, np.maximum(terms.memory, gathered), terms.overhead, hints=terms.hints)


def sparse_attention_backward(d: Dims, s: Setting) -> Terms:
    """2.5 times the products; gradients of keys are added up where they lie."""
    terms, longer = sparse_attention(d, s), BACKWARD_PRODUCTS
    return Terms(longer * terms.compute, longer * terms.memory, terms.overhead + s.device.launch_us, hints=terms.hints)


def sparse_index(d: Dims, s: Setting) -> Terms:
    """Scores by matrix units, their weighted sum by ordinary lanes, and a selection that reads all scores."""
    pairs = s.cost.flops / (2.0 * d.heads * d.head_dim)
    compute = s.cost.flops / (s.tensor_rate * (1.0 if s.cpu else SUSTAINED)) + 2.0 * pairs * d.heads / s.vector_rate
    memory = s.traffic_us(s.cost.bytes + 4.0 * SCORE_PASSES * pairs)
    kernels = INDEX_KERNELS if not s.cpu else 1.0
    return Terms(compute, memory, kernels * s.device.launch_us, hints={"waves": np.ceil(pairs / s.units)})

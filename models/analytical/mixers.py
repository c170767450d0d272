"""Linear attention, chunk by chunk through a state, and attention to chosen tokens.

A scan over a prompt is a handful of kernels: products inside chunks on matrix units, each chunk's state written, a walk
over the states of a sequence in order, and the results (mamba_ssm/ops/triton/ssd_combined.py; FLA's
chunk_gated_delta_rule). The walk waits for each chunk in turn, however many units are idle. Attention to chosen tokens
gives every query its own rows of the cache, which come from the last-level cache as often as queries choose them.
"""

from __future__ import annotations

import numpy as np

from ...datasets.mixer_ops import SSD, chosen_pairs, key_width, operands, state_elements
from .attention import EXP_SHARE, SUSTAINED, split_kv
from .matmul import FILL_CLOCKS
from .setting import Array, Dims, Setting, Terms

KERNELS, BACKWARD_KERNELS = 6.0, 14.0  # of one scan: decays, products of keys, states, walk, results
PASSES, BACKWARD_PASSES = 2.0, 4.0  # kernels that read each operand
STATE_PASSES, BACKWARD_STATE_PASSES = 12.0, 28.0  # bytes that move of an element of a chunk's state
STATE_COLUMNS = 64.0  # of a state that one block walks with
VALUES_A_BLOCK = 2048.0  # elements of states that one block of threads of a decode kernel takes
SCORE_PASSES = 3.0  # of scores in fp32: written, and gone through twice for the best of them
INDEX_KERNELS = 2.0


def linear_attention_prefill(d: Dims, s: Setting) -> Terms:
    """Products in chunks, and the states of chunks through memory."""
    return _scan(d, s, KERNELS, PASSES, STATE_PASSES, 1.0)


def linear_attention_backward(d: Dims, s: Setting) -> Terms:
    """The forward's states once more, and a walk back over their gradients."""
    return _scan(d, s, BACKWARD_KERNELS, BACKWARD_PASSES, BACKWARD_STATE_PASSES, 2.0)


def _scan(d: Dims, s: Setting, kernels: float, passes: float, state_bytes: float, walks: float) -> Terms:
    keys, values, gates = operands(d)
    chunks = np.ceil(d.seq / d.chunk)
    size = np.minimum(d.chunk, d.seq)
    again = (passes - 1.0) * d.batch * d.seq * (keys + values + gates) * s.itemsize
    memory = s.traffic_us(s.cost.bytes + again + chunks * state_bytes * state_elements(d))
    if s.cpu:
        return Terms(s.cost.flops / s.tensor_rate, memory, kernels * s.device.launch_us)
    exponentials = d.batch * d.heads * chunks * size**2 * walks
    products = s.cost.flops / (s.tensor_rate * SUSTAINED) + EXP_SHARE * exponentials / s.exp_rate
    blocks = d.batch * d.heads * np.ceil(d.head_dim / STATE_COLUMNS)
    step = FILL_CLOCKS / s.device.clock_mhz + _step(d, size, s)
    walk = walks * np.ceil(blocks / s.units) * chunks * step
    hints = {"waves": blocks / s.units, "shared": 1.0 + products, "last": 1.0 + walk}
    return Terms(products, memory, kernels * s.device.launch_us + walk, hints=hints)


def _step(d: Dims, size: Array, s: Setting) -> Array:
    """us of one chunk in one block's walk: delta rules multiply by the state, the others only decay it."""
    flops = 4.0 * size * d.state_dim * np.minimum(d.head_dim, STATE_COLUMNS)
    return np.where(d.rule == SSD, 0.0, flops * s.units / (s.tensor_rate * SUSTAINED))


def linear_attention_decode(d: Dims, s: Setting) -> Terms:
    """Every state once through memory."""
    states = state_elements(d)
    blocks = np.maximum(states / VALUES_A_BLOCK, 1.0)
    longest = 0.0 if s.cpu else np.ceil(blocks / s.units) * s.cost.bytes / blocks / s.unit_rate
    compute = s.cost.flops / (0.5 * s.vector_rate)
    return Terms(
        compute, np.maximum(s.traffic_us(s.cost.bytes), longest), s.device.launch_us, hints={"waves": blocks / s.units}
    )


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
    terms = sparse_attention(d, s)
    return Terms(2.5 * terms.compute, 2.5 * terms.memory, terms.overhead + s.device.launch_us, hints=terms.hints)


def sparse_index(d: Dims, s: Setting) -> Terms:
    """Scores by matrix units, their weighted sum by ordinary lanes, and a selection that reads all scores."""
    pairs = s.cost.flops / (2.0 * d.heads * d.head_dim)
    compute = s.cost.flops / (s.tensor_rate * (1.0 if s.cpu else SUSTAINED)) + 2.0 * pairs * d.heads / s.vector_rate
    memory = s.traffic_us(s.cost.bytes + 4.0 * SCORE_PASSES * pairs)
    kernels = INDEX_KERNELS if not s.cpu else 1.0
    return Terms(compute, memory, kernels * s.device.launch_us, hints={"waves": np.ceil(pairs / s.units)})

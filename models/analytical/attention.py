"""Attention: blocks of queries over keys on all compute units, exponentials beside products, split KV for decoding.

A prefill kernel gives each compute unit blocks of 128 or 64 query rows (FlashAttention-2, arXiv 2307.08691, sec. 3.2;
FlashAttention-3, arXiv 2407.08608), of one head or of all query heads that share a KV head; longest blocks first, so
that the last one shows only in part. A decode kernel gives each unit one KV head of one sequence, or, when those are
too few, one part of its keys (Flash-Decoding), and a second kernel joins the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...datasets.ops import attended_pairs
from .matmul import FILL_CLOCKS
from .setting import Array, Dims, Setting, Terms

QUERY_BLOCKS = ((128.0, False), (64.0, False), (128.0, True), (64.0, True))  # rows a unit holds; heads of a KV head too
KEY_BLOCK = 64.0  # keys that a unit multiplies at a time, at least (FlashAttention-2: 64 or 128)
BACKWARD_PRODUCTS = (
    2.5  # times the forward's: scores again, dV, dP, dQ and dK beside two (FlashAttention-2, arXiv 2307.08691)
)
NARROW = 0.15  # longer for blocks of fewer than 128 rows, which reuse each block of keys less
SUSTAINED = 0.75  # matrix units wait on softmax and on loads inside a block (FlashAttention-3, arXiv 2407.08608)
BACKWARD_SUSTAINED = 0.65  # two more products a block and atomics on dQ
EXP_SHARE = 0.5  # part of the exponentials that does not hide behind the matrix products
LAST_SHARE = 0.6  # of the longest block that shows after all units have been busy
SPLITS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)  # of the keys of a cache
DECODE_ROWS = 16.0  # query rows that matrix instructions take at once
ROW_BLOCK = 64.0  # query rows that one unit holds beside a KV head
LAUNCHES = 3.0  # appending to the cache, planning the work, attending: what engines time as one op


@dataclass(frozen=True)
class Blocks:
    """How queries are cut: blocks in all, keys that one visits on average and at most."""

    count: Array
    keys: Array
    longest: Array


def query_blocks(d: Dims, heads_q: Array, heads_kv: Array, window: Array, rows: float, packed: bool) -> Blocks:
    """Blocks of ``rows`` queries; ``packed``: query heads of one KV head share a block, so it spans fewer positions."""
    group = heads_q / heads_kv if packed else 1.0
    count = d.batch * (heads_kv if packed else heads_q) * np.ceil(d.seq_q * group / rows)
    span = np.clip(rows / group, 1.0, d.seq_q)
    ahead = 0.5 * (span - 1.0) * ((d.causal > 0) + 1.0 * (window > 0))
    keys = np.minimum(d.seq_kv, attended_pairs(d.seq_q, d.seq_kv, d.causal, window) / d.seq_q + ahead)
    longest = np.where(window > 0, np.minimum(d.seq_kv, window + span), d.seq_kv)
    return Blocks(count, np.maximum(keys, KEY_BLOCK), np.maximum(longest, KEY_BLOCK))


def attention_prefill(d: Dims, s: Setting) -> Terms:
    """softmax(QK^T)V over a prompt."""
    return _blocks(d, d.heads_q, d.heads_kv, d.head_dim, d.v_head_dim, d.window, 1.0, s)


def attention_backward(d: Dims, s: Setting) -> Terms:
    """dQ, dK, dV: 2.5 times the products, and one more launch for the row sums of dO and O."""
    terms = _blocks(d, d.heads_q, d.heads_kv, d.head_dim, d.v_head_dim, d.window, BACKWARD_PRODUCTS, s)
    return Terms(terms.compute, terms.memory, terms.overhead + s.device.launch_us, hints=terms.hints)


def mla_prefill(d: Dims, s: Setting) -> Terms:
    """Unabsorbed latent attention: ordinary attention with wide keys, one KV head per query head."""
    return _blocks(d, d.heads, d.heads, d.qk_nope_head_dim + d.qk_rope_head_dim, d.v_head_dim, 0.0 * d.heads, 1.0, s)


def attention_decode(d: Dims, s: Setting) -> Terms:
    """A few new tokens against a KV cache; the query heads of one KV head share its reading."""
    keys = np.where(d.window > 0, np.minimum(d.seq_kv, d.window + d.seq_q - 1), d.seq_kv)
    width = d.head_dim + d.v_head_dim
    return split_kv(d, d.batch * d.heads_kv, d.heads_q / d.heads_kv * d.seq_q, keys, width, width, s)


def mla_decode(d: Dims, s: Setting) -> Terms:
    """Absorbed latent attention: every head reads one latent cache, so arithmetic weighs as much as bytes."""
    latent = d.kv_lora_rank + d.qk_rope_head_dim
    return split_kv(d, d.batch, d.heads * d.seq_q, d.seq_kv, latent, latent + d.kv_lora_rank, s)


def _blocks(
    d: Dims, heads_q: Array, heads_kv: Array, qk: Array, v: Array, window: Array, products: float, s: Setting
) -> Terms:
    """Time of all query blocks: the fastest way to cut them. Masked blocks of keys are skipped."""
    memory = s.traffic_us(s.cost.bytes)
    if s.cpu:
        pairs = attended_pairs(d.seq_q, d.seq_kv, d.causal, window)
        work = d.batch * heads_q * pairs * (2.0 * products * (qk + v) / s.tensor_rate + 1.0 / s.exp_rate)
        return Terms(work, memory, s.device.launch_us, hints={"heads_per_thread": d.batch * heads_q / s.units})
    sustained = SUSTAINED if products == 1.0 else BACKWARD_SUSTAINED
    pair_us = 2.0 * products * (qk + v) / (s.tensor_rate * sustained), EXP_SHARE / s.exp_rate
    fill = FILL_CLOCKS / s.device.clock_mhz
    parts = []
    for rows, packed in QUERY_BLOCKS:
        blocks = query_blocks(d, heads_q, heads_kv, window, rows, packed)
        narrow = 1.0 + NARROW * (rows < 128.0)
        row_us = s.units * rows * (pair_us[0] * narrow + pair_us[1])
        shared = blocks.count * blocks.keys * row_us / s.units
        filling = np.ceil(blocks.count / s.units) * fill
        parts.append(np.stack(np.broadcast_arrays(shared, LAST_SHARE * blocks.longest * row_us, filling)))
    stacked = np.stack(parts)
    best = np.argmin(stacked.sum(axis=1), axis=0)
    shared, last, filling = stacked[best, :, np.arange(best.size)].T
    edge = s.traffic_us(d.batch * heads_q * d.seq_q * (qk * s.itemsize + v * s.out_itemsize), s.cost.bytes)
    compute = shared + last + filling + edge
    hints = {"shared": shared / compute, "last": last / compute, "filling": filling / compute, "edge": edge / compute}
    return Terms(compute, memory, LAUNCHES * s.device.launch_us + fill, hints=hints)


def split_kv(d: Dims, groups: Array, rows: Array, keys: Array, width: Array, products: Array, s: Setting) -> Terms:
    """``groups`` caches of ``keys`` x ``width``, each read by ``rows`` query rows: the fastest number of splits."""
    work = 2.0 * products / s.tensor_rate + EXP_SHARE / s.exp_rate
    memory = s.traffic_us(s.cost.bytes)
    if s.cpu:
        hints = {"groups_per_thread": groups / s.units}
        return Terms(groups * rows * keys * work, memory, s.device.launch_us, hints=hints)
    blocks = np.ceil(rows / ROW_BLOCK)
    padded_rows = np.ceil(rows / blocks / DECODE_ROWS) * DECODE_ROWS
    key_us = np.maximum(width * np.where(d.kv_dtype > 0, 1.0, s.itemsize) / s.unit_rate, padded_rows * work * s.units)
    fill = FILL_CLOCKS / s.device.clock_mhz
    splits = np.array(SPLITS)[:, None]
    waves = np.ceil(groups * blocks * splits / s.units)
    keys_us = np.maximum(keys / splits, KEY_BLOCK) * key_us
    split_us = waves * (fill + keys_us) + (splits > 1.0) * (s.device.launch_us + fill)
    best = np.argmin(split_us, axis=0)
    pick = (best, np.arange(best.size))
    hints = {
        "splits": splits[best, 0],
        "waves": waves[pick],
        "tail": (groups * blocks * splits / (waves * s.units))[pick],
        "filling": (waves * fill / split_us)[pick],
        "padding": blocks * padded_rows / rows,
    }
    return Terms(split_us[pick], memory, LAUNCHES * s.device.launch_us + fill, hints=hints)

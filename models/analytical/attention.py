"""Attention: blocks of queries over keys in waves, exponentials beside matrix products, split KV for decoding."""

from __future__ import annotations

import numpy as np

from ...datasets.ops import attended_pairs
from .matmul import FILL_CLOCKS
from .setting import Array, Dims, Setting, Terms

QUERY_BLOCKS = (128.0, 64.0)  # rows of queries one compute unit holds (FlashAttention-2 and -3 tiles)
KEY_BLOCK = 64.0
SUSTAINED = 0.75  # matrix units wait on softmax and on loads inside a block (FlashAttention-3, arXiv 2407.08608)
BACKWARD_SUSTAINED = 0.65  # two more products a block and atomics on dQ
EXP_SHARE = 0.5  # part of the exponentials that does not hide behind the matrix products
MAX_SPLITS = 128.0


def attention_prefill(d: Dims, s: Setting) -> Terms:
    """softmax(QK^T)V over a prompt."""
    return _blocks(d.batch * d.heads_q, d, d.head_dim + d.v_head_dim, d.window, 1.0, s)


def attention_backward(d: Dims, s: Setting) -> Terms:
    """dQ, dK, dV: 2.5 times the products, and one more launch for the row sums of dO and O."""
    terms = _blocks(d.batch * d.heads_q, d, d.head_dim + d.v_head_dim, d.window, 2.5, s)
    return Terms(terms.compute, terms.memory, terms.overhead + s.device.launch_us, hints=terms.hints)


def mla_prefill(d: Dims, s: Setting) -> Terms:
    """Unabsorbed latent attention: ordinary attention with wide keys, one KV head per query head."""
    width = d.qk_nope_head_dim + d.qk_rope_head_dim + d.v_head_dim
    return _blocks(d.batch * d.heads, d, width, 0.0 * d.heads, 1.0, s)


def attention_decode(d: Dims, s: Setting) -> Terms:
    """A few new tokens against a KV cache; the query heads of one KV head share its reading."""
    keys = np.where(d.window > 0, np.minimum(d.seq_kv, d.window + d.seq_q - 1), d.seq_kv)
    rows = d.heads_q / d.heads_kv * d.seq_q
    return _split_kv(d.batch * d.heads_kv, rows, keys, d.head_dim + d.v_head_dim, d.head_dim + d.v_head_dim, s)


def mla_decode(d: Dims, s: Setting) -> Terms:
    """Absorbed latent attention: every head reads one latent cache, so arithmetic weighs as much as bytes."""
    latent = d.kv_lora_rank + d.qk_rope_head_dim
    return _split_kv(d.batch, d.heads * d.seq_q, d.seq_kv, latent, latent + d.kv_lora_rank, s)


def _blocks(heads: Array, d: Dims, width: Array, window: Array, products: float, s: Setting) -> Terms:
    """Time of ``heads`` x query blocks. Masked blocks are skipped; a diagonal block counts whole."""
    pairs = attended_pairs(d.seq_q, d.seq_kv, d.causal, window)
    if s.cpu:
        arithmetic = heads * pairs * (2.0 * products * width / s.tensor_rate + 1.0 / s.exp_rate)
        return Terms(
            arithmetic, s.traffic_us(s.cost.bytes), s.device.launch_us, hints={"heads_per_thread": heads / s.units}
        )
    block = np.array(QUERY_BLOCKS)[:, None]
    count = heads * np.ceil(d.seq_q / block)
    padded = heads * (pairs + np.where(d.causal > 0, 0.5 * d.seq_q, 0.0) * np.minimum(block, d.seq_kv))
    padded = (
        padded * (np.ceil(d.seq_q / block) * block / d.seq_q) * (np.ceil(d.seq_kv / KEY_BLOCK) * KEY_BLOCK / d.seq_kv)
    )
    sustained = SUSTAINED if products == 1.0 else BACKWARD_SUSTAINED
    narrow = 1.0 + 0.15 * (block < 128.0)  # fewer rows a block reuse each key block less
    unit_us = padded * (2.0 * products * width / (s.tensor_rate * sustained) * narrow + EXP_SHARE / s.exp_rate)
    mean = unit_us * s.units / count
    longest = mean * (1.0 + (d.causal > 0) * np.minimum(1.0, d.seq_q / np.maximum(d.seq_kv, 1.0)))
    waves = np.ceil(count / s.units)
    spread = np.maximum(np.maximum(unit_us, longest), waves * mean)
    best = np.argmin(spread, axis=0)
    pick = (best, np.arange(best.size))
    fill = 2.0 * FILL_CLOCKS / s.device.clock_mhz
    hints = {
        "waves": (count / s.units)[pick],
        "tail": (count / (waves * s.units))[pick],
        "padding": (padded / (heads * pairs))[pick],
    }
    return Terms(spread[pick], s.traffic_us(s.cost.bytes), s.device.launch_us + fill, hints=hints)


def _split_kv(groups: Array, rows: Array, keys: Array, width: Array, products: Array, s: Setting) -> Terms:
    """``groups`` caches of ``keys`` x ``width``, each read once by ``rows`` query rows (Flash-Decoding).

    Unsplit, one compute unit reads a whole cache; split, all units share and a second kernel joins the parts.
    """
    cache = keys * width * s.itemsize
    arithmetic = groups * rows * keys * (2.0 * products / s.tensor_rate + EXP_SHARE / s.exp_rate)
    memory = s.traffic_us(s.cost.bytes)
    if s.cpu:
        return Terms(arithmetic, memory, s.device.launch_us, hints={"groups_per_thread": groups / s.units})
    padded = np.ceil(rows / 16.0) * 16.0 / rows
    one = np.maximum(cache / s.unit_rate, arithmetic * padded * s.units / groups)
    waves = np.ceil(groups / s.units)
    whole = waves * one
    shared = groups * one / s.units
    splits = np.minimum(MAX_SPLITS, np.maximum(s.units / groups, 1.0))
    chunk = one / np.minimum(MAX_SPLITS, np.maximum(keys / KEY_BLOCK, 1.0))
    split = np.maximum(shared, chunk) + s.device.launch_us
    fill = 2.0 * FILL_CLOCKS / s.device.clock_mhz
    hints = {"waves": groups / s.units, "splits": splits, "split_gain": whole / split, "padding": padded}
    return Terms(np.minimum(whole, split), memory, s.device.launch_us + fill, hints=hints)

"""Attention: blocks cover what the mask leaves, windows end growth, waves and splits follow the compute units."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.devices import Device
from opcast.datasets.ops import attended_pairs
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.analytical.attention import query_blocks
from opcast.models.features import feature_names, features

LLAMA = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128, "causal": 1, "window": 0, "kv_dtype": 0}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_dtype": 0}


def columns(*ops: dict[str, int]) -> dict[str, np.ndarray]:
    return {name: np.array([op[name] for op in ops]) for name in ops[0]}


def decode(device: Device, **dims: int) -> float:
    op = LLAMA | {"batch": 1, "seq_q": 1, "seq_kv": 4096} | dims
    return float(analytical.latency_us(OpColumns("attention_decode", columns(op), "bf16", None, "warm"), device)[0])


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 64),
    heads_kv=st.integers(1, 16),
    group=st.integers(1, 16),
    seq=st.integers(1, 9000),
    past=st.integers(0, 5000),
    window=st.sampled_from([0, 1, 128, 1024]),
    causal=st.booleans(),
    rows=st.sampled_from([64.0, 128.0]),
    packed=st.booleans(),
)
def test_blocks_cover_every_attended_pair(
    batch: int, heads_kv: int, group: int, seq: int, past: int, window: int, causal: bool, rows: float, packed: bool
) -> None:
    d = SimpleNamespace(batch=batch, seq_q=seq, seq_kv=seq + past, causal=int(causal))
    blocks = query_blocks(d, heads_kv * group, heads_kv, window, rows, packed)
    pairs = batch * heads_kv * group * attended_pairs(seq, seq + past, int(causal), window)
    assert blocks.count * rows * blocks.keys >= pairs * (1 - 1e-9)
    assert blocks.keys <= max(blocks.longest, 64.0)
    assert blocks.longest <= max(seq + past, 64.0)


def test_packing_heads_fills_blocks_of_short_prompts() -> None:
    d = SimpleNamespace(batch=4, seq_q=16, seq_kv=16, causal=1)
    assert query_blocks(d, 32, 4, 0, 128.0, False).count == 4 * 32
    assert query_blocks(d, 32, 4, 0, 128.0, True).count == 4 * 4


@pytest.mark.parametrize("batch", [1, 64])
def test_a_window_ends_the_growth_with_the_cache(gpu: Device, batch: int) -> None:
    assert decode(gpu, batch=batch, seq_kv=65536, window=128) == decode(gpu, batch=batch, seq_kv=256, window=128)
    assert decode(gpu, batch=batch, seq_kv=65536) > 3 * decode(gpu, batch=batch, seq_kv=256)


def test_short_caches_come_in_waves_over_the_units(gpu: Device) -> None:
    one, same, more = (decode(gpu, batch=batch, heads_q=8, heads_kv=1, seq_kv=16) for batch in (65, 132, 133))
    assert one == pytest.approx(same, rel=0.02)
    assert more > 1.05 * same


def test_one_long_cache_is_split_over_all_units(gpu: Device) -> None:
    cache_us = 131072 * 256 * 2 / (gpu.memory_gbps * 1e3)
    assert decode(gpu, heads_q=8, heads_kv=1, seq_kv=131072) < 2.5 * cache_us


def test_a_full_gpu_reads_large_caches_at_its_bandwidth(gpu: Device) -> None:
    cache_us = 256 * 8 * 8192 * 256 * 2 / (gpu.memory_gbps * 1e3)
    assert cache_us < decode(gpu, batch=256, seq_kv=8192) < 1.15 * cache_us


def test_long_prompts_reach_the_rate_of_flash_attention_3(gpu: Device) -> None:
    # FlashAttention-3 (arXiv 2407.08608, fig. 5): 640 TFLOP/s, causal, head dimension 128, 16k tokens, H100
    op = LLAMA | {"batch": 1, "heads_q": 16, "heads_kv": 16, "seq_q": 16384, "seq_kv": 16384}
    took = analytical.latency_us(OpColumns("attention_prefill", columns(op), "bf16", None, "cold"), gpu)[0]
    assert 450 < 4 * 16 * 128 * 16384 * 16385 / 2 / took / 1e6 < 700


def test_latent_decoding_is_bound_by_bytes_until_heads_are_many(gpu: Device) -> None:
    few, many = (
        {**LATENT, "batch": 256, "heads": heads, "seq_q": 1, "seq_kv": 8192, "causal": 1} for heads in (16, 512)
    )
    cache_us = 256 * 8192 * 576 * 2 / (gpu.memory_gbps * 1e3)
    took = analytical.latency_us(OpColumns("mla_decode", columns(few, many), "bf16", None, "cold"), gpu)
    assert cache_us < took[0] < 1.2 * cache_us
    assert took[1] > 3 * took[0]


def test_features_see_the_window_and_the_group(gpu: Device) -> None:
    base = LLAMA | {"batch": 2, "seq_q": 1, "seq_kv": 4096, "window": 128}
    short, long, grouped = base, base | {"seq_kv": 65536}, base | {"heads_q": 64}
    made = features(OpColumns("attention_decode", columns(short, long, grouped), "bf16", None), gpu)
    rows = [dict(zip(feature_names("attention_decode"), row, strict=True)) for row in made.tolist()]
    assert rows[0]["keys"] == rows[1]["keys"] == 7.0
    assert rows[0]["keys_cached"] == rows[1]["keys_cached"]
    assert rows[2]["group_heads"] == rows[0]["group_heads"] + 1.0
    assert rows[2]["waves_caches"] == rows[0]["waves_caches"]

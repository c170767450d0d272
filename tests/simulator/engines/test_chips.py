"""Answers across chips: more of everything is never slower, and what a chip's tables lack its kin say."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.datasets.devices import Device, known_devices, load_device
from opcast.datasets.ops import KINDS
from opcast.models.kinship import generation, no_less
from opcast.simulator.engines import Answers, build_engine

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "shipped"
SITES = ((4096, 4096), (28672, 4096), (4096, 14336))
PRODUCTS = [{"m": m, "n": n, "k": k} for m in (1, 16, 256, 4096) for n, k in SITES]
HEADS = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128}
ASKED: dict[str, list[dict[str, int]]] = {
    "gemm": PRODUCTS,
    "attention_decode": [{**HEADS, "batch": b, "seq_q": 1, "seq_kv": s} for b in (1, 32) for s in (1024, 16384)],
    "attention_prefill": [{**HEADS, "seq_q": s, "seq_kv": s} for s in (512, 4096, 16384)],
    "rms_norm": [{"rows": rows, "cols": 8192} for rows in (64, 512, 8192)],
}


def answered(
    device: Device, kind: str, rows: list[dict[str, int]], dtype: str = "bf16", cache: str = "cold"
) -> Answers:
    usual = {dim.name: 1 if dim.default is None else dim.default for dim in KINDS[kind].dims}
    columns = {name: np.array([row.get(name, value) for row in rows]) for name, value in usual.items()}
    return build_engine(device, [], [SHIPPED]).answer(kind, columns, dtype, dtype, cache)


@lru_cache
def cards() -> tuple[Device, ...]:
    """Workstation and consumer cards that compute in bf16."""
    names = (name for name in known_devices() if name.startswith(("rtx_", "l40", "l4", "l20", "a10", "a40")))
    return tuple(device for device in map(load_device, names) if device.supports("bf16"))


@pytest.mark.parametrize("kind", ASKED)
def test_a_card_with_more_of_everything_is_not_slower(kind: str) -> None:
    found = {device.id: answered(device, kind, ASKED[kind]) for device in cards()}
    alike = (pair for pair in itertools.permutations(cards(), 2) if generation(pair[0]) == generation(pair[1]))
    pairs = [(one.id, other.id) for one, other in alike if no_less(one, other)]
    assert len(pairs) > 100
    slower = {}
    for one, other in pairs:
        if not {"learned"} >= set(found[one].engine) | set(found[other].engine):
            change = found[one].latency_us / found[other].latency_us
            if change.max() > 1.05:
                slower[one, other] = float(change.max())
    assert not slower


def test_rtx_4090_is_not_slower_than_3090_and_faster_than_what_bandwidth_says_of_l40s() -> None:
    times = {name: answered(load_device(name), "gemm", PRODUCTS[:1]).latency_us[0] for name in ("rtx_4090", "l40s")}
    assert times["rtx_4090"] < 1.05 * times["l40s"]


@pytest.mark.parametrize(
    ("device", "dtype", "who"),
    [
        ("mi300x", "fp8_block", "learned gemm@aiter:tuned/mi300x"),
        ("mi300x", "fp8", "transfer gemm@aiter:preshuffled/mi308x"),  # its own tables have no fp8 by token
        ("mi325x", "fp8_block", "transfer gemm@aiter:tuned/mi300x"),
        ("h800_sxm", "bf16", "transfer gemm@"),
        ("h800_sxm", "fp8_block", "learned gemm@deep_gemm:fp8/h800_sxm"),
        ("a100_pcie_40gb", "bf16", "transfer gemm@"),  # its own table is of fp32
    ],
)
def test_a_format_that_a_chip_never_timed_is_answered_by_kin_that_did(device: str, dtype: str, who: str) -> None:
    found: Any = answered(load_device(device), "gemm", [{"m": 512, "n": 4096, "k": 7168}], dtype, "warm")
    assert f"{found.engine[0]} {found.predictor[0]}".startswith(who)


# Causal, 64 heads on 8, 8192 tokens: TFLOP/s of ROCm/aiter's assembly kernels (op_tests/cpp/mha/README.md).
@pytest.mark.parametrize(
    ("device", "kind", "tflops"),
    [
        ("mi300x", "attention_prefill", 518.3),
        ("mi300x", "attention_backward", 433.3),  # sums in fp32
        ("mi355x", "attention_prefill", 1300.1),
        ("mi355x", "attention_backward", 1064.6),
        ("mi325x", "attention_backward", 433.3),  # of the same die and clock: by kin of its own kind
    ],
)
def test_attention_of_amds_chips_is_that_of_their_assembly_kernels(device: str, kind: str, tflops: float) -> None:
    op = {"heads_q": 64, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128, "seq_q": 8192, "seq_kv": 8192, "causal": 1}
    found = answered(load_device(device), kind, [op], "bf16", "warm")
    products = 2 if kind == "attention_prefill" else 5
    assert products * 64 * 8192**2 * 128 / found.latency_us[0] / 1e6 == pytest.approx(tflops, rel=0.08)
    assert found.predictor[0].startswith(f"{kind}@aiter:asm")

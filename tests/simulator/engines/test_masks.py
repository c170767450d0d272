"""Attention with and without a mask: whose tables answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.answers import Answers
from opcast.simulator.question.stack import load_stack
from opcast.simulator.workbench import SHIPPED_PREDICTORS


def attention(causal: int, head_size: int = 64) -> Op:
    heads = {"heads_q": 16, "heads_kv": 16, "head_dim": head_size, "v_head_dim": head_size}
    return make_op("attention_prefill", **heads, batch=32, seq_q=512, seq_kv=512, causal=causal, dtype="bf16")


def answered(device: str, ops: list[Op], stack: str | None = None, backend: str | None = None) -> Answers:
    engines = build_engine(load_device(device), [], [SHIPPED_PREDICTORS], backend=backend)
    return ask(engines if stack is None else replace(engines, stack=load_stack(stack)), ops)


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("h100_sxm", "vllm_vit_flash_attn_fa3"),
        ("b200_sxm", "vllm_vit_flash_attn_fa4"),
        ("l40s", "vllm_vit_flash_attn_fa2"),
    ],
)
def test_attention_without_a_mask_is_answered_by_tables_of_it(device: str, kernel: str) -> None:
    """What was learned with a mask alone said twice as much: 254 us on H100 in place of 134."""
    both = answered(device, [attention(0), attention(1)])
    assert kernel in both.predictor[0]
    assert kernel not in both.predictor[1]
    assert both.in_envelope[0]
    assert both.latency_us[0] == pytest.approx(
        answered(device, [attention(0)], backend=f"vllm-0.24.0:{kernel}").latency_us[0]
    )


def test_the_tables_of_a_framework_and_of_kin_are_asked_by_mask_too() -> None:
    assert "flash_attention_v3" in answered("h100_sxm", [attention(0)], "sglang").predictor[0]
    assert "vit_flash_attn_fa3/h100_sxm" in answered("h100_pcie", [attention(0)], "vllm").predictor[0]
    assert "vllm_flash_attn_fa3/h100_sxm" in answered("h100_pcie", [attention(1)], "vllm").predictor[0]


def test_a_table_without_a_mask_says_nothing_of_larger_heads() -> None:
    """A head size never seen costs as much as a mask: blocks of a ring have heads of 128, that table 64 to 80."""
    found = answered("h100_sxm", [attention(0, 128), attention(0, 80)])
    assert "vllm_flash_attn_fa3" in found.predictor[0]
    assert "vit_flash_attn_fa3" in found.predictor[1]


def test_where_no_table_has_the_mask_others_answer_and_say_that_they_are_outside() -> None:
    alone = answered("a100_sxm_80gb", [attention(0)])
    assert not alone.in_envelope[0]
    assert np.isfinite(alone.latency_us[0])

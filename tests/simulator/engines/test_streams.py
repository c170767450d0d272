"""Caches that are streamed: no table answers faster than the memory they lie in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import Op, make_op
from opcast.models.choice import BEYOND_MEMORY
from opcast.simulator.engines.answers import ask
from opcast.simulator.engines.fused import build_engine
from opcast.simulator.engines.streams import SUSTAINED
from opcast.simulator.question.stack import load_stack

SHIPPED = Path(__file__).parents[3] / "models" / "shipped"
HEADS = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128, "seq_q": 1}


def decode(batch: int, cached: int) -> Op:
    return make_op("attention_decode", "bf16", batch=batch, seq_kv=cached, **HEADS)


@pytest.mark.parametrize("stack", ["trtllm", "vllm", "sglang"])
@pytest.mark.parametrize("device", ["a100_sxm_80gb", "h100_sxm", "l40s"])
def test_long_caches_are_never_read_faster_than_memory_gives_them(device: str, stack: str) -> None:
    chip = load_device(device)
    engine = replace(build_engine(chip, [], [SHIPPED]), stack=load_stack(stack))
    ops = [decode(batch, cached) for batch in (32, 64, 128) for cached in (4096, 8192)]
    size_bytes = np.array([op.cost.read_bytes for op in ops])
    assert (size_bytes / ask(engine, ops, "cold").latency_us / 1e3 <= chip.memory_gbps * SUSTAINED * 1.001).all()


def test_a_table_of_other_caches_loses_to_memory_where_they_are_long() -> None:
    """TensorRT-LLM's table of A100 reads 1.1 GB in 338 us: 3.2 TB/s of 2.0."""
    engine = replace(build_engine(load_device("a100_sxm_80gb"), [], [SHIPPED]), stack=load_stack("trtllm"))
    answers = ask(engine, [decode(1, 512), decode(64, 4096)], "cold")
    assert answers.clause[0] != BEYOND_MEMORY == answers.clause[1]
    assert answers.latency_us[1] == pytest.approx(555, rel=0.03)
    assert answers.low_us[1] < answers.latency_us[1] < answers.high_us[1]


def test_cold_weights_of_mi300x_come_at_what_its_memory_sustains() -> None:
    """Its rows were timed with weights in the Infinity Cache: 1.0 of 5.3 TB/s, where BabelStream reaches 0.81."""
    chip = load_device("mi300x")
    engine = replace(build_engine(chip, [], [SHIPPED]), stack=load_stack("vllm"))
    ops = [make_op("gemm", "fp8", m=m, n=28672, k=8192) for m in (1, 16, 32)]
    rates = 28672 * 8192 / ask(engine, ops, "cold").latency_us / 1e3
    assert (rates <= 0.82 * chip.memory_gbps).all()
    assert (ask(engine, ops, "warm").latency_us <= ask(engine, ops, "cold").latency_us).all()

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
from opcast.simulator.engines.streams import MEASURED_PEAK
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
    assert (size_bytes / ask(engine, ops, "cold").latency_us / 1e3 <= chip.memory_gbps * MEASURED_PEAK).all()


def test_a_table_of_other_caches_loses_to_physics_where_they_are_long() -> None:
    """TensorRT-LLM's table of A100 reads 1.1 GB in 338 us: 3.2 TB/s of 2.0."""
    engine = replace(build_engine(load_device("a100_sxm_80gb"), [], [SHIPPED]), stack=load_stack("trtllm"))
    answers = ask(engine, [decode(1, 512), decode(64, 4096)], "cold")
    assert answers.clause[0] != BEYOND_MEMORY == answers.clause[1]
    assert answers.latency_us[1] == pytest.approx(600, rel=0.15)
    assert answers.low_us[1] < answers.latency_us[1] < answers.high_us[1]

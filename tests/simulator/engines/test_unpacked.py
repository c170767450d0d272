"""Products whose weights are unpacked: no faster than in 16 bits where arithmetic binds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.models.choice import SIXTEEN_BITS_RATE
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.fused import FusedEngine
from opcast.simulator.question.errors import PlanError
from opcast.simulator.question.kernels import Unpacking
from opcast.simulator.question.stack import Stack, known_stacks, load_stack
from opcast.simulator.step.build import engine_of

SHIPPED = Path(__file__).parents[3] / "models" / "shipped"
SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))  # (n, k) of Llama 3 8B
PACKED = ("w4a16", "w8a16", "w4.5a16")


def asked(device: str, stack: Stack, dtype: str, rows: int, cache: str = "warm"):
    engine = engine_of(stack, build_engine(load_device(device), [], [SHIPPED]))
    assert isinstance(engine, FusedEngine)
    return ask(engine, [make_op("gemm", dtype, m=rows, n=n, k=k) for n, k in SHAPES], cache)


@pytest.mark.parametrize("device", ["a100_sxm_80gb", "l40s", "h100_sxm", "b200_sxm", "gb300", "rtx_5090"])
@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
def test_weights_that_are_unpacked_gain_nothing_where_arithmetic_binds(device: str, name: str) -> None:
    stack = load_stack(name)
    whole = asked(device, stack, "bf16", 8192)
    for dtype in PACKED:
        packed = asked(device, stack, dtype, 8192)
        own_table = np.array(["WeightOnly" in str(each) for each in packed.predictor])
        assert (packed.latency_us >= whole.latency_us * np.where(own_table, 0.95, 1 - 1e-9)).all()
        assert (packed.low_us <= packed.latency_us).all()
        assert (packed.high_us >= packed.latency_us).all()


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_few_rows_gain_what_they_read_less(cache: str) -> None:
    """With 16 rows and fewer a product waits for its weights: other rules have it."""
    for rows in (1, 16):
        packed, whole = (asked("b200_sxm", load_stack("vllm"), dtype, rows, cache) for dtype in ("w4a16", "bf16"))
        assert (packed.latency_us < whole.latency_us).all()
        assert SIXTEEN_BITS_RATE not in packed.clause


def test_a_kernel_with_an_older_instruction_takes_as_many_times_as_long() -> None:
    plain = replace(load_stack("vllm"), unpackings=())
    whole, even = (asked("b200_sxm", plain, dtype, 16384) for dtype in ("fp16", "w4a16"))
    half = asked("b200_sxm", replace(plain, unpackings=(Unpacking(0.5, "a test", sm=10.0),)), "w4a16", 16384)
    assert np.allclose(even.latency_us, whole.latency_us)
    assert np.allclose(half.latency_us, 2 * whole.latency_us)
    assert np.allclose(half.low_us, even.low_us)  # the law, whatever the kernel
    elsewhere = asked("b200_sxm", replace(plain, unpackings=(Unpacking(0.5, "a test", sm=9.0),)), "w4a16", 16384)
    assert np.allclose(elsewhere.latency_us, even.latency_us)


def test_one_that_multiplies_in_int8_may_be_faster() -> None:
    stack = load_stack("llama_cpp")
    packed, whole = (asked("rtx_5090", stack, dtype, 8192) for dtype in ("w4.84a16", "fp16"))
    slower = asked("rtx_5090", replace(stack, unpackings=()), "w4.84a16", 8192)
    assert (packed.latency_us >= whole.latency_us / 2 * (1 - 1e-9)).all()
    assert (packed.latency_us <= slower.latency_us).all()


def test_a_share_is_above_zero_and_every_one_has_a_source() -> None:
    with pytest.raises(PlanError, match="share"):
        Unpacking(0.0, "x")
    assert all(len(each.source) > 6 for name in known_stacks() for each in load_stack(name).unpackings)

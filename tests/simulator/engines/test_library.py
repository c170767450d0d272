"""Products of frameworks that train: readings of one library kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.models.choice import TABLE, THROTTLED
from opcast.models.registry import Registry
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.library import LONG_US, THROTTLED_AT, LibraryEngine, calls_library, combine_readings
from opcast.simulator.question.plan import load_stack
from opcast.simulator.step.build import engine_of

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "shipped"
B200, GB200 = load_device("b200_sxm"), load_device("gb200")
SHAPES = ((8192, 8192, 8192), (8192, 57344, 8192), (8192, 8192, 28672), (4096, 4096, 14336))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(SHIPPED)


def columns(shapes: tuple[tuple[int, int, int], ...] = SHAPES) -> dict[str, np.ndarray]:
    m, n, k = (np.array(each) for each in zip(*shapes, strict=True))
    return {"batch": np.ones_like(m), "m": m, "n": n, "k": k, "layout": np.ones_like(m)}


def test_which_backends_are_the_librarys() -> None:
    assert calls_library("vllm-0.24.0:torch.nn.functional.linear")
    assert calls_library("trtllm-1.3.0rc20:torch_flow+quantize")
    assert not calls_library("vllm-0.24.0:CutlassFP8ScaledMMLinearKernel")
    assert not calls_library("torch-2.9:own")  # the framework's name says nothing of the kernel


def test_labs_that_timed_one_kernel_answer_together(registry: Registry) -> None:
    engine = LibraryEngine(GB200, [registry])
    known = engine.readings("bf16")
    assert {each.backend.partition("-")[0] for each in known} == {"vllm", "trtllm"}
    found = engine.answer("gemm", columns(), "bf16", "bf16", "warm")
    read = [each.predict(columns(), "bf16", "bf16", GB200, "warm") for each in known]
    own = np.array([each.latency_us for each in read])
    one_throttled = (own.max(axis=0) > THROTTLED_AT * own.min(axis=0)) & (own.min(axis=0) > LONG_US)
    both = np.exp(np.log(own).mean(axis=0))
    assert one_throttled.any()
    assert not one_throttled.all()
    assert np.allclose(found.latency_us, np.where(one_throttled, own.min(axis=0), both))
    apart = np.abs(np.diff(np.log(own), axis=0))[0]
    wide = np.log(found.high_us / found.low_us)
    assert (wide >= apart)[~one_throttled].all()
    assert all(each.backend in name for each in known for name in found.predictor)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "megatron"])
def test_a_table_whose_machine_lowered_its_clocks_loses_to_another_of_the_same_call(stack: str) -> None:
    """vLLM's table of GB200 has 1700 TFLOP/s at 8,192 rows and 950 at 16,384; TensorRT-LLM's 1450 and 1620."""
    engine = engine_of(load_stack(stack), build_engine(GB200, [], [SHIPPED]))
    rows = (4096, 8192, 16384, 32768)
    found = ask(engine, [make_op("gemm", "bf16", m=m, n=4096, k=14336) for m in rows])
    assert (found.latency_us[1:] <= 2.15 * found.latency_us[:-1]).all()
    if stack == "vllm":
        assert list(found.clause) == [TABLE, TABLE, THROTTLED, THROTTLED]


def test_frameworks_that_train_ask_the_library_and_those_that_serve_their_own_kernels() -> None:
    engine = build_engine(B200, [], [SHIPPED])
    op = make_op("gemm", m=8192, n=8192, k=8192, dtype="bf16", out_dtype="bf16")
    trains, serves = (ask(engine_of(load_stack(name), engine), [op]) for name in ("megatron", "sglang"))
    assert "vllm" in trains.predictor[0]
    assert "trtllm" in trains.predictor[0]
    assert "vllm" not in serves.predictor[0]
    assert engine_of(load_stack("megatron"), engine) is engine_of(load_stack("megatron"), engine)


def test_batched_products_and_kinds_without_a_reading_are_left_to_others(registry: Registry) -> None:
    engine = LibraryEngine(B200, [registry])
    batched = {**columns(), "batch": np.full(len(SHAPES), 8)}
    assert np.isnan(engine.answer("gemm", batched, "bf16", "bf16", "warm").latency_us).all()
    assert np.isnan(LibraryEngine(B200, []).answer("gemm", columns(), "bf16", "bf16", "warm").latency_us).all()


def test_one_reading_is_its_own_answer(registry: Registry) -> None:
    one = registry.find("gemm", "b200_sxm", "trtllm-1.3.0rc20:torch_flow")
    assert one is not None
    read = one.predict(columns(), "bf16", "bf16", B200, "warm")
    latency, low, high = combine_readings([read], [one.coverage])
    assert np.allclose(latency, read.latency_us)
    assert (low < latency).all()
    assert (latency < high).all()

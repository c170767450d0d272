"""Products with few rows: kernels of a stack's own, and tables of few bits that contradict bytes over bandwidth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.choice import FEWER_BYTES, MAT_VEC, MORE_ROWS, SUM_OF_BYTES
from opcast.simulator.engines.answers import Answers, ask
from opcast.simulator.engines.fused import build_engine
from opcast.simulator.engines.mat_vec import CONTRADICTION, MAT_VEC_ROWS, FewRowsEngine, MatVecEngine
from opcast.simulator.question.errors import PlanError
from opcast.simulator.question.kernels import MatVec
from opcast.simulator.question.stack import known_stacks, load_stack
from opcast.simulator.step.build import engine_of

A100 = load_device("a100_sxm_80gb")
SHIPPED = Path(__file__).parents[3] / "models" / "shipped"
RATE = 1e6  # bytes a microsecond of the table of 16 bits below


class Tables:
    """16 bits over a rate and 3 us; few bits over the same and a floor."""

    name = "learned"

    def __init__(self, floor_us: float) -> None:
        self.floor_us = floor_us

    def answer(self, kind, columns, dtype, out_dtype, cache):
        answers = Answers.declined(len(columns["m"]))
        size = {"fp16": 2.0, "w4a16": 0.5}[dtype] * columns["n"] * columns["k"]
        answers.latency_us[:] = size / RATE + (3.0 if dtype == "fp16" else self.floor_us)
        answers.low_us[:], answers.high_us[:] = answers.latency_us / 2, answers.latency_us * 2
        answers.engine[:] = self.name
        return answers


def asked(engine, dtype: str = "w4a16", m: int = 1, n: int = 1024, k: int = 8192, kind: str = "gemm") -> Answers:
    op = make_op(kind, dtype, m=m, n=n, k=k)
    columns = {name: np.array([value]) for name, value in zip(KINDS[kind].names, op.dims, strict=True)}
    return engine.answer(kind, columns, dtype, "bf16", "warm")


def next_engine(engines):
    """What is asked where nothing is wrong."""
    return engines[0]


def test_table_that_timed_its_launches_loses_to_bytes() -> None:
    found = asked(FewRowsEngine([Tables(floor_us=25.0)]))
    assert found.latency_us[0] == pytest.approx(0.5 * 1024 * 8192 / RATE + 3.0)
    assert found.clause[0] == FEWER_BYTES
    assert found.high_us[0] > found.latency_us[0] > found.low_us[0]


@pytest.mark.parametrize("change", [{"m": MAT_VEC_ROWS + 1}, {"dtype": "fp16"}, {"n": 2**20}])
def test_others_are_asked_where_nothing_is_wrong(change: dict[str, int | str]) -> None:
    """Many rows compute, 16 bits are no few, and a floor of 25 us means nothing beside weights of 4 GB."""
    for floor_us, of in ((25.0, change), (3.0 * CONTRADICTION, {})):
        answers, table_answers = (asked(each([Tables(floor_us)]), **of) for each in (FewRowsEngine, next_engine))
        assert np.isnan(answers.latency_us[0]) or answers.latency_us[0] == table_answers.latency_us[0]
        assert not answers.clause[0]


KERNELS = (
    MatVec(16, 0.9, "sixteen", most_rows=8),
    MatVec(4.8, 0.8, "four", launches=2),
    MatVec(4.8, 0.5, "apple", vendor="apple"),
)


def test_kernels_of_a_stack_take_weights_over_the_bandwidth_that_they_reach() -> None:
    engine = MatVecEngine(A100, KERNELS)
    large, half = (asked(engine, "w4.84a16", n=n, k=2**16).latency_us[0] for n in (2**16, 2**15))
    assert 2**31 * 4.84 / 8 / (large - half) == pytest.approx(0.8 * A100.memory_gbps * 1e3, rel=1e-6)
    assert asked(engine, "w4.84a16").clause[0] == MAT_VEC
    assert asked(engine, "bf16", m=8).predictor[0].startswith("90%")
    assert np.isnan(asked(engine, "w4.84a16", m=2).latency_us[0])  # of more rows a table tells
    assert np.isnan(asked(engine, "fp8").latency_us[0])
    apple = MatVecEngine(load_device("apple_m2_max"), KERNELS)
    assert asked(apple, "w4.84a16").predictor[0].startswith("50%")
    few_bits = MatVecEngine(A100, KERNELS[1:])
    assert np.isnan(asked(few_bits, "bf16").latency_us[0])  # whole weights are not read by kernels that unpack


def test_impossible_kernels_are_refused() -> None:
    with pytest.raises(PlanError, match="at most 1"):
        MatVec(16, 1.2, "x")
    with pytest.raises(PlanError, match="launches"):
        MatVec(16, 0.9, "x", launches=0)


@pytest.mark.parametrize("name", [name for name in known_stacks() if load_stack(name).mat_vecs])
def test_every_kernel_of_a_stack_says_what_it_is_from(name: str) -> None:
    assert all(len(kernel.source) > 6 for kernel in load_stack(name).mat_vecs)


def test_weights_of_few_bits_are_no_slower_under_the_engine_whose_table_timed_launches() -> None:
    """The table of TensorRT-LLM's weight-only plug-in on A100 takes 28 us for 4 MB, as long as for 16 times that."""
    engine = replace(build_engine(A100, [], [SHIPPED]), stack=load_stack("trtllm"))
    ops = [make_op("gemm", dtype, m=1, n=1024, k=8192) for dtype in ("w4a16", "w8a16", "bf16")]
    answers = ask(engine, ops)
    assert answers.latency_us[0] < answers.latency_us[1] < answers.latency_us[2]
    assert answers.latency_us[0] < 12.0
    assert answers.clause[0] == FEWER_BYTES


class Floors(Tables):
    """A product of one row takes 25 us whatever its size, as one that went to another kernel."""

    def answer(self, kind, columns, dtype, out_dtype, cache):
        answers = super().answer(kind, columns, dtype, out_dtype, cache)
        answers.latency_us[:] = np.where(columns["m"] == 1, 25.0 + answers.latency_us, answers.latency_us)
        return answers


def test_one_row_takes_no_longer_than_sixteen() -> None:
    found = asked(FewRowsEngine([Floors(floor_us=3.0)]), "fp16")
    assert found.latency_us[0] == pytest.approx(2.0 * 1024 * 8192 / RATE + 3.0)
    assert found.clause[0] == MORE_ROWS


@pytest.mark.parametrize(("device", "stack"), [("h100_sxm", "sglang"), ("h200_sxm", "vllm"), ("mi300x", "vllm")])
def test_experts_of_eight_bits_are_no_slower_than_of_sixteen(device: str, stack: str) -> None:
    """vLLM's table of fp8 experts on Hopper was not tuned: 2.6 times as long as in 16 bits."""
    engine = replace(build_engine(load_device(device), [], [SHIPPED]), stack=load_stack(stack))
    sizes = [{"tokens": tokens, "hidden": 2048, "inter": 768, "topk": 8, "experts": 128} for tokens in (1, 16, 256)]
    eight, sixteen = (
        ask(engine, [make_op("fused_moe", dtype, **of) for of in sizes]).latency_us for dtype in ("fp8", "bf16")
    )
    assert (eight < 1.1 * sixteen).all()


def test_memory_that_a_quarter_of_the_units_cannot_draw_is_no_loss_of_the_whole_chip() -> None:
    """MI308X reads 16-bit weights at 2.4 TB/s with 80 units, MI300X has 304 on the same memory."""
    rate = {}
    for device in ("mi300x", "mi308x"):
        engine = replace(build_engine(load_device(device), [], [SHIPPED]), stack=load_stack("vllm"))
        op = make_op("gemm", "bf16", m=1, n=32320, k=4096)
        rate[device] = 2.0 * 32320 * 4096 / ask(engine, [op]).latency_us[0] / 1e6
    assert rate["mi308x"] < 2.7
    assert 3.2 < rate["mi300x"] < 5.0


@pytest.mark.parametrize("name", [name for name in known_stacks() if load_stack(name).mat_vecs])
@pytest.mark.parametrize("device", ["h100_sxm", "rtx_5090", "mi300x"])
def test_more_rows_are_never_faster_than_one_row_of_a_stacks_own_kernel(name: str, device: str) -> None:
    engine = replace(build_engine(load_device(device), [], [SHIPPED]), stack=load_stack(name))
    for dtype in ("fp16", "w8a16", "w4.5a16"):
        times = ask(engine, [make_op("gemm", dtype, m=m, n=14336, k=4096) for m in (1, 2, 4, 9, 16)]).latency_us
        assert (times >= times[0] * (1 - 1e-9)).all(), (dtype, times)


@pytest.mark.parametrize("stack", ["vllm", "sglang", "trtllm"])
def test_a_product_of_as_many_bytes_is_no_faster_than_matrix_units_that_are_cut(stack: str) -> None:
    """16 rows of 4-bit weights on H20, whose units are a seventh of H100's: 74 us of the 102 at its peak, before."""
    h20 = load_device("h20_sxm")
    engines = replace(build_engine(h20, [], [SHIPPED]), stack=load_stack(stack))
    products = [make_op("gemm", "w4a16", out_dtype="bf16", m=16, n=n, k=k) for n, k in ((57344, 8192), (8192, 28672))]
    found = ask(engines, products, "cold")
    columns = {name: np.array([op.dims[at] for op in products]) for at, name in enumerate(KINDS["gemm"].names)}
    least = analytical.roofline_us(OpColumns("gemm", columns, "w4a16", "bf16", "cold"), h20)
    assert (found.latency_us >= 0.999 * least).all()
    assert (found.high_us > found.latency_us).all()


@pytest.mark.parametrize("device", ["t4", "p100_pcie", "v100_pcie", "mi100"])
def test_16_bit_weights_are_read_as_fast_as_sums_of_tensors_where_a_table_has_fp32_alone(device: str) -> None:
    """The table's rows are of fp32 lanes: what these lack says nothing of few rows, which wait for memory."""
    card = load_device(device)
    plain = build_engine(card, [], [SHIPPED], ("learned", "transfer", "analytical"))
    engine = engine_of(load_stack("vllm"), plain)
    product = make_op("gemm", "fp16", m=1, n=14336, k=4096)
    answers = ask(engine, [product, make_op("elementwise", "fp16", numel=14336 * 4096 // 3, inputs=2)], "cold")
    assert answers.clause[0] == SUM_OF_BYTES
    assert answers.latency_us[0] == pytest.approx(answers.latency_us[1], rel=0.02)
    assert 1.0 < answers.latency_us[0] / (2e-3 * 14336 * 4096 / card.memory_gbps) < 1.6
    assert ask(engine, [product.replace(m=2048)], "cold").clause[0] != SUM_OF_BYTES

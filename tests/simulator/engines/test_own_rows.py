"""What was measured on the device itself reaches every answer: the kernel that is launched, and nothing gets worse.

Rows of a small campaign are made on a synthetic device (``tests/simulator/synthetic_h100.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.kernels import is_eager
from opcast.datasets.ops import Op, make_op
from opcast.datasets.store import Store
from opcast.models.choice import ANY, BEYOND, LIBRARY, NETWORK, OTHER, OWN, OWN_ROWS, ROW, TABLE
from opcast.models.registry import Registry
from opcast.models.training import train
from opcast.simulator.engines import Answers, Engine, FusedEngine, ask, build_engine
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import alone, simulate
from opcast.simulator.step.build import engine_of
from opcast.simulator.workbench import SHIPPED_PREDICTORS
from opcast.tests.simulator.synthetic_h100 import H100, SLOWER, SyntheticH100, measured, shipped, truth

NEAR = 0.12  # of the truth, of predictors that learned from a dozen rows
NODE = {"ranks": 8, "ranks_per_node": 8, "link": "nvlink"}


def cases() -> Iterator[tuple[Op, str]]:
    """The ops of a small campaign, and on what each was timed."""
    for m, n, k in product((16, 256, 4096), (1024, 4096, 16384), (2048, 8192)):
        yield make_op("gemm", m=m, n=n, k=k, layout="nt"), "cublas"
    for tokens, heads in product((16, 256, 1024, 4096), (8, 16, 32, 64)):
        for backend in ("torch", "triton:rope"):
            yield make_op("rope", tokens=tokens, heads=heads, head_dim=128), backend
    for rows, cols in product((16, 256, 4096), (4096, 14336)):
        for backend in ("torch", "triton:silu_mul"):
            yield make_op("silu_mul", rows=rows, cols=cols), backend
        for backend in ("torch", "triton:quantize"):
            yield make_op("quantize", rows=rows, cols=cols, out_dtype="fp8"), backend
    for batch, length in product((8, 32, 128), (1024, 8192)):
        yield make_op("mla_decode", batch=batch, heads=16, seq_q=1, seq_kv=length), "torch"
        shape = {"heads_q": 8, "heads_kv": 1, "head_dim": 128, "v_head_dim": 128, "seq_q": 1, "seq_kv": length}
        yield make_op("attention_decode", batch=batch, **shape), "sdpa"
    for size in (2.0 ** np.arange(10, 29, 2)).astype(int).tolist():
        yield make_op("all_reduce", size_bytes=size, **NODE), "nccl"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the rows and what was learned from them."""
    folder = tmp_path_factory.mktemp("own")
    store = Store(folder / "store")
    for state in ("warm", "cold"):
        asked = list(cases())
        times = truth([op for op, _ in asked], state).tolist()
        store.write([measured(*case, state, us) for case, us in zip(asked, times, strict=True)], "r")
    train(store, H100, registry=Registry(folder / "predictors"))
    return folder


@pytest.fixture(scope="module")
def engine(home: Path) -> Engine:
    return build_engine(H100, [home / "store"], [home / "predictors", SHIPPED_PREDICTORS])


def answered(engine: Engine, stack: str | None, op: Op) -> Answers:
    return ask(engine if stack is None else engine_of(load_stack(stack), engine), [op], "cold")


PRODUCT = make_op("gemm", m=300, n=4096, k=4096, layout="nt")
ROPE = make_op("rope", tokens=1000, heads=32, head_dim=128)
SILU = make_op("silu_mul", rows=1000, cols=8192)
ROUNDING = make_op("quantize", rows=1000, cols=8192, out_dtype="fp8")
LATENT = make_op("mla_decode", batch=64, heads=16, seq_q=1, seq_kv=4096)
DECODE = make_op(
    "attention_decode", batch=64, heads_q=8, heads_kv=1, head_dim=128, v_head_dim=128, seq_q=1, seq_kv=4096
)
SUM = make_op("all_reduce", size_bytes=3 * 2**20, **NODE)
ANSWERS = [
    *(
        (stack, PRODUCT, OWN, "gemm@cublas/")
        for stack in ("torchtitan", "megatron_core", "torch", "vllm", "sglang", "trtllm")
    ),
    ("vllm", PRODUCT.replace(dtype="fp8", out_dtype="bf16"), TABLE, "vllm-"),
    *((stack, ROPE, OWN, "rope@triton:rope/") for stack in ("torchtitan", "megatron_core", "vllm", None)),
    ("vllm", SILU, OWN, "silu_mul@triton:silu_mul/"),
    ("megatron_core", ROUNDING, OWN, "quantize@triton:quantize/"),
    ("torch", ROUNDING, OWN, "quantize@torch/"),
    ("vllm", LATENT, TABLE, "mla_decode@sglang"),
    ("sglang", LATENT, TABLE, "mla_decode@sglang"),
    (None, LATENT, ANY, "mla_decode@trtllm"),
    ("vllm", DECODE, TABLE, "attention_decode@vllm"),
    ("torch", DECODE, OWN, "attention_decode@sdpa/"),
    ("torchtitan", SUM, OWN, "all_reduce@nccl/"),
    ("vllm", SUM, TABLE, "all_reduce@vllm"),
]


@pytest.mark.parametrize(("stack", "op", "clause", "predictor"), ANSWERS)
def test_the_own_row_of_the_kernel_that_is_launched_answers(
    engine: Engine, stack: str | None, op: Op, clause: str, predictor: str
) -> None:
    found = answered(engine, stack, op)
    assert found.clause[0] == clause
    assert predictor in found.predictor[0]
    assert (found.source[0] == OWN_ROWS) == (clause == OWN)
    if clause == OWN and not is_eager(op.kind, predictor.partition("@")[2].rstrip("/")):
        assert found.latency_us[0] == pytest.approx(truth([op], "cold")[0], rel=NEAR)


def test_a_row_of_another_kernel_is_as_sure_as_kernels_are_apart(tmp_path: Path) -> None:
    """TensorRT-LLM runs experts of its own: vLLM's tell of them, but not to a percent."""
    experts = make_op("fused_moe", "fp8_block", "bf16", tokens=64, hidden=7168, inter=2048, topk=8, experts=256, tp=8)
    device = replace(H100, id="nobody_s", architecture="ada")  # no table knows it
    store = Store(tmp_path)
    store.write([replace(measured(experts, "vllm:fused_experts", "cold", 500.0), device_id=device.id)], "r")
    engine = build_engine(device, [tmp_path], [])
    for stack, clause in (("vllm", OWN), ("trtllm", OTHER)):
        found = answered(engine, stack, experts)
        assert (found.clause[0], found.latency_us[0]) == (clause, 500.0)
        for factor in (found.high_us[0] / 500.0, 500.0 / found.low_us[0]):
            assert factor > 1.2 if clause == OTHER else factor < 1.02


def test_own_collectives_answer_between_nodes(tmp_path: Path) -> None:
    """Another lab's fabric says nothing of this one; what was timed here does, between the sizes that were timed."""
    far = {"ranks": 16, "ranks_per_node": 8, "link": "ib"}
    sizes = (2.0 ** np.arange(10, 31)).astype(int).tolist()
    ops = [make_op("all_reduce", size_bytes=size, **far) for size in sizes]
    store = Store(tmp_path / "store")
    store.write([measured(op, "nccl", "warm", 300.0 + op.size_bytes / 5e4) for op in ops], "r")
    train(store, H100, registry=Registry(tmp_path / "predictors"))
    cluster = replace(load_cluster("dgx_h100"), nodes=4)
    engine = build_engine(H100, [store.path], [tmp_path / "predictors", SHIPPED_PREDICTORS], cluster=cluster)
    between = make_op("all_reduce", size_bytes=3 << 20, **far)
    found = ask(engine_of(load_stack("torchtitan"), engine), [between, between.replace(ranks=32)])
    assert found.clause.tolist() == [OWN, NETWORK]
    assert found.latency_us[0] == pytest.approx(300.0 + (3 << 20) / 5e4, rel=0.1)


@pytest.mark.parametrize("stack", ["torchtitan", "vllm"])
def test_without_own_rows_nothing_changes(stack: str) -> None:
    found = answered(shipped(), stack, PRODUCT)
    assert found.clause[0] == (LIBRARY if stack == "torchtitan" else TABLE)
    assert found.source[0] == "aiconfigurator"


def test_beyond_own_rows_a_table_counts_times_what_they_are_off_it(engine: Engine) -> None:
    for op in (PRODUCT.replace(n=65536), PRODUCT.replace(m=16384), PRODUCT.replace(m=2, k=24576)):
        found = answered(engine, "vllm", op)
        before = answered(shipped(), "vllm", op)
        assert found.clause[0] == BEYOND
        assert "vllm" in found.predictor[0]
        assert "gemm@cublas" in found.predictor[0]
        assert found.source[0] == "aiconfigurator, corrected by own rows"
        assert found.latency_us[0] == pytest.approx(SLOWER * before.latency_us[0], rel=0.15)
        assert found.high_us[0] / found.latency_us[0] > before.high_us[0] / before.latency_us[0]


def test_a_row_of_this_very_op_goes_first_and_other_labs_rows_after_what_own_ones_teach(
    home: Path, tmp_path: Path
) -> None:
    mine, theirs = make_op("gemm", m=256, n=4096, k=2048, layout="nt"), PRODUCT
    imported = Store(tmp_path)
    imported.write([measured(op, "torch:aten", "cold", 1.0, "kineto") for op in (mine, theirs)], "r")
    stores, registries = [home / "store", tmp_path], [home / "predictors", SHIPPED_PREDICTORS]
    engine = build_engine(H100, stores, registries)
    assert answered(engine, "vllm", mine).engine[0] == "measured"
    assert answered(engine, "vllm", mine).clause[0] == OWN
    assert answered(engine, "vllm", theirs).engine[0] == "learned"
    alone = build_engine(H100, stores[1:], registries[1:])
    found = answered(alone, "vllm", theirs)
    assert (found.engine[0], found.clause[0], found.source[0]) == ("measured", ROW, "kineto")


def test_own_rows_of_another_kernel_answer_where_no_table_of_the_framework_does(home: Path) -> None:
    engine = build_engine(H100, [home / "store"], [home / "predictors"])
    assert answered(engine, "vllm", DECODE).clause[0] == OTHER
    assert answered(engine, "vllm", SUM).clause[0] == OTHER
    assert answered(engine, "vllm", LATENT).engine[0] == "analytical"  # several kernels: never


def test_rows_correct_the_table_of_their_device(home: Path) -> None:
    card = Registry(home / "predictors").find("gemm", H100.id, "cublas").card
    assert card["adapted_from"].endswith("/h100_sxm@1")


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
STEPS = [
    ("torchtitan", Work("train", micro_batch=1, seq_len=2048)),
    ("torch", Work("train", micro_batch=1, seq_len=2048)),
    ("vllm", Work("decode", batch=64, input_len=1024)),
    ("vllm", Work("prefill", batch=1, input_len=2048)),
]


@pytest.mark.parametrize(("stack", "work"), STEPS)
def test_steps_move_towards_the_truth_and_say_whose_rows_they_are(
    engine: Engine, tmp_path: Path, stack: str, work: Work
) -> None:
    plan = replace(alone(H100, "bf16"), stack=load_stack(stack))
    before, after, real = (
        simulate(LLAMA, work, plan, H100, each, tmp_path)
        for each in (shipped(), engine, FusedEngine([SyntheticH100()]))
    )
    times = [getattr(each, "step_time_s", None) or each.e2e_ms for each in (before, after, real)]
    assert times[0] < times[1] <= times[2] * (1 + NEAR)
    assert sum(share for source, share in after.sources.items() if source.endswith(OWN_ROWS)) > 0.4
    assert sum(after.sources.values()) == pytest.approx(1.0)
    said = [note for note in after.notes if note.startswith("several machines speak for this step")]
    assert len(said) == (after.sources.get("aiconfigurator", 0.0) + after.sources.get("vidur", 0.0) >= 0.01)
    kinds = {share.kind: share.known_by for share in after.breakdown.by_op}
    assert {each.clause for each in kinds["gemm"]} <= {OWN, BEYOND}
    assert all(each.time_s > 0 for known in kinds.values() for each in known)
    assert OWN_ROWS not in before.sources

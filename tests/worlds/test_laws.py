"""The laws of worlds are what physics allows: more work is never faster, and no kernel beats the machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.ops import KINDS, LINKS, Op, make_op
from opcast.tests.worlds.chip import WORLDS, World, make_world
from opcast.tests.worlds.laws import Launch, held_back, latency_us, rate
from opcast.tests.worlds.truth import ATTENTION_IN_STEP, OTHERS_IN_STEP, PRODUCTS_IN_STEP, in_step

LITTLE = 1.12  # what the unexplained part of a shape, and tiles that fit better, may make of a larger op
MADE = {(name, seed): make_world(name, seed) for name in WORLDS for seed in (1, 2, 3)}
worlds = st.sampled_from(list(MADE.values()))
sizes = st.integers(4, 14).map(lambda power: 2**power)
FEW = settings(max_examples=40)
caches = st.sampled_from(("warm", "cold"))


def us(world: World, op: Op, kernel: str = "cublas", cache: str = "warm") -> float:
    found = latency_us(world, op, kernel, cache)
    assert math.isfinite(found)
    assert found > 0
    return found


@FEW
@given(world=worlds, m=sizes, n=sizes, k=sizes, cache=caches, more=st.sampled_from("mnk"))
def test_more_work_is_never_faster(world: World, m: int, n: int, k: int, cache: str, more: str) -> None:
    dims = {"m": m, "n": n, "k": k}
    larger = make_op("gemm", **{**dims, more: 2 * dims[more]})
    assert us(world, make_op("gemm", **dims), cache=cache) < LITTLE * us(world, larger, cache=cache)


@FEW
@given(world=worlds, m=sizes, n=sizes, k=sizes, dtype=st.sampled_from(("bf16", "fp8", "fp32")))
def test_no_product_is_faster_than_the_chip(world: World, m: int, n: int, k: int, dtype: str) -> None:
    op = make_op("gemm", dtype, m=m, n=n, k=k)
    best = float(op.cost.flops) / (rate(world, dtype) * 1e6)
    assert us(world, op) > 0.85 * max(best, world.chip.kernel_us)


@FEW
@given(world=worlds, rows=sizes, cols=sizes, kind=st.sampled_from(("rms_norm", "silu_mul", "softmax", "gelu_backward")))
def test_bytes_take_as_long_as_the_memory_needs(world: World, rows: int, cols: int, kind: str) -> None:
    op = make_op(kind, rows=rows, cols=cols)
    cold = us(world, op, "triton", "cold")
    assert cold > 0.8 * float(op.cost.bytes) / (world.chip.memory_gbps * 1e3)
    assert us(world, op, "triton") < 1.001 * cold, "what is in the cache is not slower"
    assert us(world, op.replace(rows=2 * rows), "triton", "cold") * LITTLE > cold


@FEW
@given(
    world=worlds, batch=st.integers(1, 64), seq=sizes, kind=st.sampled_from(("attention_decode", "attention_prefill"))
)
def test_attention_grows_with_its_context(world: World, batch: int, seq: int, kind: str) -> None:
    seq_q = 1 if kind == "attention_decode" else seq
    heads = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128}
    short = make_op(kind, batch=batch, seq_q=seq_q, seq_kv=seq + 1, **heads)
    long = make_op(kind, batch=batch, seq_q=seq_q, seq_kv=2 * seq + 1, **heads)
    assert us(world, short, "flash2") < LITTLE * us(world, long, "flash2")
    assert us(world, short, "flash3") < 1.3 * us(world, short, "flash2")


@FEW
@given(world=worlds, rows=sizes, cols=sizes)
def test_an_eager_form_is_slower_than_one_kernel(world: World, rows: int, cols: int) -> None:
    op = make_op("silu_mul", rows=rows, cols=cols)
    size = float(rows * cols * 2)
    eager = latency_us(world, op, "aten", "cold", [Launch("silu", 2 * size), Launch("mul", 3 * size)])
    assert eager > us(world, op, "aten", "cold")


@FEW
@given(
    world=worlds,
    kind=st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")),
    size=st.integers(10, 31),
    ranks=st.sampled_from((2, 4, 8, 16, 64)),
)
def test_collectives_are_bound_by_their_links(world: World, kind: str, size: int, ranks: int) -> None:
    far = ranks > 8
    link = LINKS.index(world.cluster.fabric if far else world.cluster.link)
    op = make_op(kind, size_bytes=2**size, ranks=ranks, ranks_per_node=min(ranks, 8), link=link)
    found = us(world, op, "nccl")
    assert found > 0.9 * world.links.base_us
    assert us(world, op.replace(size_bytes=2 ** (size + 1)), "nccl") * LITTLE > found
    assert found > 0.85 * 2**size / ranks / (world.links.near_gbps * 1e3)
    if far and kind in ("all_reduce", "all_gather", "reduce_scatter"):
        inside = op.replace(ranks=8, link=LINKS.index(world.cluster.link))
        assert found * LITTLE > us(world, inside, "nccl")


@FEW
@given(world=worlds, m=sizes, n=sizes, k=sizes)
def test_the_power_limit_slows_what_computes_most(world: World, m: int, n: int, k: int) -> None:
    op = make_op("gemm", m=m, n=n, k=k)
    slower = held_back(world, op, us(world, op))
    assert 1.0 <= slower < 1.6
    assert held_back(world, make_op("gelu", rows=m, cols=n), 10.0) == 1.0


@pytest.mark.parametrize(
    ("op", "spread"),
    [
        (make_op("gemm", m=64, n=64, k=64), PRODUCTS_IN_STEP),
        (make_op("mla_decode", batch=2, heads=16, seq_q=1, seq_kv=256), ATTENTION_IN_STEP),
        (make_op("gelu", rows=64, cols=64), OTHERS_IN_STEP),
    ],
)
def test_a_step_makes_of_kernels_what_one_gpu_showed(op: Op, spread: float) -> None:
    world = MADE["unlike_any", 1]
    drawn = [math.log(in_step(world, f"step {number}", op)) for number in range(200)]
    assert math.sqrt(sum(each**2 for each in drawn) / len(drawn)) == pytest.approx(spread, rel=0.2)
    assert in_step(world, "step 1", op) == in_step(world, "step 1", op.replace(**{KINDS[op.kind].names[0]: 3}))


@pytest.mark.parametrize("name", WORLDS)
def test_a_seed_draws_one_world_and_another_seed_another(name: str) -> None:
    op = make_op("gemm", m=4096, n=4096, k=4096)
    first, again, other = make_world(name, 1), make_world(name, 1), make_world(name, 2)
    assert first == again
    assert us(first, op) == us(again, op)
    assert us(first, op) != us(other, op)
    assert first.chip.tflops != other.chip.tflops

"""Sharing ops out: arithmetic is conserved along every axis, and what does not divide is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.ops import KINDS, Op, make_op
from opcast.simulator.passes.rewriting.split import axes, share
from opcast.simulator.question.plan import PlanError

SHARED = [
    (name, axis)
    for name in KINDS
    if name not in ("fused_moe", "host_overhead")
    for axis in axes(make_op(name, **{d.name: 8 for d in KINDS[name].dims if d.default is None}))
]

SAME_ROWS = (("grouped_gemm", "experts"), ("embedding_backward", "vocab"))  # fewer experts or words take them all


def example(kind: str, size: int, **dims: object) -> Op:
    """An op of a kind, every dimension without a default of the same size."""
    return make_op(kind, **({dim.name: size for dim in KINDS[kind].dims if dim.default is None} | dims))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SHARED), st.integers(1, 6), st.sampled_from((2, 3, 4, 8)))
def test_shares_add_up(case: tuple[str, str], blocks: int, parts: int) -> None:
    kind, axis = case
    op = example(kind, 24 * blocks, batch=24 * blocks) if "batch" in KINDS[kind].names else example(kind, 24 * blocks)
    shared = share(op, axis, parts)
    causal = KINDS[kind].family == "attention" and axis in ("tokens", "keys")  # shares of pairs are not even
    exact = not causal and (kind, axis) not in SAME_ROWS
    if exact and float(op.cost.flops):
        assert float(shared.cost.flops) * parts == pytest.approx(float(op.cost.flops))
    assert float(shared.cost.bytes) <= float(op.cost.bytes)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 10**6), st.integers(2, 64))
def test_largest_share_holds_the_rest(size: int, parts: int) -> None:
    op = make_op("gemm", m=size, n=64, k=64, layout="nt")
    assert share(op, "tokens", parts, uneven=True).m == -(-size // parts)


def test_layouts_know_their_axes() -> None:
    forward = make_op("gemm", m=6, n=8, k=10, layout="nt")
    assert share(forward, "features_out", 2).dims[1:4] == (6, 4, 10)
    assert share(forward, "features_in", 2).dims[1:4] == (6, 8, 5)
    weight_gradient = make_op("gemm", m=8, n=10, k=6, layout="tn")
    assert share(weight_gradient, "tokens", 2).k == 3
    assert share(weight_gradient, "features_out", 2).m == 4
    assert share(weight_gradient, "n", 5).n == 2


def test_few_heads_of_keys_are_held_by_several_ranks() -> None:
    op = example("attention_prefill", 64, heads_q=32, heads_kv=2)
    shared = share(op, "heads", 8)
    assert (shared.heads_q, shared.heads_kv) == (4, 1)


def test_rows_of_shared_features_are_shorter() -> None:
    op = make_op("elementwise", numel=64 * 256, inputs=1, run=256)
    assert share(op, "features", 4).run == 64
    assert share(op, "tokens", 4).run == 256
    assert share(op, "tokens", 64).run == 0  # one row is all there is


def test_what_does_not_divide_names_the_nearest_degree() -> None:
    with pytest.raises(PlanError, match=r"tokens of gemm are 32, which 6 ranks cannot share evenly.* can is 4"):
        share(make_op("gemm", m=32, n=8, k=8), "tokens", 6)
    with pytest.raises(PlanError, match="adamw has no heads to share out; it has elements"):
        share(make_op("adamw", numel=8), "heads", 2)

"""Properties that hold for every op kind, present and future; exact counts where a brute-force count exists."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.dtypes import BITS, canonical_dtype, itemsize
from opcast.datasets.ops import (
    KINDS,
    Op,
    OpError,
    attended_pairs,
    bus_factor,
    cost_columns,
    iterate_groups,
    kind,
    make_op,
)
from opcast.datasets.vocabulary import Cost, define

CONTRACT = [
    "gemm",
    "grouped_gemm",
    "attention_prefill",
    "attention_decode",
    "attention_backward",
    "mla_prefill",
    "mla_decode",
    "rms_norm",
    "rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rope",
    "silu_mul",
    "gelu",
    "elementwise",
    "softmax",
    "embedding",
    "cross_entropy",
    "moe_route",
    "moe_permute",
    "quantize",
    "adamw",
    "copy",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
]
# Dims that do not make an op larger: they say how data lies or is shared out.
NOT_SIZES = {
    "window",
    "imbalance",
    "block",
    "run",
    "run_bytes",
    "ranks_per_node",
    "tensors",
    "vocab",
    "tp",
    "ep",
    "skew",
}
DTYPES = st.sampled_from(sorted(BITS))


@st.composite
def ops(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(KINDS)) -> Op:
    definition = KINDS[draw(st.sampled_from(kinds))]
    dims = {}
    for dim in definition.dims:
        high = len(dim.choices) - 1 if dim.choices else max(dim.low, 300)
        dims[dim.name] = draw(st.integers(dim.low, high))
    return make_op(definition.name, draw(DTYPES), draw(DTYPES), **dims)


def test_every_kind_of_the_contract_is_there_and_documented() -> None:
    assert set(CONTRACT) <= set(KINDS)
    for definition in KINDS.values():
        assert len(definition.doc) > 30, definition.name
        assert len(set(definition.names)) == len(definition.names)


@given(ops())
def test_costs_are_finite_and_never_negative(op: Op) -> None:
    cost = op.cost
    for value in (cost.flops, cost.read_bytes, cost.write_bytes, cost.bytes):
        assert np.isfinite(value)
        assert value >= 0
    assert cost.unit in ("tensor", "vector", "network", "host")
    assert cost.bytes == cost.read_bytes + cost.write_bytes


@given(ops(), st.data())
def test_a_larger_op_never_costs_less(op: Op, data: st.DataObject) -> None:
    sizes = [dim for dim in KINDS[op.kind].dims if not dim.choices and dim.name not in NOT_SIZES]
    if KINDS[op.kind].family == "attention":  # more queries than keys is no attention
        sizes = [dim for dim in sizes if dim.name != "seq_q"]
    dim = data.draw(st.sampled_from(sizes))
    larger = op.replace(**{dim.name: getattr(op, dim.name) + data.draw(st.integers(1, 200))})
    assert larger.cost.flops >= op.cost.flops
    assert larger.cost.bytes >= op.cost.bytes


@given(st.sampled_from(sorted(KINDS)), st.data())
@settings(max_examples=60)
def test_scalar_and_column_costs_agree(kind_name: str, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(ops((kind_name,)), min_size=1, max_size=6))
    same = [op.replace(dtype=drawn[0].dtype, out_dtype=drawn[0].out_dtype) for op in drawn]
    table = np.array([op.dims for op in same]).T
    columns = dict(zip(KINDS[kind_name].names, table, strict=True))
    cost = cost_columns(kind_name, columns, same[0].dtype, same[0].out_dtype)
    for position, op in enumerate(same):
        for name in ("flops", "read_bytes", "write_bytes"):
            column = np.broadcast_to(getattr(cost, name), len(same))
            assert column[position] == pytest.approx(float(getattr(op.cost, name)), rel=1e-12), (name, str(op))


@given(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(0, 50))
@settings(max_examples=300)
def test_attended_pairs_counts_the_mask(seq_q: int, more: int, causal: bool, window: int) -> None:
    seq_kv = seq_q + more
    mask = np.zeros((seq_q, seq_kv), dtype=bool)
    for i in range(seq_q):
        last = more + i + 1 if causal else seq_kv
        first = max(0, last - window) if window else 0
        mask[i, first:last] = True
    assert attended_pairs(seq_q, seq_kv, int(causal), window) == mask.sum()


def test_costs_that_can_be_counted_by_hand() -> None:
    gemm = make_op("gemm", m=3, n=5, k=7, batch=2, dtype="bf16", out_dtype="fp32").cost
    assert (gemm.flops, gemm.read_bytes, gemm.write_bytes) == (2 * 2 * 3 * 5 * 7, 2 * (3 * 7 + 7 * 5) * 2, 2 * 15 * 4)
    prefill = make_op(
        "attention_prefill", heads_q=4, heads_kv=2, head_dim=8, v_head_dim=8, seq_q=6, seq_kv=6, causal=1
    ).cost
    assert prefill.flops == 4 * 4 * 21 * 8
    assert prefill.read_bytes == (4 * 6 * 8 + 2 * 2 * 6 * 8) * 2
    assert prefill.write_bytes == 4 * 6 * 8 * 2
    backward = make_op(
        "attention_backward", heads_q=4, heads_kv=2, head_dim=8, v_head_dim=8, seq_q=6, seq_kv=6, causal=1
    ).cost
    assert backward.flops == 2.5 * prefill.flops
    four_bit = make_op("quantize", rows=10, cols=256, block=16, dtype="bf16", out_dtype="nvfp4").cost
    assert four_bit.write_bytes == 10 * 256 / 2 + 4 * 10 * 16
    adamw = make_op("adamw", numel=100, dtype="bf16", out_dtype="fp32").cost  # p, g, m, v in; p, m, v out
    assert (adamw.read_bytes, adamw.write_bytes) == (100 * (2 * 2 + 2 * 4), 100 * (2 + 2 * 4))
    experts = make_op("grouped_gemm", experts=64, tokens=3, n=8, k=4, dtype="bf16").cost
    assert experts.read_bytes == (3 * 4 + 3 * 4 * 8) * 2


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 8) == pytest.approx(2 * 7 / 8)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(name, 4) == pytest.approx(3 / 4)
    for name in ("broadcast", "send_recv"):
        assert bus_factor(name, 16) == 1
    np.testing.assert_allclose(bus_factor("all_reduce", np.array([1, 2, 4])), [0, 1, 1.5])
    for definition in KINDS.values():
        if definition.family == "collective":
            assert definition.op(size_bytes=1 << 20, ranks=1).cost.bytes == 0
            assert definition.op(size_bytes=1 << 20, ranks=2).cost.unit == "network"


@given(ops())
def test_every_way_to_write_an_op_leads_back_to_it(op: Op) -> None:
    values = op.to_dict()
    name = values.pop("kind")
    assert make_op(str(name), **values) == op
    assert make_op(op.kind, op.dtype, op.out_dtype, **dict(zip(KINDS[op.kind].names, op.dims, strict=True))) == op
    assert op.replace() == op
    assert hash(op.replace()) == hash(op)
    shown = str(op)
    assert shown.startswith(f"{op.kind}[")
    for dim, value in zip(KINDS[op.kind].dims, op.dims, strict=True):
        assert getattr(op, dim.name) == value
        assert value == dim.default or f"{dim.name}=" in shown


@given(st.lists(ops(), max_size=20))
def test_grouping_keeps_every_op(drawn: list[Op]) -> None:
    seen = {}
    for kind_name, dtype, out_dtype, positions, columns in iterate_groups(drawn):
        for row, position in enumerate(positions):
            dims = {name: int(column[row]) for name, column in columns.items()}
            seen[int(position)] = make_op(kind_name, dtype, out_dtype, **dims)
    assert [seen[i] for i in range(len(drawn))] == drawn


@pytest.mark.parametrize(
    ("kind_name", "dims", "message"),
    [
        ("gem", {}, "unknown op 'gem'; did you mean gemm"),
        ("", {}, "unknown op ''; known: gemm"),
        ("gemm", {"m": 1, "n": 1}, "gemm needs 'k'"),
        ("gemm", {"m": 0, "n": 1, "k": 1}, "gemm.m=0 must be at least 1"),
        ("gemm", {"m": -4, "n": 1, "k": 1}, "gemm.m=-4 must be at least 1"),
        ("gemm", {"m": 1.5, "n": 1, "k": 1}, "gemm.m=1.5 is not an integer"),
        ("gemm", {"m": "many", "n": 1, "k": 1}, "gemm.m='many' is not an integer"),
        ("gemm", {"m": None, "n": 1, "k": 1}, "gemm needs 'm'"),
        ("gemm", {"m": math.inf, "n": 1, "k": 1}, "gemm.m=inf is not an integer"),
        ("gemm", {"m": math.nan, "n": 1, "k": 1}, "gemm.m=nan is not an integer"),
        ("gemm", {"m": 2**70, "n": 1, "k": 1}, "is not an integer below 2"),
        ("gemm", {"m": [1], "n": 1, "k": 1}, "is not an integer"),
        ("gemm", {"m": 1, "n": 1, "k": 1, "layout": "tt"}, "gemm.layout='tt' is not one of nn, nt, tn"),
        ("gemm", {"m": 1, "n": 1, "k": 1, "layout": 3}, "gemm.layout=3 must be from 0 to 2"),
        ("gemm", {"m": 1, "n": 1, "kk": 1}, "gemm has no dimension 'kk'"),
        ("rms_norm", {"rows": 1, "col": 1}, "no dimension 'col'; did you mean cols"),
        ("gemm", {"m": 1, "n": 1, "k": 1, "dtype": "bf17"}, "unknown dtype 'bf17'; known: fp64"),
        ("gemm", {"m": 1, "n": 1, "k": 1, "out_dtype": "x"}, "unknown dtype 'x'"),
    ],
)
def test_a_wrong_op_is_one_clear_line(kind_name: str, dims: dict, message: str) -> None:
    with pytest.raises(OpError) as caught:
        make_op(kind_name, **dims)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_mean_an_integer_are_taken() -> None:
    op = make_op("gemm", m="16", n=16.0, k=np.int64(16), layout="tn", dtype="torch.bfloat16")
    assert op.dims == (1, 16, 16, 16, 2)
    assert op.dtype == "bf16"
    assert all(type(value) is int for value in op.dims)
    prefill = make_op(
        "attention_prefill", heads_q=1, heads_kv=1, head_dim=1, v_head_dim=1, seq_q=1, seq_kv=1, causal=True
    )
    assert prefill.causal == 1


def test_an_op_is_immutable_and_has_only_its_dims() -> None:
    op = make_op("rms_norm", rows=2, cols=3)
    with pytest.raises(AttributeError, match="rms_norm op has no dimension 'm'"):
        _ = op.m
    with pytest.raises(AttributeError):
        op.dtype = "fp32"  # type: ignore[misc]
    with pytest.raises(OpError, match="no dimension 'm'"):
        op.replace(m=3)


@given(DTYPES)
def test_dtypes_have_one_name(name: str) -> None:
    assert canonical_dtype(f" torch.{name.upper()} ") == name
    assert itemsize(name) == BITS[name] / 8


def test_kind_gives_the_definition() -> None:
    assert kind("gemm") is KINDS["gemm"]
    assert kind("all_reduce").collective
    assert not kind("gemm").collective


@pytest.mark.parametrize(
    ("kind_name", "dtype", "out"),
    [
        ("gemm", "fp8", "bf16"),
        ("gemm", "w4a16", "bf16"),
        ("gemm", "nvfp4", "bf16"),
        ("gemm", "bf16", "bf16"),
        ("gemm", "int8", "int8"),
        ("attention_prefill", "fp8", "bf16"),
        ("copy", "fp8", "fp8"),
    ],
)
def test_products_of_small_floats_are_written_in_bf16(kind_name: str, dtype: str, out: str) -> None:
    dims = {dim.name: 8 for dim in kind(kind_name).dims if dim.default is None}
    assert make_op(kind_name, dtype, **dims).out_dtype == out
    assert make_op(kind_name, dtype, "fp32", **dims).out_dtype == "fp32"


def test_a_kind_has_a_known_family_and_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="family 'norms' is not one of gemm, attention, linear_attention, norm,"):
        define("rows", family="norms")

    def gemm(dims: object) -> Cost:
        return Cost(0.0, 0.0, 0.0)

    with pytest.raises(ValueError, match="op kind 'gemm' is defined twice"):
        define("rows", family="norm")(gemm)


def test_dims_of_usual_names_lie_along_the_usual_axes() -> None:
    assert KINDS["rms_norm"].axes["tokens"] == ("rows",)
    assert KINDS["attention_prefill"].axes["heads"] == ("heads_q", "heads_kv")
    assert set(KINDS["adamw"].axes) == {"elements"}
    assert not KINDS["host_overhead"].axes

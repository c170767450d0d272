"""Power: watts are learned, a cap is never faster, and one that does not bind changes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.devices import Device, load_device
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.vocabulary import OpColumns
from opcast.models import power
from opcast.models.candidates import Options
from opcast.models.power import Limits, Parts, PowerError
from opcast.models.predictor import Predictor
from opcast.models.registry import Registry
from opcast.models.table import TrainingError

H200 = load_device("h200_sxm")
TIMES = st.floats(0.0, 1e5)
WATTS = st.floats(50.0, 900.0)
CAPS = st.floats(20.0, 1200.0)
LONG = np.array([1e4])  # us of a product that is far below what its device sustains


def one(compute: float, memory: float, rest: float) -> Parts:
    return Parts(np.array([compute]), np.array([memory]), np.array([rest]), np.array([compute]))


def limited(device: Device, busy: Parts, watts: np.ndarray, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    return power.held(device, busy, [power.demand_by_watts(device, busy, watts)], limits)


@given(TIMES, TIMES, st.floats(0.1, 1e4), WATTS, CAPS, CAPS)
def test_a_lower_cap_is_never_faster_and_never_draws_more(
    compute: float, memory: float, rest: float, watts: float, cap: float, other: float
) -> None:
    busy, drawn = one(compute, memory, rest), np.array([watts])
    low, high = sorted((cap, other))
    slow, less = limited(H200, busy, drawn, Limits(low))
    assert less <= low * (1 + 1e-12)
    fast, more = limited(H200, busy, drawn, Limits(high))
    assert slow >= fast >= 1.0
    assert less <= more * (1 + 1e-12) <= watts * (1 + 1e-9)


@given(TIMES, TIMES, st.floats(0.1, 1e4), WATTS, st.floats(0.0, 500.0))
def test_a_cap_above_what_is_drawn_changes_nothing(
    compute: float, memory: float, rest: float, watts: float, room: float
) -> None:
    slower, drawn = limited(H200, one(compute, memory, rest), np.array([watts]), Limits(watts + room))
    assert slower == 1.0
    assert drawn == pytest.approx(watts, rel=1e-12)


@given(TIMES, TIMES, st.floats(0.1, 1e4), WATTS, st.floats(100.0, 3000.0), st.floats(100.0, 3000.0))
def test_a_lower_clock_is_never_faster(
    compute: float, memory: float, rest: float, watts: float, clock: float, other: float
) -> None:
    busy, drawn = one(compute, memory, rest), np.array([watts])
    low, high = sorted((clock, other))
    slow = limited(H200, busy, drawn, Limits(clock_mhz=low))[0]
    assert slow >= limited(H200, busy, drawn, Limits(clock_mhz=high))[0] >= 1.0


def test_half_the_clock_doubles_compute_and_leaves_memory() -> None:
    half = Limits(clock_mhz=H200.clock_mhz / 2)
    watts = np.array([600.0])
    assert limited(H200, one(100.0, 1.0, 0.0), watts, half)[0] == pytest.approx(2.0)
    assert limited(H200, one(10.0, 100.0, 0.0), watts, half)[0] == 1.0


def test_a_binding_cap_is_kept_where_clocks_can_keep_it() -> None:
    slower, drawn = limited(H200, one(100.0, 20.0, 1.0), np.array([690.0]), Limits(500.0))
    assert drawn == pytest.approx(500.0)
    assert 1.05 < slower < 2.0


@given(st.floats(141.0, 700.0), st.sampled_from([1, 16, 256, 8192]))
def test_no_product_draws_more_than_the_cap_or_the_tdp(cap: float, tokens: int) -> None:
    """A product of few rows waits for memory, which no clock slows: the whole of it has to."""
    columns = {"batch": [1], "m": [tokens], "n": [28672], "k": [4096], "layout": [0]}
    op = {name: np.array(value) for name, value in columns.items()}
    free = power.drawn(None, OpColumns("gemm", op, "bf16", "bf16", "cold"), H200, Limits(), LONG)
    held = power.drawn(None, OpColumns("gemm", op, "bf16", "bf16", "cold"), H200, Limits(cap), LONG)
    assert free.power_w <= H200.tdp_w
    assert held.power_w <= min(cap * (1 + 1e-12), free.power_w)
    assert held.slower >= 1.0
    if cap >= free.power_w:
        assert held.slower == 1.0


def test_a_cap_that_an_idle_device_exceeds_is_refused() -> None:
    op = {name: np.array([64]) for name in ("batch", "m", "n", "k")} | {"layout": np.array([0])}
    with pytest.raises(PowerError, match=r"a cap of 100 W is no more than .* ask for more than 126 W"):
        power.drawn(None, OpColumns("gemm", op, "bf16", "bf16", "cold"), H200, Limits(100.0), LONG)


@pytest.mark.parametrize("values", [{"cap_w": 0.0}, {"cap_w": -5.0}, {"clock_mhz": float("nan")}])
def test_limits_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(PowerError, match="positive"):
        Limits(**values)


def test_a_device_without_tdp_has_no_baseline(gpu: Device) -> None:
    with pytest.raises(PowerError, match="no tdp_w"):
        power.baseline_w(gpu, one(1.0, 1.0, 1.0))


def measured(count: int = 240, unknown: int = 20) -> pa.Table:
    """Products whose watts are the baseline's times a law of rows, some without a figure."""
    rng = np.random.default_rng(0)
    columns = {
        "batch": np.ones(count, dtype=np.int64),
        "m": 2 ** rng.integers(0, 13, count),
        "n": rng.choice(np.arange(256, 8193, 256), count),
        "k": rng.choice(np.arange(256, 8193, 256), count),
        "layout": np.ones(count, dtype=np.int64),
    }
    watts = power.baseline_w(H200, power.parts(OpColumns("gemm", columns, "bf16", "bf16"), H200))
    watts = watts * (0.7 + 0.02 * np.log2(columns["m"])) * np.exp(0.01 * rng.standard_normal(count))
    watts[:unknown] = np.nan
    named = {"dtype": ["bf16"] * count, "latency_us": np.ones(count), "power_w": pa.array(watts, from_pandas=True)}
    return pa.table({**columns, **named})


@pytest.fixture(scope="module")
def model(fast: Options) -> Predictor:
    (table,) = power.power_tables("gemm", measured(), H200)
    return power.fit(table, fast)


def ask(model: Predictor | None, device: Device = H200, limits: Limits | None = None) -> power.Drawn:
    columns = {name: np.array([float(value)]) for name, value in zip(("batch", "layout"), (1, 1), strict=True)}
    columns |= {name: np.array([4096.0]) for name in ("m", "n", "k")}
    return power.drawn(
        model, OpColumns("gemm", columns, "bf16", "bf16", "warm"), device, limits or Limits(), np.array([200.0])
    )


def test_watts_are_learned_from_rows_that_have_them(model: Predictor) -> None:
    assert model.card["n"] == 220
    assert model.card["test_median_ape"] < 3.0 < model.card["baseline_median_ape"]
    assert power.power_tables("gemm", measured().drop_columns("power_w"), H200) == []
    assert power.power_tables("gemm", measured(unknown=240), H200) == []


def test_energy_is_inside_only_where_watts_were_measured(model: Predictor) -> None:
    free = ask(model)
    assert free.in_envelope[0]
    assert free.slower[0] == 1.0
    capped = ask(model, limits=Limits(0.7 * free.power_w[0]))
    assert capped.slower[0] > 1.0
    assert not capped.in_envelope[0]
    assert not ask(None).in_envelope[0]
    assert not ask(model, dataclasses.replace(H200, id="another")).in_envelope[0]


def test_power_models_lie_beside_the_predictors(model: Predictor, tmp_path: Path) -> None:
    Registry(tmp_path / power.FOLDER).register(model)
    found = power.find([tmp_path / "none", tmp_path], "gemm", "h200_sxm")
    assert found is not None
    np.testing.assert_array_equal(ask(found).power_w, ask(model).power_w)
    assert Registry(tmp_path).list() == []
    assert power.find([tmp_path], "gemm", "l40s") is None


def test_too_few_rows_are_refused(model: Predictor, fast: Options) -> None:
    (table,) = power.power_tables("gemm", measured(24), H200)
    with pytest.raises(TrainingError, match="5 are needed"):
        power.fit(table, fast)


@pytest.mark.parametrize(("cut", "whole"), [("h20_sxm", "h200_sxm"), ("rtx_4090", "l40s")])
def test_units_that_are_cut_cost_no_more_energy_than_whole_ones(cut: str, whole: str) -> None:
    """A FLOP of a card whose matrix units are held back switches the same transistors as one of its sibling."""

    def joules_of_a_tflop(name: str) -> float:
        device, size = load_device(name), np.array([4096])
        rate = 0.5 * device.tensor_rate("bf16")
        took_us = 2.0 * size**3 / rate * 1e-6
        op = make_op("gemm", m=4096, n=4096, k=4096)
        columns = {name: np.array([value]) for name, value in zip(KINDS["gemm"].names, op.dims, strict=True)}
        busy = power.activity(OpColumns("gemm", columns, op.dtype, op.out_dtype), device, took_us)
        return float(busy.core[0]) / rate

    assert joules_of_a_tflop(cut) < 2.0 * joules_of_a_tflop(whole)


def test_rows_that_pad_a_tile_of_an_expert_draw_as_others_do() -> None:
    def core_w(rows: int) -> float:
        op = make_op("fused_moe", tokens=8 * rows, hidden=4096, inter=2048, experts=8, topk=1)
        columns = {name: np.array([value]) for name, value in zip(KINDS["fused_moe"].names, op.dims, strict=True)}
        return float(power.activity(OpColumns("fused_moe", columns, "bf16", "bf16"), H200, LONG).core[0])

    assert 0.9 < core_w(16) / core_w(1) < 1.6, "sixteen times the FLOPs, but the same tiles"
    assert core_w(64) > 2 * core_w(16)


def test_softmax_costs_what_narrow_formats_do_not_save() -> None:
    """At one rate of FLOPs, heads of 64 score twice the pairs that heads of 128 do."""

    def pairs(head_dim: int) -> float:
        heads = {"heads_q": 8, "heads_kv": 8, "head_dim": head_dim, "v_head_dim": head_dim}
        dims: dict[str, Any] = {"seq_q": 2048, "seq_kv": 2048, "causal": 0, **heads}
        op = make_op("attention_prefill", **dims)
        columns = {name: np.array([value]) for name, value in zip(KINDS[op.kind].names, op.dims, strict=True)}
        busy = power.activity(
            OpColumns(op.kind, columns, "fp8", "bf16"), H200, op.cost.flops / 500.0 * np.full(1, 1e-6)
        )
        return float(np.asarray(busy.pairs)[0])

    assert pairs(64) == pytest.approx(2.0 * pairs(128))
    assert pairs(128) == pytest.approx(500.0e6 / (4.0 * 128.0))

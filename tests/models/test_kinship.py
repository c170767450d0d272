"""Kin of a device: how near, whose voice counts how much, and what their answers are worth."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import known_devices, load_device
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.analytical.setting import shares_slots
from opcast.models.donors import BACKWARD, EXPERTS
from opcast.models.features import Frame, frame
from opcast.models.kinship import (
    TIERS,
    Kin,
    clock_share,
    errors,
    generation,
    memory_bound,
    recast_share,
    tier,
    uncut,
    voices,
)
from opcast.models.predictor import Predictor
from opcast.models.registry import Registry
from opcast.tests.benchmarks.donors import SHARES, Told, best_share, shared
from opcast.tests.benchmarks.lanes import answered

SHIPPED = Registry(Path(__file__).resolve().parents[2] / "models" / "shipped")
OPS = {
    "batch": np.ones(4, dtype=np.int64),
    "m": np.array([1, 64, 4096, 8192]),
    "n": np.array([4096, 4096, 4096, 14336]),
    "k": np.array([4096, 4096, 4096, 4096]),
    "layout": np.ones(4, dtype=np.int64),
}


def product(device: str) -> Predictor:
    found = SHIPPED.find("gemm", device, SHIPPED.learned("gemm", device, "vllm", "bf16"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("device", "other", "found"),
    [
        ("h800_sxm", "h100_sxm", "die"),
        ("gb200", "b200_sxm", "die"),
        ("gb300", "b200_sxm", "generation"),
        ("l4", "l40s", "generation"),
        ("h20_sxm", "h100_sxm", "die"),  # with a quarter of its matrix units
        ("rtx_pro_6000_server", "b200_sxm", "vendor"),  # Blackwell by name, other units
        ("a100_sxm_80gb", "l40s", "vendor"),
        ("mi300x", "h100_sxm", None),
        ("h100_sxm", "h100_sxm", None),
    ],
)
def test_how_near_follows_from_the_die_the_units_and_the_compute_capability(
    device: str, other: str, found: str | None
) -> None:
    assert tier(load_device(device), load_device(other), "bf16") == found


def test_every_device_says_its_die_and_those_of_one_die_are_of_one_generation() -> None:
    dies: dict[str, set[tuple[str, int]]] = {}
    for device in map(load_device, known_devices()):
        assert device.die
        assert (device.sm > 0) == (device.vendor == "nvidia")
        dies.setdefault(device.die, set()).add(generation(device))
    assert all(len(found) == 1 for found in dies.values())


def test_the_nearest_alone_are_heard() -> None:
    known = [load_device(name) for name in ("h100_sxm", "h200_sxm", "b200_sxm", "l40s")]
    assert voices(load_device("h800_sxm"), known, "bf16") == ("die", {"h100_sxm": 0.5, "h200_sxm": 0.5})


def test_a_generation_is_one_voice_and_nearer_units_are_louder() -> None:
    known = [load_device(name) for name in ("h100_sxm", "h200_sxm", "l40s", "b200_sxm", "gb200", "b300_sxm")]
    level, heard = voices(load_device("a100_sxm_80gb"), known, "bf16")
    assert level == "vendor"
    assert sum(heard.values()) == pytest.approx(1.0)
    assert heard["h100_sxm"] + heard["h200_sxm"] == pytest.approx(heard["l40s"], rel=2e-2)  # an octave each way
    assert heard["l40s"] == pytest.approx(heard["b200_sxm"] * 3 * math.exp(2.0), rel=2e-2)  # two octaves, three devices


def test_a_device_with_the_figures_of_one_kin_gets_its_answer() -> None:
    kin = Kin("die", [product("h100_sxm")], [1.0], "bf16", errors()["gemm"]["die"])
    found = kin.predict(OPS, "bf16", "bf16", load_device("h800_sxm"))
    assert np.array_equal(found.latency_us, product("h100_sxm").predict(OPS, "bf16").latency_us)


def test_no_answer_is_below_the_roofline_of_the_device_asked_about() -> None:
    kin = Kin("generation", [product("h100_sxm")], [1.0], "bf16", errors()["gemm"]["generation"])
    h20, asked = load_device("h20_sxm"), OpColumns("gemm", OPS, "bf16", "bf16")
    ops = frame(asked, h20)
    laws = kin.laws(ops, asked)
    assert not (memory_bound(asked, h20) & memory_bound(asked, load_device("h100_sxm"))).any()
    found = kin.correction(ops, laws, asked, h20)
    least = np.log(ops.roofline_us / ops.analytical_us)
    assert np.array_equal(found, np.maximum(product("h100_sxm").correction.predict(ops.matrix), least))
    assert np.array_equal(kin.seen(laws), np.ones(len(ops.analytical_us)))  # timed without the host
    slow = Frame(ops.matrix, ops.analytical_us, 2.0 * ops.analytical_us)
    assert np.allclose(kin.correction(slow, laws, asked, h20), np.log(2.0))


# Products that others timed on chips with cut units: InferSim (alibaba/InferSim, bench_data/gemm/h20) and LLMServingSim
# (casys-kaist/LLMServingSim, profiler/perf/RTX4090). With a sibling's share of the peak they took 66 % longer.
MEASURED = (
    ("h20_sxm", "fp8_block", "h100_sxm", (4096, 6144, 2048), 384.0),
    ("rtx_4090", "bf16", "l40s", (2048, 28672, 4096), 2900.0),
)


@pytest.mark.parametrize(("device", "dtype", "sibling", "size", "measured_us"), MEASURED)
def test_units_that_are_cut_reach_more_of_their_peak_than_whole_ones(
    device: str, dtype: str, sibling: str, size: tuple[int, int, int], measured_us: float
) -> None:
    target, other = load_device(device), load_device(sibling)
    assert uncut(other) is other
    assert uncut(target).tensor_rate(dtype) >= 2.0 * target.tensor_rate(dtype)
    backend = SHIPPED.learned("gemm", sibling, None, dtype, SHIPPED.preferences())
    assert backend is not None
    known = SHIPPED.find("gemm", sibling, backend)
    assert known is not None
    columns = {"batch": [1], **dict(zip("mnk", ([each] for each in size), strict=True)), "layout": [1]}
    kin = Kin("die", [known], [1.0], dtype, errors()["gemm"]["die"])
    found = kin.predict({name: np.array(each) for name, each in columns.items()}, dtype, "bf16", target)
    assert found.latency_us[0] == pytest.approx(measured_us, rel=0.1)
    assert found.low_us[0] < measured_us < found.high_us[0]


def test_more_watts_for_each_flop_leave_more_of_the_clock() -> None:
    """MI308X has the die and most of the power of MI300X with a quarter of its units."""
    shares = {name: clock_share(load_device(name), "fp8_block") for name in ("mi300x", "mi308x", "mi350x", "mi355x")}
    assert shares["mi308x"] == 1.0
    assert shares["mi300x"] == pytest.approx(0.78, abs=0.02)
    assert shares["mi350x"] / shares["mi355x"] == pytest.approx(math.sqrt(1000 / 1400 * 2400 / 2200), rel=0.01)
    assert clock_share(load_device("h100_sxm"), "bf16") == 1.0  # the law of clocks knows


def test_where_memory_bounds_a_product_fewer_flops_change_nothing() -> None:
    l40s, rtx_4090 = load_device("l40s"), load_device("rtx_4090")
    assert rtx_4090.tensor_rate("fp16") < 0.6 * l40s.tensor_rate("fp16")
    kin = Kin("die", [product("l40s")], [1.0], "bf16", errors()["gemm"]["vendor"])
    thin = {"batch": [1, 1], "m": [1, 1], "n": [28672, 8192], "k": [4096, 28672], "layout": [1, 1]}
    columns = {name: np.array(values) for name, values in thin.items()}
    found = kin.predict(columns, "bf16", "bf16", rtx_4090, "cold").latency_us
    own = product("l40s").predict(columns, "bf16", cache="cold").latency_us
    assert found / own == pytest.approx(np.full(2, l40s.memory_gbps / rtx_4090.memory_gbps), rel=0.05)


def test_what_the_host_hid_from_training_counts_as_far_as_physics_reaches() -> None:
    found = SHIPPED.find("gemm", "a100_pcie_40gb", SHIPPED.learned("gemm", "a100_pcie_40gb", "torch", "fp32"))
    assert found is not None
    assert found.hidden_us > 40.0  # eager calls took 53 us, however small
    small, large = ({"batch": 1, "m": m, "n": 768, "k": 768, "layout": 1} for m in (32, 32768))
    for op, most in ((small, 30.0), (large, np.inf)):
        columns = {name: np.array([value]) for name, value in op.items()}
        ops = frame(OpColumns("gemm", columns, "fp32", "fp32"), found.device)
        made = found.predict(columns, "fp32")
        latency = float(made.latency_us[0])
        share = min(float(ops.analytical_us[0]) / found.hidden_us, 1.0)
        learned = float(found.correction.predict(ops.matrix)[0])
        assert latency == pytest.approx(float(ops.analytical_us[0]) * np.exp(share * learned))
        assert latency < most
        assert np.log(made.high_us / made.latency_us)[0] >= (1.0 - share) * np.log(3.0)  # the rest is physics alone


def test_a_format_nobody_learned_has_the_shortfall_of_one_on_the_same_units() -> None:
    found = SHIPPED.find("gemm", "b200_sxm", SHIPPED.learned("gemm", "b200_sxm", "vllm", "fp8"))
    assert found is not None
    gb200 = load_device("gb200")
    kin = Kin("die", [found], [1.0], "fp8", errors()["gemm"]["die"])
    shortfall = kin.predict(OPS, "mxfp8", "bf16", gb200).latency_us / kin.predict(OPS, "fp8", "bf16", gb200).latency_us
    physics = [analytical.latency_us(OpColumns("gemm", OPS, name, "bf16"), gb200) for name in ("mxfp8", "fp8")]
    assert shortfall == pytest.approx(physics[0] / physics[1])


def test_many_ops_are_answered_as_each_alone() -> None:
    many = {name: np.tile(values, 5_000) for name, values in OPS.items()}
    kin = Kin("die", [product("h100_sxm"), product("h200_sxm")], [0.5, 0.5], "bf16", errors()["gemm"]["die"])
    device = load_device("h800_sxm")
    few, found = (kin.predict(columns, "bf16", "bf16", device) for columns in (OPS, many))
    assert np.array_equal(found.latency_us, np.tile(few.latency_us, 5_000))
    assert np.array_equal(found.high_us, np.tile(few.high_us, 5_000))


def test_what_was_missed_grows_with_distance_and_far_collectives_are_left_to_physics() -> None:
    found = errors()
    for kind in ("gemm", "attention_prefill", "attention_decode", "fused_moe"):
        widths = [float(np.median(found[kind][level].half_width)) for level in TIERS if level in found[kind]]
        assert widths[0] < 0.3
        assert widths[-1] > 1.5 * widths[0]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert "die" in found[kind]
        assert "vendor" not in found[kind]


def test_how_much_of_a_donors_shortfall_carries_over_is_in_the_file() -> None:
    assert 0.0 < recast_share("attention_backward", BACKWARD) < 1.0
    assert recast_share("grouped_gemm", EXPERTS) == 1.0


def test_the_part_that_carries_over_is_found_on_other_heads() -> None:
    """Half of the shortfall for heads of 64, all of it for those of 128: each is told by the other."""
    known = [
        Told("attention_backward", "attention_prefill", f"{heads} {place}", missed[-1], np.zeros(1), heads, missed)
        for heads, part in (("64", 0.5), ("128", 1.0))
        for place in range(3)
        for missed in [(part - np.array(SHARES))[:, None]]
    ]
    assert best_share(known[:3]) == 0.5
    found = shared(known)
    assert {each.group: each.share for each in found} == {"64": 1.0, "128": 0.5}
    assert all(abs(float(each.recast[0])) == 0.5 for each in found)


@pytest.mark.parametrize(
    ("name", "shared"),
    [("h100_sxm", True), ("l4", True), ("a40", True), ("a100_sxm_80gb", False), ("p4", False), ("b200_sxm", False),
     ("mi300x", False)],
)  # fmt: skip
def test_loads_take_slots_of_products_where_a_scheduler_has_32_lanes_and_one_instruction(
    name: str, shared: bool
) -> None:
    assert shares_slots(load_device(name)) == shared


@pytest.mark.parametrize(
    ("name", "rate"), [("h100_sxm", 51.8), ("h200_sxm", 51.3), ("l40s", 46.9), ("rtx_a6000", 23.9), ("b200_sxm", 66.2)]
)
def test_products_in_fp32_run_as_fast_as_others_measured(name: str, rate: float) -> None:
    assert answered(load_device(name), 8192)[0] == pytest.approx(rate, rel=0.1)


def test_lanes_are_alike_in_fp32_whatever_matrix_units_do() -> None:
    known = [load_device(name) for name in ("a100_pcie_40gb", "v100_pcie", "t4")]
    heard = voices(load_device("h100_sxm"), known, "fp32")[1]
    assert heard == pytest.approx(dict.fromkeys(heard, 1 / 3))

"""Physics that every law obeys, whatever the op and the device."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.devices import Device, DeviceError, load_device, overridden
from opcast.datasets.ops import KINDS, OpError, bus_factor, make_op
from opcast.datasets.store import Store
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.analytical.setting import SUSTAINED_MEMORY

CACHES = st.sampled_from(["cold", "warm"])
GROWING = {
    "gemm": ("batch", "m", "n", "k"),
    "attention_prefill": ("batch", "head_dim"),
    "attention_decode": ("batch", "seq_kv", "head_dim"),
    "rms_norm": ("rows", "cols"),
    "elementwise": ("numel", "inputs"),
    "adamw": ("numel", "tensors"),
    "copy": ("size_bytes",),
    "all_reduce": ("size_bytes",),
    "host_overhead": ("calls",),
    "host_pass": ("size_bytes",),
}


@st.composite
def dims(draw: st.DrawFn, kind: str) -> dict[str, int]:
    """One op's dimensions: sizes over four decades, choices among the choices."""
    values = {}
    for dim in KINDS[kind].dims:
        if dim.choices:
            values[dim.name] = draw(st.integers(0, len(dim.choices) - 1))
        elif dim.name in ("imbalance", "window", "run", "run_bytes", "block"):
            values[dim.name] = draw(st.sampled_from([dim.low, dim.low + 64]))
        elif dim.name == "joins":
            values[dim.name] = draw(st.integers(0, 2))
        else:
            power = draw(st.integers(0, 13 if dim.name not in ("batch", "heads_q", "heads", "experts") else 6))
            values[dim.name] = max(dim.low, 2**power + draw(st.integers(0, 3)))
    if "heads_kv" in values:
        values["heads_kv"] = min(values["heads_kv"], values["heads_q"])
    return values


def latency(kind: str, values: dict[str, int], device: Device, cache: str, dtype: str = "bf16") -> float:
    columns = {name: np.array([value]) for name, value in values.items()}
    return float(analytical.latency_us(OpColumns(kind, columns, dtype, None, cache), device)[0])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_latency_is_finite_and_never_below_the_roofline(kind: str, device: Device, data: st.DataObject) -> None:
    values, cache = data.draw(dims(kind)), data.draw(CACHES)
    columns = {name: np.array([value]) for name, value in values.items()}
    floor = analytical.roofline_us(OpColumns(kind, columns, "bf16", None, cache), device)[0]
    answer = latency(kind, values, device, cache)
    assert np.isfinite(answer)
    assert answer >= floor >= 0.0
    assert answer > 0.0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_better_device_is_never_slower(kind: str, device: Device, data: st.DataObject) -> None:
    values, cache = data.draw(dims(kind)), data.draw(CACHES)
    names = ["memory_gbps", "l2_gbps", "l2_mib", "vector_tflops", "tensor_tflops", "link_gbps", "pcie_gbps"]
    figure, factor = data.draw(st.sampled_from(names)), data.draw(st.floats(1.0, 4.0))
    now = getattr(device, figure)
    better = {name: rate * factor for name, rate in now.items()} if figure == "tensor_tflops" else now * factor
    improved = dataclasses.replace(device, **{figure: better})
    assert latency(kind, values, improved, cache) <= latency(kind, values, device, cache) * (1 + 1e-9), figure


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_more_compute_units_of_the_same_kind_are_never_slower(kind: str, device: Device, data: st.DataObject) -> None:
    values, cache = data.draw(dims(kind)), data.draw(CACHES)
    more = device.compute_units + data.draw(st.integers(1, 100))
    share = more / device.compute_units
    larger = dataclasses.replace(
        device,
        compute_units=more,
        tensor_tflops={name: rate * share for name, rate in device.tensor_tflops.items()},
        vector_tflops=device.vector_tflops * share,
        l2_gbps=device.l2_gbps * share,
    )
    assert latency(kind, values, larger, cache) <= latency(kind, values, device, cache) * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_fewer_units_or_a_lower_clock_are_never_faster(kind: str, device: Device, data: st.DataObject) -> None:
    values, cache = data.draw(dims(kind)), data.draw(CACHES)
    lower = {
        "compute_units": data.draw(st.integers(1, device.compute_units)),
        "clock_mhz": device.clock_mhz * data.draw(st.floats(0.1, 1.0)),
    }
    lower = {name: lower[name] for name in data.draw(st.sampled_from([tuple(lower), *((name,) for name in lower)]))}
    made = overridden(device, lower)
    assert latency(kind, values, made, cache) >= latency(kind, values, device, cache) * (1 - 1e-9), lower


@pytest.mark.parametrize("kind", GROWING)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_larger_op_is_never_faster(kind: str, device: Device, data: st.DataObject) -> None:
    values, cache = data.draw(dims(kind)), data.draw(CACHES)
    name = data.draw(st.sampled_from(GROWING[kind]))
    larger = values | {name: values[name] + data.draw(st.integers(1, 500))}
    assert latency(kind, larger, device, cache) >= latency(kind, values, device, cache) * (1 - 1e-9), name


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_columns_answer_as_single_ops_do(gpu: Device, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(KINDS)))
    several = [data.draw(dims(kind)) for _ in range(3)]
    columns = {name: np.array([values[name] for values in several]) for name in KINDS[kind].names}
    together = analytical.latency_us(OpColumns(kind, columns, "bf16", None, "cold"), gpu)
    assert together.tolist() == pytest.approx([latency(kind, values, gpu, "cold") for values in several], rel=1e-12)


def test_chunks_join_without_a_seam(gpu: Device) -> None:
    count = analytical.CHUNK + 7
    columns = {"rows": np.arange(1, count + 1), "cols": np.full(count, 4096)}
    whole = analytical.latency_us(OpColumns("rms_norm", columns, "bf16", None), gpu)
    tail = {name: values[-7:] for name, values in columns.items()}
    assert whole.shape == (count,)
    assert whole[-7:].tolist() == analytical.latency_us(OpColumns("rms_norm", tail, "bf16", None), gpu).tolist()


@pytest.mark.parametrize(("m", "bound_by"), [(8192, "compute"), (1, "memory")])
def test_the_roofline_is_the_larger_of_arithmetic_and_memory(gpu: Device, m: int, bound_by: str) -> None:
    n = k = 4096
    compute_us = 2.0 * m * n * k / (gpu.tensor_rate("bf16") * 1e6)
    memory_us = 2.0 * (m * k + k * n + m * n) / (gpu.memory_gbps * 1e3)
    assert (compute_us > memory_us) == (bound_by == "compute")
    op = make_op("gemm", m=m, n=n, k=k, dtype="bf16")
    columns = {name: np.array([value]) for name, value in zip(KINDS["gemm"].names, op.dims, strict=True)}
    found = analytical.roofline_us(OpColumns("gemm", columns, "bf16", None, "cold"), gpu)[0]
    assert found == pytest.approx(max(compute_us, memory_us))


def test_warm_inputs_are_faster_only_as_far_as_they_fit(gpu: Device) -> None:
    small, large = {"rows": 1024, "cols": 4096}, {"rows": 65536, "cols": 16384}
    assert latency("rms_norm", small, gpu, "warm") < latency("rms_norm", small, gpu, "cold")
    assert latency("rms_norm", large, gpu, "warm") == latency("rms_norm", large, gpu, "cold")


def test_known_gemms_of_an_h100_come_out_about_right(gpu: Device) -> None:
    # cuBLAS bf16, published for this gpu: about 700 TFLOP/s at 8192^3, and weights read at about 3 TB/s for a token
    square = {"batch": 1, "m": 8192, "n": 8192, "k": 8192, "layout": 1}
    assert 600 < 2 * 8192**3 / latency("gemm", square, gpu, "cold") / 1e6 < 820
    token = {"batch": 1, "m": 1, "n": 28672, "k": 8192, "layout": 1}
    assert 2.6 < 2 * 28672 * 8192 / latency("gemm", token, gpu, "cold") / 1e6 < 3.3


@pytest.mark.parametrize(
    ("name", "teraflops"),  # NeuSight's operator tables: large products in fp32 without TF32, upper quartile
    [
        ("t4", 4.1),
        ("l4", 9.4),
        ("a100_pcie_40gb", 16.2),
        ("a100_pcie_80gb", 18.0),
        ("v100_pcie", 13.7),
        ("mi210", 30.1),
    ],
)
def test_fp32_products_run_at_the_clock_that_the_power_limit_leaves(name: str, teraflops: float) -> None:
    device = load_device(name)
    product = {"batch": 1, "m": 8192, "n": 8192, "k": 8192, "layout": 1}
    reached = 2 * 8192**3 / latency("gemm", product, device, "warm", "fp32") / 1e6
    assert reached == pytest.approx(teraflops, rel=0.22)
    unlimited = dataclasses.replace(device, tdp_w=1000.0)
    assert latency("gemm", product, unlimited, "warm", "fp32") <= latency("gemm", product, device, "warm", "fp32")
    if device.supports("fp16"):
        assert latency("gemm", product, unlimited, "warm", "fp16") == latency("gemm", product, device, "warm", "fp16")


@pytest.mark.parametrize(
    ("device", "kind", "dims", "published_us"),
    [  # vLLM's pull request 27299 (Triton's kernels of Mamba-2), TensorRT-LLM's tables in aiconfigurator
        ("h100_sxm", "linear_attention_prefill", {"heads": 128, "groups": 1, "state_dim": 128, "seq": 16384}, 1268),
        ("h100_sxm", "linear_attention_prefill", {"heads": 128, "groups": 1, "state_dim": 128, "seq": 65536}, 5921),
        ("gb300", "causal_conv1d", {"rows": 32768, "cols": 6144}, 205),
        ("b200_sxm", "causal_conv1d", {"rows": 32768, "cols": 6144}, 220),
        ("h100_sxm", "causal_conv1d", {"rows": 32768, "cols": 6144}, 328),
    ],
)
def test_kernels_of_scans_move_what_their_units_can(
    device: str, kind: str, dims: dict[str, int], published_us: float
) -> None:
    given = {"batch": 1, "head_dim": 64, "chunk": 128, "rule": 0, "width": 4, "update": 0} | dims
    columns = {name: np.array([given[name]]) for name in KINDS[kind].names}
    latency = analytical.latency_us(OpColumns(kind, columns, "bf16", None), load_device(device))
    assert latency[0] == pytest.approx(published_us, rel=0.25)


# Whole routers in torch on H100, 16,384 tokens (FlashML-org/FreeToken, pull request 319), nearly all torch.topk
@pytest.mark.parametrize(("experts", "published_us"), [(128, 137), (256, 254), (288, 293), (512, 458)])
def test_selections_by_torch_take_their_clocks(experts: int, published_us: float) -> None:
    device = load_device("h100_sxm")
    dims = {"tokens": 16384, "experts": experts, "topk": 8, "kernels": 1}
    columns = {name: np.array([value]) for name, value in dims.items()}
    chosen = analytical.latency_us(OpColumns("moe_route", columns, "fp32", None), device)
    own = analytical.latency_us(OpColumns("moe_route", columns | {"kernels": np.array([0])}, "fp32", None), device)
    assert chosen[0] == pytest.approx(published_us, rel=0.25)
    assert own[0] < chosen[0]


def test_units_that_share_one_memory_are_fed() -> None:
    """A TPU has four large units: each draws its share of the memory on the chip, and holds large blocks."""
    square = {"batch": 1, "m": 8192, "n": 8192, "k": 8192, "layout": 1}
    least_us = 2 * 8192**3 / 918e6
    assert least_us < latency("gemm", square, load_device("tpu_v6e"), "cold") < 1.4 * least_us


@pytest.mark.parametrize("gaps", [{"run_bytes": 256}, {"joins": 2}])
def test_a_copy_on_a_tpu_waits_for_memory_and_no_threads(gaps: dict[str, int]) -> None:
    """Clocks of CUDA's threads for an element, over four units, took 30 times as long."""
    size_bytes, tpu = 2**28, load_device("tpu_v6e")
    least_us = 2 * size_bytes / tpu.memory_gbps / 1e3
    dims = {"size_bytes": size_bytes, "direction": 0, "run_bytes": 0, "joins": 0} | gaps
    assert least_us < latency("copy", dims, tpu, "cold") < 1.2 * least_us
    runs = {"numel": 2**27, "inputs": 1, "fn": 0, "run": 4096}
    assert latency("elementwise", runs, tpu, "cold") < 1.2 * least_us


def test_a_last_wave_costs_a_whole_one(gpu: Device) -> None:
    # 132 tiles of 128 x 256 fill an H100 once; one row of tiles more starts another wave, unless K is split
    even = {"batch": 1, "m": 128 * 12, "n": 256 * 11, "k": 512, "layout": 1}
    assert latency("gemm", even | {"m": 128 * 12 + 1}, gpu, "cold") > 1.1 * latency("gemm", even, gpu, "cold")


def test_few_tokens_cost_the_weights_of_the_experts_they_touch(gpu: Device) -> None:
    shape = {"hidden": 7168, "inter": 2048, "topk": 8, "experts": 256, "tp": 1, "ep": 1, "gated": 1, "skew": 0}
    expert_us = 3 * 7168 * 2048 * 2 / (gpu.memory_gbps * 1e3)
    one, many = (latency("fused_moe", shape | {"tokens": tokens}, gpu, "warm") for tokens in (1, 32))
    assert 8 * expert_us < one < 2.5 * 8 * expert_us
    assert 256 * expert_us < many < 1.3 * 256 * expert_us
    assert latency("fused_moe", shape | {"tokens": 32, "skew": 120}, gpu, "warm") < 0.7 * many
    spread = shape | {"tokens": 16384, "ep": 32}
    busiest = latency("fused_moe", spread | {"skew": 120}, gpu, "warm")
    assert busiest > 1.5 * latency("fused_moe", spread, gpu, "warm")


def test_all_reduce_follows_the_bus_bandwidth(gpu: Device) -> None:
    size = 2**30
    values = {"size_bytes": size, "ranks": 8, "ranks_per_node": 8, "link": 0, "norm": 0}
    expected = size * bus_factor("all_reduce", 8) / (gpu.link_gbps * 1e3)
    assert expected < latency("all_reduce", values, gpu, "warm") < 1.4 * expected


def test_a_norm_behind_a_sum_takes_the_residuals_way_through_memory(gpu: Device) -> None:
    values = {"size_bytes": 2**26, "ranks": 8, "ranks_per_node": 8, "link": 0}
    alone, both = (latency("all_reduce", values | {"norm": norm}, gpu, "cold") for norm in (0, 1))
    assert both - alone == pytest.approx(2 * 2**26 / (gpu.memory_gbps * 1e3 * SUSTAINED_MEMORY), rel=1e-6)


def test_bound_names_what_holds_an_op_back(gpu: Device) -> None:
    cases = {
        "compute": ("gemm", {"batch": 1, "m": 8192, "n": 8192, "k": 8192, "layout": 1}),
        "memory": ("rms_norm", {"rows": 65536, "cols": 8192}),
        "latency": ("rms_norm", {"rows": 1, "cols": 128}),
        "network": ("all_reduce", {"size_bytes": 2**30, "ranks": 8, "ranks_per_node": 8, "link": 0, "norm": 0}),
        "host": ("host_overhead", {"what": 1, "calls": 3}),
    }
    for expected, (kind, values) in cases.items():
        columns = {name: np.array([value]) for name, value in values.items()}
        assert analytical.bound(OpColumns(kind, columns, "bf16", None, "cold"), gpu).tolist() == [expected]


def test_bad_questions_are_refused_in_one_line(gpu: Device) -> None:
    columns = {name: np.array([8]) for name in ("batch", "m", "n", "k")} | {"layout": np.array([1])}
    with pytest.raises(DeviceError, match="nvfp4"):
        analytical.latency_us(OpColumns("gemm", columns, "nvfp4", None), gpu)
    with pytest.raises(ValueError, match="cache='hot' is not one of cold, warm"):
        analytical.latency_us(OpColumns("gemm", columns, "bf16", None, "hot"), gpu)
    with pytest.raises(OpError, match="did you mean gemm"):
        analytical.latency_us(OpColumns("gem", columns, "bf16", None), gpu)


def test_every_kind_has_a_law() -> None:
    assert {kind.law for kind in KINDS.values()} == set(analytical.LAWS) - {"elements"}  # elements is for new kinds


def test_half_a_million_gemms_take_well_under_a_second_on_one_core(gpu: Device) -> None:
    count, rng = 500_000, np.random.default_rng(0)
    columns = {name: rng.integers(1, 8192, count) for name in ("m", "n", "k")}
    columns |= {"batch": np.ones(count), "layout": np.ones(count)}
    analytical.latency_us(OpColumns("gemm", {name: values[:10] for name, values in columns.items()}, "bf16", None), gpu)
    began = time.process_time()
    analytical.latency_us(OpColumns("gemm", columns, "bf16", None), gpu)
    assert time.process_time() - began < 1.5


H200_ROWS = Path(__file__).parents[2] / "datasets" / "measured" / "h200" / "store"


@pytest.mark.parametrize("kind", ["elementwise", "copy"])
def test_elements_with_gaps_and_casts_take_as_long_as_measured(kind: str) -> None:
    """Whatever run and format; the law without it is 1.5 to 2.8 times too fast there."""
    rows = Store(H200_ROWS).read(kind).to_pylist()
    device = load_device("h200_sxm")
    one_by_one = {
        "elementwise": lambda r: r["numel"] >= 4e6 and (r["run"] > 0 or (r["fn"] == 3 and r["dtype"] != "fp32")),
        "copy": lambda r: r["size_bytes"] >= 8e6 and r["run_bytes"] > 0,
    }[kind]
    known = [row for row in rows if one_by_one(row)]
    assert len(known) >= 12
    for row in known:
        columns = {name: np.array([row[name]]) for name in KINDS[kind].names}
        law = analytical.latency_us(OpColumns(kind, columns, row["dtype"], row["out_dtype"], row["cache"]), device)[0]
        assert 0.7 < law / row["latency_us"] < 1.5, row


def test_contiguous_elements_of_one_format_and_fp32_to_16_bits_are_bound_by_memory(gpu: Device) -> None:
    def us(dtype: str, out_dtype: str, run: int = 0) -> float:
        values = {"numel": 2**26, "inputs": 1, "fn": 3, "run": run}
        columns = {name: np.array([value]) for name, value in values.items()}
        return float(analytical.latency_us(OpColumns("elementwise", columns, dtype, out_dtype, "cold"), gpu)[0])

    plain = us("bf16", "bf16")
    assert us("fp32", "bf16") == us("fp32", "fp16") == pytest.approx(1.5 * plain, rel=0.1)
    assert us("bf16", "fp32") > us("fp32", "bf16")
    assert us("bf16", "bf16", run=2**20) == us("bf16", "bf16", run=128) > plain


def test_a_cpu_takes_no_clocks_for_gaps() -> None:
    cpu = dataclasses.replace(load_device("h100_sxm"), vendor="cpu", architecture="cpu")
    assert cpu.synchronous
    columns = {name: np.array([value]) for name, value in {"numel": 2**24, "inputs": 1, "fn": 0, "run": 4096}.items()}
    whole = columns | {"run": np.array([0])}
    one, other = (
        analytical.latency_us(OpColumns("elementwise", each, "fp32", None), cpu)[0] for each in (columns, whole)
    )
    assert one == other

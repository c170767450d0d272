"""Kinds that nobody timed are answered as another that somebody did, on the same device or its kin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.ops import KINDS, Op, make_op
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.donors import DONORS, able
from opcast.models.kinship import Kin
from opcast.models.registry import Registry
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.transfer import TransferEngine

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "shipped"
TRAINING = {
    "attention_backward": make_op(
        "attention_backward", heads_q=32, heads_kv=8, head_dim=128, v_head_dim=128, seq_q=8192, seq_kv=8192
    ),
    "grouped_gemm": make_op("grouped_gemm", experts=16, tokens=16384, n=5760, k=2880),
    "gelu_backward": make_op("gelu_backward", rows=16384, cols=16384),
    "silu_mul_backward": make_op("silu_mul_backward", rows=16384, cols=14336),
    "adamw": make_op("adamw", numel=2**28, dtype="bf16", out_dtype="fp32"),
    "elementwise": make_op("elementwise", numel=2**27, inputs=2),
    "moe_permute": make_op("moe_permute", tokens=16384, hidden=4096, topk=8),
    "copy": make_op("copy", size_bytes=2**30),
    "layer_norm_backward": make_op("layer_norm_backward", rows=16384, cols=8192),
}


def kin(device: str, op: Op) -> Kin:
    found = TransferEngine(load_device(device), [Registry(SHIPPED)]).kin(op.kind, op.dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["h100_sxm", "a100_sxm_80gb", "gb300", "h800_sxm", "l4"])
def test_what_training_runs_is_answered_on_every_gpu_and_names_its_donors(device: str) -> None:
    found = ask(build_engine(load_device(device), [], [SHIPPED]), list(TRAINING.values()))
    assert set(found.engine) <= {"learned", "transfer"}
    assert all("@" in each for each in found.predictor)
    assert np.all((found.low_us < found.latency_us) & (found.latency_us < found.high_us))
    assert np.all(found.high_us < 5.0 * found.latency_us)


def test_the_device_itself_goes_before_its_kin() -> None:
    assert kin("h100_sxm", TRAINING["grouped_gemm"]).tier == "own"
    assert kin("h800_sxm", TRAINING["grouped_gemm"]).tier == "die"
    assert "moe_torch_flow" in kin("h100_sxm", TRAINING["grouped_gemm"]).name  # CUTLASS's product, not an engine's own


def test_a_published_backward_pass_is_nearer_than_physics_says() -> None:
    """FlashAttention-3's own rates on H100, heads of 128 (arXiv 2407.08608, fig. 6): 316 to 561 TFLOP/s."""
    told = {512: 316, 1024: 424, 2048: 501, 4096: 542, 8192: 559, 16384: 561}
    heads = {"heads_q": 16, "heads_kv": 16, "head_dim": 128, "v_head_dim": 128, "causal": "no"}
    ops = [make_op("attention_backward", batch=16384 // n, seq_q=n, seq_kv=n, **heads) for n in told]
    flops = np.array([2.5 * 4 * 16384 * n * 16 * 128 for n in told])
    device = load_device("h100_sxm")
    found = ask(build_engine(device, [], [SHIPPED]), ops).latency_us
    columns = {name: np.array([op.dims[at] for op in ops]) for at, name in enumerate(KINDS["attention_backward"].names)}
    law = analytical.latency_us(OpColumns("attention_backward", columns, "bf16", "bf16"), device)
    rates = np.array(list(told.values()))
    miss, physics = (np.abs(np.log(flops / each / 1e6 / rates)) for each in (found, law))
    assert np.median(miss) < 0.5 * np.median(physics)
    assert miss.max() < 0.12


def test_a_published_grouped_product_is_nearer_than_physics_says() -> None:
    """torch._grouped_mm on H100: 524 and 545 TFLOP/s (pytorch/ao pull request 2490)."""
    ops = [make_op("grouped_gemm", experts=16, tokens=8192, n=n, k=k) for n, k in ((8192, 5120), (5120, 8192))]
    found, physics = (
        ask(build_engine(load_device("h100_sxm"), [], [SHIPPED], order=order), ops).latency_us
        for order in (["transfer"], ["analytical"])
    )
    told = 2 * 8192 * 8192 * 5120 / np.array([524, 545]) / 1e6
    assert np.all(np.abs(np.log(found / told)) < np.abs(np.log(physics / told)))


def test_no_answer_is_below_the_roofline() -> None:
    for device in ("h100_sxm", "gb300"):
        target = load_device(device)
        for op in TRAINING.values():
            columns = {name: np.array([size]) for name, size in zip(KINDS[op.kind].names, op.dims, strict=True)}
            least = analytical.roofline_us(OpColumns(op.kind, columns, op.dtype, op.out_dtype), target)
            assert ask(build_engine(target, [], [SHIPPED]), [op]).latency_us[0] >= 0.999 * least[0]


@pytest.mark.parametrize("device", ["h100_sxm", "l40s", "h800_sxm"])
def test_what_one_lab_says_of_one_chip_is_no_surer_than_a_table(device: str) -> None:
    """How attention's backward pass follows the forward pass rests on one paper."""
    heads: dict[str, int] = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128}
    for tokens in (128, 8192):
        ops = [
            make_op(f"attention_{part}", batch=1, seq_q=tokens, seq_kv=tokens, **heads)
            for part in ("prefill", "backward")
        ]
        found = ask(build_engine(load_device(device), [], [SHIPPED]), ops)
        forward, backward = found.high_us / found.latency_us
        assert backward > 0.99 * min(forward, 1.25)


def test_copies_over_a_bus_are_nobodys() -> None:
    assert able("copy", {"size_bytes": np.ones(2), "direction": np.array([0, 1])}).tolist() == [True, False]


def test_an_op_as_another_kind_has_all_its_dims() -> None:
    for kind, donors in DONORS.items():
        op = TRAINING.get(kind) or make_op(kind, **{dim.name: dim.default or 64 for dim in KINDS[kind].dims})
        columns = {name: np.array([size]) for name, size in zip(KINDS[kind].names, op.dims, strict=True)}
        for donor in donors:
            made = donor.recast(OpColumns(kind, columns, op.dtype, op.out_dtype), "bf16")
            assert set(made) == set(KINDS[donor.kind].names)
            for dim in KINDS[donor.kind].dims:
                assert made[dim.name][0] >= dim.low

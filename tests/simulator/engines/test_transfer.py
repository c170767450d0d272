"""The transfer engine: who is asked, who declines, and that the answer names its donors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.datasets.vocabulary import OpColumns
from opcast.models import analytical
from opcast.models.registry import Registry
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.backends import known_backends
from opcast.simulator.engines.transfer import TransferEngine
from opcast.simulator.question.stack import load_stack

SHIPPED = Path(__file__).resolve().parents[3] / "models" / "shipped"
PRODUCT = make_op("gemm", m=4096, n=4096, k=4096, dtype="bf16")
SUM = make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, dtype="bf16")


def engine(device: str) -> TransferEngine:
    return TransferEngine(load_device(device), [Registry(SHIPPED)])


def test_an_answer_names_its_donors_and_their_backend() -> None:
    found = ask(build_engine(load_device("h800_sxm"), [], [SHIPPED]), [PRODUCT, SUM])
    assert list(found.engine) == ["transfer", "transfer"]
    assert [part.split("@")[1] for part in found.predictor[0].split(" + ")] == [
        "vllm-0.24.0:torch.nn.functional.linear/h100_sxm",
        "vllm-0.24.0:torch.nn.functional.linear/h200_sxm",
    ]
    assert np.all((found.low_us < found.latency_us) & (found.latency_us < found.high_us))


def test_a_device_with_a_predictor_is_answered_by_it() -> None:
    found = ask(build_engine(load_device("h100_sxm"), [], [SHIPPED]), [PRODUCT, SUM])
    assert list(found.engine) == ["learned", "learned"]


HEADS = {"heads_q": 32, "heads_kv": 8, "head_dim": 128, "v_head_dim": 128}
TOKEN = make_op("attention_decode", **HEADS, seq_q=1, seq_kv=4096, dtype="bf16")


@pytest.mark.parametrize(
    ("device", "op"),
    [
        ("h800_sxm", make_op("embedding", tokens=2**12, vocab=2**15, hidden=2**12, dtype="bf16")),  # and nothing alike
        ("h800_sxm", make_op("copy", size_bytes=2**30, direction="h2d")),  # over a bus
        ("mi300x", TOKEN),  # nobody of its vendor knows the kind
        ("v100_sxm", make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, dtype="fp16")),  # too far
    ],
)
def test_what_no_kin_knows_is_left_to_physics(device: str, op) -> None:  # type: ignore[no-untyped-def]
    assert np.isnan(ask(engine(device), [op]).latency_us).all()
    usual = "network" if op.kind == "all_reduce" else "analytical"
    assert ask(build_engine(load_device(device), [], [SHIPPED]), [op]).engine[0] == usual


def test_in_a_cluster_the_network_knows_the_links_better() -> None:
    cluster = load_cluster("dgx_h100")
    found = ask(build_engine(load_device("h800_sxm"), [], [SHIPPED], cluster=cluster), [SUM, PRODUCT])
    assert list(found.engine) == ["network", "transfer"]


@pytest.mark.parametrize(("device", "cluster"), [("h800_sxm", "hgx_h800"), ("mi300x", "mi300x_8")])
def test_beyond_what_kin_measured_a_collective_has_one_answer(device: str, cluster: str) -> None:
    """An all-reduce of 1 GiB on H800 took 12.6 ms without a cluster, 8.8 with it, and 4.7 for half of it, before."""
    op, pair, far = (
        make_op("all_reduce", size_bytes=2**30, ranks=ranks, ranks_per_node=8, dtype="bf16") for ranks in (8, 2, 16)
    )
    alone, inside = (
        ask(build_engine(load_device(device), [], [SHIPPED], cluster=where), [op, pair])
        for where in (None, load_cluster(cluster))
    )
    assert list(alone.engine) == ["network"] * 2
    assert alone.latency_us == pytest.approx(inside.latency_us)
    assert ask(build_engine(load_device(device), [], [SHIPPED]), [far]).engine[0] == "analytical"  # leaves the node


def test_a_format_without_predictors_is_answered_by_one_on_the_same_units() -> None:
    kin = engine("gb200").kin("gemm", "mxfp8")
    assert kin is not None
    assert (kin.dtype, kin.tier) == ("fp8", "die")


def test_nor_is_it_as_sure_as_in_the_format_that_was_learned() -> None:
    """On the device itself another format is outside the data. On its kin it cannot be nearer."""
    unlike = replace(load_device("l40s"), id="nobody_s", name="a card that nobody measured")
    engine = TransferEngine(unlike, [Registry(SHIPPED)], backend="vllm")
    for m, n, k in ((8192, 7168, 2048), (64, 7168, 2048)):
        blocks, whole = (make_op("gemm", dtype, "bf16", m=m, n=n, k=k) for dtype in ("fp8_block", "fp8"))
        other, own = ask(engine, [blocks]), ask(engine, [whole])
        assert "l40s" in other.predictor[0]
        assert own.in_envelope[0]
        assert not other.in_envelope[0]
        assert np.log(other.high_us / other.latency_us)[0] > 2 * np.log(own.high_us / own.latency_us)[0]


def test_nor_is_it_below_the_roofline_of_the_format_asked_about() -> None:
    """TF32 by what fp32 says: 93 TFLOP/s on a card of 83, before."""
    card, columns = load_device("rtx_4090"), {"batch": [1], "m": [4096], "n": [1024], "k": [32768], "layout": [1]}
    least = analytical.roofline_us(
        OpColumns("gemm", {k: np.array(v) for k, v in columns.items()}, "tf32", "tf32"), card
    )
    found = ask(engine("rtx_4090"), [make_op("gemm", m=4096, n=1024, k=32768, dtype="tf32")])
    assert found.latency_us[0] >= 0.999 * least[0]


@pytest.mark.parametrize("kind", ["layer_norm", "softmax", "elementwise", "quantize"])
def test_no_answer_is_less_sure_than_physics_by_more_than_its_kin_are(kind: str) -> None:
    """Small ops far outside the tables: a factor of 427 for an addition, of 1e15 for a norm, before."""
    sizes = {"numel": 512} if kind == "elementwise" else {"rows": 1, "cols": 128}
    for device in ("h100_pcie", "mi300x", "rtx_4090"):
        found = ask(build_engine(load_device(device), [], [SHIPPED]), [make_op(kind, **sizes)])
        assert found.high_us[0] < 20 * found.latency_us[0]


def test_backends_of_kin_may_be_asked_for() -> None:
    h800 = load_device("h800_sxm")
    assert any(name.startswith("sglang-") for name in known_backends(h800, [], [SHIPPED]))
    asked = TransferEngine(h800, [Registry(SHIPPED)], backend="sglang").kin("gemm", "bf16")
    assert asked is not None
    assert "sglang-" in asked.name
    found = known_backends(load_device("mi300x"), [], [SHIPPED])
    assert found == {"torch:aten", "torch:rocblas", "aiter:tuned", "aiter:preshuffled", "aiter:asm"}


@pytest.mark.parametrize(("device", "nearest"), [("rtx_3090", "rtx_a6000"), ("rtx_5090", "rtx_pro_6000_server")])
@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_the_nearest_chip_goes_before_the_framework_of_one_further_away(device: str, nearest: str, stack: str) -> None:
    """16-bit products of RTX 3090 under SGLang by an A100, of RTX 5090 by L40S, V100 and A100 together, before."""
    engines = replace(build_engine(load_device(device), [], [SHIPPED]), stack=load_stack(stack))
    found = ask(engines, [PRODUCT])
    assert found.predictor[0].split("/")[-1].startswith(nearest)


def test_of_chips_as_near_those_of_the_framework_answer() -> None:
    engines = replace(build_engine(load_device("l40"), [], [SHIPPED]), stack=load_stack("sglang"))
    assert ask(engines, [PRODUCT]).predictor[0].startswith("gemm@sglang-")

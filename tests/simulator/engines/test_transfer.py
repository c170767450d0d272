"""The transfer engine: who is asked, who declines, and that the answer names its donors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.models.registry import Registry
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.backends import known_backends
from opcast.simulator.engines.transfer import TransferEngine

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


@pytest.mark.parametrize(
    ("device", "op"),
    [
        ("h800_sxm", make_op("embedding", tokens=2**12, vocab=2**15, hidden=2**12, dtype="bf16")),  # and nothing alike
        ("h800_sxm", make_op("copy", size_bytes=2**30, direction="h2d")),  # over a bus
        ("mi300x", PRODUCT),  # nobody of its vendor in the format
        ("v100_sxm", make_op("all_reduce", size_bytes=2**26, ranks=8, ranks_per_node=8, dtype="fp16")),  # too far
    ],
)
def test_what_no_kin_knows_is_left_to_physics(device: str, op) -> None:  # type: ignore[no-untyped-def]
    assert np.isnan(ask(engine(device), [op]).latency_us).all()
    assert ask(build_engine(load_device(device), [], [SHIPPED]), [op]).engine[0] == "analytical"


def test_in_a_cluster_the_network_knows_the_links_better() -> None:
    cluster = load_cluster("dgx_h100")
    found = ask(build_engine(load_device("h800_sxm"), [], [SHIPPED], cluster=cluster), [SUM, PRODUCT])
    assert list(found.engine) == ["network", "transfer"]


def test_a_format_without_predictors_is_answered_by_one_on_the_same_units() -> None:
    kin = engine("gb200").kin("gemm", "mxfp8")
    assert kin is not None
    assert (kin.dtype, kin.tier) == ("fp8", "die")


def test_backends_of_kin_may_be_asked_for() -> None:
    h800 = load_device("h800_sxm")
    assert any(name.startswith("sglang-") for name in known_backends(h800, [], [SHIPPED]))
    asked = TransferEngine(h800, [Registry(SHIPPED)], backend="sglang").kin("gemm", "bf16")
    assert asked is not None
    assert "sglang-" in asked.name
    assert known_backends(load_device("mi300x"), [], [SHIPPED]) == {"torch:aten", "torch:rocblas"}

"""TensorRT-LLM's all-reduces by FlashInfer, against a stand-in with its arguments that sums between two ranks."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from opcast.datasets.ops import make_op  # noqa: E402
from opcast.harness import flashinfer_sums  # noqa: E402
from opcast.harness.cases import Unsupported  # noqa: E402
from opcast.harness.collective_calls import CallSetting  # noqa: E402
from opcast.harness.collective_variants import ON_GPU, variant  # noqa: E402
from opcast.harness.flashinfer_sums import MOST_BYTES, SUMS, WIDEST, row_width  # noqa: E402

from .package_signatures import ARGUMENTS, signature  # noqa: E402

PEER = 2.0  # what the other rank adds to every element


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """FlashInfer's module of communication; the workspaces that were asked of it."""
    made: list[dict[str, Any]] = []

    def create(**asked: Any) -> Any:
        signature(ARGUMENTS["flashinfer.comm", "create_allreduce_fusion_workspace"][1]).bind(**asked)
        made.append(asked)
        return SimpleNamespace(backend=asked["backend"])

    def reduce(**given: Any) -> Any:
        signature(ARGUMENTS["flashinfer.comm", "allreduce_fusion"][1]).bind(**given)
        summed = given["input"] + PEER
        if given["pattern"] == 0:
            given["output"].copy_(summed)
            return
        given["residual_out"].copy_(summed + given["residual_in"])
        normed = torch.nn.functional.rms_norm(
            given["residual_out"], (summed.shape[1],), given["rms_gamma"], given["rms_eps"]
        )
        given["norm_out"].copy_(normed)

    comm = ModuleType("flashinfer.comm")
    comm.create_allreduce_fusion_workspace, comm.allreduce_fusion = create, reduce
    comm.AllReduceFusionPattern = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)
    peers = ModuleType("flashinfer.comm.mnnvl")
    peers.TorchDistBackend = lambda group: ("over", group)
    peers.is_multicast_supported = lambda index: True
    for name, module in {"flashinfer": ModuleType("flashinfer"), comm.__name__: comm, peers.__name__: peers}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    flashinfer_sums.workspace.cache_clear()
    return made


def setting(size_bytes: int, dtype: str = "bf16", **dims: int) -> CallSetting:
    op = make_op("all_reduce", dtype, size_bytes=size_bytes, **{"ranks": 2, **dims})
    return CallSetting(op, None, 1, "cpu", control="gloo")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_that_of_all_ranks_and_normed_where_it_says_so(
    spaces: list[dict[str, Any]], name: str, dtype: str
) -> None:
    ready = SUMS[name].build(setting(64 * 7168 * 4, dtype))
    ready.run()
    summed = ready.source.view(ready.target.shape) + PEER
    if SUMS[name].norm:
        rms = ready.target.float().pow(2).mean(-1).sqrt()
        assert torch.allclose(rms, torch.ones_like(rms), atol=2e-2)
    else:
        assert torch.equal(ready.target, summed)
    (space,) = spaces
    assert space["backend"] == ("mnnvl" if "mnnvl" in name else "trtllm")
    assert (space["world_size"], space["rank"], space["group"], space["comm_backend"]) == (
        2,
        1,
        "gloo",
        ("over", "gloo"),
    )
    assert space["max_token_num"] * space["hidden_dim"] * ready.source.itemsize == MOST_BYTES


def test_ranks_share_one_workspace_for_all_sizes(spaces: list[dict[str, Any]]) -> None:
    for size in (1024, 1 << 20, MOST_BYTES):
        for name in ("flashinfer:trtllm_all_reduce", "flashinfer:trtllm_all_reduce_norm"):
            SUMS[name].build(setting(size))
    assert len(spaces) == 1


@pytest.mark.parametrize(
    ("numel", "width"), [(64 * 7168, 8192), (512, 512), (3 * 2880, 4320), (8 * 8209, 8), (4 << 20, WIDEST)]
)
def test_rows_are_as_wide_as_the_bytes_divide(numel: int, width: int) -> None:
    assert row_width(numel) == width
    assert numel % width == width % 8 == 0


def test_what_engines_leave_to_nccl_is_refused(spaces: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    build = SUMS["flashinfer:mnnvl_all_reduce"].build
    for wrong in (setting(MOST_BYTES + 1024), setting(1024, ranks=6), setting(1024, ranks=8, ranks_per_node=4)):
        with pytest.raises(Unsupported, match="leave it to NCCL"):
            build(wrong)
    with pytest.raises(Unsupported, match="multiples of 8"):
        build(setting(2 * 1001))
    monkeypatch.setattr(sys.modules["flashinfer.comm.mnnvl"], "is_multicast_supported", lambda index: False)
    with pytest.raises(Unsupported, match="no NVLink multicast"):
        build(setting(1024))
    assert not spaces


def test_they_are_backends_of_all_reduces_alone() -> None:
    assert set(SUMS) <= set(ON_GPU)
    gathered = make_op("all_gather", "bf16", size_bytes=1024, ranks=2)
    for norm, name in enumerate(("flashinfer:trtllm_all_reduce", "flashinfer:trtllm_all_reduce_norm")):
        both = [make_op("all_reduce", "bf16", size_bytes=1024, ranks=2, norm=form) for form in ("no", "yes")]
        assert variant(both[norm], name, "cuda").kinds == ("all_reduce",)
        with pytest.raises(Unsupported, match=f"{name} runs all_reduce with norm={both[norm].to_dict()['norm']} alone"):
            variant(both[1 - norm], name, "cuda")
    with pytest.raises(Unsupported, match="nccl:graph runs all_reduce with norm=no alone"):
        variant(make_op("all_reduce", "bf16", size_bytes=1024, ranks=2, norm="yes"), "nccl:graph", "cuda")
    with pytest.raises(Unsupported, match="does not run all_gather"):
        variant(gathered, "flashinfer:trtllm_all_reduce", "cuda")

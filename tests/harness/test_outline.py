"""Builders on tensors without memory, against the same on real ones, and what is said of backends beforehand."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from opcast.datasets.devices import load_device  # noqa: E402
from opcast.datasets.kernels import BACKENDS, is_eager, kernels, lacking, package_of  # noqa: E402
from opcast.datasets.launches import ANYONE, Caller  # noqa: E402
from opcast.datasets.ops import make_op  # noqa: E402
from opcast.harness.cases import BUILDERS, Inputs, Unsupported  # noqa: E402
from opcast.harness.cases.outline import OutlineInputs, outline  # noqa: E402
from opcast.harness.cases.packages import EXTRAS  # noqa: E402
from opcast.harness.collective_variants import ON_GPU  # noqa: E402
from opcast.harness.coverage import EAGER, seconds, to_measure, ways  # noqa: E402
from opcast.harness.plan import Settings  # noqa: E402
from opcast.simulator.engines.chain import caller_of  # noqa: E402
from opcast.simulator.question.plan import load_stack  # noqa: E402

HOPPER = (9, 0)
ROWS = {"rows": 64, "cols": 1024}
SMALL = {
    "rope": {"tokens": 64, "heads": 8, "head_dim": 128},
    "silu_mul": ROWS,
    "silu_mul_backward": ROWS,
    "quantize": ROWS,
    "mla_decode": {"batch": 2, "heads": 16, "seq_q": 1, "seq_kv": 512},
    "cross_entropy": {"tokens": 64, "vocab": 1024},
    "cross_entropy_backward": {"tokens": 64, "vocab": 1024},
    "moe_route": {"tokens": 64, "experts": 8, "topk": 2},
    "fused_moe": {"tokens": 64, "hidden": 64, "inter": 64, "topk": 2, "experts": 8},
}
OTHER = {"quantize": ("bf16", "fp8"), "moe_route": ("fp32", "fp32")}


def caller(stack: str, device: str = "h100_sxm") -> Caller:
    """Who launches the ops of a stack."""
    return caller_of(load_stack(stack), load_device(device))


class Launches(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "empty" not in str(function) and "unsafe_view" not in str(function):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SMALL)
def test_operators_of_an_eager_form_are_as_many_as_are_declared(kind: str) -> None:
    op = make_op(kind, *OTHER.get(kind, ("bf16", "bf16")), **SMALL[kind])
    with torch.no_grad():
        run = BUILDERS[kind, "torch"].build(op, OutlineInputs(HOPPER))
        with Launches() as launched:
            run()
    assert launched.count == kernels(kind, "torch") == BACKENDS["torch"].eager[kind]


def test_tokens_come_to_their_experts_routed() -> None:
    """The choice of experts is an op of its own in every step: a case of experts that chose again counted it twice."""
    launched = {}
    for kind in ("moe_route", "fused_moe"):
        with torch.no_grad():
            run = BUILDERS[kind, "torch"].build(make_op(kind, **SMALL[kind]), OutlineInputs(HOPPER))
            with Launches() as seen:
                run()
        launched[kind] = set(seen.names)
    assert {"_softmax", "topk"} <= launched["moe_route"]
    assert not launched["fused_moe"] & {"_softmax", "topk"}


def test_what_is_declared_is_there() -> None:
    names = {backend for _, backend in BUILDERS}
    for name in BACKENDS.keys() - set(ON_GPU) - {"gloo", "symm_mem"}:
        assert name in names or any(each.startswith(f"{name}:") for each in names), name
    for name in names:
        assert not package_of(name) or package_of(name) in EXTRAS


@pytest.mark.parametrize(
    ("kind", "dtypes", "shape"),
    [
        ("gemm", ("bf16", "bf16"), {"m": 32, "n": 64, "k": 128}),
        ("rms_norm", ("bf16", "bf16"), ROWS),
        (
            "attention_prefill",
            ("bf16", "bf16"),
            {"heads_q": 4, "heads_kv": 4, "head_dim": 64, "v_head_dim": 64, "seq_q": 64, "seq_kv": 64},
        ),
        ("adamw", ("fp32", "fp32"), {"numel": 1024, "tensors": 3}),
    ],
)
def test_an_outline_counts_the_bytes_of_real_inputs(kind: str, dtypes: tuple[str, str], shape: dict[str, int]) -> None:
    op = make_op(kind, *dtypes, **shape)
    backend = {"gemm": "torch", "attention_prefill": "sdpa"}.get(kind, "torch")
    real, drawn = Inputs("cpu", 0), OutlineInputs(HOPPER)
    BUILDERS[kind, backend].build(op, real)
    BUILDERS[kind, backend].build(op, drawn)
    assert real.bytes == drawn.bytes > 0


def test_refusals_are_the_builder_s_and_torch_s_own_words() -> None:
    with pytest.raises(Unsupported, match="batch=1"):
        outline(make_op("gemm", "fp8", "bf16", batch=2, m=32, n=64, k=128), "cublas", HOPPER)
    with pytest.raises(Unsupported, match="divisible by 16"):
        outline(make_op("gemm", "fp8", "bf16", m=32, n=65, k=130), "cublas", HOPPER)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_fp8_products_are_measured_in_all_layouts_as_what_they_are(layout: str, out: str) -> None:
    op = make_op("gemm", "fp8", out, m=256, n=512, k=1024, layout=layout)
    drawn = outline(op, "cublas", HOPPER)
    assert drawn.kernel == (None if layout == "nt" else "cublas nt, operands transposed before")
    run = BUILDERS["gemm", "cublas"].build(op, OutlineInputs(HOPPER))
    assert run.keywords["use_fast_accum"] == (layout == "nt"), "gradients are summed in full precision"  # type: ignore[attr-defined]
    assert tuple(run().shape) == (256, 512)


def test_chips_are_told_apart() -> None:
    product = make_op("gemm", "fp8_block", "bf16", m=64, n=2112, k=7168)
    latent = make_op("mla_decode", "bf16", batch=8, heads=16, seq_q=1, seq_kv=4096)
    told = {
        name: (
            [way.backend for way in ways(product, device, caller("vllm", name)) if way.runs],
            to_measure(ways(latent, device, caller("vllm", name)))[0].backend,
        )
        for name in ("h100_sxm", "b200_sxm")
        for device in [load_device(name)]
    }
    assert told["h100_sxm"] == (["deep_gemm:fp8", "cublas", "transformer_engine:gemm"], "vllm:flash_attn_mla")
    assert told["b200_sxm"] == (["deep_gemm:fp8"], "flashinfer:trtllm_mla")
    assert "compute capability 9.x" in lacking(product, "cublas", load_device("b200_sxm"))
    assert "8.9 or later" in lacking(
        make_op("gemm", "fp8", "bf16", m=64, n=64, k=64), "cublas", load_device("a100_sxm_80gb")
    )
    plain = make_op("gemm", "bf16", m=64, n=64, k=64)
    assert [way.backend for way in ways(plain, load_device("mi300x")) if way.runs] == ["cublas"]
    assert "no units for bf16" not in lacking(plain, "cublas", load_device("mi300x"))
    assert "no GPU of NVIDIA's" in lacking(latent, "flashinfer:mla", load_device("mi300x"))


@pytest.mark.parametrize(
    ("name", "stack", "wanted"),
    [
        ("h100_sxm", "vllm", ["deep_gemm:fp8", "vllm:cutlass_scaled_mm", "cublas"]),
        ("l40s", "vllm", ["vllm:w8a8_triton_block_scaled_mm", "triton:block_scaled_mm"]),
        ("l40s", "sglang", ["sglang:w8a8_block_fp8_matmul_triton", "triton:block_scaled_mm"]),
        ("rtx_5090", "vllm", ["deep_gemm:fp8", "vllm:cutlass_scaled_mm", "triton:block_scaled_mm"]),
        ("a100_sxm_80gb", "vllm", []),
    ],
)
def test_blocks_of_fp8_are_measured_on_every_chip_that_has_units_for_fp8(
    name: str, stack: str, wanted: list[str]
) -> None:
    product = make_op("gemm", "fp8_block", "bf16", m=64, n=2048, k=7168)
    assert [way.backend for way in to_measure(ways(product, load_device(name), caller(stack, name)))] == wanted


def test_operators_one_by_one_answer_for_eager_stacks_alone() -> None:
    op, device = make_op("rope", "bf16", **SMALL["rope"]), load_device("h100_sxm")
    anyone, vllm = (
        next(way for way in ways(op, device, each) if way.backend == "torch") for each in (ANYONE, caller("vllm"))
    )
    assert anyone.runs
    assert vllm.refusal == EAGER
    assert vllm.kernels == 5
    assert is_eager("rope", "torch")
    assert not is_eager("rms_norm", "torch")
    assert not is_eager("rope", "inductor")


def test_a_stack_measures_its_own_libraries_and_torch_s_best() -> None:
    device = load_device("h100_sxm")
    moe = make_op("fused_moe", "fp8_block", "bf16", tokens=64, hidden=7168, inter=2048, topk=8, experts=256, tp=8)
    first = {
        stack: [way.backend for way in to_measure(ways(moe, device, caller(stack)))]
        for stack in ("vllm", "sglang", "trtllm")
    }
    assert first["vllm"] == ["vllm:fused_experts", "flashinfer:cutlass", "deep_gemm:experts"]
    assert first["sglang"][0] == "sglang:fused_experts"
    assert first["trtllm"] == ["flashinfer:cutlass", "deep_gemm:experts"]


def test_collectives_of_an_engine_are_captured() -> None:
    device = load_device("h100_sxm")

    def named(size_bytes: int, ranks: int, stack: str, norm: str = "no") -> list[str]:
        op = make_op("all_reduce", "bf16", size_bytes=size_bytes, ranks=ranks, norm=norm)
        chosen = to_measure(ways(op, device, caller(stack)))
        assert all(way.op == op.replace(norm=int(way.backend.endswith("_norm"))) for way in chosen)
        return [way.backend for way in chosen]

    by_peers, by_multicast = "flashinfer:trtllm_all_reduce_norm", "flashinfer:mnnvl_all_reduce_norm"
    alone = "flashinfer:mnnvl_all_reduce"
    assert named(1 << 20, 8, "vllm") == [alone, "vllm:custom_all_reduce", "nccl:graph"]
    assert named(1 << 20, 8, "vllm", "yes") == [by_multicast, by_peers, alone, "nccl:graph"]
    assert named(1 << 20, 8, "sglang", "yes") == [by_peers, by_multicast, "vllm:custom_all_reduce", "nccl:graph"]
    assert named(1 << 20, 6, "vllm") == ["vllm:custom_all_reduce", "nccl:graph"]
    assert named(1 << 20, 6, "vllm", "yes") == named(1 << 20, 6, "vllm")  # the sum alone, which stands in for both
    assert named(9 << 20, 8, "vllm") == ["nccl:graph"]
    assert named(1 << 20, 8, "trtllm", "yes")[0] == by_peers
    assert named(1 << 20, 8, "trtllm")[0] == "flashinfer:trtllm_all_reduce"
    assert named(1 << 28, 8, "vllm") == ["nccl"]  # of a prompt, which no graph holds
    assert named(1 << 20, 8, "torchtitan") == named(1 << 20, 8, "megatron_core") == ["nccl"]


def test_more_than_a_gpu_holds_is_said_but_of_adamw() -> None:
    device = load_device("h100_sxm")
    table = make_op("elementwise", "fp32", numel=30 * 2**30, inputs=1)
    assert "GiB of" in next(way.refusal for way in ways(table, device))
    assert ways(make_op("adamw", "fp32", numel=8 * 2**30, tensors=100), device)[0].runs


def test_long_calls_and_large_inputs_take_longer_to_measure() -> None:
    settings = Settings(case_budget_s=0.3)
    assert seconds(10.0, 0, settings) == pytest.approx(1.2)
    assert seconds(1e6, 0, settings) > seconds(1e5, 0, settings) > seconds(10.0, 0, settings)
    assert seconds(10.0, 40e9, settings) == pytest.approx(1.2 + 2 * 0.2)


def test_adamw_beyond_memory_runs_a_piece_of_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from opcast.harness.cases import system

    stepped: list[int] = []
    monkeypatch.setattr(system, "_pieces", lambda op, inputs: 4)
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: stepped.append(sum(p.numel() for p in self.param_groups[0]["params"]))
    )
    inputs = Inputs("cpu", 0)
    run = BUILDERS["adamw", "torch"].build(make_op("adamw", "fp32", numel=4096, tensors=4), inputs)
    stepped.clear()
    run()
    assert stepped == [1024] * 4
    assert inputs.kernel == "a piece of 1/4, 4 times"


@pytest.mark.parametrize("part", ["scale", "both", "apply"])
def test_a_part_of_rounding_is_not_measured_as_the_whole(part: str) -> None:
    op = make_op("quantize", "bf16", "fp8", **ROWS, part=part)
    for backend in ("torch", "triton:quantize"):
        with pytest.raises(Unsupported, match=f"not {part}"):
            outline(op, backend, HOPPER)


def test_weight_only_products_are_called_what_they_are() -> None:
    op = make_op("gemm", "w4a16", "bf16", m=64, n=256, k=512)
    names = {
        backend
        for (kind, backend), each in BUILDERS.items()
        if kind == "gemm" and "cuda" in each.devices and each.accepts(op, "cuda")
    }
    assert names == {"tinygemm", "vllm:marlin", "vllm:machete"}

"""Kernels of engines, against stand-ins with the arguments of the published packages, which count what they are given.

Each stand-in binds its call to the real signature (:mod:`package_signatures`). The bytes of all tensors that it was
given must be those that the op says are read, but for scales, tables of pages and workspaces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from opcast.datasets.dtypes import itemsize  # noqa: E402
from opcast.datasets.ops import Op, make_op  # noqa: E402
from opcast.harness.cases import BUILDERS, Inputs, Unsupported  # noqa: E402

from .package_signatures import ARGUMENTS, signature  # noqa: E402

WORKSPACE = 64 << 20  # larger tensors of bytes are workspaces
MOE = {"tokens": 256, "hidden": 512, "inter": 256, "topk": 2, "experts": 4}
MLA = {"batch": 8, "heads": 16, "seq_q": 1, "seq_kv": 512}
PROMPT = {"batch": 2, "heads": 4, "seq_q": 64, "seq_kv": 64}
HEADS = {"heads_q": 8, "heads_kv": 2, "head_dim": 64, "v_head_dim": 64}
PRODUCT = {"m": 64, "n": 256, "k": 512}
CASES: list[tuple[str, Op, int]] = [  # backend, op, major compute capability
    *[
        ("vllm:fused_experts", make_op("fused_moe", d, o, **MOE), 9)
        for d, o in (("bf16", "bf16"), ("fp8", "bf16"), ("fp8_block", "bf16"))
    ],
    ("vllm:fused_topk", make_op("moe_route", "fp32", "fp32", tokens=256, experts=64, topk=4), 9),
    ("vllm:fused_experts", make_op("fused_moe", "fp8_block", "bf16", **MOE, ep=2), 9),
    *[("sglang:fused_experts", make_op("fused_moe", d, "bf16", **MOE), 9) for d in ("bf16", "fp8_block")],
    *[("vllm:marlin", make_op("fused_moe", d, "bf16", **MOE), 9) for d in ("mxfp4a16", "w4a16")],
    *[
        ("flashinfer:cutlass", make_op("fused_moe", d, "bf16", **MOE), 9)
        for d in ("bf16", "fp8_block", "nvfp4", "mxfp4a16")
    ],
    *[
        ("flashinfer:trtllm", make_op("fused_moe", d, "bf16", **MOE), 10)
        for d in ("fp8_block", "nvfp4", "mxfp4a16", "mxfp4a8")
    ],
    *[("vllm:flash_mla", make_op("mla_decode", "bf16", **MLA, kv_dtype=kv), 9) for kv in ("same", "fp8")],
    ("vllm:flash_attn_mla", make_op("mla_decode", "bf16", **MLA), 9),
    ("flashinfer:mla", make_op("mla_decode", "bf16", **MLA), 9),
    *[("flashinfer:trtllm_mla", make_op("mla_decode", "bf16", **MLA, kv_dtype=kv), 10) for kv in ("same", "fp8")],
    ("vllm:flash_attn", make_op("mla_prefill", "bf16", **PROMPT), 9),
    ("flashinfer:ragged", make_op("mla_prefill", "bf16", **PROMPT), 9),
    ("flashinfer:trtllm_ragged", make_op("mla_prefill", "bf16", **PROMPT), 10),
    *[
        ("vllm:paged", make_op("attention_decode", "bf16", batch=4, seq_q=1, seq_kv=512, **HEADS, kv_dtype=kv), 9)
        for kv in ("same", "fp8")
    ],
    *[
        (
            "flashinfer:trtllm",
            make_op("attention_decode", "bf16", batch=4, seq_q=1, seq_kv=512, **HEADS, kv_dtype=kv),
            10,
        )
        for kv in ("same", "fp8")
    ],
    ("flashinfer:trtllm", make_op("attention_prefill", "bf16", batch=2, seq_q=128, seq_kv=256, **HEADS), 10),
    *[(b, make_op("gemm", "w4a16", "bf16", **PRODUCT), 9) for b in ("vllm:marlin", "vllm:machete")],
    ("vllm:cutlass_scaled_mm", make_op("gemm", "fp8", "bf16", **PRODUCT), 9),
    ("vllm:cutlass_scaled_mm", make_op("gemm", "fp8_block", "bf16", **PRODUCT), 9),
    ("vllm:w8a8_triton_block_scaled_mm", make_op("gemm", "fp8_block", "bf16", **PRODUCT), 8),
    ("sglang:w8a8_block_fp8_matmul_triton", make_op("gemm", "fp8_block", "bf16", **PRODUCT), 8),
    ("vllm:per_token_group_quant_fp8", make_op("quantize", "bf16", "fp8_block", rows=64, cols=512, block=128), 9),
    ("vllm:per_token_group_quant_fp8", make_op("quantize", "bf16", "fp8_block", rows=64, cols=512, block=128), 10),
    ("vllm:scaled_fp4_quant", make_op("quantize", "bf16", "nvfp4", rows=64, cols=512, block=16, part="apply"), 10),
    *[
        ("vllm:scaled_fp8_quant", make_op("quantize", "bf16", "fp8", rows=64, cols=512, part=p), 9)
        for p in ("all", "apply")
    ],
    *[
        ("transformer_engine:gemm", make_op("gemm", "bf16", o, **PRODUCT, layout=lay), 9)
        for lay, o in (("nt", "bf16"), ("nn", "bf16"), ("tn", "fp32"))
    ],
    *[
        (
            "transformer_engine:grouped_gemm",
            make_op("grouped_gemm", "bf16", o, experts=4, tokens=512, n=256, k=128, layout=lay),
            9,
        )
        for lay, o in (("nt", "bf16"), ("nn", "bf16"), ("tn", "fp32"))
    ],
    ("transformer_engine:rope", make_op("rope", "bf16", tokens=64, heads=8, head_dim=64), 9),
    ("transformer_engine:attention", make_op("attention_prefill", "bf16", batch=2, seq_q=128, seq_kv=128, **HEADS), 9),
]


class Packages:
    """The stand-ins, and the bytes of the tensors that the last call was given."""

    def __init__(self) -> None:
        self.bytes = 0
        self.called: list[str] = []

    def function(self, name: str, arguments: str) -> Any:
        bound = signature(arguments)

        def call(*given: Any, **named: Any) -> Any:
            found = bound.bind(*given, **named)
            self.called.append(name)
            self.bytes = sum({t.data_ptr(): t.nbytes for t in tensors(found.arguments)}.values())
            return SimpleNamespace(weights=found.arguments)

        return call

    def module(self, name: str) -> ModuleType:
        made, classes = ModuleType(name), {}
        for (owner, path), (_, arguments) in ARGUMENTS.items():
            head, _, method = path.partition(".")
            if owner != name:
                continue
            if method:
                classes.setdefault(head, {})[method] = self.function(path, arguments)
            else:
                setattr(made, path, self.function(path, arguments))
        for head, methods in classes.items():
            setattr(made, head, self.owner(head, methods))
        return made

    def owner(self, head: str, methods: dict[str, Any]) -> type:
        """A class whose methods bind their arguments without ``self``; what calls it calls ``forward``."""

        def bound(method: str) -> Any:
            return lambda this, *given, **named: methods[method](*given, **named)

        def init(this: Any, *given: Any, **named: Any) -> None:
            methods["__init__"](*given, **named)

        body = {name: bound(name) for name in methods if name != "__init__"}
        return type(head, (), {**body, "__init__": init, "__call__": body.get("forward", bound("__init__"))})


def tensors(value: Any) -> Iterator[Any]:
    """Every tensor in arguments, however deep, but workspaces."""
    if isinstance(value, torch.Tensor):
        if value.nbytes < WORKSPACE:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif isinstance(value, SimpleNamespace):
        yield from tensors(vars(value))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Stand-ins of all packages whose signatures are known, and the small things around them."""
    made = Packages()
    for name in {"vllm", "sglang", "transformer_engine", *(module for module, _ in ARGUMENTS)}:
        monkeypatch.setitem(sys.modules, name, made.module(name))
    interface = "vllm.vllm_flash_attn.flash_attn_interface"
    monkeypatch.setitem(sys.modules, interface, sys.modules["vllm.vllm_flash_attn"])
    kinds = SimpleNamespace(uint4b8=SimpleNamespace(id=1), float4_e2m1f=SimpleNamespace(id=2))
    monkeypatch.setitem(sys.modules, "vllm.scalar_type", SimpleNamespace(scalar_types=kinds))
    flash = sys.modules["vllm.v1.attention.ops.flashmla"]
    flash.get_mla_metadata = lambda *_: ("schedule", None)
    flash.get_mla_metadata_dense_fp8 = lambda *_: (torch.zeros(8), torch.zeros(8))
    sys.modules["flashinfer.fused_moe"].WeightLayout = SimpleNamespace(BlockMajorK=2)
    sys.modules["flashinfer"].decode = sys.modules["flashinfer.decode"]
    sys.modules["flashinfer"].prefill = sys.modules["flashinfer.prefill"]
    sys.modules["vllm._custom_ops"].machete_prepack_B = lambda weight, *_: weight
    sys.modules["vllm.model_executor.layers.fused_moe.config"].fp8_w8a8_moe_quant_config = lambda **more: more
    sys.modules["vllm.model_executor.layers.quantization.utils.marlin_utils"].marlin_make_workspace_new = (
        lambda device, blocks: torch.zeros(blocks, dtype=torch.int32)
    )
    topk = SimpleNamespace(StandardTopKOutput=lambda weights, ids, logits: (weights, ids, logits))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.topk", topk)
    runner = SimpleNamespace(MoeRunnerConfig=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.moe_runner.base", runner)
    return made


@pytest.mark.parametrize(("backend", "op", "major"), CASES, ids=lambda value: str(value))
def test_an_engine_s_kernel_is_given_what_the_op_reads(
    packages: Packages, monkeypatch: pytest.MonkeyPatch, backend: str, op: Op, major: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    assert BUILDERS[op.kind, backend].accepts(op, "cuda")
    inputs = Inputs("cpu", 1)
    run = BUILDERS[op.kind, backend].build(op, inputs)
    run()
    assert packages.called
    assert packages.bytes == pytest.approx(float(op.cost.read_bytes) + beside(op, backend), rel=0.08)
    assert str(inputs.kernel).startswith(backend.partition(":")[0])


def beside(op: Op, backend: str) -> float:
    """Bytes that the call is given beside what the op reads: results, angles, scales of 4-bit formats.

    An op of experts counts a token's row for each of its experts; a call is given it once, and some take it in 16 bits.
    """
    if op.kind == "fused_moe":
        rows = op.tokens * op.hidden
        wide = 2.0 if "fp8" not in op.dtype or backend != "flashinfer:trtllm" else 1.0
        if backend == "flashinfer:trtllm" and op.dtype in ("nvfp4", "mxfp4a8"):
            wide = itemsize(op.dtype)
        weights = op.experts // op.ep * 3 * op.hidden * op.inter
        scales = {"nvfp4": weights / 16, "mxfp4a16": weights / 32, "mxfp4a8": weights / 32, "w4a16": weights / 64}
        return rows * wide - rows * op.topk / op.ep * itemsize(op.dtype) + scales.get(op.dtype, 0.0)
    if backend == "transformer_engine:grouped_gemm":
        return float(op.cost.write_bytes)
    if backend == "transformer_engine:rope":
        return op.tokens * op.head_dim * 4.0
    return 0.0


def test_scales_of_blocks_lie_as_each_kernel_reads_them(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUTLASS reads those of A column by column and B transposed; triton's kernels take all by rows."""
    op = make_op("gemm", "fp8_block", "bf16", m=64, n=256, k=512)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    a, b, scale_a, scale_b = BUILDERS["gemm", "vllm:cutlass_scaled_mm"].build(op, Inputs("cpu", 1)).args[:4]  # type: ignore[attr-defined]
    assert (tuple(a.shape), tuple(b.shape), tuple(scale_b.shape)) == ((64, 512), (512, 256), (4, 2))
    assert (tuple(scale_a.shape), scale_a.stride()) == ((64, 4), (1, 64))
    for backend in ("vllm:w8a8_triton_block_scaled_mm", "sglang:w8a8_block_fp8_matmul_triton"):
        with pytest.raises(Unsupported, match="on Ada alone"):
            BUILDERS["gemm", backend].build(op, Inputs("cpu", 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    with pytest.raises(Unsupported, match=r"from compute capability 9\.0"):
        BUILDERS["gemm", "vllm:cutlass_scaled_mm"].build(op, Inputs("cpu", 1))
    for backend in ("vllm:w8a8_triton_block_scaled_mm", "sglang:w8a8_block_fp8_matmul_triton"):
        given = BUILDERS["gemm", backend].build(op, Inputs("cpu", 1)).args  # type: ignore[attr-defined]
        assert [tuple(t.shape) for t in given[:4]] == [(64, 512), (256, 512), (64, 4), (2, 4)]
        assert all(t.is_contiguous() for t in given[:4])
        assert given[4] == [128, 128]


PERMUTE = {"tokens": 64, "hidden": 256, "topk": 4}


def test_rows_go_to_experts_and_back_by_one_map(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back takes the rows and the map that the way there made, which is made before."""
    module = sys.modules["transformer_engine.pytorch"]
    there, given = module.moe_permute, []

    def moe_permute(*arguments: Any, **named: Any) -> Any:
        there(*arguments, **named)
        given.append(arguments)
        return torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(64, 129, dtype=torch.int32)

    monkeypatch.setattr(module, "moe_permute", moe_permute)
    permute = BUILDERS["moe_permute", "transformer_engine:permute"].build
    permute(make_op("moe_permute", "bf16", **PERMUTE), Inputs("cpu", 1))()
    x, mask, rows = given[0]
    assert (x.shape, mask.dtype, mask.sum(1).unique().tolist(), rows) == ((64, 256), torch.bool, [4], 256)
    back = permute(make_op("moe_permute", "bf16", **PERMUTE, direction="unpermute"), Inputs("cpu", 1))
    packages.called.clear()
    for _ in range(2):
        back()
    assert packages.called == ["moe_unpermute"] * 2


def test_deep_gemm_s_scales_are_laid_out_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    laid: list[tuple[Any, ...]] = []
    called: list[Any] = []

    def transform(sf: Any, mn: int, k: int, recipe: tuple[int, ...], num_groups: int | None, is_sfa: bool) -> Any:
        laid.append((tuple(sf.shape), mn, k, recipe, num_groups, is_sfa))
        return f"laid {len(laid)}"

    stand_in = SimpleNamespace(
        transform_sf_into_required_layout=transform, fp8_gemm_nt=lambda *given: called.append(given)
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    op = make_op("gemm", "fp8_block", "bf16", m=64, n=2112, k=7168)
    run = BUILDERS["gemm", "deep_gemm:fp8"].build(op, Inputs("cpu", 0))
    for _ in range(3):
        run()
    assert laid == [((64, 56), 64, 7168, (1, 128, 128), None, True), ((17, 56), 2112, 7168, (1, 128, 128), None, False)]
    assert [(a[1], b[1]) for a, b, _ in called] == [("laid 1", "laid 2")] * 3


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_go_through_deep_gemm_as_in_vllm(packages: Packages, monkeypatch: pytest.MonkeyPatch, ep: int) -> None:
    """Weights' scales are laid out before; a call rounds the tokens and hands over what vLLM's layer does."""
    op = make_op("fused_moe", "fp8_block", "bf16", **MOE, ep=ep)
    local, width, hidden, tokens = op.experts // ep, op.inter, op.hidden, op.tokens
    module = sys.modules["vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe"]
    config = sys.modules["vllm.model_executor.layers.fused_moe.config"]
    rounding = sys.modules["vllm.model_executor.layers.quantization.utils.fp8_utils"]
    given: dict[str, Any] = {}
    laid: list[tuple[Any, ...]] = []

    def shapes(this: Any, **sizes: Any) -> Any:
        assert (sizes["M"], sizes["N"], sizes["K"]) == (tokens, 2 * width, hidden)
        assert (sizes["topk"], sizes["local_num_experts"], sizes["global_num_experts"]) == (2, local, op.experts)
        return (640, hidden // 2), (640, 2 * width), (tokens, hidden)

    def lay(ws: Any, mn: int, k: int, quant_block_shape: list[int], num_groups: int) -> str:
        laid.append((tuple(ws.shape), mn, k, quant_block_shape, num_groups))
        return f"laid {len(laid)}"

    def rounded(x: Any, group_size: int) -> Any:
        return x.to(torch.float8_e4m3fn), torch.ones(len(x), x.shape[1] // group_size)

    monkeypatch.setattr(module.DeepGemmExperts, "workspace_shapes", shapes)
    monkeypatch.setattr(module.DeepGemmExperts, "apply", lambda this, **named: given.update(named))
    for name, stand_in in {
        "FusedMoEConfig": lambda **fields: fields,
        "RoutingMethodType": SimpleNamespace(Renormalize=1),
        "FusedMoEParallelConfig": SimpleNamespace(make_no_parallel=lambda: "alone"),
    }.items():
        monkeypatch.setattr(config, name, stand_in, raising=False)
    monkeypatch.setattr(rounding, "deepgemm_post_process_weight_scale_block", lay)
    monkeypatch.setattr(rounding, "per_token_group_quant_fp8", rounded)
    activation = SimpleNamespace(MoEActivation=SimpleNamespace(SILU="silu"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.activation", activation)
    carried = ModuleType("vllm.third_party.deep_gemm")
    carried.__version__ = "2.8.1"
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # not built: vLLM carries it
    monkeypatch.setitem(sys.modules, "vllm.third_party", ModuleType("vllm.third_party"))
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", carried)

    inputs = Inputs("cpu", 1)
    run = BUILDERS["fused_moe", "deep_gemm:experts"].build(op, inputs)
    assert [each[1:] for each in laid] == [(2 * width, hidden, [128, 128], local), (hidden, width, [128, 128], local)]
    assert [each[0] for each in laid] == [(local, 4, 4), (local, 4, 2)]
    out = run()
    signature(ARGUMENTS["vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe", "DeepGemmExperts.apply"][1]).bind(
        **given
    )
    assert given["output"] is out
    assert (tuple(out.shape), out.dtype) == ((tokens, hidden), torch.bfloat16)
    assert (given["hidden_states"].dtype, tuple(given["a1q_scale"].shape)) == (torch.float8_e4m3fn, (tokens, 4))
    assert tuple(given["w1"].shape) == (local, 2 * width, hidden)
    assert tuple(given["w2"].shape) == (local, hidden, width)
    assert given["topk_ids"].dtype == torch.int32
    assert (given["expert_map"] is None) == (ep == 1)
    assert tuple(given["workspace13"].shape) == (640, hidden // 2)
    assert str(inputs.kernel).startswith("deep_gemm 2.8.1, by vllm")


def test_flash_attention_3_is_scheduled_before_and_4_is_not(
    packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = make_op("attention_decode", "bf16", batch=4, seq_q=1, seq_kv=512, **HEADS)
    for major, scheduled in ((9, True), (10, False), (8, False)):
        packages.called.clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, major=major: (major, 0))
        run = BUILDERS["attention_decode", "vllm:paged"].build(op, Inputs("cpu", 1))
        assert ("get_scheduler_metadata" in packages.called) == scheduled
        packages.called.clear()
        run()
        assert packages.called == ["flash_attn_varlen_func"]
    with pytest.raises(Unsupported, match="kv_dtype=same"):
        BUILDERS["attention_decode", "vllm:paged"].build(op.replace(kv_dtype=1), Inputs("cpu", 1))


def test_the_kernels_that_flashinfer_chose_are_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Decode:
        resolved_backend = "fa3"

        def __init__(self, *given: Any, **named: Any) -> None:
            seen.update(named)

        def plan(self, *given: Any, **named: Any) -> None:
            pass

        def run(self, *given: Any) -> None:
            pass

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Decode))
    op = make_op(
        "attention_decode", "bf16", batch=4, seq_q=1, seq_kv=512, heads_q=8, heads_kv=8, head_dim=64, v_head_dim=64
    )
    inputs = Inputs("cpu", 1)
    BUILDERS["attention_decode", "flashinfer:paged"].build(op, inputs)
    assert (seen["use_cuda_graph"], seen["use_tensor_cores"]) == (True, True)
    assert str(inputs.kernel).endswith("fa3")


def test_gates_go_to_recurrent_kernels_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    rule = SimpleNamespace(fused_recurrent_gated_delta_rule=lambda **named: seen.update(named))
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", rule)
    op = make_op(
        "linear_attention_decode", "bf16", rule="gated_delta", batch=2, heads=4, groups=2, head_dim=16, state_dim=16
    )
    BUILDERS["linear_attention_decode", "fla:recurrent"].build(op, Inputs("cpu", 1))()
    assert {"q", "k", "v", "g", "beta"} <= set(seen)
    assert (tuple(seen["beta"].shape), tuple(seen["g"].shape)) == ((2, 1, 4), (2, 1, 4))


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_tokens_travel_in_fp8_and_through_the_buffer_of_release_2(
    monkeypatch: pytest.MonkeyPatch, mode: str, dtype: str
) -> None:
    """ElasticBuffer as vLLM 0.33 calls it; what comes in fp8 is combined in bf16."""
    from opcast.harness import deep_ep_calls
    from opcast.harness.collective_calls import CallSetting

    calls: list[tuple[str, Any]] = []

    class Elastic:
        def __init__(self, *, group: Any, num_max_tokens_per_rank: int, hidden: int, **more: Any) -> None:
            assert more == {"num_topk": 2, "use_fp8_dispatch": dtype == "fp8", "explicitly_destroy": True}
            assert (num_max_tokens_per_rank, hidden) == (256, 128)

        def dispatch(self, *, x: Any, topk_idx: Any, topk_weights: Any, **more: Any) -> tuple[Any, ...]:
            fast = mode == "low_latency"
            assert more.pop("async_with_compute_stream") is False
            most = 32 if fast else None
            assert more == {
                "num_experts": 8,
                "num_max_tokens_per_rank": most,
                "do_expand": not fast,
                "do_cpu_sync": not fast,
            }
            calls.append(("dispatch", x[0].dtype if isinstance(x, tuple) else x.dtype))
            return x, topk_idx, topk_weights, "handle", SimpleNamespace(event=None)

        def combine(self, *, x: Any, handle: str, topk_weights: None) -> None:
            calls.append(("combine", x.dtype))

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(ElasticBuffer=Elastic))
    monkeypatch.setattr(deep_ep_calls, "BUFFERS", deep_ep_calls.SharedBuffer())
    group = type("Group", (), {"size": lambda self: 2})()
    for kind, sent in (
        ("ep_dispatch", getattr(torch, "bfloat16" if dtype == "bf16" else "float8_e4m3fn")),
        ("ep_combine", torch.bfloat16),
    ):
        op = make_op(kind, dtype, "bf16", tokens=20, hidden=128, topk=2, experts=8, ranks=2, mode=mode)
        ready = deep_ep_calls.ELASTIC_CALLS[kind](CallSetting(op, group, 0, "cpu"))
        calls.clear()
        ready.run()
        assert calls == [(kind.removeprefix("ep_"), sent)]


def test_ways_of_collectives_are_told_apart_by_device_kind_and_format() -> None:
    from opcast.harness.collective_variants import ON_CPU, ON_GPU, variant

    reduced = make_op("all_reduce", "bf16", size_bytes=1024, ranks=2)
    gathered = make_op("all_gather", "bf16", size_bytes=1024, ranks=2)
    assert variant(reduced, "nccl", "cuda") is ON_GPU["nccl"]
    assert variant(gathered, "gloo:inplace", "cpu") is ON_CPU["gloo:inplace"]
    for op, backend, device, words in (
        (reduced, "nccl:inplace", "cuda", "does not run all_reduce"),
        (gathered, "vllm:custom_all_reduce", "cuda", "does not run all_gather"),
        (reduced, "nccl:graph", "cpu", "use gloo"),
        (make_op("gemm", m=1, n=1, k=1), "nccl", "cuda", "is no collective"),
        (make_op("all_reduce", "fp16", size_bytes=1024, ranks=2), "symm_mem:multimem", "cuda", "adds bf16, fp32"),
    ):
        with pytest.raises(Unsupported, match=words):
            variant(op, backend, device)

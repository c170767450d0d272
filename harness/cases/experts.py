"""A rank's experts by the kernels of packages, in 16 bits, fp8 and 4-bit formats: what serving engines call fused MoE.

Tokens come routed, because the choice of experts is an op of its own (``moe_route``): weights and experts of each token
are given. Engines that take tokens in fp8 or 4 bits round them before, which is an op too (``quantize``). Elements and
scales are random; only their shapes and layouts matter. vLLM 0.33, SGLang 0.5.23 and FlashInfer 0.7 are called as the
engines call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .attention import CUDA
from .base import Inputs, Run, Unsupported, case
from .moe import drawn_experts, share
from .packages import package

if TYPE_CHECKING:
    import torch

BLOCK = 128  # side of a block of fp8 weights that share a scale, and length of one of activations
MX_BLOCK, NVFP4_BLOCK = 32, 16  # elements of 4-bit formats that share a scale
INT4_GROUP = 128
MARLIN_TILE = 16  # rows of k that Marlin packs together
MARLIN_HIDDEN, MARLIN_INTER = 256, 128  # vLLM pads weights of mxfp4 to multiples of these
TRTLLM_PADDING = 256  # the same for TensorRT-LLM's kernels
ROUTED_BEFORE = 1  # a routing method that is not used: tokens come routed


@dataclass(frozen=True)
class Routed:
    """What the router said of each token: weights (fp32) and experts (int32), [tokens, topk] each."""

    weights: torch.Tensor
    experts: torch.Tensor

    @classmethod
    def draw(cls, op: Op, inputs: Inputs) -> Routed:
        """The top k of each token, by the op's skew."""
        import torch

        weights, experts = drawn_experts(op, inputs)
        return cls(weights, experts.to(torch.int32))

    def mine(self, local: int) -> torch.Tensor:
        """The experts, with -1 in place of those of other ranks."""
        return self.experts.masked_fill(self.experts >= local, -1)


def _check(op: Op, *out: str) -> tuple[int, int]:
    """Experts of the first rank and their width; Unsupported for another result than the kernels write."""
    if op.out_dtype not in (out or (op.dtype,)):
        raise Unsupported(f"these kernels write {' or '.join(out) or op.dtype}, not {op.out_dtype}")
    return share(op)


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _bytes(inputs: Inputs, *shape: int) -> torch.Tensor:
    return inputs.integers(*shape, high=256, dtype="uint8")


def _ones(inputs: Inputs, *shape: int) -> torch.Tensor:
    import torch

    return torch.ones(*shape, dtype=torch.float32, device=inputs.device)


def _block_scales(inputs: Inputs, experts: int, rows: int, cols: int) -> torch.Tensor:
    return _ones(inputs, experts, -(-rows // BLOCK), -(-cols // BLOCK))


def _sides(hidden: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of both weights of an expert: up and gate together, and down."""
    return (2 * width, hidden), (hidden, width)


def _formats(*dtypes: str) -> Callable[[Op, str], bool]:
    """Whether an op has one of the formats and a gate, which these kernels take for granted."""
    return lambda op, device: op.dtype in dtypes and bool(op.gated)


# --- Triton kernels of vLLM and SGLang -----------------------------------------------------------------

MOE = "vllm.model_executor.layers.fused_moe"
FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"
TRITON_FORMATS = ("bf16", "fp16", "fp8", "fp8_block")


def _up_and_down(op: Op, inputs: Inputs, local: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [experts, 2 · width, hidden] and [experts, hidden, width], in the format of the op."""
    up, down = (inputs.normal(local, *side, dtype=op.dtype) for side in _sides(op.hidden, width))
    return up, down


def _scales(op: Op, inputs: Inputs, local: int, width: int) -> dict[str, Any]:
    """Scales of both weights as these engines name them: by block, or one for each expert; none in 16 bits."""
    if op.dtype == "fp8_block":
        up, down = (_block_scales(inputs, local, *side) for side in _sides(op.hidden, width))
        return {"w1_scale": up, "w2_scale": down, "block_shape": [BLOCK, BLOCK]}
    if op.dtype == "fp8":
        return {"w1_scale": _ones(inputs, local), "w2_scale": _ones(inputs, local)}
    return {}


def expert_map(op: Op, inputs: Inputs, local: int) -> torch.Tensor | None:
    """Where each expert lies on this rank, -1 for those of others; None when all are here."""
    import torch

    if op.ep == 1:
        return None
    places = torch.full((op.experts,), -1, dtype=torch.int32, device=inputs.device)
    places[:local] = torch.arange(local, dtype=torch.int32, device=inputs.device)
    return places


@case("moe_route", "vllm:fused_topk", devices=CUDA, when=lambda op, device: not op.kernels)
def route(op: Op, inputs: Inputs) -> Run:
    """vLLM's one kernel: softmax, top k, renormalised weights in fp32."""
    module = package(MOE, inputs)
    scores = inputs.normal(op.tokens, op.experts, dtype=op.dtype)
    hidden = inputs.normal(op.tokens, 1, dtype="bf16")  # of which only the number of rows counts
    return partial(module.fused_topk, hidden, scores, op.topk, True)


@case("fused_moe", "vllm:fused_experts", devices=CUDA, when=_formats(*TRITON_FORMATS))
def vllm_experts(op: Op, inputs: Inputs) -> Run:
    """vLLM's Triton kernels; a map skips experts of other ranks, as under expert parallelism. fp8 is rounded inside."""
    local, width = _check(op, *(("bf16",) if op.dtype.startswith("fp8") else ()))
    config = package(f"{MOE}.config", inputs)
    module = package(MOE, inputs)
    routed, x = Routed.draw(op, inputs), inputs.normal(op.tokens, op.hidden, dtype=op.out_dtype)
    scales = _scales(op, inputs, local, width)
    return partial(
        module.fused_experts,
        x,
        *_up_and_down(op, inputs, local, width),
        routed.weights,
        routed.experts,
        global_num_experts=op.experts,
        expert_map=expert_map(op, inputs, local),
        quant_config=config.fp8_w8a8_moe_quant_config(**scales) if scales else None,
    )


@case("fused_moe", "sglang:fused_experts", devices=CUDA, when=_formats(*TRITON_FORMATS))
def sglang_experts(op: Op, inputs: Inputs) -> Run:
    """SGLang's Triton kernels; experts of other ranks are -1, and left out. fp8 is rounded inside."""
    local, width = _check(op, *(("bf16",) if op.dtype.startswith("fp8") else ()))
    module = package("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe", inputs)
    runner = package("sglang.srt.layers.moe.moe_runner.base", inputs)
    topk = package("sglang.srt.layers.moe.topk", inputs)
    routed, x = Routed.draw(op, inputs), inputs.normal(op.tokens, op.hidden, dtype=op.out_dtype)
    chosen = topk.StandardTopKOutput(routed.weights, routed.mine(local), None)
    settings = runner.MoeRunnerConfig(num_experts=op.experts, num_local_experts=local, inplace=False)
    fp8 = {"use_fp8_w8a8": True} if op.dtype.startswith("fp8") else {}
    weights, scales = _up_and_down(op, inputs, local, width), _scales(op, inputs, local, width)
    return partial(module.fused_experts, x, *weights, chosen, settings, **fp8, **scales)


# --- DeepGEMM ------------------------------------------------------------------------------------------


@case("fused_moe", "deep_gemm:experts", devices=CUDA, when=_formats("fp8_block"))
def deep_gemm_experts(op: Op, inputs: Inputs) -> Run:
    """vLLM's way through DeepGEMM's grouped products: round, permute, product, gate and round, product, weighted sum.

    Scales of the weights lie as the products read them, and buffers are there before, as in the engine.
    """
    package("deep_gemm", inputs)  # which vLLM calls
    products = inputs.kernel
    rounding = package(FP8_UTILS, inputs)
    inputs.kernel = f"{products}, by {inputs.kernel}"
    local, width = _check(op, "bf16")
    if op.hidden % BLOCK or width % BLOCK:
        raise Unsupported(f"DeepGEMM's experts need hidden and inter / tp in multiples of {BLOCK}")
    routed, x = Routed.draw(op, inputs), inputs.normal(op.tokens, op.hidden, dtype="bf16")
    up, down = _up_and_down(op, inputs, local, width)
    if inputs.outline:
        return lambda: None
    layer = _deep_layer(op, inputs, local, width, (rounding, up, down))
    places = expert_map(op, inputs, local)

    def run() -> torch.Tensor:
        out = x.new_empty(x.shape)
        rounded, scales = rounding.per_token_group_quant_fp8(x, BLOCK)
        layer.experts.apply(
            output=out,
            hidden_states=rounded,
            w1=up,
            w2=down,
            topk_weights=routed.weights,
            topk_ids=routed.experts,
            activation=layer.activation,
            global_num_experts=op.experts,
            expert_map=places,
            a1q_scale=scales,
            a2_scale=None,
            workspace13=layer.narrow,
            workspace2=layer.wide,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return out

    return run


@dataclass(frozen=True)
class DeepLayer:
    """vLLM's experts through DeepGEMM with their weights' scales, and the buffers for what lies between products."""

    experts: Any
    activation: Any
    narrow: torch.Tensor
    wide: torch.Tensor


def _deep_layer(
    op: Op, inputs: Inputs, local: int, width: int, routed: tuple[Any, torch.Tensor, torch.Tensor]
) -> DeepLayer:
    import torch

    rounding, up, down = routed
    config = package(f"{MOE}.config")
    activation = package(f"{MOE}.activation").MoEActivation.SILU
    sides = [BLOCK, BLOCK]
    laid = [
        rounding.deepgemm_post_process_weight_scale_block(
            ws=_block_scales(inputs, local, *weight.shape[1:]),
            mn=weight.shape[1],
            k=weight.shape[2],
            quant_block_shape=sides,
            num_groups=local,
        )
        for weight in (up, down)
    ]
    settings = config.FusedMoEConfig(
        num_experts=op.experts,
        experts_per_token=op.topk,
        hidden_dim=op.hidden,
        intermediate_size=width,
        num_local_experts=local,
        num_logical_experts=op.experts,
        activation=activation,
        device=inputs.device,
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    scales = config.fp8_w8a8_moe_quant_config(w1_scale=laid[0], w2_scale=laid[1], block_shape=sides)
    experts = package(f"{MOE}.experts.deep_gemm_moe").DeepGemmExperts(settings, scales)
    narrow, wide, _ = experts.workspace_shapes(
        M=op.tokens,
        N=up.shape[1],
        K=op.hidden,
        topk=op.topk,
        global_num_experts=op.experts,
        local_num_experts=local,
        expert_tokens_meta=None,
        activation=activation,
    )
    buffers = (torch.empty(shape, dtype=torch.bfloat16, device=inputs.device) for shape in (narrow, wide))
    return DeepLayer(experts, activation, *buffers)


# --- Marlin --------------------------------------------------------------------------------------------


@case("fused_moe", "vllm:marlin", devices=CUDA, when=_formats("mxfp4a16", "w4a16"))
def marlin_experts(op: Op, inputs: Inputs) -> Run:
    """vLLM's Marlin kernels: 4-bit weights are widened in registers. Those of mxfp4 are padded, as vLLM pads them."""
    local, width = _check(op, "bf16")
    marlin = package(f"{MOE}.experts.marlin_moe", inputs)
    types = package("vllm.scalar_type", inputs).scalar_types
    mx = op.dtype == "mxfp4a16"
    hidden = _padded(op.hidden, MARLIN_HIDDEN) if mx else op.hidden
    width = _padded(width, MARLIN_INTER) if mx else width
    routed, x = Routed.draw(op, inputs), inputs.normal(op.tokens, hidden, dtype="bf16")
    up, down = (_marlin_weights(inputs, local, *side) for side in _sides(hidden, width))
    up_scale, down_scale = (_marlin_scales(inputs, local, *side, mx) for side in _sides(hidden, width))
    return partial(
        marlin.fused_marlin_moe,
        x,
        up,
        down,
        None,
        None,
        up_scale,
        down_scale,
        routed.weights,
        routed.experts,
        quant_type_id=(types.float4_e2m1f if mx else types.uint4b8).id,
        global_num_experts=op.experts,
        expert_map=expert_map(op, inputs, local),
    )


def _marlin_weights(inputs: Inputs, experts: int, n: int, k: int) -> torch.Tensor:
    """4-bit weights as Marlin packs them: int32 [experts, k / 16, 2 · n]."""
    if k % MARLIN_TILE:
        raise Unsupported(f"Marlin needs widths in multiples of {MARLIN_TILE}, not {k}")
    return inputs.integers(experts, k // MARLIN_TILE, 2 * n, high=2**31 - 1, dtype="int32")


def _marlin_scales(inputs: Inputs, experts: int, n: int, k: int, mx: bool) -> torch.Tensor:
    """A power of two for 32 elements of mxfp4, a bf16 number for 128 of int4."""
    import torch

    if mx:
        return _bytes(inputs, experts, k // MX_BLOCK, n).view(torch.float8_e8m0fnu)
    return inputs.normal(experts, -(-k // INT4_GROUP), n, dtype="bf16")


# --- FlashInfer ----------------------------------------------------------------------------------------


def _nvfp4_scales(inputs: Inputs, experts: int, rows: int, cols: int) -> torch.Tensor:
    """An e4m3 scale for 16 elements, in tiles of 128 rows and 4 columns, four to an int32."""
    import torch

    return _bytes(inputs, experts, _padded(rows, 128), _padded(cols // NVFP4_BLOCK, 4)).view(torch.int32)


@dataclass(frozen=True)
class CutlassWeights:
    """Both weights of all experts, their scales in the kernel's order, and the switch for their format."""

    up: torch.Tensor
    down: torch.Tensor
    scales: list[torch.Tensor]
    switch: dict[str, bool]

    @classmethod
    def draw(cls, op: Op, inputs: Inputs, local: int, width: int) -> CutlassWeights:
        """Random weights in the op's format."""
        import torch

        shapes = _sides(op.hidden, width)
        if op.dtype == "nvfp4":
            up, down = (_bytes(inputs, local, n, k // 2).view(torch.int64) for n, k in shapes)
            blocks = [_nvfp4_scales(inputs, local, *shape) for shape in shapes]
            one, ones_each = _ones(inputs, 1).squeeze(0), _ones(inputs, local)
            return cls(up, down, [one, blocks[0], ones_each, one, blocks[1], ones_each], {})
        if op.dtype == "mxfp4a16":
            up, down = (_bytes(inputs, local, n, k // 2) for n, k in shapes)
            scales = [_bytes(inputs, local, k // MX_BLOCK // 4, 4 * n) for n, k in shapes]
            return cls(up, down, scales, {"use_w4_group_scaling": True})
        up, down = _up_and_down(op, inputs, local, width)
        if op.dtype == "fp8_block":
            scales = [_block_scales(inputs, local, *shape) for shape in shapes]
            return cls(up, down, scales, {"use_deepseek_fp8_block_scale": True})
        return cls(up, down, [], {})


@case("fused_moe", "flashinfer:cutlass", devices=CUDA, when=_formats("bf16", "fp16", "fp8_block", "nvfp4", "mxfp4a16"))
def cutlass_experts(op: Op, inputs: Inputs) -> Run:
    """FlashInfer's CUTLASS kernels, which TensorRT-LLM has too. Tokens come in 16 bits and are rounded inside."""
    out = op.dtype if op.dtype == "fp16" else "bf16"
    local, width = _check(op, out)
    if op.dtype not in ("bf16", "fp16") and (op.hidden % BLOCK or width % BLOCK):
        raise Unsupported(f"FlashInfer's kernels need hidden and inter / tp in multiples of {BLOCK}")
    module = package("flashinfer.fused_moe", inputs)
    routed, x = Routed.draw(op, inputs), inputs.normal(op.tokens, op.hidden, dtype=out)
    weights = CutlassWeights.draw(op, inputs, local, width)
    return partial(
        module.cutlass_fused_moe,
        x,
        routed.experts,
        routed.weights,
        weights.up,
        weights.down,
        x.dtype,
        weights.scales,
        ep_size=op.ep,
        ep_rank=0,
        tp_size=op.tp,
        tp_rank=0,
        **weights.switch,
    )


@case("fused_moe", "flashinfer:trtllm", devices=CUDA, when=_formats("fp8_block", "nvfp4", "mxfp4a16", "mxfp4a8"))
def trtllm_experts(op: Op, inputs: Inputs) -> Run:
    """TensorRT-LLM's generated kernels for SM10x, by FlashInfer. Tokens come in the format that the kernel takes."""
    local, width = _check(op, "bf16")
    module = package("flashinfer.fused_moe", inputs)
    routed = Routed.draw(op, inputs)
    where = {
        "num_experts": op.experts,
        "top_k": op.topk,
        "n_group": None,
        "topk_group": None,
        "local_expert_offset": 0,
        "local_num_experts": local,
        "routed_scaling_factor": None,
        "routing_method_type": ROUTED_BEFORE,
    }
    build = _trtllm_fp8 if op.dtype == "fp8_block" else _trtllm_fp4
    return build(op, inputs, module, (routed.experts, routed.weights), (local, width), where)


def _trtllm_fp8(op: Op, inputs: Inputs, module: Any, routed: Any, size: tuple[int, int], where: dict[str, Any]) -> Run:
    """Weights in blocks of 128 along k, as vLLM lays them out once; scales of the tokens [hidden / 128, tokens]."""
    local, width = size
    if op.hidden % BLOCK or width % BLOCK:
        raise Unsupported(f"blocks of fp8 need hidden and inter / tp in multiples of {BLOCK}")
    shapes = _sides(op.hidden, width)
    up, down = (inputs.normal(local, k // BLOCK, n, BLOCK, dtype="fp8") for n, k in shapes)
    return partial(
        module.trtllm_fp8_block_scale_routed_moe,
        topk_ids=routed,
        routing_bias=None,
        hidden_states=inputs.normal(op.tokens, op.hidden, dtype="fp8"),
        hidden_states_scale=_ones(inputs, op.hidden // BLOCK, op.tokens),
        gemm1_weights=up,
        gemm1_weights_scale=_block_scales(inputs, local, *shapes[0]),
        gemm2_weights=down,
        gemm2_weights_scale=_block_scales(inputs, local, *shapes[1]),
        intermediate_size=width,
        use_shuffled_weight=True,
        weight_layout=module.WeightLayout.BlockMajorK,
        **where,
    )


def _trtllm_fp4(op: Op, inputs: Inputs, module: Any, routed: Any, size: tuple[int, int], where: dict[str, Any]) -> Run:
    """Weights in pairs of 4 bits; those of mxfp4 are padded, as vLLM pads them."""
    import torch

    local, width = size
    block, unit = (NVFP4_BLOCK, BLOCK) if op.dtype == "nvfp4" else (MX_BLOCK, TRTLLM_PADDING)
    hidden, width = _padded(op.hidden, unit), _padded(width, unit)
    shapes = _sides(hidden, width)
    up, down = (_bytes(inputs, local, n, k // 2) for n, k in shapes)
    up_scale, down_scale = (_bytes(inputs, local, n, k // block).view(torch.float8_e4m3fn) for n, k in shapes)
    x, x_scale = _narrow_tokens(op, inputs, hidden)
    outputs = dict.fromkeys(("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias"))
    scalars = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    return partial(
        module.trtllm_fp4_block_scale_routed_moe,
        topk_ids=routed,
        routing_bias=None,
        hidden_states=x,
        hidden_states_scale=x_scale,
        gemm1_weights=up,
        gemm1_weights_scale=up_scale,
        gemm2_weights=down,
        gemm2_weights_scale=down_scale,
        intermediate_size=width,
        **outputs,
        **{name: _ones(inputs, local) if op.dtype == "nvfp4" else None for name in scalars},
        **where,
    )


def _narrow_tokens(op: Op, inputs: Inputs, hidden: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tokens as the kernel takes them, and their scales."""
    import torch

    if op.dtype == "mxfp4a16":
        return inputs.normal(op.tokens, hidden, dtype="bf16"), None
    if op.dtype == "mxfp4a8":
        scales = _bytes(inputs, op.tokens, hidden // MX_BLOCK).view(torch.float8_e4m3fn)
        return inputs.normal(op.tokens, hidden, dtype="fp8"), scales
    scales = _bytes(inputs, op.tokens, hidden // NVFP4_BLOCK).view(torch.float8_e4m3fn)
    return _bytes(inputs, op.tokens, hidden // 2), scales

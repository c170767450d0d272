"""Attention: scaled dot product over a prompt, against a cache, its gradients, and DeepSeek's latent form.

Queries are the last ``seq_q`` of ``seq_kv`` positions. Prompt tensors lie as [batch, seq, heads, dim], where a
projection leaves them; a cache lies as [batch, heads, seq, dim], where transformers keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import KV_DTYPE, Op, make_op
from .base import Inputs, Run, Unsupported, case

if TYPE_CHECKING:
    import torch

FORWARD = ("attention_prefill", "attention_decode")
CUDA = ("cuda",)
FLASH2 = (8, 0)  # the least compute capability that torch's FlashAttention-2 runs on


def window(op: Op) -> int:
    """The sliding window, or 0 when it hides nothing."""
    return op.window if op.window < op.seq_kv else 0


def hides_nothing(op: Op) -> bool:
    """Whether every query sees every key, so that no mask is passed."""
    return not window(op) and (not op.causal or op.seq_q == 1)


def is_causal(op: Op) -> bool:
    """Whether torch's own ``is_causal`` says it all: it aligns the mask with the first key."""
    return bool(op.causal) and op.seq_q > 1 and op.seq_q == op.seq_kv and not window(op)


def needs_mask(op: Op) -> bool:
    """Whether SDPA would have to be given a mask: for a window, or for queries that continue a context."""
    return not hides_nothing(op) and not is_causal(op)


def check(op: Op, caches: tuple[int, ...] = (0,)) -> None:
    """Unsupported for shapes that have no meaning, or another format of the cache than the backend reads."""
    if op.kv_dtype not in caches:
        raise Unsupported(f"no cache in {KV_DTYPE.choices[op.kv_dtype]} with this backend: set kv_dtype=same")
    if op.heads_q % op.heads_kv:
        raise Unsupported(f"{op.heads_q} query heads do not share {op.heads_kv} key heads evenly")
    if op.seq_q > op.seq_kv:
        raise Unsupported(f"{op.seq_q} queries are more than the {op.seq_kv} positions they are the last of")
    if window(op) and not op.causal:
        raise Unsupported("a sliding window needs causal=yes")
    if op.out_dtype != op.dtype:
        raise Unsupported(f"attention in {op.dtype} is written in {op.dtype}, not in {op.out_dtype}")


def visible(op: Op, device: str) -> torch.Tensor:
    """Boolean [seq_q, seq_kv], true where a query sees a key."""
    import torch

    query = torch.arange(op.seq_q, device=device)[:, None] + (op.seq_kv - op.seq_q)
    key = torch.arange(op.seq_kv, device=device)[None, :]
    mask = key <= query
    return mask & (key > query - window(op)) if window(op) else mask


def _heads_first(inputs: Inputs, op: Op, seq: int, heads: int, dim: int, cached: bool) -> torch.Tensor:
    """[batch, heads, seq, dim] as SDPA takes it; in memory as the module docstring says."""
    if cached:
        return inputs.normal(op.batch, heads, seq, dim, dtype=op.dtype)
    return inputs.normal(op.batch, seq, heads, dim, dtype=op.dtype).transpose(1, 2)


def _query_key_value(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check(op)
    cached = op.kind == "attention_decode"
    query = _heads_first(inputs, op, op.seq_q, op.heads_q, op.head_dim, False)
    key = _heads_first(inputs, op, op.seq_kv, op.heads_kv, op.head_dim, cached)
    value = _heads_first(inputs, op, op.seq_kv, op.heads_kv, op.v_head_dim, cached)
    return query, key, value


def _sdpa_arguments(op: Op, device: str) -> dict[str, Any]:
    mask = visible(op, device) if needs_mask(op) else None
    arguments: dict[str, Any] = {"is_causal": is_causal(op), "attn_mask": mask}
    if op.heads_q != op.heads_kv:
        arguments["enable_gqa"] = True
    return arguments


def picked(operands: Sequence[torch.Tensor], arguments: dict[str, Any], inputs: Inputs) -> str:
    """The kernel that SDPA takes for these operands: flash, efficient, cudnn, overrideable or math."""
    import torch
    from torch.nn.attention import SDPBackend

    if inputs.outline:
        return "flash" if inputs.capability >= FLASH2 and operands[0].itemsize == 2 else "efficient"
    choose: Any = torch._fused_sdp_choice
    mask, causal, grouped = arguments["attn_mask"], arguments["is_causal"], arguments.get("enable_gqa", False)
    with torch.set_grad_enabled(any(operand.requires_grad for operand in operands)):
        number = int(choose(*operands, mask, 0.0, causal, enable_gqa=grouped))
    return str(SDPBackend(number).name).lower().removesuffix("_attention")


# --- forward -------------------------------------------------------------------------------------------


def sdpa(op: Op, inputs: Inputs) -> Run:
    """``F.scaled_dot_product_attention`` as torch dispatches it; on a GPU without masks of its own.

    A boolean mask sends it to a kernel that computes every score, up to dozens of times the FLOPs of the op, and no
    framework serves with one: windows and continued contexts go to torch's FlashAttention-2 directly, which knows both.
    """
    from torch.nn import functional

    if inputs.on_gpu and needs_mask(op):
        inputs.kernel = "flash2"
        return flash2(op, inputs)
    query, key, value = _query_key_value(op, inputs)
    arguments = _sdpa_arguments(op, inputs.device)
    inputs.kernel = picked((query, key, value), arguments, inputs)
    return partial(functional.scaled_dot_product_attention, query, key, value, **arguments)


def math_attention(op: Op, inputs: Inputs) -> Run:
    """SDPA held to the unfused path, masks and all: products and softmax as separate kernels, scores in memory."""
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    arguments = _sdpa_arguments(op, inputs.device)
    call = partial(functional.scaled_dot_product_attention, *_query_key_value(op, inputs), **arguments)
    inputs.kernel = "math"

    def run() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return call()

    return run


def _flash_window(op: Op) -> dict[str, int]:
    return {"window_size_left": window(op) - 1, "window_size_right": 0} if window(op) else {}


def check_flash(inputs: Inputs) -> None:
    """Unsupported, before inputs are made, where torch's FlashAttention-2 does not run: V100, T4 and older."""
    import torch

    if not inputs.on_gpu or torch.version.hip:
        return
    major, minor = inputs.capability
    if (major, minor) < FLASH2:
        raise Unsupported(f"torch's FlashAttention-2 needs compute capability 8.0, this GPU has {major}.{minor}")


def flash_operands(op: Op, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands as FlashAttention takes them, [batch, seq, heads, dim]; a narrower V is padded, as vLLM pads MLA's."""
    check(op)
    check_flash(inputs)
    if op.v_head_dim > op.head_dim:
        raise Unsupported("FlashAttention needs v_head_dim no larger than head_dim")
    shapes = ((op.seq_q, op.heads_q), (op.seq_kv, op.heads_kv), (op.seq_kv, op.heads_kv))
    query, key, value = (inputs.normal(op.batch, seq, heads, op.head_dim, dtype=op.dtype) for seq, heads in shapes)
    return query, key, value


def _flash_forward(op: Op, operands: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    import torch

    causal = bool(op.causal) and op.seq_q > 1
    lengths = (None, None, op.seq_q, op.seq_kv)
    forward = torch.ops.aten._flash_attention_forward
    return partial(forward, *operands, *lengths, 0.0, causal, False, **_flash_window(op))


def flash2(op: Op, inputs: Inputs) -> Run:
    """aten's FlashAttention-2, called directly: it aligns causal masks with the last key and knows windows."""
    return _flash_forward(op, flash_operands(op, inputs))


def _aligned(op: Op, name: str) -> None:
    if window(op) or (op.causal and op.seq_q not in (1, op.seq_kv)):
        raise Unsupported(f"the {name} kernel aligns causal masks with the first key and knows no windows")


def cudnn(op: Op, inputs: Inputs) -> Run:
    """aten's cuDNN attention, called directly."""
    import torch

    _aligned(op, "cuDNN")
    query, key, value = _query_key_value(op, inputs)
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    return partial(forward, query, key, value, None, False, 0.0, is_causal(op))


def efficient(op: Op, inputs: Inputs) -> Run:
    """aten's memory-efficient attention (CUTLASS), called directly."""
    import torch

    _aligned(op, "memory-efficient")
    if op.heads_q != op.heads_kv:
        raise Unsupported("the memory-efficient kernel needs as many key heads as query heads")
    query, key, value = _query_key_value(op, inputs)
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    return partial(forward, query, key, value, None, False, 0.0, is_causal(op))


for _kind in FORWARD:
    case(_kind, "sdpa")(sdpa)
    case(_kind, "flash2", devices=CUDA)(flash2)
    case(_kind, "cudnn", devices=CUDA)(cudnn)
    case(_kind, "efficient", devices=CUDA)(efficient)
    case(_kind, "math")(math_attention)


# --- backward ------------------------------------------------------------------------------------------


@case("attention_backward", "sdpa")
def sdpa_backward(op: Op, inputs: Inputs) -> Run:
    """The backward of what :func:`sdpa` runs for these shapes when gradients are needed."""
    if inputs.on_gpu and needs_mask(op):
        inputs.kernel = "flash2"
        return flash2_backward(op, inputs)
    operands = [operand.requires_grad_() for operand in _query_key_value(op, inputs.another())]
    chosen = picked(operands, _sdpa_arguments(op, inputs.device), inputs)
    del operands
    inputs.kernel = chosen
    if inputs.device == "cpu" and chosen == "flash":
        return _flash_cpu_backward(op, inputs)
    if chosen == "math" and inputs.on_gpu:
        raise Unsupported("torch has no fused backward for these shapes; measure backend math")
    builders = {"flash": flash2_backward, "efficient": efficient_backward, "cudnn": cudnn_backward}
    return builders.get(chosen, math_backward)(op, inputs)


@case("attention_backward", "flash2", devices=CUDA)
def flash2_backward(op: Op, inputs: Inputs) -> Run:
    """aten's FlashAttention-2 backward from the saved result and log-sum-exp."""
    import torch

    operands = flash_operands(op, inputs)
    with torch.no_grad():
        out, logsumexp, state, unused, _ = _flash_forward(op, operands)()
    gradient = inputs.normal(*out.shape, dtype=op.dtype)
    saved = (out, logsumexp, None, None, op.seq_q, op.seq_kv, 0.0, bool(op.causal) and op.seq_q > 1, state, unused)
    return partial(torch.ops.aten._flash_attention_backward, gradient, *operands, *saved, **_flash_window(op))


@case("attention_backward", "cudnn", devices=CUDA)
def cudnn_backward(op: Op, inputs: Inputs) -> Run:
    """aten's cuDNN attention backward."""
    import torch

    _aligned(op, "cuDNN")
    operands = _query_key_value(op, inputs)
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    with torch.no_grad():
        out, logsumexp, ends_q, ends_k, longest_q, longest_k, seed, offset, _ = forward(
            *operands, None, True, 0.0, is_causal(op)
        )
    gradient = _like_result(inputs, op)
    saved = (out, logsumexp, seed, offset, None, ends_q, ends_k, longest_q, longest_k, 0.0, is_causal(op))
    return partial(torch.ops.aten._scaled_dot_product_cudnn_attention_backward, gradient, *operands, *saved)


@case("attention_backward", "efficient", devices=CUDA)
def efficient_backward(op: Op, inputs: Inputs) -> Run:
    """aten's memory-efficient attention backward."""
    import torch

    _aligned(op, "memory-efficient")
    if op.heads_q != op.heads_kv:
        raise Unsupported("the memory-efficient kernel needs as many key heads as query heads")
    operands = _query_key_value(op, inputs)
    forward = torch.ops.aten._scaled_dot_product_efficient_attention
    with torch.no_grad():
        out, logsumexp, seed, offset = forward(*operands, None, True, 0.0, is_causal(op))
    gradient = _like_result(inputs, op)
    saved = (None, out, logsumexp, seed, offset, 0.0, [True, True, True, False], is_causal(op))
    return partial(torch.ops.aten._scaled_dot_product_efficient_attention_backward, gradient, *operands, *saved)


@case("attention_backward", "math", capturable=lambda op: False)
def math_backward(op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over the unfused path, its engine included; no single aten operator does it."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = operands = [operand.requires_grad_() for operand in _query_key_value(op, inputs)]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        out = functional.scaled_dot_product_attention(query, key, value, **_sdpa_arguments(op, inputs.device))
    gradient = _like_result(inputs, op)
    return partial(torch.autograd.grad, out, operands, gradient, retain_graph=True)


def _flash_cpu_backward(op: Op, inputs: Inputs) -> Run:
    """aten's fused attention backward on the CPU; its mask is additive, as SDPA hands it over."""
    import torch

    operands = _query_key_value(op, inputs)
    mask = _sdpa_arguments(op, "cpu")["attn_mask"]
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=operands[0].dtype).masked_fill_(~mask, -math.inf)
    with torch.no_grad():
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *operands, 0.0, is_causal(op), attn_mask=mask
        )
    gradient = _like_result(inputs, op)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return partial(backward, gradient, *operands, out, logsumexp, 0.0, is_causal(op), attn_mask=mask)


def _like_result(inputs: Inputs, op: Op) -> torch.Tensor:
    """A gradient of the result, as the output projection's backward leaves it: heads next to their dims."""
    return _heads_first(inputs, op, op.seq_q, op.heads_q, op.v_head_dim, False)


# --- multi-head latent attention -----------------------------------------------------------------------


def _unabsorbed(op: Op) -> Op:
    """MLA over a prompt is attention with wider keys than values and no shared heads."""
    return make_op(
        "attention_prefill",
        op.dtype,
        op.out_dtype,
        batch=op.batch,
        heads_q=op.heads,
        heads_kv=op.heads,
        head_dim=op.qk_nope_head_dim + op.qk_rope_head_dim,
        v_head_dim=op.v_head_dim,
        seq_q=op.seq_q,
        seq_kv=op.seq_kv,
        causal=op.causal,
    )


def _expanded(build: Callable[[Op, Inputs], Run], op: Op, inputs: Inputs) -> Run:
    """A forward pass on keys and values already expanded from the latent; flash2 pads V to the width of K."""
    return build(_unabsorbed(op), inputs)


case("mla_prefill", "sdpa")(partial(_expanded, sdpa))
case("mla_prefill", "flash2", devices=CUDA)(partial(_expanded, flash2))
case("mla_prefill", "cudnn", devices=CUDA)(partial(_expanded, cudnn))
case("mla_prefill", "efficient", devices=CUDA)(partial(_expanded, efficient))


@case("mla_decode", "torch")
def mla_decode(op: Op, inputs: Inputs) -> Run:
    """Absorbed decoding as three plain ops: all heads' scores against the shared latent, softmax, weighted sum.

    torch has no fused kernel for heads that share one 576-wide latent; its SDPA would copy it for every head.
    """
    import torch

    if op.seq_q > op.seq_kv:
        raise Unsupported(f"{op.seq_q} queries are more than the {op.seq_kv} positions they are the last of")
    if op.out_dtype != op.dtype:
        raise Unsupported(f"attention in {op.dtype} is written in {op.dtype}, not in {op.out_dtype}")
    width = op.kv_lora_rank + op.qk_rope_head_dim
    query = inputs.normal(op.batch, op.seq_q * op.heads, width, dtype=op.dtype)
    latent = inputs.normal(op.batch, op.seq_kv, width, dtype=op.dtype)
    keys, values = latent.transpose(1, 2), latent[..., : op.kv_lora_rank]
    scale = 1 / math.sqrt(op.qk_nope_head_dim + op.qk_rope_head_dim)
    masked = op.seq_q > 1 and bool(op.causal)
    bias = _latent_bias(op, query) if masked else query.new_zeros(())

    def run() -> torch.Tensor:
        scores = torch.baddbmm(bias, query, keys, beta=int(masked), alpha=scale)
        return torch.bmm(torch.softmax(scores, -1), values)

    return run


def _latent_bias(op: Op, query: torch.Tensor) -> torch.Tensor:
    """Additive mask, one row for each query and head."""
    import torch

    mask = visible(_unabsorbed(op), str(query.device)).repeat_interleave(op.heads, 0)
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -math.inf)

"""Attention as serving engines run it: FlashAttention 2 and 3, FlashInfer and vLLM, against a cache in pages.

Prompts lie as [tokens, heads, dim]; a cache lies in pages of ``page`` tokens, [pages, page, heads, dim], whose order in
memory is random, as it is after a while of serving. All of these align causal masks with the last key, know windows and
share key heads without copies. What an engine plans once for all layers of a step is not in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...datasets.ops import Op
from .attention import CUDA, FORWARD, check, flash_operands, window
from .base import Inputs, Run, Unsupported, case
from .packages import package

if TYPE_CHECKING:
    import torch

VLLM_PAGE = 16  # tokens: vLLM's default block, and FlashInfer's usual one
FLASH_PAGE = 256  # FlashAttention 2 takes multiples of this
WORKSPACE_BYTES = 384 << 20  # FlashInfer's, as vLLM sizes it
FP8_CACHE = 1


def span(op: Op) -> tuple[int, int]:
    """The window as these libraries take it: keys to the left and right of a query's own position, -1 = all."""
    return (window(op) - 1, 0) if window(op) else (-1, -1)


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of a batch in pages, and the pages of each sequence [batch, pages each], int32."""

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    last_page: int  # tokens in the last page of a sequence

    @classmethod
    def fill(cls, op: Op, inputs: Inputs, page: int) -> PagedCache:
        """Random keys and values for every sequence of an op. Unsupported where their widths differ."""
        import torch

        if op.v_head_dim != op.head_dim:
            raise Unsupported("a paged cache has keys and values of one width: set v_head_dim=head_dim")
        each = -(-op.seq_kv // page)
        dtype = "fp8" if op.kv_dtype == FP8_CACHE else op.dtype
        shape = (op.batch * each, page, op.heads_kv, op.head_dim)
        key, value = inputs.normal(*shape, dtype=dtype), inputs.normal(*shape, dtype=dtype)
        table = inputs.permutation(op.batch * each).to(torch.int32).view(op.batch, each)
        lengths = torch.full((op.batch,), op.seq_kv, dtype=torch.int32, device=inputs.device)
        return cls(key, value, table, lengths, op.seq_kv - (each - 1) * page)

    def starts(self, each: int) -> torch.Tensor:
        """Where each sequence's part begins when it has ``each`` entries, and the end: int32 [batch + 1]."""
        import torch

        count = len(self.table) + 1
        return torch.arange(count, dtype=torch.int32, device=self.table.device) * each


def queries(op: Op, inputs: Inputs) -> torch.Tensor:
    """The new tokens of all sequences one after the other: [batch · seq_q, heads_q, head_dim]."""
    return inputs.normal(op.batch * op.seq_q, op.heads_q, op.head_dim, dtype=op.dtype)


def causal(op: Op) -> bool:
    """Whether a mask is needed: one new token sees everything."""
    return bool(op.causal) and op.seq_q > 1


# --- FlashAttention ------------------------------------------------------------------------------------


def flash_attention(module_name: str, pages: str, op: Op, inputs: Inputs) -> Run:
    """Over prompts as they lie; decoding against a paged cache, whose table is called ``pages``."""
    module = package(module_name, inputs)
    if op.kind != "attention_decode":
        operands = flash_operands(op, inputs)
        return partial(module.flash_attn_func, *operands, causal=causal(op), window_size=span(op))
    check(op)
    cache = PagedCache.fill(op, inputs, FLASH_PAGE)
    query = queries(op, inputs).view(op.batch, op.seq_q, op.heads_q, op.head_dim)
    more = {"cache_seqlens": cache.lengths, pages: cache.table, "causal": causal(op), "window_size": span(op)}
    return partial(module.flash_attn_with_kvcache, query, cache.key, cache.value, **more)


def flash_attention_backward(module_name: str, op: Op, inputs: Inputs) -> Run:
    """Autograd's pass over the package's function, which is one kernel and two small ones."""
    import torch

    module = package(module_name, inputs)
    operands = [operand.requires_grad_() for operand in flash_operands(op, inputs)]
    with torch.enable_grad():
        out = module.flash_attn_func(*operands, causal=causal(op), window_size=span(op))
    out = out[0] if isinstance(out, tuple) else out
    return partial(torch.autograd.grad, out, operands, torch.ones_like(out), retain_graph=True)


# --- FlashInfer ----------------------------------------------------------------------------------------


def flashinfer(op: Op, inputs: Inputs) -> Run:
    """Its wrappers of paged decoding (one new token) and paged prompts, planned once."""
    import torch

    check(op, (0, FP8_CACHE))
    module = package("flashinfer", inputs)
    cache = PagedCache.fill(op, inputs, VLLM_PAGE)
    query = queries(op, inputs)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
    last = torch.full_like(cache.lengths, cache.last_page)
    pages = (cache.starts(cache.table.shape[1]), cache.table.view(-1), last)
    heads = (op.heads_q, op.heads_kv, op.head_dim, VLLM_PAGE)
    more = {"window_left": span(op)[0], "q_data_type": query.dtype, "kv_data_type": cache.key.dtype}
    if op.seq_q == 1:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=op.heads_q > op.heads_kv)
        wrapper.plan(*pages, *heads, **more)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(cache.starts(op.seq_q), *pages, *heads, causal=causal(op), **more)
    return partial(wrapper.run, query, (cache.key, cache.value))


# --- vLLM ----------------------------------------------------------------------------------------------


def vllm(op: Op, inputs: Inputs) -> Run:
    """vLLM's build of FlashAttention, in the version that it takes on the device: 3 on SM90, 4 on SM10x, else 2."""
    import torch

    check(op)
    module = package("vllm.vllm_flash_attn", inputs)
    generation = {9: 3, 10: 4}.get(torch.cuda.get_device_capability()[0], 2)
    inputs.kernel = f"{inputs.kernel} flash_attn {generation}"
    cache = PagedCache.fill(op, inputs, VLLM_PAGE)
    return partial(
        module.flash_attn_varlen_func,
        queries(op, inputs),
        cache.key,
        cache.value,
        max_seqlen_q=op.seq_q,
        cu_seqlens_q=cache.starts(op.seq_q),
        max_seqlen_k=op.seq_kv,
        seqused_k=cache.lengths,
        block_table=cache.table,
        causal=causal(op),
        window_size=list(span(op)),
        fa_version=generation,
    )


def _served(op: Op, device: str) -> bool:
    return op.dtype in ("bf16", "fp16")


Build = Callable[[Op, Inputs], Run]
WAYS: dict[str, Build] = {
    "flash_attn:2": partial(flash_attention, "flash_attn", "block_table"),
    "flash_attn:3": partial(flash_attention, "flash_attn_interface", "page_table"),
    "flashinfer:paged": flashinfer,
    "vllm:paged": vllm,
}
for _kind in FORWARD:
    for _name, _build in WAYS.items():
        case(_kind, _name, devices=CUDA, when=_served)(_build)
for _name, _module in {"flash_attn:2": "flash_attn", "flash_attn:3": "flash_attn_interface"}.items():
    case("attention_backward", _name, devices=CUDA, when=_served, capturable=lambda op: False)(
        partial(flash_attention_backward, _module)
    )

"""Attention as serving engines run it: FlashAttention 2 and 3, FlashInfer and vLLM, against a cache in pages.

Prompts lie as [tokens, heads, dim]; a cache lies in pages of ``page`` tokens, [pages, page, heads, dim], whose order in
memory is random, as it is after a while of serving. All of these align causal masks with the last key, know windows and
share key heads without copies. What an engine plans once for all layers of a step is not in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets.ops import Op
from .attention import CUDA, FORWARD, check, flash_operands, window
from .base import Inputs, Run, Unsupported, case, torch_dtype
from .packages import package

if TYPE_CHECKING:
    import torch

VLLM_PAGE = 16  # tokens: vLLM's default block, and FlashInfer's usual one
FLASH_PAGE = 256  # FlashAttention 2 takes multiples of this
WORKSPACE_BYTES = 384 << 20  # FlashInfer's, as vLLM sizes it
FP8_CACHE = 1
GRAPH_SPLITS = 32  # of keys over blocks at most: vLLM's flash_attn_max_num_splits_for_cuda_graph


def starts(batch: int, length: int, inputs: Inputs) -> torch.Tensor:
    """Where each sequence begins when it has ``length`` entries, and the end: int32 [batch + 1]."""
    import torch

    return torch.arange(batch + 1, dtype=torch.int32, device=inputs.device) * length


def span(op: Op) -> tuple[int, int]:
    """The window as these libraries take it: keys to the left and right of a query's own position, -1 = all."""
    return (window(op) - 1, 0) if window(op) else (-1, -1)


def sixteen_bits(op: Op, device: str) -> bool:
    """Whether an op is in a format that all of these take."""
    return op.dtype in ("bf16", "fp16")


def cache_dtype(op: Op) -> str:
    """The format of an op's cache."""
    return "fp8" if op.kv_dtype == FP8_CACHE else op.dtype


def page_table(op: Op, inputs: Inputs, page: int) -> torch.Tensor:
    """The pages of each sequence in random order: int32 [batch, pages each]."""
    import torch

    pages = -(-op.seq_kv // page)
    return inputs.permutation(op.batch * pages).to(torch.int32).view(op.batch, pages)


def lengths(op: Op, inputs: Inputs) -> torch.Tensor:
    """Tokens in the cache of each sequence: int32 [batch]."""
    import torch

    return torch.full((op.batch,), op.seq_kv, dtype=torch.int32, device=inputs.device)


def workspace(inputs: Inputs) -> torch.Tensor:
    """Memory that FlashInfer's kernels want beside their operands."""
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)


def vllm_flash_attention(inputs: Inputs) -> tuple[Any, int]:
    """vLLM's build of FlashAttention and the version that it takes on the device: 3 on SM90, 4 on SM10x, else 2."""
    module = package("vllm.vllm_flash_attn", inputs)
    generation = {9: 3, 10: 4}.get(inputs.capability[0], 2)
    inputs.kernel = f"{inputs.kernel} flash_attn {generation}"
    return module, generation


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of a batch in pages, and the pages of each sequence [batch, pages each], int32."""

    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    last_page: int  # tokens in the last page of a sequence

    @classmethod
    def fill(cls, op: Op, inputs: Inputs, page: int, heads_first: bool = False) -> PagedCache:
        """Random keys and values for every sequence of an op, [pages, page, heads, dim] or head by head.

        Unsupported where their widths differ.
        """
        if op.v_head_dim != op.head_dim:
            raise Unsupported("a paged cache has keys and values of one width: set v_head_dim=head_dim")
        table = page_table(op, inputs, page)
        inner = (op.heads_kv, page) if heads_first else (page, op.heads_kv)
        shape = (table.numel(), *inner, op.head_dim)
        key, value = (inputs.normal(*shape, dtype=cache_dtype(op)) for _ in range(2))
        return cls(key, value, table, lengths(op, inputs), op.seq_kv - (table.shape[1] - 1) * page)


def queries(op: Op, inputs: Inputs, rounded: bool = False) -> torch.Tensor:
    """The new tokens of all sequences one after the other: [batch · seq_q, heads_q, head_dim].

    ``rounded`` is true of kernels that want them in fp8 where the cache is.
    """
    dtype = cache_dtype(op) if rounded else op.dtype
    return inputs.normal(op.batch * op.seq_q, op.heads_q, op.head_dim, dtype=dtype)


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
    if inputs.outline:
        return lambda: out
    return partial(torch.autograd.grad, out, operands, torch.ones_like(out), retain_graph=True)


# --- FlashInfer ----------------------------------------------------------------------------------------


def flashinfer(op: Op, inputs: Inputs) -> Run:
    """Its wrappers of paged decoding (one new token) and paged prompts, planned once.

    Decoding is in graph mode and on tensor cores, as vLLM has it; which kernels that takes is in the row.
    """
    import torch

    check(op, (0, FP8_CACHE))
    module = package("flashinfer", inputs)
    cache = PagedCache.fill(op, inputs, VLLM_PAGE)
    query = queries(op, inputs)
    last = torch.full_like(cache.lengths, cache.last_page)
    pages = (starts(op.batch, cache.table.shape[1], inputs), cache.table.view(-1), last)
    heads = (op.heads_q, op.heads_kv, op.head_dim, VLLM_PAGE)
    more = {"window_left": span(op)[0], "q_data_type": query.dtype, "kv_data_type": cache.key.dtype}
    if op.seq_q == 1:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        buffers = {name: tensor.clone() for name, tensor in zip(names, pages, strict=True)}
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace(inputs), "NHD", use_cuda_graph=True, use_tensor_cores=True, **buffers
        )
        wrapper.plan(*pages, *heads, **more)
        if isinstance(resolved := getattr(wrapper, "resolved_backend", None), str):
            inputs.kernel = f"{inputs.kernel} {resolved}"
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace(inputs), "NHD")
        wrapper.plan(starts(op.batch, op.seq_q, inputs), *pages, *heads, causal=causal(op), **more)
    return partial(wrapper.run, query, (cache.key, cache.value))


def trtllm(op: Op, inputs: Inputs) -> Run:
    """TensorRT-LLM's generated kernels for SM10x, which vLLM takes first there; keys of a page lie head by head."""
    check(op, (0, FP8_CACHE))
    module = package("flashinfer", inputs)
    cache = PagedCache.fill(op, inputs, VLLM_PAGE, heads_first=True)
    more: dict[str, Any] = {
        "query": queries(op, inputs, rounded=True),
        "kv_cache": (cache.key, cache.value),
        "workspace_buffer": workspace(inputs),
        "block_tables": cache.table,
        "seq_lens": cache.lengths,
        "bmm1_scale": op.head_dim**-0.5,
        "bmm2_scale": 1.0,
        "window_left": span(op)[0],
        "out_dtype": torch_dtype(op.dtype),
    }
    if op.kind == "attention_decode":
        decode = module.decode.trtllm_batch_decode_with_kv_cache
        return partial(decode, **more, max_seq_len=op.seq_kv, q_len_per_req=op.seq_q)
    return partial(
        module.prefill.trtllm_batch_context_with_kv_cache,
        **more,
        max_q_len=op.seq_q,
        max_kv_len=op.seq_kv,
        batch_size=op.batch,
        cum_seq_lens_q=starts(op.batch, op.seq_q, inputs),
        cum_seq_lens_kv=starts(op.batch, op.seq_kv, inputs),
        causal=causal(op),
    )


# --- vLLM ----------------------------------------------------------------------------------------------


def vllm(op: Op, inputs: Inputs) -> Run:
    """vLLM's build of FlashAttention. 3 is scheduled once for all layers of a step, before.

    It alone reads caches in fp8, with queries in fp8.
    """
    module, generation = vllm_flash_attention(inputs)
    check(op, (0, FP8_CACHE) if generation == 3 else (0,))
    cache = PagedCache.fill(op, inputs, VLLM_PAGE)
    query, begins = queries(op, inputs, rounded=True), starts(op.batch, op.seq_q, inputs)
    more = _scheduled(op, inputs, module, cache, begins) if generation == 3 else {}
    return partial(
        module.flash_attn_varlen_func,
        query,
        cache.key,
        cache.value,
        max_seqlen_q=op.seq_q,
        cu_seqlens_q=begins,
        max_seqlen_k=op.seq_kv,
        seqused_k=cache.lengths,
        block_table=cache.table,
        causal=causal(op),
        window_size=list(span(op)),
        fa_version=generation,
        **more,
    )


def _scheduled(op: Op, inputs: Inputs, module: Any, cache: PagedCache, begins: torch.Tensor) -> dict[str, Any]:
    """FlashAttention 3's schedule, the splits that graphs of decoding are captured with, and scales of fp8."""
    import torch

    splits = GRAPH_SPLITS if op.kind == "attention_decode" else 0
    schedule = module.get_scheduler_metadata(
        batch_size=op.batch,
        max_seqlen_q=op.seq_q,
        max_seqlen_k=op.seq_kv,
        num_heads_q=op.heads_q,
        num_heads_kv=op.heads_kv,
        headdim=op.head_dim,
        cache_seqlens=cache.lengths,
        qkv_dtype=cache.key.dtype,
        cu_seqlens_q=begins,
        page_size=VLLM_PAGE,
        causal=causal(op),
        window_size=span(op),
        num_splits=splits,
    )
    more = {"scheduler_metadata": schedule, "num_splits": splits}
    if op.kv_dtype == FP8_CACHE:
        one = torch.ones(op.batch, op.heads_kv, device=inputs.device)
        more |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), one)
    return more


Build = Callable[[Op, Inputs], Run]
WAYS: dict[str, Build] = {
    "flash_attn:2": partial(flash_attention, "flash_attn", "block_table"),
    "flash_attn:3": partial(flash_attention, "flash_attn_interface", "page_table"),
    "flashinfer:paged": flashinfer,
    "flashinfer:trtllm": trtllm,
    "vllm:paged": vllm,
}
for _kind in FORWARD:
    for _name, _build in WAYS.items():
        case(_kind, _name, devices=CUDA, when=sixteen_bits)(_build)
for _name, _module in {"flash_attn:2": "flash_attn", "flash_attn:3": "flash_attn_interface"}.items():
    case("attention_backward", _name, devices=CUDA, when=sixteen_bits, capturable=lambda op: False)(
        partial(flash_attention_backward, _module)
    )

"""Multi-head latent attention by the kernels that serving engines run, called as vLLM 0.33 and SGLang 0.5.23 call them.

Decoding reads a cache in pages, [pages, page, rank + rope]: the first ``rank`` columns of a token are its key and its
value, the others its rotated key. A prompt has a key and a value for each head. What an engine plans once for all
layers of a step is not in the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...datasets.ops import Op
from .attention import CUDA
from .base import Inputs, Run, Unsupported, case
from .packages import package
from .paged import (
    FP8_CACHE,
    GRAPH_SPLITS,
    VLLM_PAGE,
    cache_dtype,
    lengths,
    page_table,
    sixteen_bits,
    starts,
    vllm_flash_attention,
    workspace,
)

if TYPE_CHECKING:
    import torch

FLASH_MLA_PAGE = 64  # tokens, the one size that FlashMLA and TensorRT-LLM's kernels share
SGLANG_PAGE = 1


@dataclass(frozen=True)
class LatentCache:
    """Latent keys of a batch in pages, the pages of each sequence [batch, pages each] (int32) and their lengths."""

    latent: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def fill(cls, op: Op, inputs: Inputs, page: int) -> LatentCache:
        """Random keys, in the format of the op's cache."""
        table, width = page_table(op, inputs, page), op.kv_lora_rank + op.qk_rope_head_dim
        return cls(inputs.normal(table.numel(), page, width, dtype=cache_dtype(op)), table, lengths(op, inputs))


def _queries(op: Op, inputs: Inputs) -> torch.Tensor:
    """Absorbed queries [batch, seq_q, heads, rank + rope]; in fp8 where the cache is."""
    width = op.kv_lora_rank + op.qk_rope_head_dim
    return inputs.normal(op.batch, op.seq_q, op.heads, width, dtype=cache_dtype(op))


def _scale(op: Op) -> float:
    return 1 / math.sqrt(op.qk_nope_head_dim + op.qk_rope_head_dim)


def _check(op: Op, *caches: int) -> None:
    if op.seq_q > op.seq_kv:
        raise Unsupported(f"{op.seq_q} queries are more than the {op.seq_kv} positions they are the last of")
    if op.out_dtype != op.dtype:
        raise Unsupported(f"attention in {op.dtype} is written in {op.dtype}, not in {op.out_dtype}")
    if op.kv_dtype not in (0, *caches):
        raise Unsupported("this kernel reads a latent cache in the dtype of the queries: set kv_dtype=same")


# --- decoding ------------------------------------------------------------------------------------------


def flash_mla(module_name: str, op: Op, inputs: Inputs) -> Run:
    """FlashMLA on dense caches. Its schedule is made by the first call and kept; older releases make it apart."""
    _check(op)
    module = package(module_name, inputs)
    cache = LatentCache.fill(op, inputs, FLASH_MLA_PAGE)
    schedule, splits = module.get_mla_metadata(cache.lengths, op.seq_q * op.heads, 1)
    return partial(
        module.flash_mla_with_kvcache,
        _queries(op, inputs),
        cache.latent.unsqueeze(-2),
        cache.table,
        cache.lengths,
        op.kv_lora_rank,
        schedule,
        splits,
        softmax_scale=_scale(op),
        causal=True,
    )


@case("mla_decode", "vllm:flash_mla", devices=CUDA, when=sixteen_bits)
def vllm_flash_mla(op: Op, inputs: Inputs) -> Run:
    """FlashMLA as vLLM builds it; caches in fp8 have a kernel of their own, with queries in fp8."""
    import torch

    if op.kv_dtype != FP8_CACHE:
        return flash_mla("vllm.v1.attention.ops.flashmla", op, inputs)
    _check(op, FP8_CACHE)
    module = package("vllm.v1.attention.ops.flashmla", inputs)
    cache = LatentCache.fill(op, inputs, FLASH_MLA_PAGE)
    schedule, splits = module.get_mla_metadata_dense_fp8(cache.lengths, op.seq_q * op.heads, 1)
    one = torch.ones(1, device=inputs.device)
    return partial(
        module.flash_mla_with_kvcache_fp8,
        q=_queries(op, inputs),
        k_cache=cache.latent.unsqueeze(-2),
        block_table=cache.table,
        cache_seqlens=cache.lengths,
        head_dim_v=op.kv_lora_rank,
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        softmax_scale=_scale(op),
        causal=True,
        descale_q=one,
        descale_k=one,
    )


case("mla_decode", "flash_mla:dense", devices=CUDA, when=sixteen_bits)(partial(flash_mla, "flash_mla"))


@case("mla_decode", "vllm:flash_attn_mla", devices=CUDA, when=sixteen_bits)
def flash_attn_mla(op: Op, inputs: Inputs) -> Run:
    """vLLM's FlashAttention 3, which takes the latent as values beside rotated keys; scheduled before."""
    _check(op)
    module = package("vllm.vllm_flash_attn.flash_attn_interface", inputs)
    cache, rank = LatentCache.fill(op, inputs, VLLM_PAGE), op.kv_lora_rank
    queries = _queries(op, inputs).flatten(0, 1)
    begins = starts(op.batch, op.seq_q, inputs)
    schedule = module.get_scheduler_metadata(
        batch_size=op.batch,
        max_seqlen_q=op.seq_q,
        max_seqlen_k=op.seq_kv,
        num_heads_q=op.heads,
        num_heads_kv=1,
        headdim=op.qk_rope_head_dim,
        cache_seqlens=cache.lengths,
        qkv_dtype=cache.latent.dtype,
        headdim_v=rank,
        page_size=VLLM_PAGE,
        cu_seqlens_q=begins,
        causal=True,
        num_splits=GRAPH_SPLITS,
    )
    return partial(
        module.flash_attn_varlen_func,
        q=queries[..., rank:],
        k=cache.latent[..., rank:].unsqueeze(-2),
        v=cache.latent[..., :rank].unsqueeze(-2),
        q_v=queries[..., :rank],
        max_seqlen_q=op.seq_q,
        cu_seqlens_q=begins,
        max_seqlen_k=op.seq_kv,
        seqused_k=cache.lengths,
        block_table=cache.table,
        softmax_scale=_scale(op),
        causal=True,
        fa_version=3,
        scheduler_metadata=schedule,
        num_splits=GRAPH_SPLITS,
    )


@case("mla_decode", "flashinfer:mla", devices=CUDA, when=sixteen_bits)
def flashinfer_mla(op: Op, inputs: Inputs) -> Run:
    """FlashInfer's wrapper in graph mode over pages of one token, as SGLang has it."""
    _check(op)
    module = package("flashinfer.mla", inputs)
    cache, rank = LatentCache.fill(op, inputs, SGLANG_PAGE), op.kv_lora_rank
    queries = _queries(op, inputs).flatten(0, 1)
    begins, indices = starts(op.batch, cache.table.shape[1], inputs), cache.table.view(-1)
    buffers = {"qo_indptr": starts(op.batch, op.seq_q, inputs), "kv_indptr": begins, "kv_indices": indices}
    wrapper = module.BatchMLAPagedAttentionWrapper(
        workspace(inputs), use_cuda_graph=True, **buffers, kv_len_arr=cache.lengths, backend="auto"
    )
    sizes = (op.heads, rank, op.qk_rope_head_dim, SGLANG_PAGE, op.seq_q > 1, _scale(op))
    wrapper.plan(*buffers.values(), cache.lengths, *sizes, queries.dtype, cache.latent.dtype)
    parts = (queries[..., :rank], queries[..., rank:], cache.latent[..., :rank], cache.latent[..., rank:])
    return partial(wrapper.run, *parts)


@case("mla_decode", "flashinfer:trtllm_mla", devices=CUDA, when=sixteen_bits)
def trtllm_mla(op: Op, inputs: Inputs) -> Run:
    """TensorRT-LLM's generated kernels for SM10x, vLLM's and SGLang's first choice there."""
    _check(op, FP8_CACHE)
    module = package("flashinfer.mla", inputs)
    cache = LatentCache.fill(op, inputs, FLASH_MLA_PAGE)
    return partial(
        module.trtllm_batch_decode_with_kv_cache_mla,
        query=_queries(op, inputs),
        kv_cache=cache.latent.unsqueeze(1),
        workspace_buffer=workspace(inputs),
        qk_nope_head_dim=op.qk_nope_head_dim,
        kv_lora_rank=op.kv_lora_rank,
        qk_rope_head_dim=op.qk_rope_head_dim,
        block_tables=cache.table,
        seq_lens=cache.lengths,
        max_seq_len=op.seq_kv,
        bmm1_scale=_scale(op),
        bmm2_scale=1.0,
    )


# --- prompts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Queries, keys and values of all sequences one after the other, [tokens, heads, dim], and where each begins."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    starts_q: torch.Tensor
    starts_kv: torch.Tensor

    @classmethod
    def fill(cls, op: Op, inputs: Inputs, value_dim: int) -> Prompt:
        """Random operands; values as wide as the kernel takes them."""
        _check(op)
        width = op.qk_nope_head_dim + op.qk_rope_head_dim
        tokens, context = op.batch * op.seq_q, op.batch * op.seq_kv
        query = inputs.normal(tokens, op.heads, width, dtype=op.dtype)
        key = inputs.normal(context, op.heads, width, dtype=op.dtype)
        value = inputs.normal(context, op.heads, value_dim, dtype=op.dtype)
        return cls(query, key, value, starts(op.batch, op.seq_q, inputs), starts(op.batch, op.seq_kv, inputs))


@case("mla_prefill", "vllm:flash_attn", devices=CUDA, when=sixteen_bits)
def vllm_prompt(op: Op, inputs: Inputs) -> Run:
    """vLLM's build of FlashAttention, for whose 2 values are padded to the keys' width."""
    module, generation = vllm_flash_attention(inputs)
    padded = op.qk_nope_head_dim + op.qk_rope_head_dim
    prompt = Prompt.fill(op, inputs, padded if generation == 2 else op.v_head_dim)
    return partial(
        module.flash_attn_varlen_func,
        q=prompt.query,
        k=prompt.key,
        v=prompt.value,
        cu_seqlens_q=prompt.starts_q,
        cu_seqlens_k=prompt.starts_kv,
        max_seqlen_q=op.seq_q,
        max_seqlen_k=op.seq_kv,
        softmax_scale=_scale(op),
        causal=bool(op.causal),
        fa_version=generation,
    )


@case("mla_prefill", "flashinfer:ragged", devices=CUDA, when=sixteen_bits)
def flashinfer_prompt(op: Op, inputs: Inputs) -> Run:
    """FlashInfer's wrapper of prompts without a cache, planned once, as SGLang has it."""
    module = package("flashinfer", inputs)
    prompt = Prompt.fill(op, inputs, op.v_head_dim)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace(inputs), "NHD")
    width = op.qk_nope_head_dim + op.qk_rope_head_dim
    wrapper.plan(
        prompt.starts_q,
        prompt.starts_kv,
        op.heads,
        op.heads,
        width,
        head_dim_vo=op.v_head_dim,
        causal=bool(op.causal),
        sm_scale=_scale(op),
        q_data_type=prompt.query.dtype,
    )
    return partial(wrapper.run, prompt.query, prompt.key, prompt.value)


@case("mla_prefill", "flashinfer:trtllm_ragged", devices=CUDA, when=sixteen_bits)
def trtllm_prompt(op: Op, inputs: Inputs) -> Run:
    """TensorRT-LLM's generated kernels for SM10x, vLLM's first choice there."""
    module = package("flashinfer.prefill", inputs)
    prompt = Prompt.fill(op, inputs, op.v_head_dim)
    return partial(
        module.trtllm_ragged_attention_deepseek,
        query=prompt.query,
        key=prompt.key,
        value=prompt.value,
        workspace_buffer=workspace(inputs),
        seq_lens=lengths(op, inputs),
        max_q_len=op.seq_q,
        max_kv_len=op.seq_kv,
        bmm1_scale=_scale(op),
        bmm2_scale=1.0,
        o_sf_scale=1.0,
        batch_size=op.batch,
        window_left=-1,
        cum_seq_lens_q=prompt.starts_q,
        cum_seq_lens_kv=prompt.starts_kv,
        enable_pdl=False,
        is_causal=bool(op.causal),
        return_lse=False,
    )

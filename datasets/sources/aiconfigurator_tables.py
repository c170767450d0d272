"""What the columns of aiconfigurator's tables mean, one function a table.

``latency`` is milliseconds, the mean of CUDA-graph replays (NCCL: what nccl-tests prints). Where the tables do not say
which convention holds, it was inferred:

- **Attention**: generation KV lengths are ``isl + step``: the steps 1, 3, 7, … 131071 then make powers of two. Heads
  are those of the call: ``num_heads`` is 128 / ``tp_size`` in TensorRT-LLM's MLA tables, so it is per rank already.
- **MoE**: ``num_tokens`` counts the tokens of all expert-parallel ranks and ``inter_size`` a whole expert: at 16,384
  tokens (hidden 6144, inter 2048, 256 experts, H100) 17.6 ms fall to 8.9, 4.5, 2.3, 1.06 with 2, 4, 8, 16 ranks of
  experts, and to 9.7 and 5.7 with 2 and 4 of tensors. The wide tables agree: at 131,072 tokens 11.1 ms on 8 ranks,
  6.1 on 16; a generation step of 4 tokens reads the 8 experts that 32 choices spread over 4 ranks touch.
- **Context MoE of DeepEP** was timed with its host work: 0.39 ms for every small batch, whatever the ranks. On 2 and 4
  ranks that is less than reading the weights of a rank's experts takes, so that it cannot have touched them all.
- **Collectives**: ``message_size`` counts elements: bus bandwidth at 512 MiB is then 445 GB/s on eight H100 (450 by
  NVLink), 335 for all-gather, so that bytes are nccl-tests' (all-gather's the gathered buffer).
- **DeepEP**: ``num_token`` is per rank; dispatch carries fp8 with block scales (1.035 bytes an element by its own
  bandwidth column; in 16 bits it would need 588 GB/s of H100's NVLink), combine bf16. One node is 8 GPUs, of GB200
  and GB300 4. ``trtllm_alltoall`` is per rank too: its time grows with the ranks.
- **mla_bmm**: a batch of heads, ``pre`` tokens x 128 to 512, ``post`` back: H100 then reaches 286 TFLOP/s.
- **computescale** is the difference of two timings (dynamic less static quantization): where nothing is left of it,
  the row falls below what a kernel can take and is rejected as such (all of SGLang's).
- **gemm** in fp8 of TensorRT-LLM includes the quantization of the input: 12 µs at the least where CUTLASS' kernels of
  others take 4.4. Its backend says ``+quantize``.

What a table times that is several ops in one (``*_module``, ``wideep_*_mla``: 0.7 ms where the attention alone takes
17 µs) has no kind and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ..columns import codes
from ..dtypes import itemsize
from .aiconfigurator_sheet import Sheet, canonical
from .tables import Rejected, RowBatch

PCIE = ("l40s", "rtx_pro_6000_server")
GPUS_PER_NODE = {"gb200": 4, "gb300": 4}
COLLECTIVES = {"alltoall": "all_to_all"}
REFUSED = {
    r"_module$|^wideep_(context|generation)_(mla|mlp)$": "times a whole block of ops, which no kind is",
}


def gemm(t: Sheet) -> Iterator[RowBatch]:
    """x[m,k] times the transposed W[n,k]; 16-bit results."""

    def quantizes(framework: str, dtype: str) -> str:
        return "+quantize" if (framework.lower(), dtype) == ("trtllm", "fp8") else ""

    backend = t.backend(quantizes, "framework", "gemm_dtype")
    yield RowBatch("gemm", {**t.numbers(m="m", n="n", k="k"), "layout": "nt", **t.timed("gemm_dtype", backend)})


def mla_bmm(t: Sheet) -> Iterator[RowBatch]:
    """Products with the absorbed projections of MLA's generation, one a head."""
    which = t.integer(lambda name: {"mla_gen_pre": 1, "mla_gen_post": 2}.get(name, 0), "op_name")
    if (which == 0).any():
        yield RowBatch(rejected=(Rejected("unknown op of mla_bmm", int((which == 0).sum()), t.origin.reference),))
    for number, n, k in ((1, 512, 128), (2, 128, 512)):
        sheet = t.where(which == number)
        dims = {**sheet.numbers(batch="num_heads", m="num_tokens"), "n": n, "k": k, "layout": "nn"}
        yield RowBatch("gemm", {**sheet.shared, **dims, **sheet.timed("bmm_dtype")})


def context_attention(t: Sheet) -> Iterator[RowBatch]:
    """Causal attention of a prompt of ``isl`` tokens after ``step`` cached ones."""
    yield _attention(t, "attention_prefill", t.number("isl"), t.number("isl") + t.number("step", 0), "yes")


def encoder_attention(t: Sheet) -> Iterator[RowBatch]:
    """Attention without a mask over ``isl`` tokens, every head with its own keys."""
    yield _attention(t, "attention_prefill", t.number("isl"), t.number("isl"), "no")


def generation_attention(t: Sheet) -> Iterator[RowBatch]:
    """One new token against ``isl + step`` keys, its own included."""
    yield _attention(t, "attention_decode", np.ones(len(t)), t.number("isl") + t.number("step"), "yes")


def _attention(t: Sheet, kind: str, seq_q: np.ndarray, seq_kv: np.ndarray, causal: str) -> RowBatch:
    grouped = "num_key_value_heads" in t.table.column_names
    heads_kv = "num_key_value_heads" if grouped else "num_heads"
    widths = {"head_dim": "head_dim", "v_head_dim": "head_dim"}
    dims = {
        **t.numbers(batch="batch_size", heads_q="num_heads", heads_kv=heads_kv, **widths),
        "seq_q": seq_q,
        "seq_kv": seq_kv,
        "causal": causal,
        "window": t.number("window_size", 0),
        "kv_dtype": t.integer(_kv_dtype, "attn_dtype", "kv_cache_dtype"),
    }
    return RowBatch(kind, {**dims, **t.timed("attn_dtype")})


def context_mla(t: Sheet) -> Iterator[RowBatch]:
    """Multi-head latent attention of a prompt, DeepSeek's dimensions."""
    yield _mla(t, "mla_prefill", t.number("isl"))


def generation_mla(t: Sheet) -> Iterator[RowBatch]:
    """One new token of absorbed MLA against ``isl + step`` cached ones, its own included."""
    yield _mla(t, "mla_decode", np.ones(len(t)))


def _mla(t: Sheet, kind: str, seq_q: np.ndarray) -> RowBatch:
    dims = {
        **t.numbers(batch="batch_size", heads="num_heads"),
        "seq_q": seq_q,
        "seq_kv": t.number("isl") + t.number("step"),
        "kv_dtype": t.integer(_kv_dtype, "mla_dtype", "kv_cache_dtype"),
    }
    return RowBatch(kind, {**dims, **t.timed("mla_dtype")})


def _kv_dtype(dtype: str, kv_dtype: str) -> int:
    """Index of ``kv_dtype`` as the attention kinds have it; -1 for a format that they do not know."""
    if kv_dtype in ("", dtype):
        return 0
    return {"fp8": 1, "int8": 2}.get(kv_dtype, -1)


def moe(t: Sheet) -> Iterator[RowBatch]:
    """Fused experts; ``distribution`` is balanced, or the exponent of a power law of loads."""
    yield RowBatch("fused_moe", _moe(t, t.backend()))


def wideep_moe(t: Sheet) -> Iterator[RowBatch]:
    """Experts of one of many ranks; with EPLB, ``num_slots`` hold the experts and their copies."""
    slots = t.number("num_slots", 0)
    for count in np.unique(slots):
        sheet = t.where(slots == count)
        experts = sheet.number("num_experts")
        copies = f"{count}" if count and (experts != count).any() else ""
        backend = sheet.backend(lambda name, copies=copies: f"+eplb{copies}" if "eplb" in name else "", "distribution")
        yield RowBatch("fused_moe", {**sheet.shared, **_moe(sheet, backend)})


def wideep_context_moe(t: Sheet) -> Iterator[RowBatch]:
    """Experts of DeepEP's normal mode, timed with the host's work."""
    yield RowBatch("fused_moe", {**_moe(t, t.backend()), "timer": "eager"})


def _moe(t: Sheet, backend: pa.Array) -> dict[str, Any]:
    sizes = t.numbers(tokens="num_tokens", hidden="hidden_size", inter="inter_size", topk="topk", experts="num_experts")
    return {
        **sizes,
        **t.numbers(tp="moe_tp_size", ep="moe_ep_size"),
        "gated": t.integer(lambda kernel: int("nongated" not in kernel), "kernel_source"),
        "skew": t.integer(skew, "distribution"),
        **t.timed("moe_dtype", backend),
    }


def skew(distribution: str) -> int:
    """Exponent of a power law of loads in hundredths, 0 = balanced, -1 = unknown."""
    if distribution in ("balanced", "uniform"):
        return 0
    match = re.fullmatch(r"power_law_([0-9.]+)(_eplb)?", distribution)
    return round(float(match[1]) * 100) if match else -1


def nccl(t: Sheet) -> Iterator[RowBatch]:
    """Collectives of nccl-tests inside a node."""
    yield from _collectives(t, "nccl_dtype", {})


def custom_allreduce(t: Sheet) -> Iterator[RowBatch]:
    """The frameworks' own all-reduce, replayed from a graph or called eagerly."""

    def timer(kernel: str) -> str:
        return {"eager": "eager", "graph": "cuda_graph"}.get(kernel.rpartition("_")[2], "imported")

    yield from _collectives(t, "allreduce_dtype", {"timer": timer})


def _collectives(t: Sheet, dtype: str, by_kernel: dict[str, Callable[[str], str]]) -> Iterator[RowBatch]:
    names = t.text(lambda name: COLLECTIVES.get(str(name), str(name)), "op_name")
    which, kinds = codes(names)
    for number, kind in enumerate(kinds):
        sheet = t.where(which == number)
        if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"):
            yield RowBatch(rejected=(Rejected(f"unknown collective {kind!r}", len(sheet), sheet.origin.reference),))
            continue
        sizes = sheet.each(lambda name: _bytes(canonical(name)), dtype)
        element = np.array(sizes[1], dtype=np.float64)[sizes[0]]
        yield RowBatch(
            kind,
            {
                **sheet.shared,
                "size_bytes": sheet.number("message_size") * element,
                "ranks": sheet.number("num_gpus"),
                **_links(sheet),
                "dtype": sheet.dtype(dtype),
                "backend": sheet.backend(),
                "latency_us": sheet.milliseconds(),
                **{column: sheet.text(function, "kernel_source") for column, function in by_kernel.items()},
            },
        )


def _bytes(dtype: str) -> float:
    try:
        return itemsize(dtype)
    except KeyError:
        return 1.0  # an unknown format is rejected as such


def _links(t: Sheet) -> dict[str, Any]:
    system = t.origin.system
    return {"link": "pcie" if system in PCIE else "nvlink", "ranks_per_node": GPUS_PER_NODE.get(system, 8)}


def wideep_deepep_normal(t: Sheet) -> Iterator[RowBatch]:
    """DeepEP's kernels for throughput: dispatch and combine, notification included."""
    yield from _deepep(t, "normal", "{}_transmit_us", "{}_notify_us", "{}_sms")


def wideep_deepep_ll(t: Sheet) -> Iterator[RowBatch]:
    """DeepEP's kernels for low latency."""
    yield from _deepep(t, "low_latency", "{}_avg_t_us", None, None)


def _deepep(t: Sheet, mode: str, time: str, extra: str | None, sms: str | None) -> Iterator[RowBatch]:
    per_node = GPUS_PER_NODE.get(t.origin.system, 8)
    for what, dtype in (("dispatch", "fp8_block"), ("combine", "bf16")):
        yield RowBatch(
            f"ep_{what}",
            {
                **t.numbers(tokens="num_token", hidden="hidden_size", topk="num_topk", experts="num_experts"),
                "ranks": t.number("node_num") * per_node,
                **_links(t),
                "mode": mode,
                "sms": t.number(sms.format(what)) if sms else np.zeros(len(t)),
                "dtype": dtype,
                "backend": t.backend(),
                "latency_us": t.number(time.format(what)) + (t.number(extra.format(what)) if extra else 0.0),
            },
        )


def trtllm_alltoall(t: Sheet) -> Iterator[RowBatch]:
    """TensorRT-LLM's exchange over NVLink; preparing it has no kind."""
    which = t.integer(lambda name: {"alltoall_dispatch": 1}.get(name, 2 * ("combine" in name)), "op_name")
    if (which == 0).any():
        yield RowBatch(
            rejected=(Rejected("alltoall_prepare: no kind for it", int((which == 0).sum()), t.origin.reference),)
        )
    for number, kind in ((1, "ep_dispatch"), (2, "ep_combine")):
        sheet = t.where(which == number)
        backend = sheet.backend(lambda name: "+low_precision" if "low_precision" in name else "", "op_name")
        yield RowBatch(
            kind,
            {
                **sheet.shared,
                **sheet.numbers(tokens="num_tokens", hidden="hidden_size", topk="topk", experts="num_experts"),
                "ranks": sheet.number("moe_ep_size"),
                **_links(sheet),
                **sheet.timed("moe_dtype", backend),
                **({"out_dtype": sheet.dtype("moe_dtype")} if number == 1 else {}),
            },
        )


def computescale(t: Sheet) -> Iterator[RowBatch]:
    """The maxima of a quantization."""
    yield _quantize(t, "scale")


def scale_matrix(t: Sheet) -> Iterator[RowBatch]:
    """The rounding by given scales."""
    yield _quantize(t, "apply")


def _quantize(t: Sheet, part: str) -> RowBatch:
    columns = {"rows": t.number("m"), "cols": t.number("k"), "part": part, "dtype": "bf16"}
    return RowBatch(
        "quantize",
        {**columns, "out_dtype": t.dtype("quant_dtype"), "backend": t.backend(), "latency_us": t.milliseconds()},
    )


TABLES: dict[str, Callable[[Sheet], Iterator[RowBatch]]] = {
    "gemm": gemm,
    "mla_bmm": mla_bmm,
    "context_attention": context_attention,
    "encoder_attention": encoder_attention,
    "generation_attention": generation_attention,
    "context_mla": context_mla,
    "generation_mla": generation_mla,
    "moe": moe,
    "wideep_moe": wideep_moe,
    "wideep_context_moe": wideep_context_moe,
    "wideep_generation_moe": moe,
    "nccl": nccl,
    "custom_allreduce": custom_allreduce,
    "wideep_deepep_normal": wideep_deepep_normal,
    "wideep_deepep_ll": wideep_deepep_ll,
    "trtllm_alltoall": trtllm_alltoall,
    "computescale": computescale,
    "scale_matrix": scale_matrix,
}
"""The tables that can be imported, by their name."""

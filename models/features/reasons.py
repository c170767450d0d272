"""Every feature, or the start of its name, and why it is there."""

from __future__ import annotations

# name, or the start of a name, and the reason. The longest match wins; a feature without one fails a test.
REASONS: dict[str, str] = {
    "size_": "log2 of a dimension: library heuristics switch kernels by size",
    "choice_": "code of a choice (layout, direction, causal, link): another kernel or path",
    "align_": "log2 of the largest power of two that divides it, up to 4096: vector loads, tiles, cache conflicts",
    "pad_": "share of a block of 16, 64, 128 or 256 that is used: the rest of the last tile is wasted work",
    "tail_": "share of compute units busy over all waves for a candidate tile: wave quantization",
    "waves_": "log2 of waves for a candidate tile: how much the last wave weighs",
    "hint_": "a figure of the analytical law: chosen tile, waves, tail, splits, rows a unit, hops, shares of its time",
    "flops": "log2 FLOPs: total arithmetic",
    "bytes": "log2 compulsory bytes: total traffic",
    "intensity": "log2 FLOPs a byte: which side of the ridge",
    "balance": "log2 compute over memory time here: the ridge, where both limit and overlap is imperfect",
    "roofline": "log2 of the roofline time: the scale on which efficiency changes",
    "analytical": "log2 of the analytical time: what is being corrected",
    "overhead": "share of launch and hops in the analytical time: how far latency rules",
    "cache_warm": "share of all bytes that may lie in the last-level cache, 0 where it is cold",
    "cache_fill": "log2 of all bytes over the last-level cache: what warm can mean",
    "reach_": "log2 of one operand over the last-level cache: which operand is re-read from memory",
    "dtype": "code of the input format: other units and instructions",
    "out_dtype": "code of the output format: epilogue and conversions",
    "bits": "log2 of bits an element: orders the formats by rate",
    "skew": "log2 of rows over columns of a product: tall, square, wide kernels",
    "group": "log2 of query heads a KV head, or rows an expert: reuse of one load, packing of heads",
    "pairs": "share of query-key pairs inside the mask: skipped blocks",
    "keys": "log2 of keys a query sees on average, and of keys kept for it: windows end the growth with length",
    "kv_rows": "log2 of KV rows over all heads and sequences: parallelism and traffic of decoding",
    "row_": "log2 of elements of one token over all KV or query heads: copies into the cache, loads of queries",
    "rows_": "log2 of tokens, of rows appended to the cache, of query rows: kernels beside attention work by row",
    "room": "log2 of compute units for each KV head of a sequence: how often its keys can be split",
    "blocks": "log2 of independent blocks of work over compute units: occupancy",
    "message": "log2 of bytes a rank sends: protocol switches (LL, LL128, simple)",
    "nodes": "log2 of nodes a group spans: links change at the border",
    "device_": "log2 of a device figure: lets one model serve several devices; constant within one",
}


def reason(feature: str) -> str:
    """Why a feature is there. KeyError for a name that is no feature."""
    return REASONS[max((start for start in REASONS if feature.startswith(start)), key=len)]


def smooth(feature: str) -> bool:
    """Whether latency varies smoothly along this feature, so that a kernel method may interpolate on it."""
    return not feature.startswith(("choice_", "align_", "pad_", "tail_", "dtype", "out_dtype", "cache_warm"))

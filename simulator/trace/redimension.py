"""One trace of a model serves every batch and length: a step of inference is traced at primes and re-dimensioned.

Every dimension of an op and every size of a tensor is a product of batch, length and what the model is made of. Traced
with a batch and a length that are primes which divide nothing in a model, a number says by its factors how often it
holds either. So the graph of any other batch and length is exact without another trace, which for a large model takes
seconds. Where that does not hold (sliding windows, compressed tokens, experts of a fixed capacity, caches that grow by
copies, routed loads that are not balanced, operators that no kind covers, modules with example inputs of their own) a
step is traced as it is.

A pass over tokens of many sequences (:func:`batch_graph`) is one prompt as long as all of them, of which so many rows
as sequences yield a token go to the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from ...datasets.ops import KINDS, Op, make_op
from ..graph import Graph, Node, Tensor
from . import Model, Workload, trace
from .entry import model_flops
from .models import resolve

BATCH = 1009
LENGTHS = (4099, 1999, 1013, 499, 251, 127)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
COMPRESSION_SETTINGS = ("compress_rates", "compress_ratios")  # layers that see a token for each N: a part of the length
WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size", "layer_types", "max_window_layers")
SORTS = ("aten.sort", "aten.argsort")
RUN_TOTALS = {"run": "numel", "run_bytes": "size_bytes"}  # 0 where one run covers all


def step_graph(
    model: Model, workload: Workload, precision: str, cache_dir: Path | None, windows: bool = False
) -> Graph:
    """The graph of one prefill or decode step, from the model's one trace of that kind where that is exact.

    With ``windows`` that is so for layers with a window too: attention and caches are right then, and what else the
    model's code does about its windows is not, for the caller has no use of it. Raises the errors of :func:`.trace`.
    """
    length, decoding = _prime_length(model, workload, windows), workload.kind == "decode"
    if length:
        batch = BATCH if workload.batch > 1 else 1  # of one sequence, what is shared by all is as large as what is not
        traced = replace(workload, batch=batch, seq_len=length - decoding)
        graph = trace(model, traced, precision, cache_dir)
        if all(node.op is not None or not node.bytes_moved for node, _ in graph.weighted()):
            return resize_graph(graph, workload, length)
    return trace(model, workload, precision, cache_dir)


def _prime_length(model: Model, workload: Workload, windows: bool = False) -> int:
    """The length to trace at: a prime within the model's positions that divides none of its figures; 0 for none.

    With ``windows`` also for models whose layers see no further back than a window.
    """
    source = resolve(model)
    config = source.language
    if (
        source.config is None
        or workload.images
        or workload.training
        or workload.cache != "static"
        or workload.expert_load != "balanced"
    ):
        return 0
    figures = [value for value in _figures(config) if value > 0]
    room = min((config[name] for name in POSITIONS if config.get(name)), default=LENGTHS[0])
    if any(config.get(name) for name in ("expert_capacity", *COMPRESSION_SETTINGS)):  # not in proportion to the length
        return 0
    long = workload.seq_len + (workload.kind == "decode") > room
    windowed = not windows and any(config.get(name) for name in WINDOW_SETTINGS)
    if long or windowed or any(value % BATCH == 0 for value in figures):
        return 0
    return next((p for p in LENGTHS if p <= room and all(value % p for value in figures)), 0)


def _figures(value: Any) -> Iterator[int]:
    """Every whole number of a configuration."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _figures(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _figures(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def resize_graph(graph: Graph, workload: Workload, length: int) -> Graph:
    """A graph traced at a batch of ``BATCH`` and a room of ``length`` tokens, as it is for ``workload``."""
    sizes = ((length, workload.seq_len + (workload.kind == "decode")), (BATCH, workload.batch))

    @cache
    def scale(value: int) -> int:
        for prime, size in sizes:
            power = 0
            while value and value % prime == 0:
                value, power = value // prime, power + 1
            value *= size**power
        return value

    room = sizes[0][1]

    @cache
    def op_at(op: Op) -> Op:
        dims = dict(zip(KINDS[op.kind].names, map(scale, op.dims), strict=True))
        if "seq_kv" in dims:
            dims["seq_kv"] = min(dims["seq_kv"], room)  # of a window, where the room is no larger
        return _replace_dims(op, dims)

    resized = _rewrite_graph(graph, workload, scale, op_at)
    window = _window(graph, length)
    return resized if room >= window else _scale_caches(graph, resized, BATCH * window, Fraction(room, window))


def _window(graph: Graph, length: int) -> int:
    """The widest window that attention saw of a longer room; 0 where it saw all of it."""
    calls = [node.op for node, _ in graph.weighted() if node.op is not None and "seq_kv" in KINDS[node.op.kind].names]
    return max((op.seq_kv for op in calls if op.seq_kv < length), default=0)


def _scale_caches(graph: Graph, resized: Graph, unit: int, factor: Fraction) -> Graph:
    """``resized`` of ``graph`` with caches so many times larger, of those that had a multiple of ``unit`` bytes."""
    tensors = (
        replace(new, size_bytes=int(new.size_bytes * factor))
        if new.role == "cache" and old.size_bytes % unit == 0
        else new
        for old, new in zip(graph.tensors, resized.tensors, strict=True)
    )
    return replace(resized, tensors=tuple(tensors))


def batch_graph(
    model: Model, workload: Workload, samples: int, cached_tokens: int, precision: str, cache_dir: Path | None
) -> Graph:
    """The graph of one prefill of ``workload.seq_len`` tokens that belong to many sequences.

    Attention is that of one sequence, in place of which the caller puts the real ones. ``samples`` rows go to the last
    layer. ``cached_tokens`` tokens are in the caches afterwards. Raises the errors of :func:`.trace`.
    """
    tokens = workload.seq_len
    length = _prime_length(model, replace(workload, seq_len=1), windows=True)
    if length:
        graph = trace(model, replace(workload, batch=BATCH, seq_len=length), precision, cache_dir)
        if all(node.op is not None or not node.bytes_moved for node, _ in graph.weighted()):
            return _pack_sequences(graph, workload, length, samples, cached_tokens)
    graph = trace(model, replace(workload, batch=1), precision, cache_dir)
    return _sample_rows(graph, tokens, samples)


def _pack_sequences(graph: Graph, workload: Workload, length: int, samples: int, cached_tokens: int) -> Graph:
    """A graph traced at ``BATCH`` sequences of ``length`` as one pass of ``workload.seq_len`` tokens of many."""
    tokens = workload.seq_len

    @cache
    def scale(value: int) -> int:
        powers = []
        for prime in (BATCH, length):
            power = 0
            while value and value % prime == 0:
                value, power = value // prime, power + 1
            powers.append(power)
        both = min(powers)
        return value * tokens ** powers[1] * samples ** (powers[0] - both)

    @cache
    def op_at(op: Op) -> Op:
        dims = dict(zip(KINDS[op.kind].names, map(scale, op.dims), strict=True))
        if dims.keys() & {"seq_q", "seq"}:
            dims["batch"] = 1
        return _replace_dims(op, dims)

    return _scale_caches(
        graph, _rewrite_graph(graph, workload, scale, op_at), BATCH * length, Fraction(cached_tokens, tokens)
    )


def _sample_rows(graph: Graph, tokens: int, samples: int) -> Graph:
    """A graph traced as one prompt, whose products of a single row have ``samples`` of them."""

    def node_at(node: Node) -> Node:
        if tokens == 1 or node.kind != "gemm" or node.work.m != 1:
            return node
        op = node.work.replace(m=samples)
        return replace(node, op=op, bytes_moved=int(op.cost.bytes))

    blocks = tuple(replace(block, nodes=tuple(map(node_at, block.nodes))) for block in graph.blocks)
    return replace(graph, blocks=blocks)


def _replace_dims(op: Op, dims: dict[str, int]) -> Op:
    """The op with other dimensions; a run that covers all of them is no run."""
    for run_dim, total_dim in RUN_TOTALS.items():
        if run_dim in dims and dims[run_dim] == dims[total_dim]:
            dims[run_dim] = 0
    return replace(op, dims=tuple(dims.values()))


def _rewrite_graph(graph: Graph, workload: Workload, scale: Callable[[int], int], op_at: Callable[[Op], Op]) -> Graph:
    """The graph with other ops and sizes of tensors."""

    def node_at(node: Node) -> Node:
        if node.op is None:
            return node
        op = _resize_sort(node.op, scale) if node.source in SORTS else op_at(node.op)
        return node if op == node.op else replace(node, op=op, bytes_moved=int(op.cost.bytes))

    blocks = tuple(replace(block, nodes=tuple(map(node_at, block.nodes))) for block in graph.blocks)
    tensors = tuple(Tensor(t.id, scale(t.size_bytes), t.dtype, t.role, t.count) for t in graph.tensors)
    changed = replace(graph, blocks=blocks, tensors=tensors)
    return replace(changed, model_flops=model_flops(changed, workload))


def _resize_sort(op: Op, scale: Callable[[int], int]) -> Op:
    """A sort of all keys, which goes through them once a binary digit of their number."""
    count = op.numel
    passes = next((p for p in range(1, 64) if count % p == 0 and _digits(count // p) == p), 1)
    keys = scale(count // passes)
    return make_op(op.kind, op.dtype, op.out_dtype, numel=keys * _digits(keys), inputs=op.inputs)


def _digits(keys: int) -> int:
    return max(1, math.ceil(math.log2(max(keys, 2))))

"""One trace of a model serves every batch and length: a step of inference is traced at primes and re-dimensioned.

Every dimension of an op and every size of a tensor is a product of batch, length and what the model is made of. Traced
with a batch and a length that are primes which divide nothing in a model, a number says by its factors how often it
holds either. So the graph of any other batch and length is exact without another trace, which for a large model takes
seconds. Where that does not hold (sliding windows, caches that grow by copies, routed loads that are not balanced,
operators that no kind covers, modules with example inputs of their own) a step is traced as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ...datasets.ops import KINDS, Op, make_op
from ..graph import Graph, Node
from . import Model, Workload, trace
from .entry import model_flops
from .models import resolve

BATCH = 1009
LENGTHS = (4099, 1999, 1013, 499, 251, 127)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
WINDOWED = ("sliding_window", "attention_chunk_size", "layer_types", "max_window_layers")
SORTS = ("aten.sort", "aten.argsort")
EVERYTHING = {"run": "numel", "run_bytes": "size_bytes"}  # 0 where one run covers all


def step_graph(model: Model, workload: Workload, precision: str, cache_dir: Path | None) -> Graph:
    """The graph of one prefill or decode step, from the model's one trace of that kind where that is exact.

    Raises the errors of :func:`.trace`.
    """
    length, decoding = _prime_length(model, workload), workload.kind == "decode"
    if length:
        batch = BATCH if workload.batch > 1 else 1  # of one sequence, what is shared by all is as large as what is not
        traced = replace(workload, batch=batch, seq_len=length - decoding)
        graph = trace(model, traced, precision, cache_dir)
        if all(node.op is not None or not node.bytes_moved for node, _ in graph.weighted()):
            return redimensioned(graph, workload, length)
    return trace(model, workload, precision, cache_dir)


def _prime_length(model: Model, workload: Workload) -> int:
    """The length to trace at: a prime within the model's positions that divides none of its figures; 0 for none."""
    config = resolve(model).config
    if config is None or workload.training or workload.cache != "static" or workload.expert_load != "balanced":
        return 0
    figures = [value for value in _figures(config) if value > 0]
    room = min((config[name] for name in POSITIONS if config.get(name)), default=LENGTHS[0])
    long = workload.seq_len + (workload.kind == "decode") > room
    if long or any(config.get(name) for name in WINDOWED) or any(value % BATCH == 0 for value in figures):
        return 0
    return next((p for p in LENGTHS if p <= room and all(value % p for value in figures)), 0)


def _figures(value: Any) -> Iterator[int]:
    """Every whole number of a configuration."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _figures(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _figures(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def redimensioned(graph: Graph, workload: Workload, length: int) -> Graph:
    """A graph traced at a batch of ``BATCH`` and a room of ``length`` tokens, as it is for ``workload``."""
    instead = ((length, workload.seq_len + (workload.kind == "decode")), (BATCH, workload.batch))

    @cache
    def scaled(value: int) -> int:
        for prime, size in instead:
            power = 0
            while value and value % prime == 0:
                value, power = value // prime, power + 1
            value *= size**power
        return value

    @cache
    def op_at(op: Op) -> Op:
        dims = dict(zip(KINDS[op.kind].names, map(scaled, op.dims), strict=True))
        for part, whole in EVERYTHING.items():
            if part in dims and dims[part] == dims[whole]:
                dims[part] = 0
        return replace(op, dims=tuple(dims.values()))

    def node_at(node: Node) -> Node:
        if node.op is None:
            return node
        op = _sorted(node.op, scaled) if node.source in SORTS else op_at(node.op)
        return node if op == node.op else replace(node, op=op, bytes_moved=int(op.cost.bytes))

    blocks = tuple(replace(block, nodes=tuple(map(node_at, block.nodes))) for block in graph.blocks)
    tensors = tuple(replace(each, size_bytes=scaled(each.size_bytes)) for each in graph.tensors)
    made = replace(graph, blocks=blocks, tensors=tensors)
    return replace(made, model_flops=model_flops(made, workload))


def _sorted(op: Op, scaled: Callable[[int], int]) -> Op:
    """A sort of all keys, which goes through them once a binary digit of their number."""
    count = op.numel
    passes = next((p for p in range(1, 64) if count % p == 0 and _digits(count // p) == p), 1)
    keys = scaled(count // passes)
    return make_op(op.kind, op.dtype, op.out_dtype, numel=keys * _digits(keys), inputs=op.inputs)


def _digits(keys: int) -> int:
    return max(1, math.ceil(math.log2(max(keys, 2))))

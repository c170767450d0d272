"""What a trace says that a rank ran, call by call: operators of PyTorch, ops of opcast, collectives and messages.

Of PyTorch's host traces the outermost operators that have a schema are the calls; what lies inside them runs with them.
Of other traces a node that keeps its op, or that communicates, is a call. Calls come in an order in which all ranks can
run them one after another: a collective of one rank never waits for a later one of another.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dtypes import itemsize
from .classes import GAP, OP, SHARE
from .dependencies import topological_order
from .groups import RankedTraces, join_ranks, start_order
from .schema import COMMUNICATION, CollectiveKind, NodeKind, TraceFileError
from .table import ExecutionTrace

COMPLETE_SHARE = 0.999  # an op whose kernels are nodes of their own has run once they sum to this; the rest rounds
HOST_COLLECTIVE = re.compile(r"(?:nccl|gloo|ucc|mpi):([a-z_]+)$")
ANNOUNCEMENT = "record_param_comms"
HOST_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE, "allreduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER, "_all_gather_base": CollectiveKind.ALL_GATHER,
    "_allgather_base": CollectiveKind.ALL_GATHER, "all_gather_into_tensor_coalesced": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER, "_reduce_scatter_base": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL, "alltoall": CollectiveKind.ALL_TO_ALL,
    "alltoall_base": CollectiveKind.ALL_TO_ALL, "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE, "gather": CollectiveKind.GATHER, "scatter": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
}  # fmt: skip
TENSOR_TYPES = {"float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16", "long": "int64",
                "long int": "int64", "int": "int32", "short": "int16", "signed char": "int8", "unsigned char": "uint8",
                "bool": "bool"}  # fmt: skip


@dataclass(frozen=True)
class TraceCall:
    """One call of a rank. ``recorded_us`` is 0 where the trace has no times, as host traces have none.

    An operator of PyTorch has ``schema``, ``values``, ``shapes`` and ``types``; an op of opcast ``op`` (its fields); a
    collective ``collective``, ``size_bytes`` as the trace counts them (of an all-gather a rank's own shard), ``ranks``
    and ``dtype``; a message ``peer`` and ``sends``, with ``tag``.
    """

    node: int
    name: str
    recorded_us: float = 0.0
    schema: str = ""
    values: tuple[Any, ...] = ()
    shapes: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    outputs: tuple[Any, ...] = ()
    op: Mapping[str, Any] = field(default_factory=dict)
    collective: str = ""
    size_bytes: int = 0
    ranks: tuple[int, ...] = ()
    dtype: str = ""
    peer: int = -1
    sends: bool = False
    tag: int = 0

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part."""
        return bool(self.ranks)


def rank_calls(run: RankedTraces) -> dict[int, list[TraceCall]]:
    """The calls of every rank. TraceFileError for traces that would hang."""
    if all(is_host_trace(trace) for trace in run.traces.values()):
        return {rank: list(_host_calls(run, trace)) for rank, trace in run.traces.items()}
    graph = join_ranks(run)
    rank_of = np.zeros(graph.edges.nodes, np.int64)
    for rank, trace in run.traces.items():
        np.maximum.at(rank_of, graph.node[rank], start_order(trace))
    position = np.empty(graph.edges.nodes, np.int64)
    position[topological_order(graph.edges, rank_of)] = np.arange(graph.edges.nodes)
    return {
        rank: list(_node_calls(run, rank, np.argsort(position[graph.node[rank]], kind="stable"))) for rank in run.traces
    }


def is_host_trace(trace: ExecutionTrace) -> bool:
    """Whether a trace is one of PyTorch's host alone: operators with schemas, nothing on devices or with ops."""
    return "op_schema" in trace.names and OP not in trace.names and not np.isin(trace.kind, COMMUNICATION).any()


# --- nodes that keep their op ----------------------------------------------------------------------------


def _node_calls(run: RankedTraces, rank: int, order: np.ndarray) -> Iterator[TraceCall]:
    trace = run.traces[rank]
    texts, groups = trace.text(OP), trace.text("pg_name")
    shares = trace.column(SHARE, 1.0, "double")
    host = trace.column("is_cpu_op", False, "bool").astype(bool)
    kinds, sizes = trace.column("comm_type", -1, "int64"), trace.column("comm_size", 0, "int64")
    ends = {name: trace.column(name, -1, "int32") for name in ("comm_src", "comm_dst", "comm_tag")}
    partial: dict[int, tuple[float, float]] = {}
    for row in order.tolist():
        id, name, duration_us = int(trace.ids[row]), trace.name_of(row), float(trace.exact_us[row])
        kind = trace.kind[row]
        op = op_fields(trace.words[texts[row]]) if texts[row] >= 0 else {}
        if kind == NodeKind.COMM_COLL and not host[row]:
            ranks = run.group(trace.words[groups[row]] if groups[row] >= 0 else "")
            collective = CollectiveKind(int(kinds[row])).name.lower()
            yield TraceCall(id, name, duration_us, op=op, collective=collective, size_bytes=int(sizes[row]),
                            ranks=ranks, dtype=str(op.get("dtype", "")))  # fmt: skip
        elif kind in (NodeKind.COMM_SEND, NodeKind.COMM_RECV) and not host[row]:
            sends = bool(kind == NodeKind.COMM_SEND)
            peer = int(ends["comm_dst" if sends else "comm_src"][row])
            yield TraceCall(id, name, duration_us, collective="message", size_bytes=int(sizes[row]), ranks=(rank, peer),
                            peer=peer, sends=sends, tag=max(int(ends["comm_tag"][row]), 0))  # fmt: skip
        elif op:
            share, spent = partial.pop(int(texts[row]), (0.0, 0.0))
            share, spent = share + float(shares[row]), spent + duration_us
            if share >= COMPLETE_SHARE:
                yield TraceCall(id, name, spent, op=op)
            else:
                partial[int(texts[row])] = share, spent
        elif not host[row] and (texts[row] < 0 or trace.words[texts[row]] != GAP):
            yield TraceCall(id, name, duration_us)


def op_fields(text: str) -> dict[str, Any]:
    """The fields of an op in a trace; none for what is no op."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) and isinstance(fields.get("kind"), str) else {}


# --- PyTorch's host traces -------------------------------------------------------------------------------


def _host_calls(run: RankedTraces, trace: ExecutionTrace) -> Iterator[TraceCall]:
    schemas, within_calls = trace.text("op_schema"), set[int]()
    groups = _announced_groups(trace)
    ids = trace.column("rf_id", 0).astype(np.int64)
    for row in np.argsort(trace.ids, kind="stable").tolist():
        id, name = int(trace.ids[row]), trace.name_of(row)
        is_within = any(int(parent) in within_calls for parent in trace.control.row(row))
        collective = HOST_COLLECTIVE.match(name)
        if collective and collective[1] in HOST_KINDS:
            within_calls.add(id)
            yield _collective(run, trace, row, HOST_KINDS[collective[1]], groups.get(int(ids[row]) - 1, ""))
        elif is_within:
            within_calls.add(id)
        elif schemas[row] >= 0 and (schema := trace.words[schemas[row]]) and not schema.startswith("c10d::"):
            within_calls.add(id)
            sides = [_io_lists(trace, column[row]) for column in (trace.inputs, trace.outputs)]
            yield TraceCall(id, name, schema=schema, values=sides[0][0], shapes=sides[0][1],
                            types=tuple(map(str, sides[0][2])), outputs=sides[1][0])  # fmt: skip


def _announced_groups(trace: ExecutionTrace) -> dict[int, str]:
    """The process group of each call that PyTorch announced, by record function id."""
    groups, ids = trace.text("pg_name"), trace.column("rf_id", 0).astype(np.int64)
    number = trace.words.find(ANNOUNCEMENT)
    rows = np.flatnonzero(trace.name == number) if number >= 0 else np.zeros(0, np.int64)
    return {int(ids[row]): trace.words[groups[row]] for row in rows.tolist() if groups[row] >= 0}


def _collective(
    run: RankedTraces, trace: ExecutionTrace, row: int, kind: CollectiveKind, group: str
) -> TraceCall:  # fmt: skip
    _, shapes, types = _io_lists(trace, trace.inputs[row])
    total, dtype = 0, ""
    for shape, kind_of in zip(
        _flat_shapes(shapes), [tensor_type for text in types for tensor_type in tensor_types(str(text))], strict=False
    ):
        dtype = dtype or TENSOR_TYPES.get(kind_of, "uint8")
        total += int(np.prod(shape, dtype=np.int64)) * int(itemsize(TENSOR_TYPES.get(kind_of, "uint8")))
    ranks = run.group(group)
    return TraceCall(int(trace.ids[row]), trace.name_of(row), collective=kind.name.lower(), size_bytes=total,
                     ranks=ranks, dtype=dtype)  # fmt: skip


def tensor_types(text: str) -> list[str]:
    """``['float']`` of ``Tensor(float)``, each of ``GenericList[Tensor(float),Tensor(long)]``."""
    return re.findall(r"Tensor\(([^()]*(?:::[^()]*)?)\)", text)


def _flat_shapes(shapes: Iterable[Any]) -> Iterator[list[int]]:
    """Shapes of tensors, those in lists one by one."""
    for shape in shapes:
        if isinstance(shape, (list, tuple)) and shape and isinstance(shape[0], (list, tuple)):
            yield from _flat_shapes(shape)
        elif isinstance(shape, (list, tuple)):
            yield [int(size) for size in shape]


def _io_lists(trace: ExecutionTrace, words: np.ndarray) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Values, shapes and types of one side of a node. TraceFileError for what is no list."""
    lists = []
    for number in words.tolist():
        text = trace.words[number] if number >= 0 else "[]"
        try:
            lists.append(tuple(ast.literal_eval(plain_numbers(text))))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise TraceFileError(f"inputs or outputs {text[:60]!r} are no list as Python prints it") from None
    return lists[0], lists[1], lists[2]


def plain_numbers(text: str) -> str:
    """A printed list without ``inf`` and ``nan``, which are no literals of Python."""
    return re.sub(r"(?<![\w'\"<>])(-?)(inf|nan)(?![\w'\"<>])", r"\g<1>1e999", text)

"""What one task of a pipeline stage runs, as nodes of an execution trace: times from the task's start, and what each
node waits for.

A node waits for the one before it on its stream and for those that wrote what it reads. Where it begins later than
these end, the host or the framework keeps it: that time is a node of its own on the same stream, so that a trace that
is simulated again has the same gaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...datasets.dtypes import itemsize
from ...datasets.ops import KINDS, Op
from ...datasets.traces.builder import Attribute
from ...datasets.traces.calls import TENSOR_TYPES
from ...datasets.traces.classes import OP
from ...datasets.traces.gaps import FLOAT_ROUNDING_US
from ...datasets.traces.groups import GROUP_LABEL
from ...datasets.traces.schema import CollectiveKind, NodeKind
from ..graph import Node, Tensor
from ..report.timeline import node_executions
from ..step.state import Step
from ..timing.costs import Costs

NAMED_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
COLLECTIVES = {name: CollectiveKind[name.upper()] for name in NAMED_ALIKE}
COLLECTIVES |= dict.fromkeys(("ep_dispatch", "ep_combine"), CollectiveKind.ALL_TO_ALL)
OFFLOAD_KINDS = {"copy.gradients": "gradients", "copy.weights": "weights", "copy.cache": "kv_cache",
             "copy.out": "activations", "copy.in": "activations"}  # fmt: skip
"""What the copies of :mod:`..passes.offload` bring to the host and back, by the beginning of their source."""
TYPE_NAMES = {dtype: name for name, dtype in TENSOR_TYPES.items()}


@dataclass(frozen=True)
class NodeTemplate:
    """A node of a program without its times: what a trace says of it."""

    name: str
    kind: NodeKind
    attributes: tuple[Attribute, ...]
    inputs: tuple[str, str, str] | None = None
    outputs: tuple[str, str, str] | None = None


@dataclass(frozen=True, eq=False)
class TaskProgram:
    """The nodes of one task. ``start`` and ``end`` [n] in us from its start, ``stream`` [n] their queues.

    ``parents``: (node, node that it waits for) as [2, k].
    """

    templates: Sequence[NodeTemplate]
    stream: np.ndarray
    start: np.ndarray
    end: np.ndarray
    parents: np.ndarray

    @property
    def total_us(self) -> float:
        """When the last node ends."""
        return float(self.end.max(initial=0.0))


@dataclass(frozen=True, eq=False)
class TensorSizes:
    """The tensors of a graph: first id, how many alike, bytes and format, in the order of their ids."""

    first: np.ndarray
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TensorSizes:
        """Those of a graph."""
        by_id = sorted(tensors, key=lambda tensor: tensor.id)
        return cls(np.array([tensor.id for tensor in by_id], np.int64), by_id)

    def io_lists(self, ids: Sequence[int]) -> tuple[str, str, str]:
        """Values, shapes and types as host traces have them: a tensor is [tensor, storage, offset, elements, bytes of
        one, device]; a storage holds one tensor. Shapes are flat: the graph keeps bytes."""
        values, shapes, types = [], [], []
        for id in ids:
            index = int(np.searchsorted(self.first, id, "right")) - 1
            if index < 0 or id >= self.tensors[index].id + self.tensors[index].count:
                continue
            tensor = self.tensors[index]
            name = TYPE_NAMES.get(tensor.dtype, "unsigned char")
            width = int(itemsize(tensor.dtype)) if tensor.dtype in TYPE_NAMES else 1
            count = tensor.size_bytes // width
            values.append([id + 1, id + 1, 0, count, width, "cuda:0"])
            shapes.append([count])
            types.append(f"Tensor({name})")
        return repr(values), repr(shapes), repr(types)


def task_program(step: Step, costs: Costs, phase: str, streams: Sequence[str]) -> TaskProgram:
    """The program of a phase of a chunk; streams are numbered by their place in ``streams``."""
    templates, stream, start, end, parents = [], [], [], [], []
    sizes = TensorSizes.of(costs.graph.tensors)
    last: dict[str, int] = {}
    writer: dict[int, int] = {}
    for position, (node, index, begins, ends) in enumerate(node_executions(costs, phase, step)):
        template = node_template(node, str(costs.engine[index]))
        templates.append(replace(template, inputs=sizes.io_lists(node.reads), outputs=sizes.io_lists(node.writes)))
        stream.append(streams.index(node.stream))
        start.append(begins)
        end.append(ends)
        before = {writer[tensor] for tensor in node.reads if tensor in writer}
        if node.stream in last:
            before.add(last[node.stream])
        parents += [(position, parent) for parent in sorted(before) if end[parent] <= begins + FLOAT_ROUNDING_US]
        last[node.stream] = position
        writer.update(dict.fromkeys(node.writes, position))
    parent_pairs = np.array(parents, np.int64).reshape(-1, 2).T
    return TaskProgram(templates, np.array(stream, np.int64), np.array(start), np.array(end), parent_pairs)


def node_template(node: Node, engine: str) -> NodeTemplate:
    """What a trace says of a node."""
    op = node.op
    name = f"{op.kind if op else node.source} {node.path}".strip()
    attributes: list[Attribute] = [("is_cpu_op", "bool", False)]
    details: list[Attribute] = [("phase", "string", node.phase), ("engine", "string", engine),
                             ("source", "string", node.source)]  # fmt: skip
    if op is None:
        return NodeTemplate(name, NodeKind.COMP, (*attributes, ("tensor_size", "uint64", node.bytes_moved), *details))
    details.append((OP, "string", json.dumps(op.to_dict())))
    if op.kind in COLLECTIVES:
        key = group_key(node.group, op.ranks)
        attributes += [("comm_type", "int64", COLLECTIVES[op.kind]), ("comm_size", "int64", comm_size(op)),
                  ("pg_name", "string", key)]  # fmt: skip
        details.append((GROUP_LABEL, "string", label_key(key)))
        if KINDS[op.kind].family == "expert_parallel":
            details += [("moe_experts", "int64", op.experts), ("moe_topk", "int64", op.topk),
                     ("moe_tokens", "int64", op.tokens), ("moe_bins", "int64_list", expert_tokens(op))]  # fmt: skip
        return NodeTemplate(name, NodeKind.COMM_COLL, (*attributes, *details))
    cost = op.cost
    attributes += [("num_ops", "int64", int(cost.flops)), ("tensor_size", "uint64", int(cost.bytes))]
    kind = NodeKind.COMP
    if op.kind == "copy" and op.to_dict().get("direction") in ("h2d", "d2h"):
        kind = NodeKind.MEM_LOAD if op.to_dict()["direction"] == "h2d" else NodeKind.MEM_STORE
        attributes[-1] = ("tensor_size", "uint64", int(op.size_bytes))
        details += [
            ("offload", "string", what) for start, what in OFFLOAD_KINDS.items() if node.source.startswith(start)
        ]
    return NodeTemplate(name, kind, (*attributes, *details))


def expert_tokens(op: Op) -> list[int]:
    """Tokens that a rank sends to each expert: as even as whole tokens allow, as the exchange is timed."""
    tokens, extra = divmod(op.tokens * op.topk, op.experts)
    return [tokens + (expert < extra) for expert in range(op.experts)]


def comm_size(op: Op) -> int:
    """Bytes as Chakra's converter and ASTRA-sim count them: what a rank puts in, of an all-gather its own shard."""
    if KINDS[op.kind].family == "expert_parallel":
        return int(op.cost.read_bytes)
    return int(op.size_bytes) // max(op.ranks, 1) if op.kind == "all_gather" else int(op.size_bytes)


def group_key(name: str, ranks: int) -> str:
    """A process group of a plan until it is known which rank's it is."""
    return f"@{name}/{ranks}"


def label_key(key: str) -> str:
    """What stands where the group of a key is called by its name, until that is known."""
    return f"={key}"


def key_parts(key: str) -> tuple[str, int]:
    """Name and ranks of :func:`group_key`."""
    name, _, ranks = key.removeprefix("@").partition("/")
    return name, int(ranks)


def streams_of(all_costs: Iterable[Costs]) -> list[str]:
    """All streams, compute first."""
    return list(dict.fromkeys(["compute", *(node.stream for costs in all_costs for node in costs.nodes)]))

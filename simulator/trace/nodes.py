"""From recorded calls to the nodes of a graph: what eager mode really runs, on which storages, until when."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ...datasets.ops import KINDS, Op
from ..graph import Graph, Node, Tensor
from . import image_rules, mixer_rules  # noqa: F401  (their rules are entered)
from .aten import bytes_moved, overwrites, to_op
from .calls import Call, Storage, View
from .fold import renumber_tensors
from .layout import dense, dtype_of, numel

MIN_LOOP_CALLS = 256  # like calls of one module in one pass that are a loop of its code
IN_PLACE = {
    "aten.add": "aten.add_",
    "aten.index_put": "aten._index_put_impl_",
    "aten.scatter": "aten.scatter_",
    "aten.scatter_add": "aten.scatter_add_",
}


def to_eager_calls(calls: Sequence[Call]) -> list[Call]:
    """Calls in the form that torch gives them when nothing records.

    Some places in torch write into a tensor that nobody else holds, unless the tensor is a recorded or fake one:
    the autograd engine adding up gradients (``torch/csrc/autograd/input_buffer.cpp``) and accumulating them in
    ``.grad`` (``accumulate_grad.h``), the gradients of indexing, top-k and gather, which scatter into fresh zeros
    (``FunctionsManual.cpp``), the mask added to the scores of unfused attention
    (``_scaled_dot_product_attention_math``), and the bias of a Linear that cannot be fused (``at::linear``).
    There the result takes over the operand's storage.
    """
    replacements: dict[int, int] = {}
    out: list[Call] = []
    for position, call in enumerate(calls):
        call = _rename_storages(call, replacements)
        target = _in_place_storage(call, calls[position + 1 :][:1])
        if target is not None:
            result = call.outputs[0].storage
            replacements[result] = target
            call = _rename_storages(call, {result: target})
            call.name, call.written, call.outputs = IN_PLACE[call.name], (target,), ()
            call.freed = [storage for storage in call.freed if storage != target]
        out.append(call)
    return out


def _in_place_storage(call: Call, following: Sequence[Call]) -> int | None:
    """The storage that eager mode would update in place where this call was recorded with a new result."""
    if call.name not in IN_PLACE or not call.outputs:
        return None
    first = call.inputs[0]
    if first.storage not in call.freed or not dense(first) or numel(first) != numel(call.outputs[0]):
        return None
    backward = call.phase == "backward"
    if call.name != "aten.add":
        return first.storage if backward and call.inside else None
    summed = backward and not call.inside and not call.of_view
    accumulated = backward and call.inside.endswith("AccumulateGrad")
    masked = bool(following) and following[0].name == "aten._safe_softmax"
    bias = not backward and call.inside == "Linear"
    return first.storage if summed or accumulated or masked or bias else None


def _rename_storages(call: Call, replacements: Mapping[int, int]) -> Call:
    if not replacements:
        return call

    def name(storage: int) -> int:
        while storage in replacements:
            storage = replacements[storage]
        return storage

    def rename_views(value: object) -> object:
        if isinstance(value, View):
            return value._replace(storage=name(value.storage))
        return tuple(map(rename_views, value)) if isinstance(value, tuple) else value

    call.arguments = {key: rename_views(value) for key, value in call.arguments.items()}
    call.inputs = tuple(v._replace(storage=name(v.storage)) for v in call.inputs)
    call.outputs = tuple(v._replace(storage=name(v.storage)) for v in call.outputs)
    call.written = tuple(map(name, call.written))
    call.freed = [name(storage) for storage in call.freed]
    return call


def to_node(call: Call) -> Node:
    """The node of one call; tensors are named by their storage."""
    reads = tuple(dict.fromkeys(view.storage for view in call.inputs if not overwrites(call, view)))
    writes = tuple(dict.fromkeys((*call.written, *(view.storage for view in call.outputs))))
    op, frees = to_op(call), tuple(sorted(set(call.freed)))
    moved = int(op.cost.bytes) if op is not None else bytes_moved(call)
    return Node(op, call.name, call.path, call.phase, reads, writes, moved, frees, call.host)


def to_graph(
    nodes: Sequence[Node], storages: Sequence[Storage], roles: Mapping[int, str]
) -> tuple[list[Node], list[Tensor]]:
    """Nodes and tensors, renumbered so that only storages count which a node uses or which the module holds.

    What is left out was reserved and let go, or belongs to what happened before the step. What no node writes are
    constants that the host hands over (``torch.tensor([-1])``, an index of a cache): inputs.
    """
    written = {t for node in nodes for t in node.writes}
    used = written.union(t for node in nodes for t in node.reads)
    used_storages = [n for n in range(len(storages)) if n in used or roles.get(n) in ("weight", "frozen", "buffer")]
    number = {storage: position for position, storage in enumerate(used_storages)}
    tensors = []
    for old in used_storages:
        storage, role = storages[old], roles.get(old, "activation" if old in written else "input")
        tensors.append(Tensor(number[old], storage.size_bytes, dtype_of(storage.dtype), role))
    used_nodes = [dataclasses.replace(node, frees=tuple(t for t in node.frees if t in number)) for node in nodes]
    return list(renumber_tensors(used_nodes, number)), tensors


def describe_gaps(graph: Graph) -> tuple[str, ...]:
    """One line for each operator that no kind covers, for loops over tokens, and for attention without a kernel."""
    missing: Counter[str] = Counter()
    for node, times in graph.weighted():
        if node.op is None and node.bytes_moved:
            missing[node.source] += times
    uncovered = (
        f"{name}: no op kind covers it; its {count} calls are costed by the bytes they move"
        for name, count in sorted(missing.items())
    )
    return (*uncovered, *_note_loops(graph), *_note_untimed_mixers(graph), *_note_unfused_attention(graph))


def _note_unfused_attention(graph: Graph) -> tuple[str, ...]:
    """A line where no layer attends by a kernel, but by products and a softmax."""
    ops = [(node.path, node.op.kind) for node, _ in graph.weighted() if node.op is not None]
    unfused = any(kind == "softmax" and "att" in path for path, kind in ops)
    if not unfused or any("attention" in kind for _, kind in ops):
        return ()
    return ("attention is timed as transformers writes it out, in products and a softmax: a kernel for it is faster",)


def _note_untimed_mixers(graph: Graph) -> tuple[str, ...]:
    """Lines for mixers of tokens of which no table that comes along has kernels."""
    ops = [node.op for node, _ in graph.weighted() if node.op is not None]
    linear = any(KINDS[op.kind].family == "linear_attention" for op in ops)
    topks = {op.topk for op in ops if op.kind.startswith("sparse_attention")}
    by_physics = "timed by physics, a factor of 3 each way: no table that comes along has its kernels"
    return (
        *(("linear attention (its scans and updates of states) is " + by_physics,) if linear else ()),
        *(
            f"attention to the {topk} tokens that an indexer chooses, and the indexer, is {by_physics}"
            for topk in topks
        ),
    )


def _note_loops(graph: Graph) -> tuple[str, ...]:
    """A line where modules run like calls again and again in Python, as a scan over tokens is written out."""
    alike: Counter[tuple[str, str, str, Op | None]] = Counter()
    runs: dict[tuple[str, str, str, Op | None], int] = {}
    for block in graph.blocks:
        for node in block.nodes:
            key = node.path, node.phase, node.source, node.op
            layers, turns = (block.repeat, 1) if block.stack else (1, block.repeat)
            alike[key] += turns
            runs[key] = runs.get(key, 0) + turns * layers
    loop_keys = [key for key, count in alike.items() if count >= MIN_LOOP_CALLS]
    if not loop_keys:
        return ()
    calls, where = sum(runs[key] for key in loop_keys), max(loop_keys, key=lambda key: alike[key])[0] or graph.name
    return (
        f"{where} and modules like it: {calls} calls of a loop that the model's code writes out, such as a scan; "
        "kernels that fuse such a loop are far faster, so this step is an upper bound",
    )

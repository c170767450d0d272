"""A graph that does not fit together is told by its first fault, in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.ops import make_op
from opcast.simulator.graph import Block, Graph, Node, Tensor
from opcast.simulator.passes import order, verify
from opcast.simulator.passes.custom import load_pass
from opcast.simulator.passes.order import KEEPS_FLOPS, TRAINING, apply_passes
from opcast.simulator.passes.verify import GraphError, tensor_flops, verify_flops
from opcast.simulator.question.plan import Parallel, Plan, PlanError
from opcast.simulator.question.stack import load_stack
from opcast.simulator.trace import Workload, trace

PRODUCT = make_op("gemm", m=8, n=8, k=8)
PLAN = Plan(Parallel(), load_cluster("dgx_h100"))
BROKEN = """
from dataclasses import replace

def frees_weights(graph, plan):
    first, *rest = graph.blocks
    node, *nodes = first.nodes
    nodes = [replace(node, frees=(*node.frees, *node.reads)), *nodes]
    return replace(graph, blocks=(replace(first, nodes=(*nodes,)), *rest))
"""


def node(reads: tuple[int, ...], writes: tuple[int, ...], frees: tuple[int, ...] = (), **changed: Any) -> Node:
    return replace(Node(PRODUCT, "aten.mm", "mlp", "forward", reads, writes, 8, frees), **changed)


def graph(*blocks: Block) -> Graph:
    """Two weights, then six activations, the last one empty."""
    tensors = (
        Tensor(0, 128, "bf16", "weight", 2),
        Tensor(2, 128, "bf16", "activation", 5),
        Tensor(7, 0, "int8", "activation"),
    )
    return Graph("small", blocks, tensors, 128, 0.0)


def is_product(each: Node) -> bool:
    return each.op is not None and each.op.kind == "gemm"


def halved(each: Node) -> Node:
    assert each.op is not None
    return replace(each, op=each.op.replace(k=max(each.op.k // 2, 1)))


def with_nodes(given: Graph, change: Callable[[tuple[Node, ...]], list[Node]]) -> Graph:
    """The graph with the nodes of every block changed."""
    return replace(given, blocks=tuple(replace(each, nodes=tuple(change(each.nodes))) for each in given.blocks))


CHAIN = Block((node((0,), (2,)), node((2, 1), (3,), (2,)), node((3, 7), (4,), (3,))))
LAYERS = Block((node((2, 0), (3,), (2,)),), repeat=3, steps={2: 1, 3: 1})  # 2 to 3, 3 to 4, 4 to 5


def test_a_sound_graph_passes() -> None:
    verify.verify(graph(CHAIN))
    verify.verify(graph(Block((node((0,), (2,)),)), LAYERS))
    verify.verify(graph())


@pytest.mark.parametrize(
    ("blocks", "wrong"),
    [
        ((Block((node((2,), (3,)),)),), "reads tensor 2 before it is written"),
        ((Block((node((2,), (3,)), node((0,), (2,)))),), "reads tensor 2 before it is written"),
        ((LAYERS,), "reads tensor 2 before it is written"),
        ((Block((node((0,), (2,), (2,)), node((2,), (3,)))),), "uses tensor 2 after it was freed"),
        ((Block((node((0,), (2,), (2,)), node((0,), (3,), (2,)))),), "uses tensor 2 after it was freed"),
        ((Block((node((0,), (2,)),)), LAYERS, Block((node((4,), (6,)),))), "uses tensor 4 after it was freed"),
        ((Block((node((0,), (8,)),)),), "uses tensor 8 of 8"),
        ((Block((node((-1,), (2,)),)),), "uses tensor -1 of 8"),
        ((Block((node((0,), (2,), phase="sideways"),)),), "phase 'sideways', which is none of forward"),
        ((Block((node((0,), (2,), group="dq"),)),), "group 'dq', which is none of tp"),
        ((Block((node((0,), (2,), stream="compte"),)),), "stream 'compte'"),
        ((Block((node((0,), (2,), op=make_op("all_reduce", size_bytes=8, ranks=2, ranks_per_node=2)),)),), "no group"),
        ((Block((node((0,), (2,)),), repeat=0),), "repeats 0 times"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(blocks: tuple[Block, ...], wrong: str) -> None:
    with pytest.raises(GraphError, match=wrong) as said:
        verify.verify(graph(*blocks))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        ((Tensor(1, 8, "bf16", "weight"),), "tensor 1 stands where 0 follows"),
        ((Tensor(0, 8, "bf16", "weigth"),), "role 'weigth'"),
        ((Tensor(0, -8, "bf16", "weight"),), "-8 bytes"),
    ],
)
def test_tensors_follow_each_other_in_known_roles(tensors: tuple[Tensor, ...], wrong: str) -> None:
    with pytest.raises(GraphError, match=wrong):
        verify.verify(replace(graph(), tensors=tensors))


def test_flops_that_get_lost_are_told() -> None:
    assert tensor_flops(graph(CHAIN)) == 3 * 2 * 8**3
    verify_flops(graph(CHAIN), graph(CHAIN))
    with pytest.raises(GraphError, match="products and attention have 2048 FLOPs, 3072 before"):
        verify_flops(graph(CHAIN), graph(Block(CHAIN.nodes[:2])))


def test_every_pass_of_opcast_is_checked_where_that_is_switched_on(
    small_model: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = trace(small_model("llama", layers=4), Workload("train", batch=2, seq_len=16), "bf16")
    plan = replace(PLAN, parallel=Parallel(tp=2, zero_stage=1), stack=load_stack("megatron"))
    assert verify.EVERY_PASS, "conftest.py switches it on"
    apply_passes(traced, plan)

    def loses_products(given: Graph, plan: Plan) -> Graph:
        return with_nodes(given, lambda nodes: [each for each in nodes if not is_product(each)])

    with pytest.raises(GraphError, match=r"^pass loses_products: .* reads tensor \d+ before it is written"):
        apply_passes(traced, plan, (*TRAINING, loses_products))
    monkeypatch.setattr(verify, "EVERY_PASS", False)
    apply_passes(traced, plan, (*TRAINING, loses_products))

    def halves_products(given: Graph, plan: Plan) -> Graph:
        return with_nodes(given, lambda nodes: [halved(each) if is_product(each) else each for each in nodes])

    monkeypatch.setattr(verify, "EVERY_PASS", True)
    apply_passes(traced, plan, (halves_products,))  # promises nothing
    monkeypatch.setattr(order, "KEEPS_FLOPS", KEEPS_FLOPS | {halves_products})
    with pytest.raises(GraphError, match=r"^pass halves_products: products and attention have"):
        apply_passes(traced, replace(plan, micro_batches=2), (halves_products,))


def test_a_pass_of_ones_own_is_always_checked(
    small_model: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_unsound_pass.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "EVERY_PASS", False)
    traced = trace(small_model("llama", layers=4), Workload("train", batch=2, seq_len=16), "bf16")
    with pytest.raises(PlanError, match=r"pass 'my_unsound_pass:frees_weights' made a graph .* after it was freed"):
        load_pass("my_unsound_pass:frees_weights")(traced, PLAN)

"""Blocks unroll to what they stand for; tensors are found by id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.ops import make_op
from opcast.simulator.graph import Block, Graph, HostCalls, Node, Tensor, join_tensors, layer_of, shift_path

OP = make_op("gemm", m=4, n=4, k=4)


def node(path: str, reads: tuple[int, ...], writes: tuple[int, ...], frees: tuple[int, ...] = ()) -> Node:
    return Node(OP, "aten.mm", path, "forward", reads, writes, 96, frees, HostCalls(views=1))


# Three layers h -> h' with a weight each (ids 4 to 6) and a shared table (7); the input (0) is kept by the caller.
LAYERS = Block(
    (node("net.layers.0.mlp", (0, 4, 7), (1,), (0,)),),
    repeat=3,
    steps={0: 1, 1: 1, 4: 1},
    stack="net.layers",
    stride=1,
    uneven={(0, 0): (), (-1, 0): (0, 7)},
)
# The same layers in reverse, reading what each had read.
REVERSE = Block(
    (node("net.layers.2.mlp", (2, 6), (8,)),), repeat=3, steps={2: -1, 6: -1}, stack="net.layers", stride=-1
)
GRAPH = Graph(
    "net", (LAYERS, REVERSE), (Tensor(0, 64, "bf16", "activation", 4), Tensor(4, 32, "bf16", "weight", 5)), 1, 1.0
)


def test_a_block_unrolls_to_its_repetitions():
    nodes = list(GRAPH.nodes())
    assert [n.reads for n in nodes] == [(0, 4, 7), (1, 5, 7), (2, 6, 7), (2, 6), (1, 5), (0, 4)]
    assert [n.writes for n in nodes] == [(1,), (2,), (3,), (8,), (8,), (8,)]
    assert [n.frees for n in nodes[:3]] == [(), (1,), (2, 7)]
    assert [n.path for n in nodes] == [f"net.layers.{i}.mlp" for i in (0, 1, 2, 2, 1, 0)]


def test_unrolling_twice_changes_nothing():
    unrolled = GRAPH.unrolled()
    assert len(unrolled.blocks) == 1
    assert list(unrolled.nodes()) == list(GRAPH.nodes())
    assert unrolled.unrolled() == unrolled


def test_weights_of_nodes_are_their_repetitions():
    assert [(n.path, times) for n, times in GRAPH.weighted()] == [("net.layers.0.mlp", 3), ("net.layers.2.mlp", 3)]


def test_tensors_are_found_by_id():
    assert GRAPH.tensor_count == 9
    assert GRAPH.tensor(3).role == "activation"
    assert GRAPH.tensor(4).role == "weight"
    assert GRAPH.tensor_bytes.tolist() == [64] * 4 + [32] * 5
    with pytest.raises(IndexError, match="tensor 9 is not in net"):
        GRAPH.tensor(9)
    with pytest.raises(IndexError):
        GRAPH.tensor(-1)


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["bf16", "fp32"]), st.sampled_from(["weight", "cache"]))))
def test_runs_say_the_same_in_fewer_words(described: list[tuple[int, str, str]]):
    tensors = join_tensors(described)
    assert [(t.size_bytes, t.dtype, t.role) for t in tensors for _ in range(t.count)] == described
    assert [t.id for t in tensors] == [sum(u.count for u in tensors[:i]) for i in range(len(tensors))]
    assert all(a[1:4] != b[1:4] for a, b in zip(map(fields, tensors), map(fields, tensors[1:]), strict=False))


def fields(tensor: Tensor) -> tuple[int, int, str, str]:
    return tensor.id, tensor.size_bytes, tensor.dtype, tensor.role


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.12.mlp", ("model.layers", 12)),
        ("3.0", ("", 3)),
        ("h.7", ("h", 7)),
        ("model.norm2.x", None),
        ("", None),
        ("a.1.experts.4.up", ("a", 1)),
    ],
)
def test_the_layer_of_a_path_is_its_outermost_number(path: str, layer: tuple[str, int] | None):
    assert layer_of(path) == layer


def test_paths_move_only_in_their_stack():
    assert shift_path("model.layers.9.experts.4.up", "model.layers", 3) == "model.layers.12.experts.4.up"
    assert shift_path("decoder.layers.9", "model.layers", 3) == "decoder.layers.9"
    assert shift_path("4.weight", "", -2) == "2.weight"

"""Folding loses nothing, joins only what is alike, and tracing a few layers equals tracing all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.ops import make_op
from opcast.simulator.graph import Graph, Node, Tensor
from opcast.simulator.trace import Workload, entry
from opcast.simulator.trace.build import build, build_structure, load_config
from opcast.simulator.trace.capture import capture
from opcast.simulator.trace.deepen import DeepenError, add_unread_tensors, deepen
from opcast.simulator.trace.depth import plan_depth
from opcast.simulator.trace.fold import assemble, fold
from opcast.simulator.trace.models import resolve

Config = dict[str, Any]
ABOUT: dict[str, Any] = {"name": "net", "parameters": 1, "model_flops": 1.0}


def assert_isomorphic(one: Graph, other: Graph) -> None:
    """The same nodes in the same order on the same tensors, whatever their numbers."""
    names: dict[int, int] = {}
    back: dict[int, int] = {}
    first, second = list(one.nodes()), list(other.nodes())
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert (a.op, a.source, a.path, a.phase, a.bytes_moved, a.host) == (
            b.op,
            b.source,
            b.path,
            b.phase,
            b.bytes_moved,
            b.host,
        )
        assert (len(a.reads), len(a.writes), len(a.frees)) == (len(b.reads), len(b.writes), len(b.frees))
        for x, y in zip((*a.reads, *a.writes), (*b.reads, *b.writes), strict=True):
            assert names.setdefault(x, y) == y
            assert back.setdefault(y, x) == x
            assert describe(one.tensor(x)) == describe(other.tensor(y))
        assert {names.get(x, -1) for x in a.frees} == set(b.frees)
    assert sorted(map(describe, every(one))) == sorted(map(describe, every(other)))


def describe(tensor: Tensor) -> tuple[int, str, str]:
    return tensor.size_bytes, tensor.dtype, tensor.role


def every(graph: Graph) -> list[Tensor]:
    return [graph.tensor(i) for i in range(graph.tensor_count)]


# --- made-up networks ----------------------------------------------------------------------------------------


class Maker:
    """Nodes and tensors of a network of layers, forward and backward."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.nodes: list[Node] = []

    def tensor(self, size: int, role: str = "activation") -> int:
        self.tensors.append(Tensor(len(self.tensors), size, "bf16", role))
        return len(self.tensors) - 1

    def node(
        self, m: int, path: str, phase: str, reads: list[int], writes: list[int], frees: list[int] | None = None
    ) -> None:
        op = make_op("gemm", m=m, n=1, k=1)
        self.nodes.append(Node(op, "aten.mm", path, phase, tuple(reads), tuple(writes), m, tuple(frees or ())))

    def graph(self) -> Graph:
        return assemble(self.nodes, self.tensors, **ABOUT)


def network(pattern: list[int], training: bool, keeps_input: bool, reads_saved: bool = True, sizes: int = 8) -> Graph:
    """Layers of the kinds in ``pattern``; a layer of kind k runs k + 1 products with its weight and a shared table.

    Backward frees what forward saved, after reading it or (``reads_saved`` False) without.
    """
    make = Maker()
    table, hidden = make.tensor(5, "buffer"), make.tensor(sizes)
    make.node(1, "embed", "forward", [], [hidden])
    saved: list[tuple[int, list[int], list[int]]] = []
    for index, kind in enumerate(pattern):
        weights, inner, start = [], [], hidden
        for step in range(kind + 1):
            weight, out = make.tensor(3, "weight"), make.tensor(sizes)
            last = step == kind
            frees = [] if training or not last or (keeps_input and index == 0) else [start]
            make.node(2 + step, f"net.layers.{index}", "forward", [hidden, weight, table], [out], frees)
            weights.append(weight)
            inner.append(hidden)
            hidden = out
        saved.append((kind, weights, inner))
    make.node(9, "norm", "forward", [hidden], [make.tensor(2)])
    if training:
        gradient = make.tensor(sizes)
        make.node(9, "norm", "backward", [hidden], [gradient])
        for index, (_, weights, inner) in reversed(list(enumerate(saved))):
            for weight, kept in zip(reversed(weights), reversed(inner), strict=True):
                own, out = make.tensor(3, "gradient"), make.tensor(sizes)
                frees = [gradient, kept] + ([table] if index == 0 and weight == weights[0] else [])
                read = [gradient, weight, table] + ([kept] if reads_saved else [])
                make.node(7, f"net.layers.{index}", "backward", read, [own, out], frees)
                gradient = out
    return make.graph()


patterns = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(1, 5)).map(lambda p: p[0] * p[1]),
)


@given(patterns, st.booleans(), st.booleans(), st.booleans())
def test_unrolling_a_folded_graph_gives_it_back(pattern: list[int], training: bool, keeps: bool, reads_saved: bool):
    graph = network(pattern, training, keeps, reads_saved)
    assert_isomorphic(graph, fold(graph))


@given(patterns, st.booleans(), st.booleans())
def test_folding_is_settled_at_once(pattern: list[int], training: bool, keeps_input: bool):
    folded = fold(network(pattern, training, keeps_input))
    assert fold(folded) == folded


@given(st.integers(3, 12), st.booleans(), st.booleans(), st.booleans())
def test_equal_layers_become_one_block(layers: int, training: bool, keeps_input: bool, reads_saved: bool):
    folded = fold(network([1] * layers, training, keeps_input, reads_saved))
    assert [b.repeat for b in folded.blocks if b.repeat > 1] == [layers] * (2 if training else 1)


@given(st.integers(3, 6), st.integers(3, 6))
def test_distinct_layers_stay_distinct(dense: int, sparse: int):
    folded = fold(network([0] * dense + [2] * sparse, training=True, keeps_input=False))
    assert [(b.repeat, b.stride) for b in folded.blocks if b.repeat > 1] == [
        (dense, 1),
        (sparse, 1),
        (sparse, -1),
        (dense, -1),
    ]


def test_alternating_layers_are_one_block_of_two():
    folded = fold(network([0, 1] * 4, training=True, keeps_input=False))
    assert [(b.repeat, b.stride) for b in folded.blocks if b.repeat > 1] == [(4, 2), (4, -2)]


def test_layers_that_differ_in_wiring_alone_are_kept_apart():
    graph = network([0] * 6, training=False, keeps_input=False)
    nodes = list(graph.nodes())
    skipped = nodes[3]  # the third layer reads what the first one read, too
    nodes[3] = Node(
        *[getattr(skipped, f) for f in ("op", "source", "path", "phase")],
        (1, *skipped.reads[1:]),
        skipped.writes,
        skipped.bytes_moved,
        skipped.frees,
    )
    crooked = assemble(nodes, graph.tensors, **ABOUT)
    folded = fold(crooked)
    assert_isomorphic(crooked, folded)
    assert max(b.repeat for b in folded.blocks) < 6


@given(st.integers(3, 6), st.integers(1, 9), st.booleans(), st.booleans(), st.sampled_from([[1], [0, 1], [2, 0, 1]]))
def test_more_repetitions_are_more_layers(few: int, more: int, training: bool, keeps: bool, kinds: list[int]):
    short = fold(network(kinds * few, training, keeps))
    long = fold(network(kinds * (few + more), training, keeps))
    assert deepen(short, "net.layers", 0, more * len(kinds)) == long


@given(st.integers(3, 5), st.integers(1, 9))
def test_only_the_tail_grows(few: int, more: int):
    short = fold(network([2] * 3 + [0] * few, training=True, keeps_input=True))
    long = fold(network([2] * 3 + [0] * (few + more), training=True, keeps_input=True))
    assert deepen(short, "net.layers", 3, more) == long


def test_deepening_refuses_what_it_cannot_know():
    odd = fold(network([0, 1] * 3, training=False, keeps_input=False))
    with pytest.raises(DeepenError, match="not whole repetitions"):
        deepen(odd, "net.layers", 0, 3)
    with pytest.raises(DeepenError, match="not one block"):
        deepen(fold(network([0, 0], False, False)), "net.layers", 0, 3)
    graph = network([1] * 4, training=False, keeps_input=False)
    peek = next(n for n in graph.nodes() if n.path == "net.layers.2").writes
    nodes = [*graph.nodes(), Node(None, "aten.peek", "head", "forward", peek, (), 1)]
    with pytest.raises(DeepenError, match="used outside of it"):
        deepen(fold(assemble(nodes, graph.tensors, **ABOUT)), "net.layers", 0, 3)


# --- real models -------------------------------------------------------------------------------------------


CASES = [
    *((family, "train") for family in ("llama", "qwen3_moe", "mixtral", "gpt2", "deepseek_v3", "gemma2", "mistral")),
    *((family, "prefill") for family in ("llama", "mistral", "deepseek_v3")),
    *((family, "decode") for family in ("gpt2", "qwen3_moe", "gemma2")),
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_few_layers_stand_for_all(family: str, kind: str, small_model: Callable[..., Config]):
    """Tracing every layer folds without loss, and into just what tracing a few of them says."""
    layers = 8 if family == "gemma2" else 6  # gemma alternates: three rounds of two are the least
    workload, source = Workload(kind, 2, 16, optimizer="none"), resolve(small_model(family, layers))
    config = load_config(source)
    planned = plan_depth(build_structure(source, workload, "bf16", config), config)
    assert planned is not None
    assert planned.traced < layers
    step = capture(lambda: build(source, workload, "bf16"), workload)
    whole = assemble(step.nodes, step.tensors, name=source.name, parameters=step.parameters, model_flops=0.0)
    folded = fold(whole)
    assert_isomorphic(whole, folded)
    assert sum(len(block.nodes) for block in folded.blocks) < len(step.nodes) / 2
    assert entry._trace_few_layers(source, workload, "bf16") == folded


@pytest.mark.parametrize(
    ("family", "trained"),
    [("llama", {"lora_rank": 4, "kbit": True}), ("qwen3_moe", {"lora_rank": 4}), ("llama", {"frozen": "embed_tokens"})],
)
def test_a_few_layers_stand_for_all_of_a_model_that_is_partly_frozen(
    family: str, trained: dict[str, Any], small_model: Callable[..., Config]
):
    """The first layer's backward pass ends at its adapters, so it is none of those that repeat."""
    source, workload = resolve(small_model(family, 6)), Workload("train", 2, 16, **trained)
    few = entry._trace_few_layers(source, workload, "bf16")
    assert few is not None
    assert few == entry._trace_folded(source, workload, "bf16", None)


def test_dense_layers_before_experts_and_alternating_windows_stay_apart(small_model: Callable[..., Config]):
    mixed = entry.trace(small_model("deepseek_v3", 9, first_k_dense_replace=3), Workload("train", 1, 8))
    assert [(b.repeat, b.stride) for b in mixed.blocks if b.repeat > 1] == [(3, 1), (6, 1), (6, -1), (3, -1)]
    sliding = entry.trace(small_model("gemma2", 8), Workload("train", 1, 16))
    assert [(b.repeat, b.stride) for b in sliding.blocks if b.repeat > 1] == [(4, 2), (4, -2)]
    block = next(b for b in sliding.blocks if b.repeat > 1)
    reads = [n.reads for n in block.nodes if n.source == "aten._safe_softmax" or "softmax" in n.source]
    assert len(reads) == 2


def test_a_model_whose_last_layers_differ_is_traced_whole(small_model: Callable[..., Config]):
    types = ["full_attention"] * 5 + ["sliding_attention"]
    config = small_model("gemma2", 6, layer_types=types)
    source, workload = resolve(config), Workload("prefill", 1, 16)
    loaded = load_config(source)
    assert plan_depth(build_structure(source, workload, "bf16", loaded), loaded) is None
    graph = entry.trace(config, workload, "bf16")
    assert [b.repeat for b in graph.blocks if b.repeat > 1] == [5]


def test_what_no_node_reads_is_held_by_every_layer():
    """Sinks of gpt-oss are part of the fused attention kernel: no node of the graph reads them."""
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 256, "head_dim": 16}
    types = ["sliding_attention", "full_attention"] * 4
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "pad_token_id": 0}
    config = dict(resolve("gpt_oss_20b").config or {}) | narrow | heads
    source = resolve(config | {"num_hidden_layers": 8, "layer_types": types, "eos_token_id": 0})
    workload = Workload("prefill", 1, 16, attention="fused", optimizer="none")
    whole = entry._trace_folded(source, workload, "bf16", None)
    assert entry._trace_few_layers(source, workload, "bf16") == whole
    unread = {(t.size_bytes, t.count) for t in add_unread_tensors(whole, 8, 2).tensors} - {
        (t.size_bytes, t.count) for t in whole.tensors
    }
    assert unread == {(4 * 2, 10)}


@pytest.mark.parametrize(
    ("model", "period"), [("qwen3_next_80b_a3b", 4), ("qwen3_5_397b_a17b", 4), ("llama4_scout", 4), ("glm4_9b", 1)]
)
def test_an_index_that_some_layers_have_or_a_list_lists_makes_no_difference(model: str, period: int):
    source, workload = resolve(model), Workload("prefill", 1, 16)
    config = load_config(source)
    planned = plan_depth(build_structure(source, workload, "bf16", config), config)
    assert planned is not None
    assert planned.traced == 3 * period


def test_ids_of_tokens_as_many_as_layers_are_none_of_their_settings(small_model: Callable[..., Config]):
    source, workload = resolve(small_model("llama", 6, eos_token_id=[1, 2, 3])), Workload("prefill", 1, 16)
    assert entry._trace_few_layers(source, workload, "bf16") is not None

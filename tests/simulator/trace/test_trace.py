"""Tracing: the same operators as a real run, in the same order, on the same shapes, with the same memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opcast.datasets.ops import Op
from opcast.simulator.graph import Graph, Node
from opcast.simulator.trace import TraceError, Workload, trace
from opcast.simulator.trace.aten import gemm_op, imbalance, to_op
from opcast.simulator.trace.build import build
from opcast.simulator.trace.calls import Call, View
from opcast.simulator.trace.capture import record
from opcast.simulator.trace.layout import contiguous_run
from opcast.simulator.trace.models import resolve
from opcast.simulator.trace.nodes import to_eager_calls
from opcast.simulator.trace.steps import prepare, training_step
from opcast.simulator.trace.values import expert_counts, mask_window, route_balanced
from opcast.simulator.trace.workload import LOGITS
from opcast.tests.simulator.peaks import peak_of_new_tensors, torch_peak

Config = dict[str, Any]
Seen = tuple[str, tuple[tuple[int, ...], ...]]

FAMILIES = ("llama", "qwen3_moe", "mixtral", "gpt2", "deepseek_v3", "gemma2", "mistral")
# Calls that only make a view, reserve memory or wrap a number: no nodes.
WORKLESS = set(
    (
        "detach detach_ t view transpose slice unsqueeze expand select alias _unsafe_view as_strided permute split "
        "split_with_sizes unbind squeeze diagonal lift_fresh _reshape_alias empty new_empty new_empty_strided "
        "empty_strided empty_like resolve_conj resolve_neg result_type is_nonzero requires_grad_ unfold scalar_tensor"
    ).split()
)


# --- what a real run does ----------------------------------------------------------------------------------


@cache
def is_composite(name: str) -> bool:
    """Whether an operator only calls others, so that those are what runs."""
    namespace, _, operator = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None) if operator else None
    if packet is None or namespace not in ("aten", "transformers"):
        return True
    verdicts = []
    for overload in (name for name in packet.overloads() if not name.endswith("out")):
        full = name if overload == "default" else f"{name}.{overload}"
        try:
            implicit = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
            verdicts.append(implicit and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"))
        except RuntimeError:  # overloads for TorchScript only
            continue
    return all(verdicts)


def shapes_of(event: Any) -> tuple[tuple[int, ...], ...]:
    inputs = event.extra_fields.inputs
    found = [tuple(i.sizes) for i in tree_leaves(list(inputs)) if type(i).__name__ == "_TensorMetadata"]
    return tuple(shape for shape in found if shape)


def walk(event: Any) -> Iterator[Seen]:
    """The operators under a profiler event that do work themselves."""
    name = event.name.rpartition("::")[2]
    if is_composite(event.name):
        for child in event.children:
            yield from walk(child)
    elif name not in WORKLESS:
        if name.endswith("_"):  # autograd keeps what an in-place operator overwrites
            yield from (("clone", shapes_of(child)) for child in event.children if child.name == "aten::clone")
        yield "zeros" if name == "new_zeros" else name, () if name == "new_zeros" else shapes_of(event)


def profiled(run: Callable[[], object]) -> Any:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as recorded:
        kept = run()  # the caller of a model holds its output
    del kept
    return recorded.profiler.kineto_results.experimental_event_tree()


def real_step(config: Config, workload: Workload, precision: str) -> Callable[[], object]:
    """The step that the trace stands for, on real weights."""
    torch.manual_seed(0)
    module = build(resolve(config), workload, precision).module
    if workload.training:
        step = training_step(module, workload)
        step()
        return step
    with torch.no_grad():
        prepared = prepare(module, workload)

    def forward() -> object:
        with torch.no_grad():
            return prepared.run()

    return forward


# --- what the trace says -----------------------------------------------------------------------------------


def traced(config: Config, workload: Workload, precision: str) -> list[Seen]:
    tracer, _, _ = record(lambda: build(resolve(config), workload, precision), workload)
    return [seen(call) for call in to_eager_calls(tracer.calls) if call.name.partition(".")[2] not in WORKLESS]


def seen(call: Call) -> Seen:
    """A recorded call as the profiler would show it: it does not list optional tensors in lists."""
    name = call.name.partition(".")[2]
    if name == "new_zeros":
        return "zeros", ()
    optional = "indices" in call.arguments and name != "embedding"
    views = [call.arguments[k] for k in ("self", "values") if k in call.arguments] if optional else call.inputs
    if name.startswith("embedding"):
        views = call.inputs
    return name, tuple(view.shape for view in views if view.shape)


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_runs_what_eager_mode_runs(family: str, kind: str, small_model: Callable[..., Config]):
    workload = Workload(kind, batch=2, seq_len=16, optimizer="none")
    config, precision = small_model(family), "fp32" if kind == "prefill" else "bf16"
    events = profiled(real_step(config, workload, precision))
    assert traced(config, workload, precision) == [call for event in events for call in walk(event)]


@pytest.mark.parametrize("kind", ["train", "prefill"])
def test_an_encoder_is_traced_as_it_runs(kind: str, small_model: Callable[..., Config]):
    workload = Workload(kind, batch=2, seq_len=16, cache="static", optimizer="none")
    events = profiled(real_step(small_model("bert"), workload, "fp32"))
    assert traced(small_model("bert"), workload, "fp32") == [call for event in events for call in walk(event)]


@pytest.mark.parametrize("kind", ["train", "prefill", "decode"])
def test_an_encoder_with_a_decoder_is_traced_as_it_runs(kind: str, small_model: Callable[..., Config]):
    workload = Workload(kind, batch=2, seq_len=16, optimizer="none")
    events = profiled(real_step(small_model("t5"), workload, "fp32"))
    ran = [call for event in events for call in walk(event)]
    named = [("minimum" if name == "min" else name, shapes) for name, shapes in ran]  # min of two tensors is that
    assert traced(small_model("t5"), workload, "fp32") == named


def test_a_decoder_begins_with_one_token_and_keeps_both_caches(small_model: Callable[..., Config]):
    graphs = {logits: trace(small_model("t5"), Workload("prefill", 2, 16, logits=logits), "fp32") for logits in LOGITS}
    head = {
        logits: next(n.op.m for n in graph.nodes() if n.op and n.op.kind == "gemm" and n.path == "lm_head")
        for logits, graph in graphs.items()
    }
    assert head == {"last": 2, "all": 2 * 16}
    step = trace(small_model("t5"), Workload("decode", 2, 16), "fp32")
    read = sum(t.size_bytes * t.count for t in step.tensors if t.role == "cache")
    assert read >= 2 * 3 * 2 * 16 * 64 * 4  # keys and values of the prompt in three layers
    assert not any("encoder.block" in n.path and not n.path.startswith("decoder") for n in step.nodes())


def test_logits_of_the_last_position_or_of_all(small_model: Callable[..., Config]):
    for logits, rows in (("last", 2), ("all", 2 * 16)):
        graph = trace(small_model("gpt2"), Workload("prefill", 2, 16, attention="fused", logits=logits), "bf16")
        head = [n.op for n in graph.nodes() if n.op and n.op.kind == "gemm" and n.op.n == 256 and n.path == "lm_head"]
        assert [op.m for op in head] == [rows]


def test_an_encoder_sees_all_tokens_and_has_no_head(small_model: Callable[..., Config]):
    graph = trace(small_model("bert"), Workload("prefill", 2, 16, attention="fused"), "fp16")
    attention = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_prefill")
    assert (attention.batch, attention.seq_q, attention.seq_kv, attention.causal) == (2, 16, 16, 0)
    assert max(n.op.n for n in graph.nodes() if n.op and n.op.kind == "gemm") == 128  # no product with the vocabulary
    assert not any(t.role == "cache" for t in graph.tensors)
    with pytest.raises(TraceError, match="is an encoder"):
        trace(small_model("bert"), Workload("decode", 2, 16), "fp16")


def test_a_bias_is_added_in_place_where_a_linear_cannot_fuse_it(small_model: Callable[..., Config]):
    workload = Workload("prefill", batch=2, seq_len=16)  # the last positions alone are no contiguous matrix
    config = small_model("gpt2") | {"model_type": "phi", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "pad_token_id": 0}
    events = profiled(real_step(config, workload, "fp32"))
    calls = [call for event in events for call in walk(event)]
    assert ("add_", ((2, 1, 256), (256,))) in calls
    assert traced(config, workload, "fp32") == calls


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_static_cache_is_traced_as_it_runs(kind: str, small_model: Callable[..., Config]):
    workload, config = Workload(kind, batch=2, seq_len=16, cache="static"), small_model("llama")
    if kind == "decode":  # the cache has room for one step: measure the first
        torch.manual_seed(0)
        module = build(resolve(config), workload, "fp32").module
        with torch.no_grad():
            prepared = prepare(module, workload)
            events = profiled(prepared.run)
    else:
        with torch.no_grad():
            events = profiled(prepare(build(resolve(config), workload, "fp32").module, workload).run)
    assert traced(config, workload, "fp32") == [call for event in events for call in walk(event)]


def test_accumulating_gradients_adds_in_place(small_model: Callable[..., Config]):
    workload = Workload("train", batch=2, seq_len=16, optimizer="none", accumulate=True)
    config = small_model("llama")
    torch.manual_seed(0)
    forward = prepare(build(resolve(config), workload, "bf16").module, workload)
    forward.run().loss.backward()
    events = profiled(lambda: forward.run().loss.backward())
    assert traced(config, workload, "bf16") == [call for event in events for call in walk(event)]


class Count(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gpt2"])
def test_every_call_is_a_node_or_counted_on_one(family: str, small_model: Callable[..., Config]):
    workload, config = Workload("train", batch=2, seq_len=16, optimizer="none"), small_model(family)
    module = build(resolve(config), workload, "bf16").module
    forward = prepare(module, workload)
    entered: list[object] = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *called: entered.append(called))
    with Count() as real:
        forward.run().loss.backward()
    hook.remove()
    graph = trace(config, workload, "bf16")
    nodes = list(graph.nodes())
    assert len(nodes) + sum(n.host.views + n.host.dispatch for n in nodes) == sum(real.calls.values())
    assert sum(n.host.modules for n in nodes) == len(entered)


def test_backward_counts_every_autograd_node(small_model: Callable[..., Config]):
    workload, config = Workload("train", batch=2, seq_len=16, optimizer="none"), small_model("llama")
    loss = prepare(build(resolve(config), workload, "fp32").module, workload).run().loss
    found, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [following for following, _ in node.next_functions]
    graph = trace(config, workload, "fp32")
    assert sum(node.host.autograd for node in graph.nodes()) == len(found)


@pytest.mark.parametrize("kind", ["train", "prefill"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tensors_live_as_long_as_torch_keeps_them(family: str, kind: str, small_model: Callable[..., Config]):
    workload = Workload(kind, batch=4, seq_len=48, optimizer="none")
    config = small_model(family, vocab_size=1000)
    module = build(resolve(config), workload, "fp32").module
    with torch.set_grad_enabled(workload.training):
        forward = prepare(module, workload)

        def run() -> object:
            output = forward.run()
            if workload.training:
                output.loss.backward()
            return output

        run()
        module.zero_grad(set_to_none=True)
        measured = torch_peak(run)
    assert peak_of_new_tensors(trace(config, workload, "fp32")) == pytest.approx(measured, rel=1e-3)


# --- nodes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(small_model: Callable[..., Config]) -> Graph:
    return trace(small_model("llama", 4), Workload("train", 2, 16), "bf16")


def kinds(nodes: Iterator[Node]) -> Counter[str]:
    return Counter(node.op.kind if node.op else node.source for node in nodes)


def test_each_kind_of_work_is_there(llama: Graph):
    found = kinds(llama.nodes())
    assert found["attention_prefill"] == found["attention_backward"] == 4
    assert found["gemm"] == 3 * (4 * 7 + 1)
    assert found["adamw"] == found["embedding"] == found["embedding_backward"] == 1
    assert not llama.notes
    assert all(node.op for node in llama.nodes())


def test_backward_nodes_belong_to_the_module_they_differentiate(llama: Graph):
    weights = {i for t in llama.tensors if t.role == "weight" for i in range(t.id, t.id + t.count)}
    forward: dict[int, str] = {}
    for node in llama.nodes():
        for tensor in weights.intersection(node.reads):
            if node.phase == "forward":
                forward[tensor] = node.path
            elif node.phase == "backward":
                assert node.path == forward[tensor]
    assert set(forward) == weights


def test_weight_gradients_and_inputs_have_their_layouts(llama: Graph):
    layouts = Counter((n.phase, n.op.to_dict()["layout"]) for n in llama.nodes() if n.op and n.op.kind == "gemm")
    linears = 4 * 7 + 1
    assert layouts == {("forward", "nt"): linears, ("backward", "tn"): linears, ("backward", "nn"): linears}


def test_the_optimizer_is_one_fused_call_as_torch_makes_it(small_model: Callable[..., Config]):
    config, workload = small_model("llama"), Workload("train", 2, 16)
    events = profiled(real_step(config, workload, "fp32"))
    real = [call for event in events for call in walk(event) if call[0].startswith("_fused_adamw")]
    graph = trace(config, workload, "fp32")
    node = [n for n in graph.nodes() if n.phase == "optimizer"]
    assert len(node) == len(real) == 1
    module = build(resolve(config), workload, "fp32").module
    assert node[0].op is not None
    assert node[0].op.numel == graph.parameters == sum(p.numel() for p in module.parameters())
    assert node[0].op.tensors == len(list(module.parameters()))
    roles = Counter(graph.tensor(t).role for t in node[0].reads)
    assert roles == {"weight": 30, "gradient": 30, "optimizer_state": 60}


def test_tied_weights_count_once(small_model: Callable[..., Config]):
    tied = trace(small_model("llama", tie_word_embeddings=True), Workload("train", 2, 16), "fp32")
    free = trace(small_model("llama", tie_word_embeddings=False), Workload("train", 2, 16), "fp32")
    assert free.parameters - tied.parameters == 64 * 256
    assert tied.model_flops == free.model_flops


def test_model_flops_are_three_forwards_of_products_and_attention(llama: Graph, small_model: Callable[..., Config]):
    prompt = trace(small_model("llama", 4), Workload("train", 2, 16, optimizer="none"), "fp32")
    assert prompt.model_flops == llama.model_flops
    tokens, layers = 32, 4
    linears = layers * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 256
    attention = layers * 2 * 2 * 4 * (16 * 17 / 2) * 2 * 16
    assert llama.model_flops == 3 * (2 * tokens * linears + attention)


def test_model_flops_leave_out_gradients_that_nobody_computes():
    """Of inputs that need no gradient the first layer has two products, not three."""

    class Net(torch.nn.Sequential):
        def __init__(self, gradient: bool) -> None:
            super().__init__(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8))
            self.gradient = gradient

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

        def example_inputs(self, workload: Workload) -> tuple[torch.Tensor]:
            return (torch.zeros(workload.batch, 8, requires_grad=self.gradient),)

    flops = [trace(lambda g=g: Net(g), Workload("train", 2, 2), "fp32").model_flops for g in (False, True)]
    assert flops == [(2 + 3) * 2 * 2 * 8 * 32, 6 * 2 * 2 * 8 * 32]


def test_accelerators_have_fused_attention_for_unequal_widths(small_model: Callable[..., Config]):
    config = small_model("deepseek_v3")
    plain = kinds(trace(config, Workload("train", 2, 16), "bf16").nodes())
    graph = trace(config, Workload("train", 2, 16, attention="fused"), "bf16")
    fused = kinds(graph.nodes())
    assert not plain["attention_prefill"]
    assert fused["attention_prefill"] == fused["attention_backward"] == 3
    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_backward")
    assert (op.head_dim, op.v_head_dim, op.causal) == (24, 16, 1)


def test_decoding_attends_to_the_cache(small_model: Callable[..., Config]):
    graph = trace(small_model("llama"), Workload("decode", 2, 40), "bf16")
    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_decode")
    assert (op.seq_q, op.seq_kv, op.heads_q, op.heads_kv, op.causal) == (1, 41, 4, 2, 1)
    cache_bytes = 3 * 2 * 2 * 2 * 16 * 2  # layers, K and V, batch, heads, width, bytes
    held = sum(t.size_bytes * t.count for t in graph.tensors if t.role == "cache")
    assert held == cache_bytes * (40 + 41)  # a dynamic cache grows by copying


def test_a_sliding_window_is_read_off_the_mask(small_model: Callable[..., Config]):
    graph = trace(small_model("mistral"), Workload("prefill", 1, 32), "bf16")
    op = next(n.op for n in graph.nodes() if n.op and n.op.kind == "attention_prefill")
    assert (op.causal, op.window) == (1, 8)


# --- experts -----------------------------------------------------------------------------------------------


def grouped(graph: Graph) -> list[Op]:
    return [n.op for n in graph.nodes() if n.op and n.op.kind == "grouped_gemm"]


@pytest.mark.parametrize(("load", "busiest"), [("balanced", 100), ("zipf:1.0", 288), ("1,1,1,5,0,0,0,0", 400)])
def test_experts_are_loaded_as_asked(load: str, busiest: int, small_model: Callable[..., Config]):
    graph = trace(small_model("qwen3_moe"), Workload("train", 2, 16, expert_load=load), "bf16")
    ops = grouped(graph)
    assert len(ops) == 3 * 2 * 3  # layers, products, forward and two gradients
    assert {op.tokens for op in ops} == {64}
    counts = expert_counts(32, 2, 8, load)
    assert {op.imbalance for op in ops} == {imbalance(tuple(counts))}
    assert imbalance(tuple(counts)) == pytest.approx(busiest, rel=0.02)


@pytest.mark.parametrize(("capacity", "rows"), [(64, 8), (3, 6)])
def test_a_switch_sends_a_token_to_one_expert_with_room_in_each_sequence(capacity: int, rows: int) -> None:
    config = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 64}
    config |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4}
    config |= {"model_type": "switch_transformers", "num_decoder_layers": 2, "expert_capacity": capacity}
    graph = trace(config, Workload("prefill", 2, 16, optimizer="none", logits="all"), "fp32")
    found = Counter(n.op.m for n in graph.nodes() if n.op and n.op.kind == "gemm" and ".expert_" in n.path)
    assert found == {rows: 2 * 4 * 2}  # of 32 tokens over 4 experts, in encoder and decoder, in two products each


def test_experts_in_a_loop_are_traced_with_their_shares(small_model: Callable[..., Config]):
    workload = Workload("prefill", 2, 16, experts="eager")
    graph = trace(small_model("mixtral"), workload, "bf16")
    rows = Counter(n.op.m for n in graph.nodes() if n.op and n.op.kind == "gemm" and n.path.endswith("experts"))
    assert rows == {16: 3 * 4 * 2}  # 64 choices over 4 experts, in two products each


def test_shares_must_fit_the_model(small_model: Callable[..., Config]):
    with pytest.raises(TraceError, match="gives 3 shares, the model chooses among 8 experts"):
        trace(small_model("qwen3_moe"), Workload("prefill", 1, 8, expert_load="1,2,3"), "bf16")


@given(st.integers(1, 60), st.integers(1, 8), st.integers(8, 40), st.sampled_from(["balanced", "zipf:0.7", "zipf:2"]))
def test_every_row_gets_distinct_experts(rows: int, topk: int, experts: int, load: str):
    counts = expert_counts(rows, topk, experts, load)
    assert sum(counts) == rows * topk
    assert max(counts) <= rows
    if load == "balanced":
        assert max(counts) - min(counts) <= 1
    chosen = route_balanced(rows, topk, experts, load)
    assert all(len(set(row)) == topk for row in chosen.tolist())
    assert torch.bincount(chosen.flatten(), minlength=experts).tolist() == counts


# --- layout and mapping ------------------------------------------------------------------------------------


def view_of(tensor: torch.Tensor, storage: int = 0) -> View:
    return View(storage, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


@given(st.permutations([0, 1, 2]), st.tuples(*[st.integers(2, 5)] * 3), st.booleans())
def test_a_run_is_what_lies_contiguous(order: list[int], shape: tuple[int, ...], sliced: bool):
    x = torch.arange(1000)[: shape[0] * shape[1] * shape[2]].view(shape)
    x = (x[..., : shape[2] - 1] if sliced else x).permute(order)
    out = torch.empty(x.shape)
    run = contiguous_run([view_of(out), view_of(x)])
    addresses = x.reshape(-1)  # in the order of the result
    trailing = [x[0, 0].numel(), x[0].numel(), x.numel()]
    whole = [n for n in trailing if all((chunk.diff() == 1).all() for chunk in addresses.view(-1, n))]
    expected = max(whole, default=1)
    assert run == (0 if expected == x.numel() else expected)


def test_a_broadcast_operand_breaks_the_run_where_it_begins_anew():
    x, row, column = torch.empty(4, 6), torch.empty(6), torch.empty(4, 1)
    assert contiguous_run([view_of(x), view_of(x)]) == 0
    assert contiguous_run([view_of(x), view_of(row)]) == 6
    assert contiguous_run([view_of(x), view_of(column)]) == 6
    assert contiguous_run([view_of(x), view_of(torch.empty(()))]) == 0
    heads = torch.empty(2, 8, 3, 4).transpose(1, 2)
    assert contiguous_run([view_of(torch.empty(2, 3, 8, 4)), view_of(heads)]) == 4
    assert contiguous_run([view_of(heads), view_of(heads)]) == 0


@given(st.booleans(), st.booleans(), st.tuples(*[st.integers(1, 6)] * 3))
def test_layouts_follow_the_strides(flip_a: bool, flip_b: bool, sizes: tuple[int, int, int]):
    m, n, k = sizes
    a = torch.empty(k, m).t() if flip_a else torch.empty(m, k)
    b = torch.empty(n, k).t() if flip_b else torch.empty(k, n)
    op = gemm_op(view_of(a), view_of(b), view_of(torch.empty(m, n)))
    assert op.cost.flops == 2 * m * n * k
    if min(sizes) > 1:
        expected = {(0, 0): "nn", (0, 1): "nt", (1, 0): "tn", (1, 1): "nn"}[flip_a, flip_b]
        assert op.to_dict()["layout"] == expected
        assert (op.m, op.n) == ((n, m) if flip_a and flip_b else (m, n))


def mapped(run: Callable[[], object]) -> list[Op | None]:
    """The ops of real calls, through the recorder."""
    from opcast.simulator.trace.tracer import Tracer

    with Tracer() as tracer, tracer.phase("forward"):
        kept = run()
    del kept
    return [to_op(call) for call in tracer.calls]


def test_reductions_keep_what_lies_outside_and_inside():
    ops = mapped(lambda: [torch.empty(4, 5, 6).sum(1), torch.empty(4, 5, 6).sum((0, 1)), torch.empty(4, 5).mean()])
    reductions = [op for op in ops if op is not None and op.kind == "reduce"]
    assert [(op.outer, op.length, op.inner) for op in reductions] == [(4, 5, 6), (1, 20, 6), (1, 20, 1)]


def test_copies_tell_their_runs():
    def run() -> list[torch.Tensor]:
        x = torch.empty(4, 6, 8)
        return [x.transpose(0, 1).contiguous(), torch.cat([x, x], 2), x.to(torch.bfloat16), x.clone()]

    transposed, joined, cast, whole = mapped(run)
    assert transposed is not None
    assert (transposed.size_bytes, transposed.run_bytes) == (768, 32)
    assert joined is not None
    assert (joined.size_bytes, joined.run_bytes) == (1536, 32)
    assert cast is not None
    assert (cast.kind, cast.dtype, cast.out_dtype) == ("elementwise", "fp32", "bf16")
    assert whole is not None
    assert whole.run_bytes == 0


def test_parts_with_gaps_are_joined_by_a_slower_kernel() -> None:
    """Halves of rotated heads are slices; a cache that grows is one large part; what is contiguous is a plain copy."""

    def run() -> list[torch.Tensor]:
        heads, cache = torch.empty(1, 4, 6, 8), torch.empty(1, 4, 33, 8)
        halves = torch.cat((-heads[..., 4:], heads[..., :4]), -1)
        kept = torch.cat((cache[:, :, :32], torch.empty(1, 4, 1, 8)), 2)
        return [halves, kept, torch.cat((heads, heads), -1)]

    copies = [op for op in mapped(run) if op is not None and op.kind == "copy"]
    assert [op.joins for op in copies] == [2, 1, 0]


def module_of(layer: Callable[[], torch.nn.Module], *shape: int) -> Callable[[], torch.nn.Module]:
    """A factory of a module with one layer that reads a tensor of this shape, a leading batch apart."""

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).float().sum()

        def example_inputs(self, workload: Workload) -> tuple[torch.Tensor]:
            return (torch.zeros(workload.batch, *shape, requires_grad=workload.training),)

    return Alone


def test_an_operator_without_a_kind_is_costed_by_its_bytes_and_named():
    graph = trace(module_of(lambda: torch.nn.Unfold(3), 4, 10, 10), Workload("prefill", 2, 10), "fp32")
    node = next(n for n in graph.nodes() if "im2col" in n.source)
    assert node.op is None
    assert node.bytes_moved == 4 * (2 * 4 * 10 * 10 + 2 * 36 * 64)
    assert graph.notes == ("aten.im2col: no op kind covers it; its 1 calls are costed by the bytes they move",)


@pytest.mark.parametrize(("tokens", "noted"), [(8, False), (300, True)])
def test_a_scan_written_out_over_tokens_is_noted(tokens: int, noted: bool):
    class Scan(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.zeros_like(x[:, 0])
            for token in range(x.shape[1]):
                state = 0.5 * state + x[:, token]
            return state

    graph = trace(module_of(Scan, tokens, 4), Workload("prefill", 2, tokens), "fp32")
    found = [note for note in graph.notes if "a loop that the model's code writes out" in note]
    assert len(found) == noted
    assert not noted or "layer and modules like it: 600 calls" in found[0]


CONVOLUTIONS = [
    (lambda: torch.nn.Conv2d(16, 32, 3, padding=1), (16, 8, 8), 2 * (2 * 8 * 8) * 32 * (16 * 9)),
    (lambda: torch.nn.Conv2d(16, 32, 4, stride=4), (16, 8, 8), 2 * (2 * 2 * 2) * 32 * (16 * 16)),
    (lambda: torch.nn.Conv1d(16, 32, 3, groups=4), (16, 10), 2 * (2 * 8) * 32 * (4 * 3)),
    (lambda: torch.nn.ConvTranspose2d(16, 8, 2, stride=2), (16, 4, 4), 2 * (2 * 4 * 4) * 16 * (8 * 4)),
]


@pytest.mark.parametrize(("layer", "shape", "flops"), CONVOLUTIONS)
def test_a_convolution_is_the_product_that_it_is(layer, shape: tuple[int, ...], flops: int):
    graph = trace(module_of(layer, *shape), Workload("prefill", 2, 8), "fp32")
    products = [n.op for n in graph.nodes() if n.op and n.op.kind == "gemm"]
    assert [op.cost.flops for op in products] == [flops]
    assert graph.model_flops == flops
    assert graph.notes == ()


def test_both_gradients_of_a_convolution_are_products_and_norms_and_pools_have_kinds():
    def layer() -> torch.nn.Module:
        middle = torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.MaxPool2d(2)
        return torch.nn.Sequential(torch.nn.Conv2d(16, 16, 1), *middle, torch.nn.AdaptiveAvgPool2d(1))

    graph = trace(module_of(layer, 16, 8, 8), Workload("train", 2, 8), "fp32")
    nodes = [n for n in graph.nodes() if n.op]
    forward, backward = ([n.op for n in nodes if n.op.kind == "gemm" and n.phase == p] for p in ("forward", "backward"))
    assert sum(op.cost.flops for op in backward) == 2 * sum(op.cost.flops for op in forward)
    kinds = {n.op.kind for n in nodes}
    assert {"layer_norm", "layer_norm_backward", "reduce"} <= kinds
    assert {n.op.rows for n in nodes if n.op.kind.startswith("layer_norm")} == {32}
    assert not [n.source for n in graph.nodes() if n.op is None]
    assert graph.notes == ()


def test_masks_are_recognised():
    position = torch.arange(20)
    causal = position[None, :] <= position[:, None]
    assert mask_window(causal) == (1, 0)
    assert mask_window(causal & (position[None, :] > position[:, None] - 7)) == (1, 7)
    assert mask_window(causal[12:]) == (1, 0)
    assert mask_window(torch.ones(20, 20, dtype=torch.bool)) == (0, 0)
    assert mask_window(torch.ones(1, 20, dtype=torch.bool)) == (1, 0)
    assert mask_window(torch.where(causal, 0.0, -1e9)) == (1, 0)
    assert mask_window((position[None, :] // 5) == (position[:, None] // 5)) is None


# --- models ------------------------------------------------------------------------------------------------


def test_names_are_forgiving_and_unknown_ones_suggest():
    assert resolve("Llama3-8B").name == "llama3_8b"
    assert resolve("qwen2.5-7b").name == "qwen2_5_7b"
    with pytest.raises(TraceError, match="unknown model 'lama3_8b'; did you mean llama3_8b"):
        resolve("lama3_8b")


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path, small_model: Callable[..., Config]):
    import json

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_model("llama") | {"quantization_config": {"bits": 4}}))
    workload = Workload("prefill", 1, 8)
    assert trace(str(folder), workload) == trace(str(folder / "config.json"), workload)
    assert trace(str(folder), workload).name == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "not a transformers configuration"),
        ("{}", "no model_type"),
        ('{"model_type": "no_such_model"}', "no_such_model"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_bad_configurations_are_one_line(content: str, message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(TraceError, match=message) as caught:
        trace(str(tmp_path), Workload("prefill", 1, 8))
    assert "\n" not in str(caught.value)


def test_a_hub_id_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(TraceError, match="not in the local hub cache, and the hub cannot be reached") as caught:
        trace("nobody/no-such-model", Workload("prefill", 1, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "training"}, "workload='training' is not one of train, prefill, decode; did you mean train"),
        ({"kind": "train", "batch": 0}, "batch=0 must be a whole number of at least 1"),
        ({"kind": "train", "seq_len": 1}, "leaves no next token"),
        ({"kind": "decode", "cache": "paged"}, "cache='paged'"),
        ({"kind": "decode", "expert_load": "skewed"}, "expert_load='skewed'"),
    ],
)
def test_bad_workloads_are_one_line(arguments: dict[str, Any], message: str):
    with pytest.raises(TraceError, match=message):
        Workload(**arguments)


def test_a_precision_nobody_has_is_refused():
    with pytest.raises(TraceError, match="precision='bf17' is not one of fp32, bf16, fp16; did you mean bf16"):
        trace("gpt2", Workload("prefill", 1, 8), "bf17")


def test_more_tokens_than_positions_fail_as_they_would_for_real(small_model: Callable[..., Config]):
    with pytest.raises(
        TraceError, match=r"table of 64 rows, and position 64 is beyond it: take 1 less for workload\.input_len"
    ):
        trace(small_model("gpt2"), Workload("prefill", 1, 65), "fp32")


MODULE = """
import torch
from torch import nn

class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)))
        self.head = nn.Linear(8, 1)

    def forward(self, x, target):
        return nn.functional.mse_loss(self.head(self.layers(x)), target)

    def example_inputs(self, workload):
        return torch.zeros(workload.batch, 8), torch.zeros(workload.batch, 1)

class Broken(nn.Linear):
    def forward(self, x):
        raise RuntimeError("no\\nway")

    def example_inputs(self, workload):
        return (torch.zeros(workload.batch, 8),)

class Peeking(nn.Linear):
    def forward(self, x):
        return super().forward(x) if (self.weight.sum() > 0).item() else x

def peeking():
    return Peeking(8, 8), lambda workload: {"input": torch.zeros(workload.batch, 8)}

def named():
    return Peeking(8, 8), lambda workload: {"x": torch.zeros(workload.batch, 8)}

def bare():
    return nn.Linear(8, 8)

def broken():
    return Broken(8, 8)

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_models"
    sys.modules.pop("own_models", None)


def test_any_module_is_traced_and_folded(module: str):
    graph = trace(f"{module}:Regressor", Workload("train", 4), "fp32")
    assert graph.parameters == 6 * 8 * 8 + 5 * 8 - 7 * 8 + 1
    assert [block.repeat for block in graph.blocks if block.repeat > 1] == [4, 4]  # the first layer reads an input
    assert kinds(graph.nodes())["gemm"] == 6 + 2 * 6 - 1  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_models:named", "decides by the value of a tensor that depends on weights or data"),
        ("own_models:bare", "has no example_inputs"),
        ("own_models:broken", "model own_models:broken does not run workload=prefill: no way"),
        ("own_models:number", "number is a int, not a function"),
        ("own_models:nothing", "nothing"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
    ],
)
def test_bad_factories_are_one_line(name: str, message: str, module: str):
    with pytest.raises(TraceError, match=message) as caught:
        trace(name, Workload("prefill", 2), "fp32")
    assert "\n" not in str(caught.value)


def test_training_needs_a_loss(module: str):
    def factory() -> tuple[torch.nn.Module, Callable[[Workload], tuple[torch.Tensor]]]:
        return torch.nn.Linear(8, 8), lambda workload: (torch.zeros(workload.batch, 8),)

    with pytest.raises(TraceError, match="needs a forward that returns a scalar loss"):
        trace(factory, Workload("train", 2), "fp32")

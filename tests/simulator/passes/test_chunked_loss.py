"""Head and loss in chunks: the same products, logits of a few tokens at a time, chunks as upstream cuts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.clusters import Cluster
from opcast.simulator.graph import Graph
from opcast.simulator.memory.lifetimes import peak_memory
from opcast.simulator.passes.chunked_loss import chunk_tokens
from opcast.simulator.passes.order import TRAINING, apply_passes
from opcast.simulator.passes.pipeline import split_pipeline
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.trace import Workload, trace

TOKENS, VOCAB, HIDDEN = 512, 16384, 256
HEAD = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCAB}  # fmt: skip
STACKS = ("torch", "megatron", "torchtitan_early_2026", "deepspeed", "deepspeed_liger")
NODE = Cluster("c", "c", "h100_sxm")


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A step whose logits are most of it."""
    return trace(HEAD, Workload("train", batch=1, seq_len=TOKENS, attention="fused", optimizer="adamw"), "bf16")


def rank(graph: Graph, stack: str | Stack = "torch", loss: str = "whole", **parallel: int) -> Graph:
    of = load_stack(stack) if isinstance(stack, str) else stack
    return apply_passes(graph, Plan(Parallel(**parallel), NODE, of, options={"loss": loss}), TRAINING)


def flops(graph: Graph) -> float:
    return sum(float(n.op.cost.flops) * r for n, r in graph.weighted() if n.op is not None and n.op.kind == "gemm")


def logits(graph: Graph) -> int:
    """Bytes of the largest tensor that the head's product writes."""
    return max(
        graph.tensor(t).size_bytes
        for node in graph.nodes()
        if node.op is not None and node.op.kind == "gemm" and node.path == "lm_head" and node.op.n >= VOCAB // 2
        for t in node.writes
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize("loss", ["liger", "chunks:8"])
@pytest.mark.parametrize("stack", STACKS)
def test_chunks_multiply_as_much_and_keep_few_logits(
    stack: str, loss: str, zero_stage: int, graph: Graph, assert_sound: Callable[..., None]
) -> None:
    whole, made = (rank(graph, stack, way, zero_stage=zero_stage) for way in ("whole", loss))
    assert_sound(made)
    chunks = 64 if loss == "liger" else 8
    assert flops(made) == flops(whole)
    assert logits(made) == logits(whole) / chunks == TOKENS * VOCAB * 2 / chunks
    assert peak_memory(made).peak_gib < peak_memory(whole).peak_gib
    written = {t for node in made.nodes() for t in node.writes if node.phase == "forward"}
    assert not any(
        made.tensor(t).size_bytes >= TOKENS * VOCAB * 2 for t in written if made.tensor(t).role == "activation"
    )
    sums = [n for n, _ in made.weighted() if n.path == "lm_head" and n.op is not None and n.op.kind == "gemm"]
    assert [n.phase for n in sums] == ["forward"] * 3


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}])
def test_ranks_cut_what_is_theirs(parallel: dict[str, int], graph: Graph, assert_sound: Callable[..., None]) -> None:
    made = rank(graph, "megatron", "chunks:8", **parallel)
    assert_sound(made)
    share = 2 if "tp" in parallel else 1
    head = next(n.op for n, _ in made.weighted() if n.path == "lm_head" and n.op is not None and n.op.kind == "gemm")
    assert (head.m, head.n) == (TOKENS / 8 / (1 if share == 2 else 2), VOCAB / share)


def test_gradients_of_the_weights_are_added_to(graph: Graph) -> None:
    """Liger's product adds by itself (addmm); autograd makes a gradient for each chunk and adds it."""
    of = {"liger": ["gemm"], "chunks:8": ["gemm", "elementwise"]}
    for loss, kinds in of.items():
        made = rank(graph, "torch", loss)
        gradient = next(
            t
            for n, r in made.weighted()
            for t in n.writes
            if r > 1 and n.path == "lm_head" and made.tensor(t).role == "gradient"
        )
        writers = [n for n, r in made.weighted() if gradient in n.writes and n.phase != "optimizer" and not n.group]
        assert [n.op.kind for n in writers if n.op is not None] == ["elementwise", *kinds[-1:]]
        assert writers[0].op.inputs == 0
        assert gradient in writers[-1].reads


@given(st.integers(1, 2**18), st.integers(1, 2**18), st.integers(1, 2**14))
def test_chunks_of_liger_are_about_as_large_as_hidden_states(tokens: int, vocab: int, hidden: int) -> None:
    chunk = chunk_tokens("liger", tokens, vocab, hidden)
    assert 1 <= chunk <= tokens
    assert chunk == tokens or chunk & (chunk - 1) == 0
    assert (chunk - 1) * vocab <= 2 * (tokens + vocab / hidden) * max(hidden, vocab)
    assert chunk * -(-vocab // hidden) >= tokens or chunk == tokens


def test_chunks_of_liger_in_its_own_example() -> None:
    """ops/fused_linear_cross_entropy.py: 16,384 tokens, 32,000 words, 4,096 wide make chunks of 2,048."""
    assert chunk_tokens("liger", 4 * 4096, 32000, 4096) == 2048
    assert chunk_tokens("liger", 8192, 128256, 4096) == 256
    assert chunk_tokens("chunks:8", 1001, 0, 0) == 126


def test_the_last_stage_of_a_pipeline_has_the_chunks(graph: Graph) -> None:
    plan = Plan(Parallel(pp=2), NODE, load_stack("megatron"), options={"loss": "chunks:8"}, micro_batches=4)
    first, last = split_pipeline(apply_passes(graph, plan), plan)
    repeats = [
        [b.repeat for b in chunk.graph.blocks if any(n.path == "lm_head" for n in b.nodes)] for chunk in (first, last)
    ]
    assert repeats[0] == []
    assert 8 in repeats[1]


def test_the_option_goes_before_the_stack_and_inference_is_as_it_was(graph: Graph) -> None:
    assert rank(graph, "torchtitan", "whole") == rank(graph, "torchtitan_early_2026", "whole")
    assert logits(rank(graph, replace(load_stack("torch"), loss="chunks:4"), "")) == TOKENS * VOCAB * 2 / 4
    with pytest.raises(PlanError, match=r"parallel\.tp=2; take loss=chunks:8"):
        rank(graph, "torch", "liger", tp=2)
    for wrong in ("chunks:0", "chunk:8", 8, "Liger"):
        with pytest.raises(PlanError, match="is none of whole, liger, chunks:8"):
            Plan(Parallel(), NODE, options={"loss": wrong})
    with pytest.raises(PlanError, match=r"stack\.loss='some'"):
        Stack(loss="some")


def test_defaults_are_those_of_the_frameworks() -> None:
    known = {
        name: load_stack(name).loss for name in ("torch", "megatron", "torchtitan", "deepspeed", "deepspeed_liger")
    }
    assert {name for name, loss in known.items() if loss == "whole"} == {"torch", "megatron", "deepspeed"}
    assert (known["torchtitan"], known["deepspeed_liger"]) == ("chunks:8", "liger")
    assert load_stack("deepspeed_2021").recompute_early_stop is False

"""One iteration of an engine: chunks of prompts beside decoding sequences, in one pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.question.iteration import Iteration, attended
from opcast.simulator.question.plan import Parallel, Plan, PlanError, load_stack
from opcast.simulator.question.work import Work, WorkloadError
from opcast.simulator.simulate import simulated

H100 = load_device("h100_sxm")
CLUSTER = load_cluster("dgx_h100")
ENGINE = build_engine(H100, [], [], ("network", "analytical"), cluster=CLUSTER)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def run(small_model, graphs):
    """A function: the state of a small model's work; degrees of parallelism by name."""

    def simulate(family, work, stack="vllm", options=None, **degrees):
        parallel = Parallel(**{"tp": 1, **degrees})
        cluster = replace(CLUSTER, devices_per_node=parallel.model_ranks * (parallel.dp or 1))
        plan = Plan(parallel, cluster, load_stack(stack), **(options or {}))
        return simulated(small_model(family), work, plan, H100, ENGINE, graphs)

    return simulate


def ops(state):
    """Every executed op of the only step with its count, by kind."""
    found: dict[str, list] = {}
    for chunk in state.steps[0].chunks:
        for node, times in chunk.graph.weighted():
            if node.op is not None:
                found.setdefault(node.op.kind, []).append((node.op, times))
    return found


def batch(prompts=(), decodes=(), **more):
    return Work("batch", prompts=prompts, decodes=decodes, **more)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe", "gemma2"])
def test_a_batch_of_one_kind_is_that_kind_of_step(family, run):
    one, other = run(family, Work("decode", batch=6, input_len=9)), run(family, batch(decodes=[[4, 6], [2, 15]]))
    assert one.total_us == other.total_us
    assert ops(one) == ops(other)
    one, other = run(family, Work("prefill", batch=2, input_len=7)), run(family, batch(prompts=[[7, 0], [7, 0]]))
    assert one.total_us == other.total_us


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_pass_over_chunks_alone_is_the_prompts_own(family, run):
    """One row of the last layer in place of two is all that differs."""
    usual = run(family, Work("prefill", batch=2, input_len=7))
    own = run(family, batch(prompts=[[7, 0], [7, 0]], samples=1))
    for kind, found in ops(usual).items():
        if kind == "elementwise":  # tables of positions are as long as the pass
            continue
        gemms = [(op, times) for op, times in ops(own)[kind] if op.kind != "gemm" or op.m != 1]
        assert gemms == [(op, times) for op, times in found if op.kind != "gemm" or op.m != 2]
    assert own.total_us == pytest.approx(usual.total_us, rel=0.01)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"tp": 2}),
        ("gemma2", {}),
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("deepseek_v3", {"pp": 2}),
        ("deepseek_v3", {"tp": 2}),
    ],
)
def test_token_wise_work_is_that_of_all_tokens_and_attention_that_of_its_sequences(family, layout, run):
    state = run(family, batch(prompts=[[8, 0], [8, 0]], decodes=[[4, 9]]), **layout)
    tokens = run(family, Work("prefill", input_len=20), **layout)
    decode = run(family, Work("decode", batch=4, input_len=9), **layout)
    mixed, whole, alone = ops(state), ops(tokens), ops(decode)
    for kind in ("attention_decode", "mla_decode"):
        assert mixed.get(kind) == alone.get(kind)
    for kind in ("attention_prefill", "mla_prefill"):
        assert all((op.batch, op.seq_q, op.seq_kv) == (2, 8, 8) for op, _ in mixed.get(kind, ()))
        assert sum(t for _, t in mixed.get(kind, ())) == sum(t for _, t in whole.get(kind, ()))
    for kind in ("rms_norm", "silu_mul", "fused_moe", "all_reduce", "ep_dispatch"):
        small = [(op, t) for op, t in whole.get(kind, ()) if 1 not in (op.dims[0],)]
        assert [(op, t) for op, t in mixed.get(kind, ()) if op in [o for o, _ in small]] == small
    assert decode.total_us < state.total_us
    assert state.memory.peak_gib > 0


def test_the_last_layer_has_a_row_for_each_sample(run):
    def rows(**more):
        state = run("llama", batch(prompts=[[8, 8], [8, 0]], decodes=[[4, 9]], **more))
        head = [node.op for node, _ in state.steps[0].chunks[-1].graph.weighted() if node.path == "lm_head"]
        return [op.m for op in head if op.kind == "gemm"]

    assert rows() == [6]
    assert rows(samples=4) == [4]
    assert rows(samples=0) == [1]


def test_a_latent_cache_is_projected_up_for_chunks_and_what_is_cached_of_them(run):
    state = run("deepseek_v3", batch(prompts=[[8, 5], [8, 5]], decodes=[[4, 9]]))
    found = [
        node.op.m
        for chunk in state.steps[0].chunks
        for node, _ in chunk.graph.weighted()
        if node.path.endswith("kv_b_proj") and node.source == "aten.mm"
    ]
    assert set(found) == {26}


def test_padding_adds_tokens_and_no_keys(run):
    usual = run("llama", batch(decodes=[[3, 80]]))
    padded = run("llama", batch(decodes=[[3, 80]], padded_tokens=4))
    assert padded.steps[0].graph != usual.steps[0].graph
    (few,), (more,) = ops(usual)["attention_decode"], ops(padded)["attention_decode"]
    assert few[0].batch * (few[0].seq_kv - 1) == more[0].batch * (more[0].seq_kv - 1)
    assert ops(run("llama", batch([[9, 0]], [[3, 80]], padded_tokens=16)))["silu_mul"][0][0].rows == 16


chunk = st.tuples(st.integers(1, 4000), st.integers(0, 30_000))


@given(st.lists(chunk, min_size=1, max_size=12))
@settings(deadline=None)
def test_equal_chunks_do_the_work_of_unequal_ones(chunks):
    made = Iteration(tuple(chunks))
    count, new, cached = made.chunks
    assert count >= 1
    assert count * new == pytest.approx(made.prefill_tokens)
    assert count * cached == pytest.approx(made.prefill_context)
    assert count * new * (cached + (new + 1) / 2) == pytest.approx(made.prefill_pairs)
    batch, queries, keys = attended(made.chunks)
    assert made.prefill_tokens <= batch * queries < made.prefill_tokens + batch
    assert queries <= keys


@given(chunk, st.integers(1, 9))
def test_equal_chunks_stand_for_themselves(each, times):
    count, new, cached = Iteration((each,) * times).chunks
    assert (count, new, cached) == pytest.approx((times, *each))
    assert attended(Iteration((each,) * times).chunks) == (times, each[0], sum(each))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no sequence"),
        ({"prompts": [[8]]}, "no pair"),
        ({"prompts": [[0, 4]]}, "prompts=0"),
        ({"decodes": 7}, "list of pairs"),
        ({"prompts": [[8, 0]], "samples": 2}, "samples=2"),
        ({"decodes": [[8, 9]], "padded_tokens": 4}, "padded_tokens=4"),
    ],
)
def test_what_is_no_batch_is_one_line(given, says):
    with pytest.raises(WorkloadError, match=says):
        Work("batch", **given)


@pytest.mark.parametrize(
    ("stack", "layout", "options", "says"),
    [
        ("torch", {}, {}, "stack=torch"),
        ("vllm", {"cp": 2}, {}, "parallel.cp=2"),
        ("vllm", {}, {"offload": ("kv",)}, "offload=kv"),
        ("vllm", {}, {"micro_batches": 2}, "micro_batches=2"),
    ],
)
def test_what_does_not_go_with_a_mixed_batch_is_one_line(stack, layout, options, says, run):
    with pytest.raises(PlanError, match=says):
        run("llama", batch([[8, 0]], [[4, 9]]), stack, options, **layout)

"""Prefill, decode and generation on clusters: layouts, memory, what reports add up to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datasets.clusters import load_cluster, one_device
from opcast.datasets.devices import DeviceError, load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.engines.large_sums import NormSumsEngine
from opcast.simulator.engines.library import LibraryEngine, ThrottledEngine
from opcast.simulator.engines.mat_vec import FewRowsEngine
from opcast.simulator.engines.own_rows import OwnEngine
from opcast.simulator.engines.single_ranks import SingleRankEngine
from opcast.simulator.engines.streams import StreamEngine
from opcast.simulator.engines.transfer import NearFormatEngine
from opcast.simulator.engines.unpacked import UnpackedEngine
from opcast.simulator.passes.order import INFERENCE, apply_passes
from opcast.simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import simulate as simulate_plan
from opcast.simulator.step.build import MANY, Part, engine_of, in_a_row, parts
from opcast.simulator.step.state import stream_us
from opcast.simulator.timing.clocks import SETTLING_MS
from opcast.simulator.trace import Workload, trace

H100 = load_device("h100_sxm")
CLUSTER = load_cluster("dgx_h100")
ENGINE = build_engine(H100, [], [], ("network", "analytical"), cluster=CLUSTER)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def run(small_model, graphs):
    """A function: simulate a small model; degrees of parallelism by name."""

    def simulate(family="llama", kind="decode", stack="vllm", work=None, options=None, **degrees):
        given = dict(options or {})
        parallel = Parallel(**{"tp": 1, **degrees})
        devices = parallel.model_ranks * (parallel.dp or max(parallel.ep // parallel.tp, 1))
        cluster = replace(CLUSTER, devices_per_node=devices)
        known = stack if isinstance(stack, Stack) else load_stack(stack)
        plan = Plan(parallel, cluster, known, **given)
        asked = Work(kind, **({"batch": 8, "input_len": 32, "output_len": 5} | (work or {})))
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8} if family == "llama" else {}
        return simulate_plan(small_model(family, layers=4, **sizes), asked, plan, H100, ENGINE, graphs)

    return simulate


def test_a_generation_is_its_prompt_and_its_steps(run):
    report = run(kind="generate")
    assert report.e2e_ms == pytest.approx(report.ttft_ms + 4 * report.tpot_ms)
    assert report.low_ms < report.e2e_ms < report.high_ms
    assert report.ttft_ms == pytest.approx(run(kind="prefill").e2e_ms)


def test_the_clocks_of_a_prompt_do_not_know_how_many_tokens_follow(small_model, graphs):
    """The limiter lowers them as far as the prompt itself lasts: decode steps come after it."""
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    model, plan = small_model("llama", layers=2, **wide), Plan(Parallel(), one_device(H100), load_stack("vllm"))

    def report(kind: str, output_len: int):
        work = Work(kind, batch=8, input_len=512, output_len=output_len)
        return simulate_plan(model, work, plan, H100, ENGINE, graphs)

    few, many = report("generate", 2), report("generate", 2000)
    assert few.ttft_ms < SETTLING_MS[0]
    assert many.e2e_ms - many.ttft_ms > SETTLING_MS[1]
    assert many.ttft_ms == few.ttft_ms == report("prefill", 1).ttft_ms


def test_where_the_host_bounds_a_step_its_interval_holds_hosts_of_twice_and_half_the_speed(run):
    """A decode step of narrow layers waits for eager PyTorch's operators; a CUDA graph waits for none."""
    eager = run(stack="torch")
    assert eager.breakdown.host_s > 0.8 * eager.e2e_ms / 1e3
    assert eager.high_ms > 1.9 * eager.e2e_ms
    assert eager.low_ms < 0.6 * eager.e2e_ms
    graphed = run(stack="torch", options={"options": {"cuda_graph": True}})
    assert graphed.e2e_ms < 0.3 * eager.e2e_ms
    assert graphed.high_ms < 1.9 * eager.e2e_ms
    by_parts = run(stack=replace(load_stack("torch"), eager=False))
    assert by_parts.e2e_ms < 0.5 * eager.e2e_ms


def test_steps_of_a_generation_are_weighted_by_simpsons_rule():
    found = list(parts(Work("generate", batch=1, input_len=100, output_len=21)))
    assert found[0] == Part("prefill", 100)
    contexts, weights = zip(*((part.seq_len, part.times) for part in found[1:]), strict=True)
    assert contexts == (100, 109, 119)
    assert sum(weights) == pytest.approx(20)
    assert [part.kind for part in parts(Work("generate", output_len=1))] == ["prefill"]
    assert list(parts(Work("generate", input_len=7, output_len=2)))[1:] == [Part("decode", 7)]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}])
def test_ranks_share_weights_and_arithmetic(layout, run):
    alone, shared = run(), run(**layout)
    ranks = layout.get("tp", 1) * layout.get("pp", 1)
    assert shared.devices == ranks
    assert shared.memory.weights_gib < alone.memory.weights_gib * (1.0 / ranks + 0.35)
    assert shared.hfu * shared.e2e_ms * ranks == pytest.approx(alone.hfu * alone.e2e_ms, rel=0.05)
    assert shared.mfu * shared.e2e_ms * ranks == pytest.approx(alone.mfu * alone.e2e_ms)
    assert set(shared.breakdown.by_parallelism) == set(layout)


def model_flops(report):
    """Model FLOPs of a step on all devices, up to the peak rate that both sides share."""
    return report.mfu * report.e2e_ms * report.devices


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_mfu_counts_the_same_arithmetic_whatever_code_runs_it(kind, run):
    engine, eager = (run("deepseek_v3", kind, stack, {"input_len": 1024}) for stack in ("vllm", "torch"))
    assert model_flops(engine) == pytest.approx(model_flops(eager))
    assert engine.mfu == pytest.approx(engine.hfu)
    if kind == "decode":  # transformers projects all cached latents up again, once a step
        assert eager.hfu > 5 * eager.mfu


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_an_uneven_load_lowers_mfu(kind, run):
    even = run("deepseek_v3", kind, ep=4)
    uneven = run(
        "deepseek_v3", kind, work={"expert_load": "zipf:1.0"}, options={"options": {"expert_load": "zipf:1.0"}}, ep=4
    )
    assert model_flops(uneven) == pytest.approx(model_flops(even))
    assert uneven.e2e_ms > even.e2e_ms
    assert uneven.mfu < even.mfu
    assert uneven.hfu * uneven.e2e_ms > even.hfu * even.e2e_ms  # what the busiest rank executes


def test_data_ranks_serve_batches_of_their_own(run):
    alone, copies = run(), run(dp=4)
    assert copies.e2e_ms == pytest.approx(alone.e2e_ms)
    assert copies.tokens_per_s_per_gpu == pytest.approx(alone.tokens_per_s_per_gpu)
    assert copies.devices == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_shared_by_data_ranks(family, run):
    alone, shared = run(family), run(family, ep=4)
    assert shared.devices == 4
    assert shared.memory.weights_gib < alone.memory.weights_gib
    assert shared.breakdown.by_parallelism["ep"] > 0
    assert shared.tokens_per_s_per_gpu * 4 * shared.e2e_ms == pytest.approx(4 * 8 * 1e3)


def test_the_parts_of_a_breakdown_are_the_whole(run):
    for layout in ({}, {"tp": 2}, {"pp": 2}):
        report = run(kind="generate", **layout)
        parts = report.breakdown
        whole = parts.compute_s + parts.exposed_comm_s + parts.bubble_s + parts.optimizer_s + parts.host_s
        assert whole == pytest.approx(report.e2e_ms * 1e-3)
        assert sum(report.provenance.values()) == pytest.approx(1)
        assert sum(parts.by_phase.values()) == pytest.approx(whole)


def test_micro_batches_follow_each_other_through_stages():
    assert stream_us([2.0, 3.0], [1.0, 0.0], 1, "prefill") == 6.0
    assert stream_us([2.0, 3.0], [1.0, 0.0], 4, "prefill") == 15.0
    assert stream_us([2.0, 3.0], [1.0, 0.0], 2, "decode") == 6.0  # the second hides behind the first
    assert stream_us([2.0, 3.0], [1.0, 0.0], 4, "decode") == 12.0  # the slowest stage is always busy
    assert stream_us([2.0, 3.0], [4.0, 0.0], 4, "decode") == 16.0  # a link that is slower than every stage


def test_a_graph_replay_leaves_no_gaps(run):
    graph = load_stack("vllm")
    eager = run(stack=replace(graph, cuda_graph=False))
    replayed, gaps = run(stack=graph), run(stack=replace(graph, gap_us=4.0))
    assert replayed.breakdown.host_s == pytest.approx(0, abs=1e-12)
    assert eager.e2e_ms > replayed.e2e_ms < gaps.e2e_ms
    kernels = sum(share.count for share in gaps.breakdown.by_op)
    assert gaps.e2e_ms - replayed.e2e_ms == pytest.approx(kernels * 4e-3)


def test_prompts_outside_cuda_graphs_wait_for_their_host(run):
    """The host takes so long for each kernel of a prompt, and CUDA graphs hold those of decoding alone."""
    slow, fast = (run(kind="generate", stack=stack) for stack in ("trtllm", "trtllm_cpp"))
    issue_us = load_stack("trtllm").prompt_issue_us
    kernels = sum(row.count for row in run(kind="prefill", stack="trtllm").breakdown.by_op)
    assert slow.tpot_ms == fast.tpot_ms
    assert issue_us * kernels <= 1e3 * slow.ttft_ms < issue_us * kernels + 1e3 * fast.ttft_ms
    assert slow.low_ms < fast.ttft_ms + slow.e2e_ms / 2 < slow.high_ms  # a host is known within a factor of two
    assert any("82 µs each (stack.prompt_issue_us), as TensorRT-LLM does" in note for note in slow.notes)
    for options in ({"cuda_graph": True}, {"without": ["prompt_issue"]}):
        assert run(kind="generate", stack="trtllm", options={"options": options}).ttft_ms == fast.ttft_ms


def test_fewer_bits_weigh_less(run):
    whole = run()
    small = run(options={"quantization": "fp8"}, stack="trtllm")
    assert small.memory.weights_gib < 0.75 * whole.memory.weights_gib
    assert small.memory.by_class["KV cache"] == pytest.approx(0.5 * whole.memory.by_class["KV cache"], rel=0.01)


def test_what_does_not_fit_says_what_would(small_model, graphs):
    model = small_model("llama", hidden_size=1024, num_attention_heads=8, num_key_value_heads=8)
    plan = Plan(Parallel(), replace(CLUSTER, devices_per_node=1), load_stack("vllm"))
    work = Work("decode", batch=40_000, input_len=400)
    report = simulate_plan(model, work, plan, H100, ENGINE, graphs)
    assert not report.fits
    assert report.p_oom > 0.99
    advised = int(report.memory.advice.rpartition("=")[2])
    again = simulate_plan(model, replace(work, batch=advised), plan, H100, ENGINE, graphs)
    assert again.fits
    assert advised > 10_000


BESIDE = (SingleRankEngine, FewRowsEngine, StreamEngine, ThrottledEngine, UnpackedEngine, NearFormatEngine)


def test_engines_answer_with_their_own_predictors(tmp_path):
    (tmp_path / "registry").mkdir()
    engine = build_engine(H100, [], [tmp_path / "registry"])

    def asked(stack, engine):
        """The backends that are asked after sums with the norm in them, and own rows."""
        chain = engine_of(load_stack(stack), engine).chain
        sums, own, *others = (link for link in chain if not isinstance(link, BESIDE))
        assert isinstance(sums, NormSumsEngine)
        assert isinstance(own, OwnEngine)
        return others

    by_network, by_physics = None, None
    backends = [getattr(each, "backend", None) for each in asked("fastertransformer", engine)]
    assert backends == ["nccl", "trtllm", None] * 2 + [by_network, by_physics]
    library, *others = asked("torch", engine)
    assert isinstance(library, LibraryEngine)
    assert [getattr(each, "backend", None) for each in others] == [None] * len(engine.engines)
    chosen = build_engine(H100, [], [tmp_path / "registry"], backend="sglang")
    backends = [getattr(each, "backend", None) for each in engine_of(load_stack("vllm"), chosen).chain[2:]]
    assert backends == ["sglang", "sglang", by_network, by_physics]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"kind": "train"}, PlanError, "stack=vllm serves"),
        ({"pp": 2, "vpp": 2}, PlanError, "parallel.vpp=1"),
        ({"options": {"micro_batches": 3}}, PlanError, "take 2"),
        ({"options": {"quantization": "fp5"}}, DeviceError, "fp5"),
        ({"tp": 3}, PlanError, "parallel.tp="),
    ],
)
def test_bad_input_is_one_line(changes, error, said, run):
    with pytest.raises(error) as raised:
        run(**changes)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cache_in_host_memory_costs_time_and_spares_memory(run):
    work = {"batch": 64, "input_len": 512}
    here, away = run(work=work), run(work=work, options={"offload": ("kv",)})
    copied = here.memory.by_class["KV cache"] * 2**30 / (H100.pcie_gbps * 1e9)
    assert away.memory.by_class.get("KV cache", 0.0) == pytest.approx(0, abs=1e-6)  # counters of positions
    assert away.memory.peak_gib < here.memory.peak_gib
    assert away.e2e_ms > here.e2e_ms
    assert away.e2e_ms == pytest.approx(copied * 1e3, rel=0.3)
    assert away.breakdown.by_parallelism["copy"] > 0
    longer = run(work={"batch": 64, "input_len": 1024}, options={"offload": ("kv",)})
    assert longer.e2e_ms > 1.7 * away.e2e_ms


def test_a_load_of_experts_that_is_not_read_is_said(run):
    def said(kind, load, stack="vllm", **degrees):
        notes = run("qwen3_moe", kind, stack, {"expert_load": load}, **degrees).notes
        return [note for note in notes if note.startswith("expert_load=")]

    assert "on one rank" in said("decode", "zipf:0.5")[0]
    assert not said("decode", "zipf:0.5", ep=4)
    assert not said("decode", "power_law:1.2")
    assert "in inference alone" in said("train", "power_law:1.2", "megatron_core")[0]
    assert not said("train", "zipf:0.5", "megatron_core")


def test_experts_are_loaded_as_trained_routers_load_them_in_inference_and_evenly_in_training(run):
    loads = ({}, {"expert_load": "balanced"}, {"expert_load": "power_law:1.2"})
    prompts = {"batch": 16, "input_len": 1024}
    usual, even, uneven = (run("qwen3_moe", "prefill", "vllm", prompts | load, ep=4).times_s for load in loads)
    assert usual == uneven > even  # the busiest rank has more than a quarter of the rows
    train = [run("qwen3_moe", "train", "megatron_core", load).times_s for load in ({}, {"expert_load": "balanced"})]
    assert train[0] == train[1]


@pytest.mark.parametrize("stack", ["torch", "vllm"])
def test_more_skew_is_never_faster(stack, run):
    loads = ("balanced", "zipf:0.5", "zipf:1", "zipf:2", "zipf:5", "zipf:20")
    found = [
        run("qwen3_moe", "prefill", stack, {"batch": 16, "input_len": 64, "expert_load": load}, ep=4) for load in loads
    ]
    times = [report.e2e_ms for report in found]
    assert times == sorted(times)
    assert times[-1] > times[0]
    exchanges = [report.breakdown.by_parallelism["ep"] for report in found]
    assert exchanges == sorted(exchanges)
    assert exchanges[-1] > exchanges[0]


def test_experts_that_are_loaded_evenly_are_said_where_chance_reads_fewer(run):
    def said(batch, load="balanced"):
        notes = run("qwen3_moe", work={"batch": batch, "expert_load": load}).notes
        return [note for note in notes if "evenly" in note]

    (note,) = said(4)
    assert note.startswith("4 tokens are taken to load experts evenly, so that they read 8 of 8 in a layer: by chance ")
    assert "they would read 5" in note  # 8 * (1 - (6 / 8)^4) = 5.5
    assert not said(1)  # that chooses two of them
    assert not said(64)  # that read all of them
    assert said(4, "power_law:0") == [note]  # which is even, too
    assert not said(4, "power_law:1.2")


@pytest.mark.parametrize("stack", ["torch", "vllm"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_context_ranks_share_the_cache(kind, stack, layout, run):
    work = {"batch": 64, "input_len": 2048, "cache": "static"}
    alone, shared = (
        run(kind=kind, stack=stack, work=work, **layout),
        run(kind=kind, stack=stack, work=work, cp=4, **layout),
    )
    part = shared.memory.by_class["KV cache"] / alone.memory.by_class["KV cache"]
    if kind == "decode":
        whole_tokens = {"torch": 1 / 4, "vllm": 513 / 2049}  # an engine's rank keeps whole tokens
        assert part == pytest.approx(whole_tokens[stack], rel=1e-3)
    assert part < 0.35  # of what a prompt's layers have filled when memory is fullest
    assert shared.breakdown.compute_s < alone.breakdown.compute_s
    assert shared.breakdown.by_parallelism["cp"] > 0


def test_context_ranks_merge_what_each_found_in_its_part_of_the_cache(run, small_model):
    workload = Workload("decode", batch=3, seq_len=63, cache="static", optimizer="none", attention="fused")
    plan = Plan(Parallel(cp=4), CLUSTER, load_stack("vllm"))
    graph = apply_passes(trace(small_model("llama"), workload, "bf16"), plan, INFERENCE)
    attention = [node for node, _ in graph.weighted() if node.op and node.op.kind == "attention_decode"]
    merged = [(node.op.kind, node.op.size_bytes) for node, _ in graph.weighted() if node.group == "cp"]
    assert [(node.op.seq_q, node.op.seq_kv) for node in attention] == [(1, 16)]
    assert merged == [("all_gather", 3 * 4 * 4 * 4), ("all_reduce", 3 * 64 * 2)]  # sums of 4 heads and ranks; results


def test_keys_made_from_a_latent_cache_are_not_shared_out(run):
    with pytest.raises(PlanError, match=r"parallel\.cp=2 .* absorbed_mla"):
        run("deepseek_v3", stack="torch", cp=2)
    assert run("deepseek_v3", stack="vllm", cp=2).breakdown.by_parallelism["cp"] > 0


def test_steps_that_are_one_of_many_are_told_from_a_prompt_alone() -> None:
    """A power limit acts on what follows each other without a pause."""
    alone = {kind: in_a_row(list(parts(Work(kind, batch=4, input_len=64)))) for kind in ("prefill", "decode")}
    assert alone == {"prefill": [1.0], "decode": [MANY]}
    generated = list(parts(Work("generate", batch=4, input_len=64, output_len=101)))
    assert sum(in_a_row(generated)) == pytest.approx(101)

"""``opcast simulate`` on a cluster, as a user calls it: what is answered, and one clear line for what cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from opcast.jobs.cli import main

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model's config.json."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def step(model: Path) -> list[str]:
    """A training step on one node."""
    work = ["workload=train", "workload.seq_len=256", "workload.global_batch=64"]
    return ["simulate", f"model={model}", "cluster=dgx_h100", *work]


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*arguments, "format=json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


BAD = {
    "parallel.tp=3": "take parallel.tp=2",
    "parallel.cp=3": "take parallel.cp=2",
    "parallel.pp=3": "take parallel.pp=2",
    "parallel.tp=2.5": "parallel.tp=2.5 must be a whole number",
    "parallel.ep=2": "routed experts",
    "parallel.dp=3": "take parallel.dp=8",
    "parallel.shard=4": "shards nothing",
    "parallel.shard=3 parallel.zero_stage=3": "take parallel.shard=2",
    "parallel.zero_stage=true": "parallel.zero_stage=True",
    "parallel.sequence_parallel=maybe parallel.tp=2": "must be true or false",
    "parallel.stages=[a,b] parallel.pp=2": "parallel.stages='a'",
    "parallel.stages=4 parallel.pp=2": "must be a list of layers",
    "parallel.stages=[1,2] parallel.pp=2": "add up to the 8",
    "parallel.schedule=dualpipe": "even number of stages",
    "workload.global_batch=7": "take workload.global_batch=8",
    "workload.data_loading_ms=inf": "workload.data_loading_ms=inf",
    "cluster.nodes=0": "cluster.nodes=0 must be",
    "cluster.nic_gbps=nan": "cluster.nic_gbps=nan must be",
    "cluster.price_per_device_hour=-3": "cluster.price_per_device_hour=-3 must be",
    "cluster.nic_gpbs=3": "did you mean nic_gbps",
    "device.memory_gbps=x": "device.memory_gbps='x' must be a number",
    "device.tensor_tflops=5": "must be rates by dtype",
    "device.l3_mib=5": "did you mean l2_mib",
    "offload=optimizer": "take offload=[optimizer]",
    "offload=[disk]": "'disk' is not one of optimizer, activations, kv",
    "offload=[kv]": "offload=kv is for inference",
    "passes=json": "must be a list of names",
    "passes=[json:loads]": "pass 'json:loads' failed",
    "options={zigzga:true}": "is not one of allocator, attention_dtype",
    "stack.bucket_mib=x": "stack.bucket_mib='x' must be a number",
    "stack.overlap=[dp,everything]": "'everything' is not one of dp",
    "stack.gradient_dtype=int3": "is not one of same",
    "stack.scale={h100_sxm:{gemm:x}}": "stack.scale.h100_sxm.gemm='x'",
    "within_s=soon": "within_s='soon' must be a number",
    "price_per_gpu_hour=-2": "price_per_gpu_hour=-2 must be a number",
    "strict=2": "strict=2 must be true, or the share",
    "strict=0": "measuring these would help most",
    "cluster=null": "cluster=null does not exist",
    "cluster.topology={shape:foo}": "cluster.topology.shape='foo' is not one of fat_tree, rails",
    "model.config.num_hidden_layers=4": "is for models that opcast ships",
    "options.capacity=x": "options.capacity='x' must be a number",
    "options.capacity=-1": "options.capacity=-1 must be a number",
    "options.fp8_scaling=never": "options.fp8_scaling='never' is not one of delayed, current, rowwise",
    "options.ep_mode=x": "options.ep_mode='x' is not one of normal",
    "stack.fusion=[json:loads]": "fusion rule 'json:loads': calling it without arguments failed",
    "stack.fusion=[builtins:object]": "fusion rule 'builtins:object' returned object, not a Rule",
    "stack=trtllm": "stack=trtllm serves, it does not train: take one of",
    "backend=nobody": "backend=nobody has no predictor or measurement for h100_sxm; known: ",
    "backend=vlm": "did you mean vllm?",
    "engine.order=null": "engine.order=None must be a list of engines",
    "engine=null": "engine.order=None must be a list of engines",
    "graphs=null": "graphs=null must be a folder",
    "graphs=/dev/null/x": "graphs=/dev/null/x can be no folder",
    "workload.recompute=full:99": "take full:8",
    "workload.recompute=layers:5-2": "take layers:2-5",
    "workload.recompute=layers:0-99": "take layers:0-7",
    "workload.expert_load=zipf:1000": "zipf:EXPONENT (0 to 20)",
    "workload.expert_load=0.5,0.3": "write a list as workload.expert_load=[0.5,0.3]",
}


@pytest.mark.parametrize(("given", "says"), BAD.items())
def test_bad_input_is_one_line_and_exit_code_2(
    step: list[str], given: str, says: str, capsys: pytest.CaptureFixture[str]
):
    if given.startswith("cluster=null"):
        step.remove("cluster=dgx_h100")
    assert main([*step, *given.split(), "format=json"]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1
    assert says in printed.err
    assert says in json.loads(printed.out)["error"]


@pytest.mark.parametrize(
    ("given", "changes"),
    {
        "workload.recompute=full": "memory",
        "precision=fp8": "step_time_s",
        "offload=[optimizer]": "memory",
        "stack=megatron": "step_time_s",
        "workload.data_loading_ms=5": "step_time_s",
        "price_per_gpu_hour=2": "cost",
        "stragglers=[{device: 0, slowdown: 1.5}]": "step_time_s",
        "options={allocator: native}": "memory",
    }.items(),
)
def test_what_a_plan_has_counts_on_one_device_too(
    model: Path, given: str, changes: str, capsys: pytest.CaptureFixture[str]
):
    asked = ["simulate", f"model={model}", "device=h100_sxm", "format=json"]
    found = []
    for settings in ([], [given]):
        assert main([*asked, *settings]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0][changes] != found[1][changes]


@pytest.mark.parametrize("given", ["parallel.tp=2", "parallel.zero_stage=3", "network=flow", "faults=[{where: nic0}]"])
def test_what_needs_a_cluster_is_not_ignored_without_one(model: Path, given: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", f"model={model}", "device=h100_sxm", given]) == 2
    assert "needs a cluster" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["parallel.zero_stage=3", "parallel.schedule=dualpipe", "offload=[optimizer]"])
def test_what_only_training_does_is_not_ignored_in_inference(
    model: Path, given: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", f"model={model}", "workload=decode", "cluster=dgx_h100", given]) == 2
    assert "is for training" in capsys.readouterr().err


def test_a_model_without_layers_and_an_unknown_cache(model: Path, capsys: pytest.CaptureFixture[str]):
    empty = ["model=tiny_llama_100m", "model.config.num_hidden_layers=0", "workload.global_batch=8"]
    assert main(["simulate", *empty, "cluster=dgx_h100"]) == 2
    assert "num_hidden_layers=0 must be a whole number of at least 1" in capsys.readouterr().err
    assert main(["simulate", f"model={model}", "workload=decode", "workload.cache=foo", "cluster=dgx_h100"]) == 2
    assert "workload.cache='foo' is not one of dynamic, static" in capsys.readouterr().err


def test_shares_of_experts_may_be_a_list(step: list[str], capsys: pytest.CaptureFixture[str]):
    listed, text = (answer([*step, f"workload.expert_load={load}"], capsys) for load in ("[0.5,0.3]", "'0.5,0.3'"))
    assert listed["step_time_s"] == text["step_time_s"]


def test_the_parts_add_up_to_the_step(step: list[str], capsys: pytest.CaptureFixture[str]):
    found = answer([*step, "parallel.pp=2", "parallel.tp=2", "workload.data_loading_ms=7"], capsys)
    parts = found["breakdown"]
    total = sum(parts[f"{name}_s"] for name in ("compute", "exposed_comm", "bubble", "optimizer", "host"))
    assert total == pytest.approx(found["step_time_s"], rel=1e-6)
    assert found["mfu"] <= found["hfu"] < 1


def test_overrides_of_device_and_stack_need_no_plus(step: list[str], capsys: pytest.CaptureFixture[str]):
    usual = answer([*step, "stack.cuda_graph=true"], capsys)
    slower = answer([*step, "stack.cuda_graph=true", "device.memory_gbps=300"], capsys)
    longer = answer([*step, "stack.cuda_graph=true", "stack.step_overhead_us=5000"], capsys)
    assert slower["breakdown"]["optimizer_s"] > 2 * usual["breakdown"]["optimizer_s"]
    assert longer["step_time_s"] == pytest.approx(usual["step_time_s"] + 5e-3, rel=1e-6)


def test_recomputation_trades_memory_for_time(step: list[str], capsys: pytest.CaptureFixture[str]):
    big = [*step, "workload.seq_len=2048", "stack.cuda_graph=true"]
    found = [answer([*big, f"workload.recompute={policy}"], capsys) for policy in ("none", "full:4", "full")]
    assert found[0]["step_time_s"] < found[1]["step_time_s"] < found[2]["step_time_s"]
    assert found[0]["memory"]["peak_gib"] > found[1]["memory"]["peak_gib"] > found[2]["memory"]["peak_gib"]
    assert found[0]["mfu"] > found[2]["mfu"]


def test_price_and_chance(step: list[str], capsys: pytest.CaptureFixture[str]):
    found = answer([*step, "price_per_gpu_hour=2", "within_s=0"], capsys)
    assert found["cost"] == pytest.approx(2 * 8 * found["step_time_s"] / 3600)
    assert found["cost_per_million_tokens"] == pytest.approx(found["cost"] / (64 * 256) * 1e6)
    assert found["p_within"] == pytest.approx(0, abs=1e-3)


def test_the_timeline_is_in_order_on_every_thread(step: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "step.json.gz"
    found = answer([*step, "parallel.pp=2", "parallel.tp=2", f"trace={path}"], capsys)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ends: dict[tuple[int, int], list[float]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        open_spans = ends.setdefault((event["pid"], event["tid"]), [])
        while open_spans and open_spans[-1] <= event["ts"] + 1e-3:
            open_spans.pop()
        end = event["ts"] + event["dur"]
        assert not open_spans or end <= open_spans[-1] + 1e-2  # beside each other or one inside the other
        open_spans.append(end)
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(found["step_time_s"] * 1e6, rel=0.05)

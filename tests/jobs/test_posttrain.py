"""``opcast posttrain``: what it prints, writes and refuses, and which phases each method has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import opcast
from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.jobs.cli import main
from opcast.simulator.post_training.answer import PostTrainReport
from opcast.simulator.post_training.sync import checkpoint_tensors

TINY = "tiny_llama_100m"
FEW = {"prompts": 8, "lives": 20, "batches": 1, "seq_len": 128, "cluster": "dgx_h100", "zero_stage": 1}
LENGTHS = {"prompt_len": {"mean": 20}, "response_len": {"mean": 60, "std": 40}}
COPIES = ["training state to GPUs", "training state to host"]
WORDS = ["cluster=dgx_h100", "workload.seq_len=128", "prompts=8", "lives=20", "batches=1"]


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a question that is refused."""
    assert main(["posttrain", f"model={TINY}", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "post-training needs a cluster: cluster=dgx_h100"),
        (["cluster=dgx_h100", "method=rlhf"], "method='rlhf' is not one of sft, dpo, ppo, grpo"),
        (["cluster=dgx_h100", "method=lora"], "method=sft workload.lora_rank=16"),
        (["cluster=dgx_h100", "method=qlora"], "method=sft workload.lora_rank=16 precision=nf4"),
        (["cluster=dgx_h100", "prompts=0"], "prompts=0 must be"),
        (["cluster=dgx_h100", "workload=decode"], "workload=decode trains nothing"),
        (["cluster=dgx_h100", "workload.global_batch=48"], "must divide the 1,024 sequences of a batch"),
        (["cluster=dgx_h100", "asynchronous=true"], "asynchronous=true needs GPUs of its own for rollout"),
        (["cluster=dgx_h100", "rollout.gpus=4"], "rollout.gpus=4 is of placement=apart"),
        (["cluster=dgx_h100", "placement=apart", "offload_gbps=4"], "offload_gbps=4 is not read with placement=apart"),
        (["cluster=dgx_h100", "rollout.tp=3", "placement=apart", "rollout.gpus=4"], "no multiple of a replica's 3"),
        (["cluster=dgx_h100", "rollout.tp=3"], "do not divide the 8 GPUs"),
        (["cluster=dgx_h100", "method=sft", "partial=0.5"], "partial=0.5 is not read with method=sft"),
        (["cluster=dgx_h100", "method=dpo", "rollout.tp=4"], "rollout.tp=4 is not read with method=dpo"),
        (["cluster=dgx_h100", "method=sft", "reward.seconds=9"], "reward.seconds=9 is not read with method=sft"),
        (["cluster=dgx_h100", "method=sft", "responses=4"], "responses=4 is not read with method=sft"),
        (["cluster=dgx_h100", "critic=llama3_8b"], "critic=llama3_8b is not read with method=grpo"),
        (["cluster=dgx_h100", "method=sft", "kl=0.1"], "kl=0.1 is not read with method=sft: leave it out"),
        (["cluster=dgx_h100", "method=sft", "offload_training=true"], "offload_training=true is not read with"),
        (["cluster=dgx_h100", "kl=0", "swap_reference=true"], "swap_reference=true is not read without a reference"),
        (["cluster=dgx_h100", "workload.lora_rank=8", "swap_reference=true"], "is not read with adapters"),
        (["cluster=dgx_h100", "rollout.kv_fraction=2"], "rollout.kv_fraction=2 must be a share"),
        (["cluster=dgx_h100", "sync_tensor_us=-1"], "sync_tensor_us=-1 must be"),
        (["cluster=dgx_h100", "method=sft", "sync_tensor_us=9"], "sync_tensor_us=9 is not read with method=sft"),
        (["cluster=dgx_h100", "response_len.mean=-1"], "must be a number of at least 1"),
        (["cluster=dgx_h100", "lengths=/no/such.csv"], "lengths=/no/such.csv must be a CSV file"),
        (["cluster=dgx_h100", "prompts=1048576"], "more than the 1,048,576 simulated"),
        (["cluster=dgx_h100", "placement=apart", "parallel.tp=8"], "no split leaves whole replicas"),
        (["cluster=dgx_h100", "report=/no/where/rl.html"], "there is no folder /no/where"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *words)


@pytest.fixture(scope="module")
def grpo() -> PostTrainReport:
    """GRPO of a small model on one node."""
    return opcast.posttrain(TINY, method="grpo", responses=4, **FEW, **LENGTHS)


def phases(report: PostTrainReport) -> list[str]:
    return [phase.name for phase in report.phases]


def test_grpo_has_its_phases(grpo: PostTrainReport) -> None:
    assert phases(grpo) == [
        "rollout",
        "training state to GPUs",
        "old log-probs",
        "reference log-probs",
        "training",
        "weight sync",
        "training state to host",
    ]
    assert grpo.iteration_s.p10 <= grpo.iteration_s.p50 <= grpo.iteration_s.p90
    assert sum(phase.seconds for phase in grpo.phases) == pytest.approx(grpo.iteration_s.mean, rel=0.3)
    assert grpo.fits


def test_optimizer_states_are_copied_at_the_rate_that_is_told(grpo: PostTrainReport) -> None:
    """A quarter of the rate, four times the seconds; weights take what PCIe lets them, and nothing else changes."""
    slow, fast = (
        opcast.posttrain(TINY, method="grpo", responses=4, offload_gbps=rate, **FEW, **LENGTHS) for rate in (1.0, 4.0)
    )
    for name in COPIES:
        optimizer_s = (slow.phase_s(name) - fast.phase_s(name)) / (1.0 - 0.25)
        weights_s = slow.phase_s(name) - optimizer_s
        assert 0.0 < weights_s < grpo.phase_s(name) < fast.phase_s(name) < optimizer_s
    assert slow.phase_s("rollout") == fast.phase_s("rollout")


def test_apart_optimizer_states_alone_are_copied_around_log_probs() -> None:
    apart = {"method": "grpo", "responses": 4, "placement": "apart", "rollout": {"gpus": 4}, **FEW, **LENGTHS}
    kept, away = (opcast.posttrain(TINY, offload_training=each, **apart) for each in (False, True))
    assert [name for name in phases(away) if name not in phases(kept)] == COPIES[::-1]
    order = phases(away)
    assert order.index(COPIES[1]) < order.index("old log-probs") < order.index(COPIES[0]) < order.index("training")
    slow, fast = (
        opcast.posttrain(TINY, offload_training=True, offload_gbps=rate, **apart).phase_s(COPIES[0])
        for rate in (1.0, 4.0)
    )
    assert slow == pytest.approx(4.0 * fast)


def test_a_reference_that_swaps_copies_weights_three_times_and_takes_no_memory_of_gpus() -> None:
    dpo = {"method": "dpo", **FEW}
    stays, swaps = (opcast.posttrain(TINY, swap_reference=each, **dpo) for each in (False, True))
    assert phases(swaps) == ["swap of reference weights", *phases(stays)]
    weights_gib = stays.memory[0].needed_gib - swaps.memory[0].needed_gib
    assert weights_gib > 0.0
    pcie_gbps = load_cluster("dgx_h100").host_share_gbps() or math.inf
    rate = min(pcie_gbps, load_device("h100_sxm").pcie_gbps or math.inf)
    assert swaps.phase_s("swap of reference weights") == pytest.approx(3.0 * weights_gib * 2**30 / 1e9 / rate)
    assert swaps.iteration_s.p50 > stays.iteration_s.p50


def test_a_trainer_that_hands_tensors_over_slowly_holds_the_sync_up(grpo: PostTrainReport) -> None:
    """A Llama of so many layers has nine tensors in each, and three beside them; fewer where head and table are one."""
    slow = opcast.posttrain(TINY, method="grpo", responses=4, sync_tensor_us=1e6, **FEW, **LENGTHS)
    assert grpo.sync is not None
    assert slow.sync is not None
    assert slow.sync.tensors % 9 in (2, 3)
    assert slow.phase_s("weight sync") == pytest.approx(slow.sync.tensors)
    none = opcast.posttrain(TINY, method="grpo", responses=4, sync_tensor_us=0, **FEW, **LENGTHS)
    assert none.sync is not None
    assert none.sync.seconds == none.sync.gather_s + none.sync.broadcast_s <= grpo.sync.seconds


def test_experts_are_handed_over_one_by_one() -> None:
    """Qwen3 30B has 48 layers of 128 experts with three tensors each, and 531 more, stacked experts not among them."""
    step = opcast.simulate("qwen3_30b_a3b", "train", cluster="dgx_h100", ep=8, seq_len=4096, global_batch=8)
    assert checkpoint_tensors(step) == 48 * 128 * 3 + 531 - 48 * 2


def test_prompts_that_are_cut_are_told(grpo: PostTrainReport) -> None:
    assert not any("prompts are longer" in note for note in grpo.notes)
    long = {**LENGTHS, "prompt_len": {"kind": "uniform", "low": 1, "high": 400}}
    notes = opcast.posttrain(TINY, method="sft", **FEW, **long).notes
    assert any("of the prompts are longer than workload.seq_len=" in note for note in notes)


def test_a_weight_sync_moves_all_weights_once(grpo: PostTrainReport) -> None:
    step = opcast.simulate(TINY, cluster="dgx_h100", seq_len=128, zero_stage=1)
    assert grpo.sync is not None
    assert grpo.sync.size_bytes / 2**30 == pytest.approx(step.memory.weights_gib, rel=0.01)


def test_of_adapters_they_alone_are_sent(grpo: PostTrainReport) -> None:
    adapters = opcast.posttrain(TINY, responses=4, lora_rank=8, kl=0, **FEW, **LENGTHS)
    assert adapters.sync is not None
    assert grpo.sync is not None
    assert 0 < adapters.sync.size_bytes < 0.1 * grpo.sync.size_bytes
    assert "reference log-probs" not in phases(adapters)
    assert any("adapters" in note for note in adapters.notes)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"method": "sft"}, ["training"]),
        ({"method": "sft", "lora_rank": 8}, ["training"]),
        ({"method": "dpo"}, ["reference log-probs", "training"]),
    ],
)
def test_what_rolls_nothing_out_has_few_phases(settings: dict[str, Any], names: list[str]) -> None:
    report = opcast.posttrain(TINY, **settings, **FEW, **LENGTHS)
    assert phases(report) == names
    assert report.rollout is None
    assert report.sync is None


def test_ppo_has_a_critic_and_a_reward_model() -> None:
    report = opcast.posttrain(
        TINY, method="ppo", reward={"model": TINY, "seconds": 2.0}, offload_training=False, **FEW, **LENGTHS
    )
    names = phases(report)
    assert names == [
        "rollout",
        "reward model",
        "rewards by rules",
        "old log-probs",
        "reference log-probs",
        "values",
        "critic training",
        "training",
        "weight sync",
    ]
    assert report.phase_s("rewards by rules") == 2.0
    assert {memory.name for memory in report.memory} == {"training", "critic training", "rollout"}


def test_the_split_is_searched_and_one_step_off_is_quicker() -> None:
    settings = {"responses": 4, "cluster": "dgx_h100", **{k: v for k, v in FEW.items() if k != "cluster"}, **LENGTHS}
    report = opcast.posttrain(TINY, placement="search", **settings)
    assert report.ways
    able = [way for way in report.ways if way.iteration_s is not None]
    assert min(way.iteration_s for way in able if way.fits) == pytest.approx(  # type: ignore[type-var]
        next(
            way.iteration_s
            for way in able
            if (way.rollout_gpus, way.asynchronous, way.placement)
            == (report.rollout_gpus, report.asynchronous, report.placement)
        )
    )
    by_gpus = {(way.rollout_gpus, way.asynchronous): way for way in able if way.placement == "apart"}
    for (gpus, asynchronous), way in by_gpus.items():
        if asynchronous:
            assert way.iteration_s <= by_gpus[gpus, False].iteration_s  # type: ignore[operator]


def test_the_command_line_and_python_agree_and_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"report={tmp_path / 'rl.html'}", f"picture={tmp_path / 'rl.svg'}"]
    words = ["method=dpo", "parallel.zero_stage=1", "prompt_len.mean=20", "response_len.mean=60", "response_len.std=40"]
    assert main(["post-train", f"model={TINY}", *WORDS, *words, *files, "format=json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    report = opcast.posttrain(TINY, method="dpo", **FEW, **LENGTHS)
    assert answer["iteration_s"] == report.to_dict()["iteration_s"]
    assert "<svg" in (tmp_path / "rl.html").read_text()
    assert (tmp_path / "rl.svg").read_text().startswith("<svg")

"""Advice: whatever is proposed was tried, so that who follows it gets an answer that fits and is not sent round."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster, one_device
from opcast.datasets.devices import load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.question.plan import Parallel, Plan, PlanError, load_stack
from opcast.simulator.question.work import Work
from opcast.simulator.simulate import simulate
from opcast.simulator.trace.models import shipped_config

H100 = load_device("h100_sxm")
NODE = load_cluster("dgx_h100")
ENGINE = build_engine(H100, [], [], ("network", "analytical"), cluster=NODE)
PHI4 = {
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "num_hidden_layers": 2,
    "vocab_size": 100352,
    "pad_token_id": 0,
}
LLAMA_70B = {**shipped_config("llama3_70b"), "num_hidden_layers": 8}
DECODE, TRAIN = Work("decode", batch=1, input_len=1024), Work("train", seq_len=8192, global_batch=8)
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """A function: model, work and layout on a node of eight H100 -> the report."""
    graphs: Path = tmp_path_factory.mktemp("graphs")

    def make(model: Any, work: Work, stack: str = "vllm", cluster: Any = NODE, device: Any = H100, **own: Any) -> Any:
        of_plan = {name: own.pop(name) for name in ("recompute", "offload", "kv_dtype", "quantization") if name in own}
        plan = Plan(Parallel(**own), cluster, load_stack(stack), **of_plan)
        return simulate(model, work, plan, device, ENGINE, graphs)

    return make


@pytest.mark.parametrize("tp", [3, 4, 5, 8])
def test_a_degree_that_is_advised_passes_every_check(tp: int, ask: Ask) -> None:
    """phi-4 has 40 heads and 10 of keys and values: of eight devices only 1 and 2 divide both."""
    with pytest.raises(PlanError, match=rf"(tp = {tp} |parallel.tp={tp} ).*; take parallel\.tp=2$|= {tp} does not"):
        ask(PHI4, DECODE, tp=tp)
    with pytest.raises(PlanError) as refused:
        ask(PHI4, DECODE, tp=tp)
    advised = int(str(refused.value).rpartition("parallel.tp=")[2])
    assert ask(PHI4, DECODE, tp=advised).fits


def test_data_ranks_that_were_given_go_along(ask: Ask) -> None:
    with pytest.raises(PlanError, match=r"take parallel\.tp=2 parallel\.dp=4$"):
        ask(PHI4, DECODE, tp=4, dp=2)


def test_a_degree_that_fits_goes_before_one_that_does_not(ask: Ask) -> None:
    tight = replace(H100, memory_gib=1.5)
    with pytest.raises(PlanError, match=r"take parallel\.tp=2, of which a device needs \d+\.\d GiB and has 1\.5$"):
        ask(PHI4, DECODE, tp=4, device=tight)


def test_what_no_value_mends_is_told_so(ask: Ask) -> None:
    with pytest.raises(PlanError, match=r"with the other settings as they are no parallel\.pp goes$"):
        ask(PHI4 | {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 128}, DECODE, tp=2, pp=8)


def settings_of(advice: str) -> dict[str, str]:
    """Settings that an advice names, by name."""
    return dict(re.findall(r"([\w.]+)=(\[?[\w,]+\]?)", advice))


@pytest.mark.parametrize(
    ("work", "stack", "own"),
    [
        (TRAIN, "torch", {}),
        (replace(TRAIN, micro_batch=8, global_batch=64), "torch", {"zero_stage": 3}),
        (replace(TRAIN, seq_len=131072), "torch", {"zero_stage": 3, "recompute": "full", "offload": ("optimizer",)}),
        (replace(DECODE, batch=2048, input_len=8192), "vllm", {"tp": 2}),
        (replace(DECODE, batch=512, input_len=131072), "trtllm", {"tp": 8}),
    ],
)
def test_a_step_that_does_not_fit_has_times_and_advice_that_fits(work: Work, stack: str, own: Any, ask: Ask) -> None:
    report = ask(LLAMA_70B, work, stack, **own)
    assert not report.fits
    whole_s = report.step_time_s if work.kind == "train" else report.e2e_ms
    assert whole_s > 0
    advice = report.memory.advice
    assert "GiB too much for 79.1 GiB; " in advice
    told = settings_of(advice.partition("; ")[2])
    assert told, advice
    of_work = {name[9:]: int(value) for name, value in told.items() if name.startswith("workload.") and value.isdigit()}
    degrees = {name[9:]: int(value) for name, value in told.items() if name.startswith("parallel.")}
    more: dict[str, Any] = {"recompute": "full"} if "workload.recompute" in told else {}
    more |= {"offload": tuple(told["offload"].strip("[]").split(","))} if "offload" in told else {}
    more |= {"kv_dtype": told["precision.kv_dtype"]} if "precision.kv_dtype" in told else {}
    cluster = replace(NODE, nodes=int(told.get("cluster.nodes", 1)))
    again = ask(LLAMA_70B, replace(work, **of_work), stack, cluster, **{**own, **degrees, **more})
    assert again.fits or "still needs" in advice, advice
    assert all(value < 1000 for value in degrees.values())


def test_one_device_is_sent_to_several(ask: Ask) -> None:
    report = ask(
        LLAMA_70B, replace(DECODE, input_len=64), cluster=one_device(H100), device=replace(H100, memory_gib=14)
    )
    assert re.search(r"[248] such devices \(cluster=…\) and parallel\.tp=[248]$", report.memory.advice)


def test_the_command_shows_times_and_that_it_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from opcast.jobs.cli import main

    words = ["workload=decode", "model=llama3_8b", "model.config.num_hidden_layers=2", "device=h100_sxm", "stack=vllm"]
    words += ["device.memory_gib=2", "workload.batch=64", "workload.input_len=4096", f"home={tmp_path}"]
    assert main(["simulate", *words]) == 0
    shown = capsys.readouterr()
    assert "DOES NOT FIT" in shown.out
    assert "TPOT" in shown.out
    assert "GiB too much for 2 GiB; " in shown.err + shown.out


def test_a_prompt_that_does_not_fit_is_cut_into_chunks(ask: Ask) -> None:
    """Two million tokens at a time need 122 GiB of activations; engines compute 8,192 of them at a time."""
    report = ask(LLAMA_70B, Work("prefill", batch=1, input_len=2_000_000), tp=8)
    assert not report.fits
    assert "workload=batch 'workload.prompts=[[8192,1991808]]'" in report.memory.advice
    assert ask(LLAMA_70B, Work("batch", prompts=((8192, 1_991_808),)), tp=8).fits
    short = ask(LLAMA_70B, Work("prefill", batch=400, input_len=8192), tp=8)
    assert not short.fits
    assert "prompts" not in short.memory.advice

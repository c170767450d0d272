"""``opcast plan``: what it prints, writes and refuses, and that what a simulated step says goes into the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import opcast
from opcast.datasets.devices import load_device
from opcast.jobs.cli import main
from opcast.models import clocks
from opcast.simulator.job.checkpoints import state_gb
from opcast.simulator.question.canonical import RequestError

NODE: dict[str, Any] = {"cluster": "dgx_h100", "seq_len": 128, "global_batch": 64}
JOB = NODE | {"tokens": 1e10, "lives": 50}
TINY = "tiny_llama_100m"
MEASURED = ["cluster=dgx_h100", "workload.seq_len=128", "workload.global_batch=64", "step_time_s=2", "lives=20"]


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a job that is refused."""
    assert main(["plan", f"model={TINY}", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a job needs a length: tokens=15.6e12, or steps=100000"),
        (["tokens=-1"], "tokens=-1 must be a number of at least 0"),
        (["tokens=1e9", "steps=3"], "tokens and steps both say how long the job is"),
        (["tokens=1e9", "phases=[{tokns: 2e9}]"], "phases[0] has no field 'tokns'; did you mean tokens?"),
        (["tokens=1e9", "phases=[{}, {}]"], "only one can be what the others leave"),
        (["tokens=1e9", "failures.fleet=llama"], "failures.fleet='llama' is not one of llama3"),
        (["tokens=1e9", "workload=decode"], "workload=decode is no training job"),
        (["tokens=1e9", "layout=best"], "layout='best' is not one of given, search"),
        (["tokens=1e9", "restart.manual_share=2"], "restart.manual_share=2 must be a share"),
        (["tokens=1e9", "setbacks=-1"], "setbacks=-1 must be"),
        (["tokens=1e9", "report=/no/where/job.html"], "there is no folder /no/where"),
        (["tokens=1e9", *MEASURED], "give checkpoint.size_gb"),
        (["tokens=1e12", *MEASURED, "checkpoint.size_gb=1", "failures.scale=1e6"], "interruptions is not simulated"),
        (["steps=1000000000000000", *MEASURED, "checkpoint.size_gb=1"], "steps=1,000,000,000,000,000 of 8,192 tokens"),
        (["tokens=1e300", *MEASURED, "checkpoint.size_gb=1"], "at most 1e+18 tokens are counted"),
        (
            ["steps=1000", *MEASURED, "checkpoint.size_gb=1", "evaluation.every_steps=1", "evaluation.duration_s=1e9"],
            "interruptions is not simulated",
        ),
        pytest.param(  # lives of 40,000 interruptions
            ["steps=1000", *MEASURED, "checkpoint.size_gb=1e9", "checkpoint.every_steps=1", "checkpoint.store_gbps=1"],
            "interruptions is not simulated",
            marks=pytest.mark.slow,
        ),
        (["tokens=1e9", *MEASURED, "checkpoint.size_gb=1", "spares=9000000"], "take fewer lives"),
        (["tokens=1e9", *MEASURED, "layout=search"], "step_time_s is of one layout"),
        (["tokens=1e9", *MEASURED, "ramp.start=16", "ramp.increment=16", "ramp.sequences=100"], "ramp.step_time_s"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *words)


def test_the_command_prints_tables_and_writes_a_page_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"report={tmp_path}/job.html", f"picture={tmp_path}/job.svg"]
    more = [
        "checkpoint.size_gb=1.4",
        "tokens=1e10",
        "failures.per_gpu_year=300",
        "price_per_gpu_hour=2",
        "energy.gpu_w=500",
    ]
    assert main(["plan", f"model={TINY}", *MEASURED, *more, *files]) == 0
    out = capsys.readouterr().out
    for words in (
        "20 lives of the job",
        "days",
        "GPU-hours",
        "price",
        "kWh",
        "goodput, %",
        "steps that count",
        "your own rates",
    ):
        assert words in out
    page = (tmp_path / "job.html").read_text()
    assert "Progress of ten lives" in page
    assert "Days of all lives" in page
    picture = (tmp_path / "job.svg").read_text()
    assert picture.count("<polyline") == 10
    assert "<circle" in picture


def test_json_is_one_object_whose_shares_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MEASURED, "checkpoint.size_gb=1.4", "tokens=1e10", "failures.per_gpu_year=300", "format=json"]
    assert main(["plan", f"model={TINY}", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["parts"].values()) == pytest.approx(1.0)
    assert told["days"]["p10"] <= told["days"]["p50"] <= told["days"]["p90"]
    assert told["cost"] is None
    assert told["kwh"] is None
    assert told["interruptions"]["p50"] > 0


@pytest.fixture(scope="module")
def usual() -> opcast.PlanReport:
    return opcast.plan(TINY, **JOB)


def test_a_simulated_step_brings_its_interval_its_watts_and_its_checkpoint(usual: opcast.PlanReport) -> None:
    step = opcast.simulate(TINY, "train", **NODE)
    assert usual.step_time_s == step.step_time_s
    assert usual.steps == -(-(10**10) // (128 * 64))
    assert usual.days.p10 < usual.undisturbed_days * 1.02
    assert usual.days.p90 > usual.undisturbed_days
    assert usual.gpu_w == pytest.approx(step.power_w)
    hours = usual.days.p50 * 24 * 8
    assert usual.gpu_hours.p50 == pytest.approx(hours)
    assert usual.kwh is not None
    assert usual.kwh.p50 == pytest.approx(hours * step.power_w / 1000, rel=0.02)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "zero_stage": 1}, {"pp": 2}, {"tp": 2, "pp": 2, "zero_stage": 1}])
def test_a_checkpoint_holds_weights_and_optimizer_once(layout: dict[str, int], usual: opcast.PlanReport) -> None:
    """Two bytes of a 16-bit weight and twelve of Adam in fp32, whatever the layout."""
    size = opcast.plan(TINY, **JOB, **layout).checkpoint.size_gb
    assert size == pytest.approx(usual.checkpoint.size_gb, rel=0.02)
    parameters = opcast.simulate(TINY, "train", **NODE).stages[0].parameters
    assert size == pytest.approx(14e-9 * parameters, rel=0.02)


def test_phases_and_ramps_are_steps_of_their_own() -> None:
    phases = [{"tokens": 2e9, "seq_len": 256}, {}]
    apart = opcast.plan(TINY, **JOB, phases=phases)
    long, short = apart.phases
    assert (long.seq_len, short.seq_len) == (256, 128)
    assert long.step_s == opcast.simulate(TINY, "train", **NODE | {"seq_len": 256}).step_time_s
    ramp = opcast.plan(TINY, **JOB, ramp={"start": 16, "increment": 16, "sequences": 30_000})
    assert [phase.sequences for phase in ramp.phases] == [16, 32, 48, 64]
    times = [phase.step_s for phase in ramp.phases]
    assert times == sorted(times)
    assert ramp.undisturbed_days > opcast.plan(TINY, **JOB).undisturbed_days * 0.999


def test_asynchronous_checkpoints_and_faster_stores_never_lengthen_a_job() -> None:
    slow = {"every_steps": 500, "store_gbps": 0.5}
    times = [
        opcast.plan(TINY, **JOB, checkpoint=checkpoint, failures={"fleet": "none"}).undisturbed_days
        for checkpoint in (slow, slow | {"store_gbps": 5.0}, slow | {"asynchronous": True})
    ]
    assert times[0] > times[1]
    assert times[0] > times[2]


def test_the_best_layout_is_searched() -> None:
    found = opcast.plan(
        TINY, **JOB, layout="search", space={"tp": [1, 2], "pp": [1], "micro_batch": [8], "recompute": ["none"]}
    )
    assert found.notes[0].startswith("the best of ")
    by_hand = [opcast.simulate(TINY, "train", **NODE, tp=tp, micro_batch=8).step_time_s for tp in (1, 2)]
    assert found.step_time_s <= min(by_hand) * (1 + 1e-9)


def test_a_part_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(RequestError, match="failures=3 must be a mapping"):
        opcast.plan(TINY, **JOB, failures=3)


def test_more_gpus_fail_more_often() -> None:
    small, large = (
        opcast.plan(TINY, **JOB | {"nodes": nodes}, step_time_s=1.0, checkpoint={"size_gb": 1.4}).mtbf_hours
        for nodes in (1, 16)
    )
    assert small == pytest.approx(16 * large)


def test_waiting_for_a_slow_store_is_no_evaluation() -> None:
    """Asynchronous checkpoints that are not durable when the next is due hold it up."""
    checkpoint = {"size_gb": 100, "store_gbps": 1, "every_steps": 10, "asynchronous": True}
    job = opcast.plan(TINY, **JOB, step_time_s=1.0, checkpoint=checkpoint, failures={"fleet": "none"})
    assert job.parts["evaluation"] == 0.0
    assert job.parts["waiting for checkpoints"] > 0.8
    assert sum(job.parts.values()) == pytest.approx(1.0)


def test_causes_are_those_of_all_lives_whose_rates_differ() -> None:
    """The mean of rates that differ is above the median rate: the causes add up to what interrupted."""
    failures = {"per_gpu_year": 20, "per_node_year": 40, "spread": 1.0}
    job = opcast.plan(TINY, **JOB, step_time_s=1.0, checkpoint={"size_gb": 1.4}, failures=failures)
    assert sum(job.causes.values()) == pytest.approx(job.interruptions.mean)
    assert list(job.causes) == ["gpu", "node"]
    at_the_median = job.days.mean * 24 / job.mtbf_hours
    assert sum(job.causes.values()) > 1.2 * at_the_median


def test_spare_nodes_draw_what_idle_ones_do() -> None:
    usual = JOB | {"step_time_s": 1.0, "checkpoint": {"size_gb": 1.4}, "failures": {"fleet": "none"}}
    watts = {"energy": {"gpu_w": 500, "node_w": 1000}}
    none, two = (opcast.plan(TINY, **usual, **watts, spares=spares) for spares in (0, 2))
    idle = load_device("h100_sxm")
    more_w = 2 * (1000 + 8 * clocks.idle_w(idle))
    assert two.kwh.p50 - none.kwh.p50 == pytest.approx(more_w * two.days.p50 * 24 / 1000)


@pytest.mark.parametrize("layout", [{"ep": 4}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 2, "zero_stage": 1}])
def test_a_checkpoint_holds_every_expert_once(layout: dict[str, int]) -> None:
    whole, apart = (
        state_gb(opcast.simulate("moonlight_16b_moe", "train", **NODE, **degrees)) for degrees in ({}, layout)
    )
    assert apart == pytest.approx(whole, rel=0.01)


def test_people_lengthen_a_job_and_no_step_is_made_twice_for_it() -> None:
    measured = NODE | {"tokens": 1e10, "lives": 2000, "step_time_s": 20.0, "checkpoint": {"size_gb": 1}}
    well, usual, told = (opcast.plan(TINY, **measured, setbacks=each) for each in (0.0, None, 0.108))
    assert usual.days == told.days
    assert usual.days.p50 / well.days.p50 == pytest.approx(2.0**0.108, rel=0.01)
    assert usual.days.p90 / well.days.p90 == pytest.approx(10.0**0.108, rel=0.02)
    assert usual.days.p10 >= well.days.p10
    assert usual.lost_hours == well.lost_hours
    assert sum(usual.parts.values()) == pytest.approx(1.0)
    assert any("setbacks=0" in note for note in usual.notes)
    assert not any("setbacks" in note for note in well.notes)


def test_a_job_that_nothing_interrupts_has_no_setbacks() -> None:
    report = opcast.plan(
        TINY, **NODE, steps=100, step_time_s=2.0, checkpoint={"size_gb": 1}, failures={"fleet": "none"}
    )
    assert report.days.p10 == report.days.p90


def test_a_step_that_does_not_fit_is_told_before_the_days(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama2_7b", "device=rtx_4090", "workload.seq_len=128", "workload.global_batch=8", "steps=100"]
    assert main(["plan", *words, "lives=20"]) == 0
    shown = capsys.readouterr()
    assert next(line for line in (shown.err + shown.out).splitlines() if "steps of" in line).endswith("(does not fit)")

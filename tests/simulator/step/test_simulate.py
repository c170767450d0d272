"""From a model and a workload to a report."""

from __future__ import annotations

import pytest

from opcast.datasets.devices import DeviceError, load_device
from opcast.simulator.engines import build_engine
from opcast.simulator.question.work import Work, WorkloadError
from opcast.simulator.report.answer import InferenceReport, StepReport
from opcast.simulator.simulate import alone, simulate

DEVICE = load_device("h100_sxm")
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 2000,
}


def run(work: Work) -> StepReport | InferenceReport:
    return simulate(MODEL, work, alone(DEVICE, "bf16"), DEVICE, build_engine(DEVICE, [], []))


def test_gradient_accumulation_runs_the_optimizer_once():
    one = run(Work("train", seq_len=128))
    four = run(Work("train", seq_len=128, global_batch=4))
    assert isinstance(one, StepReport)
    assert isinstance(four, StepReport)
    calls = {share.kind: share.count for share in four.breakdown.by_op}
    assert calls["adamw"] == 1
    assert calls["attention_backward"] == 4 * 2
    # The host bounds so small a step: adding each gradient to what is there is an operator of its own.
    assert 3 * one.step_time_s < four.step_time_s < 4 * one.step_time_s * 1.1
    assert four.tokens_per_s_per_gpu > one.tokens_per_s_per_gpu * 0.9


def test_a_generation_is_a_prefill_and_its_steps():
    whole = run(Work("generate", input_len=128, output_len=9))
    assert isinstance(whole, InferenceReport)
    prefill = run(Work("prefill", input_len=128))
    assert whole.ttft_ms == pytest.approx(prefill.e2e_ms)
    assert whole.e2e_ms == pytest.approx(whole.ttft_ms + 8 * whole.tpot_ms)
    first, last = (run(Work("decode", input_len=length)).tpot_ms for length in (128, 135))
    assert min(first, last) * 0.99 <= whole.tpot_ms <= max(first, last) * 1.01


def test_the_breakdown_adds_up_to_the_step():
    report = run(Work("train", seq_len=128))
    assert isinstance(report, StepReport)
    parts = report.breakdown
    total = parts.compute_s + parts.exposed_comm_s + parts.bubble_s + parts.optimizer_s + parts.host_s
    assert total == pytest.approx(report.step_time_s)
    assert sum(share.time_s for share in parts.by_op) + parts.host_s == pytest.approx(report.step_time_s)
    assert sum(report.provenance.values()) == pytest.approx(1.0)
    assert 0 < report.mfu <= report.hfu < 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "fly"}, "choose from train"),
        ({"seq_len": 0}, "must be a whole number"),
        ({"micro_batch": 3, "global_batch": 4}, "no multiple"),
        ({"batch": 1.5}, "must be a whole number"),
    ],
)
def test_work_that_cannot_be_is_refused(fields: dict[str, object], says: str):
    with pytest.raises(WorkloadError, match=says):
        Work(**fields)  # type: ignore[arg-type]


def test_a_dtype_the_device_lacks_is_refused():
    v100 = load_device("v100_sxm")
    with pytest.raises(DeviceError, match="has no bf16"):
        simulate(MODEL, Work("prefill"), alone(v100, "bf16"), v100, build_engine(v100, [], []))

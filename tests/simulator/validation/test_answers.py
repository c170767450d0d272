"""What a report says of the quantities that a row measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datasets.devices import load_device
from opcast.datasets.truth import InferenceRow, OperatorRow, read_table
from opcast.simulator.engines.analytical import AnalyticalEngine
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.question.plan import Plan
from opcast.simulator.report.answer import InferenceReport
from opcast.simulator.simulate import simulate
from opcast.simulator.trace import Workload
from opcast.simulator.trace.entry import describe_overlong
from opcast.simulator.trace.models import resolve
from opcast.simulator.validation.answers import (
    Engines,
    Predictions,
    inference_quantities,
    operator_quantities,
    simulated,
)
from opcast.simulator.validation.cases import ValidationSettings, inference_case

TABLE = """source,model_canon,gpu_canon,num_gpus,precision,batch_size,input_len_tokens,output_len_tokens,latency_ms
Koyeb GPU benchmarks,tiny_llama_100m,h100_sxm,1,bf16,2,64,8,10
"""


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> InferenceRow:
    path = tmp_path_factory.mktemp("table") / "runs.csv"
    path.write_text(TABLE)
    (found,) = read_table(path).rows
    assert isinstance(found, InferenceRow)
    return found


def test_a_cached_prompt_takes_no_longer_than_another_token(row: InferenceRow) -> None:
    setting = ValidationSettings(lambda device, cluster: AnalyticalEngine(device), calibration="none")
    case = inference_case(row, setting)
    assert isinstance(case.plan, Plan)
    engine = Engines(setting).of(case.device, case.plan.cluster)
    report = simulate(case.config, case.work, case.plan, case.device, engine, None)
    assert isinstance(report, InferenceReport)
    assert not row.options  # that the prompt was cached is read off these very runs, so that no score may know it
    cached_row = replace(row, options={"prompt": "cached"})
    cached, whole = (inference_quantities(report, each) for each in (cached_row, row))
    assert whole["e2e"].value == pytest.approx(report.e2e_ms)
    assert cached["e2e"].value == pytest.approx(report.tpot_ms * row.output_len)
    assert cached["ttft"].value == pytest.approx(report.tpot_ms)
    assert cached["throughput"].value / whole["throughput"].value == pytest.approx(
        whole["e2e"].value / cached["e2e"].value
    )
    low, high = cached["e2e"].interval
    assert low < cached["e2e"].value < high


def test_a_run_beyond_the_positions_of_its_model_is_a_run_of_a_longer_one(row: InferenceRow) -> None:
    """Benchmarks of random weights take GPT-J past its 2,048 positions; a user's question is refused."""
    config = {"model_type": "gptj", "n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "n_positions": 128}
    setting = ValidationSettings(lambda device, cluster: AnalyticalEngine(device), calibration="none")
    case = inference_case(replace(row, config=config, input_len=128, output_len=8), setting)
    assert case.config == config | {"n_positions": 136}
    workload = Workload("decode", batch=1, seq_len=128, attention="fused", optimizer="none")
    assert describe_overlong(resolve(case.config), workload) == ""
    assert describe_overlong(resolve(config), workload) == "it has 128 positions, not 129; take workload.input_len=127"


OPERATORS = """source,row_id,op,gpu_canon,precision,M,N,K,latency_ms,empty_op_us
my timer,kernel,matmul,A100-80,fp16,64,64,64,0.02,
my timer,call,matmul,A100-80,fp16,64,64,64,0.02,15
LLMCompass,told,matmul,A100-80,fp16,64,64,64,0.02,
wrong,less,matmul,A100-80,fp16,64,64,64,0.02,-1
"""


def test_a_timer_that_sees_the_host_is_answered_with_the_host(tmp_path: Path) -> None:
    (tmp_path / "ops.csv").write_text(OPERATORS)
    table = read_table(tmp_path / "ops.csv")
    rows = table.rows
    assert all(isinstance(row, OperatorRow) for row in rows)
    assert [(each.id, each.why) for each in table.unsupported] == [("less", "empty_op_us=-1 must be 0 or more")]
    setting = ValidationSettings(lambda device, cluster: AnalyticalEngine(device))
    answers = Predictions()
    operator_quantities(answers, rows, setting, Engines(setting))
    assert not answers.failed
    kernel, call, told = (answers.predicted[row.id]["latency"] for row in rows)
    launch_us = load_device("a100_sxm_80gb").launch_us
    assert call - kernel == pytest.approx((15.0 - launch_us) * 1e-3)  # the launch is in both
    assert told - kernel == pytest.approx((21.0 - launch_us) * 1e-3)  # tests/evidence/published/llmcompass.yaml
    bounds = [answers.intervals[row.id]["latency"] for row in rows]
    assert bounds[1][1] - bounds[0][1] == pytest.approx(call - kernel)


COLLECTIVES = """row_id,fabric,gpu_canon,num_gpus,nodes,collective,payload_bytes,busbw_GBps
plain,InfiniBand,h100,32,4,all_reduce,8192,1
efa,EFA,h100,32,4,all_reduce,8192,1
efa_b200,EFA,b200,32,4,all_reduce,8192,1
nvls,NVLink NVLS on,h100,8,1,all_reduce,8589934592,1
no_nvls,NVLink NVLS off,h100,8,1,all_reduce,8589934592,1
"""


def test_each_collective_is_answered_on_its_own_machine_whoever_stands_before_it(tmp_path: Path) -> None:
    (tmp_path / "collectives.csv").write_text(COLLECTIVES)
    table = read_table(tmp_path / "collectives.csv")
    assert [row.hardware.cluster for row in table.rows] == ["dgx_h100", "aws_p5", "aws_p6_b200", "dgx_h100", "dgx_h100"]
    setting = ValidationSettings(lambda device, cluster: NetworkEngine(device, cluster))
    answers = simulated(table.rows, setting, lambda done: None)
    plain, efa, _, nvls, without = (answers.predicted[row.id]["latency"] for row in table.rows)
    assert efa > 1.5 * plain  # each hop waits for the fabric
    assert without > 1.2 * nvls  # tests/evidence/published/machines.yaml

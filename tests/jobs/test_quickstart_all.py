"""`opcast quickstart models=all`: the models it runs, the tables it leaves, and ranks that really run."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets import devices
from opcast.datasets.devices import Device
from opcast.datasets.reading import read_yaml
from opcast.datasets.truth import InferenceRow, TrainingRow, read_table
from opcast.jobs import quickstart_all
from opcast.jobs.composing import compose
from opcast.jobs.quickstart_all import (
    SUITE,
    RealStep,
    campaign_of_all,
    cluster_of,
    plans_of_ranks,
    result,
    run_cluster,
    write_tables,
)
from opcast.jobs.real_cluster import STEPS, answers, run_ranks
from opcast.jobs.real_run import RealRunError, Turns
from opcast.simulator.validation import ValidationSettings
from opcast.simulator.validation.cases import inference_case, training_case

CPU = Device(
    id="cpu_of_mine_1t",
    name="CPU of mine",
    vendor="cpu",
    architecture="avx2",
    compute_units=1,
    clock_mhz=2500.0,
    tensor_tflops={"fp32": 0.1},
    vector_tflops=0.03,
    memory_gib=8.0,
    memory_gbps=20.0,
    l2_mib=16.0,
    l2_gbps=100.0,
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


def step(workload: str, layout: str = "") -> RealStep:
    """A step that took 12 ms and was predicted at 10."""
    return RealStep(workload, 10.0, 8.0, 13.0, (11.0, 12.0, 15.0), None, "tiny", layout, 32, CPU.id)  # type: ignore[arg-type]


STEPS_OF_ALL = [
    step("train"),
    step("prefill"),
    step("decode"),
    *(step("train", layout) for layout in STEPS),
]


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    return read_yaml(SUITE, ValueError)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tables of those steps, in a folder whose machines opcast knows."""
    write_tables(tmp_path, STEPS_OF_ALL, {"tiny": {"name": "tiny", **LLAMA}}, [CPU], {"torch": "2.13.0"})
    monkeypatch.setattr(devices, "MEASURED_DIRECTORY", tmp_path / "devices")
    devices.load_device.cache_clear()
    return tmp_path


@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_real_steps_are_spread_evenly_over_a_campaign(wanted: int) -> None:
    done, taken = 0, []
    turns = Turns([lambda: taken.append(done)] * wanted)
    for done in range(101):  # per cent; the campaign says how far it is after each case
        turns.due(done / 100)
    turns.finish()
    assert len(taken) == wanted
    even = [100 * turn / max(wanted - 1, 1) for turn in range(wanted)] if wanted > 1 else [100]
    assert taken == pytest.approx(even, abs=1)


def test_tables_are_read_as_what_was_run(shipped: Path) -> None:
    trained, inferred = (read_table(shipped / f"steps_{name}.csv") for name in ("train", "infer"))
    assert not trained.unsupported
    assert not inferred.unsupported
    assert [row.id for row in trained.rows] == ["tiny-train", "tiny-train-dp", "tiny-train-fsdp", "tiny-train-tp"]
    for row in trained.rows:
        assert isinstance(row, TrainingRow)
        assert row.measured == {"step_time": pytest.approx(0.012)}
        assert row.config["hidden_size"] == 64
        assert row.hardware.device == CPU.id
    layouts = {row.id: (row.layout.tp, row.layout.dp, row.layout.zero_stage, row.global_batch) for row in trained.rows}  # type: ignore[attr-defined]
    assert layouts["tiny-train-dp"] == (1, 2, 0, 2)
    assert layouts["tiny-train-fsdp"] == (1, 2, 3, 2)
    assert layouts["tiny-train-tp"] == (2, 1, 0, 1)
    assert [row.measured for row in inferred.rows] == [{"ttft": 12.0}, {"tpot": 12.0}]


def test_the_table_that_ships_is_whole_and_of_these_models(suite: dict[str, Any]) -> None:
    """Every model, kind of step and layout, with its source, its runs and this machine's figures."""
    folder = devices.MEASURED_DIRECTORY.parent
    names = {f"{model}-{kind}" for model in suite["models"] for kind in suite["workloads"]}
    names |= {f"{model}-train-{layout}" for model in suite["cluster"]["models"] for layout in STEPS}
    found = set()
    for name in ("train", "infer"):
        table = read_table(folder / f"steps_{name}.csv")
        assert not table.unsupported
        with (folder / f"steps_{name}.csv").open(encoding="utf-8") as file:
            plain = {row["row_id"]: row for row in csv.DictReader(file)}
        for row in table.rows:
            found.add(row.id)
            model = row.id.partition("-")[0]
            assert row.config == {key: value for key, value in suite["models"][model].items() if key != "name"}
            assert plain[row.id]["source"].startswith("opcast quickstart models=all, 20")
            took = float(plain[row.id].get("step_time_s") or 0) * 1e3 or next(iter(row.measured.values()))
            assert float(plain[row.id]["fastest_ms"]) <= took <= float(plain[row.id]["slowest_ms"])
            assert int(plain[row.id]["runs"]) >= 4
            assert devices.load_device(row.hardware.device).synchronous
    assert found == names


def test_questions_of_the_rows_are_those_that_were_predicted(shipped: Path) -> None:
    setting = ValidationSettings(lambda device, cluster: None)  # type: ignore[arg-type,return-value]
    for row in read_table(shipped / "steps_train.csv").rows:
        assert isinstance(row, TrainingRow)
        asked = training_case(row, setting)
        assert asked.device == CPU
        assert asked.plan.cluster.devices == (2 if "-train-" in row.id else 1)
        assert asked.plan.cluster.link == "loopback"
        assert asked.plan.stack.id == ("torch_gloo" if "-train-" in row.id else "torch")
    for row in read_table(shipped / "steps_infer.csv").rows:
        assert isinstance(row, InferenceRow)
        work = inference_case(row, setting).work
        assert work.cache == "dynamic"
        assert work.kind == ("generate" if "decode" in row.id else "prefill")


def test_a_configuration_that_is_none_is_a_reason(tmp_path: Path) -> None:
    head = "row_id,model,config,gpu,num_gpus,precision,seq_len_tokens,gbs_seqs,tp,pp,step_time_s\n"
    rows = ["a,x,{,H100,1,bf16,64,1,1,1,1", "b,x,[],H100,1,bf16,64,1,1,1,1"]
    (tmp_path / "t.csv").write_text(head + "\n".join(rows))
    said = [row.why for row in read_table(tmp_path / "t.csv").unsupported]
    assert "config is no JSON" in said[0]
    assert "with a model_type" in said[1]


def test_the_answer_counts_by_kind_of_step() -> None:
    found = result(STEPS_OF_ALL, [], {}, 1.0)
    assert set(found["median_error"]) == {"train", "prefill", "decode", *STEPS}
    assert found["median_error"]["dp"] == pytest.approx(100 * 2 / 12)
    assert found["inside"] == dict.fromkeys(found["inside"], 1.0)
    assert json.loads(json.dumps(found)) == found


def test_what_is_measured_holds_none_of_the_shapes_and_every_kind(suite: dict[str, Any], tmp_path: Path) -> None:
    from opcast.datasets.ops import make_op

    config = compose("quickstart", [f"home={tmp_path}", "models=all"])
    plan = campaign_of_all(config, suite, [])
    assert {"layer_norm", "gelu_backward", "moe_permute", "grouped_gemm", "adamw"} <= {c.op.kind for c in plan.cases}
    left_out = {plan.cases[0].op, plan.cases[7].op}
    assert not left_out & {case.op for case in campaign_of_all(config, suite, left_out).cases}
    halves, sums = plans_of_ranks(config, suite, [])
    assert not set(halves[0].cases) & set(halves[1].cases)
    assert all(half.settings.threads == 1 and not half.settings.pin for half in halves)
    assert {case.op.kind for case in sums.cases} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert {case.backend for case in sums.cases} == {"gloo"}
    assert make_op("all_reduce", "fp32", size_bytes=1024, ranks=2).kind in {c.op.kind for c in sums.cases}


def test_the_models_are_of_four_kinds_in_two_sizes_each(suite: dict[str, Any]) -> None:
    kinds = {values["model_type"] for values in suite["models"].values()}
    assert kinds == {"llama", "gpt_neox", "qwen3_moe", "deepseek_v3"}
    assert len(suite["models"]) == 8
    assert set(suite["cluster"]["layouts"]) == set(STEPS)
    assert cluster_of(CPU).devices == 2


def test_ranks_that_fail_cost_their_own_step_alone(
    suite: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_or_fail(model: Any, layout: str, *_: Any) -> list[float]:
        if layout == "dp":
            raise RealRunError("a rank of dp ended with code -6")
        return [0.5]

    monkeypatch.setattr(quickstart_all, "run_ranks", run_or_fail)
    monkeypatch.setattr(quickstart_all, "simulate", lambda *_: None)
    monkeypatch.setattr(RealStep, "of", lambda workload, report, seconds, model, layout, *_: f"{model} {layout}")
    missed: dict[str, str] = {}
    config = compose("quickstart", [f"home={tmp_path}"])
    found = list(run_cluster(config, {**suite["cluster"], "models": ["gqa_small"]}, suite["models"], CPU, missed))
    assert found == ["gqa_small fsdp", "gqa_small tp"]
    assert missed == {"gqa_small-train-dp": "a rank of dp ended with code -6"}


def started(*lines: str) -> list[subprocess.Popen[str]]:
    """A process for each line of Python."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([sys.executable, "-S", "-c", line], **pipes) for line in lines]


def test_what_a_rank_does_behind_its_answer_loses_nothing() -> None:
    line = """import os; print('{"seconds": [1.5]}', flush=True); """
    assert answers(started(line, line + "os.abort()"), "dp") == [{"seconds": [1.5]}] * 2
    with pytest.raises(RealRunError, match="a rank of dp ended with code 3: no room"):
        answers(started(line, "import sys; print('no room', file=sys.stderr); sys.exit(3)"), "dp")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", STEPS)
def test_ranks_really_run(layout: str) -> None:
    pytest.importorskip("transformers")
    seconds = run_ranks(LLAMA, layout, 16, 2)
    assert len(seconds) == 2
    assert all(each > 0 for each in seconds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_fails_is_said() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(RealRunError, match="a rank of tp ended"):
        run_ranks({**LLAMA, "num_attention_heads": 3}, "tp", 16, 1)

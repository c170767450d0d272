"""The main job end to end on this machine's CPU, small: then every verb on what it left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.store import Store
from opcast.harness.campaign import Summary
from opcast.harness.environment import cpu_device_id
from opcast.jobs.cli import main
from opcast.jobs.quickstart import cut_short
from opcast.simulator.trace import Workload, trace
from opcast.tests.at_hand import figures_at_hand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SMALL = [
    "model.config.hidden_size=256",
    "model.config.intermediate_size=512",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.num_hidden_layers=2",
    "model.config.vocab_size=2000",
    "campaign.budget_s=12",  # with eight shapes of each entry at the least, it is the number of cases that this decides
    "+campaign.settings.deadline_s=0",
    "cores=all",  # the machine of the tests is busy, now with this and now with that
    "rounds=2",
    "train.seq_len=64",
    "prefill.seq_len=96",
    "decode.seq_len=96",
    "repeats.decode=4",
    "operator_repeats=2",
]
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 2000,
}


ONE = 1 if hasattr(os, "sched_setaffinity") else 0  # threads that a campaign on one processor takes
ON_ONE = "import os, sys; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}); os.execv(sys.argv[1], sys.argv[1:])"


def opcast(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on one processor: threads that wait for each other beside other tests take ten times as long."""
    command = [sys.executable, "-P", "-m", "opcast.jobs.cli", *arguments]
    return subprocess.run(
        [sys.executable, "-c", ON_ONE, *command] if hasattr(os, "sched_setaffinity") else command,
        capture_output=True,
        text=True,
        cwd=home,
        env={**os.environ, "OPCAST_HOME": str(home)},
    )


def ask(home: Path, *arguments: str) -> dict[str, Any]:
    done = opcast(home, *arguments, "format=json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home, for commands in this process on the same processor: what is measured is measured in one of its own."""
    monkeypatch.setenv("OPCAST_HOME", str(home))
    monkeypatch.chdir(home)
    if not ONE:
        yield home
        return
    all_of_them = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(all_of_them)})
    yield home
    os.sched_setaffinity(0, all_of_them)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The answer of a command in this process."""
    assert main([*arguments, "format=json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that knows the processor's figures: measuring them has tests of its own (test_probe, test_reuse)."""
    made = tmp_path_factory.mktemp("home")
    Store(made / "store").save_device(figures_at_hand(ONE))
    return made


@pytest.fixture(scope="module")
def result(home: Path) -> dict[str, Any]:
    return ask(home, "quickstart", *SMALL)


def test_it_reports_what_it_promises(result: dict[str, Any]):
    assert set(result["errors"]) == {"train", "prefill", "decode"}
    assert all(error >= 0 for error in result["errors"].values())
    assert {"gemm", "elementwise", "adamw"} <= set(result["ops"])
    assert result["wall_time_s"] > 0
    for step in result["steps"].values():
        assert 0 < step["low_ms"] < step["predicted_ms"] < step["high_ms"]
        assert step["measured_ms"] > 0


def test_every_case_was_measured_however_long_it_took(result: dict[str, Any]):
    campaign = result["campaign"]
    assert campaign["outcome"] == "complete"
    assert campaign["done"] == campaign["cases"]


def test_measuring_that_ran_out_of_time_is_said():
    summary = Summary("run", "device", "deadline", 200, 90, 90, {"ok": 90}, 0, {}, 30.0)
    assert "after 90 of 200 cases, some of every kind" in cut_short(summary)


def test_predictions_are_of_the_right_size(result: dict[str, Any]):
    for name, step in result["steps"].items():
        assert 0.03 < step["predicted_ms"] / step["measured_ms"] < 30.0, name  # a busy machine runs ten times slower


def test_no_shape_of_the_model_was_measured(home: Path, result: dict[str, Any]):
    measured = {op for op, _, _ in Store(home / "store").done(result["device"], result["campaign"]["run_id"])}
    for kind, length in (("train", 64), ("prefill", 96), ("decode", 96)):
        graph = trace(MODEL, Workload(kind, seq_len=length), "fp32")
        run = {node.op for node, _ in graph.weighted() if node.op is not None}
        assert run
        assert not run & measured


def test_every_operator_of_the_step_met_its_real_call(result: dict[str, Any]):
    graph = trace(MODEL, Workload("train", seq_len=64), "fp32")
    nodes = sum(repeat for node, repeat in graph.weighted() if node.op is not None)
    assert sum(family["calls"] for family in result["families"]["train"].values()) == nodes


def test_the_report_is_one_file_without_links_outward(result: dict[str, Any]):
    text = Path(result["report"]).read_text("utf-8")
    assert not re.search(r"""<(?:script|link|img)[^>]+(?:src|href)=["']https?:""", text)
    assert "Predicted" in text


def test_its_predictors_answer_for_this_machine(
    here: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "predict", "op=gemm", "op.m=100", "op.n=500", "op.k=300", "op.dtype=fp32", "device=cpu")
    assert found["device"] == cpu_device_id(ONE) == result["device"]
    assert found["engine"] == "learned"
    assert found["predictor"]


def test_its_predictors_are_registered_in_mlflow(home: Path, result: dict[str, Any]):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    assert "opcast-gemm" in {model.name for model in client.search_registered_models()}
    assert client.get_model_version_by_alias("opcast-gemm", result["device"])


def test_simulate_prints_the_promised_fields(
    here: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report = told(capsys, "simulate", "workload=generate", "workload.input_len=64", "workload.output_len=8", SMALL[4])
    assert report["ttft_ms"] + 7 * report["tpot_ms"] == pytest.approx(report["e2e_ms"], rel=1e-6)
    report = told(capsys, "simulate", "workload.seq_len=64", SMALL[4])
    parts = report["breakdown"]
    total = sum(parts[name] for name in ("compute_s", "exposed_comm_s", "bubble_s", "optimizer_s", "host_s"))
    assert total == pytest.approx(report["step_time_s"])
    assert sum(report["provenance"].values()) == pytest.approx(1.0)
    memory = report["memory"]
    parts_gib = ("weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "other_gib")
    assert sum(memory[name] for name in parts_gib) == pytest.approx(memory["peak_gib"])


def test_the_store_is_sound(here: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "data")["rows"]
    findings = told(capsys, "data", "check")["findings"]
    assert not [finding for finding in findings if finding["severity"] == "error"]


def test_an_mlflow_server_that_does_not_answer_costs_one_line_and_no_predictor(
    here: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(told(capsys, "list", "predictors")["predictors"])
    assert main(["train", "op=copy", "tracking=http://127.0.0.1:9", "predictor.seed=7"]) == 2
    said = capsys.readouterr().err
    assert said.strip().splitlines()[-1].startswith("opcast: MLflow at http://127.0.0.1:9 does not answer")
    assert "Traceback" not in said
    assert len(told(capsys, "list", "predictors")["predictors"]) >= before

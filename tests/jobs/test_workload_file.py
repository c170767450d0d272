"""``opcast simulate`` writes and runs SimAI's workloads, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import opcast
from opcast.jobs.cli import main

WORKLOAD = """HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1 pp: 1 vpp: 1 ga: 1 all_gpus: 32
2
attention -1 500000 ALLGATHER 16777216 500000 REDUCESCATTER 16777216 0 NONE 0 0
mlp -1 900000 ALLREDUCE 67108864 900000 NONE 0 100 ALLREDUCE 268435456 0
"""
THIN = ["cluster.topology.shape=fat_tree", "cluster.topology.radix=16", "cluster.topology.oversubscription=4"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small workload for 32 GPUs."""
    path = tmp_path / "workload.txt"
    path.write_text(WORKLOAD)
    return path


def ask(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> Any:
    given = ["workload=simai", f"workload.file={file}", "cluster=dgx_h100", "cluster.nodes=4", *arguments]
    assert main(["simulate", *given, "format=json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_workload_runs_on_a_cluster(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, file)
    assert found["breakdown"]["compute_s"] == pytest.approx(2.8001e-3)
    assert set(found["breakdown"]["by_parallelism"]) == {"tp", "dp"}
    assert found["low_s"] < found["step_time_s"] < found["high_s"]
    assert found["parallel"] == {"tp": 8, "ep": 1, "pp": 1, "vpp": 1, "ga": 1, "dp": 4}
    assert main(["simulate", "workload=simai", f"workload.file={file}", "cluster=dgx_h100", "cluster.nodes=4"]) == 0
    assert "exposed dp" in capsys.readouterr().out


def test_thin_links_faults_and_measured_bandwidths_show(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = ask(capsys, file, "network=flow")
    thin = ask(capsys, file, "network=flow", *THIN)
    assert thin["network"]["fidelity"] == "flow"
    assert thin["step_time_s"] > 1.2 * flow["step_time_s"]
    slow = ask(capsys, file, "fault_draw.count=8", "fault_draw.kinds=[ib]", "fault_draw.bandwidth=0.3")
    assert len(slow["network"]["faults"]) == 8
    assert slow["step_time_s"] > flow["step_time_s"]
    study = ask(capsys, file, "faults_study.samples=6", "faults_study.kinds=[ib]")["network"]["faults_study"]
    assert study["slowdown"]["max"] > 1.05
    assert study["healthy_us"] == pytest.approx(flow["step_time_s"] * 1e6)
    same = opcast.simulate_file(file, "dgx_h100", nodes=4, network="flow")
    assert same.step_time_s == flow["step_time_s"]
    (tmp_path / "busbw.yaml").write_text("test\nDP:\n  allreduce,: 10\n")
    given = ask(capsys, file, f"workload.busbw={tmp_path}/busbw.yaml")
    data = next(each for each in given["communications"] if each["group"] == "dp")
    assert (data["engine"], data["busbw_gbps"]) == ("busbw", pytest.approx(10.0))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("cluster=null", "needs a cluster"),
        ("workload.file=/nope", "workload.file=/nope cannot be read"),
        ("cluster.nodes=1", "for 32 GPUs, dgx_h100 has 8; take cluster.nodes=4"),
        ("workload.vpp=0", "workload.vpp=0 must be a whole number"),
        ("workload.busbw=FILE", "workload.txt: "),
        ("report=x.html", "report=x.html is for steps of a model"),
        ("workload.seq_len=3", "no setting"),
        ("network=foo", "is not one of auto"),
    ],
)
def test_bad_input_is_one_line(given: str, says: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = [] if given == "cluster=null" else ["cluster=dgx_h100", "cluster.nodes=4"]
    words = [] if given == "cluster=null" else [given.replace("FILE", str(file))]
    assert main(["simulate", "workload=simai", f"workload.file={file}", *cluster, *words, "format=json"]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1
    assert says in printed.err
    assert says in json.loads(printed.out)["error"]


def test_a_step_on_one_device_is_no_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 256,
            }
        )
    )
    step = ["simulate", f"model={tmp_path}", "workload.seq_len=64", f"simai={tmp_path}/w.txt"]
    assert main([*step, "device=h100_sxm"]) == 2
    assert "is for training steps on a cluster" in capsys.readouterr().err
    assert main([*step, "cluster=dgx_h100", "workload.global_batch=8", "format=json"]) == 0
    assert (tmp_path / "w.txt").read_text().startswith("HYBRID_TRANSFORMER_FWD_IN_BCKWD")

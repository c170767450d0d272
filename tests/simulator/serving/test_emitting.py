"""Served traffic as traces: sound, as long again when simulated, with the caches that moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.traces.checks import find_problems
from opcast.datasets.traces.schema import NodeKind
from opcast.jobs.cli import main
from opcast.simulator.execution.run import read_run, simulate_run

LAW = "law={base_us: 1000, decode_us: 20, prefill_token_us: 5}"
ASKED = [LAW, "kv.blocks=4000", "traffic.requests=30", "traffic.output.mean=12", "traffic.rate=40",
         "kv.bytes_per_token=1000"]  # fmt: skip


def test_iterations_are_nodes_that_run_when_they_ran(tmp_path: Path) -> None:
    assert main(["serving", *ASKED, "replicas=2", f"chakra={tmp_path / 'run'}", "format=json"]) == 0
    assert find_problems(tmp_path / "run") == []
    run = read_run(tmp_path / "run")
    assert sorted(run.traces) == [0, 1]
    made = simulate_run(run)
    for rank, trace in run.traces.items():
        assert np.allclose(made.executions.start_us[made.joint.node[rank]], trace.exact_start_us, atol=1e-3)
    prompts = sum(int(trace.column("prefill_tokens", 0, "int64").sum()) for trace in run.traces.values())
    assert prompts == 30 * 512 or prompts > 0
    decodes = sum(int(trace.column("decodes", 0, "int64").sum()) for trace in run.traces.values())
    assert decodes == 30 * (12 - 1)  # the prompt's iteration makes the first token


def test_caches_that_move_are_loads(tmp_path: Path) -> None:
    asked = [*ASKED, "replicas=1", "decode_pool.replicas=1", "decode_pool.link_gbps=1"]
    assert main(["serving", *asked, f"chakra={tmp_path / 'run'}", "format=json"]) == 0
    assert find_problems(tmp_path / "run") == []
    run = read_run(tmp_path / "run")
    loads = {rank: trace.kind == NodeKind.MEM_LOAD for rank, trace in run.traces.items()}
    assert int(loads[0].sum()) == 0
    assert int(loads[1].sum()) == 30
    trace = run.traces[1]
    sizes = trace.column("tensor_size", 0, "uint64")[loads[1]]
    tokens = trace.column("kv_tokens", 0, "int64")[loads[1]]
    assert (sizes == tokens.astype(np.uint64) * 1000).all()
    assert trace.exact_us[loads[1]].min() >= float(tokens.min()) * 1000 / 1e3 * (1 - 1e-9)  # 1 GB/s


def test_a_file_in_the_way_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["serving", *ASKED, f"chakra={tmp_path / 'file'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_swapped_caches_are_stores_and_loads(tmp_path: Path) -> None:
    """Few blocks: requests are preempted to host memory and come back with as many tokens."""
    small = [LAW, "kv.blocks=60", "traffic.input.mean=200", "kv.bytes_per_token=1000",
             "traffic.requests=30", "traffic.output.mean=200", "traffic.rate=40",
             "scheduler.preemption=swap"]  # fmt: skip
    assert main(["serving", *small, f"chakra={tmp_path / 'run'}", "format=json"]) == 0
    assert find_problems(tmp_path / "run") == []
    run = read_run(tmp_path / "run")
    trace = run.traces[0]
    tokens = trace.column("kv_tokens", 0, "int64")
    out, back = (int(tokens[trace.kind == kind].sum()) for kind in (NodeKind.MEM_STORE, NodeKind.MEM_LOAD))
    assert out == back > 0
    stored = trace.kind == NodeKind.MEM_STORE
    assert trace.exact_us[stored] == pytest.approx(tokens[stored] * 1000 / 25e3)  # 25 GB/s
    made = simulate_run(run)
    assert np.allclose(made.executions.start_us[made.joint.node[0]], trace.exact_start_us, atol=1e-3)

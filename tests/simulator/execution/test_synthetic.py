"""Synthetic traces are sound, the same every time, and run; SimAI's files become traces and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.traces.checks import check_ranks, check_trace, find_problems
from opcast.datasets.traces.classes import CLASSES, class_codes, is_network
from opcast.datasets.traces.schema import TraceFileError
from opcast.jobs.cli import main
from opcast.simulator.execution.run import read_run, simulate_run
from opcast.simulator.execution.simai import traces_of, workload_of
from opcast.simulator.execution.synthetic import generate, load_synthetic
from opcast.simulator.formats.simai import LayerPhase, SimaiWorkload, WorkloadLayer, read_workload, write_workload

MIX = [{"kind": "all_reduce", "low_bytes": 64, "high_bytes": 1 << 20}, {"kind": "all_to_all", "ranks": 2, "stride": 2},
       {"kind": "send_recv", "ranks": 2}, {"kind": "barrier"}]  # fmt: skip
GEMM = {"op": {"kind": "gemm", "m": 64, "n": 64, "k": 64}, "weight": 2.0}


@settings(max_examples=25)
@given(nodes=st.integers(1, 30), share=st.floats(0, 1), overlap=st.floats(0, 1), imbalance=st.floats(0, 1),
       seed=st.integers(0, 99))  # fmt: skip
def test_synthetic_traces_run_and_are_the_same_again(
    nodes: int, share: float, overlap: float, imbalance: float, seed: int
) -> None:
    asked = load_synthetic({"ranks": 4, "nodes": nodes, "share": share, "overlap": overlap, "imbalance": imbalance,
                       "seed": seed, "compute": [GEMM, {"duration_us": 10.0}], "communication": MIX})  # fmt: skip
    run = generate(asked)
    assert check_ranks(run) == []
    assert [line for rank, trace in run.traces.items() for line in check_trace(trace, str(rank))] == []
    again = generate(asked)
    for rank, trace in run.traces.items():
        assert trace.words.blob.tobytes() == again.traces[rank].words.blob.tobytes()
        assert trace.exact_us.tolist() == again.traces[rank].exact_us.tolist()
    longest = max(float(trace.exact_us.sum()) for trace in run.traces.values())
    assert simulate_run(run).executions.total_us >= longest * (1 - 1e-12)


def test_the_mix_is_drawn_as_asked() -> None:
    drawn = {"kind": "all_reduce", "low_bytes": 1000, "high_bytes": 100_000}
    run = generate(load_synthetic({"ranks": 4, "nodes": 4000, "share": 0.25, "compute": [GEMM, {"duration_us": 10.0}],
                              "communication": [drawn]}))  # fmt: skip
    codes = class_codes(run.traces[0])
    assert np.mean(is_network(codes)) == pytest.approx(0.25, abs=0.03)
    gemms, works = np.sum(codes == CLASSES.index("gemm")), np.sum(~is_network(codes))
    assert gemms / works == pytest.approx(2 / 3, abs=0.03)
    sizes = run.traces[0].column("comm_size", 0, "int64")[is_network(codes)]
    assert 1000 <= sizes.min() <= sizes.max() <= 100_004
    assert np.median(sizes) == pytest.approx(10_000, rel=0.2)  # log-uniform


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ranks": 0}, "ranks"), ({"nodes": 1.5}, "nodes"), ({"share": 2}, "share"), ({"colour": 1}, "colour"),
        ({"communication": [{"kind": "all_reduc"}]}, "all_reduc"), ({"communication": [{"ranks": 3}]}, "3 ranks"),
        ({"compute": [{"op": {"kind": "gem"}}]}, "gem"), ({"compute": [{}]}, "duration_us"), ({"compute": 3}, "list"),
        ({"communication": []}, "what to draw"), ({"ranks": 10**6, "nodes": 10**6}, "more than"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_line(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceFileError, match=says) as caught:
        generate(load_synthetic(wrong))
    assert "\n" not in str(caught.value)


# --- SimAI's files -----------------------------------------------------------------------------------------

PHASE = st.builds(
    LayerPhase, st.integers(0, 10**7), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.integers(0, 1 << 24), st.sampled_from(["", "EP", "DP_EP"]),
)  # fmt: skip
QUIET = st.integers(0, 10**7).map(LayerPhase)
LAYER = st.builds(WorkloadLayer, st.sampled_from(["embed", "mlp"]), PHASE | QUIET, PHASE | QUIET, PHASE | QUIET,
                  st.integers(0, 10**5))  # fmt: skip


@settings(max_examples=30)
@given(layers=st.lists(LAYER, min_size=1, max_size=4), pp=st.sampled_from([1, 2]), sent=st.integers(0, 1 << 20))
def test_simais_files_become_traces_and_come_back(layers: list[WorkloadLayer], pp: int, sent: int) -> None:
    degrees = {"tp": 2, "ep": 2, "pp": pp, "vpp": 1, "ga": 1, "gpus": 8}
    given_file = read_workload(write_workload(SimaiWorkload(degrees, layers, sent)))
    run = traces_of(given_file)
    assert check_ranks(run) == []
    assert write_workload(workload_of(run)) == write_workload(given_file)
    spent_us = sum(getattr(layer, phase).compute_ns for layer in layers
                   for phase in ("forward", "input_gradient", "weight_gradient")) / 1e3  # fmt: skip
    spent_us += sum(layer.update_ns for layer in layers) / 1e3
    assert simulate_run(run).executions.total_us == pytest.approx(spent_us, rel=1e-9) or pp > 1


def test_the_commands_generate_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    asked = ["generate.ranks=4", "generate.nodes=20", "generate.communication=[{kind: all_reduce, low_bytes: 4096},"
             "{kind: reduce_scatter, ranks: 2, stride: 2}]"]  # fmt: skip
    assert main(["trace", "generate", f"output={made}", *asked, "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4
    assert find_problems(made) == []
    assert main(["trace", "generate", f"output={made}", *asked]) == 2  # it holds traces already
    assert main(["trace", "convert", f"path={made}", f"output={tmp_path / 'a.txt'}"]) == 0
    workload = read_workload((tmp_path / "a.txt").read_text())
    assert workload.degrees["gpus"] == 4
    sent = sum(phase.size_bytes for layer in workload.layers for phase in (layer.forward, layer.weight_gradient))
    trace = read_run(made).traces[0]
    assert sent == int(trace.column("comm_size", 0, "int64").sum())
    assert main(["trace", "convert", f"path={tmp_path / 'a.txt'}", f"output={tmp_path / 'back'}"]) == 0
    assert find_problems(tmp_path / "back") == []
    capsys.readouterr()
    (tmp_path / "bad.txt").write_text("HYBRID_TRANSFORMER_FWD_IN_BCKWD all_gpus: 3\n1\n")
    assert main(["trace", "convert", f"path={tmp_path / 'bad.txt'}", f"output={tmp_path / 'no'}"]) == 2
    assert main(["trace", "generate", *asked]) == 2
    assert capsys.readouterr().err.count("\n") == 2

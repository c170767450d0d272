"""The parts of a difference add up to it, and what was put into a run is its largest part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.linking import link_files
from opcast.datasets.traces.schema import CollectiveKind, NodeKind
from opcast.datasets.traces.table import ExecutionTrace
from opcast.jobs.cli import main
from opcast.simulator.execution.analysis import recorded_times
from opcast.simulator.execution.explanation import (
    COMMUNICATION_ALONE,
    EXTRA,
    IDLE,
    MISSING,
    OP_ERROR,
    OVERLAP,
    WAIT,
    explain,
)

SLEEP_S = 0.05
PROGRAM = f"""
import sys, time, torch
from opcast.harness.collecting import collect
cause, folder = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
a = torch.randn(256, 256)
for _ in range(3):
    torch.softmax(a @ a, -1)  # warm
with collect(folder) as step:
    for _ in range(4):
        b = a @ a
        if cause == "product":
            for _ in range(30):
                b = torch.mm(a, a)
        torch.softmax(b, -1)
        if cause == "sleep":
            time.sleep({SLEEP_S})
        step()
"""


def trace(*nodes: tuple[str, float, float]) -> ExecutionTrace:
    """(name, start, duration): "call" is a collective."""
    builder = TraceBuilder()
    for id, (name, start, us) in enumerate(nodes, 1):
        told = [("comm_type", "int64", CollectiveKind.ALL_REDUCE), ("comm_size", "int64", 8)] if name == "call" else []
        kind = NodeKind.COMM_COLL if name == "call" else NodeKind.COMP
        text = [] if name == "call" else [("opcast_op", "string", json.dumps({"kind": name}))]
        builder.add(id, name, kind, start_us=start, duration_us=us, attributes=[*told, *text])
    return builder.trace()


NODE = st.tuples(st.sampled_from(["gemm", "rope", "call", "softmax"]), st.floats(0, 90), st.floats(0, 30))


@settings(max_examples=80)
@given(first=st.lists(NODE, min_size=1, max_size=8), second=st.lists(NODE, min_size=1, max_size=8))
def test_parts_add_up_to_the_difference(
    first: list[tuple[str, float, float]], second: list[tuple[str, float, float]]
) -> None:
    made = [RankedTraces({0: trace(*nodes)}) for nodes in (first, second)]
    found = explain(*made)
    spans = []
    for run in made:
        start, end = recorded_times(run.traces[0])
        spans.append(float(end.max() - start.min()))
    assert (found.predicted_us, found.measured_us) == (pytest.approx(spans[0]), pytest.approx(spans[1]))
    assert sum(each.difference_us for each in found.causes) == pytest.approx(spans[1] - spans[0], abs=1e-6)


def largest(first: ExecutionTrace, second: ExecutionTrace, **more: object) -> tuple[str, float]:
    found = explain(RankedTraces({0: first}), RankedTraces({0: second})).causes[0]
    return found.cause, found.difference_us


BASE = [("gemm", 0.0, 10.0), ("call", 10.0, 5.0), ("rope", 15.0, 4.0)]


def test_what_was_put_in_is_the_largest_cause() -> None:
    assert largest(trace(*BASE), trace(("gemm", 0, 30), ("call", 30, 5), ("rope", 35, 4))) == (OP_ERROR, 20.0)
    assert largest(trace(*BASE), trace(*BASE, ("softmax", 19, 7))) == (EXTRA, 7.0)
    assert largest(trace(*BASE), trace(*BASE[:2])) == (MISSING, -4.0)
    assert largest(trace(*BASE), trace(*BASE[:2], ("rope", 40, 4))) == (IDLE, 25.0)
    beside = trace(("gemm", 0, 10), ("call", 5, 5), ("rope", 10, 4))
    assert largest(beside, trace(*BASE)) == (OVERLAP, 5.0)  # an overlap was removed
    assert largest(trace(*BASE), trace(("gemm", 0, 10), ("call", 10, 12), ("rope", 22, 4))) == (
        COMMUNICATION_ALONE,
        7.0,
    )


def layers(count: int, beside: bool, rng: np.random.Generator, idle_us: float) -> ExecutionTrace:
    """Products on one stream, an all-reduce of each on another: beside the next product, or before it.

    Times vary by 3 %; the product stands still for up to ``idle_us`` before it begins, and through the all-reduce.
    """
    builder = TraceBuilder()
    now = free = 0.0
    for layer in range(count):
        now += float(rng.uniform(0, idle_us))
        us, call_us = (float(each * rng.normal(1, 0.03)) for each in (1000.0, 700.0))
        told = [("stream", "int64", 7), ("opcast_op", "string", json.dumps({"kind": "gemm"}))]
        builder.add(2 * layer + 1, "gemm", start_us=now, duration_us=us, attributes=told)
        begin = max(now + us, free)
        told = [("stream", "int64", 20), ("comm_type", "int64", CollectiveKind.ALL_REDUCE), ("comm_size", "int64", 8)]
        builder.add(2 * layer + 2, "all_reduce", NodeKind.COMM_COLL, start_us=begin, duration_us=call_us,
                    attributes=told)  # fmt: skip
        free = begin + call_us
        now = now + us if beside else free
    return builder.trace()


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), idle_us=st.floats(0, 400))
def test_a_removed_overlap_is_the_largest_cause_beside_noise(seed: int, idle_us: float) -> None:
    """The stream that computes stands still while the other one communicates: that is no idle time.

    What was hidden was hidden behind products and behind the up to ``idle_us / 4`` that they stood still; the last
    all-reduce was never hidden.
    """
    rng = np.random.default_rng(seed)
    beside, apart = layers(12, True, rng, idle_us / 4), layers(12, False, rng, idle_us)
    found = explain(RankedTraces({0: beside}), RankedTraces({0: apart})).causes
    assert (found[0].cause, found[0].what) == (OVERLAP, "all_reduce")
    least, most = 0.94 * 11 * (700 - idle_us / 4), 1.06 * 11 * 700
    assert least <= found[0].difference_us <= most
    back = explain(RankedTraces({0: apart}), RankedTraces({0: beside})).causes
    assert back[0].cause == OVERLAP
    assert least <= -back[0].difference_us <= most


def processor_profile(path: Path, apart: bool) -> Path:
    """A profile of a run without a device: gloo runs on a thread of its own, operators that wait for it on another."""
    events, now = [], 0.0
    for step in range(6):
        event = {"ph": "X", "pid": 1}
        call = {**event, "cat": "user_annotation", "name": "gloo:all_reduce", "tid": 2, "ts": now + 15, "dur": 4000,
                "args": {"Input Dims": [[1 << 20]], "Input type": ["float"]}}  # fmt: skip
        events += [{**event, "cat": "cpu_op", "name": "c10d::allreduce_", "tid": 1, "ts": now, "dur": 12}, call]
        if apart:
            events.append({**event, "cat": "cpu_op", "name": "_c10d_functional::wait_tensor", "tid": 1, "ts": now + 14,
                           "dur": 4010})  # fmt: skip
        begin = now + (4030 if apart else 20)
        for product in range(5):
            shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"], "External id": step}
            events.append({**event, "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": begin + product * 1000,
                           "dur": 940, "args": shapes})  # fmt: skip
        now = begin + 5000
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_who_waits_for_a_collective_of_gloo_does_no_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [f"{name}={processor_profile(tmp_path / f'{name}.json', name == 'measured')}"
            for name in ("predicted", "measured")]  # fmt: skip
    assert main(["trace", "explain", *runs, "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["causes"][0]
    assert (first["cause"], first["what"]) == (OVERLAP, "all_reduce")
    assert first["difference_us"] == pytest.approx(6 * 4000, rel=0.15)
    assert first["difference_us"] >= 0.9 * found["gap_us"]
    assert first["advice"].startswith("opcast simulate stack.overlap=[]")


def test_time_for_a_late_rank_is_no_communication() -> None:
    early, late = trace(("gemm", 0, 10), ("call", 10, 45)), trace(("gemm", 0, 50), ("call", 50, 5))
    usual = trace(("gemm", 0, 10), ("call", 10, 5))
    found = explain(RankedTraces({0: usual, 1: usual}), RankedTraces({0: early, 1: late})).causes
    assert (found[0].cause, found[0].difference_us) == (WAIT, 40.0)
    assert sum(each.difference_us for each in found) == 40.0


@pytest.mark.slow
def test_a_real_run_is_collected_linked_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on this processor, as it is, with a sleep in each step, and with more products in each."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for cause in ("none", "sleep", "product"):
        command = [sys.executable, "-P", str(tmp_path / "program.py"), cause, str(tmp_path / cause)]
        subprocess.run(command, check=True, capture_output=True)
        hosts = [tmp_path / cause / "host" / "host.0.json"]
        _, reports, _ = link_files([tmp_path / cause / "profile" / "profile.0.json"], hosts)
        assert reports[0].matched >= 0.95 * reports[0].operators > 0
    for cause, expected, what in (("sleep", IDLE, "all"), ("product", OP_ERROR, "gemm")):
        runs = [f"predicted={tmp_path / 'none' / 'profile'}", f"measured={tmp_path / cause / 'profile'}"]
        assert main(["trace", "explain", *runs, "steps=1", "format=json"]) == 0
        found = json.loads(capsys.readouterr().out)
        first = found["causes"][0]
        assert (first["cause"], first["what"].split()[0]) == (expected, what)
        parts = sum(each["difference_us"] for each in found["causes"])
        assert parts == pytest.approx(found["gap_us"], rel=0.05)
        if cause == "sleep":
            assert first["difference_us"] >= 0.9 * 3 * SLEEP_S * 1e6  # the last one comes after all operators


def test_a_program_is_collected_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.py").write_text("import sys, torch\ntorch.ones(int(sys.argv[1])).sum()\n")
    assert main(["trace", "collect", f"path={tmp_path / 'run.py'}", f"output={tmp_path}", "arguments=[8]"]) == 0
    assert (tmp_path / "host" / "host.0.json").stat().st_size > 0
    capsys.readouterr()
    assert main(["trace", "analyse", f"path={tmp_path / 'profile'}", "format=json"]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)["by_rank"][0]["classes"]]
    assert "host" in names
    assert main(["trace", "collect", f"path={tmp_path / 'none.py'}", f"output={tmp_path}"]) == 2

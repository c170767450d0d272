"""A trace is done again: by real ranks over gloo, and call by call in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.traces import protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.calls import TraceCall, rank_calls
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import CollectiveKind, NodeKind
from opcast.datasets.traces.table import ExecutionTrace
from opcast.jobs.cli import main
from opcast.jobs.trace_replay import on_ranks

GEMM = json.dumps(make_op("gemm", m=32, n=32, k=32, dtype="fp32").to_dict())


def rank_trace(rank: int) -> ExecutionTrace:
    """A product in two kernels, collectives of every sort, and a message from rank 0 to rank 1."""
    builder = TraceBuilder()
    on = ("is_cpu_op", "bool", False)
    for id in (1, 2):
        told = [on, ("opcast_op", "string", GEMM), ("opcast_share", "double", 0.5)]
        builder.add(id, "gemm", duration_us=5, data=[id - 1] if id > 1 else [], attributes=told)
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE, CollectiveKind.BARRIER)
    for id, kind in enumerate(kinds, 3):
        told = [on, ("comm_type", "int64", kind), ("comm_size", "int64", 4096)]
        builder.add(id, kind.name, NodeKind.COMM_COLL, duration_us=100 + rank, data=[id - 1], attributes=told)
    ends = [("comm_src", "int32", 0), ("comm_dst", "int32", 1), ("comm_tag", "int32", 7)]
    builder.add(7, "message", NodeKind.COMM_RECV if rank else NodeKind.COMM_SEND, data=[6],
                attributes=[on, ("comm_size", "int64", 512), *ends])  # fmt: skip
    builder.add(8, "gap", attributes=[on, ("opcast_op", "string", "host_gap")])
    builder.add(9, "unknown kernel", duration_us=3, attributes=[on])
    return builder.trace()


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    for rank in range(2):
        protobuf.write(folder / f"run.{rank}.et", rank_trace(rank))
    return folder


def test_two_ranks_replay_over_gloo(run_of_two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    asked = ["trace", "replay", f"path={run_of_two}", "target=cpu", "iterations=2", "against=bf16"]
    assert main([*asked, f"profile={tmp_path / 'again'}", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["replayed"]) == (2, 6)
    assert [(op["name"], op["count"], op["recorded_us"]) for op in found["operators"]] == [("gemm", 1, 10.0)]
    rows = {each["collective"]: each for each in found["collectives"]}
    assert set(rows) == {"all_reduce", "all_gather"}
    gather = rows["all_gather"]
    assert (gather["size_bytes"], gather["ranks"], gather["recorded_us"]) == (8192, 2, 100.0)
    assert gather["recorded_busbw_gbps"] == pytest.approx(8192 / 2 / 100e3)
    assert gather["busbw_gbps"] == pytest.approx(8192 / 2 / gather["replayed_us"] / 1e3)
    errors = {each["kind"]: each["max_error"] for each in found["accuracy"]}
    assert 2**-12 < errors["all_reduce"] < 2**-5  # what bf16 rounds away, in the inputs and in the sum
    assert 2**-12 < errors["all_gather"] <= 2**-8
    assert found["left_out"] == [
        {"name": "unknown kernel", "why": "the trace does not tell what it computes", "count": 1}
    ]
    assert sorted(each.name for each in (tmp_path / "again").iterdir()) == ["profile.0.json", "profile.1.json"]


@pytest.mark.slow
def test_two_ranks_replay_on_devices_that_are_not_there(run_of_two: Path, tmp_path: Path) -> None:
    """The path of a GPU: NCCL is asked for, kernels are queued on a stream, events time them."""
    torch = pytest.importorskip("torch")
    from opcast.harness.replaying import groups_of
    from opcast.simulator.execution.run import read_run

    found = rank_calls(read_run(run_of_two))
    store = torch.distributed.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    script = Path(__file__).parents[1] / "harness" / "replaying_rank.py"
    children = []
    for rank, own in found.items():
        plan = tmp_path / f"plan.{rank}.json"
        plan.write_text(json.dumps({"calls": [asdict(call) for call in own], "groups": groups_of(found)}))
        command = [sys.executable, "-P", str(script), str(rank), str(store.port), str(plan), str(tmp_path / str(rank))]
        children.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                         env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}))  # fmt: skip
    said = [child.communicate()[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    for rank in found:
        told = json.loads((tmp_path / str(rank)).read_text())
        assert told["asked"] == ["cpu:gloo,cuda:nccl", "", "gloo"]
        assert told["launches"] > 0
        ran = {each["name"]: each for each in told["calls"]}
        assert all(each["us"] > 0 for name, each in ran.items() if name in ("gemm", "ALL_REDUCE", "ALL_GATHER"))
        assert "does not tell" in ran["unknown kernel"]["why"]
        errors = {each["kind"]: each["max_error"] for each in told["accuracy"]}
        assert 2**-12 < errors["all_reduce"] < 2**-5


def test_calls_that_cannot_be_replayed_are_one_line(run_of_two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("mode=all", "tensors=none", "nodes=[5]", "nodes=[9,2]", "against=fp99", "against=nccl", "ranks=0",
                  "nodes=[100,200]", "target=tpu", "iterations=0"):  # fmt: skip
        assert main(["trace", "replay", f"path={run_of_two}", "target=cpu", wrong]) == 2, wrong
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["trace", "replay", "target=cpu"]) == 2


def test_ranks_without_a_trace_do_what_the_first_does() -> None:
    own = rank_calls(RankedTraces({0: rank_trace(0), 1: rank_trace(1)}))
    spread = on_ranks(own, 4)
    assert [len(each) for each in spread.values()] == [len(own[0]), len(own[1]), len(own[0]), len(own[0])]
    assert next(c for c in spread[3] if c.collective == "all_reduce").ranks == (0, 1, 2, 3)
    alone = on_ranks(own, 1)[0]
    assert {len(call.ranks) for call in alone if call.communicates} == {1}


# --- operators of PyTorch, in this process -----------------------------------------------------------------


def tensor(id: int, numel: int) -> list[Any]:
    return [id, id + 50, 0, numel, 4, "cuda:0"]


def host_node(id: int, parent: int, schema: str, inputs: Any, outputs: Any) -> dict[str, Any]:
    return {"id": id, "name": schema.partition("(")[0].partition(".")[0], "ctrl_deps": parent, "inputs": inputs,
            "outputs": outputs, "attrs": [{"name": "op_schema", "type": "string", "value": schema}]}  # fmt: skip


def side(values: list[Any], shapes: list[Any], types: list[str]) -> dict[str, Any]:
    return {"values": values, "shapes": shapes, "types": types}


T = "Tensor(float)"
NODES = [
    host_node(2, 1, "aten::mm(Tensor self, Tensor mat2) -> Tensor",
              side([tensor(1, 12), tensor(2, 20)], [[3, 4], [4, 5]], [T, T]), side([tensor(3, 15)], [[3, 5]], [T])),
    host_node(3, 2, "aten::resolve_conj(Tensor(a) self) -> Tensor(a)", side([tensor(1, 12)], [[3, 4]], [T]),
              side([tensor(1, 12)], [[3, 4]], [T])),
    host_node(4, 1, "aten::sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) "
              "-> Tensor", side([tensor(3, 15), [1], False, "None"], [[3, 5], [], [], []],
                                [T, "GenericList[Int]", "Bool", "None"]), side([tensor(4, 3)], [[3]], [T])),
    host_node(5, 1, "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool "
              "scale_grad_by_freq=False, bool sparse=False) -> Tensor",
              side([tensor(7, 40), [8, 58, 0, 6, 8, "cuda:0"], -1, False, False], [[10, 4], [6], [], [], []],
                   [T, "Tensor(long int)", "Int", "Bool", "Bool"]), side([tensor(9, 24)], [[6, 4]], [T])),
    host_node(6, 1, "aten::no_such_operator(Tensor self) -> Tensor", side([tensor(1, 12)], [[3, 4]], [T]),
              side([], [], [])),
    host_node(7, 1, "aten::mm(Tensor self, Tensor mat2) -> Tensor",
              side([tensor(1, 12), tensor(1, 12)], [[3, 4], [3, 4]], [T, T]), side([], [], [])),
]  # fmt: skip


@pytest.fixture(scope="module")
def host_calls(tmp_path_factory: pytest.TempPathFactory) -> list[TraceCall]:
    path = tmp_path_factory.mktemp("host") / "host.0.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": NODES}))
    return rank_calls(RankedTraces({0: read_trace(path)}))[0]


def test_the_outermost_operators_are_the_calls(host_calls: list[TraceCall]) -> None:
    assert [call.node for call in host_calls] == [2, 4, 5, 6, 7]


@pytest.mark.parametrize("lazy", [False, True])
def test_operators_run_on_what_the_ones_before_made(host_calls: list[TraceCall], lazy: bool) -> None:
    torch = pytest.importorskip("torch")
    from opcast.harness.replay import Replayer

    replayer = Replayer("cpu", lazy)
    found = replayer.ready(host_calls)
    held = set(replayer.pool.held)
    assert bool(held) is not lazy  # eager: what no call makes is there before the first call
    if not lazy:
        assert {key[0] for key in held} == {1, 2, 7, 8}
    replayer.once(found, False)
    replayer.once(found, True)
    assert [len(each.us) for each in found] == [1, 1, 1, 0, 0]
    assert "no_such_operator" in found[3].why
    assert "mat1 and mat2 shapes cannot be multiplied" in found[4].why
    assert {key[0] for key in replayer.pool.held} == ({1, 2, 7, 8} if not lazy else set())
    assert torch.is_grad_enabled()

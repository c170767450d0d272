"""A simulated step written as traces: sound, readable by the reference, and as long again when it is simulated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.ops import make_op
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.checks import find_problems
from opcast.datasets.traces.classes import CLASSES, class_codes
from opcast.datasets.traces.protobuf import write
from opcast.datasets.traces.schema import NodeKind
from opcast.datasets.traces.table import ExecutionTrace
from opcast.jobs import resolve
from opcast.jobs import simulate as simulate_job
from opcast.jobs.cli import main
from opcast.jobs.composing import as_override, compose
from opcast.simulator.execution.emit import emit
from opcast.simulator.execution.programs import node_template
from opcast.simulator.execution.run import read_run, simulate_run
from opcast.simulator.graph import Node
from opcast.simulator.step.state import State

MODEL = ["model=tiny_llama_100m", "device=h100_sxm"]
CLUSTER = ["model=tiny_llama_100m", "cluster=dgx_h100"]
TRAIN = ["workload=train", "workload.seq_len=64", "workload.global_batch=16"]


def slow(*settings: str) -> object:
    return pytest.param(list(settings), marks=pytest.mark.slow)


def state_of(*settings: str) -> State:
    config = compose("simulate", [as_override(simulate_job, text) for text in settings])
    found = resolve.bench(config).answered(resolve.request_of("simulate", config)).report.state
    assert isinstance(found, State)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        [*MODEL, "workload=train", "workload.seq_len=64"],
        [*CLUSTER, *TRAIN, "parallel.tp=2", "parallel.pp=2"],
        slow(
            *CLUSTER,
            *TRAIN,
            "parallel.pp=4",
            "parallel.vpp=2",
            "parallel.schedule=interleaved",
            "parallel.zero_stage=1",
        ),
        slow(*CLUSTER, *TRAIN, "parallel.pp=2", "parallel.schedule=dualpipe"),
        slow(*CLUSTER, *TRAIN, "parallel.pp=4", "parallel.schedule=zb-h1"),
        slow(*CLUSTER, *TRAIN, "parallel.zero_stage=3"),
        [*CLUSTER, "workload=decode", "parallel.tp=4", "workload.batch=8"],
        slow(*CLUSTER, "workload=prefill", "parallel.pp=4", "workload.batch=8"),
        slow(*MODEL, "workload=generate", "workload.output_len=3"),
    ],
    ids=["one", "tp-pp", "interleaved", "dualpipe", "zb-h1", "zero-3", "decode", "prefill-pp", "generate"],
)
def test_an_emitted_step_takes_as_long_again(settings: list[str], tmp_path: Path) -> None:
    state = state_of(*settings)
    emit(state, tmp_path)
    folders = {f"{step.kind}_{place}": step for place, step in enumerate(state.steps)}
    for name, step in folders.items():
        folder = tmp_path if len(state.steps) == 1 else tmp_path / name
        run = read_run(folder)
        assert len(run.traces) == state.plan.cluster.devices
        assert find_problems(folder) == []
        made = simulate_run(run)
        assert made.executions.total_us == pytest.approx(step.total_us, rel=1e-9)
        for rank, trace in run.traces.items():
            assert np.allclose(made.executions.start_us[made.joint.node[rank]], trace.exact_start_us, atol=1e-5)


def test_a_trace_tells_groups_messages_and_work(tmp_path: Path) -> None:
    state = state_of(*CLUSTER, *TRAIN, "parallel.tp=2", "parallel.pp=2")
    emit(state, tmp_path)
    groups = json.loads((tmp_path / "comm_group.json").read_text())
    run = read_run(tmp_path)
    assert groups[group_names(run.traces[0])["group tp2_0"]] == [0, 1]
    first, last = run.traces[0], run.traces[7]
    sends = first.kind == NodeKind.COMM_SEND
    assert set(first.column("comm_dst", -1, "int32")[sends].tolist()) == {4}
    assert set(last.column("comm_dst", -1, "int32")[last.kind == NodeKind.COMM_SEND].tolist()) == {3}
    codes = class_codes(first)
    flops = first.column("num_ops", 0, "int64")
    gemms = codes == CLASSES.index("gemm")
    assert (flops[gemms] > 0).all()
    executed = [e for step in state.steps for e in step.executions(0)]
    whole = sum(
        e.times * float(np.sum([node.op.cost.flops * n for node, n in zip(e.costs.nodes, e.costs.repeats, strict=True)
                                if node.op and node.op.kind == "gemm" and _runs(node.phase, e.phase)]))
        for e in executed
    )  # fmt: skip
    assert int(flops[gemms].sum()) == pytest.approx(whole)


def group_names(trace: ExecutionTrace) -> dict[str, str]:
    """What the groups of a trace are called, and their numbers."""
    called, numbers = trace.text("group_name"), trace.text("pg_name")
    return {trace.words[called[row]]: trace.words[numbers[row]] for row in np.flatnonzero(called >= 0)}


def stoi(text: str) -> int:
    """C++'s ``std::stoi``: white space, a sign and digits at the beginning, of an int; else it throws."""
    digits = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", text)
    if digits is None or not -(1 << 31) <= int(digits.group(1)) < 1 << 31:
        raise ValueError("stoi")
    return int(digits.group(1))


def test_astra_sim_reads_the_groups_of_all_traces_that_opcast_writes(tmp_path: Path) -> None:
    """As its Workload.cc does: names by ``std::stoi``, of which no two may be the same number."""
    emit(state_of(*CLUSTER, *TRAIN, "parallel.tp=2", "parallel.pp=2"), tmp_path / "step")
    kinds = "{kind: all_reduce, ranks: 4, low_bytes: 1024}"
    asked = ["generate.ranks=8", "generate.nodes=20", "generate.share=0.5", f"generate.communication=[{kinds}]"]
    assert main(["trace", "generate", *asked, f"output={tmp_path / 'drawn'}"]) == 0
    for name in ("step", "drawn"):
        groups = json.loads((tmp_path / name / "comm_group.json").read_text())
        numbers = {stoi(group): int(group) for group in groups}
        assert numbers
        assert len(numbers) == len(groups)
        assert all(number == read for read, number in numbers.items())
        run = read_run(tmp_path / name)
        for trace in run.traces.values():
            called = trace.text("pg_name")
            words = {trace.words[word] for word in np.unique(called[called >= 0])}
            assert words
            assert {stoi(word) for word in words} <= set(numbers)
        assert find_problems(tmp_path / name) == []
    with pytest.raises(ValueError, match="stoi"):
        stoi("tp2_0")


def _runs(phase: str, of: str) -> bool:
    return phase == of or (phase == "recompute" and of == "backward")


def test_the_reference_reads_an_emitted_trace(tmp_path: Path) -> None:
    schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs mlc-chakra")
    protolib = pytest.importorskip("chakra.src.third_party.utils.protolib")
    emit(state_of(*MODEL, "workload=decode", "workload.batch=2"), tmp_path)
    node, ids = schema.Node(), set()
    with protolib.openFileRd(str(tmp_path / "opcast.0.et")) as file:
        protolib.decodeMessage(file, schema.GlobalMetadata())
        while protolib.decodeMessage(file, node):
            assert set(node.data_deps) <= ids
            ids.add(node.id)
            node = schema.Node()
    assert len(ids) == len(read_run(tmp_path).traces[0])


def test_the_commands_write_and_run_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*CLUSTER, *TRAIN, "parallel.tp=2", "format=json"]
    assert main(["simulate", *asked, f"chakra={tmp_path / 'run'}"]) == 0
    step_s = json.loads(capsys.readouterr().out)["step_time_s"]
    assert main(["simulate", f"trace={tmp_path / 'run'}", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == pytest.approx(step_s, rel=1e-9)
    assert found["provenance"] == {"recorded": 1.0}
    assert sum(share["total_us"] for share in found["critical_path"]) == pytest.approx(step_s * 1e6)
    assert main(["simulate", f"trace={tmp_path / 'run'}", "durations=network", "cluster=dgx_h100", "format=json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_time_s"] == pytest.approx(step_s, rel=0.1)
    assert "recorded" in again["provenance"]
    assert len(again["provenance"]) > 1
    assert main(["simulate", f"trace={tmp_path / 'run'}", "durations=network"]) == 2
    assert main(["simulate", f"trace={tmp_path / 'run'}", "policy=lifo"]) == 2
    assert main(["simulate", f"trace={tmp_path}"]) == 2
    builder = TraceBuilder()
    told = [("is_cpu_op", "bool", False), ("comm_type", "int64", 0), ("comm_size", "int64", 1 << 20)]
    builder.add(1, "untimed", NodeKind.COMM_COLL, attributes=told)
    path = write(tmp_path / "a.0.et", builder.trace())
    capsys.readouterr()
    assert main(["simulate", f"trace={path}"]) == 0
    assert "1 collectives and messages have no time: durations=network" in capsys.readouterr().err


def test_a_trace_tells_offload_and_experts(tmp_path: Path) -> None:
    """Copies to and from the host say what they carry, exchanges between experts how many tokens go to each."""
    emit(
        state_of(*MODEL, "workload=train", "workload.seq_len=64", "offload=[optimizer,activations]"), tmp_path / "train"
    )
    trace = read_run(tmp_path / "train").traces[0]
    words, sizes = trace.text("offload"), trace.column("tensor_size", 0, "uint64")
    for kind in (NodeKind.MEM_LOAD, NodeKind.MEM_STORE):
        rows = trace.kind == kind
        told = {trace.words[int(each)] for each in words[rows & (words >= 0)]}
        assert told == {"weights" if kind == NodeKind.MEM_LOAD else "gradients", "activations"}
        assert (sizes[rows] > 0).all()
    moved = [int(sizes[(trace.kind == kind) & (words >= 0)].sum()) for kind in (NodeKind.MEM_LOAD, NodeKind.MEM_STORE)]
    assert moved[0] == moved[1]  # what goes out comes back, updated
    emit(state_of(*MODEL, "workload=decode", "workload.batch=2", "offload=[kv]"), tmp_path / "decode")
    trace = read_run(tmp_path / "decode").traces[0]
    words = trace.text("offload")
    assert {trace.words[int(each)] for each in words[words >= 0]} == {"kv_cache"}


def test_an_exchange_between_experts_tells_its_bins() -> None:
    op = make_op("ep_dispatch", tokens=10, hidden=64, topk=3, experts=8, ranks=4, ranks_per_node=4, dtype="bf16")
    told = node_template(Node(op, "ep", "moe", "forward", (), (), 0, group="ep"), "analytical")
    values = {name: value for name, _, value in told.attributes}
    assert told.kind == NodeKind.COMM_COLL
    assert values["moe_bins"] == [4] * 6 + [3] * 2  # 10 tokens of 3 experts each
    assert (values["moe_tokens"], values["moe_topk"], values["moe_experts"]) == (10, 3, 8)

"""Dependencies that others imply are left out, and none else; convert refuses what cannot run and names the node."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.traces import protobuf, pruning
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.dependencies import sorted_dependencies
from opcast.datasets.traces.pruning import prune
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import CollectiveKind, NodeKind
from opcast.datasets.traces.table import ExecutionTrace
from opcast.jobs.cli import main

GRAPH = st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=14)


def graph(parents: list[list[int]], order: list[int]) -> ExecutionTrace:
    """Nodes that wait for earlier ones, some named twice, in any order of the file."""
    builder = TraceBuilder()
    for place in order:
        builder.add(place + 1, f"op{place}", data=[1 + each % place for each in parents[place]] if place else [],
                    control=[1 + each % place for each in parents[place]] if place else [])  # fmt: skip
    return builder.trace()


def reached(trace: ExecutionTrace) -> np.ndarray:
    """Which nodes come before which [ids, ids]."""
    n = len(trace)
    found = np.zeros((n + 1, n + 1), bool)
    for row in np.argsort(trace.ids).tolist():
        child = int(trace.ids[row])
        for parent in trace.data.row(row).tolist():
            found[child] |= found[int(parent)]
            found[child, int(parent)] = True
    return found


@settings(max_examples=80)
@given(parents=GRAPH, data=st.data())
def test_what_comes_before_what_stays_and_nothing_is_implied(parents: list[list[int]], data: st.DataObject) -> None:
    trace = graph(parents, data.draw(st.permutations(range(len(parents)))))
    made, count = prune(trace, *sorted_dependencies(trace, "t"))
    before = reached(trace)
    assert (reached(made) == before).all()
    kept = len(made.data.values) + len(made.control.values)
    assert count == len(trace.data.values) + len(trace.control.values) - kept
    for row in range(len(made)):
        own = [int(each) for each in made.data.row(row)]
        assert len(set(own)) == len(own)
        assert not any(before[one, other] for one in own for other in own)
        assert set(made.control.row(row).tolist()) == set(trace.control.row(row).tolist())


def test_machine_code_prunes_as_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(1)
    trace = graph([rng.integers(0, 1 << 20, 4).tolist() for _ in range(400)], list(range(400)))
    plain = prune(trace, *sorted_dependencies(trace, "t"))[0].data.values.tolist()
    monkeypatch.setattr(pruning, "COMPILE_FROM_NODES", 0)
    assert prune(trace, *sorted_dependencies(trace, "t"))[0].data.values.tolist() == plain


def call(builder: TraceBuilder, id: int, group: str, parents: list[int]) -> None:
    told = [("is_cpu_op", "bool", False), ("comm_type", "int64", CollectiveKind.ALL_REDUCE), ("comm_size", "int64", 8),
            ("pg_name", "string", group)]  # fmt: skip
    builder.add(id, "all_reduce", NodeKind.COMM_COLL, data=parents, attributes=told)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks with a dependency that is implied."""
    for rank in range(2):
        builder = TraceBuilder()
        builder.add(1, "first")
        builder.add(2, "second", data=[1])
        call(builder, 3, "both", [2, 1])
        protobuf.write(tmp_path / "run" / f"a.{rank}.et", builder.trace())
    (tmp_path / "run" / "comm_group.json").write_text(json.dumps({"both": [0, 1]}))
    return tmp_path / "run"


def test_a_folder_is_converted_and_pruned(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "convert", f"path={folder}", f"output={tmp_path / 'out'}", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["nodes"], found["implied"]) == (2, 6, 2)
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["comm_group.json", "run.0.et", "run.1.et"]
    assert json.loads((tmp_path / "out" / "comm_group.json").read_text()) == {"1": [0, 1]}
    again = read_trace(tmp_path / "out" / "run.1.et")
    values = {name: value for name, _, value in again.attributes.items(2, again.words)}
    assert (values["pg_name"], values["group_name"], values["comm_size"]) == ("1", "both", 8)
    assert main(["trace", "check", f"path={folder}"]) == 2
    assert "group 'both': ASTRA-sim reads group names as whole numbers" in capsys.readouterr().out
    assert main(["trace", "check", f"path={tmp_path / 'out'}"]) == 0
    assert read_trace(tmp_path / "out" / "run.1.et").data.row(2).tolist() == [2]
    asked = ["trace", "convert", f"path={folder / 'a.0.et'}", f"output={tmp_path / 'b.et'}", "prune=false"]
    (folder / "comm_group.json").write_text("{}")
    assert main(asked) == 0
    assert (tmp_path / "b.et").read_bytes() == (folder / "a.0.et").read_bytes()
    assert main(["trace", "convert", f"path={folder}", f"output={tmp_path / 'c.et'}"]) == 2
    assert main(["trace", "convert", f"path={folder}", f"output={tmp_path / 'b.et'}"]) == 2
    assert main(["trace", "convert", f"path={folder}", f"output={tmp_path / 'out'}"]) == 2  # holds traces already


def test_convert_names_the_node_that_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(change: TraceBuilder, *more: str) -> str:
        protobuf.write(folder / "bad.7.et", change.trace())
        code = main(["trace", "convert", f"path={folder / 'bad.7.et'}", f"output={folder.parent / 'x.et'}", *more])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert (code == 2) == ("bad.7.et: node" in err)
        return err

    circle = TraceBuilder()
    circle.add(1, "a", data=[2])
    circle.add(2, "b", data=[1])
    assert "nodes depend on each other in a circle: 2 -> 1 -> 2; validate=false" in said(circle)
    lost = TraceBuilder()
    lost.add(4, "a", data=[9])
    assert "node 4 depends on 9, which is no node of this trace" in said(lost)
    stranger = TraceBuilder()
    call(stranger, 5, "both", [])
    assert "node 5 is of group 'both', which rank 7 is no member of" in said(stranger)
    beside, contrary = TraceBuilder(), TraceBuilder()
    for id, start in ((1, 10), (2, 12)):
        beside.add(id, f"k{id}", start_us=start, duration_us=9, attributes=[("stream", "int64", 7)])
        contrary.add(id, f"k{id}", start_us=start + 10, duration_us=1, data=[3] if id == 1 else [])
    contrary.add(3, "late", start_us=40)
    assert "node 2 ('k2') begins on stream 7 while node 1 ('k1') still runs there" in said(beside)
    assert "node 1 ('k1') depends on node 3, which began 20 us later" in said(contrary)
    assert "2 nodes" in said(beside, "validate=false")

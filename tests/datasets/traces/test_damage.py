"""Files that are damaged, and traces that cannot run: one line that names file and node, never a traceback."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.traces import json_forms, protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.checks import check_ranks, check_trace, find_problems
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import CollectiveKind, NodeKind, TraceFileError
from opcast.datasets.traces.table import ExecutionTrace
from opcast.jobs.cli import main


def call(kind: CollectiveKind, size: int, group: str = "") -> list[tuple[str, str, Any]]:
    """Attributes of a collective."""
    named = [("pg_name", "string", group)] if group else []
    return [("is_cpu_op", "bool", False), ("comm_type", "int64", kind), ("comm_size", "int64", size), *named]


def calls(*found: tuple[CollectiveKind, int, str], chained: bool = True) -> ExecutionTrace:
    """Collectives one after another."""
    builder = TraceBuilder()
    for id, (kind, size, group) in enumerate(found, 1):
        builder.add(id, f"coll{id}", NodeKind.COMM_COLL, data=[id - 1] if id > 1 and chained else [],
                    attributes=call(kind, size, group))  # fmt: skip
    return builder.trace()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with everything in it."""
    builder = TraceBuilder([("rank", "int32", 0)])
    for id in range(1, 7):
        builder.add(id, f"op{id}", NodeKind.COMP, duration_us=id + 0.5, data=[id - 1] if id > 1 else [],
                    inputs=["[1]", "[[2]]", "['Int']"],
                    attributes=[("num_ops", "int64", 5), ("names", "string_list", ["a", "b"]),
                                ("f", "float", 0.5)])  # fmt: skip
    return protobuf.write(tmp_path_factory.mktemp("good") / "a.et", builder.trace()).read_bytes()


def told(path: Path) -> str:
    """What reading a damaged file says: nothing, or one line that names the file."""
    said = ""
    try:
        check_trace(read_trace(path), str(path))
    except TraceFileError as error:
        said = str(error)
    assert not said or (str(path) in said and "\n" not in said)
    return said


@settings(max_examples=150)
@given(data=st.data())
def test_mutated_bytes_are_one_line(tmp_path_factory: pytest.TempPathFactory, good: bytes, data: st.DataObject) -> None:
    made = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(made) - 1))
        made[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        made = made[: data.draw(st.integers(0, len(made)))]
    path = tmp_path_factory.mktemp("mutated") / "a.0.et"
    path.write_bytes(made)
    told(path)


@settings(max_examples=60)
@given(junk=st.binary(max_size=80), name=st.sampled_from(["a.et", "a.json", "a.et.gz", "a"]))
def test_junk_is_one_line(tmp_path_factory: pytest.TempPathFactory, junk: bytes, name: str) -> None:
    path = tmp_path_factory.mktemp("junk") / name
    path.write_bytes(junk)
    told(path)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 1 << 70), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)
SIDES = {f"{side}{part}": [] for side in ("input", "output") for part in ("s", "_shapes", "_types")}
JSON_FORMS: list[dict[str, Any]] = [
    {"schema": "1.0.1", "nodes": [{"id": 2, "name": "a", "parent": 1, **SIDES}]},
    {"schema": "1.1.0", "nodes": [{"id": 2, "name": "a", "ctrl_deps": 1, "inputs": {}, "outputs": {},
     "attrs": [{"name": "rf_id", "type": "uint64", "value": 3}]}]},
    {"workload_graph": [{"Id": 1, "Name": "a", "NodeType": 4, "data_deps": [], "runtime": 3}]},
    {"version": "1", "attr": [{"name": "a", "int64Val": "5"}]},
]  # fmt: skip


@settings(max_examples=120)
@given(form=st.sampled_from(JSON_FORMS), data=st.data())
def test_json_of_other_kinds_of_values_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, form: dict[str, Any], data: st.DataObject
) -> None:
    made = json.loads(json.dumps(form))
    at: Any = made
    while isinstance(at, (dict, list)) and at:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], (dict, list)) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(VALUES)
            break
        at = at[key]
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(made))
    told(path)


def test_a_length_of_two_gigabytes_allocates_nothing(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "a.et"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for lie in (b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01", good[:5] + b"\x0a\xff\xff\xff\xff\x07"):
        path.write_bytes(lie + b"\x08\x01")
        assert "broken off" in told(path) or "damaged" in told(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_truncated_file_says_where(tmp_path: Path, good: bytes, cut: int) -> None:
    path = tmp_path / "a.et"
    path.write_bytes(good[:-cut])
    assert "is broken off: its last message, at byte" in told(path)


def linked(change: Callable[[TraceBuilder], None]) -> list[str]:
    builder = TraceBuilder()
    builder.add(1, "a", data=[])
    change(builder)
    return check_trace(builder.trace(), "a.et")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.add(2, "b", 9), "node 2 has type 9, which is none of 1 METADATA"),
        (lambda b: b.add(2, "b", data=[7]), "node 2 depends on 7, which is no node of this trace"),
        (lambda b: (b.add(2, "b", data=[3]), b.add(3, "c", data=[2])), "in a circle"),
        (lambda b: b.add(2, "b", data=[2]), "in a circle: 2 -> 2"),
        (lambda b: b.add(1, "b"), "node 1 is there twice ('a' and 'b')"),
        (
            lambda b: b.add(2, "b", attributes=[("comm_size", "uint64", 4)]),
            "comm_size is of kind uint64; readers want int64",
        ),
        (lambda b: b.add(2, "b", NodeKind.COMM_COLL, attributes=call(10, 4)), "node 2 ('b') has comm_type 10"),  # type: ignore[arg-type]
        (lambda b: b.add(2, "b", NodeKind.COMM_COLL), "node 2 ('b') has no comm_type"),
        (lambda b: b.add(2, "b", NodeKind.COMM_SEND, attributes=[("comm_size", "int64", 1)]), "no comm_dst"),
    ],
)
def test_what_is_wrong_with_a_trace_names_the_node(change: Callable[[TraceBuilder], None], says: str) -> None:
    found = linked(change)
    assert len([line for line in found if says in line]) == 1, found
    assert all(line.startswith("a.et: ") for line in found)


REDUCE, GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
R4, G4, A, B = (REDUCE, 4, ""), (GATHER, 4, ""), (REDUCE, 4, "a"), (REDUCE, 4, "b")
BOTH = {"a": (0, 1), "b": (0, 1)}
FIRST = "deadlock at call 1 of the group of all ranks: ALL_REDUCE of 4 bytes in rank 0"


@pytest.mark.parametrize(
    ("ranks", "members", "says"),
    [
        ([calls(R4), calls((REDUCE, 8, ""))], {}, f"{FIRST} (node 1), but ALL_REDUCE of 8"),
        ([calls(R4, G4), calls(G4, R4)], {}, "but ALL_GATHER of 4 bytes in rank 1 (node 1)"),
        ([calls(R4, R4), calls(R4)], {}, f"{FIRST.replace('1', '2')} (node 2) waits for rank 1, which has no more"),
        ([calls(A), calls(A)], {"a": (0, 1, 2)}, "there is no trace of rank 2"),
        ([calls(A), calls(A)], {"a": (0,)}, "which rank 1 is no member of"),
        ([calls(A, B), calls(B, A)], BOTH, "deadlock: ranks wait for each other in a circle: ALL_REDUCE (call 1"),
    ],
)  # fmt: skip
def test_collectives_that_never_meet_are_a_deadlock(
    ranks: list[ExecutionTrace], members: dict[str, tuple[int, ...]], says: str
) -> None:
    found = check_ranks(RankedTraces(dict(enumerate(ranks)), members))
    assert len(found) == 1
    assert says in found[0]


def test_collectives_that_meet_are_sound() -> None:
    first, second = calls((REDUCE, 4, "a"), (GATHER, 4, "b")), calls((REDUCE, 4, "a"), (GATHER, 4, "b"))
    assert check_ranks(RankedTraces({0: first, 1: second}, {"a": (0, 1), "b": (0, 1)})) == []


def test_the_command_says_each_problem_and_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, size in enumerate((4, 8)):
        protobuf.write(tmp_path / f"run.{rank}.et", calls((REDUCE, size, "")))
    assert main(["trace", "check", f"path={tmp_path}"]) == 2
    shown = capsys.readouterr().out
    assert "deadlock at call 1" in shown
    assert f"{tmp_path}: 1 problem\n" in shown
    protobuf.write(tmp_path / "run.1.et", calls((REDUCE, 4, "")))
    assert main(["trace", "check", f"path={tmp_path}", "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert find_problems(tmp_path) == []
    assert main(["trace", "check", f"path={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: nothing to complain about\n"


def test_the_command_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = protobuf.write(tmp_path / "run.0.et", calls((REDUCE, 4, "")))
    assert main(["trace", "convert", f"path={path}", f"output={tmp_path / 'a.json'}"]) == 0
    assert main(["trace", "convert", f"path={tmp_path / 'a.json'}", f"output={tmp_path / 'b.et'}"]) == 0
    assert (tmp_path / "b.et").read_bytes() == path.read_bytes()
    assert main(["trace", "convert", f"path={path}", f"output={tmp_path / 'a.xyz'}"]) == 2
    assert main(["trace", "convert", f"path={path}"]) == 2
    assert main(["trace", "walk"]) == 2
    assert json_forms.read_json(tmp_path / "a.json").ids.tolist() == [1]

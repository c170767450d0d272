"""Chakra's files, to the byte: what the reference tools write is read and written again; they read what we write."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.traces import json_forms, protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import ARMS, NodeKind, TraceFileError
from opcast.datasets.traces.table import ExecutionTrace

RANGES = {
    "int32": (-(1 << 31), (1 << 31) - 1), "uint32": (0, (1 << 32) - 1), "int64": (-(1 << 63), (1 << 63) - 1),
    "uint64": (0, (1 << 64) - 1),
}  # fmt: skip
IDS = st.integers(0, (1 << 64) - 1)


def values(arm: str) -> st.SearchStrategy[Any]:
    """Values of an arm."""
    if arm in ("double", "float"):
        return st.floats(width=64 if arm == "double" else 32, allow_nan=False)
    if arm == "bool":
        return st.booleans()
    if arm in ("string", "bytes"):
        return (
            st.text(st.characters(exclude_categories=["Cs"]), max_size=9) if arm == "string" else st.binary(max_size=9)
        )
    low, high = RANGES[arm.replace("sfixed", "int").replace("fixed", "uint").replace("sint", "int")]
    return st.integers(low, high)


ATTRIBUTES = st.lists(
    st.sampled_from(sorted(ARMS)).flatmap(
        lambda arm: st.one_of(
            st.tuples(st.text("ab", max_size=2), st.just(arm), values(arm)),
            st.tuples(st.text("ab", max_size=2), st.just(f"{arm}_list"), st.lists(values(arm), max_size=4)),
        )
    ),
    max_size=4,
)
NODES = st.lists(
    st.tuples(IDS, st.text("xy", min_size=1, max_size=4), st.integers(1, 7), IDS.filter(lambda us: us < 1 << 52),
              st.lists(IDS, max_size=4), st.lists(IDS, max_size=4), ATTRIBUTES),
    min_size=1, max_size=5,
)  # fmt: skip


def built(nodes: list[Any], about: list[Any]) -> ExecutionTrace:
    builder = TraceBuilder(about)
    for id, name, kind, us, control, data, attributes in nodes:
        builder.add(id, name, kind, duration_us=us, control=control, data=data, inputs=["[1]", "[[]]", "['Int']"],
                    attributes=attributes)  # fmt: skip
    return builder.trace()


def test_the_reference_files_come_out_byte_for_byte(generated: Path, tmp_path: Path) -> None:
    files = sorted(generated.glob("*.et"))
    assert len(files) == 28
    for file in files:
        protobuf.write(tmp_path / "again.et", protobuf.read(file))
        assert (tmp_path / "again.et").read_bytes() == file.read_bytes(), file.name


@pytest.mark.reference
def test_the_feeders_example_comes_out_byte_for_byte(reference_data: Path, tmp_path: Path) -> None:
    with tarfile.open(reference_data / "data" / "traces" / "chakra" / "feeder_tests_trace.tar.gz") as packed:
        (tmp_path / "0.et").write_bytes(packed.extractfile("tests/data/chakra.0.et").read())  # type: ignore[union-attr]
    trace = protobuf.read(tmp_path / "0.et")
    assert len(trace) == 3664
    assert np.bincount(trace.kind)[[NodeKind.COMP, NodeKind.COMM_COLL]].tolist() == [3643, 21]
    protobuf.write(tmp_path / "1.et", trace)
    assert (tmp_path / "1.et").read_bytes() == (tmp_path / "0.et").read_bytes()


@settings(max_examples=40)
@given(nodes=NODES, about=ATTRIBUTES)
def test_the_reference_reads_what_we_write(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[Any], about: list[Any]
) -> None:
    schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs mlc-chakra")
    protolib = pytest.importorskip("chakra.src.third_party.utils.protolib")
    path = tmp_path_factory.mktemp("et") / "a.et"
    protobuf.write(path, built(nodes, about))
    again = bytearray()
    with protolib.openFileRd(str(path)) as file:
        head, found = schema.GlobalMetadata(), []
        protolib.decodeMessage(file, head)
        node = schema.Node()
        while protolib.decodeMessage(file, node):
            found.append(node)
            node = schema.Node()
    assert [(n.id, n.name, n.type, n.duration_micros, list(n.ctrl_deps), list(n.data_deps)) for n in found] == [
        node[:6] for node in nodes
    ]
    for theirs, ours in zip(found, nodes, strict=True):
        for attribute, (name, arm, value) in zip(theirs.attr, ours[6], strict=True):
            plain = arm.removesuffix("_list")
            kept = list(getattr(attribute, arm).values) if plain != arm else getattr(attribute, f"{arm}_val")
            assert (attribute.name, kept) == (name, value)
    from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]

    for message in (head, *found):
        text = message.SerializeToString()
        again += _VarintBytes(len(text)) + text
    assert path.read_bytes() == again


@settings(max_examples=40)
@given(nodes=NODES, about=ATTRIBUTES)
def test_nothing_is_lost_through_any_form(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[Any], about: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("forms")
    trace = built(nodes, about)
    first = protobuf.write(folder / "a.et", trace)
    read = protobuf.read(first)
    kept = [list(read.attributes.items(row, read.words)) for row in range(len(nodes))]
    assert kept == [node[6] for node in nodes]
    packed = protobuf.write(folder / "b.et.gz", protobuf.read(first))
    assert gzip.decompress(packed.read_bytes()) == first.read_bytes()
    text = json_forms.write_json(folder / "c.json", read_trace(packed))
    assert protobuf.write(folder / "d.et", read_trace(text)).read_bytes() == first.read_bytes()


def test_json_is_what_the_jsonizer_prints(generated: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    for name in ("one_metadata_node_all_types.0.et", "two_comp_nodes_dependent.0.et", "ALL_REDUCE.0.et"):
        ours = json_forms.write_json(tmp_path / "ours.json", protobuf.read(generated / name))
        files = ["--input_filename", str(generated / name), "--output_filename", str(tmp_path / "theirs.json")]
        subprocess.run([sys.executable, "-P", "-m", "chakra.src.jsonizer.jsonizer", *files], check=True)
        assert ours.read_text() == (tmp_path / "theirs.json").read_text()


def chain(length: int, begin: int = 1) -> ExecutionTrace:
    """Nodes that follow each other, with attributes of every sort."""
    builder = TraceBuilder([("rank", "int32", 3), ("note", "string", "of the file")])
    for id in range(begin, begin + length):
        builder.add(id, f"op{id % 9}", NodeKind.COMP, start_us=id, duration_us=id % 5 + 0.25,
                    data=[id - 1] if id > begin else [], inputs=[f"[{id}]", "[[4]]", "['Int']"],
                    attributes=[("num_ops", "int64", -id), ("l", "string_list", ["a", f"b{id % 7}"]),
                                ("u", "uint64_list", [id])])  # fmt: skip
    return builder.trace()


def test_windows_hold_what_the_whole_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = protobuf.write(tmp_path / "whole.et", chain(500))
    for size in (64, 1000, 1 << 20):
        monkeypatch.setattr(protobuf, "WINDOW_BYTES", size)
        assert protobuf.write(tmp_path / "a.et", protobuf.read(whole)).read_bytes() == whole.read_bytes()


def test_compiled_loops_do_what_the_plain_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    path = protobuf.write(tmp_path / "a.et", chain(300))
    monkeypatch.setattr(protobuf.scanning, "COMPILE_FROM_BYTES", 0)
    assert protobuf.write(tmp_path / "b.et", protobuf.read(path)).read_bytes() == path.read_bytes()


def test_times_keep_their_fractions(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.add(1, "short", start_us=2.5, duration_us=0.25)
    builder.add(2, "whole", start_us=3, duration_us=7)
    trace = protobuf.read(protobuf.write(tmp_path / "a.et", builder.trace()))
    assert trace.exact_us.tolist() == [0.25, 7.0]
    assert trace.exact_start_us.tolist() == [2.5, 3.0]
    assert trace.duration_us.tolist() == [0, 7]


def test_a_node_that_readers_take_for_the_end_is_not_written(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.add(0, "", NodeKind.INVALID)
    with pytest.raises(TraceFileError, match="count ids from 1"):
        protobuf.write(tmp_path / "a.et", builder.trace())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.reference
def test_pytorchs_host_traces_are_read(reference_data: Path, tmp_path: Path) -> None:
    folder = reference_data / "data" / "traces"
    trace = read_trace(folder / "hta" / "benchmark_simple_add_et.json.gz")
    assert len(trace) == 38
    with tarfile.open(folder / "param" / "pt2_et.json.tar.gz") as packed:
        (tmp_path / "pt2.json").write_bytes(packed.extractfile("pt2_et.json").read())  # type: ignore[union-attr]
    trace = read_trace(tmp_path / "pt2.json")
    assert len(trace) == 20
    assert trace.column("rf_id", 0, "uint64").max() > 0
    with tarfile.open(folder / "chakra" / "json_trace.tar.gz") as packed:
        (tmp_path / "amd.0.json").write_bytes(packed.extractfile("jsonData/chakra.0.json").read())  # type: ignore[union-attr]
    trace = read_trace(tmp_path / "amd.0.json")
    assert len(trace) == 3664
    assert int(np.sum(trace.kind == NodeKind.COMM_COLL)) == 21

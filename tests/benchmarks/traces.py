"""Reading, checking, simulating and writing execution traces, beside the reference tools on the same file, in one run.

    python tests/benchmarks/traces.py [NODES]

Rates are nodes per second of this process's own time on one core, the loops loaded; memory is the most that the process
held. The peers are the reader, the writer (protobuf's upb in C) and the converter of ``mlc-chakra``, where it is
installed: the converter on a linked host and device trace of PyTorch's form, read, checked and written by both.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from opcast.datasets.traces import protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.checks import check_trace
from opcast.datasets.traces.dependencies import sorted_dependencies
from opcast.datasets.traces.gathering import take_rows
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.pruning import prune
from opcast.datasets.traces.reading import read_trace
from opcast.datasets.traces.schema import NodeKind
from opcast.datasets.traces.table import ExecutionTrace, SparseRows
from opcast.simulator.execution.run import simulate_run

PIECE = 250_000
PEER_NODES = 200_000
CONVERTED_NODES = 60_000


def pieces(nodes: int) -> Iterator[ExecutionTrace]:
    """A chain of ops with inputs, FLOPs and sizes: every tenth on a stream of communication."""
    builder = TraceBuilder([("rank", "int32", 0)])
    for sort in range(970):
        builder.add(1, f"aten::op{sort % 97}", NodeKind.COMP, duration_us=7 + sort % 3 * 0.25,
                    inputs=[f'[[{sort}, {sort % 50}, 0, 1024, 2, "cuda:0"]]', "[[32, 32]]", '["Tensor(float)"]'],
                    attributes=[("is_cpu_op", "bool", False), ("num_ops", "int64", 1000 * sort),
                                ("tensor_size", "uint64", 4096),
                                ("stream", "int64", 7 if sort % 10 else 20)])  # fmt: skip
    sorts = builder.trace()
    for begin in range(0, nodes, PIECE):
        ids = np.arange(begin + 1, min(begin + PIECE, nodes) + 1)
        made = take_rows(sorts, ids % 970)
        parents = np.stack([ids - 1, np.maximum(ids - 7, 1)], axis=1)
        has = np.where(ids > 7, 2, np.where(ids > 1, 1, 0))
        offsets = np.concatenate([[0], np.cumsum(has)])
        kept = np.arange(2) < has[:, None]
        made.ids[:] = ids
        yield ExecutionTrace(**{**made.__dict__, "data": SparseRows(offsets, parents[kept].astype(np.uint64))})


def timed(what: str, nodes: int, job: Callable[[], object]) -> object:
    """Run a job and print its rate."""
    began = time.process_time()
    made = job()
    seconds = time.process_time() - began
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:34s} {nodes / seconds:12,.0f} nodes/s  {seconds:8.2f} s  most held {held:8,.0f} MiB", flush=True)
    return made


def peer(path: Path, nodes: int) -> None:
    """The reference reader and writer."""
    try:
        from chakra.schema.protobuf.et_def_pb2 import GlobalMetadata, Node
        from chakra.src.third_party.utils.protolib import decodeMessage, encodeMessage, openFileRd
    except ImportError:
        print("mlc-chakra is not installed: no peer")
        return

    def read() -> list[object]:
        found: list[object] = []
        with openFileRd(str(path)) as file:
            decodeMessage(file, GlobalMetadata())
            node = Node()
            while decodeMessage(file, node):
                found.append(node)
                node = Node()
        return found

    def write(found: object) -> None:
        with open(path.with_name("peer.et"), "wb") as file:
            encodeMessage(file, GlobalMetadata(version="1.0.0"))
            for node in found:  # type: ignore[attr-defined]
                encodeMessage(file, node)

    found = timed("mlc-chakra reads", nodes, read)
    timed("mlc-chakra writes", nodes, lambda: write(found))


def linked_form(path: Path, nodes: int) -> Path:
    """A host trace with devices as the reference linker leaves it: operators, each with a kernel."""
    sides = {"values": [[1, 2, 0, 1024, 4, "cuda:0"]], "shapes": [[32, 32]], "types": ["Tensor(float)"]}
    thread = "[pytorch|profiler|execution_trace|thread]"
    made = [{"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1},
            {"id": 2, "name": thread, "ctrl_deps": 1}]  # fmt: skip
    for id in range(3, nodes + 3, 2):
        at = {"ts": 10.0 * id, "inclusive_dur": 8, "exclusive_dur": 8}
        made.append({"id": id, "name": f"aten::op{id % 97}", "ctrl_deps": 2, **at})
        made.append({"id": id + 1, "name": f"kernel{id % 89}", "ctrl_deps": id, **at, "cat": "kernel", "stream": 7})
    attributes = [{"name": name, "type": "uint64", "value": 7} for name in
                  ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid")]  # fmt: skip
    attributes.append({"name": "op_schema", "type": "string", "value": "aten::op(Tensor self) -> Tensor"})
    for each in made:
        each |= {"inputs": sides, "outputs": sides, "attrs": attributes}
    about = {"schema": "1.1.0-chakra.0.0.4", "pid": 1, "time": "now", "start_ts": 0, "finish_ts": 1}
    path.write_text(json.dumps({**about, "nodes": made}))
    return path


def converters(folder: Path, nodes: int) -> None:
    """Both converters on the same file."""
    path = linked_form(folder / "linked.json", nodes)

    def ours() -> None:
        trace = read_trace(path)
        assert check_trace(trace, "linked") == []
        protobuf.write(folder / "ours.et", prune(trace, *sorted_dependencies(trace, "linked"))[0])

    timed("opcast converts, the peer's file", nodes, ours)
    try:
        from chakra.src.converter.pytorch_converter import PyTorchConverter
    except ImportError:
        return
    theirs = str(folder / "theirs.et")
    timed("mlc-chakra converts", nodes, lambda: PyTorchConverter().convert(str(path), theirs, simulate=False))


def main(nodes: int) -> None:
    """Both on the same files."""
    with tempfile.TemporaryDirectory() as folder:
        warm = protobuf.write(Path(folder, "warm.et"), pieces(30_000))
        simulate_run(RankedTraces({0: protobuf.read(warm)}))
        check_trace(protobuf.read(warm), "warm")
        path = Path(folder, "big.et")
        timed("opcast makes and writes", nodes, lambda: protobuf.write(path, pieces(nodes)))
        print(f"{path.stat().st_size / 1e6:,.0f} MB")
        trace = timed("opcast reads", nodes, lambda: protobuf.read(path))
        assert isinstance(trace, ExecutionTrace)
        timed("opcast checks", nodes, lambda: check_trace(trace, "big"))
        timed("opcast simulates", nodes, lambda: simulate_run(RankedTraces({0: trace})))
        del trace
        small = protobuf.write(Path(folder, "small.et"), pieces(PEER_NODES))
        trace = timed("opcast reads, the peer's file", PEER_NODES, lambda: protobuf.read(small))
        assert isinstance(trace, ExecutionTrace)
        timed("opcast writes, the peer's file", PEER_NODES, lambda: protobuf.write(small, trace))
        peer(small, PEER_NODES)
        converters(Path(folder), CONVERTED_NODES)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000)

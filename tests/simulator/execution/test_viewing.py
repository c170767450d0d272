"""Traces to look at: HTA reads the timeline as we do, graphs hold the window, the order keeps dependencies."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from opcast.datasets.traces import protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.groups import RankedTraces
from opcast.datasets.traces.schema import CollectiveKind, NodeKind
from opcast.jobs.cli import main
from opcast.simulator.execution.analysis import recorded_accounts
from opcast.simulator.execution.run import read_run
from opcast.simulator.execution.synthetic import generate, load_synthetic
from opcast.simulator.execution.usage import imbalances, trace_memory


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, computing and communicating beside each other, with gaps and kernels below a microsecond."""
    folder = tmp_path_factory.mktemp("seen")
    rng = np.random.default_rng(3)
    for rank in range(2):
        builder = TraceBuilder()
        now = 0.0
        for id in range(1, 400):
            now += float(rng.choice([0.0, 0.0, 3.3, 40.0]))
            us = float(rng.choice([0.4, 2.6, 17.5, 101.25]))
            if id % 7 == 0:
                told = [("stream", "int64", 20), ("comm_type", "int64", CollectiveKind.ALL_REDUCE),
                        ("comm_size", "int64", 8)]  # fmt: skip
                builder.add(id, "all_reduce", NodeKind.COMM_COLL, start_us=now - 5 if now > 5 else now,
                            duration_us=us, data=[id - 1], attributes=told)  # fmt: skip
                continue
            kind = NodeKind.MEM_LOAD if id % 11 == 0 else NodeKind.COMP
            builder.add(id, "gemm", kind, start_us=now, duration_us=us, data=[id - 1] if id > 1 else [],
                        control=[id - 2] if id > 2 else [], attributes=[("stream", "int64", 7)])  # fmt: skip
            now += us
        protobuf.write(folder / f"seen.{rank}.et", builder.trace())
    return folder


HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
opened = TraceAnalysis(trace_dir=sys.argv[1])  # ranks are found by what the files say
ranks = opened.get_temporal_breakdown(visualize=False).set_index("rank").to_dict("index")
overlap = opened.get_comm_comp_overlap(visualize=False)
print(json.dumps([ranks, float(overlap["comp_comm_overlap_pctg"].iloc[0])]))
"""


def test_hta_reads_the_timeline_as_we_do(overlapping: Path, tmp_path: Path) -> None:
    """In a process of its own: HTA forks, which one with threads of gRPC does not survive."""
    pytest.importorskip("hta", reason="needs HolisticTraceAnalysis")
    assert main(["trace", "view", f"path={overlapping}", f"output={tmp_path / 'hta'}"]) == 0
    done = subprocess.run(
        [sys.executable, "-P", "-c", HTA, str(tmp_path / "hta")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found, overlap = json.loads(done.stdout.splitlines()[-1])
    for ours in recorded_accounts(read_run(overlapping)):
        theirs = found[str(ours.rank)]
        assert theirs["kernel_time(us)"] == pytest.approx(ours.total_us, rel=0.005)
        assert theirs["idle_time_pctg"] == pytest.approx(100 * ours.idle_us / ours.total_us, abs=0.5)
        memory_us = sum(share.total_us for share in ours.classes if share.name == "memory")
        compute = 100 * (ours.compute_us - memory_us) / ours.total_us  # copies are no compute to HTA
        assert theirs["compute_time_pctg"] == pytest.approx(compute, abs=0.5)
    assert 0 < overlap < 100


def test_graphs_hold_the_nodes_and_edges_of_the_window(overlapping: Path, tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    for name in ("a.dot", "a.graphml"):
        asked = [f"path={overlapping}", f"output={tmp_path / name}", "nodes=[10,30]"]
        assert main(["trace", "view", *asked]) == 0
    graph = networkx.read_graphml(tmp_path / "a.graphml")
    assert sorted(map(int, graph.nodes)) == list(range(10, 31))
    kinds = [each["dependency"] for _, _, each in graph.edges(data=True)]
    text = (tmp_path / "a.dot").read_text()
    assert text.count(" -> ") == len(kinds) == 20 + kinds.count("control")
    assert text.count("dashed") == kinds.count("control") > 0
    assert graph.nodes["14"]["class"] == "all_reduce"
    ElementTree.parse(tmp_path / "a.graphml")
    assert main(["trace", "view", f"path={overlapping}", f"output={tmp_path / 'a.dot'}", "nodes=[900,901]"]) == 2
    assert main(["trace", "view", f"path={overlapping}", f"output={tmp_path / 'a.png'}"]) == 2


def test_perfetto_gets_each_lane(overlapping: Path, tmp_path: Path) -> None:
    assert main(["trace", "view", f"path={overlapping}", f"output={tmp_path / 'a.json'}"]) == 0
    found = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    lanes = {each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert lanes == {"stream 7", "stream 20"}
    assert sum(each["ph"] == "X" for each in found) == 2 * 399


def test_the_order_keeps_dependencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = generate(load_synthetic({"ranks": 3, "nodes": 60, "overlap": 0.5, "imbalance": 0.4,
                              "communication": [{"kind": "all_reduce"}, {"kind": "send_recv"}]}))  # fmt: skip
    for rank, trace in run.traces.items():
        protobuf.write(tmp_path / f"s.{rank}.et", trace)
    (tmp_path / "comm_group.json").write_text(json.dumps({name: list(each) for name, each in run.members.items()}))
    assert main(["trace", "reconstruct", f"path={tmp_path}", f"output={tmp_path / 'o.csv'}", "format=json"]) == 0
    total = json.loads(capsys.readouterr().out)["total_us"]
    with open(tmp_path / "o.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(map(len, run.traces.values()))
    starts = [float(row["start_us"]) for row in rows]
    assert starts == sorted(starts)
    assert max(float(row["end_us"]) for row in rows) == total
    ends = {(int(row["rank"]), int(row["node"])): float(row["end_us"]) for row in rows}
    for row in rows:
        trace = run.traces[int(row["rank"])]
        place = int(np.flatnonzero(trace.ids == int(row["node"]))[0])
        for parent in trace.data.row(place).tolist():
            assert ends[int(row["rank"]), int(parent)] <= float(row["start_us"])


def test_memory_is_what_storages_between_their_first_and_last_node_hold() -> None:
    builder = TraceBuilder()
    of = {1: (1, 0, 100), 2: (1, 100, 20), 3: (2, 0, 50), 4: (3, 0, 10)}  # tensor: storage, offset, elements

    def side(*tensors: int) -> list[str]:
        values = [[each, of[each][0], of[each][1], of[each][2], 4, "cuda:0"] for each in tensors]
        return [repr([values, 3, "text"]), "[]", "[]"]

    for id, (reads, writes) in enumerate([((1,), ()), ((3,), (4,)), ((2,), ()), ((4,), ())], 1):
        builder.add(id, "op", start_us=10 * id, duration_us=5, inputs=side(*reads), outputs=side(*writes))
    (found,) = trace_memory(RankedTraces({5: builder.trace()}))
    assert (found.rank, found.device, found.storages) == (5, "cuda:0", 3)
    assert (found.peak_bytes, found.peak_node) == (480 + 200 + 40, 2)
    assert dict(found.curve) == {10.0: 480, 20.0: 720, 30.0: 520, 40.0: 40, 45.0: 0}


def test_imbalance_names_the_rank_that_has_most() -> None:
    run = generate(load_synthetic({"ranks": 3, "nodes": 40, "imbalance": 0.5, "share": 0.0}))
    found = imbalances(recorded_accounts(run))
    times = {rank: float(trace.exact_us.sum()) for rank, trace in run.traces.items()}
    assert found[0].rank == max(times, key=lambda rank: times[rank])
    assert found[0].ratio == pytest.approx(max(times.values()) / np.mean(list(times.values())))


def test_durations_are_shown_as_curves(overlapping: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON, in tables and on the page, beside those of another run."""
    asked = ["trace", "analyse", f"path={overlapping}", f"other={overlapping}"]
    assert main([*asked, f"report={tmp_path / 'a.html'}", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shares = np.array(found["cdf_shares"])
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    run = read_run(overlapping)
    for each in found["by_rank"]:
        trace = run.traces[each["rank"]]
        waits = np.diff(trace.data.offsets)
        assert (each["parents_cdf"][0], each["parents_cdf"][-1]) == (waits.min(), waits.max())
        for share in each["classes"]:
            curve = np.array(share["cdf_us"])
            assert (np.diff(curve) >= 0).all()
            if share["name"] == "all_reduce":
                us = trace.exact_us[trace.kind == NodeKind.COMM_COLL]
                below = np.array([(us <= at + 1e-6).mean() for at in curve])
                assert (below >= shares - 1e-9).all()  # so many of the nodes take no longer
    assert [each["total_us"] for each in found["other_by_rank"]] == [each["total_us"] for each in found["by_rank"]]
    page = (tmp_path / "a.html").read_text()
    for words in ("How long nodes take", "Dependencies of a node", "Communication by size", "Ranks of both"):
        assert words in page
    assert main(asked) == 0
    said = capsys.readouterr()
    assert "communication by size" in said.out + said.err
    assert "a node waits for" in said.out + said.err

"""``opcast predict`` on the links of a cluster, as a user calls it: collectives, transfers, faults, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

import opcast
from opcast.datasets.ops import bus_factor
from opcast.jobs.cli import main
from opcast.simulator.network.fabric import Transfer

NODES = ["cluster=dgx_h100", "cluster.nodes=4"]
THIN = ["cluster.topology.shape=fat_tree", "cluster.topology.radix=16", "cluster.topology.oversubscription=4"]
CONTRACT = {
    *("op", "device", "latency_us", "low_us", "high_us", "coverage", "engine", "predictor", "in_envelope"),
    *("roofline_us", "bound"),
}


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, op: str = "all_reduce", size: str = "1GiB") -> Any:
    asked = [] if any(text.startswith("transfers=") for text in arguments) else [f"op={op}", f"op.size_bytes={size}"]
    assert main(["predict", *asked, *NODES, *arguments, "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= CONTRACT
    assert found["low_us"] <= found["latency_us"] <= found["high_us"]
    return found


def test_flows_agree_with_the_formula_where_nothing_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    flow = ask(capsys, "op.ranks=32", "network=flow")
    formula = ask(capsys, "op.ranks=32", size="1073741824")
    assert flow["network"]["stretch"] == pytest.approx(1.0, rel=0.02)
    assert flow["latency_us"] == pytest.approx(formula["latency_us"], rel=0.02)
    assert (flow["engine"], formula["engine"]) == ("flow", "network")
    assert flow["roofline_us"] < flow["latency_us"]
    rate = 2**30 / flow["latency_us"] / 1e3
    assert flow["network"]["busbw_gbps"] == pytest.approx(rate * float(bus_factor("all_reduce", 32)))
    assert 0.9 < flow["network"]["hot_links"][0]["busy"] <= 1.0
    shares = next(iter(flow["network"]["over_time"]["links"].values()))
    assert max(shares) <= 1.001
    assert len(shares) > 10


@pytest.mark.parametrize("cluster", ["pcie_4xl40s", "gb200_nvl72", "dgx_h100"])
def test_large_messages_are_bound_by_links_that_are_slow_for_them(cluster: str) -> None:
    """PCIe and NVSwitches carry less than half of what the data sheet says, which is no latency."""
    small, large = (
        opcast.predict("all_reduce", size_bytes=size, ranks=4, cluster=cluster) for size in ("1KiB", "1GiB")
    )
    assert (small.bound, large.bound) == ("latency", "network")
    assert cluster != "pcie_4xl40s" or large.roofline_us < 0.5 * large.latency_us


def test_a_reduction_whose_switch_is_gone_takes_the_time_of_the_ring_that_nccl_falls_back_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = ["op.ranks=32", "network=flow", "faults=[{node: nvswitch0, gone: true}]"]
    found, ring = (ask(capsys, *gone, *more, size="64MiB") for more in ([], ["algorithm=ring"]))
    assert ask(capsys, "op.ranks=32", "network=flow", size="64MiB")["network"]["algorithm"] == "nvls"
    assert found["network"]["algorithm"] == "ring"
    assert found["latency_us"] == pytest.approx(ring["latency_us"])


def test_a_study_goes_on_by_rings_where_the_switch_of_a_named_algorithm_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everywhere = "faults_study={everywhere: true, gone: true, kinds: [nvlink]}"
    found = ask(capsys, "op.ranks=32", "algorithm=nvls", everywhere, size="64MiB")["network"]["faults_study"]
    assert found["partitioned"] == 0
    assert found["slowdown"]["p05"] > 2.0


def test_groups_at_once_wait_for_each_other_on_thin_uplinks(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ask(capsys, "op.ranks=4", "stride=8", *THIN, op="all_gather", size="64MiB")
    every = ask(capsys, "op.ranks=4", "stride=8", "all_groups=true", *THIN, op="all_gather", size="64MiB")
    assert alone["op"]["ranks_per_node"] == 1
    assert every["network"]["groups"] == 8
    assert every["latency_us"] > 1.5 * alone["latency_us"]
    by_number = ask(capsys, "op.ranks=4", "op.ranks_per_node=1", "network=flow", *THIN, op="all_gather", size="64MiB")
    assert by_number["latency_us"] == alone["latency_us"]


def test_a_group_by_name_and_its_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    times = {
        name: ask(capsys, "group=[0,8,16,24]", f"algorithm={name}", size="64MiB")["latency_us"]
        for name in ("ring", "tree", "halving_doubling")
    }
    assert times["ring"] < times["tree"]
    assert ask(capsys, "group=[0,8,16,24]", size="64MiB")["op"]["ranks"] == 4
    assert ask(capsys, "group=[3]")["latency_us"] == 0.0
    assert 0 < ask(capsys, "group=[0,9]", size="0")["latency_us"] < 100


def test_a_slow_cable_slows_who_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ask(capsys, "group=[0,8]", "algorithm=ring")
    cable = next(each["link"] for each in pair["network"]["hot_links"] if "leaf" in each["link"]).replace("->", "-")
    slow = ask(capsys, "group=[0,8]", "algorithm=ring", f"faults=[{{link: {cable}, bandwidth: 0.5}}]")
    assert slow["latency_us"] == pytest.approx(2 * pair["latency_us"], rel=0.05)
    other = ask(capsys, "group=[1,9]", "algorithm=ring", f"faults=[{{link: {cable}, bandwidth: 0.5}}]")
    assert other["latency_us"] == pytest.approx(pair["latency_us"], rel=0.01)
    assert slow["network"]["faults"][0]["where"] == cable


def test_a_study_of_faults_finds_the_cables_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("group=[0,8]", "algorithm=ring", "faults_study.kinds=[ib]")
    study = ask(capsys, *asked, "faults_study.everywhere=true")["network"]["faults_study"]
    assert study["slowdown"]["max"] == pytest.approx(2.0, rel=0.05)
    assert study["slowdown"]["p50"] == pytest.approx(1.0)
    slow = [each for each in study["critical"] if each["slowdown"] > 1.5]
    assert 0 < len(slow) < len(study["critical"]) <= study["trials"]
    drawn = [ask(capsys, *asked, "faults_study.samples=8", "faults_study.seed=3")["network"] for _ in range(2)]
    assert drawn[0]["faults_study"] == drawn[1]["faults_study"]


JOBS = """
- {name: first, collective: all_reduce, group: {ranks: 16}, size_bytes: 256MiB, algorithm: ring}
- {name: beside, collective: all_to_all, group: {first: 16, ranks: 16}, size_bytes: 64 MiB}
- {name: last, collective: send, group: [0, 31], size_bytes: 1MB, after: [first]}
"""


def test_transfers_of_a_file_share_the_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    arguments = [f"transfers={tmp_path}/jobs.yaml", f"report={tmp_path}/net.html", f"picture={tmp_path}/net.svg"]
    found = ask(capsys, *arguments)
    first, beside, last = found["network"]["transfers"]
    assert last["start_us"] == first["end_us"]
    assert last["end_us"] == found["latency_us"] == found["network"]["total_us"]
    assert first["busbw_gbps"] == pytest.approx(first["algbw_gbps"] * 2 * 15 / 16)
    assert (beside["start_us"], beside["size_bytes"]) == (0.0, 2**26)
    ElementTree.fromstring((tmp_path / "net.svg").read_text())
    page = (tmp_path / "net.html").read_text()
    assert "first" in page
    assert found["network"]["hot_links"][0]["link"].split("->")[0] in page
    assert main(["predict", *NODES, arguments[0]]) == 0
    assert "all_to_all" in capsys.readouterr().out


def test_python_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    said = ask(capsys, "op.ranks=16", "network=flow", "fault_draw.count=2")
    found = opcast.predict(
        "all_reduce", size_bytes="1GiB", ranks=16, cluster="dgx_h100", nodes=4, network="flow", fault_draw={"count": 2}
    )
    assert json.loads(json.dumps(found.to_dict())) == said
    both = [Transfer("all_gather", tuple(range(8)), 2**28), Transfer("send", (0, 20), 2**24, after=(0,))]
    many = opcast.predict(both, cluster="dgx_h100", nodes=4)
    assert many.op == {"kind": "transfers", "count": 2}
    assert many.network["transfers"][1]["start_us"] == many.network["transfers"][0]["end_us"]
    by_group = opcast.predict("all_gather", size_bytes=2**20, group=[0, 8, 16], cluster="dgx_h100", nodes=4)
    assert by_group.op["ranks"] == 3


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast", "send_recv"])
@pytest.mark.parametrize(
    ("cluster", "stride", "ranks"), [("gb200_nvl72", 8, 4), ("gb200_nvl72", 1, 32), ("dgx_a100", 4, 4)]
)
def test_no_answer_is_below_what_the_links_take_at_least(kind: str, cluster: str, stride: int, ranks: int) -> None:
    for size in (2**12, 2**30):
        asked = {"size_bytes": size, "ranks": ranks, "cluster": cluster, "nodes": 2, "network": "flow"}
        found = opcast.predict(kind, stride=stride, **asked)
        assert found.roofline_us <= found.latency_us
    assert found.network["stretch"] == pytest.approx(1.0, rel=0.02)  # beside groups that lie on two racks, too


def test_a_table_of_collectives_is_answered_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.csv").write_text("kind,size_bytes,ranks\nall_reduce,1GiB,32\nall_gather,64MiB,8\n")
    table = ["predict", f"shapes={tmp_path}/shapes.csv", *NODES, "network=flow"]
    assert main([*table, f"output={tmp_path}/out.csv"]) == 0
    rows = pd.read_csv(tmp_path / "out.csv")
    alone = ask(capsys, "op.ranks=32", "network=flow")
    assert rows["latency_us"][0] == pytest.approx(alone["latency_us"])
    assert rows["busbw_gbps"][0] == pytest.approx(alone["network"]["busbw_gbps"])
    assert "network" not in rows


def test_what_is_no_collective_is_answered_as_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "op=gemm", "op.m=64", "op.n=64", "op.k=64", "cluster=dgx_h100", "format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["network"]) == ("h100_sxm", {})


BAD = {
    "op.ranks=33": "larger than the 32 devices",
    "op.ranks=8 stride=8": "8 ranks, 8 apart, is larger",
    "op.ranks=8 stride=0": "stride=0 must be a whole number",
    "group=[0,99]": "device 99; the cluster has devices 0 to 31",
    "group=[0,0]": "names device 0 twice",
    "group=x op.ranks=2": "must be a list of devices",
    "group=[0,8] op.ranks=3": "leave one of them out",
    "op.ranks=8 algorithm=magic": "is not one of ring, tree",
    "op.ranks=8 network=foo": "is not one of auto, analytical, flow, packet",
    "op.ranks=8 all_groups=3": "all_groups=3 must be true or false",
    "op.ranks=8 faults=x": "must be a list",
    "op.ranks=8 fault_draw=3": "fault_draw=3 must be a mapping",
    "op.ranks=8 fault_draw.count=9999": "9999 faults are more than",
    "op.ranks=8 faults_study=x": "faults_study='x' must be a mapping",
    "op.ranks=8 faults_study.samples=0": "faults_study.samples=0 must be",
    "op.ranks=8 faults_study.everywhere=maybe": "everywhere='maybe' must be true or false",
    "op.ranks=8 op.size_bytes=1XB": "size_bytes='1XB' must be a whole number of bytes",
    "op.ranks=8 report=3": "report=3 must be a path",
    "op.ranks=8 picture=/dev/null/x": "cannot be written: there is no folder /dev/null",
    "op.ranks=8 network=packet cluster.nodes=16": "128 devices are too many",
    "op=gemm op.m=1 op.n=1 op.k=1 stride=2": "stride=2 is for collectives",
    "op=gemm op.m=1 op.n=1 op.k=1 cluster=null group=[0]": "group=[0] needs a cluster",
    "transfers=x": "leave op=… out",
    "transfers=/nope op=": "cannot be read",
}


@pytest.mark.parametrize(("given", "says"), BAD.items())
def test_bad_input_is_one_line_and_exit_code_2(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [text for text in given.split() if text != "op="]
    cluster = [] if any(text.startswith("cluster=") for text in words) else NODES
    op = [] if "op=" in given else ["op=all_reduce"]
    size = [] if op == [] or "op.size_bytes" in given else ["op.size_bytes=1MiB"]
    refused([*op, *size, *cluster, *(text for text in words if text != "cluster=null")], says, capsys)


def refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *arguments, "format=json"]) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1
    assert says in printed.err
    assert says in json.loads(printed.out)["error"]

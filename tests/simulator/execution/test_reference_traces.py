"""The reference generator's traces of one collective take what opcast's own of the same do, on rings and switches; by
the cluster's links and an algorithm that is named, too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.traces import protobuf
from opcast.datasets.traces.builder import TraceBuilder
from opcast.datasets.traces.schema import CollectiveKind, NodeKind
from opcast.jobs.cli import main
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.execution.link_times import link_us
from opcast.simulator.execution.run import read_run, simulate_run
from opcast.simulator.network.build import build_fabric

RANKS, SIZE = 8, 1 << 20
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
NETWORK = "topology: [{shape}]\nnpus_count: [8]\nbandwidth: [50.0]\nlatency: [500.0]\n"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reference generator writes for eight ranks."""
    pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs mlc-chakra")
    folder = tmp_path_factory.mktemp("generated")
    sizes = ["--num_npus", str(RANKS), "--default_comm_size", str(SIZE)]
    subprocess.run([sys.executable, "-P", "-m", "chakra.src.generator.generator", *sizes], cwd=folder, check=True)
    return folder


def folder_of(kind: str, generated: Path, place: Path) -> Path:
    """The reference's traces of one collective in a folder of their own."""
    place.mkdir()
    for rank in range(RANKS):
        (place / f"c.{rank}.et").write_bytes((generated / f"{kind.upper()}.{rank}.et").read_bytes())
    return place


def own(kind: str, place: Path) -> Path:
    """The same collective as opcast writes it."""
    for rank in range(RANKS):
        builder = TraceBuilder()
        told = [("is_cpu_op", "bool", False), ("comm_type", "int64", CollectiveKind[kind.upper()]),
                ("comm_size", "int64", SIZE)]  # fmt: skip
        builder.add(1, kind, NodeKind.COMM_COLL, attributes=told)
        protobuf.write(place / f"c.{rank}.et", builder.trace())
    return place


@pytest.mark.parametrize("shape", ["Ring", "Switch"])
def test_the_references_collectives_take_what_ours_take(
    shape: str, generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "network.yaml"
    file.write_text(NETWORK.format(shape=shape))
    cluster = replace(load_cluster("dgx_h100"), topology={"file": str(file)})
    device = load_device("h100_sxm")
    on, law = build_fabric(cluster, device), NetworkEngine(device, cluster)
    for kind in COLLECTIVES:
        theirs, ours = (read_run(each) for each in (folder_of(kind, generated, tmp_path / f"{kind} theirs"),
                                                    own(kind, tmp_path / f"{kind} ours")))  # fmt: skip
        size = SIZE * (RANKS if kind == "all_gather" else 1)
        alone_us = {None: on.latency_us(kind, range(RANKS), size)}
        if kind != "all_to_all":
            alone_us["ring"] = on.latency_us(kind, range(RANKS), size, "ring")
        for algorithm, us in alone_us.items():
            links = partial(link_us, cluster=cluster, device=device, algorithm=algorithm)
            for run in (theirs, ours):
                made = simulate_run(run, law, cluster, compute=False, links=links)
                assert made.executions.total_us == pytest.approx(us, rel=1e-12)
        by_law = [simulate_run(run, law, cluster, compute=False).executions.total_us for run in (theirs, ours)]
        assert by_law[0] == by_law[1] > 0
    asked = [f"trace={tmp_path / 'all_reduce theirs'}", "durations=network", "cluster=dgx_h100", "algorithm=ring"]
    assert main(["simulate", *asked, f"cluster.topology.file={file}", "format=json"]) == 0
    step_s = json.loads(capsys.readouterr().out)["step_time_s"]
    assert step_s == pytest.approx(1e-6 * on.latency_us("all_reduce", range(RANKS), SIZE, "ring"), rel=1e-12)


def test_an_algorithm_that_no_collective_has_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = own("all_reduce", tmp_path)
    asked = ["simulate", f"trace={traces}", "durations=network", "algorithm=rings"]
    assert main([*asked, "cluster=dgx_h100"]) == 2
    assert "algorithm='rings' is of no collective; did you mean ring" in capsys.readouterr().err
    assert main([*asked[:2], "algorithm=ring"]) == 2
    assert capsys.readouterr().err.count("\n") == 1

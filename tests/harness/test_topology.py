"""Topologies as nodes print them become clusters that `simulate` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opcast.datasets.clusters import Cluster
from opcast.harness import topology
from opcast.harness.environment import nccl_settings
from opcast.harness.ledger import CampaignError
from opcast.harness.placement import node_facts, placement
from opcast.harness.topology import Nic, cluster, nics, parse


def matrix(gpus: int, link: str, nic_of: dict[int, int], count: int) -> str:
    """What nvidia-smi prints for a node, tabs and all."""
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(count)]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for i in range(gpus):
        cells = [" X " if i == j else link for j in range(gpus)]
        cells += ["PXB" if nic_of.get(i) == j else "SYS" for j in range(count)]
        lines.append("\t".join([f"GPU{i}", *cells, "0-47", "0", "N/A"]))
    for i in range(count):
        cells = ["PXB" if nic_of.get(j) == i else "SYS" for j in range(gpus)]
        lines.append("\t".join([f"NIC{i}", *cells, *(" X " if i == j else "NODE" for j in range(count)), "", ""]))
    legend = "\n".join(f"  NIC{i}: mlx5_{i}" for i in range(count))
    return "\n".join(lines) + f"\n\nLegend:\n\n  X    = Self\n  SYS  = …\n\nNIC Legend:\n\n{legend}\n"


def test_eight_gpus_on_nvswitch_with_a_nic_each() -> None:
    found = parse(matrix(8, "NV18", {i: i for i in range(8)}, 8))
    assert (len(found.gpus), found.nvlinks, found.rails) == (8, 18, True)
    ports = [Nic(f"mlx5_{i}", 50.0, "ib") for i in range(8)] + [Nic("mlx5_8", 12.5, "roce")]  # the last: storage
    made = Cluster.from_dict(cluster(found, ports, "h100_sxm", nodes=4))
    assert (made.devices, made.link, made.fabric, made.nics_per_node, made.nic_gbps) == (32, "nvlink", "ib", 8, 50.0)
    assert made.topology == {"shape": "rails"}
    assert "nvidia-smi topo -m" in made.sources["link"]


def test_ranks_are_told_one_by_one_and_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "read", lambda: parse(matrix(2, "NV18", {0: 0, 1: 0}, 1)))
    monkeypatch.setattr(topology, "nics", lambda: [Nic("mlx5_0", 50.0, "ib")])
    facts = node_facts("cuda")
    ranks = [{"node": node, "device": device} for node in ("node-a", "node-b") for device in (0, 1)]
    told = placement(list(zip(ranks, (facts, {}, facts, {}), strict=True)))
    assert told["ranks"] == ranks
    assert list(told["nodes"]) == ["node-a", "node-b"]
    assert told["nodes"]["node-b"]["links"]["GPU0"] == {"GPU0": "X", "GPU1": "NV18", "NIC0": "PXB"}
    assert told["nodes"]["node-b"]["nics"] == [{"name": "mlx5_0", "gbps": 50.0, "fabric": "ib"}]
    assert (told["nodes"]["node-a"]["nvlinks"], told["nodes"]["node-a"]["nic_names"]) == (18, {"NIC0": "mlx5_0"})
    assert json.loads(json.dumps(told)) == told


def test_settings_of_nccl_that_bear_on_speed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl_settings():
        monkeypatch.delenv(name.partition("=")[0])
    monkeypatch.setenv("NCCL_PROTO", "LL128")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_COMM_ID", "10.0.0.1:1234")
    assert nccl_settings() == ["NCCL_ALGO=Ring", "NCCL_PROTO=LL128"]


def test_four_cards_on_pcie_that_share_a_nic() -> None:
    found = parse("\x1b[4m" + matrix(4, "NODE", {0: 0}, 1) + "\x1b[0m")
    made = Cluster.from_dict(cluster(found, [Nic("mlx5_0", 12.5, "roce")], "l40s"))
    assert (made.link, made.fabric, made.nics_per_node) == ("pcie", "roce", 1)
    assert made.topology == {"shape": "fat_tree"}


def test_a_node_without_rdma_says_what_is_assumed() -> None:
    made = cluster(parse(matrix(2, "PHB", {}, 0)), [], "a10")
    assert Cluster.from_dict(made).nics_per_node == 1
    assert made["sources"]["nic_gbps"].startswith("assumed")


def test_a_cluster_of_a_file_is_what_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    import yaml

    from opcast.jobs.cli import main

    ports = [Nic(f"mlx5_{i}", 12.5, "roce") for i in range(8)]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(cluster(parse(matrix(8, "NV18", {i: i for i in range(8)}, 8)), ports, "h100_sxm")))
    words = ["predict", "op=all_reduce", "op.size_bytes=64MiB", "op.ranks=16", "format=json", "cluster.nodes=2"]
    found = []
    for name in (str(file), "dgx_h100"):
        assert main([*words, f"cluster={name}"]) == 0
        found.append(json.loads(capsys.readouterr().out)["latency_us"])
    assert found[0] > 2 * found[1]  # a quarter of the NICs' rate
    assert main([*words, "cluster=dgx_h10"]) == 2
    assert "dgx_h100" in capsys.readouterr().err
    assert main([*words, f"cluster={tmp_path}/none.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "No devices were found", "\tGPU0\tGPU1\nGPU0\t X \tWAT\n"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(CampaignError, match="nvidia-smi topo -m"):
        parse(text)


def test_ports_that_are_up_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec (4X)")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
            (port / file).write_text(text + "\n")
    assert nics(tmp_path) == [Nic("mlx5_0", 50.0, "ib")]
    assert nics(tmp_path / "none") == []

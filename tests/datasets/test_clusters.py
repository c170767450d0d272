"""The shipped clusters: complete, sourced, of devices that exist; and what a bad one is told."""

from __future__ import annotations

import dataclasses

import pytest

from opcast.datasets.clusters import CLUSTER_DIRECTORY, Cluster, ClusterError, known_clusters, load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.reading import read_yaml

NAMED = ["dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200", "gb200_nvl72", "gb300_nvl72", "hgx_h100_roce", "pcie_4xa100"]
OWN = {"id", "name", "nodes", "sources", "device"}  # what needs no source


def test_the_named_clusters_ship() -> None:
    assert set(NAMED) <= set(known_clusters())


@pytest.mark.parametrize("name", known_clusters())
def test_figures_are_complete_sourced_and_of_a_known_device(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.id == name
    device = load_device(cluster.device)
    assert device.link_gbps > 0 or cluster.link == "pcie"
    values = read_yaml(CLUSTER_DIRECTORY / f"{name}.yaml", ValueError)
    assert {"devices_per_node", "link", "fabric", "nics_per_node", "nic_gbps", "nic_latency_us"} <= set(values)
    assert set(values) - OWN <= set(cluster.sources) <= {f.name for f in dataclasses.fields(Cluster)}
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize("name", [name for name in known_clusters() if load_cluster(name).link == "nvlink"])
def test_a_node_sends_far_more_inside_than_out(name: str) -> None:
    cluster = load_cluster(name)
    out = cluster.nics_per_node * cluster.nic_gbps / cluster.devices_per_node
    assert 2.0 < load_device(cluster.device).link_gbps / out < 100.0


def test_devices_are_counted() -> None:
    assert dataclasses.replace(load_cluster("gb200_nvl72"), nodes=4).devices == 288


def test_an_unknown_cluster_gets_a_suggestion() -> None:
    with pytest.raises(ClusterError, match="did you mean dgx_h100"):
        load_cluster("dgxh100")
    with pytest.raises(ClusterError, match="unknown cluster"):
        load_cluster("../device/l40s")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "cluster.nodes=0 must be a whole number"),
        ({"devices_per_node": 2.5}, "must be a whole number"),
        ({"nic_gbps": -1}, "cluster.nic_gbps=-1 must be a positive number"),
        ({"nic_gbps": "fast"}, "must be a positive number"),
        ({"nic_latency_us": float("nan")}, "must be a positive number"),
        ({"link": "wire"}, "is not one of nvlink"),
        ({"nic_gbit": 400}, "did you mean nic_gbps"),
        ({"topology": "ring"}, "cluster.topology='ring' must be a mapping"),
        ({"nccl": {"algorithm": "rings"}}, "cluster.nccl.algorithm='rings' is not one of ring, tree, nvls, collnet"),
    ],
)
def test_impossible_figures_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_dict({"id": "mine", "name": "Mine", "device": "l40s"} | change)


def test_what_lacks_is_named() -> None:
    with pytest.raises(ClusterError, match="cluster 'mine' lacks device, name"):
        Cluster.from_dict({"id": "mine"})

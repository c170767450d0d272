"""From clusters to fabrics, and the user's own topology."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from opcast.datasets.clusters import known_clusters, load_cluster
from opcast.datasets.devices import load_device
from opcast.datasets.ops import make_op
from opcast.jobs.cli import main
from opcast.simulator.engines import ask, build_engine
from opcast.simulator.engines.flow import FlowEngine
from opcast.simulator.engines.network import NetworkEngine
from opcast.simulator.network.build import SHAPES, build_fabric, read_topology
from opcast.simulator.network.fabric import Fabric
from opcast.simulator.network.faults import Fault
from opcast.simulator.network.nccl_times import collective_us
from opcast.simulator.network.topology import TopologyError
from opcast.simulator.network.tunings import tuning

GIB = 2.0**30
H100 = load_device("h100_sxm")
CLUSTER = dataclasses.replace(load_cluster("dgx_h100"), nodes=4)


def shaped(**topology) -> Fabric:
    return build_fabric(dataclasses.replace(CLUSTER, topology=topology), H100)


@pytest.mark.parametrize("name", known_clusters())
def test_explicit_links_and_the_formula_agree_on_large_collectives(name: str) -> None:
    cluster = dataclasses.replace(load_cluster(name), nodes=2)
    device = load_device(cluster.device)
    made = build_fabric(cluster, device)
    ranks = np.array([cluster.devices])
    groups = NetworkEngine(device, cluster).groups(
        {"ranks": ranks, "ranks_per_node": np.array([cluster.devices_per_node])}
    )
    constants = tuning(device, cluster.link, cluster.peers)
    near = (
        0.15 if constants.beyond > 0.5 and not cluster.peers else 0.4
    )  # explicit links have ways to NICs that cards do not share
    for kind in ("all_reduce", "all_gather"):
        formula = collective_us(kind, np.array([64 * GIB]), groups, constants, "ring")[0]
        assert made.latency_us(kind, range(cluster.devices), 64 * GIB, "ring") == pytest.approx(formula, rel=near)


@pytest.mark.parametrize(
    "topology",
    [
        {"shape": "rails", "radix": 32},
        {"shape": "fat_tree", "radix": 16, "oversubscription": 3.0},
        {"shape": "dual_plane", "rails": True},
        {"shape": "dual_tor", "oversubscription": 2},
        {"shape": "dragonfly", "groups": 2, "routers": 2, "global_gbps": 200, "local_gbps": 200},
        {"shape": "switch", "routing": "ecmp"},
        {},
    ],
)
def test_every_shape_joins_all_devices(topology: dict) -> None:
    made = shaped(**topology)
    assert made.topology.ranks == 32
    assert np.isfinite(made.latency_us("all_reduce", range(32), GIB))


def test_every_shape_is_tried() -> None:
    assert set(SHAPES) == {"rails", "fat_tree", "dual_plane", "dual_tor", "dragonfly", "switch"}


def test_oversubscription_slows_what_crosses_the_spine() -> None:
    full, third = (shaped(shape="fat_tree", radix=16, oversubscription=o) for o in (1.0, 3.0))
    times = [each.latency_us("all_to_all", range(32), GIB) for each in (full, third)]
    assert 1.5 < times[1] / times[0] < 3.5


@pytest.mark.parametrize(
    ("asked", "slower"),
    [
        ([], False),
        (["cluster.topology.shape=rails"], False),
        (["cluster.topology.shape=fat_tree", "cluster.topology.radix=8", "cluster.topology.oversubscription=6"], True),
        (["cluster.topology.file={file}"], True),
        (["cluster.topology.file={file}", "network=analytical"], False),
    ],
)
def test_a_topology_of_ones_own_counts_without_being_asked_twice(asked, slower, tmp_path: Path, capsys) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(
        "dimensions:\n- {shape: switch, size: 8, bandwidth_gbps: 400}\n- {shape: ring, size: 4, bandwidth_gbps: 5}"
    )
    call = ["predict", "op=all_reduce", "op.size_bytes=1073741824", "op.ranks=32", "op.dtype=bf16", "format=json"]
    call += ["cluster=dgx_h100", "cluster.nodes=4", "store=nowhere", "predictors=nowhere"]
    times = []
    for extra in ([], [each.format(file=file) for each in asked]):
        assert main([*call, *extra]) == 0
        times.append(json.loads(capsys.readouterr().out)["latency_us"])
    assert (times[1] > 1.5 * times[0]) == slower


def test_links_of_ones_own_count_inside_a_node_too(tmp_path: Path) -> None:
    times = []
    for gbps in (5, 5000):
        file = tmp_path / f"{gbps}.yaml"
        file.write_text(f"dimensions:\n- {{shape: switch, size: 8, bandwidth_gbps: {gbps}, kind: nvlink}}\n")
        cluster = dataclasses.replace(CLUSTER, nodes=1, topology={"file": str(file)})
        formula = NetworkEngine(H100, cluster)
        columns = {"size_bytes": np.array([2**30]), "ranks": np.array([8]), "ranks_per_node": np.array([8])}
        times.append(FlowEngine(formula, formula).answer("all_reduce", columns, "bf16", "bf16", "warm").latency_us[0])
        usual = formula.answer("all_reduce", columns, "bf16", "bf16", "warm").latency_us[0]
    assert times[0] > 20 * usual
    assert times[1] == pytest.approx(usual)  # the device's own links stay what they are


@pytest.mark.parametrize(
    ("kind", "us"),
    [  # on a ring of 8 by hand: 1 GiB to all others is 16 GiB times links crossed, and there are 16 directions
        ("all_reduce", 2 * 7 / 8 * GIB / 50e3),
        ("all_gather", 7 / 8 * GIB / 50e3),
        ("all_to_all", GIB / 50e3),
    ],
)
def test_rates_of_ones_own_links_are_taken_as_given(kind: str, us: float, tmp_path: Path, capsys) -> None:
    file, moves = tmp_path / "own.yaml", tmp_path / "moves.yaml"
    file.write_text("dimensions:\n- {shape: ring, size: 8, bandwidth_gbps: 50, kind: nvlink}\n")
    moves.write_text(f"- {{collective: {kind}, group: [0,1,2,3,4,5,6,7], size_bytes: {GIB:.0f}}}\n")
    call = ["predict", "cluster=dgx_h100", "cluster.nodes=1", f"cluster.topology.file={file}", "network=flow"]
    times = []
    for asked in ([f"op={kind}", f"op.size_bytes={GIB:.0f}", "op.ranks=8"], [f"transfers={moves}"]):
        assert main([*call, *asked, "format=json", "store=nowhere"]) == 0
        times.append(json.loads(capsys.readouterr().out)["latency_us"])
    cluster = dataclasses.replace(CLUSTER, nodes=1, topology={"file": str(file)})
    formula = NetworkEngine(H100, cluster)
    columns = {"size_bytes": np.array([GIB]), "ranks": np.array([8]), "ranks_per_node": np.array([8])}
    in_step = FlowEngine(formula, formula).answer(kind, columns, "bf16", "bf16", "warm").latency_us[0]
    assert [*times, in_step] == pytest.approx([us] * 3, rel=0.01)


def test_faults_are_applied_by_name() -> None:
    slow = build_fabric(CLUSTER, H100, [Fault("nic0-leaf0", bandwidth_factor=0.5)])
    assert slow.latency_us("all_reduce", range(32), GIB, "ring") > 1.9 * shaped(shape="rails").latency_us(
        "all_reduce", range(32), GIB, "ring"
    )


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ({"shape": "star"}, "cluster.topology.shape='star' is not one of fat_tree, rails"),
        ({"shape": "rails", "radius": 4}, "shape rails has no setting 'radius'; it has radix, oversubscription"),
        ({"shape": "switch", "radix": 4}, "shape switch has no setting 'radix'; it has none"),
        ({"shape": "dragonfly", "groups": 2}, "needs cluster.topology.routers=… cluster.topology.global_gbps"),
        ({"routing": "scenic"}, "cluster.topology.routing='scenic' is not one of adaptive, ecmp"),
        ({"reduces": "maybe"}, "cluster.topology.reduces='maybe' must be true or false"),
        ({"file": "/nowhere.yaml"}, "cluster.topology.file=/nowhere.yaml is no file"),
        ({"file": ""}, "cluster.topology.file='' must name a YAML file"),
        ({"file": "mine.yaml", "radix": 8}, "brings its own links: leave out cluster.topology.radix"),
        ({"shape": "fat_tree", "radix": 2}, "cluster.topology.radix=2 must be a whole number from 4"),
        ({"shape": "dual_tor", "rails": 2}, "cluster.topology.rails=2 must be true or false"),
        ({"radix": 4.5}, "radix=4.5 must be a whole number"),
        ({"radix": "abc"}, "radix='abc' must be a whole number"),
        ({"radix": True}, "radix=True must be a whole number"),
        ({"oversubscription": 0}, "oversubscription=0 must be a number from 1 to 1000"),
        ({"oversubscription": float("nan")}, "oversubscription=nan must be a number from 1"),
        ({"oversubscription": None}, "oversubscription=None must be a number from 1"),
        (
            {"shape": "dragonfly", "groups": 2, "routers": 2, "global_gbps": -1, "local_gbps": 1},
            "cluster.topology.global_gbps=-1 must be a number from 0.001",
        ),
    ],
)
def test_bad_settings_are_named(topology: dict, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        shaped(**topology)


def test_a_users_topology_serves_as_long_as_it_has_enough_ranks(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "dimensions:\n- {shape: switch, size: 8, bandwidth_gbps: 450}\n- {shape: ring, size: 4, bandwidth_gbps: 50}\n"
    )
    assert shaped(file=str(file)).topology.ranks == 32
    small = dataclasses.replace(CLUSTER, nodes=5, topology={"file": str(file)})
    with pytest.raises(TopologyError, match="has 32 ranks, dgx_h100 needs 40"):
        build_fabric(small, H100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dimensions:\n- {shape: switch, size: 8}\n", "mine.yaml: dimension 0 lacks bandwidth_gbps"),
        ("dimensions: 5", "dimensions is 5, which is no list; give one mapping a line"),
        ("dimensions:", "dimensions is empty"),
        ("dimensions: [ring]", "dimension 0 is 'ring', but must be a mapping"),
        (
            "dimensions:\n- {shape: ring, size: many, bandwidth_gbps: 1}",
            "dimension 0: size='many' must be a whole number",
        ),
        ("dimensions:\n- {shape: ring, size: 4, bandwidth_gbps: fast}", "bandwidth_gbps='fast', which is no number"),
        ("dimensions:\n- {shape: [ring], size: 4, bandwidth_gbps: 1}", "which must be a name"),
        ("dimensions:\n- {shape: ring, size: 4, bandwidth_gbps: 1}\nnodes: 3", "leave no room for nodes"),
        ("nodes: [\n", "the topology .*mine.yaml is no YAML: line 2: did not find expected node content"),
        ("5", "it must hold nodes and links, or dimensions, or ASTRA-sim's"),
        ("", "it must hold nodes and links, or dimensions, or ASTRA-sim's"),
        ("topology: [ Ring ]\nnpus_count: 8\n", "mine.yaml: an ASTRA-sim network has lists .*; npus_count is 8"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(TopologyError, match=message) as caught:
        read_topology(file)
    assert "\n" not in str(caught.value)


def test_rates_in_scientific_notation_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("dimensions:\n- {shape: ring, size: 4, bandwidth_gbps: 5e1, latency_us: 1e-1}\n")
    assert read_topology(file).bandwidth_gbps[0] == 50.0
    assert read_topology(file).latency_us[0] == 0.1


def test_a_file_of_astra_sim_serves_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "network.yml"
    file.write_text(
        "# 4 x 8\ntopology: [ Switch, Ring ]  # Ring, Switch, FullyConnected\nnpus_count: [ 8, 4 ]\n"
        "bandwidth: [ 400, 50.0 ]  # GB/s\nlatency: [ 936.25, 1000 ]  # ns\n"
    )
    made = shaped(file=str(file)).topology
    assert (made.name, made.ranks) == ("network", 32)
    assert sorted(set(made.bandwidth_gbps.tolist())) == pytest.approx([50 * GIB / 1e9, 400 * GIB / 1e9])
    assert set(made.latency_us.tolist()) == {0.93625, 1.0}


def test_a_file_of_nodes_and_links_is_read(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(
        "nodes:\n- {name: a, rank: true}\n- {name: b, rank: true}\n"
        "links:\n- {from: a, to: b, bandwidth_gbps: 50, latency_us: 1}\n"
    )
    made = read_topology(file)
    assert (made.name, made.ranks, made.links) == ("pair", 2, 2)


@pytest.mark.parametrize("name", ["ovx_l40s", "pcie_4xl40s"])
def test_cards_that_reach_each_other_are_not_those_of_the_tables(name: str) -> None:
    cluster = load_cluster(name)
    device, apart = load_device("l40s"), dataclasses.replace(cluster, peers=False)
    assert cluster.peers
    assert tuning(device, "pcie", peers=True) != tuning(device, "pcie")
    op = make_op("all_reduce", size_bytes=2**26, ranks=4, ranks_per_node=4, link="pcie")
    shipped = Path(__file__).resolve().parents[3] / "models" / "shipped"
    reach, through_host = (ask(build_engine(device, [], [shipped], cluster=each), [op]) for each in (cluster, apart))
    assert (reach.engine[0], through_host.engine[0]) == ("network", "learned")
    assert reach.latency_us[0] < through_host.latency_us[0] / 2

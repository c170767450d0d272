"""Pictures of fabrics: well-formed, every cable of a small one, the fullest ones of a large one."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.fidelity import simulate
from opcast.simulator.network.link_load import fullest_kinds
from opcast.simulator.network.picture import draw_svg, hot_links
from opcast.simulator.network.picture_layout import number_levels
from opcast.simulator.network.shapes import (
    Dimension,
    Port,
    Servers,
    dragonfly,
    dual_plane,
    fat_tree,
    product,
)
from opcast.simulator.network.topology import Topology, read_fabric

SVG = "{http://www.w3.org/2000/svg}"
NVLINK, IB = Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)
BEHIND_PCIE = Servers(4, 8, NVLINK, IB, lanes=Port(64.0, 0.0, "nic"))
ONE_WAY = read_fabric(
    {
        "nodes": [{"name": name, "rank": name != "box"} for name in ("alpha", "beta", "box")],
        "links": [
            {"from": "alpha", "to": "box", "bandwidth_gbps": 5, "one_way": True},
            {"from": "box", "to": "beta", "bandwidth_gbps": 5, "one_way": True},
            {"from": "beta", "to": "alpha", "bandwidth_gbps": 5, "one_way": True},
        ],
    }
)
FABRICS = [
    *(product([Dimension(shape, 9, 50.0)]) for shape in ("ring", "switch", "fully_connected", "torus", "king_mesh")),
    product([Dimension("ring", 4, 50.0), Dimension("ring", 3, 50.0), Dimension("fully_connected", 3, 50.0)]),
    product([Dimension("switch", 8, 450.0, kind="nvlink"), Dimension("ring", 4, 50.0)]),
    product([Dimension("ring", 1, 50.0)]),
    fat_tree(BEHIND_PCIE, 16, 2.0, rails=True),
    fat_tree(Servers(16, 8, NVLINK, IB), 8),
    fat_tree(Servers(2, 4, Port(25.0, 1.0, "pcie"), Port(12.5, 1.0, "roce"), nics=1)),
    fat_tree(Servers(2, 72, NVLINK, IB)),
    dual_plane(BEHIND_PCIE, 16),
    dragonfly(Servers(8, 2, NVLINK, IB), 4, 2, 25.0, 25.0),
    ONE_WAY,
]


def titles(text: str, tag: str) -> list[str]:
    return [str(each.findtext(f"{SVG}title")) for each in ElementTree.fromstring(text).findall(f"{SVG}{tag}")]


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda each: each.name)
def test_a_small_fabric_is_drawn_whole_and_inside_its_frame(fabric: Topology) -> None:
    text = draw_svg(fabric, np.linspace(0.0, 1.0, fabric.links))
    cables = {frozenset((int(a), int(b))) for a, b in zip(fabric.source, fabric.target, strict=True)}
    assert len(titles(text, "path")) == len(cables)
    assert sorted(name for name in titles(text, "rect") if name in fabric.index) == sorted(fabric.nodes)
    width, height = (float(value) for value in str(ElementTree.fromstring(text).get("viewBox")).split()[2:])
    for path in ElementTree.fromstring(text).findall(f"{SVG}path"):
        figures = [float(value) for value in re.findall(r"-?[\d.]+", str(path.get("d")))]
        assert all(0 < x < width for x in figures[::2])
        assert all(40 < y < height for y in (figures[1], figures[-1]))


def test_both_directions_of_a_cable_are_said_and_the_fuller_one_is_shown() -> None:
    fabric = product([Dimension("switch", 2, 50.0)])
    load = np.zeros(fabric.links)
    load[fabric.find("switch0.0->gpu1")] = 0.754
    said = next(each for each in titles(draw_svg(fabric, load), "path") if "gpu1" in each)
    assert said == "gpu1->switch0.0: 0% of 50 GB/s, switch0.0->gpu1: 75% of 50 GB/s (fabric)"
    assert "fullest: switch0.0-&gt;gpu1 75%" in draw_svg(fabric, load)
    assert "all links are idle" in draw_svg(fabric, 0.0 * load)


def test_rows_say_what_stands_in_them() -> None:
    fabric = fat_tree(BEHIND_PCIE, 16, rails=True)
    text = draw_svg(fabric, np.zeros(fabric.links))
    for said in ("4 spines", "8 leaves", "32 NICs", "32 GPUs", "4 NVSwitches", "leaf7", "nvswitch3", ">31<"):
        assert said in text
    level = dict(zip(fabric.nodes, number_levels(fabric).tolist(), strict=True))
    assert [level[name] for name in ("nvswitch0", "gpu0", "nic0", "leaf0", "spine0")] == [-1, 0, 1, 2, 3]


def test_of_a_large_fabric_servers_with_the_fullest_links_are_drawn() -> None:
    made = fat_tree(Servers(128, 8, NVLINK, IB), 64)
    load = np.zeros(made.links)
    (hot,) = made.find("gpu1000->leaf31")
    load[hot] = 1.0
    text = draw_svg(made, load)
    assert "gpu1000-&gt;leaf31: 100% of 50 GB/s" in text
    assert "880 ranks are not drawn" in text
    nodes = [name for name in titles(text, "rect") if name in made.index]
    assert {"gpu1000", "nvswitch125", "leaf31", "gpu0"} < set(nodes)
    assert sum(name.startswith("gpu") for name in nodes) == 144
    assert "leaf20" not in nodes  # nothing that is drawn is under it


def test_the_hottest_link_is_the_one_that_incast_fills() -> None:
    fabric = Fabric(product([Dimension("switch", 8, 50.0, 0.5)]))
    found = simulate(fabric, [Transfer("send", (rank, 0), 1e8) for rank in range(1, 8)])
    (name, share), (_, second) = hot_links(fabric.topology, found.utilisation(fabric.topology.bandwidth_gbps), 2)
    assert name == "switch0.0->gpu0"
    assert share == pytest.approx(1.0, rel=0.01)
    assert second == pytest.approx(1 / 7, rel=0.01)


def test_links_as_full_as_others_are_named_once() -> None:
    fabric = Fabric(product([Dimension("switch", 8, 12.5, 0.5, "ib")]))
    load = np.zeros(fabric.topology.links)
    load[:3], load[5] = 0.5, 0.7
    links, alike = fullest_kinds(fabric.topology, load)
    assert (links.tolist(), alike.tolist()) == ([5, 0], [1, 3])

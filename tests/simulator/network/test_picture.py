"""Pictures of fabrics: well-formed, every link of a small one, the fullest ones of a large one."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from opcast.simulator.network.fabric import Fabric, Transfer
from opcast.simulator.network.fidelity import simulate
from opcast.simulator.network.picture import hot_links, svg
from opcast.simulator.network.shapes import Dimension, Port, Servers, fat_tree, product

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str) -> tuple[int, int]:
    root = ElementTree.fromstring(text)
    return len(root.findall(f"{SVG}line")), len(root.findall(f"{SVG}circle"))


@pytest.mark.parametrize("shape", ["ring", "switch", "fully_connected", "torus"])
def test_a_small_fabric_is_drawn_whole(shape: str) -> None:
    made = product([Dimension(shape, 9, 50.0)])
    assert drawn(svg(made, np.zeros(made.links))) == (made.links, len(made.nodes))


def test_a_large_fabric_is_folded_but_its_hot_links_are_drawn() -> None:
    made = fat_tree(Servers(128, 8, Port(450.0, 0.5, "nvlink"), Port(50.0, 1.0)), 64)
    load = np.zeros(made.links)
    (hot,) = made.find("gpu1000->leaf31")
    load[hot] = 1.0
    text = svg(made, load)
    assert "gpu1000-&gt;leaf31: 100% of 50 GB/s" in text
    assert "896 ranks are not drawn" in text
    assert drawn(text)[1] < 300


def test_the_hottest_link_is_the_one_that_incast_fills() -> None:
    fabric = Fabric(product([Dimension("switch", 8, 50.0, 0.5)]))
    found = simulate(fabric, [Transfer("send", (rank, 0), 1e8) for rank in range(1, 8)])
    (name, share), (_, second) = hot_links(fabric.topology, found.utilisation(fabric.topology.bandwidth_gbps), 2)
    assert name == "switch0.0->gpu0"
    assert share == pytest.approx(1.0, rel=0.01)
    assert second == pytest.approx(1 / 7, rel=0.01)

"""A fabric drawn as layers, from ranks up to the top switches, each cable coloured and widened by its load.

Large fabrics are folded: servers beyond :data:`SHOWN` stand in the text, not in the drawing, unless their links are
among the fullest.
"""

from __future__ import annotations

import html

import numpy as np

from .topology import Topology

SHOWN = 128  # ranks drawn
WIDTH, LAYER, MARGIN = 1100.0, 130.0, 40.0
COOL, WARM = (0x5A, 0x8F, 0xD6), (0xC4, 0x40, 0x39)


def svg(topology: Topology, load: np.ndarray, title: str = "") -> str:
    """The fabric as SVG. ``load`` [links]: share of each link's capacity that is used, 0 to 1."""
    ranks = _chosen(topology, load)
    nodes, links = _part(topology, ranks)
    layer = _layers(topology)[nodes]
    place = dict(zip(nodes.tolist(), _places(layer), strict=True))
    height = LAYER * (int(layer.max(initial=0)) + 1) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{html.escape(title or topology.name)}</title>",
    ]
    for link in sorted(links.tolist(), key=lambda each: float(load[each])):
        (x1, y1), (x2, y2) = (place[int(end[link])] for end in (topology.source, topology.target))
        share = float(np.clip(load[link], 0.0, 1.0))
        parts.append(
            f'<line x1="{x1:.1f}" y1="{height - y1:.1f}" x2="{x2:.1f}" y2="{height - y2:.1f}" '
            f'stroke="{_colour(share)}" stroke-width="{0.5 + 3.0 * share:.2f}" opacity="{0.25 + 0.75 * share:.2f}">'
            f"<title>{html.escape(topology.link_name(link))}: {share:.0%} of {topology.bandwidth_gbps[link]:g} GB/s"
            "</title></line>"
        )
    for node, (x, y) in place.items():
        name = html.escape(topology.nodes[node])
        parts.append(f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="4" fill="#6d7580"><title>{name}</title></circle>')
    hidden = topology.ranks - len(ranks)
    note = f"{topology.name}: {topology.ranks} ranks, {topology.links} links"
    note += f"; {hidden} ranks are not drawn" if hidden else ""
    parts.append(f'<text x="{MARGIN}" y="{MARGIN / 2}" fill="#6d7580">{html.escape(note)}</text></svg>')
    return "\n".join(parts)


def hot_links(topology: Topology, load: np.ndarray, count: int = 10) -> list[tuple[str, float]]:
    """The fullest links by name and share of their capacity."""
    order = np.lexsort((np.arange(len(load)), -load))[:count]
    return [(topology.link_name(int(link)), float(load[link])) for link in order]


def _colour(share: float) -> str:
    return "#" + "".join(f"{round(cool + (warm - cool) * share):02x}" for cool, warm in zip(COOL, WARM, strict=True))


def _chosen(topology: Topology, load: np.ndarray) -> np.ndarray:
    """Ranks to draw: all of few; else those at the fullest links, then the first ones."""
    if topology.ranks <= SHOWN:
        return np.arange(topology.ranks)
    fullest = np.argsort(-load, kind="stable")[: SHOWN // 2]
    ends = np.concatenate([topology.source[fullest], topology.target[fullest]])
    hot = np.unique(ends[ends < topology.ranks])[: SHOWN // 2]
    return np.sort(np.concatenate([hot, np.setdiff1d(np.arange(topology.ranks), hot)[: SHOWN - len(hot)]]))


def _part(topology: Topology, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes that are drawn (chosen ranks, switches with a drawn cable) and their links."""
    shown = np.ones(len(topology.nodes), dtype=bool)
    shown[: topology.ranks] = False
    shown[ranks] = True
    for _ in range(len(topology.nodes)):  # drop switches whose only way down is hidden
        links = shown[topology.source] & shown[topology.target]
        used = np.zeros(len(topology.nodes), dtype=bool)
        used[topology.source[links]] = True
        used[ranks] = True
        if (used == shown).all():
            break
        shown &= used
    return np.flatnonzero(shown), np.flatnonzero(shown[topology.source] & shown[topology.target])


def _layers(topology: Topology) -> np.ndarray:
    """Hops from the nearest rank [nodes]: ranks 0, their switches 1, and so on."""
    layer = np.where(np.arange(len(topology.nodes)) < topology.ranks, 0, -1)
    for level in range(len(topology.nodes)):
        reached = topology.target[layer[topology.source] == level]
        fresh = reached[layer[reached] < 0]
        if not len(fresh):
            break
        layer[fresh] = level + 1
    return layer


def _places(layer: np.ndarray) -> list[tuple[float, float]]:
    """Each layer's nodes side by side; a fabric of ranks alone stands in a circle."""
    if not layer.any():
        turn = 2.0 * np.pi * np.arange(len(layer)) / max(len(layer), 1)
        radius = (LAYER - 4.0) / 2.0
        return [(WIDTH / 2 + 3 * radius * np.cos(t), MARGIN + LAYER / 2 + radius * np.sin(t)) for t in turn.tolist()]
    places: list[tuple[float, float]] = []
    seen: dict[int, int] = {}
    counts = np.bincount(layer)
    for level in layer.tolist():
        index = seen.get(level, 0)
        seen[level] = index + 1
        places.append((MARGIN + (WIDTH - 2 * MARGIN) * (index + 0.5) / counts[level], MARGIN + LAYER * (level + 0.5)))
    return places
